"""Weights rounded to two parts on kept scales, straight through: what a forward multiplies by while the weight trains.

A custom op, for the reasons of nn/linear/straight_through.py: no second copy is kept, and under torch.compile it is
one node of the graph. The
gradient passes unchanged (Bengio et al. 2013). Backends: ``cuda``, a kernel that is launched by address, because a step rounds hundreds of
weights and the host's time for a launch counts as often; ``triton``, the same where NVRTC is not installed; ``torch``, the oracle,
elsewhere.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from vblackwell.kernels.runtime import nvrtc
from vblackwell.kernels.runtime.dispatch import (
    Backend,
    Request,
    capability,
    choose,
    chosen,
    computes_at_once,
    device_reasons,
    refuse_forward_mode,
)
from vblackwell.kernels.runtime.fused import DTYPES, triton_reasons
from vblackwell.numerics import separation

OP = "two_part_round_trip"


class Rounder(Protocol):
    """`two_part_round_cuda.Rounder`."""

    def takes(self, w_NK: Tensor, dtype: torch.dtype, /) -> bool: ...
    def __call__(self, w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, /) -> Tensor: ...


@functools.cache
def _request(op: str, device: torch.device, dtype: torch.dtype) -> Request:
    return Request(device, capability(device), dtype, op, 0, 0, 0)


def _cuda_reasons(request: Request) -> list[str]:
    reasons = device_reasons(request)
    if request.dtype not in DTYPES:
        reasons.append(f"the weight is {request.dtype}: it takes bfloat16, float16 and float32")
    return reasons + nvrtc.why_not()


def _cuda(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    from vblackwell.kernels.fp4 import two_part_round_launch as two_part_round_cuda

    written = dtype if dtype in DTYPES else torch.float32  # as wide as the oracle computes
    return two_part_round_cuda.round_to_parts(w_NK, block_scales, tensor_scale, written).to(dtype)


def _triton(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    from vblackwell.kernels.fp4 import two_part_triton

    return two_part_triton.round_to_parts(w_NK, block_scales, tensor_scale, dtype)


def _torch(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return separation.round_to_parts(w_NK, separation.Scales(block_scales, tensor_scale), dtype)


_CUDA, _TRITON = Backend("cuda", _cuda_reasons, _cuda), Backend("triton", triton_reasons, _triton)
_TORCH = Backend("torch", lambda request: [], _torch)
# By device, because on the CPU Triton's kernel runs for tests alone.
_TABLES = {"cuda": (_CUDA, _TRITON, _TORCH), "cpu": (_TORCH, _CUDA, _TRITON)}


def _torch_renewed(w_NK: Tensor, kept: separation.Scales | None, threshold: float) -> tuple[separation.Scales, Tensor]:
    if kept is None:
        return separation.training_scales(w_NK), torch.zeros((), device=w_NK.device)
    return separation.renewed_scales(w_NK, kept, threshold)


def _cuda_renewed(w_NK: Tensor, kept: separation.Scales | None, threshold: float) -> tuple[separation.Scales, Tensor]:
    from vblackwell.kernels.fp4 import two_part_round_launch as two_part_round_cuda

    return two_part_round_cuda.renewed_scales(w_NK, kept, threshold)


RENEWAL = "two_part_renewed_scales"
_RENEWALS = (Backend("cuda", _cuda_reasons, _cuda_renewed), Backend("torch", lambda request: [], _torch_renewed))


def renewed_scales(w_NK: Tensor, kept: separation.Scales | None, threshold: float) -> tuple[separation.Scales, Tensor]:
    """`separation.renewed_scales`, or without ``kept`` `separation.training_scales`; and the drift. No gradients, nothing waits."""
    # In a trace, or a DTensor: torch has its rules for them, or its own error.
    if not computes_at_once() or not w_NK.data_ptr():
        return _torch_renewed(w_NK, kept, threshold)
    return choose(RENEWAL, _RENEWALS, _request(RENEWAL, w_NK.device, w_NK.dtype)).run(w_NK, kept, threshold)


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
    request = _request(OP, w_NK.device, w_NK.dtype)
    backend = choose(OP, _TABLES.get(request.device.type, (_TORCH,)), request)
    return backend.run(w_NK, block_scales, tensor_scale, dtype)


def rounded_again(
    rounder: Rounder | None, w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype
) -> tuple[Rounder | None, Tensor]:
    """`rounded`, for a weight that is rounded at every step: (what to come back with, the rounded weight).

    Args:
        rounder: what the last call for a weight of this shape gave, or None.
    """
    if not w_NK.is_cuda or chosen(OP) is not None or dtype not in DTYPES:
        return None, rounded(w_NK, block_scales, tensor_scale, dtype)
    if rounder is None or not rounder.takes(w_NK, dtype):
        if choose(OP, _TABLES["cuda"], _request(OP, w_NK.device, w_NK.dtype)) is not _CUDA:
            return None, rounded(w_NK, block_scales, tensor_scale, dtype)
        from vblackwell.kernels.fp4 import two_part_round_launch as two_part_round_cuda

        rounder = two_part_round_cuda.Rounder(w_NK, dtype)
    return rounder, rounder(w_NK, block_scales, tensor_scale)


@two_part_round_trip.register_fake
def _(w_NK, block_scales, tensor_scale, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(w_NK, dtype=dtype, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.dtype = inputs[0].dtype


def _backward(ctx, dw_NK: Tensor):  # type: ignore[no-untyped-def]
    return dw_NK.to(ctx.dtype), None, None, None


two_part_round_trip.register_autograd(_backward, setup_context=_save)
