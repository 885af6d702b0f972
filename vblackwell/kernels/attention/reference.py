"""Attention written out: scores of S x T in memory. The oracle of op.py's kernels, and the backend 'math'.

Legend: B batch, N query heads, K key heads, S queries, T keys, H head width.
"""

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError


def visible_ST(
    num_queries: int, num_keys: int, left: int | None, right: int | None, bottom_right: bool, device: torch.device
) -> Tensor | None:
    """Which keys a query sees by position alone, True where it does; None if all see all."""
    if left is None and right is None:
        return None
    offset = num_keys - num_queries if bottom_right else 0
    distance_ST = (
        torch.arange(num_keys, device=device)[None, :] - torch.arange(num_queries, device=device)[:, None] - offset
    )
    seen_ST = torch.ones_like(distance_ST, dtype=torch.bool)
    if left is not None:
        seen_ST &= distance_ST >= -left
    if right is not None:
        seen_ST &= distance_ST <= right
    return seen_ST


def attention_reference(
    q_BNSH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    *,
    mask: Tensor | None = None,
    left: int | None = None,
    right: int | None = None,
    bottom_right: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    slopes_N: Tensor | None = None,
    dropout: float = 0.0,
    keep_BNST: Tensor | None = None,
) -> Tensor:
    """softmax(cap(q k^T scale) - slope |i + offset - j| + mask) v in the inputs' type; rows that see nothing are zero.

    ``keep_BNST``: which probabilities dropout keeps; drawn by torch's generator if not given. Raises ConfigurationError
    where the query heads are no multiple of the key heads.
    """
    num_heads, kv_heads = q_BNSH.shape[1], k_BKTH.shape[1]
    if num_heads % kv_heads:
        raise ConfigurationError(f"{num_heads} query heads over {kv_heads} key heads: give a multiple")
    k_BNTH, v_BNTH = (x.repeat_interleave(num_heads // kv_heads, dim=1) for x in (k_BKTH, v_BKTH))
    num_queries, num_keys = q_BNSH.shape[2], k_BKTH.shape[2]
    scores = q_BNSH @ k_BNTH.transpose(-1, -2) * (q_BNSH.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes_N is not None:
        offset = num_keys - num_queries if bottom_right else 0
        rows, cols = torch.arange(num_queries, device=scores.device), torch.arange(num_keys, device=scores.device)
        distance_ST = (rows[:, None] + offset - cols[None, :]).abs()
        scores = scores - slopes_N.to(scores.dtype)[:, None, None] * distance_ST
    seen = visible_ST(num_queries, num_keys, left, right, bottom_right, scores.device)
    if mask is not None and mask.dtype == torch.bool:
        seen = mask if seen is None else seen & mask
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
        seen = (mask > float("-inf")) if seen is None else seen & (mask > float("-inf"))
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
        # A row that sees nothing would be NaN, in backward too: it gets equal scores, no probability is kept.
        scores = scores.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    p_BNST = scores.softmax(-1)
    if seen is not None:
        p_BNST = p_BNST.masked_fill(~seen, 0.0)
    if dropout and keep_BNST is None:
        keep_BNST = torch.rand(p_BNST.shape, device=p_BNST.device) >= dropout
    if keep_BNST is not None:
        p_BNST = p_BNST * keep_BNST / (1.0 - dropout)
    return p_BNST @ v_BNTH
