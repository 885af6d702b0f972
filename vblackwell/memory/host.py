"""Bytes in host memory: extents cut from a few large slabs in huge pages, near the GPU and registered with CUDA.

Slabs are mapped as they are needed, each larger than the last; an extent of more than a quarter of the next one gets a
slab of exactly its size. An extent never spans two slabs (CUDA copies refuse ranges that cross two registrations), and
is 4 KiB aligned, so that `O_DIRECT` reads and writes it in place. An empty slab is given up only when its bytes are
needed for another: touching and pinning its pages take 0.15 to 0.35 s a GiB (measured). Those of large slabs come in
the background, one slab after the other (two at a time take longer); the first `view` of a slab waits for its own.
"""

import ctypes
import functools
import mmap
import os
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import torch

from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.machine.facts import memory_facts, numa_node_count, numa_node_cpus
from vblackwell.memory.level import Extent, Level, RangeAllocator
from vblackwell.units import GiB, KiB, MiB, align_up, format_bytes

HUGE_PAGE = 2 * MiB
_FAULT_THREADS = 16
_FAULT_BYTES = 64 * MiB  # at most, of one piece: few pages, so torch starts no threads


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
    slab, bring_pages = _map(size, numa_node, pin)
    with closing(_FaultThreads(numa_node)) as threads:
        bring_pages(threads)
    return slab


def _map(size: int, numa_node: int | None, pin: bool) -> tuple[torch.Tensor, "BringPages"]:
    """As `map_slab`, but for the pages: a function, to be called once, that brings them and keeps them alive."""
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
    # Of the caller: the thread that registers must not start CUDA on another device.
    device = torch.cuda.current_device() if pin and torch.cuda.is_initialized() else -1  # as it is

    def bring_pages(threads: _FaultThreads) -> None:
        threads.fault_in(slab)
        if pin:
            with torch.cuda.device(device):
                _register(mapping, slab.data_ptr(), size)

    return slab, bring_pages


