"""The share of updates that the CPU gets."""

import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vblackwell.offload.layout import update_rates
from vblackwell.offload.layout.groups import Group, find_groups
from vblackwell.offload.layout.update_place import pass_bytes, share_of_all, state_bytes
from vblackwell.offload.layout.update_rates import (
    CPU_ELEMENTS,
    LINK_USE,
    OVERLAP,
    PASS_BYTES,
    STATE_BYTES,
    HomeUpdate,
    adds_per_update,
    balanced_share,
    cpu_rate,
    duplex_rate,
    measured_bytes,
    median_look,
    rates_together,
    share_for,
    update_elements,
)
from vblackwell.offload.movement.level0_updates import deferred_groups
from vblackwell.offload.movement.update_loop import LEAST_PART
from vblackwell.units import GiB, MiB

RATES = st.floats(1e8, 1e11)


@given(link=RATES, cpu=RATES)
def test_both_are_done_together(link: float, cpu: float):
    share = share_for(link, cpu)
    assert 0 <= share <= 0.5
    if 0.02 < share < 0.5:
        whole = share / OVERLAP  # if the CPU had all of the step
        used = LINK_USE * link
        up, at_home = (PASS_BYTES + (1 - whole) * STATE_BYTES) / used, whole / cpu
        # Shares are rounded to hundredths, so each side is off by 0.005 of its slope at most.
        assert abs(up - at_home) <= 0.0051 / OVERLAP * (STATE_BYTES / used + 1 / cpu)


def test_what_stays_loaded_leaves_less_to_the_cpu():
    linear = lambda: torch.nn.Linear(128, 80, bias=False)  # noqa: E731
    groups, _ = find_groups(torch.nn.Sequential(*(linear() for _ in range(10))), torch.bfloat16, None)
    group = 128 * 80 * 2
    assert [group.num_bytes for group in groups] == [group] * 10
    room = [None, 3 * group, 5 * group, 8 * group, 20 * group]
    assert [pass_bytes(groups, each) for each in room] == [4.0, 4.0, 3.2, 2.0, 0.0]
    shares = [share_for(50e9, 1.6e9, pass_bytes(groups, each)) for each in room]
    assert shares == sorted(shares, reverse=True) and shares[-1] < shares[0]


def test_what_lives_on_level0_asks_nobody():
    linear = lambda: torch.nn.Linear(128, 80, bias=False)  # noqa: E731
    groups, _ = find_groups(torch.nn.Sequential(*(linear() for _ in range(10))), torch.bfloat16, None)
    seen = []

    def share_for_pass(each: float) -> float:
        seen.append(each)
        return 0.4

    kept_bytes = 2 * state_bytes(groups[0])
    assert share_of_all(groups, None, 0, share_for_pass) == 0.4
    assert share_of_all(groups, 5 * groups[0].num_bytes, kept_bytes, share_for_pass) == 0.32  # of the other eight
    assert seen == [4.0, 3.0]  # of these, two stay loaded


def test_what_is_measured_with_keeps_to_a_cap(monkeypatch):
    sizes = []
    for left in (8 * GiB, 384 * MiB, 0):
        monkeypatch.setattr(update_rates, "gpu_bytes_left", lambda device, left=left: left)
        sizes.append(measured_bytes(torch.device("cuda", 0), 256 * MiB))
    assert sizes == [256 * MiB, 38 * MiB, MiB]


def test_updates_wait_for_the_forward_only_if_nothing_lives_on_level0():
    class Kept:
        def __init__(self, *kept: int) -> None:
            self.kept = kept

        def keeps(self, group: Group) -> bool:
            return group.index in self.kept

    groups, _ = find_groups(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(10))), torch.bfloat16, None)
    waiting = deferred_groups(groups, Kept())  # pyright: ignore[reportArgumentType]
    assert waiting and waiting == deferred_groups(groups) == groups[: -1 - len(waiting) : -1]
    assert deferred_groups(groups, Kept(0)) == []  # pyright: ignore[reportArgumentType]


def test_a_slow_cpu_gets_nothing():
    assert share_for(50e9, 2e7) == 0.0


def test_a_rate_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(update_rates, "update_elements", lambda: 1 << 20)
    assert 1e7 < cpu_rate() < 1e11


@pytest.mark.gpu
def test_a_gpu_gets_a_share():
    device = torch.device("cuda", 0)
    assert 1e9 < duplex_rate(device) < 1e12
    link, cpu = rates_together(device)
    assert 1e9 < link < 1e12 and 1e7 < cpu < 1e11
    assert balanced_share(device) == share_for(link, cpu)  # measured once


def test_the_median_of_all_looks_counts():
    # the second on a machine that was busy with something else; link rates are in another order
    assert median_look([(52e9, 1.9e9), (50e9, 2e8), (45e9, 2.2e9)]) == (52e9, 1.9e9)


def test_every_thread_has_as_many_full_parts(monkeypatch: pytest.MonkeyPatch):
    free = SimpleNamespace(available_bytes=1 << 40)
    monkeypatch.setattr(update_rates, "memory_facts", lambda: free)
    for threads in (1, 2, 3, 13, 40, 125):
        monkeypatch.setattr(update_rates, "update_threads", lambda threads=threads: threads)
        count = update_elements()
        assert count % (threads * LEAST_PART) == 0 and CPU_ELEMENTS <= count < CPU_ELEMENTS + threads * LEAST_PART
    free.available_bytes = 8 << 30  # 125 threads' parts would take a fifth of it
    assert update_elements() == CPU_ELEMENTS


def test_adding_up_takes_less_than_an_update(monkeypatch: pytest.MonkeyPatch):
    """12 bytes a parameter (4 written and fetched for it, 2 and 2 read) against 28. With a whole addend widened in new memory, 36 MiB
    here, which glibc takes from the system every time, it takes longer than an update: 0.7."""
    monkeypatch.setattr(update_rates, "time", SimpleNamespace(perf_counter=time.process_time))  # whatever else runs
    assert 1.1 < adds_per_update(HomeUpdate(9 << 20)) < 8
