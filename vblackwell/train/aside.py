"""A function in a process of its own, beside what goes on here: a fork, so that nothing is loaded twice.

Only where a fork is safe: one Python thread, no CUDA, POSIX. Wherever it does not come to an answer the function is called here instead.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable
from select import select
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
LONGEST = 120.0  # seconds, after which it is taken to hang


class Aside(Generic[T]):
    """``function()``, begun at once in a child if there is a second core, else when it is asked for."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function, self._child, self._answers = function, 0, -1
        self._until = time.monotonic() + LONGEST
        if can_fork():
            self._begin()

    def _begin(self) -> None:
        self._answers, theirs = os.pipe()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # threads of libraries, which hold no lock that is needed here
                self._child = os.fork()
        except OSError:  # no more processes, or no memory promised for another
            os.close(self._answers)
            os.close(theirs)
            return
        if self._child == 0:
            code = 1
            try:
                _write_all(theirs, pickle.dumps(self._function()))
                code = 0
            finally:
                os._exit(code)  # neither handlers nor buffers of the parent
        os.close(theirs)

    def result(self) -> T:
        """What ``function()`` gives; it may be asked for once."""
        found = self._read() if self._child else b""
        self.cancel()
        return pickle.loads(found) if found else self._function()  # the child's own words

    def cancel(self) -> None:
        """End the child, whether or not it is done."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            os.close(self._answers)
            self._child = 0

    def _read(self) -> bytes:
        """All that the child says until it ends; nothing if it fails or takes too long."""
        parts: list[bytes] = []
        while (left := self._until - time.monotonic()) > 0 and select([self._answers], [], [], left)[0]:
            part = os.read(self._answers, 1 << 16)
            if not part:
                return b"".join(parts)
            parts.append(part)
        return b""


def can_fork() -> bool:
    """Whether a fork is safe here, and of use."""
    several = len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else False
    if not several or not hasattr(os, "fork") or signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        return False  # where children are not waited for, their numbers become others'
    return threading.active_count() == 1 and not torch.cuda.is_initialized()


def _write_all(descriptor: int, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
