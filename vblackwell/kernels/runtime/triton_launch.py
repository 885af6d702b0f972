"""Triton kernels launched again by what was compiled for them: to find out which from the arguments costs Triton 14 us
of the host with as many numbers as attention's kernels take, as much as the rest of a launch.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from vblackwell.kernels.runtime.launch import outside_capture
from vblackwell.kernels.runtime.registry import on_device

_compiled: dict[tuple[Any, ...], Any] = {}
MAX_KEYS = 4096  # lengths may be others in every call


def layout(x: Tensor | None) -> tuple[Any, ...] | None:
    """What Triton compiles anew for, of a tensor: its type, and whether its address is a multiple of 16 bytes."""
    return None if x is None else (x.dtype, x.stride(), x.data_ptr() % 16)


def queue(kernel: Any, key: tuple[Any, ...], grid: tuple[int, int, int], arguments: Any, **options: Any) -> None:
    """Launch ``kernel`` on the current stream with ``arguments``, which are all of its parameters.

    ``key`` holds the GPU and all that Triton compiles anew for: every number and constant (or what they follow from),
    the `layout` of every tensor, and ``options``, as num_warps, where these are not always the same.
    """
    if (compiled := _compiled.get((kernel, key))) is not None:
        compiled[grid](*arguments)
        return
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    # To load it, which nobody may have done before: a call may choose another backend in a graph than outside.
    with outside_capture(torch.device("cuda"), "loading a Triton kernel") if capturing else nullcontext():
        compiled = kernel[grid](*arguments, **options)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_compiled) >= MAX_KEYS:
            _compiled.clear()
        _compiled[kernel, key] = compiled


def launch(
    kernel: Any, grid: tuple[int, int, int], tensors: Sequence[Tensor | None], numbers: tuple[Any, ...], warps: int
) -> None:
    """`queue` of a kernel whose parameters are ``tensors``, not None the first, and then ``numbers`` and constants, on
    the GPU of that tensor."""
    first = tensors[0]
    assert first is not None
    with on_device(first):
        key = (first.device, warps, numbers, *map(layout, tensors))
        queue(kernel, key, grid, (*tensors, *numbers), num_warps=warps)
