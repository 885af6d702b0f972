"""Launches of ``cuda/two_part_round.cu``, by address: a model's step rounds hundreds of weights, and Triton's launch costs the host more
than most of them cost the GPU; as forty operators a weight do when it is looked at for drift."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading

import torch
from torch import Tensor

from vblackwell.errors import Unsupported
from vblackwell.kernels.runtime import nvrtc
from vblackwell.kernels.runtime.direct import Launcher
from vblackwell.numerics.separation import Scales

FILES = ("ptx.cuh", "two_part_round.cu")
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
THREADS = 256
MOST_CTAS = 264  # of a look: two a multiprocessor of an H200, on every GPU, because sums depend on it
_ENTERED = threading.local()


def macros(source: torch.dtype, target: torch.dtype) -> dict[str, int]:
    """What the source is compiled with."""
    return {"FP16": 0, "IN": DTYPES[source], "OUT": DTYPES[target]}


@functools.cache
def _launcher(
    entry: str, source: torch.dtype, target: torch.dtype, addresses: int, words: int, device: torch.device
) -> Launcher:
    kernel = nvrtc.kernel(FILES, entry, macros(source, target), device)
    return Launcher(kernel, THREADS, 0 if entry == "two_part_round" else 12 * THREADS, addresses, words)


@functools.cache
def _driver() -> ctypes.PyDLL:
    return ctypes.PyDLL("libcuda.so.1")


def _enter(device: torch.device) -> None:
    """Give this thread the device's context where it has none yet; a launch by address would not."""
    flags = ctypes.c_uint()
    result = nvrtc.in_context(device, lambda: _driver().cuCtxGetFlags(ctypes.byref(flags)))
    nvrtc.check_driver(result, "entering the GPU's context")
    _ENTERED.done = True


def _stream(device: torch.device) -> int:
    if not hasattr(_ENTERED, "done"):
        _enter(device)
    return torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore[reportAttributeAccessIssue]


def aligned(w_NK: Tensor, out: Tensor | None = None) -> bool:
    """Whether blocks of 16 columns are whole, and begin at multiples of 16 bytes (in both)."""
    unaligned = w_NK.data_ptr() | (w_NK.stride(0) * w_NK.itemsize) | (0 if out is None else out.data_ptr())
    return w_NK.shape[1] % 16 == 0 and unaligned % 16 == 0


class Rounder:
    """`separation.round_to_parts` for weights of one shape, strides, type and device, bit for bit but for the sign of zeros.

    What a launch needs beside addresses is looked up once: a layer that keeps this saves the host as much at each step as the launch takes.

    Args:
        w_NK: a weight, on CUDA; nothing of it is kept.
        dtype: of results.
    """

    def __init__(self, w_NK: Tensor, dtype: torch.dtype) -> None:
        (n, k), self._stride = w_NK.shape, w_NK.stride()
        self._shape, self._source, self._dtype, self._device = (n, k), w_NK.dtype, dtype, w_NK.device
        self._blocks = -(-n * -(-k // 16) // THREADS)
        self._whole = k % 16 == 0 and self._stride[0] * w_NK.itemsize % 16 == 0
        self._launch = _launcher("two_part_round", w_NK.dtype, dtype, 4, 4, w_NK.device) if n and k else None

    def takes(self, w_NK: Tensor, dtype: torch.dtype) -> bool:
        """Whether ``w_NK`` is such a weight; its shape is the caller's to know."""
        return (
            w_NK.stride() == self._stride
            and dtype is self._dtype
            and w_NK.dtype is self._source
            and w_NK.device == self._device
        )

    def __call__(self, w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor) -> Tensor:
        """The rounded weight, on the current stream.

        Raises:
            Unsupported: the weight has no address: a DTensor, or one whose memory is elsewhere.
        """
        if self._stride[1] != 1 and self._shape[1] != 1:  # ``contiguous`` leaves a single column as it is
            return round_to_parts(w_NK.contiguous(), block_scales, tensor_scale, self._dtype)
        device = self._device
        if torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self(w_NK, block_scales, tensor_scale)
        out = torch.empty(self._shape, dtype=self._dtype, device=device)
        if self._launch is not None:
            source, target = w_NK.data_ptr(), out.data_ptr()
            if not source:  # the GPU would fault, and with it all that the process has there
                raise Unsupported(
                    f"a {type(w_NK).__name__} of {self._shape} has no memory of its own to be rounded from"
                )
            words = (*self._shape, self._stride[0], int(self._whole and (source | target) % 16 == 0))
            at = (source, block_scales.data_ptr(), tensor_scale.data_ptr(), target)
            self._launch(self._blocks, at, words, _stream(device))
        return out


def round_to_parts(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As a `Rounder` of its own."""
    return Rounder(w_NK, dtype)(w_NK, block_scales, tensor_scale)


def renewed_scales(w_NK: Tensor, kept: Scales | None, threshold: float) -> tuple[Scales, Tensor]:
    """`separation.renewed_scales`, or without ``kept`` `separation.training_scales` and a drift of 0; sums in another order."""
    w_NK = w_NK.detach()
    if w_NK.stride(1) != 1:
        w_NK = w_NK.contiguous()
    (n, k), device = w_NK.shape, w_NK.device
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return renewed_scales(w_NK, kept, threshold)
    total = n * -(-k // 16)
    ctas = min(MOST_CTAS, -(-total // THREADS))
    found = Scales(
        torch.empty(n, -(-k // 16), dtype=torch.uint8, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )
    room = torch.empty(total + 3 * ctas, dtype=torch.float32, device=device)
    drift = torch.empty((), dtype=torch.float32, device=device)
    amax, old = room.data_ptr(), (0, 0) if kept is None else (kept.block.data_ptr(), kept.tensor.data_ptr())
    partials, stream = amax + 4 * total, _stream(device)
    look = _launcher("two_part_look", w_NK.dtype, w_NK.dtype, 5, 5, device)
    look(ctas, (w_NK.data_ptr(), *old, amax, partials), (n, k, w_NK.stride(0), int(aligned(w_NK)), ctas), stream)
    at = (amax, partials, *old, found.block.data_ptr(), found.tensor.data_ptr(), drift.data_ptr())
    (bits,) = struct.unpack("i", struct.pack("f", threshold))
    renew = _launcher("two_part_renew", w_NK.dtype, w_NK.dtype, 7, 3, device)
    renew(-(-total // (4 * THREADS)), at, (total, ctas, bits), stream)
    return found, drift
