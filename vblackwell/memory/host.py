"""Bytes in host memory: extents cut from a few large slabs in huge pages, near the GPU and registered with CUDA.

Slabs are mapped as they are needed, each larger than the last; an extent of more than a quarter of the next one gets a
slab of exactly its size. An extent never spans two slabs (CUDA copies refuse ranges that cross two registrations), and
is 4 KiB aligned, so that `O_DIRECT` reads and writes it in place. An empty slab is given up only when its bytes are
needed for another: mapping and pinning take 0.35 s a GiB (measured).
"""

import ctypes
import functools
import mmap
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.machine.facts import memory_facts, numa_node_count, numa_node_cpus
from vblackwell.memory.level import Extent, Level, RangeAllocator
from vblackwell.units import GiB, KiB, MiB, align_up, format_bytes

HUGE_PAGE = 2 * MiB
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_FAULT_THREADS = 8
_FAULT_BYTES = 64 * MiB


class _Mapping(mmap.mmap):
    """Host memory that may be registered with CUDA. A `weakref` finalizer would run after mmap has unmapped it."""

    unregister: Callable[[], Any] | None = None

    def __del__(self) -> None:
        # At exit CUDA may be gone, and the process's memory goes anyway.
        if self.unregister is not None and not sys.is_finalizing():
            self.unregister()


def map_slab(size: int, *, numa_node: int | None = None, pin: bool = False) -> torch.Tensor:
    """``size`` bytes of zeroed, resident host memory as a uint8 tensor, 4 KiB aligned (2 MiB for large ones), which lie
    on ``numa_node`` (by first touch), are registered with CUDA (``pin``; where the system refuses, it stays pageable),
    and live as long as any tensor that views them. Raises InsufficientMemory."""
    size = align_up(size, mmap.PAGESIZE)
    padding = HUGE_PAGE if size >= HUGE_PAGE else 0
    try:
        mapping = _Mapping(-1, size + padding, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        said = f"the system gave no {format_bytes(size)} of host memory ({error.strerror}): lower the cpu level's cap"
        raise InsufficientMemory(said, needed_bytes=size, available_bytes=0) from error
    if padding and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):  # a tensor born under inference mode breaks a later backward
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE if padding else 0
        slab = whole[start : start + size]
    _fault_in(slab.data_ptr(), size, numa_node)
    if pin:
        _register(mapping, slab.data_ptr(), size)
    return slab


def _fault_in(address: int, size: int, numa_node: int | None) -> None:
    """Touch every page, from several threads, on the node's cores where there is more than one node."""
    cpus = numa_node_cpus(numa_node) if numa_node is not None and numa_node_count() > 1 else set()
    cpus &= os.sched_getaffinity(0)
    count = min(_FAULT_THREADS, len(cpus or os.sched_getaffinity(0)), -(-size // _FAULT_BYTES))
    on_node = functools.partial(os.sched_setaffinity, 0, cpus) if cpus else None  # of the calling thread only
    with ThreadPoolExecutor(count, "vblackwell-fault", initializer=on_node) as pool:
        pieces = range(0, size, _FAULT_BYTES)
        list(pool.map(lambda start: _touch(address + start, min(_FAULT_BYTES, size - start)), pieces))


def _touch(address: int, size: int) -> None:
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE):
        ctypes.memset(address, 0, size)  # an older kernel; fresh pages are zero anyway


def _register(mapping: _Mapping, address: int, size: int) -> None:
    cudart: Any = torch.cuda.cudart()
    refused = int(cudart.cudaHostRegister(address, size, 1))  # portable: pinned for every device
    if refused:
        warnings.warn(
            f"CUDA refused to pin {format_bytes(size)} of host memory (error {refused}): copies to and from the GPU "
            f"stay correct but run at pageable speed. Check `ulimit -l`, or on WSL2 the memory limit in .wslconfig",
            RuntimeWarning,
            stacklevel=2,
        )
        # CUDA keeps the error, and torch would report it at the next kernel of somebody else.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return
    mapping.unregister = functools.partial(cudart.cudaHostUnregister, address)


ALIGNMENT = 4 * KiB
FIRST_SLAB_BYTES = 64 * MiB
MAX_SLAB_BYTES = 1 * GiB
SHARE = 4  # a slab is shared by extents of at most a quarter of it


class _Slab(RangeAllocator):
    bytes: torch.Tensor | None = None  # where it is mapped


class HostLevel(Level):
    """A level in RAM; raises ConfigurationError where less memory is available. ``pin``: register slabs with CUDA, by
    default where torch can use a GPU; ``numa_node``: where they should lie."""

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
        self._next_slab_bytes = FIRST_SLAB_BYTES

    @property
    def _slab_bytes(self) -> int:
        return sum(slab.size for slab in self._slabs)

    def _fits(self, held_bytes: int) -> bool:
        if any(slab.largest >= held_bytes for slab in self._slabs):
            return True
        empty = sum(slab.size for slab in self._slabs if slab.empty)
        return self._slab_bytes - empty + held_bytes <= self.capacity_bytes

    def _take(self, held_bytes: int) -> tuple[int, _Slab] | None:
        fits = [(fit, index) for index, slab in enumerate(self._slabs) if (fit := slab.best_fit(held_bytes))]
        if not fits and not self._fits(held_bytes):
            return None  # before any slab is given up in vain
        slab = self._slabs[min(fits)[1]] if fits else self._new_slab(held_bytes)
        offset = slab.allocate(held_bytes)
        assert offset is not None, "the slab was chosen because it fits"
        return offset, slab

    def _new_slab(self, held_bytes: int) -> _Slab:
        free_bytes = self._make_way(held_bytes)
        shared = held_bytes * SHARE <= self._next_slab_bytes
        slab = _Slab(min(self._next_slab_bytes, free_bytes) if shared else held_bytes)
        self._slabs.append(slab)
        if shared:
            self._next_slab_bytes = min(2 * self._next_slab_bytes, MAX_SLAB_BYTES)
        return slab

    def _make_way(self, size: int) -> int:
        """Give empty slabs up (pages go with their last view) until one of ``size`` fits; what is free for it."""
        for slab in [slab for slab in self._slabs if slab.empty]:
            if self._slab_bytes + size <= self.capacity_bytes:
                break
            self._slabs.remove(slab)
        assert self._slab_bytes + size <= self.capacity_bytes, "asked for what fits, and undo is exact"
        return self.capacity_bytes - self._slab_bytes

    def _give(self, extent: Extent) -> None:
        extent.handle.free(extent.offset, extent.held_bytes)

    def _retake(self, extent: Extent) -> None:
        slab = extent.handle
        if slab not in self._slabs:  # given up for others, which are empty again by now
            self._make_way(slab.size)
            self._slabs.append(slab)
        slab.take(extent.offset, extent.held_bytes)

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
