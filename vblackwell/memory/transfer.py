"""Copies between bytes: how one is under way, and how those between addressable bytes are started.

RAM to RAM is `memmove` without the GIL, in pieces over a few threads (`Tensor.copy_` would bring an OpenMP team for
each, which fights with the compute threads for the cores). A device has one copy stream per direction, made once:
torch's allocator keeps a memory pool for every stream that it has seen.
"""

import ctypes
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.units import KiB, MiB

# Set by tests that hold transfers back, called before bytes move: with 'thread' in a copying thread, 'stream' where a
# copy stream is the current one.
hold_back: Callable[[str], None] | None = None


def transfer_delay(kind: str) -> None:
    """The point in every copy where a test may hold it back."""
    if hold_back is not None:
        hold_back(kind)


def delayed() -> bool:
    """Whether a test is holding transfers back: then even tiny copies go through a thread."""
    return hold_back is not None


# How long a transfer took, None while it is under way: when it began (None where those of a link never overlap), and
# seconds. Holds nothing that the transfer copies.
Clock = Callable[[], tuple[float | None, float] | None]


class Transfer:
    """An asynchronous copy that has been started, and keeps what it copies alive until it has been waited for on the
    host. It raises its error on every wait, when none of its parts is being copied any more. ``clock`` tells how long
    it took, None where that is not measured."""

    clock: Clock | None = None
    _keep: Sequence[Any] = ()  # what is copied

    def _events(self) -> Sequence[torch.cuda.Event]:
        """Those after its copies on a device; returns when they have been recorded, because waiting on a CUDA event
        before is a no-op, and what other threads copy is there. Raises what the transfer raised."""
        return ()

    def wait(self) -> None:
        """Block the calling thread until the bytes have arrived."""
        for event in self._events():
            event.synchronize()
        self.let_go()

    def wait_on(self, stream: Any) -> None:
        """Make later work on ``stream`` (None: the host) see the bytes."""
        if stream is None:
            return self.wait()
        for event in self._events():
            stream.wait_event(event)

    def done(self) -> bool:
        """Whether the bytes have arrived (or the transfer failed)."""
        return all(event.query() for event in self._events())

    def let_go(self) -> None:
        """Stop keeping source and destination alive: the caller does, or orders their reuse after this transfer."""
        self._keep = ()

    def finish(self) -> None:
        """`wait`; however this ends, nothing is being copied any more: Ctrl-C must not leave a copy running."""
        try:
            self.wait()
        except BaseException:
            while not self.done():
                time.sleep(1e-4)
            raise


class DoneTransfer(Transfer):
    """A copy that was done before it was asked about."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.clock = lambda: (None, seconds)


class FutureTransfer(Transfer):
    """Parts that run in a thread pool. A part may return a CUDA event that its last device copy recorded."""

    def __init__(self, futures: Sequence[Future[Any]], keep: Sequence[Any] = ()) -> None:
        self._futures, self._keep = tuple(futures), keep
        start, ends, count = time.perf_counter(), list[float](), len(futures)
        for future in futures:
            future.add_done_callback(lambda _: ends.append(time.perf_counter()))
        self.clock = lambda: (start, max(ends, default=start) - start) if len(ends) == count else None

    def _events(self) -> list[torch.cuda.Event]:
        for future in self._futures:
            # Cancelled by a pool that was closed; concurrent.futures.wait would wait for it forever.
            with suppress(CancelledError):
                future.exception()
        if any(future.cancelled() for future in self._futures):
            raise ConfigurationError("the stack was closed while bytes moved: close it when its last step has ended")
        return [result for future in self._futures if isinstance(result := future.result(), torch.cuda.Event)]

    def done(self) -> bool:
        if not all(future.done() for future in self._futures):
            return False
        return any(future.cancelled() or future.exception() for future in self._futures) or super().done()


class EventTransfer(Transfer):
    """Everything on a CUDA stream before ``end``, which was recorded there; timed if ``start`` was before a copy."""

    def __init__(self, end: torch.cuda.Event, start: torch.cuda.Event | None = None, keep: Sequence[Any] = ()) -> None:
        self._end, self._keep = end, keep
        if start is not None:
            self.clock = lambda: (None, start.elapsed_time(end) / 1e3) if end.query() else None

    def _events(self) -> Sequence[torch.cuda.Event]:
        return (self._end,)

    def wait_on(self, stream: Any) -> None:
        if stream is None:
            return self.wait()
        stream.wait_event(self._end)

    def done(self) -> bool:
        return self._end.query()


INLINE_BYTES = 256 * KiB
PIECE_BYTES = 8 * MiB
COPY_THREADS = 2


class CopyStreams(NamedTuple):
    h2d: torch.cuda.Stream
    d2h: torch.cuda.Stream
    d2d: torch.cuda.Stream


_lock = threading.Lock()
_streams: dict[int, CopyStreams] = {}
_by_handle: dict[tuple[int, int], torch.cuda.Stream] = {}


def copy_streams(device: torch.device | str) -> CopyStreams:
    """The copy streams of the CUDA ``device``, the same ones on every call; raises Unsupported for another device."""
    device = torch.device(device)
    if device.type != "cuda":
        raise Unsupported(f"copy streams belong to CUDA devices, not to {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    if (found := _streams.get(index)) is None:
        with _lock:
            if (found := _streams.get(index)) is None:
                found = _streams[index] = CopyStreams(*(torch.cuda.Stream(index) for _ in range(3)))
    return found


def current_stream(device: torch.device) -> Any:
    """The CUDA stream that computes now on ``device``, None on the CPU. What torch gives is made anew each time, for as
    much of the host as a launch."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    handle: int = torch._C._cuda_getCurrentRawStream(index)  # pyright: ignore[reportAttributeAccessIssue]
    if (found := _by_handle.get((index, handle))) is None:
        found = _by_handle[index, handle] = torch.cuda.current_stream(index)
    return found


