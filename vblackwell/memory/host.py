"""Bytes in host memory, cut from a few large slabs.

Slabs are mapped as they are needed, each larger than the last (64 MiB up to 1 GiB), so that a small job does not pay
for a large cap; an extent of more than a quarter of the next slab gets a slab of exactly its own size, or layer groups
of 600 MiB would leave 40 % of every slab unused. Inside a slab free ranges are best fit. An
extent never spans two slabs: CUDA copies refuse ranges that cross two registrations. Extents are 4 KiB aligned, which
lets `O_DIRECT` read and write straight into them.

A slab that became empty is given up only when its bytes are needed for one of another size. In between it keeps its
pages, because mapping and pinning are slow (0.35 s a GiB, measured).
"""

from __future__ import annotations

import torch

from vblackwell.errors import ConfigurationError
from vblackwell.machine.facts import memory_facts
from vblackwell.memory.level import Extent, Level
from vblackwell.memory.ranges import RangeAllocator
from vblackwell.memory.slab import map_slab
from vblackwell.units import GiB, KiB, MiB, format_bytes

ALIGNMENT = 4 * KiB
FIRST_SLAB_BYTES = 64 * MiB
MAX_SLAB_BYTES = 1 * GiB
SHARE = 4  # a slab is shared by extents of at most a quarter of it


class _Slab:
    """Arithmetic of one slab, and its memory once somebody needed it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranges = RangeAllocator(size)
        self.bytes: torch.Tensor | None = None


class HostLevel(Level):
    """A level in RAM.

    Args:
        capacity_bytes: the cap; slabs are mapped up to it.
        pin: register slabs with CUDA; by default where torch can use a GPU.
        numa_node: where slabs should lie; None leaves it to the system.

    Raises:
        ConfigurationError: the machine, or its cgroup, has less memory available than ``capacity_bytes``.
    """

    device: torch.device

    def __init__(self, capacity_bytes: int, *, pin: bool | None = None, numa_node: int | None = None) -> None:
        super().__init__("cpu", torch.device("cpu"), capacity_bytes, ALIGNMENT)
        facts = memory_facts()
        if capacity_bytes > facts.available_bytes:
            raise ConfigurationError(
                f"a cpu level of {format_bytes(capacity_bytes)} does not fit: {format_bytes(facts.available_bytes)} of "
                f"{format_bytes(facts.total_bytes)} RAM are available (limited by {facts.limited_by}): lower it"
            )
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._numa_node = numa_node
        self._slabs: list[_Slab] = []
        self._slab_bytes = 0
        self._next_slab_bytes = FIRST_SLAB_BYTES

    def _fits(self, held_bytes: int) -> bool:
        if any(slab.ranges.largest >= held_bytes for slab in self._slabs):
            return True
        empty = sum(slab.size for slab in self._slabs if slab.ranges.empty)
        return self._slab_bytes - empty + held_bytes <= self.capacity_bytes

    def _take(self, held_bytes: int) -> tuple[int, _Slab] | None:
        fits = [(fit, index) for index, slab in enumerate(self._slabs) if (fit := slab.ranges.best_fit(held_bytes))]
        slab = self._slabs[min(fits)[1]] if fits else self._new_slab(held_bytes)
        if slab is None:
            return None
        offset = slab.ranges.allocate(held_bytes)
        assert offset is not None, "the slab was chosen because it fits"
        return offset, slab

    def _new_slab(self, held_bytes: int) -> _Slab | None:
        room, empty = self.capacity_bytes - self._slab_bytes, [slab for slab in self._slabs if slab.ranges.empty]
        if held_bytes > room + sum(slab.size for slab in empty):
            return None  # before any is given up in vain
        for slab in empty:
            if held_bytes <= room:
                break
            self._drop(slab)
            room += slab.size
        shared = held_bytes * SHARE <= self._next_slab_bytes
        slab = _Slab(min(self._next_slab_bytes, room) if shared else held_bytes)
        self._slabs.append(slab)
        self._slab_bytes += slab.size
        if shared:
            self._next_slab_bytes = min(2 * self._next_slab_bytes, MAX_SLAB_BYTES)
        return slab

    def _drop(self, slab: _Slab) -> None:
        """Forget an empty slab. Its pages go with the last extent or view that still refers to it."""
        self._slabs.remove(slab)
        self._slab_bytes -= slab.size

    def _give(self, extent: Extent) -> None:
        extent.handle.ranges.free(extent.offset, extent.held_bytes)

    def _retake(self, extent: Extent) -> None:
        slab = extent.handle
        if slab not in self._slabs:
            self._revive(slab)
        slab.ranges.take(extent.offset, extent.held_bytes)

    def _revive(self, slab: _Slab) -> None:
        """Bring back a slab that was given up for others, which are empty again by now."""
        for other in [other for other in self._slabs if other.ranges.empty]:
            if self._slab_bytes + slab.size <= self.capacity_bytes:
                break
            self._drop(other)
        assert self._slab_bytes + slab.size <= self.capacity_bytes, "undo is exact"
        self._slabs.append(slab)
        self._slab_bytes += slab.size

    def materialise(self, extent: Extent) -> None:
        slab = extent.handle
        if slab.bytes is None:
            with self._lock:
                if slab.bytes is None:
                    slab.bytes = map_slab(slab.size, numa_node=self._numa_node, pin=self._pin)

    def view(self, extent: Extent) -> torch.Tensor:
        self.materialise(extent)
        return extent.handle.bytes[extent.offset : extent.offset + extent.num_bytes]

    def close(self) -> None:
        super().close()
        for slab in self._slabs:
            slab.bytes = None
        self._slabs.clear()
        self._slab_bytes = 0
