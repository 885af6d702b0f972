"""Counters in global memory that are zero when a kernel begins, without a launch that clears them.

A stream has two sets, used in turn: what counts in one clears the other, once the launch before, which has counted
there, has ended. A captured CUDA graph has separate sets, and clears them first whenever it is replayed. The memory is
the driver's, and lives as long as the process: PyTorch's compiler allows none but its tensors in a pool of a capture.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from vblackwell.kernels.runtime.launch import (
    check_driver,
    driver,
    in_context,
    outside_capture,
    raw_stream,
    waiting_driver,
)

MIN_COUNTERS = 4096  # counters of a set
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


@dataclass
class _Pair:
    sets: tuple[Tensor, Tensor]  # as many counters each
    capture: int  # that they belong to
    turn: int = 0  # the set that the next launch counts in
    used: int = 0  # counters of the last one


_pairs: dict[tuple[torch.device, int, bool], _Pair] = {}
_lock = threading.Lock()


@contextmanager
def zeroed(count: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(At least ``count`` counters that are zero, those that the launch has to clear, how many these are) on the
    current stream, for launches within the context, one thread at a time. If one fails, they are not used again."""
    stream, capture = _place(device)
    key = (device, stream, capture != 0)
    with _lock:
        pair = _pairs.pop(key, None)
        if pair is None or pair.capture != capture or pair.sets[0].numel() < count:
            first, second = _zeros(max(MIN_COUNTERS, 1 << (count - 1).bit_length()), device)
            pair = _Pair((first, second), capture)
        yield pair.sets[pair.turn], pair.sets[1 - pair.turn], pair.used
        pair.turn, pair.used = 1 - pair.turn, count
        _pairs[key] = pair


def _place(device: torch.device) -> tuple[int, int]:
    """The current stream, and the unique number of the capture that it belongs to; 0: of none."""
    if torch._C._cuda_getDevice() != device.index:  # pyright: ignore[reportAttributeAccessIssue]
        with torch.cuda.device(device):
            return _place(device)
    stream = raw_stream(device.index)
    if not torch.cuda.is_current_stream_capturing():
        return stream, 0
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    result = driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    check_driver(result, "asking for a graph's capture")
    return stream, number.value


def _zeros(length: int, device: torch.device) -> Tensor:
    """(2, ``length``) in memory of the driver's, which is never freed."""
    address, size = ctypes.c_uint64(), ctypes.c_size_t(8 * length)
    with torch.cuda.device(device):
        with outside_capture(device, "allocating counters"):
            allocate = lambda: waiting_driver().cuMemAlloc_v2(ctypes.byref(address), size)  # noqa: E731
            result = in_context(device, allocate)
            if result == _OUT_OF_MEMORY and not torch.cuda.is_current_stream_capturing():
                torch.cuda.empty_cache()  # which may hold what the driver lacks
                result = in_context(device, allocate)
        check_driver(result, f"{8 * length} bytes of counters")
        place = {"shape": (2, length), "typestr": "<i4", "data": (address.value, False), "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=place), device=device).zero_()
