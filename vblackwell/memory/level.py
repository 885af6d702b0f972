"""What a level is: a place that holds extents of bytes, counts them against a cap, and moves them asynchronously.

1. A transfer starts after everything that was queued, at the time of the call, on the *current* CUDA stream of every
   device that takes part: memory that the caller just allocated, or just finished computing on, may be passed in.
2. Nothing may touch the source (write) or the destination (read or write) until the transfer is done: `wait()` for
   the host, `wait_on(stream)` for work that is queued on a CUDA stream afterwards.

The caller orders two transfers on one extent. Allocating has two halves, `place` (arithmetic, can be undone) and
`materialise` (memory), and so has freeing: the stack plans a whole cascade of moves before the first byte moves.
"""

import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import torch

from vblackwell.errors import InsufficientMemory
from vblackwell.memory.transfer import (
    COPY_THREADS,
    Transfer,
    copy_pool,
    current_stream,
    flat_bytes,
    no_inference_mode,
    start_copy,
)
from vblackwell.units import align_up, format_bytes


def level_in_words(label: str) -> str:
    """A level's name, of several with one '#' and a number behind it, as people call it."""
    kind, number, _ = label.replace("cuda:", "GPU:").replace(":0", "").partition("#")
    return {"arena": "fast memory", "cpu": "RAM", "ssd": "disk"}.get(kind, kind) + number


@dataclass(frozen=True, eq=False)
class Extent:
    """A contiguous range of bytes held by one level. Compared by identity; made and freed only by its level."""

    offset: int  # in the level's own address space
    num_bytes: int  # as asked for
    held_bytes: int  # that rounded up to the level's alignment, which it accounts
    handle: Any = None  # the level's own bookkeeping
    born_zero: bool = False  # whether all its bytes were zero when it was placed


