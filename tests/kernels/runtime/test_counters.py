"""kernels/runtime/counters.py: whatever the launches, each finds zeros, and nobody else's."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vblackwell.kernels.runtime import counters

CPU = torch.device("cpu")


def replace_places(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the stream and the capture of launches are set; memory is the CPU's."""
    place = [0, 0]
    monkeypatch.setattr(counters, "_pairs", {})
    monkeypatch.setattr(counters, "_place", lambda device: tuple(place))
    monkeypatch.setattr(counters, "_zeros", lambda length, device: torch.zeros(2, length, dtype=torch.int32))
    return place


@pytest.fixture
def places(monkeypatch):
    return replace_places(monkeypatch)


def launch(count: int) -> int:
    """Counts in all of its counters, of which it wants zeros, and clears what it was told to; where they are."""
    with counters.zeroed(count, CPU) as (now, stale, stale_count):
        assert now.numel() >= count and not now[:count].any(), "not zero"
        now[:count] += 1
        stale[:stale_count] = 0
        return now.data_ptr()


LAUNCHES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 9000)), max_size=40)


@given(launches=LAUNCHES)
def test_each_launch_finds_zeros(launches):
    with pytest.MonkeyPatch.context() as patch:
        place = replace_places(patch)
        for stream, capture, count in launches:
            place[:] = [stream, capture]
            launch(count)


def test_two_sets_are_used_in_turn(places):
    first, second, third = (launch(9) for _ in range(3))
    assert first == third != second


def test_streams_and_captures_share_none(places):
    seen = set()
    for stream, capture in ((0, 0), (1, 0), (0, 5), (1, 6), (0, 7)):
        places[:] = [stream, capture]
        mine = {launch(9), launch(9)}
        assert len(mine) == 2 and not mine & seen
        seen |= mine


def test_threads_that_share_a_stream_take_turns(places):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(launch, [9, 300, 5000, 9] * 20))


def test_a_launch_that_fails_leaves_no_counters(places):
    launch(9)
    with pytest.raises(RuntimeError, match="refused"), counters.zeroed(9, CPU) as (now, _, _):
        now[:9] = 7
        raise RuntimeError("refused")
    launch(9)
    launch(9)
