"""Belady's policy on a trace that repeats, as the accesses of training do: evict what is needed furthest in the future.

The policy records the keys that are accessed and looks for the shortest period with the prefix function of Knuth, Morris and
Pratt, which costs O(1) amortised an access: a recorded trace of ``n`` keys with longest border ``b`` has period
``n - b``, and is taken to repeat once it holds two whole periods. From then on every access tells when the same key comes
next. With three whole periods recording stops, and a pointer walks round the cycle. The first access that is not the expected
one ends the forecast: victims are the least recent again, and recording goes on.

Where no period is known, `duel` counts what least recent and least frequent would have had of hits, and the frequency rule takes over
while it is better beyond chance: on routing to experts, not on noise. It makes no room for less than LRU would, so an accessed or
announced entry still comes up. While a period is known the duel hears nothing and costs nothing; after one that lasted it
begins anew. docs/precision.md compares the rules.

Recording starts over where no period shows within 16 times the number of different keys, so an irregular start (loading,
warm-up) does not hide the rhythm that follows. Why not the last distance between two accesses of a key as the
forecast: training goes forward and backward through the layers, and there every key has two alternating distances.

Victims come from a heap per (level, priority) with lazy deletion: O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from vblackwell.memory.cache.duel import MEMORY, Duel
from vblackwell.memory.cache.entry import Entry
from vblackwell.memory.cache.policy import LRU

NEVER = float("inf")
_HeapItem = tuple[float, int, str, Entry]  # (-next_use, last_use, key, entry)


class Rhythm:
    """Finds the period of a sequence of keys, one key at a time."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._border: list[int] = []
        self._distinct: set[str] = set()
        self._steady = False
        self.cycle: list[str] | None = None
        self.position = 0  # in the cycle, of the key that is expected next

    def hear(self, key: str) -> None:
        """Take the next key; afterwards `cycle` is the repeating sequence, or None."""
        if self._steady:
            assert self.cycle is not None
            if key == self.cycle[self.position]:
                self.position = (self.position + 1) % len(self.cycle)
                return
            self.__init__()
        self._record(key)
        length = len(self._keys)
        period = length - self._border[-1]
        if length < 2 * period:
            self.cycle = None
            if length > 16 * len(self._distinct) + 64:
                self.__init__()
            return
        if self.cycle is None or len(self.cycle) != period:
            self.cycle = self._keys[:period]
        self.position = length % period
        if length >= 3 * period:
            self._steady = True
            self._keys, self._border = [], []

    def _record(self, key: str) -> None:
        border = self._border[-1] if self._border else 0
        if self._keys:
            while border and self._keys[border] != key:
                border = self._border[border - 1]
            if self._keys[border] == key:
                border += 1
        self._keys.append(key)
        self._border.append(border)
        self._distinct.add(key)


