"""The order of victims: least recently used, or, on a trace that repeats, needed furthest in the future (Belady).

Entries sit in an order for each (level, priority), from least to most recently used, and of `next_use` in a heap, by
their next use, the furthest first, where stale items stay until they come up: O(log n). (The last distance between two
accesses of a key is no forecast: forward and backward give every key two alternating ones.)
"""

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from itertools import chain

from vblackwell.memory.cache.entry import Entry

_HeapItem = tuple[float, int, Entry]  # (-next_use, last_use, entry); no two entries have the same last use


class LRU:
    """Least recently used first, within the lowest priority. Called under the stack's lock only."""

    def __init__(self) -> None:
        self._clock = 0
        self._order: defaultdict[tuple[int, int], OrderedDict[Entry, None]] = defaultdict(OrderedDict)

    def add(self, entry: Entry) -> None:
        """``entry`` is on ``entry.level`` now."""
        if entry.last_use == 0:
            self._clock += 1
            entry.last_use = self._clock
        entry.seat = (entry.level, entry.priority)
        order, newer = self._order[entry.seat], []
        while order and next(reversed(order)).last_use > entry.last_use:
            newer.append(order.popitem()[0])
        order[entry] = None
        order.update(dict.fromkeys(reversed(newer)))

    def discard(self, entry: Entry) -> None:
        """``entry`` leaves the level that it was added to."""
        assert entry.seat is not None, f"{entry.key} is on no level"
        del self._order[entry.seat][entry]
        entry.seat = None

    def touch(self, entry: Entry, *, accessed: bool = True) -> None:
        """``entry`` was accessed, or (``accessed=False``) is about to be and was announced by a prefetch."""
        self._clock += 1
        entry.last_use = self._clock
        if entry.seat is not None:
            self._order[entry.seat].move_to_end(entry)

    def victims(self, level: int, max_priority: int = 10, than: Entry | None = None) -> Iterator[Entry]:
        """What may leave a level, colder ``than`` that entry: lower priority first, then colder."""
        for priority in range(max_priority + 1):
            for entry in self._coldest_first((level, priority)):
                if than is not None and not self.colder(entry, than):
                    break
                yield entry

    def colder(self, a: Entry, b: Entry) -> bool:
        """Whether ``a`` may make room for ``b``, priorities aside."""
        return a.last_use < b.last_use

    def _coldest_first(self, seat: tuple[int, int]) -> Iterator[Entry]:
        return iter(self._order.get(seat, ()))


class Rhythm:
    """Finds the period of a sequence of keys, one key at a time.

    Knuth, Morris and Pratt's prefix function finds the shortest at O(1) amortised a key: ``n`` recorded keys with
    longest border ``b`` have period ``n - b``, which is taken to repeat once two whole periods are there; with three,
    recording stops and a pointer walks round the cycle, until the first unexpected key. Recording starts over where no
    period shows within 16 times the number of different keys: an irregular start hides nothing.
    """

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
        border = self._border[-1] if self._border else 0
        if self._keys:
            while border and self._keys[border] != key:
                border = self._border[border - 1]
            border += self._keys[border] == key
        self._keys.append(key)
        self._border.append(border)
        self._distinct.add(key)
        length, period = len(self._keys), len(self._keys) - border
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


class NextUse(LRU):
    """Furthest next use first, within the lowest priority; least recent first while no period is known."""

    def __init__(self) -> None:
        super().__init__()
        self._rhythm = Rhythm()
        self.cycle: list[str] | None = None  # that the trace repeats, so that the future is known
        self._gaps: list[int] = []  # from each position of the cycle to the next one of the same key
        self._positions: defaultdict[str, list[int]] = defaultdict(list)  # of each key in the cycle
        self._now = 0
        self._heaps: defaultdict[tuple[int, int], list[_HeapItem]] = defaultdict(list)  # empty without a cycle

    def add(self, entry: Entry) -> None:
        super().add(entry)
        self._forecast(entry)

    def touch(self, entry: Entry, *, accessed: bool = True) -> None:
        super().touch(entry, accessed=accessed)
        if accessed:
            self._now += 1
            self._rhythm.hear(entry.key)
            if self._rhythm.cycle is not self.cycle:
                self._learn(self._rhythm.cycle)
                return
            if self.cycle is not None:
                entry.next_use = self._now + self._gaps[self._rhythm.position - 1]
        self._push(entry)

    def _learn(self, cycle: list[str] | None) -> None:
        self.cycle = cycle
        self._positions.clear()
        self._heaps.clear()
        if cycle is None:
            return
        self._gaps = [0] * len(cycle)
        for position, key in enumerate(cycle):
            self._positions[key].append(position)
        for positions in self._positions.values():
            for position, following in zip(positions, [*positions[1:], positions[0] + len(cycle)], strict=True):
                self._gaps[position] = following - position
        for entry in chain.from_iterable(self._order.values()):
            self._forecast(entry)

    def _forecast(self, entry: Entry) -> None:
        """Learn when ``entry`` is accessed next, on the clock of accesses."""
        if self.cycle is not None:
            at, length = self._rhythm.position, len(self.cycle)
            steps = ((position - at) % length for position in self._positions.get(entry.key, ()))
            entry.next_use = self._now + 1 + min(steps, default=float("inf"))
            self._push(entry)

    def _push(self, entry: Entry) -> None:
        if self.cycle is None or entry.seat is None:
            return
        heap = self._heaps[entry.seat]
        heapq.heappush(heap, (-entry.next_use, entry.last_use, entry))
        if len(heap) > 2 * len(self._order[entry.seat]) + 64:
            heap[:] = sorted({item for item in heap if self._is_true(item, entry.seat)})

    @staticmethod
    def _is_true(item: _HeapItem, seat: tuple[int, int]) -> bool:
        return item == (-item[2].next_use, item[2].last_use, item[2]) and item[2].seat == seat

    def _coldest_first(self, seat: tuple[int, int]) -> Iterator[Entry]:
        if self.cycle is None:
            yield from super()._coldest_first(seat)
            return
        heap, seen = self._heaps[seat], set[_HeapItem]()
        try:
            while heap:
                item = heapq.heappop(heap)
                if self._is_true(item, seat) and item not in seen:
                    seen.add(item)
                    yield item[2]
        finally:
            for item in seen:
                heapq.heappush(heap, item)

    def colder(self, a: Entry, b: Entry) -> bool:
        if self.cycle is None:
            return super().colder(a, b)
        return (a.next_use, -a.last_use) > (b.next_use, -b.last_use)


POLICIES: dict[str, type[LRU]] = {"lru": LRU, "next_use": NextUse}
