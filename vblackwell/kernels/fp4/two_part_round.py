"""Weights rounded to two parts on kept scales, straight through (Bengio et al. 2013): what a forward multiplies by
while the weight trains. A custom op: no second copy is kept, and torch.compile sees one node.

Backends: ``cuda`` (``cuda/two_part_round.cu``), launched by address because a step rounds hundreds of weights;
``torch``, the oracle, elsewhere.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vblackwell.errors import Unsupported
from vblackwell.kernels.fp4.launch import OUT_TYPES
from vblackwell.kernels.runtime import nvrtc, registry
from vblackwell.kernels.runtime.launch import Launcher, float_bits, kernel
from vblackwell.kernels.runtime.registry import DTYPES, Backend, Request, accept, choose, register_op
from vblackwell.numerics import separation
from vblackwell.numerics.separation import Scales

OP, RENEWAL = "two_part_round_trip", "two_part_renewed_scales"
FILES = ("ptx.cuh", "fp4/two_part_round.cu")
THREADS = 256
MAX_CTAS = 264  # that measure drift: two a multiprocessor of an H200, on every GPU, because sums depend on it


def macros(source: torch.dtype, target: torch.dtype) -> dict[str, int]:
    return {"FP16": 0, "IN": OUT_TYPES[source], "OUT": OUT_TYPES[target]}


@functools.cache
def _launcher(entry: str, source: torch.dtype, target: torch.dtype, arguments: int, device: torch.device) -> Launcher:
    shared_bytes = 0 if entry == "two_part_round" else 12 * THREADS
    return Launcher(kernel(FILES, entry, macros(source, target), device), THREADS, shared_bytes, arguments)


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore[reportAttributeAccessIssue]


@functools.lru_cache(4096)  # a step rounds hundreds of weights
def _rounding(
    n: int, k: int, stride: int, source: torch.dtype, target: torch.dtype, device: torch.device
) -> tuple[Launcher, tuple[int, int, int], bool]:
    """(launcher, grid, whether blocks of 16 columns are whole and rows 16 bytes apart)."""
    whole = k % 16 == 0 and stride * source.itemsize % 16 == 0
    return _launcher("two_part_round", source, target, 8, device), (-(-n * -(-k // 16) // THREADS), 1, 1), whole


def round_to_parts(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`separation.round_to_parts`, bit for bit but for the sign of zeros, on the current stream.

    Raises:
        Unsupported: the weight has no address: a DTensor, or one whose memory is elsewhere.
    """
    (n, k), (stride, step), device = w_NK.shape, w_NK.stride(), w_NK.device
    if step != 1 and k != 1:  # ``contiguous`` leaves a single column as it is
        return round_to_parts(w_NK.contiguous(), block_scales, tensor_scale, dtype)
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return round_to_parts(w_NK, block_scales, tensor_scale, dtype)
    out = torch.empty((n, k), dtype=dtype, device=device)
    if n and k:
        launch, grid, whole = _rounding(n, k, stride, w_NK.dtype, dtype, device)
        source, target = w_NK.data_ptr(), out.data_ptr()
        if not source:  # the GPU would fault, and with it all that the process has there
            raise Unsupported(f"a {type(w_NK).__name__} of {(n, k)} has no memory to be rounded from")
        at = (source, block_scales.data_ptr(), tensor_scale.data_ptr(), target)
        launch(grid, (*at, n, k, stride, int(whole and (source | target) % 16 == 0)), _stream(device))
    return out


