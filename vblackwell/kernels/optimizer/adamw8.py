"""AdamW with moments of 8 bits, for links too slow for exact ones: 2 bytes an element and two scales per 256 instead of 8.

A stated choice, never a silent default: results differ from exact AdamW (formats and reasons in `adamw8_cpu.py`). With a remainder the
master is exact in fp32; without one the bf16 weight is all there is, rounded at random. CPU and GPU give the same bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vblackwell.errors import Unsupported
from vblackwell.kernels.optimizer import adamw8_cpu
from vblackwell.kernels.optimizer.adamw import (
    FP32,
    GRADIENTS,
    PREVIOUS,
    THREADS,
    aligned,
    check,
    check_factor,
    check_gradients,
)
from vblackwell.kernels.optimizer.adamw8_cpu import SCALE_BLOCK
from vblackwell.kernels.optimizer.adamw_cpu import BLOCK, AdamWStep
from vblackwell.kernels.runtime.launch import Kernel, kernel

__all__ = ["SCALE_BLOCK", "adamw8_piece"]

FILES = ("ptx.cuh", "optimizer/gradient.cuh", "optimizer/adamw8.cu")
_SPLIT, _FP32, _STOCHASTIC = 0, 1, 2


def macros(weight: int, gradient: torch.dtype, previous: torch.dtype | None) -> dict[str, int]:
    """What ``adamw8.cu`` is compiled with."""
    return {"FP16": 0, "WEIGHT": weight, "GRADIENT": GRADIENTS[gradient], "PREVIOUS": PREVIOUS[previous]}


@functools.cache
def _kernel(weight: int, gradient: torch.dtype, previous: torch.dtype | None, device: torch.device) -> Kernel:
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise Unsupported(
            f"{device} is older than sm_80, which AdamW with 8-bit moments needs: update on the CPU instead"
        )
    return kernel(FILES, "adamw8", macros(weight, gradient, previous), device)


def counter_args(seed: int, step: int, offset: int) -> tuple[int, int, int, int]:
    """The kernel's (first_low, first_high, key, salt), as signed 32-bit numbers."""
    words = (offset & 0xFFFFFFFF, offset >> 32, *adamw8_cpu.counter_words(seed, step))
    first_low, first_high, key, salt = (word - (word >> 31 << 32) for word in words)
    return first_low, first_high, key, salt


def adamw8_piece(
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg_codes: Tensor,
    exp_avg_scales: Tensor,
    exp_avg_sq_codes: Tensor,
    exp_avg_sq_scales: Tensor,
    gradient: Tensor,
    numbers: AdamWStep,
    *,
    previous: Tensor | None = None,
    factor: Tensor | None = None,
    square_sums: Tensor | None = None,
    seed: int,
    offset: int,
) -> None:
    """One AdamW step in place on the first six; on a GPU, enqueued on the current stream. Pieces are cut as for `adamw_piece`.

    All codes and scales zero are zero moments, the states to start from.

    Args:
        weight: (n,) bf16, or fp32 with ``remainder`` None.
        remainder: (n,) int16, with a bf16 ``weight`` its split master; None rounds a bf16 weight at random.
        exp_avg_codes: (n,) uint8.
        exp_avg_scales: (ceil(n / 256),) fp32.
        exp_avg_sq_codes: (n,) uint8, of the square root.
        exp_avg_sq_scales: (ceil(n / 256),) fp32.
        gradient: (n,) bf16, fp32 or fp16.
        numbers: with ``step`` already counted up.
        previous: (n,) bf16 or fp32, the sum of gradients of earlier micro-batches.
        factor: fp32 scalar on the same device, what clipping multiplies gradients by.
        square_sums: (ceil(n / 4096),) fp32; receives what `adamw.square_sums` gives.
        seed: of the random bits, 64 bits, another one for each parameter.
        offset: the piece's first element within its parameter.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; an offset that no piece starts at.
        Unsupported: a GPU before sm_80, or no NVRTC.
    """
    check_gradients(gradient, previous, square_sums)
    device, shape = gradient.device, gradient.shape
    n, blocks = shape[0], torch.Size((-(-shape[0] // SCALE_BLOCK),))
    narrow = (torch.bfloat16,)
    check(weight, "weight", shape, narrow if remainder is not None else (*narrow, *FP32), device)
    if remainder is not None:
        check(remainder, "remainder", shape, (torch.int16,), device)
    for name, codes, scales in (
        ("exp_avg", exp_avg_codes, exp_avg_scales),
        ("exp_avg_sq", exp_avg_sq_codes, exp_avg_sq_scales),
    ):
        check(codes, f"{name}_codes", shape, (torch.uint8,), device)
        check(scales, f"{name}_scales", blocks, FP32, device)
    check_factor(factor, device)
    if offset < 0 or offset % BLOCK or offset >> 32 != (offset + max(n, 1) - 1) >> 32:
        raise ValueError(
            f"{n} elements at offset {offset}: pieces start at multiples of {BLOCK} and do not cross one of 2^32"
        )
    states = exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales
    if device.type != "cuda":
        counter = adamw8_cpu.counter_words(seed, numbers.step)
        adamw8_cpu.piece(weight, remainder, *states, gradient, numbers, previous, factor, square_sums, counter, offset)
        return
    if n == 0:
        return
    kind = _SPLIT if remainder is not None else _FP32 if weight.dtype == torch.float32 else _STOCHASTIC
    halves = [exp_avg_codes, exp_avg_sq_codes] if remainder is None else [exp_avg_codes, exp_avg_sq_codes, remainder]
    words: list[Tensor] = []
    for tensor in (weight, gradient) if previous is None else (weight, gradient, previous):
        (words if tensor.dtype == torch.float32 else halves).append(tensor)
    tensors = (weight, remainder, *states, gradient, previous, factor, square_sums)
    args = (*tensors, n, aligned(words, halves), *counter_args(seed, numbers.step, offset), *numbers.words)
    compiled = _kernel(kind, gradient.dtype, None if previous is None else previous.dtype, device)
    compiled.launch((-(-n // BLOCK), 1, 1), THREADS, 64, args)