class _FaultThreads:
    """Touch every page of slabs, on the cores of ``numa_node`` where there is more than one node.

    By writes, which take one page at a time: MADV_POPULATE_WRITE holds the map of all of the process's memory until it
    is done, and whatever else allocates meanwhile waits (milliseconds to seconds, measured).
    """

    def __init__(self, numa_node: int | None) -> None:
        cpus = numa_node_cpus(numa_node) if numa_node is not None and numa_node_count() > 1 else set()
        cpus &= os.sched_getaffinity(0)
        self._count = min(_FAULT_THREADS, len(cpus or os.sched_getaffinity(0)))
        self._on_node = functools.partial(os.sched_setaffinity, 0, cpus) if cpus else None  # of the calling thread only
        self._pool = ThreadPoolExecutor(self._count, "vblackwell-fault", initializer=self._on_node)

    def fault_in(self, slab: torch.Tensor) -> None:
        """By all threads alike, as each part waits for the interpreter's lock; a small slab by the caller."""
        rounds = -(-len(slab) // (self._count * _FAULT_BYTES))
        part = align_up(-(-len(slab) // (rounds * self._count)), HUGE_PAGE)
        parts = slab.split(part)
        if len(parts) == 1 and self._on_node is None:
            _touch(slab)
        else:
            list(self._pool.map(_touch, parts))

    def close(self) -> None:
        self._pool.shutdown()


BringPages = Callable[[_FaultThreads], None]


def _touch(pages: torch.Tensor) -> None:
    pages.view(-1, mmap.PAGESIZE)[:, 0].zero_()  # without the interpreter's lock; fresh pages are zero anyway


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


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def _spare_captures() -> None:
    """Let what this thread registers not end the CUDA graph that another is capturing."""
    if torch.cuda.is_available():
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


class PageThread:
    """Brings the pages of slabs on ``numa_node``, one after the other in the order in which they were submitted, unless
    one is waited for."""

    def __init__(self, numa_node: int | None = None) -> None:
        self._faults = _FaultThreads(numa_node)
        self._thread = ThreadPoolExecutor(1, "vblackwell-pages", initializer=_spare_captures)
        self._lock = threading.Lock()
        self._waiting = OrderedDict[Future[None], BringPages]()
        self._busy = False

    def submit(self, bring_pages: BringPages) -> Future[None]:
        """The end of ``bring_pages``, which raises what that did."""
        future = Future[None]()
        with self._lock:
            self._waiting[future] = bring_pages
            self._start_next()
        return future

    def wait(self, future: Future[None]) -> None:
        """Return when ``future``, the next from now on, is over; raise its error, CancelledError after `close`."""
        with self._lock:
            if future in self._waiting:
                self._waiting.move_to_end(future, last=False)
        future.result()

    def withdraw(self, future: Future[None]) -> bool:
        """Forget what has not begun; False if it has, and is over now."""
        with self._lock:
            if self._waiting.pop(future, None) is not None:
                return True
        future.exception()
        return False

    def close(self) -> None:
        """Cancel what has not begun, and wait for the rest. Idempotent."""
        with self._lock:
            while self._waiting:
                self._waiting.popitem()[0].cancel()
        self._thread.shutdown()
        self._faults.close()

    def _start_next(self) -> None:
        """Give the thread one slab, if it has none: where Python ends, it waits for that one, not for all."""
        if self._busy or not self._waiting:
            return
        try:
            self._thread.submit(self._run_next)
            self._busy = True
        except RuntimeError as error:  # no thread is started any more
            while self._waiting:
                self._waiting.popitem()[0].set_exception(error)

    def _run_next(self) -> None:
        with self._lock:
            future, bring_pages = self._waiting.popitem(last=False) if self._waiting else (None, None)
        if future is not None and bring_pages is not None:
            try:
                bring_pages(self._faults)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
        with self._lock:
            self._busy = False
            self._start_next()


ALIGNMENT = 4 * KiB
FIRST_SLAB_BYTES = 64 * MiB
MAX_SLAB_BYTES = 1 * GiB
SHARE = 4  # a slab is shared by extents of at most a quarter of it
BACKGROUND_BYTES = 64 * MiB  # pinned slabs above it get their pages in the background


class _Slab(RangeAllocator):
    bytes: torch.Tensor | None = None  # where it is mapped
    pages: Future[None] | None = None  # the end of their coming; None: they are there, or it is not mapped
    fresh_from = 0  # what begins here or later has never been in an extent, and is zero

    @property
    def is_resident(self) -> bool:
        if (pages := self.pages) is None:
            return self.bytes is not None
        return pages.done() and not pages.cancelled() and pages.exception() is None


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
        self._page_thread = PageThread(numa_node)

    @property
    def _slab_bytes(self) -> int:
        return sum(slab.size for slab in self._slabs)

    @property
    def resident_bytes(self) -> int:
        """RAM that slabs have by now, whether their bytes are in use or free."""
        with self._lock:
            return sum(slab.size for slab in self._slabs if slab.is_resident)

    def resize(self, capacity_bytes: int) -> None:
        """Change the cap, to what is in use where that is more; empty slabs beyond it are given up. Not while a plan
        of moves may still be undone."""
        with self._locked():
            self.capacity_bytes = max(capacity_bytes // self.alignment * self.alignment, self._used)
            for slab in self._empty_slabs():
                if self._slab_bytes > self.capacity_bytes:
                    self._give_up(slab)

    def _fits(self, held_bytes: int) -> bool:
        if any(slab.largest >= held_bytes for slab in self._slabs):
            return True
        empty = sum(slab.size for slab in self._slabs if slab.empty)
        return self._slab_bytes - empty + held_bytes <= self.capacity_bytes

    def _take(self, held_bytes: int) -> tuple[int, _Slab, bool] | None:
        fits = [(fit, index) for index, slab in enumerate(self._slabs) if (fit := slab.best_fit(held_bytes))]
        if not fits and not self._fits(held_bytes):
            return None  # before any slab is given up in vain
        slab = self._slabs[min(fits)[1]] if fits else self._new_slab(held_bytes)
        offset = slab.allocate(held_bytes)
        assert offset is not None, "the slab was chosen because it fits"
        born_zero, slab.fresh_from = offset >= slab.fresh_from, max(slab.fresh_from, offset + held_bytes)
        return offset, slab, born_zero

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
        for slab in self._empty_slabs():
            if self._slab_bytes + size <= self.capacity_bytes:
                break
            self._give_up(slab)
        assert self._slab_bytes + size <= self.capacity_bytes, "asked for what fits, and undo is exact"
        return self.capacity_bytes - self._slab_bytes

    def _empty_slabs(self) -> list[_Slab]:
        """The cheapest first: those whose pages have not come, the newest of them first."""
        empty = [slab for slab in self._slabs if slab.empty]
        coming = [slab for slab in empty if slab.pages is not None]
        return [*reversed(coming), *(slab for slab in empty if slab.pages is None)]

    def _give_up(self, slab: _Slab) -> None:
        """Forget an empty slab, whose pages go with its last view; it is mapped anew if it is taken back."""
        self._slabs.remove(slab)
        if slab.pages is not None and self._page_thread.withdraw(slab.pages):
            slab.bytes = slab.pages = None

    def _give(self, extent: Extent) -> None:
        extent.handle.free(extent.offset, extent.held_bytes)

    def _retake(self, extent: Extent) -> None:
        slab = extent.handle
        if slab not in self._slabs:  # given up for others, which are empty again by now
            self._make_way(slab.size)
            self._slabs.append(slab)
        slab.take(extent.offset, extent.held_bytes)

    def materialise(self, extent: Extent) -> None:
        """Map the extent's slab; the pages of a large one come in the background, and `view` waits for them."""
        slab = extent.handle
        if slab.bytes is None:
            with self._lock:
                if slab.bytes is None:
                    if self._pin and slab.size > BACKGROUND_BYTES:
                        mapped, bring_pages = _map(slab.size, self._numa_node, self._pin)
                        slab.pages = self._page_thread.submit(bring_pages)
                    else:  # by threads of its own: those of large slabs may be busy for seconds
                        mapped = map_slab(slab.size, numa_node=self._numa_node, pin=self._pin)
                    slab.bytes = mapped

    def is_resident(self, extent: Extent) -> bool:
        return extent.handle.is_resident

    def view(self, extent: Extent) -> torch.Tensor:
        self.materialise(extent)
        slab = extent.handle
        if (pages := slab.pages) is not None:
            try:
                self._page_thread.wait(pages)
            except CancelledError:
                raise
            except Exception:
                with self._lock:
                    if slab.pages is pages and pages.done():  # nobody has seen its bytes: the next use maps it anew
                        slab.bytes = slab.pages = None
                raise
            slab.pages = None
        return slab.bytes[extent.offset : extent.offset + extent.num_bytes]

    def close(self) -> None:
        self._page_thread.close()
        super().close()
        for slab in self._slabs:
            slab.bytes = None
        self._slabs.clear()
