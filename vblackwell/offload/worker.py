"""One background thread a model, for everything that touches gradients and states at home, in order.

One thread, because order is the cheapest lock there is: a group's gradient arrives, is summed, measured and applied by
tasks submitted in that order. torch's kernels release the GIL and use all cores inside each task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_delay: Callable[[], None] | None = None


def set_worker_delay(delay: Callable[[], None] | None) -> None:
    """For stress tests: ``delay`` runs in the worker before each task."""
    global _delay
    _delay = delay


class Worker:
    """Runs tasks in the order of submission. The first failure is raised at the next `submit` or `drain`, once."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"vblackwell-{name}")
        self._last: Future[Any] | None = None
        self._failure: BaseException | None = None

    def submit(self, task: Callable[..., Any], *args: Any) -> Future[Any]:
        self._raise_failure()
        self._last = self._pool.submit(self._run, task, *args)
        return self._last

    def _run(self, task: Callable[..., Any], *args: Any) -> Any:
        if _delay is not None:
            _delay()
        try:
            return task(*args)
        except BaseException as failure:
            self._failure = self._failure or failure
            raise

    def drain(self) -> None:
        """Wait until everything submitted so far is done; raise the first failure."""
        if self._last is not None:
            self._last.exception()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

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
