"""What a stack counts, and the shape in which it tells.

Counting must cost less than a microsecond, so it is integers in lists. Seconds of an asynchronous copy are only known
later: their clocks wait in a queue, and every new one, and every question, first collects those that have stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from vblackwell.memory.level import Level
from vblackwell.memory.transfer import Clock, Transfer

Place = int | str  # a level's number, or the name of a device that belongs to no level


class Statistics:
    """Counters of one stack. Called under the stack's lock."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self._levels = levels
        count = len(levels)
        self.hits = [0] * count
        self.misses = [0] * count
        self.evictions = [0] * count
        self.promotions = [0] * count
        self.demotions = [0] * count
        self.stall_seconds = 0.0
        self._bytes: dict[tuple[Place, Place], int] = {}
        self._seconds: dict[tuple[Place, Place], float] = {}
        self._busy_until: dict[tuple[Place, Place], float] = {}
        self._under_way: deque[tuple[Place, Place, Clock]] = deque()

    def found(self, level: int) -> None:
        """A key was asked for and found on ``level``: a hit there, a miss on every level above."""
        for above in range(level):
            self.misses[above] += 1
        self.hits[level] += 1

    def moved(self, source: int, target: int, *, evicted: bool) -> None:
        """A key went from one level to another, up or down."""
        if target < source:
            self.promotions[target] += 1
        elif target > source:
            self.demotions[source] += 1
            self.evictions[source] += evicted

    def link(self, source: Place, target: Place, num_bytes: int, seconds: float | None) -> None:
        """Bytes went over a link, in known time or not."""
        pair = (source, target)
        self._bytes[pair] = self._bytes.get(pair, 0) + num_bytes
        if seconds is not None:
            self._seconds[pair] = self._seconds.get(pair, 0.0) + seconds

    def link_started(self, source: Place, target: Place, num_bytes: int, transfer: Transfer) -> None:
        """Bytes are going over a link; the time is collected when ``transfer`` is done."""
        self.link(source, target, num_bytes, None)
        self._collect()
        if transfer.clock is not None:
            self._under_way.append((source, target, transfer.clock))

    def _collect(self) -> None:
        while self._under_way and (took := self._under_way[0][2]()) is not None:
            source, target, _ = self._under_way.popleft()
            begin, seconds = took
            if begin is not None:
                # Several at a time keep a link busy once; they are collected in the order in which they were asked for.
                end, busy_until = begin + seconds, self._busy_until.get((source, target), begin)
                seconds = max(0.0, end - max(begin, busy_until))
                self._busy_until[source, target] = max(busy_until, end)
            self.link(source, target, 0, seconds)

    def report(self) -> dict[str, Any]:
        """As `VGPUStack.get_stats` promises."""
        self._collect()
        levels = [
            {
                "device": level.name,
                "capacity_bytes": level.capacity_bytes,
                "used_bytes": level.used_bytes,
                "peak_bytes": level.peak_bytes,
                "hits": self.hits[i],
                "misses": self.misses[i],
                "evictions": self.evictions[i],
                "promotions": self.promotions[i],
                "demotions": self.demotions[i],
            }
            for i, level in enumerate(self._levels)
        ]
        links = [
            {
                "source": self._name(pair[0]),
                "destination": self._name(pair[1]),
                "bytes": num_bytes,
                "seconds": self._seconds.get(pair, 0.0),
            }
            for pair, num_bytes in self._bytes.items()
        ]
        return {"levels": levels, "links": links, "stall_seconds": self.stall_seconds}

    def _name(self, place: Place) -> str:
        return place if isinstance(place, str) else self._levels[place].name
