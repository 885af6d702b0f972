"""Weights rounded to two parts on kept scales, straight through (Bengio et al. 2013): what a forward multiplies by
while the weight trains. A custom op: no second copy is kept, and torch.compile sees one node. On a GPU it is a kernel
(``cuda/two_part_round.cu``), launched by address because a step rounds hundreds of weights; elsewhere the oracle.
"""

import functools

import torch
from torch import Tensor

from vblackwell.errors import Unsupported
from vblackwell.kernels.fp4.launch import OUT_TYPES
from vblackwell.kernels.runtime import nvrtc, registry
from vblackwell.kernels.runtime.launch import Launcher, float_bits, kernel
from vblackwell.kernels.runtime.registry import DTYPES, register_op
from vblackwell.numerics import separation
from vblackwell.numerics.separation import Scales

FILES = ("ptx.cuh", "fp4/two_part_round.cu")
THREADS = 256
MAX_CTAS = 264  # that measure drift: two a multiprocessor of an H200, on every GPU, because sums depend on it


def macros(source: torch.dtype, target: torch.dtype) -> dict[str, int]:
    return {"FP16": 0, "IN": OUT_TYPES[source], "OUT": OUT_TYPES[target]}


def _by_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return registry.capability(device) >= (8, 0) and dtype in DTYPES and not nvrtc.why_not()


@functools.cache
def _launcher(entry: str, source: torch.dtype, target: torch.dtype, arguments: int, device: torch.device) -> Launcher:
    shared_bytes = 0 if entry == "two_part_round" else 12 * THREADS
    return Launcher(kernel(FILES, entry, macros(source, target), device), THREADS, shared_bytes, arguments)


@functools.lru_cache(4096)  # a step rounds hundreds of weights
def _rounding(
    n: int, k: int, stride: int, source: torch.dtype, target: torch.dtype, device: torch.device
) -> tuple[Launcher, tuple[int, int, int], bool]:
    """(launcher, grid, whether blocks of 16 columns are whole and rows 16 bytes apart)."""
    whole = k % 16 == 0 and stride * source.itemsize % 16 == 0
    return _launcher("two_part_round", source, target, 8, device), (-(-n * -(-k // 16) // THREADS), 1, 1), whole


def rounded(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`two_part_round_trip` without gradients and without what calling an op costs the host; on a GPU as
    `separation.round_to_parts` but for the sign of zeros. Raises Unsupported there where the weight has no address: a
    DTensor, or one whose memory is elsewhere."""
    registry.refuse_forward_mode("two_part_round_trip")
    device = w_NK.device
    if not _by_kernel(device, w_NK.dtype):
        return separation.round_to_parts(w_NK, Scales(block_scales, tensor_scale), dtype)
    if dtype not in DTYPES:  # written as wide as the oracle computes
        return rounded(w_NK, block_scales, tensor_scale, torch.float32).to(dtype)
    (n, k), (stride, step) = w_NK.shape, w_NK.stride()
    if step != 1 and k != 1:  # ``contiguous`` leaves a single column as it is
        return rounded(w_NK.contiguous(), block_scales, tensor_scale, dtype)
    out = torch.empty((n, k), dtype=dtype, device=device)
    if n and k:
        launcher, grid, whole = _rounding(n, k, stride, w_NK.dtype, dtype, device)
        source, target = w_NK.data_ptr(), out.data_ptr()
        if not source:  # the GPU would fault, and with it all that the process has there
            raise Unsupported(f"a {type(w_NK).__name__} of {(n, k)} has no memory to be rounded from")
        at = (source, block_scales.data_ptr(), tensor_scale.data_ptr(), target)
        launcher.queue(grid, (*at, n, k, stride, int(whole and (source | target) % 16 == 0)))
    return out


def renewed_scales(w_NK: Tensor, kept: Scales | None, threshold: float) -> tuple[Scales, Tensor]:
    """`separation.renewed_scales`, on a GPU with sums in another order; without ``kept`` new ones, and a drift of 0."""
    (n, k), device = w_NK.shape, w_NK.device
    # In a trace, or of a DTensor: torch has its rules for them, or its own error.
    if not (registry.computes_at_once() and w_NK.data_ptr() and _by_kernel(device, w_NK.dtype)):
        if kept is None:
            return separation.training_scales(w_NK), torch.zeros((), device=device)
        return separation.renewed_scales(w_NK, kept, threshold)
    w_NK = w_NK.detach()
    if w_NK.stride(1) != 1:
        w_NK = w_NK.contiguous()
    total = n * -(-k // 16)
    ctas = min(MAX_CTAS, -(-total // THREADS))
    block = torch.empty(n, -(-k // 16), dtype=torch.uint8, device=device)
    fp32 = functools.partial(torch.empty, dtype=torch.float32, device=device)
    tensor, drift, scratch = fp32(()), fp32(()), fp32(total + 3 * ctas)
    amax, old = scratch.data_ptr(), (0, 0) if kept is None else (kept.block.data_ptr(), kept.tensor.data_ptr())
    partials = amax + 4 * total
    measure = _launcher("two_part_measure", w_NK.dtype, w_NK.dtype, 10, device)
    source, stride = w_NK.data_ptr(), w_NK.stride(0)
    whole = k % 16 == 0 and (source | stride * w_NK.itemsize) % 16 == 0  # blocks of 16 columns, and 16 bytes apart
    measure.queue((ctas, 1, 1), (source, *old, amax, partials, n, k, stride, int(whole), ctas))
    at = (amax, partials, *old, block.data_ptr(), tensor.data_ptr(), drift.data_ptr())
    renew = _launcher("two_part_renew", w_NK.dtype, w_NK.dtype, 10, device)
    renew.queue((-(-total // (4 * THREADS)), 1, 1), (*at, total, ctas, float_bits(threshold)))
    return Scales(block, tensor), drift


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.dtype = inputs[0].dtype


@register_op(
    lambda w_NK, block, tensor, dtype: torch.empty_like(w_NK, dtype=dtype, memory_format=torch.contiguous_format),
    save=_save,
    backward=lambda ctx, dw_NK: (dw_NK.to(ctx.dtype), None, None, None),
)
def two_part_round_trip(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``w_NK`` (N, K), float32, bfloat16 or float16, rounded to both parts of `separation.Scales` and back, as
    ``dtype``; the gradient passes unchanged."""
    return rounded(w_NK, block_scales, tensor_scale, dtype)
