"""PyTorch's caching allocator as arithmetic: what a sequence of allocations makes it hold, and whether a cap holds it.

Its rules, as in c10/cuda/CUDACachingAllocator.cpp with default settings and one stream. A size is rounded up to 512 B.
Up to 1 MiB comes from the small pool, whose segments are 2 MiB; more from the large pool, whose segments are 20 MiB for
sizes below 10 MiB, else the size rounded up to 2 MiB. The free block that fits best is taken, among equals the one at
the lowest address (a later segment lies below an earlier one: fourteen recorded runs on an H200 are met to the byte),
and split if what is left is at least 512 B (small pool) or more than 1 MiB (large pool). A freed block joins its free
neighbours. Segments are kept; only when the cap is hit are those that are entirely free given back, once.

With expandable segments each pool is one range of addresses, mapped in pages of 2 MiB (small) or 20 MiB (large) where
it needs to grow, and split to the last 512 B; hitting the cap unmaps the whole pages inside free blocks.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vblackwell.errors import InsufficientMemory
from vblackwell.units import GiB, MiB, align_up, format_bytes

MIN_BLOCK, SMALL_SIZE, MIN_LARGE = 512, MiB, 10 * MiB
SMALL_SEGMENT, LARGE_SEGMENT, ROUND_LARGE = 2 * MiB, 20 * MiB, 2 * MiB
_SPAN = 5 << 58  # addresses of an expandable segment: more than any GPU has, and whole pages of both sizes


@dataclass(slots=True, eq=False)
class Block:
    """A range of a segment: allocated, free, or (expandable segments) not mapped."""

    address: int
    size: int
    small: bool
    mapped: bool = True
    allocated: bool = False
    previous: "Block | None" = None
    next: "Block | None" = None

    @property
    def is_free(self) -> bool:
        return self.mapped and not self.allocated

    @property
    def could_become(self) -> int:
        return self.size + (self.next.size if self.next and not self.next.mapped else 0)


def round_size(num_bytes: int) -> int:
    """What a request of ``num_bytes`` > 0 is counted as."""
    return max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """Bytes that are taken from the driver where no free block holds ``size`` (already rounded) bytes."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE else align_up(size, ROUND_LARGE)


