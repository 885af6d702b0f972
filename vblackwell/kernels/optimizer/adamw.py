"""One AdamW for CPU and GPU: a piece of a parameter is updated where its tensors are, to the same bits on both.

What the bits are is said by torch's fused CPU kernel (`adamw_cpu.py`); ``cuda/adamw.cu`` computes the same on a GPU, bound by memory.
An update may therefore move between host and GPU from one step to the next, and a streamed run equals one that never left the CPU.

A piece is flat and contiguous, starts at a multiple of 4096 elements from its parameter's start, and only a parameter's last piece
may have a length that is not such a multiple: torch does the last few elements of a tensor in a scalar loop that rounds differently.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vblackwell.errors import Unsupported
from vblackwell.kernels.optimizer import adamw_cpu
from vblackwell.kernels.optimizer.adamw_cpu import BLOCK, AdamWStep, torch_order
from vblackwell.kernels.runtime.launch import Kernel, Launcher, kernel

__all__ = ["BLOCK", "AdamWStep", "Addresses", "adamw_at", "adamw_piece", "norm_of", "square_sums"]

FILES = ("ptx.cuh", "optimizer/gradient.cuh", "optimizer/adamw.cu")
THREADS = 512
MOST = 2**31 - BLOCK  # elements of a piece: the kernels index in 32 bits
GRADIENTS = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
PREVIOUS = {None: 0, torch.bfloat16: 1, torch.float32: 2}


def macros(weight: int, gradient: int, previous: int) -> dict[str, int]:
    """What ``adamw.cu`` is compiled with, for torch's order on this machine."""
    order = torch_order()
    return {
        "FP16": 0, "WEIGHT": weight, "GRADIENT": gradient, "PREVIOUS": previous, "LERP": int(order.lerp[0]),
        "TAIL_LERP": int(order.lerp[1]), "SQUARE": order.square[0], "TAIL_SQUARE": order.square[1],
    }  # fmt: skip


@functools.cache
def _kernel(
    entry: str, weight: int, gradient: torch.dtype, previous: torch.dtype | None, device: torch.device
) -> Kernel:
    if torch.cuda.get_device_capability(device) < (7, 5):
        raise Unsupported(f"{device} is older than sm_75, which the AdamW kernel needs: update on the CPU instead")
    return kernel(FILES, entry, macros(weight, GRADIENTS[gradient], PREVIOUS[previous]), device)


def check(tensor: Tensor, name: str, shape: torch.Size, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tensor.dtype not in dtypes or tensor.shape != shape or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"it must be {' or '.join(map(str, dtypes))}, {tuple(shape)}, contiguous, on {device}"
        )


FP32 = (torch.float32,)


