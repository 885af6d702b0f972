"""FlexAttention (torch.nn.attention.flex_attention), compiled, for what attention_backends.py asks.

Legend: B batch, N query heads, K key heads, S queries, T keys, H head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from vblackwell.errors import Unsupported
from vblackwell.kernels.attention.op import bounds

if TYPE_CHECKING:
    from vblackwell.nn.attention.backends import Variant

MOST_SHAPES = 256  # a few seconds each; torch's own limit is 8


@functools.lru_cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache
def _compiled_blocks() -> Callable[..., Any]:
    return torch.compile(create_block_mask, dynamic=False)


@functools.lru_cache(maxsize=8)
def _bounded(
    num_queries: int, num_keys: int, offset: int, left: int | None, right: int | None, device: torch.device
) -> BlockMask:
    """What bounds alone leave visible: a matter of the shape, so it is kept."""

    def seen(b: Tensor, n: Tensor, row: Tensor, col: Tensor) -> Tensor:
        inside = row >= 0
        if right is not None:
            inside = inside & (col <= row + offset + right)
        return inside if left is None else inside & (col >= row + offset - left)

    return _compiled_blocks()(seen, None, None, num_queries, num_keys, device=device)


def block_mask(q_BNSH: Tensor, k_BKTH: Tensor, variant: Variant) -> BlockMask | None:
    """What is visible, as FlexAttention wants it; None if everything is. Made anew for every mask, whose values may have changed."""
    left, right = bounds(variant.causal, variant.window)
    mask, num_queries, num_keys = variant.mask, q_BNSH.shape[2], k_BKTH.shape[2]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask > float("-inf")
    if left is None and right is None and mask is None:
        return None
    offset = num_keys - num_queries if variant.bottom_right else 0
    if mask is None:
        return _bounded(num_queries, num_keys, offset, left, right, q_BNSH.device)
    expanded = mask.expand(q_BNSH.shape[0], q_BNSH.shape[1], num_queries, num_keys)

    def seen(b: Tensor, n: Tensor, row: Tensor, col: Tensor) -> Tensor:
        inside = row >= 0
        if right is not None:
            inside = inside & (col <= row + offset + right)
        if left is not None:
            inside = inside & (col >= row + offset - left)
        return inside & expanded[b, n, row, col]

    whole = tuple(mask[(None,) * (4 - mask.dim())].shape)
    batch = None if whole[0] == 1 else whole[0]
    heads = None if whole[1] == 1 else whole[1]
    return _compiled_blocks()(seen, batch, heads, num_queries, num_keys, device=q_BNSH.device)


def score_change(q_BNSH: Tensor, k_BKTH: Tensor, variant: Variant) -> Callable[..., Tensor] | None:
    """Soft cap, ALiBi and additive mask as FlexAttention wants them; None if there are none."""
    softcap, slopes_N = variant.softcap, variant.alibi_slopes_N
    additive = variant.mask if variant.mask is not None and variant.mask.dtype != torch.bool else None
    if softcap is None and slopes_N is None and additive is None:
        return None
    num_queries, num_keys = q_BNSH.shape[2], k_BKTH.shape[2]
    offset = num_keys - num_queries if variant.bottom_right else 0
    expanded = None if additive is None else additive.expand(q_BNSH.shape[0], q_BNSH.shape[1], num_queries, num_keys)

    def change(score: Tensor, b: Tensor, n: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes_N is not None:
            score = score - slopes_N[n] * (row + offset - col).abs()
        return score if expanded is None else score + expanded[b, n, row, col]

    return change


def flex(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, variant: Variant, blocks: BlockMask | None = None) -> Tensor:
    """The attention; ``blocks`` may be made beforehand.

    Raises:
        Unsupported: `MOST_SHAPES` shapes were compiled in this process already.
    """
    # Behind its limit torch would run the uncompiled expression, which holds every score.
    limits = dynamo_config.patch(
        recompile_limit=MOST_SHAPES, accumulated_recompile_limit=2 * MOST_SHAPES, fail_on_recompile_limit_hit=True
    )
    try:
        with limits:
            return _compiled()(
                q_BNSH, k_BKTH, v_BKTH, score_mod=score_change(q_BNSH, k_BKTH, variant),
                block_mask=block_mask(q_BNSH, k_BKTH, variant) if blocks is None else blocks, scale=variant.scale,
                enable_gqa=q_BNSH.shape[1] != k_BKTH.shape[1],
            )  # fmt: skip
    except FailOnRecompileLimitHit as error:
        raise Unsupported(
            f"FlexAttention is compiled for every shape, and this process has asked for {MOST_SHAPES}: use another backend, or pad "
            "lengths to fewer different ones"
        ) from error
