"""One background thread a model, for everything that touches gradients and states in storage.

One thread, because order is the cheapest lock there is: a group's gradient arrives, is summed, measured and applied by
    tasks submitted in that order. Tasks of different groups touch nothing in common, and the CPU is best used if they
    do not wait for each other: updates begin with the last groups, whose gradients come first, but the next forward
    needs the first groups first. So an update is *postponable*: among those that could run, the one of the first group
    runs, and only when nothing else could. Where the CPU is late at the end of backward it then still has the whole
    forward for the last groups. A task without a group keeps its place after all that was submitted before it, and
    before all that comes later.

torch's kernels release the GIL and use all cores inside each task.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from vblackwell.memory.level import Transfer

_delay: Callable[[], None] | None = None


def set_worker_delay(delay: Callable[[], None] | None) -> None:
    """For stress tests: ``delay`` runs in the worker before each task."""
    global _delay
    _delay = delay


class Outcome(Future[Any]):
    """Of a task. A failure is raised by the first to wait, the worker's next call or `settle`, and not again; by
    `result` each time.
    """

    raised = False

    def result(self, timeout: float | None = None) -> Any:
        try:
            if self.exception(timeout) is not None:
                self.raised = True
            return super().result()
        finally:
            del self  # a failure holds this frame, and must not hold itself by it

    def settle(self) -> None:
        """Wait for the end; raise its failure if nobody has."""
        try:
            if self.exception() is not None and not self.raised:
                self.result()
        finally:
            del self  # as in `result`


@dataclass(eq=False)
class _Task:
    work: Callable[..., Any]
    args: tuple[Any, ...]
    group: int | None
    postponable: bool
    arriving: Transfer | None
    future: Outcome


class Worker:
    """Runs tasks in a separate thread. The first failure is raised at the next `submit` or `drain`, once.

    Attributes:
        failures: how many tasks have failed, raised or not, by their group's number.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"vblackwell-{name}")
        self._lock = threading.Lock()
        self._waiting: deque[_Task] = deque()  # at most as many as the pool has calls of `_run_next` to come
        self._running: Outcome | None = None
        self._failed: Outcome | None = None
        self.failures = Counter[int | None]()

    def submit(
        self,
        work: Callable[..., Any],
        *args: Any,
        group: int | None = None,
        postponable: bool = False,
        arriving: Transfer | None = None,
    ) -> Outcome:
        """Run ``work(*args)``.

        Args:
            group: the number of the group, in the order of the forward, to whose ranges it keeps: after that group's
                earlier tasks. None: after all earlier tasks.
            postponable: other groups' tasks may go first.
            arriving: what it waits for; until then tasks that need not wait go first.
        """
        self._raise_failure()
        task = _Task(work, args, group, postponable, arriving, Outcome())
        with self._lock:
            self._pool.submit(self._run_next)  # first: where this raises, or is interrupted, nothing waits in vain
            self._waiting.append(task)
        return task.future

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:  # an interrupt came between the call and its task
                return
            task = self._choose()
            self._waiting.remove(task)
            self._running = task.future
        task.future.set_running_or_notify_cancel()
        try:
            if _delay is not None:
                _delay()
            result = task.work(*task.args)
        except BaseException as failure:
            self._failed = self._failed or task.future
            self.failures[task.group] += 1
            task.future.set_exception(failure)
        else:
            task.future.set_result(result)
        finally:
            self._running = None
            del task  # as in `Outcome.result`

    def _choose(self) -> _Task:
        """The oldest task that need not wait; else the postponable one of the first group; else the oldest."""
        seen: set[int] = set()
        postponed: _Task | None = None
        for task in self._waiting:
            if task.group is None:
                if task is self._waiting[0]:
                    return task
                break
            if task.group in seen:
                continue
            seen.add(task.group)
            if task.postponable:
                if postponed is None or task.group < (postponed.group or 0):
                    postponed = task
            elif _has_arrived(task):
                return task
        return postponed or self._waiting[0]

    def drain(self) -> None:
        """Wait until everything submitted so far is done; raise the first failure."""
        wait(self._unfinished())
        self._raise_failure()

    def _unfinished(self) -> list[Outcome]:
        with self._lock:
            running = [] if self._running is None else [self._running]
            return running + [task.future for task in self._waiting]

    def _raise_failure(self) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            try:
                failed.settle()
            finally:
                del failed  # as in `Outcome.result`

    def close(self, then: Callable[[], None]) -> None:
        """Finish what was submitted, then run ``then``. Idempotent.

        The collector may call this from the worker thread itself, which cannot wait for its own end.
        """
        if threading.current_thread() in self._pool._threads:
            self._pool.submit(then)
            self._pool.shutdown(wait=False)
        else:
            self._pool.shutdown(wait=True)
            then()


def _has_arrived(task: _Task) -> bool:
    """Whether ``task`` need not wait. A transfer that failed is the task's own to hear of: here nobody would, and the
    task be lost.
    """
    try:
        return task.arriving is None or task.arriving.done()
    except Exception:
        return True


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Inside, an interrupt from the keyboard waits for the end. Nothing is held back in other threads than the main
    one: they get none.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[-1])
