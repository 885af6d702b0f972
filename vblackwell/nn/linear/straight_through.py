"""Straight-through rounding of weights: forward in FP4, gradient as if nothing had been rounded (Bengio et al. 2013).

A custom op rather than ``w + (round(w) - w).detach()``: that keeps two more copies of the weight and is not exactly the
rounded value; and under torch.compile the codec's loop over tiles stays one node of the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.numerics.formats import format_named
from vblackwell.numerics.round_trip import round_trip


@torch.library.custom_op("vblackwell::fp4_round_trip", mutates_args=())
def fp4_round_trip(w_NK: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """``w_NK`` rounded to ``format`` with `max` scales and back, as ``dtype``; the gradient passes unchanged.

    Args:
        w_NK: (N, K) float32, bfloat16 or float16.
        format: 'nvfp4', 'mxfp4', 'nf4', 'int4' or 'int8', with its default block.
        dtype: of the result.
    """
    return round_trip(w_NK, format_named(format), dtype)


@fp4_round_trip.register_fake
def _(w_NK, format, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(w_NK, dtype=dtype, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.dtype = inputs[0].dtype


def _backward(ctx, dw_NK: Tensor):  # type: ignore[no-untyped-def]
    return dw_NK.to(ctx.dtype), None, None


fp4_round_trip.register_autograd(_backward, setup_context=_save)
