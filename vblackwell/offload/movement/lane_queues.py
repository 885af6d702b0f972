"""The queues in which updates on level 0 run: work in each goes in order, marks join them, and the host need not wait.

`Lane` says what waits for what; this says what a queue and a mark are. On a GPU they are CUDA streams and events
(`lane_cuda`). Without one, every queue is the model's worker thread, whose order is stricter than any that is asked
for. The tests have a third kind, whose work runs as late, as early and as interleaved as the declared order allows: on
a GPU such orders are rare, and silent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import torch

from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import DoneTransfer, FutureTransfer, transfer_delay
from vblackwell.offload.movement.worker import Worker

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (target, source)


class Mark(Protocol):
    """A point in a queue; as `torch.cuda.Event`, recorded."""

    def query(self) -> bool:
        """Whether everything before it is over."""
        ...

    def synchronize(self) -> None:
        """Block the host until it is."""
        ...


class Queue(Protocol):
    """Work in order; as `torch.cuda.Stream`."""

    def wait_event(self, event: Any) -> None:
        """Nothing that is queued from now on starts before ``event`` (a `Mark`) is over."""
        ...

    def synchronize(self) -> None:
        """Block the host until everything queued is over."""
        ...


class Copied(NamedTuple):
    """Copies that were queued: a mark after them, and a transfer without memory whose clock tells their time."""

    end: Mark
    transfer: Transfer


class Queues(ABC):
    """The queues of one device's updates.

    Attributes:
        states_in, update, states_out: copies to level 0, arithmetic there, copies back.
    """

    states_in: Any
    update: Any
    states_out: Any

    @property
    def all(self) -> tuple[Any, Any, Any]:
        return self.states_in, self.update, self.states_out

    @abstractmethod
    def computing(self) -> Queue:
        """Where the model is computed now, in the caller's thread."""

    @abstractmethod
    def leaving(self) -> Queue:
        """Where gradients leave level 0."""

    @abstractmethod
    def loading(self) -> Sequence[Queue]:
        """Where compute weights are loaded."""

    @abstractmethod
    def mark(self, queue: Any) -> Mark:
        """A point after everything that ``queue`` has now."""

    def waiting_mark(self, queue: Any) -> Mark:
        """`mark` for a thread that will wait for long."""
        return self.mark(queue)

    @abstractmethod
    def transfer(self, end: Mark) -> Transfer:
        """Everything before ``end`` as a transfer, which holds no memory."""

    @abstractmethod
    def run(self, queue: Any, work: Callable[[], None]) -> None:
        """Queue what ``work`` launches. It may be called at once, or when its turn has come."""

    @abstractmethod
    def copy(self, queue: Any, pairs: Callable[[], Pairs]) -> Copied:
        """Queue copies; what is to be copied is asked for as `run` calls its work."""

    def follow(self, queue: Any, other: Any) -> None:
        """Let what ``queue`` gets from now on start after everything that ``other`` has now."""
        queue.wait_event(self.mark(other))


class HostQueue:
    """What the calling thread does itself, or has waited for: over when it is queued."""

    def wait_event(self, event: Mark) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        return


class _Over:
    """A point that has been passed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class _WorkerMark:
    """After a task of the worker, and so after all before it."""

    def __init__(self, task: Future[Any]) -> None:
        self.task = task

    def query(self) -> bool:
        return self.task.done()

    def synchronize(self) -> None:
        self.task.result()


class WorkerQueue:
    """One of the names for the worker's order. Whatever it is to wait for has been queued there before, or is over."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.last: Future[Any] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        self.last = self._worker.submit(work)

    def wait_event(self, event: Any) -> None:
        assert isinstance(event, (_Over, _WorkerMark)), "all queues are the worker's"

    def synchronize(self) -> None:
        if self.last is not None:
            self.last.result()


class WorkerQueues(Queues):
    """Level 0 is RAM: everything runs in the model's worker thread, in the order of its other tasks."""

    def __init__(self, worker: Worker) -> None:
        self.states_in, self.update, self.states_out = (WorkerQueue(worker) for _ in range(3))
        self._host = HostQueue()

    def computing(self) -> HostQueue:
        return self._host

    def leaving(self) -> HostQueue:
        return self._host  # gradients in host memory are landed by earlier tasks of the worker

    def loading(self) -> Sequence[HostQueue]:
        return (self._host,)

    def mark(self, queue: Any) -> Mark:
        if queue is self._host or queue.last is None:
            return _Over()
        return _WorkerMark(queue.last)

    def transfer(self, end: Mark) -> Transfer:
        return FutureTransfer([end.task]) if isinstance(end, _WorkerMark) else DoneTransfer()

    def run(self, queue: WorkerQueue, work: Callable[[], None]) -> None:
        queue.submit(work)

    def copy(self, queue: WorkerQueue, pairs: Callable[[], Pairs]) -> Copied:
        def work() -> None:
            transfer_delay("thread")
            for target, source in pairs():
                target.copy_(source)

        queue.submit(work)
        end = self.mark(queue)
        return Copied(end, self.transfer(end))
