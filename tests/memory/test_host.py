"""Slabs: how they grow, are given up for others, and outlive their level while somebody looks at them."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch

from tests.memory.conftest import random_bytes
from tests.waiting import wait_until
from vblackwell.errors import InsufficientMemory
from vblackwell.memory import host as host_module
from vblackwell.memory.host import HUGE_PAGE, HostLevel, map_slab
from vblackwell.units import KiB, MiB


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_module, "FIRST_SLAB_BYTES", MiB)
    monkeypatch.setattr(host_module, "MAX_SLAB_BYTES", 4 * MiB)


def slab_sizes(level: HostLevel) -> list[int]:
    return [slab.size // MiB for slab in level._slabs]


def test_slabs_grow_and_large_extents_get_their_own():
    level = HostLevel(32 * MiB)
    assert slab_sizes(level) == []
    for _ in range(20):
        level.allocate(200 * KiB)
    assert slab_sizes(level) == [1, 2, 4]
    level.allocate(9 * MiB)
    level.allocate(7 * MiB // 2)  # most of a slab: it would waste the rest
    assert slab_sizes(level) == [1, 2, 4, 9, 3]
    level.close()


@pytest.mark.parametrize("size", [700 * KiB, 2 * MiB + 4096, 5 * MiB])
def test_extents_of_one_large_size_fill_the_level(size: int):
    """Layer groups are large and alike: slabs must not cut the level so that half of each stays unused."""
    level = HostLevel(64 * MiB)
    count = 0
    while level.can_allocate(size):
        level.allocate(size)
        count += 1
    assert count * size > 0.9 * 64 * MiB
    level.close()


def test_memory_is_mapped_when_it_is_needed():
    level = HostLevel(32 * MiB)
    extent = level.place(MiB)
    assert level._slabs[0].bytes is None
    level.materialise(extent)
    assert level._slabs[0].bytes is not None
    level.close()


def test_empty_slabs_make_way_for_larger_ones():
    level = HostLevel(4 * MiB)
    small = [level.allocate(MiB) for _ in range(4)]
    assert not level.can_allocate(1)
    for extent in small[1:]:
        level.free(extent)
    assert level.can_allocate(3 * MiB) and not level.can_allocate(3 * MiB + 1)
    large = level.allocate(3 * MiB)
    level.write(large, random_bytes(3 * MiB)).wait()
    assert level.used_bytes == 4 * MiB
    level.close()


def test_no_slab_is_given_up_for_what_does_not_fit_all_the_same():
    level = HostLevel(16 * MiB)
    level.allocate(4096)
    level.free(level.allocate(8 * MiB))
    sizes, empty = slab_sizes(level), level._slabs[1]
    with pytest.raises(InsufficientMemory, match="not in one piece"):
        level.allocate(31 * MiB // 2)
    assert slab_sizes(level) == sizes and level.allocate(8 * MiB).handle is empty
    level.close()


def test_giving_up_a_slab_can_be_taken_back():
    level = HostLevel(4 * MiB)
    extents = [level.allocate(2 * MiB) for _ in range(2)]
    for i, extent in enumerate(extents):
        level.write(extent, random_bytes(2 * MiB, seed=i)).wait()
    for extent in extents:
        level.displace(extent)
    whole = level.place(4 * MiB)
    level.displace(whole)
    for extent in reversed(extents):
        level.restore(extent)
    for i, extent in enumerate(extents):
        assert torch.equal(level.view(extent), random_bytes(2 * MiB, seed=i))
    assert level.used_bytes == 4 * MiB and not level.can_allocate(1)
    assert {extent.handle for extent in extents} == set(level._slabs) and level._slab_bytes == 4 * MiB
    level.close()


def test_extents_are_page_aligned_and_slabs_are_huge_page_aligned():
    level = HostLevel(8 * MiB)
    for size in (1, 5000, 3 * MiB):
        assert level.view(level.allocate(size)).data_ptr() % (4 * KiB) == 0
    level.close()
    assert map_slab(2 * HUGE_PAGE).data_ptr() % HUGE_PAGE == 0


def test_pages_are_there_and_private():
    """Pre-faulted, and in an anonymous private mapping (shared ones get small pages)."""
    slab = map_slab(8 * MiB)
    address = slab.data_ptr()
    mapping: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
            if inside:
                mapping["flags"], mapping["size"] = line.split()[1], str(end - start)
        elif inside:
            mapping[first] = line.split()[1]
    assert mapping["flags"] == "rw-p" and int(mapping["Rss:"]) >= 8 * 1024


def test_views_outlive_the_level():
    level = HostLevel(2 * MiB)
    extent = level.allocate(MiB)
    level.write(extent, random_bytes(MiB)).wait()
    view = level.view(extent)[100:]
    level.close()
    del level, extent
    gc.collect()
    assert torch.equal(view, random_bytes(MiB)[100:])


def test_closing_unmaps():
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    level = HostLevel(64 * MiB)
    level.allocate(64 * MiB)
    level.view(level.allocate(1)) if level.can_allocate(1) else None
    assert resident_bytes() > before + 60 * MiB
    level.close()
    del level
    gc.collect()
    assert resident_bytes() < before + 16 * MiB


def test_no_room_between_extents_is_said_so():
    level = HostLevel(MiB)
    extents = [level.allocate(256 * KiB) for _ in range(4)]
    level.free(extents[0])
    level.free(extents[2])
    with pytest.raises(InsufficientMemory, match="512 KiB of 1.00 MiB are free, but not in one piece"):
        level.allocate(512 * KiB)
    level.close()


def test_a_pinned_slab_is_unregistered_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, bool]] = []

    class Driver:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            self.size = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            libc = ctypes.CDLL(None)  # mincore fails where nothing is mapped
            pages = (ctypes.c_ubyte * (self.size // mmap.PAGESIZE))()
            seen.append(
                ("unregistered", libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(self.size), pages) == 0)
            )
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    slab = map_slab(1 << 20, pin=True)
    view = slab[4096:8192]
    del slab
    assert not seen
    del view
    assert seen == [("unregistered", True)]


class SlowPages:
    """Pages of every pinned slab come in the background, one slab for each `let_one_come`, or are ``refused``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order = list[int]()  # sizes of slabs, as they were begun
        self.registered = list[int]()  # addresses
        self.refused: Exception | None = None
        self._come = threading.Semaphore(0)
        monkeypatch.setattr(host_module, "BACKGROUND_BYTES", 0)
        monkeypatch.setattr(host_module, "_register", self._register)

    def let_one_come(self, count: int = 1) -> None:
        self._come.release(count)

    def _register(self, mapping: object, address: int, size: int) -> None:
        self.order.append(size)
        assert self._come.acquire(timeout=60)
        if self.refused is not None:
            raise self.refused
        assert address not in self.registered
        self.registered.append(address)