class CachingAllocator:
    """Blocks without bytes, at most ``cap_bytes`` (None: no limit); ``expandable``: expandable_segments:True.

    Peaks are as `torch.cuda.max_memory_allocated` and `max_memory_reserved` count; of a `replay`, ``peak_event`` is the
    event of the first, and ``fits`` says that every allocation succeeded.
    """

    def __init__(self, cap_bytes: int | None = None, expandable: bool = False) -> None:
        self.cap_bytes, self.expandable = cap_bytes, expandable
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.flushes = self.peak_event = 0
        self.fits = True
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._address = _SPAN
        self._ranges = {small: Block(_SPAN * (2 - small), _SPAN, small, mapped=False) for small in (True, False)}

    def malloc(self, num_bytes: int) -> Block | None:
        """A block for ``num_bytes``; None for 0. Raises InsufficientMemory where even a flush does not help."""
        if num_bytes == 0:
            return None
        size = round_size(num_bytes)
        small = size <= SMALL_SIZE
        block = self._best_fit(size, small) or self._grow(size, small)
        if block is None:
            self._flush()
            block = self._grow(size, small)
        if block is None:
            cap, used, held = self.cap_bytes or 0, format_bytes(self.allocated), format_bytes(self.reserved)
            wrong = f"an allocation of {format_bytes(size)} does not fit"
            said = f"{wrong}: {used} are in use and {held} reserved of {format_bytes(cap)}"
            raise InsufficientMemory(said, needed_bytes=self.reserved + size, available_bytes=cap)
        rest = block.size - size
        if rest >= MIN_BLOCK if small or self.expandable else rest > SMALL_SIZE:
            self._put(self._cut(block, size))
        block.allocated = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block | None) -> None:
        if block is None:
            return
        assert block.allocated, "freed twice"
        block.allocated = False
        self.allocated -= block.size
        self._put(self._join(block))

    def _best_fit(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        index = bisect_left(free, (size,))
        if self.expandable:  # leave the block that could still grow to those who need more than there is
            while index + 1 < len(free) and free[index + 1][2].could_become < free[index][2].could_become:
                index += 1
        return free.pop(index)[2] if index < len(free) else None

    def _put(self, block: Block) -> None:
        insort(self._free[block.small], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.address))]

    def _cut(self, block: Block, size: int) -> Block:
        """Shorten ``block`` to ``size``; the rest of it."""
        rest = Block(block.address + size, block.size - size, block.small, block.mapped, False, block, block.next)
        if rest.next:
            rest.next.previous = rest
        block.size, block.next = size, rest
        return rest

    def _join(self, block: Block) -> Block:
        """``block``, which is in no list, with its free neighbours, which leave theirs."""
        if block.previous and block.previous.is_free:
            self._take(block.previous)
            block = self._absorb(block.previous, block)
        if block.next and block.next.is_free:
            self._take(block.next)
            self._absorb(block, block.next)
        return block

    @staticmethod
    def _absorb(left: Block, right: Block) -> Block:
        left.size += right.size
        left.next = right.next
        if right.next:
            right.next.previous = left
        return left

    def _reserve(self, num_bytes: int) -> bool:
        if self.cap_bytes is not None and self.reserved + num_bytes > self.cap_bytes:
            return False
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _grow(self, size: int, small: bool) -> Block | None:
        if self.expandable:
            return self._map(size, small)
        wanted = segment_size(size)
        if not self._reserve(wanted):
            return None
        self._address -= wanted + 16 * GiB  # the driver hands out addresses from the top down; a gap between pools
        return Block(self._address, wanted, small)

    def _map(self, size: int, small: bool) -> Block | None:
        """The lowest run of free and unmapped blocks that has room, its unmapped parts mapped by whole pages."""
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        start = self._lowest_run(size, small)
        while True:
            hole = start if not start.mapped else start.next
            assert hole is not None and not hole.mapped
            missing = align_up(size if hole is start else size - start.size, page)
            if not self._reserve(min(missing, hole.size)):
                return None
            if hole.size > missing:
                self._cut(hole, missing)
            hole.mapped = True
            start = self._join(hole)
            if start.size >= size:
                return start
            self._put(start)

    def _lowest_run(self, size: int, small: bool) -> Block:
        """Its first block, which is free, or not mapped where none before it is free."""
        block: Block | None = self._ranges[small]
        while block:
            if not block.mapped:
                first = block.previous if block.previous and block.previous.is_free else block
                run, each = 0, first
                while each and not each.allocated and run < size:
                    run, each = run + each.size, each.next
                if run >= size:
                    return first
            block = block.next
        raise AssertionError("an expandable segment holds everything")

    def _flush(self) -> None:
        self.flushes += 1
        blocks = [block for free in self._free.values() for _, _, block in free]
        self._free = {True: [], False: []}
        for block in blocks:
            if self.expandable:
                self._unmap(block)
            elif block.previous or block.next:
                self._put(block)
            else:
                self.reserved -= block.size

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block, which is in no list; what is left of it stays."""
        page = SMALL_SEGMENT if block.small else LARGE_SEGMENT
        first = align_up(block.address, page)
        last = (block.address + block.size) // page * page
        if last <= first:
            self._put(block)
            return
        if first > block.address:
            left, block = block, self._cut(block, first - block.address)
            self._put(left)
        if block.address + block.size > last:
            self._put(self._cut(block, last - block.address))
        self.reserved -= block.size
        block.mapped = False
        for before, after in ((block, block.next), (block.previous, block)):
            if before and after and not before.mapped and not after.mapped:
                self._absorb(before, after)


def play(trace: Any, allocator: CachingAllocator) -> Iterator[int]:
    """Run the events of a `Trace`, one a step; each is given when it has happened."""
    blocks: dict[int, Block | None] = {}
    for event in trace.events:
        if event >= 0:
            blocks[event] = allocator.malloc(trace.sizes[event])
        else:
            allocator.free(blocks.pop(~event))
        yield event


def replay(trace: Any, cap_bytes: int | None = None, expandable: bool = False) -> CachingAllocator:
    """An allocator that the events of a `Trace` went through, as far as they fitted."""
    allocator = CachingAllocator(cap_bytes, expandable)
    peak = 0
    try:
        for position, _ in enumerate(play(trace, allocator)):
            if allocator.peak_allocated > peak:
                peak, allocator.peak_event = allocator.peak_allocated, position
    except InsufficientMemory:
        allocator.fits = False
    return allocator