def check_gradients(gradient: Tensor, previous: Tensor | None, sums: Tensor | None) -> None:
    n, device = gradient.numel(), gradient.device
    check(gradient, "gradient", torch.Size((n,)), tuple(GRADIENTS), device)
    if previous is not None:
        check(previous, "previous", gradient.shape, (torch.bfloat16, torch.float32), device)
    if sums is not None:
        check(sums, "square_sums", torch.Size((-(-n // BLOCK),)), FP32, device)
    if n > MOST:
        raise ValueError(f"a piece of {n} elements: at most {MOST} at once, cut it at a multiple of {BLOCK}")


def check_factor(factor: Tensor | None, device: torch.device) -> None:
    """Raises ValueError unless ``factor`` is None or one fp32 number on ``device``."""
    if factor is not None and (factor.numel() != 1 or factor.dtype != torch.float32 or factor.device != device):
        raise ValueError(
            f"factor is {factor.dtype} {tuple(factor.shape)} on {factor.device}; it must be one fp32 number on {device}"
        )


def aligned(words: Sequence[Tensor], halves: Sequence[Tensor]) -> int:
    """Whether four elements can be read at once: 16 bytes of fp32, 8 of the 16-bit types."""
    address = 0
    for tensor in words:
        address |= tensor.data_ptr()
    for tensor in halves:
        address |= 2 * tensor.data_ptr()
    return int(address % 16 == 0)


def adamw_piece(
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    numbers: AdamWStep,
    *,
    previous: Tensor | None = None,
    factor: Tensor | None = None,
    square_sums: Tensor | None = None,
) -> None:
    """One AdamW step in place on weight, remainder, exp_avg and exp_avg_sq; on a GPU, enqueued on the current stream.

    The gradient is g = (previous + gradient) * factor, each operation rounded to fp32. Nothing is checked for being finite.

    Args:
        weight: (n,) bf16, or fp32 that is its own master.
        remainder: (n,) int16, with ``weight`` the split master of a bf16 weight; None for fp32.
        exp_avg: (n,) fp32.
        exp_avg_sq: (n,) fp32.
        gradient: (n,) bf16, fp32 or fp16.
        numbers: with ``step`` already counted up.
        previous: (n,) bf16 or fp32, the sum of gradients of earlier micro-batches.
        factor: fp32 scalar on the same device, what clipping multiplies gradients by.
        square_sums: (ceil(n / 4096),) fp32; receives each block's sum of squares of previous + gradient, before ``factor``.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
        Unsupported: a GPU before sm_75, no NVRTC, or a CPU on which torch rounds in a way the kernel does not know.
    """
    check_gradients(gradient, previous, square_sums)
    device, shape = gradient.device, gradient.shape
    check(weight, "weight", shape, FP32 if remainder is None else (torch.bfloat16,), device)
    if remainder is not None:
        check(remainder, "remainder", shape, (torch.int16,), device)
    check(exp_avg, "exp_avg", shape, FP32, device)
    check(exp_avg_sq, "exp_avg_sq", shape, FP32, device)
    check_factor(factor, device)
    if device.type != "cuda":
        adamw_cpu.piece(weight, remainder, exp_avg, exp_avg_sq, gradient, numbers, previous, factor, square_sums)
        return
    n = shape[0]
    if n == 0:
        return
    words, halves = [exp_avg, exp_avg_sq], [] if remainder is None else [weight, remainder]
    for tensor in (weight, gradient) if previous is None else (weight, gradient, previous):
        (words if tensor.dtype == torch.float32 else halves).append(tensor)
    tail_start = torch_order().tail_start(n)
    compiled = _kernel(
        "adamw", int(remainder is None), gradient.dtype, None if previous is None else previous.dtype, device
    )
    tensors = (weight, remainder, exp_avg, exp_avg_sq, gradient, previous, factor, square_sums)
    args = (*tensors, n, tail_start, aligned(words, halves), *numbers.words)
    compiled.launch((-(-n // BLOCK), 1, 1), THREADS, 64, args)


class Addresses(NamedTuple):
    """Where the tensors of `adamw_piece` are, on one GPU; 0 for None."""

    weight: int
    remainder: int
    exp_avg: int
    exp_avg_sq: int
    gradient: int
    previous: int
    factor: int
    square_sums: int


def adamw_at(
    at: Addresses, num_elements: int, numbers: AdamWStep, gradient: torch.dtype, previous: torch.dtype | None,
    stream: torch.cuda.Stream,
) -> None:  # fmt: skip
    """`adamw_piece` for whoever queues hundreds of pieces a step: by address, nothing checked, on ``stream`` of the current device.

    Args:
        num_elements: of the piece, at least one.
        gradient, previous: their types; ``previous`` is None where there is none.
    """
    itemsizes = (
        4 if at.remainder == 0 else 2,
        2,
        4,
        4,
        gradient.itemsize,
        0 if previous is None else previous.itemsize,
    )
    unaligned = 0
    for address, itemsize in zip(at, itemsizes, strict=False):
        unaligned |= address * 4 // itemsize if itemsize else 0
    words = (num_elements, torch_order().tail_start(num_elements), int(unaligned % 16 == 0), *numbers.words)
    launch = _launcher(int(at.remainder == 0), gradient, previous, stream.device)
    launch((-(-num_elements // BLOCK), 1, 1), (*at, *words), stream.cuda_stream)


@functools.cache
def _launcher(weight: int, gradient: torch.dtype, previous: torch.dtype | None, device: torch.device) -> Launcher:
    return Launcher(_kernel("adamw", weight, gradient, previous, device), THREADS, 64, len(Addresses._fields) + 10)


def square_sums(gradient: Tensor, out: Tensor, *, previous: Tensor | None = None) -> None:
    """The sums of squares that `adamw_piece` gives, to the same bits, without an update.

    Args:
        gradient: (n,) bf16, fp32 or fp16.
        out: (ceil(n / 4096),) fp32, written.
        previous: (n,) bf16 or fp32, added to the gradient in fp32 first.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
        Unsupported: as `adamw_piece`.
    """
    check_gradients(gradient, previous, out)
    if gradient.device.type != "cuda":
        adamw_cpu.square_sums(gradient, out, previous)
        return
    n = len(gradient)
    if n == 0:
        return
    tensors = [gradient] if previous is None else [gradient, previous]
    words = [tensor for tensor in tensors if tensor.dtype == torch.float32]
    halves = [tensor for tensor in tensors if tensor.dtype != torch.float32]
    compiled = _kernel("square_sums", 0, gradient.dtype, None if previous is None else previous.dtype, gradient.device)
    compiled.launch((-(-n // BLOCK), 1, 1), THREADS, 64, (gradient, previous, out, n, aligned(words, halves)))


def norm_of(square_sums_list: Sequence[Tensor]) -> Tensor:
    """A parameter's gradient norm from its pieces' block sums, however it was cut, to the same bits on CPU and GPU.

    Args:
        square_sums_list: fp32 vectors on one device, in the order of the parameter's elements.

    Returns:
        fp32 scalar there: the square root of the sum, both in double. No synchronisation.
    """
    sums = square_sums_list[0] if len(square_sums_list) == 1 else torch.cat(list(square_sums_list))
    if sums.device.type != "cuda":
        return adamw_cpu.norm(sums)
    out = torch.empty((), device=sums.device)
    compiled = _kernel("block_norm", 0, torch.float32, None, sums.device)
    compiled.launch((1, 1, 1), THREADS, THREADS * 8, (sums, out, sums.numel()))
    return out