@pytest.fixture
def slow_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowPages]:
    pages = SlowPages(monkeypatch)
    yield pages
    pages.let_one_come(100)


def test_a_view_waits_for_the_pages_of_its_slab_which_come_next(slow_pages: SlowPages):
    level = HostLevel(32 * MiB, pin=True)
    extents = [level.allocate(size * MiB) for size in (2, 3, 5, 7)]
    assert not any(level.is_resident(extent) for extent in extents) and level.resident_bytes == 0
    wait_until(lambda: slow_pages.order == [2 * MiB])
    with ThreadPoolExecutor(1) as other:
        view = other.submit(level.view, extents[2])
        wait_until(lambda: next(iter(level._page_thread._waiting)) is extents[2].handle.pages)
        slow_pages.let_one_come()
        wait_until(lambda: len(slow_pages.order) == 2)
        assert not view.done() and level.is_resident(extents[0]) and level.resident_bytes == 2 * MiB
        slow_pages.let_one_come()
        assert view.result().numel() == 5 * MiB and not view.result().any()
    slow_pages.let_one_come(2)
    for extent in extents:
        level.write(extent, random_bytes(extent.num_bytes)).wait()
        assert torch.equal(level.view(extent), random_bytes(extent.num_bytes))
    assert slow_pages.order == [size * MiB for size in (2, 5, 3, 7)] and level.resident_bytes == 17 * MiB
    level.close()


def test_what_fails_in_the_background_is_raised_by_whoever_needs_the_pages(slow_pages: SlowPages):
    level = HostLevel(8 * MiB, pin=True)
    extents = [level.allocate(2 * MiB) for _ in range(2)]
    slow_pages.refused = InsufficientMemory("no pages", needed_bytes=1, available_bytes=0)
    slow_pages.let_one_come()
    with pytest.raises(InsufficientMemory, match="no pages"):
        level.read(extents[0], torch.empty(MiB, dtype=torch.uint8))
    assert not level.is_resident(extents[0])
    slow_pages.refused = None
    slow_pages.let_one_come()
    assert not level.view(extents[1]).any()  # others come all the same
    slow_pages.let_one_come()
    assert not level.view(extents[0]).any()  # and these, when they are asked for again
    level.close()


def test_closing_waits_for_pages_that_are_coming_and_no_others_come(slow_pages: SlowPages):
    level = HostLevel(8 * MiB, pin=True)
    extents = [level.allocate(2 * MiB) for _ in range(3)]
    wait_until(lambda: len(slow_pages.order) == 1)
    gone = [weakref.ref(extent.handle.bytes) for extent in extents]
    with ThreadPoolExecutor(2) as others:
        view, closing = others.submit(level.view, extents[1]), others.submit(level.close)
        with pytest.raises(CancelledError):
            view.result(60)
        assert not closing.done()
        slow_pages.let_one_come()
        closing.result(60)
    level.close()
    assert len(slow_pages.order) == len(slow_pages.registered) == 1
    gc.collect()
    assert not any(each() for each in gone)


