"""Rotary position embedding of queries and keys together (Su et al., arXiv:2104.09864), pairs (h, h + H/2) as in
Hugging Face's models.

``left' = left * cos - right * sin``, ``right' = right * cos + left * sin`` in fp32, rounded once; the expression of
PyTorch operations rounds each product. Backward is the transposed rotation, so only the tables are kept. Results have
the strides of what came in: attention reads transposed views without a copy.

Legend: B batch, S sequence, N query heads, K key heads, H head width, T positions of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.runtime.op import empty_of, register_op
from vblackwell.kernels.runtime.registry import runs_triton


def rotary(q_BNSH: Tensor, k_BKSH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (H even) and keys of the same batch, sequence and width turned by their positions' angles.

    ``cos``, ``sin``: (S, H) or (B or 1, S, H), of any floating-point type; on the CPU they are rounded to the queries'
    type first. Raises ConfigurationError for shapes that do not belong together.
    """
    _check(q_BNSH, k_BKSH, cos, sin)
    if runs_triton("rotary", q_BNSH, q_BNSH.shape[-1]):
        return _rotary(q_BNSH, k_BKSH, cos, sin, False)
    cos, sin = (table.to(q_BNSH.dtype) for table in (cos, sin))
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    return _rotate(q_BNSH, cos, sin), _rotate(k_BKSH, cos, sin)


def store_rotated(
    q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor, keys_BKTH: Tensor, values_BKTH: Tensor, cos_TH: Tensor, sin_TH: Tensor,
    position_1: Tensor,
) -> Tensor:  # fmt: skip
    """Put the rotated keys and the values at ``position_1`` (int64, on the device); returns the rotated queries (B, N,
    H).

    Tables are of all positions in fp32, as of `rotary_tables`. No gradient. Raises ConfigurationError where sizes do
    not fit.
    """
    if q_BNH.shape[-1] % 2 or k_BKH.shape != v_BKH.shape or keys_BKTH.shape[:2] != k_BKH.shape[:2]:
        raise ConfigurationError(
            f"queries {tuple(q_BNH.shape)}, keys {tuple(k_BKH.shape)} and values {tuple(v_BKH.shape)} "
            f"for a cache of {tuple(keys_BKTH.shape)}"
        )
    if runs_triton("store_rotated", q_BNH, q_BNH.shape[-1]):
        from vblackwell.kernels.pointwise import rotary_triton

        return rotary_triton.store(q_BNH, k_BKH, v_BKH, keys_BKTH, values_BKTH, cos_TH, sin_TH, position_1)
    tables = (cos_TH.index_select(0, position_1), sin_TH.index_select(0, position_1))
    q_BN1H, k_BK1H = rotary(q_BNH.unsqueeze(2), k_BKH.unsqueeze(2), *tables)
    keys_BKTH.index_copy_(2, position_1, k_BK1H)
    values_BKTH.index_copy_(2, position_1, v_BKH.unsqueeze(2))
    return q_BN1H.squeeze(2)


def _rotate(x_BNSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x_BNSH.chunk(2, dim=-1)
    return x_BNSH * cos + torch.cat((-right, left), dim=-1) * sin


def _check(q_BNSH: Tensor, k_BKSH: Tensor, cos: Tensor, sin: Tensor) -> None:
    batch, _, length, width = q_BNSH.shape
    same = (k_BKSH.shape[0], k_BKSH.shape[2], k_BKSH.shape[3]) == (batch, length, width)
    tables = cos.shape == sin.shape and cos.shape in ((length, width), (1, length, width), (batch, length, width))
    if not same or not tables or width % 2 or q_BNSH.dtype != k_BKSH.dtype:
        raise ConfigurationError(
            f"rotary of queries {tuple(q_BNSH.shape)} {q_BNSH.dtype}, "
            f"keys {tuple(k_BKSH.shape)} {k_BKSH.dtype} and tables "
            f"{tuple(cos.shape)}, {tuple(sin.shape)}: they do not belong together"
        )


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[2], inputs[3])
    ctx.inverse = inputs[4]


def _backward(ctx, dq_BNSH: Tensor, dk_BKSH: Tensor):  # type: ignore[no-untyped-def]
    return *_rotary(dq_BNSH, dk_BKSH, *ctx.saved_tensors, not ctx.inverse), None, None, None


@register_op(lambda q_BNSH, k_BKSH, *rest: (empty_of(q_BNSH), empty_of(k_BKSH)), save=_save, backward=_backward)
def _rotary(q_BNSH: Tensor, k_BKSH: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    from vblackwell.kernels.pointwise import rotary_triton

    return rotary_triton.rotate(q_BNSH, k_BKSH, cos, sin, inverse)
