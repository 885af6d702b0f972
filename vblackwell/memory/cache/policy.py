"""Who is evicted first. `lru` here, `next_use` in its own file.

Entries sit in lists by (level, priority), each sorted from least to most recently used. Using an entry moves it to the end:
O(1). An entry that sinks to another level is older than some that are there, and walks in from the recent end to its
place, a few steps; so the order stays exact where entries came from different levels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from vblackwell.memory.cache.entry import Entry


class Policy(ABC):
    """Decides the order of victims. Called under the stack's lock only; the stack says what happens to each entry."""

    @abstractmethod
    def add(self, entry: Entry) -> None:
        """``entry`` is on ``entry.level`` now."""

    @abstractmethod
    def discard(self, entry: Entry) -> None:
        """``entry`` leaves the level that it was added to."""

    @abstractmethod
    def touch(self, entry: Entry, *, accessed: bool = True) -> None:
        """``entry`` was accessed, or (``accessed=False``) is about to be and was announced by a prefetch."""

    @abstractmethod
    def _in_order(self, level: int, priority: int) -> Iterator[Entry]:
        """The entries of a level with this priority, coldest first. No entry is added or discarded meanwhile."""

    @abstractmethod
    def colder(self, a: Entry, b: Entry) -> bool:
        """Whether ``a`` may make room for ``b``, priorities aside."""

    def victims(self, level: int, max_priority: int = 10, than: Entry | None = None) -> Iterator[Entry]:
        """Who may go from a level, first to go first: lower priority, then colder; only colder ones ``than`` that entry."""
        for priority in range(max_priority + 1):
            for entry in self._in_order(level, priority):
                if than is not None and not self.colder(entry, than):
                    break
                yield entry


class LRU(Policy):
    """Least recently used first, within the lowest priority."""

    def __init__(self) -> None:
        self._clock = 0
        self._newest: dict[tuple[int, int], Entry] = {}
        self._oldest: dict[tuple[int, int], Entry] = {}

    def add(self, entry: Entry) -> None:
        if entry.last_use == 0:
            self._clock += 1
            entry.last_use = self._clock
        self._sit(entry)

    def _sit(self, entry: Entry) -> None:
        seat = (entry.level, entry.priority)
        before, after = self._newest.get(seat), None
        while before is not None and before.last_use > entry.last_use:
            before, after = before.before, before
        entry.seat, entry.before, entry.after = seat, before, after
        if before is None:
            self._oldest[seat] = entry
        else:
            before.after = entry
        if after is None:
            self._newest[seat] = entry
        else:
            after.before = entry

    def discard(self, entry: Entry) -> None:
        self._rise(entry)

    def _rise(self, entry: Entry) -> None:
        seat, before, after = entry.seat, entry.before, entry.after
        assert seat is not None, f"{entry.key} is on no level"
        if before is not None:
            before.after = after
        elif after is not None:
            self._oldest[seat] = after
        else:
            del self._oldest[seat]
        if after is not None:
            after.before = before
        elif before is not None:
            self._newest[seat] = before
        else:
            del self._newest[seat]
        entry.seat = entry.before = entry.after = None

    def touch(self, entry: Entry, *, accessed: bool = True) -> None:
        self._clock += 1
        entry.last_use = self._clock
        if entry.after is not None:  # else it is the most recent one already
            self._rise(entry)
            self._sit(entry)

    def _in_order(self, level: int, priority: int) -> Iterator[Entry]:
        entry = self._oldest.get((level, priority))
        while entry is not None:
            yield entry
            entry = entry.after

    def colder(self, a: Entry, b: Entry) -> bool:
        return a.last_use < b.last_use