class Level:
    """A place for bytes. Thread-safe: this class counts, checks and locks.

    A level says how a range is taken and given back (`_take`, `_give`, `_retake`), what memory stands for it
    (`materialise`, `release`), and how its bytes are seen (`view`) or copied (`read`, `write`). ``device`` is where
    `view` tensors live (None for a disk), extents start at, and are counted in, multiples of ``alignment``.
    """

    def __init__(
        self, name: str, device: torch.device | None, capacity_bytes: int, alignment: int, threads: int = COPY_THREADS
    ) -> None:
        self.name, self.device, self.alignment = name, device, alignment
        self.capacity_bytes = capacity_bytes // alignment * alignment
        self._lock = threading.Lock()
        self._used = self.peak_bytes = 0
        self._live: set[Extent] = set()
        self._leaving: deque[Extent] = deque()
        self._threads = copy_pool(name, threads)

    @property
    def used_bytes(self) -> int:
        self._end_leaving()
        return self._used

    @property
    def free_bytes(self) -> int:
        """What the cap leaves, in one piece or several."""
        return self.capacity_bytes - self.used_bytes

    def can_allocate(self, num_bytes: int) -> bool:
        """Whether `allocate` would succeed now. Exact: fragmentation counts."""
        held_bytes = align_up(num_bytes, self.alignment)
        with self._locked():
            return self._used + held_bytes <= self.capacity_bytes and self._fits(held_bytes)

    def allocate(self, num_bytes: int) -> Extent:
        """A new extent of ``num_bytes`` > 0, contents undefined; raises InsufficientMemory, or DiskError."""
        extent = self.place(num_bytes)
        try:
            self.materialise(extent)
        except BaseException:
            self.displace(extent)
            raise
        return extent

    def free(self, extent: Extent) -> None:
        """Give ``extent``, whose transfers are done, back. Raises KeyError for an extent that is not here.

        At any moment: a finalizer may free inside a call of this level. What cannot go at once goes before the level is
        asked for anything else.
        """
        if extent not in self._live:
            raise KeyError(extent)
        self._leaving.append(extent)
        self._end_leaving()

    def _end_leaving(self) -> None:
        while self._leaving and self._lock.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._lock.release()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            self._let_go()
            yield

    def _let_go(self) -> None:
        while self._leaving:
            extent = self._leaving.popleft()
            self._displace(extent)
            self.release(extent)

    def place(self, num_bytes: int) -> Extent:
        """The first half of `allocate`: decide where and account for it, touching no memory. Raises as `allocate`."""
        assert num_bytes > 0, "an extent holds at least one byte"
        held_bytes = align_up(num_bytes, self.alignment)
        with self._locked():
            found = self._take(held_bytes) if self._used + held_bytes <= self.capacity_bytes else None
            if found is None:
                free = self.capacity_bytes - self._used
                reason = "" if num_bytes > free else ", but not in one piece"
                message = (
                    f"{self.name} has no room for {format_bytes(num_bytes)}: {format_bytes(free)} of "
                    f"{format_bytes(self.capacity_bytes)} are free{reason}; give the level more capacity or keep less "
                    "on it"
                )
                raise InsufficientMemory(message, needed_bytes=num_bytes, available_bytes=free)
            extent = Extent(found[0], num_bytes, held_bytes, *found[1:])
            self._count(extent)
            return extent

    def materialise(self, extent: Extent) -> None:
        """The second half of `allocate`, idempotent: memory for a placed extent. Raises InsufficientMemory."""

    def is_resident(self, extent: Extent) -> bool:
        """Whether a materialised extent can be used at once: whether no memory of its is still on its way."""
        return True

    def displace(self, extent: Extent) -> None:
        """The first half of `free`: the range may be placed again, its bytes stay readable until then."""
        with self._locked():
            self._displace(extent)

    def restore(self, extent: Extent) -> None:
        """Undo `displace`, when whatever was placed into the range since has been displaced again."""
        with self._locked():
            self._retake(extent)
            self._count(extent)

    def release(self, extent: Extent) -> None:
        """The second half of `free`: let go of the memory of a displaced extent."""

    def _displace(self, extent: Extent) -> None:
        self._live.remove(extent)
        self._used -= extent.held_bytes
        self._give(extent)

    def _count(self, extent: Extent) -> None:
        self._live.add(extent)
        self._used += extent.held_bytes
        self.peak_bytes = max(self.peak_bytes, self._used)

    # Called with the lock held. As they are here, any free byte is as good as any other.

    def _fits(self, held_bytes: int) -> bool:
        """Whether `_take` would succeed, beyond the cap."""
        return True

    def _take(self, held_bytes: int) -> tuple[Any, ...] | None:
        """(offset, handle, and where that is known, `Extent.born_zero`) of a new range, or None where there is none."""
        return 0, None

    def _give(self, extent: Extent) -> None: ...

    def _retake(self, extent: Extent) -> None: ...  # the very range that `_give` gave

    def view(self, extent: Extent) -> torch.Tensor | None:
        """The extent's bytes as a uint8 alias of ``num_bytes``; None where the level reads and writes itself."""
        return None

    def read(self, extent: Extent, out: torch.Tensor) -> Transfer:
        """Start copying the extent's first ``out.nbytes`` bytes into the contiguous tensor ``out``, of any device."""
        out, view = flat_bytes(out), cast("torch.Tensor", self.view(extent))
        return start_copy(out, view if view.nbytes == out.nbytes else view[: out.nbytes], self._threads)

    def write(self, extent: Extent, src: torch.Tensor) -> Transfer:
        """Start copying the contiguous tensor ``src`` (any dtype, any device) to the extent's start."""
        src, view = flat_bytes(src), cast("torch.Tensor", self.view(extent))
        return start_copy(view if view.nbytes == src.nbytes else view[: src.nbytes], src, self._threads)

    def close(self) -> None:
        """Release everything the level holds (memory, files, threads). Idempotent."""
        self._threads.shutdown()
        with self._lock:
            for extent in self._live:
                self.release(extent)
            self._live.clear()
            self._leaving.clear()
            self._used = 0


