"""What every level guarantees, whatever it is made of (vblackwell/memory/level.py).
The NULL level's bytes are not compared.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

from tests.delay import set_transfer_delay
from tests.memory.conftest import CAPACITY, NullLevel, random_bytes
from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.memory.level import DeviceLevel, Extent, Level, RangeAllocator
from vblackwell.units import KiB, MiB, align_up

# One byte, page and piece boundaries of the test disk (256 KiB pieces), and more than one piece with an odd end.
SIZES = [1, 511, 512, 4095, 4096, 4097, 256 * KiB, 256 * KiB + 1, MiB + 12345]


def holds_bytes(level: Level) -> bool:
    return not isinstance(level, NullLevel)


def read_back(level: Level, extent: Extent, num_bytes: int | None = None, device: str = "cpu") -> torch.Tensor:
    out = torch.full((num_bytes or extent.num_bytes,), 255, dtype=torch.uint8, device=device)
    level.read(extent, out).wait()
    return out.cpu()


@pytest.mark.parametrize("size", SIZES)
def test_bytes_come_back(level: Level, size: int):
    extent, source = level.allocate(size), random_bytes(size)
    transfer = level.write(extent, source)
    transfer.wait()
    assert transfer.done()
    if holds_bytes(level):
        assert torch.equal(read_back(level, extent), source)


def test_any_dtype_shape_and_alignment(level: Level):
    memory = random_bytes(64 * KiB + 64)
    for start in (0, 1, 7, 64):  # sources and destinations that start anywhere
        source = memory[start : start + 60001]
        extent = level.allocate(60001)
        level.write(extent, source).wait()
        out = torch.zeros(60001 + start, dtype=torch.uint8)[start:]
        level.read(extent, out).wait()
        assert not holds_bytes(level) or torch.equal(out, source)
    for value in (
        torch.randn(33, 5),
        torch.tensor(True),
        torch.randn(7).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j]),
    ):
        extent = level.allocate(value.nbytes)
        level.write(extent, value).wait()
        out = torch.empty_like(value)
        level.read(extent, out).wait()
        same = torch.equal(out.flatten().view(torch.uint8), value.flatten().view(torch.uint8))
        assert not holds_bytes(level) or same


def test_front_of_an_extent(level: Level):
    extent, source = level.allocate(MiB), random_bytes(MiB)
    level.write(extent, source).wait()
    for front in (1, 4097, 256 * KiB, 700_001):
        assert not holds_bytes(level) or torch.equal(read_back(level, extent, front), source[:front])
    level.write(extent, random_bytes(300_001, seed=1)).wait()
    source[:300_001] = random_bytes(300_001, seed=1)
    assert not holds_bytes(level) or torch.equal(read_back(level, extent), source)


def test_neighbours_do_not_touch(level: Level):
    sizes = [1, 4096, 100_000, 300_000, 4095]
    extents = [level.allocate(size) for size in sizes]
    sources = [random_bytes(size, seed=size) for size in sizes]
    for transfer in [level.write(extent, source) for extent, source in zip(extents, sources, strict=True)]:
        transfer.wait()
    level.write(extents[2], random_bytes(sizes[2], seed=-1)).wait()
    if holds_bytes(level):
        for i in (0, 1, 3, 4):
            assert torch.equal(read_back(level, extents[i]), sources[i])


def test_accounting(level: Level):
    assert (level.used_bytes, level.peak_bytes, level.capacity_bytes) == (0, 0, CAPACITY)
    a, b = level.allocate(1), level.allocate(100_000)
    assert a.held_bytes == level.alignment and b.held_bytes == align_up(100_000, level.alignment)
    used = a.held_bytes + b.held_bytes
    assert level.used_bytes == used
    level.free(b)
    assert (level.used_bytes, level.peak_bytes) == (a.held_bytes, used)
    level.free(a)
    assert (level.used_bytes, level.peak_bytes) == (0, used)


def test_capacity_is_exact(level: Level):
    half = level.allocate(CAPACITY // 2)
    assert not level.can_allocate(CAPACITY // 2 + 1) and level.can_allocate(CAPACITY // 2)
    with pytest.raises(InsufficientMemory, match="MiB are free") as caught:
        level.allocate(CAPACITY // 2 + 1)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (CAPACITY // 2 + 1, CAPACITY // 2)
    other = level.allocate(CAPACITY // 2)
    assert level.used_bytes == CAPACITY and not level.can_allocate(1)
    level.free(half)
    level.free(other)
    assert level.can_allocate(CAPACITY)
    level.free(level.allocate(CAPACITY))  # freed neighbours are one range again


def test_can_allocate_tells_the_truth(level: Level):
    """Random allocations of mixed sizes: what it says is what happens, and freed room is found again."""
    rng, live = random.Random(0), []
    for _ in range(400):
        if live and rng.random() < 0.45:
            level.free(live.pop(rng.randrange(len(live))))
            continue
        size = rng.choice([1, 5000, 70_000, 600_000])
        expected = level.can_allocate(size)
        try:
            live.append(level.allocate(size))
            assert expected
        except InsufficientMemory:
            assert not expected
        assert level.used_bytes == sum(extent.held_bytes for extent in live) <= CAPACITY
    for extent in live:
        level.free(extent)
    assert level.used_bytes == 0 and level.can_allocate(CAPACITY)


def test_taking_back_what_was_displaced(level: Level):
    """A plan frees and places, and undoes it from the last to the first: places and bytes are as before."""
    extents = [level.allocate(CAPACITY // 4) for _ in range(4)]
    for i, extent in enumerate(extents):
        level.write(extent, random_bytes(extent.num_bytes, seed=i)).wait()
    level.displace(extents[1])
    level.displace(extents[2])
    large = level.place(CAPACITY // 2)
    assert level.used_bytes == CAPACITY
    level.displace(large)
    level.restore(extents[2])
    level.restore(extents[1])
    assert level.used_bytes == CAPACITY and not level.can_allocate(1)
    if holds_bytes(level):
        for i, extent in enumerate(extents):
            assert torch.equal(read_back(level, extent), random_bytes(extent.num_bytes, seed=i))


def test_freeing_twice_is_refused(level: Level):
    extent = level.allocate(10)
    level.free(extent)
    with pytest.raises(KeyError):
        level.free(extent)


def test_view_aliases_the_bytes(level: Level):
    extent = level.allocate(5000)
    view = level.view(extent)
    if level.device is None:
        assert view is None
        return
    assert view is not None and view.shape == (5000,) and view.dtype == torch.uint8
    assert view.device == level.device and view.data_ptr() % 512 == 0
    source = random_bytes(5000)
    level.write(extent, source).wait()
    assert torch.equal(view.cpu(), source)
    view.zero_()
    if view.is_cuda:
        torch.cuda.synchronize(view.device)
    assert not read_back(level, extent).any()


def test_only_contiguous_tensors_move(level: Level):
    extent = level.allocate(400)
    with pytest.raises(ConfigurationError, match="contiguous"):
        level.write(extent, torch.zeros(10, 20)[:, ::2])
    with pytest.raises(ConfigurationError, match="contiguous"):
        level.read(extent, torch.zeros(10, 10).t())


def test_from_several_threads(level: Level):
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for step in range(25):
                size = rng.choice([100, 4096, 50_001, 300_000])
                extent = level.allocate(size)
                source = random_bytes(size, seed=100 * seed + step)
                level.write(extent, source).wait()
                assert not holds_bytes(level) or torch.equal(read_back(level, extent), source)
                level.free(extent)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert level.used_bytes == 0


def test_a_transfer_is_asynchronous(level: Level, no_delay_left: None):
    """The call returns while the copy is held back; `wait` and `wait_on` return after it."""
    if not holds_bytes(level) or (level.device is not None and level.device.type == "cuda"):
        pytest.skip("no thread copies here")
    gate = threading.Event()
    extent, source = level.allocate(5000), random_bytes(5000)
    level.write(extent, torch.zeros(5000, dtype=torch.uint8)).wait()
    set_transfer_delay(lambda kind: None if gate.wait(240) else pytest.fail("the gate stayed shut"))
    transfer = level.write(extent, source)
    assert not transfer.done()
    gate.set()
    transfer.wait_on(None)
    assert transfer.done()
    set_transfer_delay(None)
    assert torch.equal(read_back(level, extent), source)


def test_close_is_idempotent(make_level: Callable[..., Level]):
    for kind in ("arena", "host", "disk", "null"):
        level = make_level(kind)
        level.allocate(10)
        level.close()
        level.close()
        assert level.used_bytes == 0


# Levels whose bytes, or whose counterparts, are on a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["host", "disk", "cuda:0", pytest.param("cuda:1", marks=pytest.mark.multi_gpu)])
@pytest.mark.parametrize("size", [1, 4097, MiB + 12345])
def test_to_and_from_gpu_memory(make_level: Callable[..., Level], kind: str, size: int):
    level = make_level(kind)
    extent, source = level.allocate(size), random_bytes(size)
    transfer = level.write(extent, source.to("cuda:0"))
    transfer.wait()
    out = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    transfer = level.read(extent, out)
    transfer.wait_on(torch.cuda.current_stream())
    assert torch.equal((out + 0).cpu(), source)
    assert torch.equal(read_back(level, extent), source)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["host", "disk", "cuda:0", pytest.param("cuda:1", marks=pytest.mark.multi_gpu)])
def test_copies_start_after_queued_work_and_end_before_later_work(
    make_level: Callable[..., Level], kind: str, no_delay_left: None
):
    """Rule 1 and `wait_on`, with a GPU that is slow at both ends:
    the source is still being computed, the copy is held back.
    """
    level = make_level(kind)
    extent = level.allocate(MiB)
    set_transfer_delay(lambda where: torch.cuda._sleep(20_000_000) if where == "stream" else None)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            source = torch.zeros(MiB, dtype=torch.uint8, device="cuda:0")
            torch.cuda._sleep(50_000_000)
            source += 7
            writing = level.write(extent, source)
            writing.wait_on(stream)
            source.zero_()  # must not overtake the copy
            writing.wait()
            out = torch.zeros(MiB, dtype=torch.uint8, device="cuda:0")
            level.read(extent, out).wait_on(stream)
            assert int((out == 7).sum()) == MiB


@pytest.mark.gpu
def test_freeing_gives_gpu_memory_back(make_level: Callable[..., Level]):
    level = make_level("cuda:0", 64 * MiB)
    before = torch.cuda.memory_allocated(0)
    extent = level.allocate(16 * MiB)
    level.write(extent, random_bytes(16 * MiB)).wait()
    assert torch.cuda.memory_allocated(0) == before + 16 * MiB
    level.free(extent)
    assert torch.cuda.memory_allocated(0) == before


@pytest.mark.gpu
def test_host_slabs_are_pinned(make_level: Callable[..., Level]):
    level = make_level("host", 8 * MiB)
    view = level.view(level.allocate(MiB))
    assert view is not None and view.is_pinned()


SIZE = 64


def free_runs(taken: list[bool]) -> list[tuple[int, int]]:
    """(size, start) of every run of free bytes, sorted."""
    runs, start = [], None
    for i, used in enumerate([*taken, True]):
        if not used and start is None:
            start = i
        elif used and start is not None:
            runs.append((i - start, start))
            start = None
    return sorted(runs)


def test_memory_that_the_device_does_not_give_is_named_as_asked_for(monkeypatch: pytest.MonkeyPatch):
    level = DeviceLevel("cpu", MiB)

    def give_none(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "empty", give_none)
    with pytest.raises(InsufficientMemory, match="cpu gave no 1000 B .* cap of 1.00 MiB") as refused:
        level.allocate(1000)
    assert (refused.value.needed_bytes, level.used_bytes) == (1000, 0)


def test_best_fit_and_coalescing_against_a_map():
    for seed in range(30):
        rng = random.Random(seed)
        ranges, taken, live = RangeAllocator(SIZE), [False] * SIZE, []
        for _ in range(300):
            if live and rng.random() < 0.5:
                start, size = live.pop(rng.randrange(len(live)))
                ranges.free(start, size)
                taken[start : start + size] = [False] * size
            else:
                size = rng.randint(1, 12)
                fitting = [run for run in free_runs(taken) if run[0] >= size]
                start = ranges.allocate(size)
                assert start == (fitting[0][1] if fitting else None)  # smallest that fits, lowest of equals
                if start is not None:
                    taken[start : start + size] = [True] * size
                    live.append((start, size))
            runs = free_runs(taken)
            assert ranges.largest == (runs[-1][0] if runs else 0)
            assert ranges.empty == (not live)
            assert ranges._by_size == runs and sorted(ranges._free) == ranges._free
            assert sorted((end - start, start) for start, end in ranges._free) == runs


def test_take_undoes_free():
    ranges = RangeAllocator(SIZE)
    starts = [ranges.allocate(8) for _ in range(8)]
    assert starts == list(range(0, 64, 8))
    for start in (16, 32, 24):
        ranges.free(start, 8)
    assert ranges.largest == 24
    for start in (24, 32, 16):  # the middle of a free range, its end, its rest
        ranges.take(start, 8)
    assert ranges.largest == 0


def test_empty_address_space():
    ranges = RangeAllocator(0)
    assert ranges.allocate(1) is None and ranges.largest == 0