def no_inference_mode() -> AbstractContextManager[Any]:
    """Inside, tensors are not born under inference mode, which would break a later backward."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def copy_pool(name: str, num_threads: int = COPY_THREADS) -> ThreadPoolExecutor:
    """Threads that copy; they start with the first large copy."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix=f"vblackwell-copy-{name}")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as flat uint8, itself where it is that; raises ConfigurationError unless it is contiguous, with bytes
    in memory."""
    is_flat = type(tensor) is torch.Tensor and tensor.dtype == torch.uint8 and tensor.dim() == 1
    if is_flat and tensor.is_contiguous() and not tensor.is_meta:
        return tensor
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
        return _start_device_copies([(dst, src)])
    if dst.nbytes <= INLINE_BYTES and not delayed():
        start = time.perf_counter()
        ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes)
        return DoneTransfer(time.perf_counter() - start)
    step = max(PIECE_BYTES, -(-src.nbytes // COPY_THREADS // 4096) * 4096)
    pieces = ([dst[at : at + step], src[at : at + step]] for at in range(0, src.nbytes, step))
    return FutureTransfer([pool.submit(_move, piece) for piece in pieces], keep=(dst, src))


def start_copies(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], pool: ThreadPoolExecutor) -> Transfer:
    """Start ``dst[:] = src`` for each pair as `start_copy` does, one after the other, as one transfer: on a device with
    one wait and one event for all. ``pairs``: one or more, between the same two devices."""
    if pairs[0][0].is_cuda or pairs[0][1].is_cuda:
        return _start_device_copies(pairs)
    return FutureTransfer([pool.submit(_move_all, [*pairs])], keep=pairs)


def _move_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    while pairs:
        _move([*pairs.pop(0)])


def _move(pair: list[torch.Tensor]) -> None:
    src, dst = pair.pop(), pair.pop()  # the pool holds a job's arguments for a moment after its result: they are none
    transfer_delay("thread")
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes)


def _start_device_copies(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> EventTransfer:
    dst, src = pairs[0]
    lead = src if src.is_cuda else dst
    streams = copy_streams(lead.device)
    stream = streams.h2d if not src.is_cuda else streams.d2h if not dst.is_cuda else streams.d2d
    for earlier in working_streams(lead.device):
        stream.wait_stream(earlier)
    if dst.is_cuda and src.is_cuda and dst.device != src.device:
        _say_peer_access(src.device, dst.device)
        other = copy_streams(dst.device).d2d
        for earlier in working_streams(dst.device):
            other.wait_stream(earlier)
        with torch.cuda.stream(other):
            return _copy_on(stream, pairs)
    return _copy_on(stream, pairs)


def _copy_on(stream: torch.cuda.Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> EventTransfer:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)  # not blocking=True: that wakes its waiter up to 0.5 ms late
    with torch.cuda.stream(stream):
        transfer_delay("stream")
        start.record(stream)
        for dst, src in pairs:
            dst.copy_(src, non_blocking=True)
        end.record(stream)
    return EventTransfer(end, start, keep=pairs)


def working_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """The current stream (rule 1 of `level`) and the default one, whose pool levels use."""
    current = current_stream(device)
    if current.cuda_stream == 0:  # the default one's handle
        return [current]
    return [current, torch.cuda.default_stream(device)]


@cache
def _say_peer_access(source: torch.device, destination: torch.device) -> None:
    if not torch.cuda.can_device_access_peer(source, destination):
        warnings.warn(
            f"{source} cannot reach {destination} directly (no peer access): copies between them go through the host, "
            f"at less than half of the link's speed",
            RuntimeWarning,
            stacklevel=2,
        )
