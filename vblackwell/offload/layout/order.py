"""The order in which groups are used, learned from one pass and followed in the next.

A pass is one forward of the whole model with what follows it (recompute, backward). Training repeats it, so the last
pass predicts this one. A deviation (a branch, a module called twice) only costs the prediction: the cursor moves to the
next place where the group occurs, and until there is one nothing is predicted.
"""

from __future__ import annotations

from bisect import bisect_right

NEVER = 1 << 60
# Uses, after which a pass begins where nobody says that one does, as when a model's parts are called by themselves.
MAX_PASS = 1 << 16


class AccessTrace:
    """Records uses of integer group indices and predicts the next ones."""

    def __init__(self) -> None:
        self._previous: list[int] = []
        self._positions: dict[int, list[int]] = {}
        self._current: list[int] = []
        self._cursor: int | None = 0

    def begin_pass(self) -> None:
        """The next use opens a new pass; the recorded one becomes the prediction."""
        if self._current:
            self._previous = self._current
            self._positions = {}
            for position, index in enumerate(self._previous):
                self._positions.setdefault(index, []).append(position)
        self._current = []
        self._cursor = 0

    def forget_pass(self) -> None:
        """What was used since `begin_pass` is no pass to predict by."""
        self._current = []

    @property
    def last_pass(self) -> list[int]:
        """The recorded pass that is the prediction."""
        return self._previous

    def use(self, index: int) -> None:
        """Group ``index`` is used now. Repetitions in a row count once."""
        if self._current and self._current[-1] == index:
            return
        if len(self._current) == MAX_PASS:
            self.begin_pass()
        self._current.append(index)
        if self._cursor is None or self._cursor >= len(self._previous) or self._previous[self._cursor] != index:
            self._cursor = self._find(index, self._cursor or 0)
        if self._cursor is not None:
            self._cursor += 1

    def _find(self, index: int, start: int) -> int | None:
        positions = self._positions.get(index, [])
        at = bisect_right(positions, start - 1)
        return positions[at] if at < len(positions) else None

    def next_use(self, index: int) -> int:
        """Uses until ``index`` comes again, counted on into the next pass; NEVER if that is not known."""
        positions = self._positions.get(index)
        if not positions or self._cursor is None:
            return NEVER
        position = self._find(index, self._cursor)
        return (len(self._previous) + positions[0] if position is None else position) - self._cursor

    def expect(self, order: list[int]) -> None:
        """Predict this for the first pass."""
        assert not self._current, "nothing was used yet"
        self._current = order
        self.begin_pass()

    def upcoming(self, limit: int, *, wrap: bool = False) -> list[int]:
        """The next ``limit`` distinct groups of this pass, soonest first; with ``wrap`` also of the next pass."""
        if self._cursor is None:
            return []
        found: dict[int, None] = {}
        count = len(self._previous)
        for position in range(self._cursor, count + self._cursor if wrap else count):
            found.setdefault(self._previous[position % count])
            if len(found) == limit:
                break
        return list(found)
