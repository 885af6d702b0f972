"""What a transfer is, and the ways in which a copy can be under way: done already, in a thread pool, on a CUDA stream.

A transfer keeps the tensors that it copies alive until it has been waited for on the host, so keep it that long. It
raises its error on every wait, not only on the first: two waiters must both hear of it. A transfer of several parts
waits for all of them before it raises, because the caller will touch the memory once `wait` has returned or raised.

`set_transfer_delay` lets a stress test hold every copy back at the place where races show.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any

import torch

_delay: Callable[[str], None] | None = None


def set_transfer_delay(delay: Callable[[str], None] | None) -> None:
    """Call ``delay(kind)`` before the bytes of every later transfer move; None switches it off. For stress tests only.

    ``kind`` is ``'thread'`` in a copying thread (sleep there), and ``'stream'`` on a CUDA copy stream, which is the
    current stream during the call (`torch.cuda._sleep` there).
    """
    global _delay
    _delay = delay


def transfer_delay(kind: str) -> None:
    """The point in every copy where a test may hold it back."""
    if _delay is not None:
        _delay(kind)


def delayed() -> bool:
    """Whether a test is holding transfers back: then even tiny copies go through a thread."""
    return _delay is not None


# How long a transfer took, None while it is under way: its begin by `time.perf_counter`, or None where transfers of a link
# never overlap, and seconds. Holds nothing that the transfer copies, so it may be kept for as long as one likes.
Clock = Callable[[], tuple[float | None, float] | None]


class Transfer(ABC):
    """An asynchronous copy that has been started.

    Attributes:
        clock: how long it took; None where that is not measured.
    """

    clock: Clock | None = None
    _keep: Sequence[Any] = ()  # what is copied

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until the bytes have arrived. Raises what the transfer raised, every time."""

    @abstractmethod
    def wait_on(self, stream: Any) -> None:
        """Make work queued on ``stream`` (a `torch.cuda.Stream`, or None for the host) from now on see the bytes.

        Waiting on a CUDA event that was not recorded yet is a no-op, so this first blocks until it has been.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether the bytes have arrived (or the transfer failed)."""

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

    def wait(self) -> None:
        return

    def wait_on(self, stream: Any) -> None:
        return

    def done(self) -> bool:
        return True


class _FutureClock:
    """From the start until the last of several futures is done."""

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self._left = len(futures)
        self._start = self._end = time.perf_counter()
        self._lock = threading.Lock()
        for future in futures:
            future.add_done_callback(self._note_end)

    def _note_end(self, _: Future[Any]) -> None:
        with self._lock:
            self._left -= 1
            self._end = time.perf_counter()

    def __call__(self) -> tuple[float, float] | None:
        return None if self._left else (self._start, self._end - self._start)


class FutureTransfer(Transfer):
    """Parts that run in a thread pool. A part may return a CUDA event that its last device copy recorded."""

    def __init__(self, futures: Sequence[Future[Any]], keep: Sequence[Any] = ()) -> None:
        self._futures = tuple(futures)
        self._keep = keep
        self.clock = _FutureClock(self._futures)

    def _events(self) -> list[torch.cuda.Event]:
        for future in self._futures:
            # Cancelled by a pool that was closed; concurrent.futures.wait would wait for it forever.
            with suppress(CancelledError):
                future.exception()
        return [result for future in self._futures if isinstance(result := future.result(), torch.cuda.Event)]

    def wait(self) -> None:
        for event in self._events():
            event.synchronize()
        self.let_go()

    def wait_on(self, stream: Any) -> None:
        if stream is None:
            return self.wait()
        for event in self._events():
            stream.wait_event(event)

    def done(self) -> bool:
        if not all(future.done() for future in self._futures):
            return False
        if any(future.cancelled() or future.exception() for future in self._futures):
            return True
        return all(event.query() for event in self._events())


class EventTransfer(Transfer):
    """A copy queued on a CUDA stream, after which ``end`` was recorded there by the caller."""

    def __init__(self, start: torch.cuda.Event, end: torch.cuda.Event, keep: Sequence[Any]) -> None:
        self._end = end
        self._keep = keep
        self.clock = lambda: (None, start.elapsed_time(end) / 1e3) if end.query() else None

    @classmethod
    def at(cls, end: torch.cuda.Event) -> EventTransfer:
        """Everything before ``end``, an event that was recorded; it keeps nothing, and its time means nothing."""
        return cls(end, end, ())

    def wait(self) -> None:
        self._end.synchronize()
        self.let_go()

    def wait_on(self, stream: Any) -> None:
        if stream is None:
            self.wait()
        else:
            stream.wait_event(self._end)

    def done(self) -> bool:
        return self._end.query()
