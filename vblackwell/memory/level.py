"""What a level is: a place that holds extents of bytes, counts them against a cap, and moves them asynchronously.

A level hands out contiguous extents from a fixed capacity and copies bytes between them and tensors. Reads and writes
return a `Transfer` at once. Everything else (which key lives where, what is evicted) is the stack's business.

Two rules make asynchrony safe:

1. A transfer starts after everything that was queued, at the time of the call, on the *current* CUDA stream of every
   CUDA device that takes part. So memory that the caller just allocated, or just finished computing on, may be passed
   in.
2. Nothing may touch the source (write) or the destination (read or write) until the transfer is done: `wait()` for
   the host, `wait_on(stream)` for work that is queued on a CUDA stream afterwards.

The caller orders two transfers on one extent.

Allocation has two halves, `place` (arithmetic, can be taken back) and `materialise` (memory), and so has freeing,
`displace` and `release`: the stack plans a whole cascade of moves with the arithmetic halves, so that it knows before
the first byte moves that the last one will find room. Why not a dry run on a copy of the allocators: the plan's
offsets are the ones that get used, and taking a plan back is the same code as planning.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from vblackwell.errors import InsufficientMemory
from vblackwell.memory.copying import COPY_THREADS, copy_pool, flat_bytes, start_copy
from vblackwell.memory.transfer import DoneTransfer, Transfer
from vblackwell.units import align_up, format_bytes


@dataclass(frozen=True, eq=False)
class Extent:
    """A contiguous range of bytes held by one level. Compared by identity; made and freed only by its level.

    Attributes:
        offset: start in the level's own address space, bytes.
        num_bytes: what was asked for.
        held_bytes: what the level accounts for it (``num_bytes`` rounded up to the level's alignment).
        handle: the level's own bookkeeping (a slab, a tensor); for nobody else.
    """

    offset: int
    num_bytes: int
    held_bytes: int
    handle: Any = None


class Level(ABC):
    """A place for bytes. Thread-safe: allocate, free, read and write may be called from any thread.

    This class counts, checks and locks. A level says how a range is taken and given back (`_take`, `_give`, `_retake`),
    what memory stands for it (`materialise`, `release`), and how its bytes are seen (`view`); one whose bytes cannot be
    seen copies them itself (`read`, `write`).

    Attributes:
        name: as shown to users, ``'cuda:0'``, ``'arena'``, ``'cpu'``, ``'ssd'``.
        device: where `view` tensors live; None when the bytes are not addressable (a disk).
        capacity_bytes: the cap; `used_bytes` never exceeds it.
        alignment: extents start at, and are accounted in, multiples of this.
    """

    def __init__(
        self,
        name: str,
        device: torch.device | None,
        capacity_bytes: int,
        alignment: int,
        num_threads: int = COPY_THREADS,
    ) -> None:
        self.name = name
        self.device = device
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes // alignment * alignment
        self._lock = threading.Lock()
        self._used = 0
        self._peak = 0
        self._live: set[Extent] = set()
        self._threads = copy_pool(name, num_threads)

    @property
    def used_bytes(self) -> int:
        """Bytes accounted to live extents."""
        return self._used

    @property
    def peak_bytes(self) -> int:
        """The largest `used_bytes` so far."""
        return self._peak

    @property
    def free_bytes(self) -> int:
        """What the cap leaves, in one piece or several."""
        return self.capacity_bytes - self._used

    # -- allocating and freeing ----------------------------------------------------------------------------------------

    def can_allocate(self, num_bytes: int) -> bool:
        """Whether `allocate` would succeed now. Exact: fragmentation counts."""
        held_bytes = align_up(num_bytes, self.alignment)
        with self._lock:
            return self._used + held_bytes <= self.capacity_bytes and self._fits(held_bytes)

    def allocate(self, num_bytes: int) -> Extent:
        """A new extent of ``num_bytes`` > 0 with undefined contents.

        Raises:
            InsufficientMemory: it does not fit; nothing changed.
            DiskError: the file system could not reserve the space (a full one raises a child of both).
        """
        extent = self.place(num_bytes)
        try:
            self.materialise(extent)
        except BaseException:
            self.displace(extent)
            raise
        return extent

    def free(self, extent: Extent) -> None:
        """Give ``extent`` back. Its transfers must be done."""
        self.displace(extent)
        self.release(extent)

    def place(self, num_bytes: int) -> Extent:
        """The first half of `allocate`: decide where, and account for it. Raises as `allocate`; touches no memory."""
        assert num_bytes > 0, "an extent holds at least one byte"
        held_bytes = align_up(num_bytes, self.alignment)
        with self._lock:
            found = self._take(held_bytes) if self._used + held_bytes <= self.capacity_bytes else None
            if found is None:
                raise self._does_not_fit(num_bytes)
            extent = Extent(found[0], num_bytes, held_bytes, found[1])
            self._count(extent)
            return extent

    def materialise(self, extent: Extent) -> None:  # noqa: B027 (a level without memory of its own has nothing to do)
        """The second half of `allocate`: make memory stand for a placed extent. Repeating it changes nothing.

        Raises:
            InsufficientMemory: the device gave no memory although the cap allows it.
        """

    def displace(self, extent: Extent) -> None:
        """The first half of `free`: the range may be placed again; its bytes stay readable until others are written.

        Raises:
            KeyError: it was freed already, or is another level's.
        """
        with self._lock:
            self._live.remove(extent)
            self._used -= extent.held_bytes
            self._give(extent)

    def restore(self, extent: Extent) -> None:
        """Take `displace` back. Whatever was placed into the range since has been displaced again."""
        with self._lock:
            self._retake(extent)
            self._count(extent)

    def release(self, extent: Extent) -> None:  # noqa: B027 (as `materialise`)
        """The second half of `free`: let go of the memory of a displaced extent."""

    def _count(self, extent: Extent) -> None:
        self._live.add(extent)
        self._used += extent.held_bytes
        self._peak = max(self._peak, self._used)

    def _does_not_fit(self, num_bytes: int) -> InsufficientMemory:
        free = self.free_bytes
        reason = "" if num_bytes > free else ", but not in one piece"
        return InsufficientMemory(
            f"{self.name} has no room for {format_bytes(num_bytes)}: {format_bytes(free)} of "
            f"{format_bytes(self.capacity_bytes)} are free{reason}; give the level more capacity or keep less on it",
            needed_bytes=num_bytes,
            available_bytes=free,
        )

    # Called with the lock held. As they are here, any free byte is as good as any other.

    def _fits(self, held_bytes: int) -> bool:
        """Whether `_take` would succeed, beyond the cap."""
        return True

    def _take(self, held_bytes: int) -> tuple[int, Any] | None:
        """(offset, handle) of a new range, or None where there is none."""
        return 0, None

    def _give(self, extent: Extent) -> None:  # noqa: B027
        """Make the extent's range free."""

    def _retake(self, extent: Extent) -> None:  # noqa: B027
        """Take back the very range that `_give` gave."""

    # -- moving --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def view(self, extent: Extent) -> torch.Tensor | None:
        """The extent's bytes as a uint8 tensor of ``num_bytes`` that aliases them; None where not addressable."""

    def read(self, extent: Extent, out: torch.Tensor) -> Transfer:
        """Start copying the extent's first ``out.nbytes`` bytes into the contiguous tensor ``out``, of any device."""
        out = flat_bytes(out)
        return start_copy(out, self._front(extent, out.nbytes), self._threads)

    def write(self, extent: Extent, src: torch.Tensor) -> Transfer:
        """Start copying the contiguous tensor ``src`` (any dtype, any device) to the extent's start."""
        src = flat_bytes(src)
        return start_copy(self._front(extent, src.nbytes), src, self._threads)

    def _front(self, extent: Extent, num_bytes: int) -> torch.Tensor:
        view = self.view(extent)
        assert view is not None, "a level that is not addressable reads and writes itself"
        return view[:num_bytes]

    def close(self) -> None:
        """Release everything the level holds (memory, files, threads). Idempotent."""
        self._threads.shutdown()
        with self._lock:
            self._live.clear()
            self._used = 0


class NullLevel(Level):
    """Accounts, holds nothing: writes are discarded, reads leave the destination as it is. For dry runs."""

    def __init__(
        self, capacity_bytes: int, name: str = "null", device: torch.device | None = None, alignment: int = 512
    ) -> None:
        super().__init__(name, device, capacity_bytes, alignment)

    def view(self, extent: Extent) -> torch.Tensor | None:
        return None

    def read(self, extent: Extent, out: torch.Tensor) -> Transfer:
        assert flat_bytes(out).nbytes <= extent.num_bytes
        return DoneTransfer()

    def write(self, extent: Extent, src: torch.Tensor) -> Transfer:
        assert flat_bytes(src).nbytes <= extent.num_bytes
        return DoneTransfer()
