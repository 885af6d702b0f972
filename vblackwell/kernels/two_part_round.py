"""Weights rounded to two parts on kept scales, straight through: what a forward multiplies by while the weight trains.

A custom op, for the reasons of nn/straight_through.py: no second copy is kept, and under torch.compile it is one node of the graph. The
gradient passes unchanged (Bengio et al. 2013). One Triton kernel on CUDA, the oracle elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.kernels.dispatch import refuse_forward_mode
from vblackwell.kernels.fused import runs_triton
from vblackwell.numerics import separation

OP = "two_part_round_trip"


@torch.library.custom_op("vblackwell::two_part_round_trip", mutates_args=())
def two_part_round_trip(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``w_NK`` rounded to both parts and back, as ``dtype``; the gradient passes unchanged.

    Args:
        w_NK: (N, K) float32, bfloat16 or float16.
        block_scales, tensor_scale: of `separation.Scales`; not differentiable.
        dtype: of the result.
    """
    refuse_forward_mode("two_part_round_trip")
    return rounded(w_NK, block_scales, tensor_scale, dtype)


def rounded(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As the op, without gradients and without what calling an op costs the host."""
    if runs_triton(OP, w_NK, 0):
        from vblackwell.kernels import two_part_triton

        return two_part_triton.round_to_parts(w_NK, block_scales, tensor_scale, dtype)
    return separation.round_to_parts(w_NK, separation.Scales(block_scales, tensor_scale), dtype)


@two_part_round_trip.register_fake
def _(w_NK, block_scales, tensor_scale, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(w_NK, dtype=dtype, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.dtype = inputs[0].dtype


def _backward(ctx, dw_NK: Tensor):  # type: ignore[no-untyped-def]
    return dw_NK.to(ctx.dtype), None, None, None


two_part_round_trip.register_autograd(_backward, setup_context=_save)