class NextUse(LRU):
    """Furthest next use first, within the lowest priority; while no period is known least recent first, or, where that would have had
    more hits lately, least frequent with ageing, sparing what is likely or announced to come at once."""

    def __init__(self) -> None:
        super().__init__()
        self._rhythm = Rhythm()
        self._cycle: list[str] | None = None
        self._gaps: list[int] = []  # from each position of the cycle to the next one of the same key
        self._first: dict[str, list[int]] = {}
        self._now = 0
        self._members: dict[str, Entry] = {}
        self._heaps: dict[tuple[int, int], list[_HeapItem]] = {}
        self._duel = Duel()
        self._duel_heard = 0  # when, on the clock of accesses
        self._by_frequency = False
        self._top = 0  # entries on level 0

    @property
    def periodic(self) -> bool:
        """Whether the trace repeats, so that the future is known."""
        return self._cycle is not None

    @property
    def by_frequency(self) -> bool:
        """Whether victims are the least frequent now, as no period is known and that is better than the least recent."""
        return self._by_frequency

    def ahead(self, count: int) -> list[str]:
        """The keys of the next ``count`` accesses; none while no period is known."""
        cycle, at = self._cycle or [], self._rhythm.position
        return [cycle[(at + step) % len(cycle)] for step in range(count)] if cycle else []

    def add(self, entry: Entry) -> None:
        super().add(entry)
        self._members[entry.key] = entry
        self._top += entry.level == 0
        if self._ranked():
            entry.next_use = self._forecast(entry.key)
            self._push(entry)

    def discard(self, entry: Entry) -> None:
        self._top -= entry.seat is not None and entry.seat[0] == 0
        super().discard(entry)
        if self._members.get(entry.key) is entry:  # not what has replaced it already
            del self._members[entry.key]

    def touch(self, entry: Entry, *, accessed: bool = True) -> None:
        super().touch(entry, accessed=accessed)
        if not accessed:
            if self._ranked() and entry.seat is not None:
                self._push(entry)
            return
        self._now += 1
        self._rhythm.hear(entry.key)
        if self._rhythm.cycle is not self._cycle:
            self._learn(self._rhythm.cycle)
        elif self._cycle is not None:
            entry.next_use = self._now + self._gaps[self._rhythm.position - 1]
            if entry.seat is not None:
                self._push(entry)
        if self._cycle is None:
            self._weigh(entry)

    def _weigh(self, entry: Entry) -> None:
        """Let the duel hear an access without a period, and follow what it says."""
        if self._top:
            if self._now - self._duel_heard > MEMORY:  # its evidence is of before a period that lasted
                self._duel = Duel()
            self._duel_heard = self._now
            self._duel.hear(entry.key, self._top)
        if self._duel.won != self._by_frequency:
            self._by_frequency, self._heaps = self._duel.won, {}
            if self._by_frequency:
                self._rank()
        elif self._by_frequency:
            entry.next_use = self._forecast(entry.key)
            if entry.seat is not None:
                self._push(entry)

    def _ranked(self) -> bool:
        """Whether the heaps are kept: victims are not simply the least recent."""
        return self._cycle is not None or self._by_frequency

    def _learn(self, cycle: list[str] | None) -> None:
        self._cycle = cycle
        self._by_frequency, self._heaps = False, {}
        if cycle is None:
            return
        self._first = {}
        for position, key in enumerate(cycle):
            self._first.setdefault(key, []).append(position)
        following = {key: positions[0] + len(cycle) for key, positions in self._first.items()}
        self._gaps = [0] * len(cycle)
        for position in reversed(range(len(cycle))):
            self._gaps[position] = following[cycle[position]] - position
            following[cycle[position]] = position
        self._rank()

    def _rank(self) -> None:
        """Forecast every entry anew, into empty heaps."""
        for entry in self._members.values():
            entry.next_use = self._forecast(entry.key)
            self._push(entry)

    def _forecast(self, key: str) -> float:
        """When ``key`` is accessed next, on the clock of accesses; without a period, on an axis for comparison alone."""
        if self._cycle is None:
            return -self._duel.score(key)
        positions = self._first.get(key)
        if not positions:
            return NEVER
        at, length = self._rhythm.position, len(self._cycle)
        return self._now + 1 + min((position - at) % length for position in positions)

    def _push(self, entry: Entry) -> None:
        assert entry.seat is not None
        heap = self._heaps.setdefault(entry.seat, [])
        heapq.heappush(heap, (-entry.next_use, entry.last_use, entry.key, entry))
        if len(heap) > 2 * len(self._members) + 64:
            live = {item[2]: item for item in heap if self._current(item, entry.seat)}
            heap[:] = sorted(live.values(), key=lambda item: item[:3])

    @staticmethod
    def _current(item: _HeapItem, seat: tuple[int, int]) -> bool:
        entry = item[3]
        return entry.seat == seat and -item[0] == entry.next_use and item[1] == entry.last_use

    def _in_order(self, level: int, priority: int) -> Iterator[Entry]:
        if not self._ranked():
            yield from super()._in_order(level, priority)
            return
        seat, soon = (level, priority), self._duel.soon() if self._by_frequency else ()
        heap, seen, spared = self._heaps.get(seat, []), {}, []
        try:
            while heap:
                item = heapq.heappop(heap)
                if self._current(item, seat) and item[2] not in seen:
                    seen[item[2]] = item
                    if self._by_frequency and (item[2] in soon or item[3].expected):
                        spared.append(item[3])
                    else:
                        yield item[3]
            yield from spared
        finally:
            for item in seen.values():
                heapq.heappush(heap, item)

    def colder(self, a: Entry, b: Entry) -> bool:
        if self._cycle is None:
            return super().colder(a, b) or (self._by_frequency and a.next_use > b.next_use)
        return (a.next_use, -a.last_use) > (b.next_use, -b.last_use)
