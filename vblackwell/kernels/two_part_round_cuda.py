"""Launches of ``cuda/two_part_round.cu``, by address: a model's step rounds hundreds of weights, and Triton's launch costs the host more
than most of them cost the GPU."""

from __future__ import annotations

import ctypes
import functools
import threading

import torch
from torch import Tensor

from vblackwell.kernels import nvrtc
from vblackwell.kernels.direct import Launcher

FILES = ("ptx.cuh", "two_part_round.cu")
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
THREADS = 256
_ENTERED = threading.local()


def macros(source: torch.dtype, target: torch.dtype) -> dict[str, int]:
    """What the source is compiled with."""
    return {"FP16": 0, "IN": DTYPES[source], "OUT": DTYPES[target]}


@functools.cache
def _launcher(source: torch.dtype, target: torch.dtype, device: torch.device) -> Launcher:
    kernel = nvrtc.kernel(FILES, "two_part_round", macros(source, target), device)
    return Launcher(kernel, THREADS, 0, num_addresses=4, num_words=4)


@functools.cache
def _driver() -> ctypes.PyDLL:
    return ctypes.PyDLL("libcuda.so.1")


def _enter(device: torch.device) -> None:
    """Give this thread the device's context where it has none yet; a launch by address would not."""
    flags = ctypes.c_uint()
    result = nvrtc.in_context(device, lambda: _driver().cuCtxGetFlags(ctypes.byref(flags)))
    nvrtc.check_driver(result, "entering the GPU's context")
    _ENTERED.done = True


def aligned(w_NK: Tensor, out: Tensor) -> bool:
    """Whether blocks of 16 columns are whole, and begin at multiples of 16 bytes in both."""
    unaligned = w_NK.data_ptr() | out.data_ptr() | (w_NK.stride(0) * w_NK.itemsize)
    return w_NK.shape[1] % 16 == 0 and unaligned % 16 == 0


def round_to_parts(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`separation.round_to_parts`, bit for bit but for the sign of zeros; on CUDA, on the current stream."""
    if w_NK.stride(1) != 1:
        w_NK = w_NK.contiguous()
    (n, k), device = w_NK.shape, w_NK.device
    out = torch.empty(n, k, dtype=dtype, device=device)
    if n == 0 or k == 0:
        return out
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            _launch(w_NK, block_scales, tensor_scale, out)
    else:
        _launch(w_NK, block_scales, tensor_scale, out)
    return out


def _launch(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, out: Tensor) -> None:
    (n, k), device = w_NK.shape, w_NK.device
    if not hasattr(_ENTERED, "done"):
        _enter(device)
    at = (w_NK.data_ptr(), block_scales.data_ptr(), tensor_scale.data_ptr(), out.data_ptr())
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore[reportAttributeAccessIssue]
    count = -(-n * -(-k // 16) // THREADS)
    words = (n, k, w_NK.stride(0), int(aligned(w_NK, out)))
    _launcher(w_NK.dtype, out.dtype, device)(count, at, words, stream)
