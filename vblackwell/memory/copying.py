"""Copies between addressable bytes: RAM to RAM in threads, everything that touches a GPU on its copy streams.

RAM to RAM is `memmove` without the GIL, in pieces over a few threads; tiny ones run at once in the caller, because
handing them over costs more than the copy. Why not `Tensor.copy_` there: it brings an OpenMP team per thread, which
then fights with the compute threads for the cores.

A device has one copy stream per direction, made once, so that copies run at the same time as compute, each direction in
its own order. Why not a stream per transfer, or per stack: torch's allocator keeps a memory pool for every stream that
it has seen, so fresh streams leak pools.

A copy between two GPUs runs on a stream of the source device. Where the driver has no peer access it goes through the
host, which torch and the driver do by themselves; we say so once per pair.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.memory.transfer import DoneTransfer, EventTransfer, FutureTransfer, Transfer, delayed, transfer_delay
from vblackwell.units import KiB, MiB

INLINE_BYTES = 256 * KiB
PIECE_BYTES = 8 * MiB
COPY_THREADS = 2


class CopyStreams(NamedTuple):
    """The three copy streams of one device."""

    h2d: torch.cuda.Stream
    d2h: torch.cuda.Stream
    d2d: torch.cuda.Stream


_lock = threading.Lock()
_streams: dict[int, CopyStreams] = {}


def copy_streams(device: torch.device | str) -> CopyStreams:
    """The copy streams of the CUDA ``device``, the same ones on every call.

    Raises:
        Unsupported: ``device`` is not a CUDA device.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise Unsupported(f"copy streams belong to CUDA devices, not to {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if index not in _streams:
            _streams[index] = CopyStreams(*(torch.cuda.Stream(index) for _ in range(3)))
        return _streams[index]


def copy_pool(name: str, num_threads: int = COPY_THREADS) -> ThreadPoolExecutor:
    """Threads that copy; they start with the first large copy and belong to one level."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix=f"vblackwell-copy-{name}")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a flat uint8 alias.

    Raises:
        ConfigurationError: the tensor is not contiguous, or has no bytes in memory.
    """
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.is_contiguous():
        raise ConfigurationError(
            f"only contiguous dense tensors can be moved, not shape {tuple(tensor.shape)} with layout {tensor.layout} "
            f"on {tensor.device}: call .contiguous() first"
        )
    return tensor.detach().reshape(-1).view(torch.uint8)


def start_copy(dst: torch.Tensor, src: torch.Tensor, pool: ThreadPoolExecutor) -> Transfer:
    """Start ``dst[:] = src`` for flat uint8 tensors of equal length on any devices (module docstring of `level`)."""
    assert dst.nbytes == src.nbytes, (dst.nbytes, src.nbytes)
    if dst.is_cuda or src.is_cuda:
        return _start_device_copy(dst, src)
    if dst.nbytes <= INLINE_BYTES and not delayed():
        start = time.perf_counter()
        ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes)
        return DoneTransfer(time.perf_counter() - start)
    step = max(PIECE_BYTES, -(-src.nbytes // COPY_THREADS // 4096) * 4096)
    futures = [
        pool.submit(_move, [dst[start : start + step], src[start : start + step]])
        for start in range(0, src.nbytes, step)
    ]
    return FutureTransfer(futures, keep=(dst, src))


def _move(pair: list[torch.Tensor]) -> None:
    src, dst = pair.pop(), pair.pop()  # the pool holds a job's arguments for a moment after its result: they are none
    transfer_delay("thread")
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes)


def _start_device_copy(dst: torch.Tensor, src: torch.Tensor) -> EventTransfer:
    lead = src if src.is_cuda else dst
    streams = copy_streams(lead.device)
    stream = streams.h2d if not src.is_cuda else streams.d2h if not dst.is_cuda else streams.d2d
    _wait_for_queued_work(stream, lead.device)
    if dst.is_cuda and src.is_cuda and dst.device != src.device:
        _say_peer_access(src.device, dst.device)
        other = copy_streams(dst.device).d2d
        _wait_for_queued_work(other, dst.device)
        with torch.cuda.stream(other), torch.cuda.stream(stream):
            return _queue(dst, src, stream)
    with torch.cuda.stream(stream):
        return _queue(dst, src, stream)


def _wait_for_queued_work(stream: torch.cuda.Stream, device: torch.device) -> None:
    for other in working_streams(device):
        stream.wait_stream(other)


def working_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """The current stream (rule 1 of `level`) and the default one, whose pool levels use."""
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    return [current] if current == default else [current, default]


def _queue(dst: torch.Tensor, src: torch.Tensor, stream: torch.cuda.Stream) -> EventTransfer:
    transfer_delay("stream")
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)  # not blocking=True: that wakes its waiter up to 0.5 ms late
    start.record(stream)
    dst.copy_(src, non_blocking=True)
    end.record(stream)
    return EventTransfer(start, end, keep=(dst, src))


@cache
def _say_peer_access(source: torch.device, destination: torch.device) -> None:
    if not torch.cuda.can_device_access_peer(source, destination):
        warnings.warn(
            f"{source} cannot reach {destination} directly (no peer access): copies between them go through the host, "
            f"at less than half of the link's speed",
            RuntimeWarning,
            stacklevel=2,
        )