class RangeAllocator:
    """Free ranges of ``[0, size)``, not thread-safe: best fit by (size, offset), coalescing, exact undo."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = []  # (start, end), sorted
        self._by_size: list[tuple[int, int]] = []  # (size, start) of the same ranges, sorted
        self._replace(0, 0, [(0, size)])

    @property
    def largest(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def empty(self) -> bool:
        return self.largest == self.size

    def best_fit(self, size: int) -> tuple[int, int] | None:
        """(size, start) of the free range that `allocate` would cut from; None where nothing fits."""
        index = bisect_left(self._by_size, (size, 0))
        return self._by_size[index] if index < len(self._by_size) else None

    def allocate(self, size: int) -> int | None:
        """The offset of ``size`` bytes, taken; None where no free range is large enough."""
        found = self.best_fit(size)
        if found is not None:
            self.take(found[1], size)
        return found and found[1]

    def take(self, start: int, size: int) -> None:
        """Take exactly ``[start, start + size)``, which must be free: the rollback of a `free`."""
        index = bisect_right(self._free, start, key=itemgetter(0)) - 1
        free_start, free_end = self._free[index]
        assert free_start <= start and start + size <= free_end, "the range to take is not free"
        self._replace(index, index + 1, [(free_start, start), (start + size, free_end)])

    def free(self, start: int, size: int) -> None:
        """Give ``[start, start + size)`` back, merged with its free neighbours."""
        end = start + size
        first = after = bisect_left(self._free, (start, end))
        if first and self._free[first - 1][1] == start:
            first -= 1
            start = self._free[first][0]
        if after < len(self._free) and self._free[after][0] == end:
            end = self._free[after][1]
            after += 1
        self._replace(first, after, [(start, end)])

    def _replace(self, first: int, after: int, ranges: list[tuple[int, int]]) -> None:
        """Put what is not empty of ``ranges`` in the place of numbers ``first`` up to ``after`` of those by start."""
        for start, end in self._free[first:after]:
            del self._by_size[bisect_left(self._by_size, (end - start, start))]
        self._free[first:after] = [(start, end) for start, end in ranges if start < end]
        for start, end in ranges:
            if start < end:
                insort(self._by_size, (end - start, start))


ALIGNMENT = 512


class DeviceLevel(Level):
    """A level in the memory of ``device``, capped at ``capacity_bytes``; ``cpu`` makes it the arena.

    Each extent is an allocation of torch's (its handle a list of that tensor, or None), from the pool of the device's
    default stream whatever stream is current: its storage's use count tells whether a tensor of it is still held.
    """

    device: torch.device

    def __init__(self, device: torch.device | str, capacity_bytes: int) -> None:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__("arena" if device.type == "cpu" else str(device), device, capacity_bytes, ALIGNMENT)

    def _take(self, held_bytes: int) -> tuple[int, list[torch.Tensor | None]]:
        return 0, [None]

    def materialise(self, extent: Extent) -> None:
        if extent.handle[0] is not None:
            return
        num_bytes = extent.held_bytes
        try:
            with no_inference_mode():
                if self.device.type != "cpu":
                    is_default = current_stream(self.device).cuda_stream == 0
                    with nullcontext() if is_default else torch.cuda.stream(torch.cuda.default_stream(self.device)):
                        extent.handle[0] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
                    return
                block = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
                start = -block.data_ptr() % ALIGNMENT
                extent.handle[0] = block[start : start + num_bytes].detach()
        except (MemoryError, RuntimeError) as error:  # torch's CPU allocator raises the latter, with nothing but a text
            if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "memory" not in str(error):
                raise
            message = (
                f"{self.device} gave no {format_bytes(extent.num_bytes)} although {self.name}'s cap of "
                f"{format_bytes(self.capacity_bytes)} has room: something else uses the device's memory; lower the cap"
            )
            raise InsufficientMemory(message, needed_bytes=extent.num_bytes, available_bytes=0) from error

    def adopt(self, extent: Extent, flat: torch.Tensor) -> bool:
        """Let the memory of ``flat`` be the placed extent's, if it is here and all of its storage; whether it is."""
        fits = flat.device == self.device and flat.storage_offset() == 0 and flat.data_ptr() % 64 == 0
        fits = fits and 0 < flat.untyped_storage().nbytes() <= extent.held_bytes and not flat.is_inference()
        if fits:
            extent.handle[0] = flat.detach()
        return fits

    def release(self, extent: Extent) -> None:
        extent.handle[0] = None

    def view(self, extent: Extent) -> torch.Tensor:
        self.materialise(extent)
        return extent.handle[0][: extent.num_bytes].detach()