def test_a_slab_whose_pages_come_is_given_up_after_that(slow_pages: SlowPages):
    level = HostLevel(8 * MiB, pin=True)
    coming = level.allocate(5 * MiB)
    wait_until(lambda: slow_pages.order)
    level.free(coming)
    with ThreadPoolExecutor(1) as other:
        placed = other.submit(level.place, 8 * MiB)
        assert not wait([placed], 0.05).done
        slow_pages.let_one_come()
        assert placed.result(60).num_bytes == 8 * MiB
    level.close()


def test_a_slab_whose_pages_have_not_begun_is_given_up_at_once_and_can_be_taken_back(slow_pages: SlowPages):
    level = HostLevel(8 * MiB, pin=True)
    coming, waiting = level.allocate(2 * MiB), level.allocate(5 * MiB)
    wait_until(lambda: slow_pages.order)
    level.displace(waiting)
    level.displace(level.place(6 * MiB))
    level.restore(waiting)
    slow_pages.let_one_come(2)
    assert not level.view(waiting).any() and not level.view(coming).any()
    assert slow_pages.order == [2 * MiB, 5 * MiB] and len(slow_pages.registered) == 2
    level.close()


def test_a_small_slab_waits_for_no_pages_of_a_large_one(monkeypatch: pytest.MonkeyPatch):
    """The level is locked meanwhile, and a slab of gigabytes takes seconds."""
    touch, begun, may_come = host_module._touch, threading.Semaphore(0), threading.Event()

    def slowly(pages: torch.Tensor) -> None:
        if pages.untyped_storage().nbytes() > 8 * MiB:
            begun.release()
            assert may_come.wait(60)
        touch(pages)

    monkeypatch.setattr(host_module, "_touch", slowly)
    monkeypatch.setattr(host_module, "_register", lambda *args: None)
    monkeypatch.setattr(host_module, "BACKGROUND_BYTES", 4 * MiB)
    monkeypatch.setattr(host_module, "_FAULT_THREADS", 2)
    level = HostLevel(32 * MiB, pin=True)
    large = level.allocate(16 * MiB)
    assert all(begun.acquire(timeout=60) for _ in range(min(2, len(os.sched_getaffinity(0)))))
    with ThreadPoolExecutor(1) as other:
        small = other.submit(lambda: level.view(level.allocate(4 * MiB)))
        try:
            assert small.result(30).numel() == 4 * MiB and not level.is_resident(large)
        finally:
            may_come.set()
    assert level.view(large).numel() == 16 * MiB
    level.close()
    assert not any(thread.name.startswith("vblackwell-fault") for thread in threading.enumerate())


def test_what_has_never_been_in_an_extent_is_zero():
    level = HostLevel(8 * MiB)
    first, second = level.allocate(128 * KiB), level.allocate(128 * KiB)
    assert first.born_zero and second.born_zero and first.handle is second.handle
    level.view(first).fill_(7)
    level.free(first)
    again, third = level.allocate(64 * KiB), level.allocate(128 * KiB)
    assert not again.born_zero and level.view(again)[0] == 7
    assert third.born_zero and not level.view(third).any()
    level.close()


def test_a_cap_that_changes_never_falls_below_what_is_in_use():
    level = HostLevel(16 * MiB)
    held, empty = level.allocate(4 * MiB), level.allocate(6 * MiB)
    assert level.resident_bytes == 10 * MiB
    level.free(empty)
    level.resize(MiB)
    assert (level.capacity_bytes, level.resident_bytes) == (4 * MiB, 4 * MiB)  # the empty slab is given up
    assert not level.can_allocate(1)
    level.resize(9 * MiB + 1)
    assert level.capacity_bytes == 9 * MiB and level.allocate(5 * MiB).handle is not held.handle
    level.close()


@pytest.mark.gpu
def test_pages_that_come_in_the_background_are_pinned():
    level, num_bytes = HostLevel(512 * MiB), 96 * MiB
    extents = [level.allocate(num_bytes) for _ in range(3)]
    assert all(extent.handle.pages is not None for extent in extents)
    for seed, extent in enumerate(reversed(extents)):
        there = random_bytes(num_bytes, seed=seed).cuda()
        level.write(extent, there).wait()
        assert level.view(extent).is_pinned() and torch.equal(level.view(extent), there.cpu())
    level.close()


@pytest.mark.gpu
def test_pages_that_come_in_the_background_end_no_capture():
    level, x = HostLevel(512 * MiB), torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        x.mul_(2)
        extents = [level.allocate(96 * MiB) for _ in range(2)]
        assert all(level.view(extent).numel() == 96 * MiB for extent in extents)  # registered while this one captures
    graph.replay()
    assert x.tolist() == [2.0] * 4 and all(level.view(extent).is_pinned() for extent in extents)
    level.close()
