"""How fast texts came: when their tokens were on the host, and one line about it for whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable

from vblackwell.units import format_bytes, format_seconds


class Pace:
    """Counts tokens as they come; made before the model is opened.

    Args:
        clock: of seconds.

    Attributes:
        tokens: of all texts so far.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._made = clock, clock()
        self._began, self._last, self._behind_seconds = self._made, 0.0, 0.0
        self._opened: float | None = None
        self._first: float | None = None
        self.tokens = self._behind = 0
        self._fresh = True

    def begin(self) -> None:
        """A text, or several at once, is asked for."""
        self._began, self._fresh = self._clock(), True
        if self._opened is None:
            self._opened = self._began - self._made

    def tick(self, rows: int = 1) -> None:
        """The next token of so many rows is here."""
        now = self._clock()
        if not self._fresh:
            self._behind, self._behind_seconds = self._behind + rows, self._behind_seconds + now - self._last
        elif self._first is None and rows:  # 0: every row ended at once
            self._first = now - self._began
        self.tokens, self._last, self._fresh = self.tokens + rows, now, False

    def line(self, level0_bytes: int | None = None) -> str:
        """What is said at the end; with the peak of a stack's level 0, if there is one."""
        parts = [f"opened in {format_seconds(self._opened or 0.0)}", f"{self.tokens} token{'s' * (self.tokens != 1)}"]
        if self._first is not None:
            parts.append(f"the first after {format_seconds(self._first)}")
        if self._behind_seconds:
            parts.append(f"then {self._behind / self._behind_seconds:.1f} a second")
        if level0_bytes is not None:
            parts.append(f"level 0 held at most {format_bytes(level0_bytes)}")
        return ", ".join(parts)
