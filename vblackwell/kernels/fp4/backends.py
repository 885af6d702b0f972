"""The backends of the FP4 ops, in order of preference, with what each refuses.

``mma`` and ``wgmma`` are fused kernels on tiled weights (fp4_cuda.py); ``dequantize`` writes the weight out once and calls cuBLAS,
which wins for many rows; ``reference`` is pure torch.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vblackwell.kernels.fp4 import blocks as fp4_blocks
from vblackwell.kernels.fp4 import launch as fp4_cuda
from vblackwell.kernels.fp4 import layout, reference
from vblackwell.kernels.fp4 import mma_plan as fp4_mma_plan
from vblackwell.kernels.fp4 import plan as fp4_plan
from vblackwell.kernels.runtime import autotune, nvrtc
from vblackwell.kernels.runtime.dispatch import Backend, Request, capability, choose, device_reasons, request_of

HALVES = (torch.bfloat16, torch.float16)


@functools.lru_cache
def _compiler_reasons() -> tuple[str, ...]:
    return tuple(nvrtc.why_not())


def _fused_reasons(request: Request) -> list[str]:
    reasons = device_reasons(request) or [*_compiler_reasons()]
    if not layout.is_tiled(request.format):
        reasons.append(f"format {request.format!r} is not tiled: convert it with kernels.layout.to_tiled")
    return reasons


def linear_reasons(request: Request) -> list[str]:
    """Why no kernel that reads tiles can take ``request``."""
    reasons = _fused_reasons(request)
    if request.dtype not in HALVES:
        reasons.append(f"activations are {request.dtype}: it takes bfloat16 and float16")
    return reasons


def _mma_reasons(request: Request) -> list[str]:
    reasons = linear_reasons(request)
    most = fp4_mma_plan.most_mma_rows(request.capability, request.n, request.k)
    if request.m > most:
        reasons.append(f"{request.m} rows: above {most} another backend is faster for {request.n} features on this GPU")
    return reasons


def _wgmma_reasons(request: Request) -> list[str]:
    reasons = linear_reasons(request)
    if request.device.type == "cuda" and request.capability != (9, 0):
        reasons.append(f"compute capability {request.capability[0]}.{request.capability[1]}: it needs 9.0 (Hopper)")
    if not fp4_plan.wgmma_beats_dequantize(request.m, request.n, request.k):
        reasons.append(f"{request.m} rows: dequantising once is faster for {request.n} x {request.k}")
    return reasons


def _none(request: Request) -> list[str]:
    return []


def _cuda_only(request: Request) -> list[str]:
    return [] if request.device.type == "cuda" else [f"the tensors are on {request.device}: it needs a CUDA GPU"]


def _mma(x_MK, codes, block_scales, tensor_scale, bias, format, activation, n, k) -> Tensor:  # type: ignore[no-untyped-def]
    plan = autotune.tuned(
        fp4_mma_plan.plan_mma(x_MK.shape[0], n, k, fp4_blocks.has_clusters(capability(x_MK.device))), x_MK, n, k
    )
    return fp4_cuda.run_mma(plan, x_MK, codes, block_scales, tensor_scale, like(bias, x_MK), activation, n)


def _wgmma(x_MK, codes, block_scales, tensor_scale, bias, format, activation, n, k) -> Tensor:  # type: ignore[no-untyped-def]
    plan = autotune.tuned(fp4_plan.plan_wgmma(x_MK.shape[0], n, k), x_MK, n, k)
    return fp4_cuda.run_wgmma(plan, x_MK, codes, block_scales, tensor_scale, like(bias, x_MK), activation, n)


def like(bias: Tensor | None, x_MK: Tensor) -> Tensor | None:
    """``bias`` in the type of ``x_MK``, contiguous."""
    return None if bias is None else bias.to(x_MK.dtype).contiguous()


def _dequantize_linear(x_MK, codes, block_scales, tensor_scale, bias, format, activation, n, k) -> Tensor:  # type: ignore[no-untyped-def]
    w_NK = dequantized(codes, block_scales, tensor_scale, format, n, k, x_MK)
    return reference.activate(torch.nn.functional.linear(x_MK, w_NK, like(bias, x_MK)), activation)


def _dequantize_fused(
    codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    return fp4_cuda.run_dequantize(codes, block_scales, tensor_scale, n, k, dtype)


def _dequantize_reference(
    codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    return reference.dequantize(codes, block_scales, tensor_scale, format, n, k).to(dtype)


DEQUANTIZE: tuple[Backend, ...] = (
    Backend("cuda", _fused_reasons, _dequantize_fused),
    Backend("reference", _none, _dequantize_reference),
)


def dequantized(
    codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int, like: Tensor
) -> Tensor:
    """The weight in the type and on the device of ``like``, by the best backend."""
    request = request_of(like.new_empty((1, k)), format, n, k)
    backend = choose("fp4_dequantize", DEQUANTIZE, request)
    return backend.run(codes, block_scales, tensor_scale, format, n, k, like.dtype)


def _dx_dequantize(
    dy_MN: Tensor, codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int
) -> Tensor:
    return dy_MN @ dequantized(codes, block_scales, tensor_scale, format, n, k, dy_MN)


LINEAR: tuple[Backend, ...] = (
    Backend("mma", _mma_reasons, _mma),
    Backend("wgmma", _wgmma_reasons, _wgmma),
    Backend("dequantize", _cuda_only, _dequantize_linear),
    Backend("reference", _none, reference.linear),
)
LINEAR_DX: tuple[Backend, ...] = (Backend("dequantize", _none, _dx_dequantize),)
