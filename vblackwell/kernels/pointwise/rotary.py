"""Rotary position embedding of queries and keys together (Su et al., arXiv:2104.09864), pairs (h, h + H/2) as in Hugging Face's models.

``left' = left * cos - right * sin``, ``right' = right * cos + left * sin`` in fp32, rounded once; the expression of PyTorch operations
rounds each product. Backward is the transposed rotation, so only the tables are kept. Results have the strides of what came in:
queries that are a transposed view of a projection's output stay one, and attention reads them without a copy.

8 x 2048 positions, 20 heads of 128, bf16, H200: 91 us forward, 87 backward (the expression 1,175 and 1,240).

Legend: B batch, S sequence, N query heads, K key heads, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.runtime.registry import runs_triton


def rotary(q_BNSH: Tensor, k_BKSH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by their positions' angles.

    Args:
        q_BNSH: queries, H even.
        k_BKSH: keys, of the same batch, sequence and width.
        cos, sin: (S, H) or (B or 1, S, H), of any floating-point type; on the CPU they are rounded to the queries' type first.

    Raises:
        ConfigurationError: shapes that do not belong together.
    """
    _check(q_BNSH, k_BKSH, cos, sin)
    if runs_triton("rotary", q_BNSH, q_BNSH.shape[-1]):
        return _rotary(q_BNSH, k_BKSH, cos, sin, False)
    cos, sin = (table.to(q_BNSH.dtype) for table in (cos, sin))
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    return _rotate(q_BNSH, cos, sin), _rotate(k_BKSH, cos, sin)


def _rotate(x_BNSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x_BNSH.chunk(2, dim=-1)
    return x_BNSH * cos + torch.cat((-right, left), dim=-1) * sin


def _check(q_BNSH: Tensor, k_BKSH: Tensor, cos: Tensor, sin: Tensor) -> None:
    batch, _, length, width = q_BNSH.shape
    same = (k_BKSH.shape[0], k_BKSH.shape[2], k_BKSH.shape[3]) == (batch, length, width)
    tables = cos.shape == sin.shape and cos.shape in ((length, width), (1, length, width), (batch, length, width))
    if not same or not tables or width % 2 or q_BNSH.dtype != k_BKSH.dtype:
        raise ConfigurationError(
            f"rotary of queries {tuple(q_BNSH.shape)} {q_BNSH.dtype}, keys {tuple(k_BKSH.shape)} {k_BKSH.dtype} and tables "
            f"{tuple(cos.shape)}, {tuple(sin.shape)}: they do not belong together"
        )


def empty_of(x: Tensor) -> Tensor:
    """An empty tensor in the strides of ``x``, but for adjacent elements in the last dimension."""
    return torch.empty_like(x) if x.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("vblackwell::rotary", mutates_args=())
def _rotary(q_BNSH: Tensor, k_BKSH: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    from vblackwell.kernels.pointwise import rotary_triton

    return rotary_triton.rotate(q_BNSH, k_BKSH, cos, sin, inverse)


@_rotary.register_fake
def _(q_BNSH, k_BKSH, cos, sin, inverse):  # type: ignore[no-untyped-def]
    return empty_of(q_BNSH), empty_of(k_BKSH)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[2], inputs[3])
    ctx.inverse = inputs[4]


def _backward(ctx, dq_BNSH: Tensor, dk_BKSH: Tensor):  # type: ignore[no-untyped-def]
    return *_rotary(dq_BNSH, dk_BKSH, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rotary.register_autograd(_backward, setup_context=_save)