def run_renewed_scales(w_NK: Tensor, kept: Scales | None, threshold: float) -> tuple[Scales, Tensor]:
    """`separation.renewed_scales`, or without ``kept`` `separation.training_scales` and a drift of 0; sums in another
    order.
    """
    w_NK = w_NK.detach()
    if w_NK.stride(1) != 1:
        w_NK = w_NK.contiguous()
    (n, k), device = w_NK.shape, w_NK.device
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return run_renewed_scales(w_NK, kept, threshold)
    total = n * -(-k // 16)
    ctas = min(MAX_CTAS, -(-total // THREADS))
    found = Scales(
        torch.empty(n, -(-k // 16), dtype=torch.uint8, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )
    scratch = torch.empty(total + 3 * ctas, dtype=torch.float32, device=device)
    drift = torch.empty((), dtype=torch.float32, device=device)
    amax, old = scratch.data_ptr(), (0, 0) if kept is None else (kept.block.data_ptr(), kept.tensor.data_ptr())
    partials, stream = amax + 4 * total, _stream(device)
    measure = _launcher("two_part_measure", w_NK.dtype, w_NK.dtype, 10, device)
    source, stride = w_NK.data_ptr(), w_NK.stride(0)
    whole = k % 16 == 0 and (source | stride * w_NK.itemsize) % 16 == 0  # blocks of 16 columns, and 16 bytes apart
    measure((ctas, 1, 1), (source, *old, amax, partials, n, k, stride, int(whole), ctas), stream)
    at = (amax, partials, *old, found.block.data_ptr(), found.tensor.data_ptr(), drift.data_ptr())
    renew = _launcher("two_part_renew", w_NK.dtype, w_NK.dtype, 10, device)
    renew((-(-total // (4 * THREADS)), 1, 1), (*at, total, ctas, float_bits(threshold)), stream)
    return found, drift


@functools.cache
def _request(op: str, device: torch.device, dtype: torch.dtype) -> Request:
    return Request(device, registry.capability(device), dtype, op, 0, 0, 0)


def _cuda_reasons(request: Request) -> list[str]:
    types = registry.dtype_reasons(request.dtype, DTYPES, "the weight is")
    return [*registry.device_reasons(request), *types, *nvrtc.why_not()]


def _cuda(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    written = dtype if dtype in DTYPES else torch.float32  # as wide as the oracle computes
    return round_to_parts(w_NK, block_scales, tensor_scale, written).to(dtype)


def _torch(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return separation.round_to_parts(w_NK, Scales(block_scales, tensor_scale), dtype)


def _torch_renewed(w_NK: Tensor, kept: Scales | None, threshold: float) -> tuple[Scales, Tensor]:
    if kept is None:
        return separation.training_scales(w_NK), torch.zeros((), device=w_NK.device)
    return separation.renewed_scales(w_NK, kept, threshold)


_ROUNDING = (Backend("cuda", _cuda_reasons, _cuda), Backend("torch", accept, _torch))
_RENEWALS = (Backend("cuda", _cuda_reasons, run_renewed_scales), Backend("torch", accept, _torch_renewed))


def renewed_scales(w_NK: Tensor, kept: Scales | None, threshold: float) -> tuple[Scales, Tensor]:
    """`run_renewed_scales`, or its oracle where the kernel cannot run. No gradients, nothing waits."""
    # In a trace, or a DTensor: torch has its rules for them, or its own error.
    if not registry.computes_at_once() or not w_NK.data_ptr():
        return _torch_renewed(w_NK, kept, threshold)
    return choose(RENEWAL, _RENEWALS, _request(RENEWAL, w_NK.device, w_NK.dtype)).run(w_NK, kept, threshold)


@functools.cache
def _takes(device: torch.device, source: torch.dtype) -> bool:
    return not _cuda_reasons(_request(OP, device, source))


def rounded(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As the op, without gradients and without what calling an op costs the host."""
    asked = registry.chosen(OP) is not None or registry.differentiating_forward()
    if w_NK.is_cuda and not asked and dtype in DTYPES and _takes(w_NK.device, w_NK.dtype):
        return round_to_parts(w_NK, block_scales, tensor_scale, dtype)
    request = _request(OP, w_NK.device, w_NK.dtype)
    return choose(OP, _ROUNDING, request).run(w_NK, block_scales, tensor_scale, dtype)


def _fake(w_NK, block_scales, tensor_scale, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(w_NK, dtype=dtype, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.dtype = inputs[0].dtype


def _backward(ctx, dw_NK: Tensor):  # type: ignore[no-untyped-def]
    return dw_NK.to(ctx.dtype), None, None, None


@register_op(_fake, save=_save, backward=_backward)
def two_part_round_trip(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``w_NK`` (N, K), float32, bfloat16 or float16, rounded to both parts of `separation.Scales` and back, as
    ``dtype``; the gradient passes unchanged.
    """
    registry.refuse_forward_mode("two_part_round_trip")
    return rounded(w_NK, block_scales, tensor_scale, dtype)
