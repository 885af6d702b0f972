"""What all levels share: a cap, a count of used bytes, and the arithmetic halves of allocating and freeing.

A level says how a range is taken and given back (`_take`, `_give`, `_retake`); this class counts, checks and locks. The
NULL level is this class and nothing else: it accounts for bytes that it does not have, so that a placement can be tried
without the machine that it is for.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from vblackwell.errors import InsufficientMemory
from vblackwell.memory.copying import flat_bytes
from vblackwell.memory.level import Extent, Level, Transfer
from vblackwell.memory.transfer import DoneTransfer
from vblackwell.units import align_up, format_bytes


class AccountedLevel(Level):
    """A level that counts. Without a range allocator any free byte is as good as any other."""

    def __init__(self, name: str, device: torch.device | None, capacity_bytes: int, alignment: int) -> None:
        self.name = name
        self.device = device
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes // alignment * alignment
        self._lock = threading.Lock()
        self._used = 0
        self._peak = 0
        self._live: set[Extent] = set()

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def can_allocate(self, num_bytes: int) -> bool:
        held_bytes = align_up(num_bytes, self.alignment)
        with self._lock:
            return self._used + held_bytes <= self.capacity_bytes and self._fits(held_bytes)

    def place(self, num_bytes: int) -> Extent:
        assert num_bytes > 0, "an extent holds at least one byte"
        held_bytes = align_up(num_bytes, self.alignment)
        with self._lock:
            found = self._take(held_bytes) if self._used + held_bytes <= self.capacity_bytes else None
            if found is None:
                raise self._no_room(num_bytes)
            extent = Extent(found[0], num_bytes, held_bytes, found[1])
            self._count(extent)
            return extent

    def displace(self, extent: Extent) -> None:
        with self._lock:
            self._live.remove(extent)  # KeyError: freed twice, or another level's
            self._used -= extent.held_bytes
            self._give(extent)

    def restore(self, extent: Extent) -> None:
        with self._lock:
            self._retake(extent)
            self._count(extent)

    def materialise(self, extent: Extent) -> None:
        return

    def release(self, extent: Extent) -> None:
        return

    def _count(self, extent: Extent) -> None:
        self._live.add(extent)
        self._used += extent.held_bytes
        self._peak = max(self._peak, self._used)

    def _no_room(self, num_bytes: int) -> InsufficientMemory:
        free = self.capacity_bytes - self._used
        reason = "" if num_bytes > free else ", but not in one piece"
        return InsufficientMemory(
            f"{self.name} has no room for {format_bytes(num_bytes)}: {format_bytes(free)} of "
            f"{format_bytes(self.capacity_bytes)} are free{reason}; give the level more capacity or keep less on it",
            needed_bytes=num_bytes,
            available_bytes=free,
        )

    def _fits(self, held_bytes: int) -> bool:
        """Whether `_take` would succeed, beyond the cap. Called with the lock held, as the three below."""
        return True

    def _take(self, held_bytes: int) -> tuple[int, Any] | None:
        """(offset, handle) of a new range, or None where there is none."""
        return 0, None

    def _give(self, extent: Extent) -> None:
        """Make the extent's range free."""

    def _retake(self, extent: Extent) -> None:
        """Take back the very range that `_give` gave."""


class NullLevel(AccountedLevel):
    """Accounts, holds nothing: writes are discarded, reads leave the destination as it is. For dry runs."""

    def __init__(self, capacity_bytes: int, name: str = "null") -> None:
        super().__init__(name, None, capacity_bytes, alignment=512)

    def read(self, extent: Extent, out: torch.Tensor) -> Transfer:
        assert flat_bytes(out).nbytes <= extent.num_bytes
        return DoneTransfer()

    def write(self, extent: Extent, src: torch.Tensor) -> Transfer:
        assert flat_bytes(src).nbytes <= extent.num_bytes
        return DoneTransfer()

    def view(self, extent: Extent) -> torch.Tensor | None:
        return None

    def close(self) -> None:
        with self._lock:
            self._live.clear()
            self._used = 0
