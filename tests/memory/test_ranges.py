"""The range allocator against a plain map of bytes."""

from __future__ import annotations

import random

from vblackwell.memory.ranges import RangeAllocator

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
            assert ranges._by_size == runs


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
