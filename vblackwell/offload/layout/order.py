"""The order in which groups are used, learned from one pass and followed in the next.

A pass is one forward of the whole model with whatever follows it (recompute, backward). Training repeats it, so the
last pass predicts this one. A deviation (a branch, a module called twice) only costs the prediction: the cursor looks
for the next place where the group occurs, and until it finds one nothing is predicted.
"""

from __future__ import annotations

from bisect import bisect_right

NEVER = 1 << 60
LONGEST_PASS = (
    1 << 16
)  # uses; where nobody says that a pass begins, as when a model's parts are called by themselves, one does then


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

    def use(self, index: int) -> None:
        """Group ``index`` is used now. Repetitions in a row count once."""
        if self._current and self._current[-1] == index:
            return
        if len(self._current) == LONGEST_PASS:
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
        """Uses until ``index`` comes again; beyond this pass it counts on into the next; NEVER if not known."""
        positions = self._positions.get(index)
        if not positions or self._cursor is None:
            return NEVER
        at = bisect_right(positions, self._cursor - 1)
        position = positions[at] if at < len(positions) else len(self._previous) + positions[0]
        return position - self._cursor

    def expect(self, order: list[int]) -> None:
        """Predict this for the first pass."""
        assert not self._current, "nothing was used yet"
        self._current = order
        self.begin_pass()

    def upcoming(self, limit: int, *, wrap: bool = False) -> list[int]:
        """The next ``limit`` distinct groups of this pass, soonest first. With ``wrap`` of the next pass too: updates may lie before it."""
        if self._cursor is None:
            return []
        found: dict[int, None] = {}
        count = len(self._previous)
        for position in range(self._cursor, count + self._cursor if wrap else count):
            found.setdefault(self._previous[position % count])
            if len(found) == limit:
                break
        return list(found)
