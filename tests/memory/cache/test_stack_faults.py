"""A disk that breaks in the middle of a cascade: no key is lost, no byte changed, and somebody hears of it."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import torch

from tests.delay import set_transfer_delay
from tests.memory.conftest import random_bytes
from tests.memory.test_disk import Calls
from vblackwell.errors import CorruptData, DiskError, InsufficientMemory
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.disk import DiskLevel
from vblackwell.memory.level import Level
from vblackwell.units import KiB

PAGE = 4 * KiB


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def stack(make_level: Callable[..., Level], disk_path: str, calls: Calls):
    """Two pages of arena, two of host, four of disk; six keys, k0 and k1 on top, k4 and k5 on the disk."""
    disk = DiskLevel(disk_path, 4 * PAGE, threads=1)
    disk._file.calls = calls
    stack = VGPUStack([make_level("arena", 2 * PAGE), make_level("host", 2 * PAGE), disk])
    for i in range(6):
        stack.register(f"k{i}", random_bytes(PAGE, seed=i), priority=7)
    yield stack
    calls.read_error = calls.write_error = calls.room = None
    stack.close()


def check(stack: VGPUStack, keys: range = range(6), changed: dict[str, int] | None = None) -> None:
    """Every key has its bytes, and the levels account for exactly the keys that are on them."""
    for i in keys:
        seed = (changed or {}).get(f"k{i}", i)
        assert torch.equal(stack.access(f"k{i}"), random_bytes(PAGE, seed=seed)), f"k{i}"
    for number, level in enumerate(stack.levels):
        there = [key for key in stack if stack.level_of(key) == number]
        assert level.used_bytes == PAGE * len(there), number


def test_a_key_that_cannot_be_read_stays_where_it_is(stack: VGPUStack, calls: Calls):
    calls.read_error = errno.EIO
    for _ in range(2):
        with pytest.raises(DiskError, match="reading .* failed: Input/output error"):
            stack.access("k5")
    assert stack.level_of("k5") == 2
    calls.read_error = None
    check(stack)


@pytest.mark.parametrize("victims_below", [0, 1])
def test_a_victim_that_cannot_be_written_stays_where_it_is(stack: VGPUStack, calls: Calls, victims_below: int):
    """EIO while a cascade pushes a key onto the disk: what was moved before stays moved, the rest is undone."""
    for i in range(4):
        stack.access(f"k{i}")  # k2 and k3 up, k0 and k1 down
    assert [stack.level_of(f"k{i}") for i in range(6)] == [1, 1, 0, 0, 2, 2]
    calls.write_error = errno.EIO
    for i in range(victims_below):
        stack.remove(f"k{i}")
        stack.register(f"k{i}", random_bytes(PAGE, seed=i), priority=0)
    with pytest.raises(DiskError, match="writing .* failed: Input/output error"):
        for i in range(10):
            stack.register(f"new{i}", random_bytes(PAGE), priority=9)
    calls.write_error = None
    for key in stack:
        if key.startswith("new"):
            stack.remove(key)
    check(stack)
    # The disk is not written to any more: cascades that need it are refused, or the key is served where it is.
    with pytest.raises(InsufficientMemory, match="not written to any more"):
        for i in range(10):
            stack.register(f"later{i}", random_bytes(PAGE), priority=9)


def test_exchange_of_places_with_a_disk_that_fails(stack: VGPUStack, calls: Calls):
    """All levels full: k5 is read out to make room for its victim, whose write fails; k5 must still have its bytes."""
    for i in (6, 7):
        stack.register(f"k{i}", random_bytes(PAGE, seed=i), priority=7)
    assert all(level.used_bytes == level.capacity_bytes for level in stack.levels)
    calls.write_error = errno.EIO
    with pytest.raises(DiskError, match="writing"):
        stack.access("k5")
    calls.write_error = None
    for _ in range(2):
        for i in range(8):
            assert torch.equal(stack.access(f"k{i}"), random_bytes(PAGE, seed=i)), f"k{i}"
    stack.update("k5", random_bytes(PAGE, seed=50))
    assert torch.equal(stack.access("k5"), random_bytes(PAGE, seed=50))
    stack.remove("k5")
    assert "k5" not in stack


def test_exchange_of_places_with_a_device_that_gives_no_memory(stack: VGPUStack, monkeypatch: pytest.MonkeyPatch):
    """Something else took the GPU's memory under the cap:
    the key is served in place, and its place is its own again.
    """
    for i in (6, 7):
        stack.register(f"k{i}", random_bytes(PAGE, seed=i), priority=7)

    def refuse(extent: object) -> None:
        raise InsufficientMemory("the device gave nothing", needed_bytes=PAGE, available_bytes=0)

    with monkeypatch.context() as patch:
        patch.setattr(stack.levels[0], "materialise", refuse)
        assert torch.equal(stack.access("k3"), random_bytes(PAGE, seed=3))
        assert stack.level_of("k3") == 1
    assert all(entry.stray is None for entry in stack._entries.values())
    check(stack, range(8))


def test_exchange_of_places_without_ram_to_pass_through(stack: VGPUStack, monkeypatch: pytest.MonkeyPatch):
    """All levels full, and the system gives no memory to lift the key into: it keeps its place."""
    for i in (6, 7):
        stack.register(f"k{i}", random_bytes(PAGE, seed=i), priority=7)
    empty, refused = torch.empty, []

    def refuse(size: object, **more: object) -> torch.Tensor:
        if size == PAGE and not refused:
            refused.append(size)
            raise MemoryError("no memory")
        return empty(size, **more)  # type: ignore[call-overload]

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(torch, "empty", refuse)
        stack.access("k3")
    assert refused and stack.level_of("k3") == 1
    check(stack, range(8))


def test_an_update_that_fails_leaves_the_old_bytes(stack: VGPUStack, calls: Calls):
    calls.write_error = errno.EIO
    with pytest.raises(DiskError):
        stack.update("k5", random_bytes(PAGE, seed=99))
    calls.write_error = None
    check(stack)


def test_replacing_that_fails_leaves_the_old_bytes(stack: VGPUStack, calls: Calls):
    for i in (6, 7):
        stack.register(f"k{i}", random_bytes(PAGE, seed=i), priority=7)
    calls.write_error = errno.EIO
    with pytest.raises(DiskError):
        stack.register("k5", random_bytes(PAGE, seed=99), priority=2)
    calls.write_error = None
    for i in range(8):
        assert torch.equal(stack.access(f"k{i}"), random_bytes(PAGE, seed=i)), f"k{i}"


def test_a_disk_that_is_full_refuses_a_key_before_anything_moved(stack: VGPUStack, calls: Calls):
    disk = stack.levels[2]
    assert isinstance(disk, DiskLevel)
    calls.room = disk._file.reserved_bytes = 2 * PAGE  # as if the file system had given no more
    before = {key: stack.level_of(key) for key in stack}
    with pytest.raises(InsufficientMemory, match=r"for 'new': .* is full: .* free some space"):
        stack.register("new", random_bytes(PAGE), priority=9)
    assert {key: stack.level_of(key) for key in stack} == before
    check(stack)


def test_a_failed_prefetch_is_raised_by_the_next_access(stack: VGPUStack, calls: Calls):
    calls.read_error = errno.EIO
    stack.prefetch(["k5"])
    stack._mover.submit(int).result()
    calls.read_error = None
    with pytest.raises(DiskError, match="reading"):
        stack.access("k5")
    check(stack)


def test_changed_bytes_are_reported_not_served(stack: VGPUStack):
    disk = stack.levels[2]
    assert isinstance(disk, DiskLevel)
    entry = stack._entries["k5"]
    assert entry.extent is not None
    with open(f"/proc/self/fd/{disk._file.fd}", "r+b", buffering=0) as file:
        file.seek(entry.extent.offset)
        file.write(bytes([int(random_bytes(PAGE, seed=5)[0]) ^ 128]))
    with pytest.raises(CorruptData, match="came back changed"):
        stack.access("k5")
    with pytest.raises(CorruptData, match="came back changed"):
        stack.move("k5", 1)
    assert stack.level_of("k5") == 2
    check(stack, range(5))
    stack.register("k5", random_bytes(PAGE, seed=5), priority=7)  # a new copy of it heals
    check(stack)


def test_an_interrupt_in_the_middle_of_a_cascade(stack: VGPUStack, no_delay_left: None):
    """Ctrl-C may arrive while bytes move: nothing is half done afterwards."""

    def interrupt(kind: str) -> None:
        set_transfer_delay(None)
        raise KeyboardInterrupt

    for number, start in enumerate(["k5", "k4", "k0"]):
        set_transfer_delay(interrupt)
        with pytest.raises(KeyboardInterrupt):
            stack.register(f"k{number}", random_bytes(PAGE, seed=100 + number), priority=10)
            stack.access(start)
        check(stack, changed={key: 100 + int(key[1]) for key in stack if stack._entries[key].priority == 10})
