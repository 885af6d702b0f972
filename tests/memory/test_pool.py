"""Ranges reserved by hand, next to a stack's keys and without any, and what is counted."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest
import torch

from tests.memory.conftest import PAGE, NullLevel, counts, levels, page
from vblackwell.errors import ConfigurationError, InsufficientMemory, KeyClash, StaleTensor
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.pool import LevelPool
from vblackwell.memory.transfer import FutureTransfer
from vblackwell.units import KiB


def test_reservations_make_keys_sink_and_are_never_evicted(make_stack):
    stack = make_stack(4, 4, 8)
    for i in range(4):
        stack.register(f"k{i}", page(i), priority=10)
    ring = stack.reserve("ring", 3 * PAGE, 0)
    assert ring.level == 0 and ring.num_bytes == 3 * PAGE and ring.name == "ring"
    assert [stack.level_of(f"k{i}") for i in range(4)] == [1, 1, 1, 0]
    view = ring.view()
    assert view is not None and view.data_ptr() % 64 == 0 and view.shape == (3 * PAGE,)
    for i in range(4):
        assert torch.equal(stack.access(f"k{i}"), page(i))
    assert counts(stack, "used_bytes")[0] == 4 * PAGE
    with pytest.raises(InsufficientMemory, match="for reservation 'more'"):
        stack.reserve("more", 2 * PAGE, 0)
    stack.unreserve(ring)
    with pytest.raises(StaleTensor, match="'ring' has been given back"):
        ring.view()
    stack.unreserve(stack.reserve("more", 2 * PAGE, 0))
    with pytest.raises(ConfigurationError, match="at least one byte"):
        stack.reserve("none", 0, 0)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_reading_and_writing_reservations_is_counted(make_stack, level: int):
    stack = make_stack(8, 8, 8)
    range_ = stack.reserve("r", 2 * PAGE, level)
    assert (range_.view() is None) == (level == 2)
    stack.write(range_, page(3, 2)).wait()
    out = torch.zeros(KiB)
    stack.read(range_, out).wait()
    assert torch.equal(out, page(3))
    names = ["arena", "cpu", "ssd"]
    links = {(link["source"], link["destination"]): link for link in stack.get_stats()["links"]}
    assert links["arena", names[level]]["bytes"] == 2 * PAGE + (PAGE if level == 0 else 0)
    assert links[names[level], "arena"]["bytes"] == PAGE + (2 * PAGE if level == 0 else 0)
    assert all(link["seconds"] > 0 for link in links.values())


def test_a_reservation_at_the_last_level_lets_keys_rise(make_stack):
    stack = make_stack(2, 4)
    for i in range(4):
        stack.register(f"k{i}", page(i), priority=5)
    stack.reserve("all but two", 2 * PAGE, 1)
    assert levels(stack) == {"k0": 0, "k1": 0, "k2": 1, "k3": 1}
    with pytest.raises(InsufficientMemory):
        stack.reserve("one more", PAGE, 1)
    for i in range(4):
        assert torch.equal(stack.access(f"k{i}"), page(i))


def test_a_pool_without_keys_counts_and_refuses():
    pool = VGPUStack([NullLevel(4 * PAGE, "GPU", torch.device("cpu")), NullLevel(2 * PAGE, "cpu", None, PAGE)])
    ring = pool.reserve("ring", 3 * PAGE, 0)
    with pytest.raises(KeyClash, match="'ring' is taken"):
        pool.reserve("ring", PAGE, 0)
    with pytest.raises(
        InsufficientMemory, match="no room on GPU for reservation 'more'.*free are GPU 4.00 KiB, cpu 8.00"
    ):
        pool.reserve("more", 2 * PAGE, 0)
    pool.write(ring, page(1, 3)).wait()
    assert pool.get_stats()["links"] == [{"source": "GPU", "destination": "GPU", "bytes": 3 * PAGE, "seconds": 0.0}]
    pool.unreserve(ring)
    pool.reserve("more", 4 * PAGE, 0)
    pool.close()
    with pytest.raises(ConfigurationError, match="closed"):
        pool.reserve("late", PAGE, 0)


def test_statistics_add_up(make_stack):
    stack = make_stack(2, 2, 4)
    for i in range(6):
        stack.register(f"k{i}", page(i), priority=7)
    for key in ("k0", "k0", "k2", "k4"):
        stack.access(key)
    stack.count_found(0)
    stack.count_found(2)
    stack.count_link(1, 0, 1000, 0.5)
    stack.add_stall(2.0)
    for _ in range(2):
        stack.add_update(1000, 0.25)
    stats = stack.get_stats()
    assert set(stats) == {"levels", "links", "stall_seconds", "host_updates"} and stats["stall_seconds"] > 2
    assert stats["host_updates"] == {"parameters": 2000, "seconds": 0.5}
    assert set(stats["levels"][0]) == {
        "device",
        "capacity_bytes",
        "used_bytes",
        "peak_bytes",
        "hits",
        "misses",
        "evictions",
        "promotions",
        "demotions",
    }
    assert [level["device"] for level in stats["levels"]] == ["arena", "cpu", "ssd"]
    assert counts(stack, "hits") == [3, 1, 2] and counts(stack, "misses") == [3, 2, 0]
    assert counts(stack, "promotions") == [2, 0, 0]
    assert counts(stack, "evictions") == counts(stack, "demotions") == [2, 0, 0]
    assert set(stats["links"][0]) == {"source", "destination", "bytes", "seconds"}
    stack.move("k4", 2)
    assert counts(stack, "demotions") == [3, 0, 0] and counts(stack, "evictions") == [2, 0, 0]


def test_a_link_is_busy_once_however_many_use_it():
    statistics = LevelPool([NullLevel(PAGE, "GPU", torch.device("cpu"))])
    futures: list[Future[None]] = [Future() for _ in range(4)]
    began = time.perf_counter()
    for future in futures[:3]:
        statistics.count_transfer("a", "b", 1, FutureTransfer([future]))
    time.sleep(0.05)
    for future in futures[:3]:
        future.set_result(None)
    time.sleep(0.05)
    statistics.count_transfer("a", "b", 1, FutureTransfer([futures[3]]))
    time.sleep(0.02)
    futures[3].set_result(None)
    (link,) = statistics.get_stats()["links"]
    pause = 0.05
    assert link["bytes"] == 4
    assert 0.05 + 0.02 <= link["seconds"] <= time.perf_counter() - began - pause, (
        "three at once count once, the pause does not"
    )


def test_views_of_a_range_are_made_once(make_stack):
    stack = make_stack(4, 4)
    reservation = stack.reserve("range", PAGE, 1)
    assert reservation.part(8, 16) is reservation.part(8, 16) and reservation.part(8, 16).numel() == 8
    stack.unreserve(reservation)
