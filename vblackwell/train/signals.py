"""SIGTERM and SIGINT ask for a checkpoint; a second SIGINT leaves at once.

A handler only notes the request: the loop looks between micro-batches, where the state is whole. Raising out of a
handler would land in the middle of an optimizer step or of a checkpoint. While data is read and encoded there is no
such state, and a handler raises: that takes minutes for a large corpus.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(BaseException):
    """A stop request where nothing is lost by leaving; like KeyboardInterrupt no ``Exception``, so that nothing takes
    it for an error.
    """


class StopRequest:
    """Whether somebody asked the run to stop, and the exit status that this means.

    Its handlers live inside ``with``.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[int, Any] = {}
        self._interrupts = False
        self._sigints = 0

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as shells report it: 143 for SIGTERM, 130 for SIGINT."""
        assert self.signal is not None
        return 128 + self.signal

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """While this lasts a request raises `Stopped`, between two operations of Python's."""
        self._interrupts = True
        try:
            if self.wanted:
                raise Stopped
            yield
        finally:
            self._interrupts = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._sigints += number == signal.SIGINT
        if self._sigints == 2:
            os._exit(128 + number)
        if self.signal is None:
            self.signal = signal.Signals(number)
            if self._interrupts:
                raise Stopped
