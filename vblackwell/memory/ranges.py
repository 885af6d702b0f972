"""Where free bytes are inside one address range: best fit, coalescing, exact undo.

Best fit by (size, offset) wastes least on the mixed sizes of weights, and the lowest offset among equals keeps files
and slabs compact and the outcome deterministic. Searches are bisections of a sorted list; inserting into it moves
pointers by `memmove`, which for any number of free ranges that occurs here is cheaper than a tree of Python objects.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class RangeAllocator:
    """Free ranges of ``[0, size)``. Not thread-safe, knows no alignment: its level passes multiples only."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self._size_at: dict[int, int] = {}  # start -> size
        self._start_before: dict[int, int] = {}  # end -> start
        if size:
            self._insert(0, size)

    @property
    def largest(self) -> int:
        """Size of the largest free range; 0 where there is none."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def empty(self) -> bool:
        """Whether everything is free."""
        return self.largest == self.size

    def best_fit(self, size: int) -> tuple[int, int] | None:
        """(size, start) of the free range that `allocate` would cut from; None where nothing fits."""
        index = bisect_left(self._by_size, (size, 0))
        return self._by_size[index] if index < len(self._by_size) else None

    def allocate(self, size: int) -> int | None:
        """Take ``size`` bytes; their offset, or None where no free range is large enough."""
        found = self.best_fit(size)
        if found is None:
            return None
        self.take(found[1], size)
        return found[1]

    def take(self, start: int, size: int) -> None:
        """Take exactly ``[start, start + size)``, which must be free: how a `free` is taken back."""
        found = start if start in self._size_at else self._containing(start)
        found_size = self._size_at[found]
        assert found <= start and start + size <= found + found_size, "the range to take is not free"
        self._remove(found, found_size)
        if start > found:
            self._insert(found, start - found)
        if start + size < found + found_size:
            self._insert(start + size, found + found_size - start - size)

    def free(self, start: int, size: int) -> None:
        """Give ``[start, start + size)`` back, merged with its free neighbours."""
        end = start + size
        after = self._size_at.get(end)
        if after is not None:
            self._remove(end, after)
            size += after
        before = self._start_before.get(start)
        if before is not None:
            self._remove(before, start - before)
            size += start - before
            start = before
        self._insert(start, size)

    def _containing(self, start: int) -> int:
        return max(free for free in self._size_at if free <= start)

    def _insert(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_before[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._size_at[start]
        del self._start_before[start + size]
