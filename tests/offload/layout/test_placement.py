"""What runs where: the share of updates that the CPU gets, and which updates wait for the next forward."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from vblackwell.offload.layout.groups import find_groups, moment_ranges
from vblackwell.offload.layout.lanes import CPU_SHADOW_BYTES, CPU_UPDATE_BYTES
from vblackwell.offload.layout.placement import (
    LINK_USE,
    OVERLAP,
    PASS_BYTES,
    STATE_BYTES,
    StreamingOptions,
    deferred_groups,
    pass_bytes,
    shadowed_groups,
    share_for,
    share_of_all,
    spaces,
    state_bytes,
)
from vblackwell.offload.layout.storage_plan import StoragePlan
from vblackwell.units import GiB

RATES = st.floats(1e8, 1e11)


@given(link=RATES, cpu=RATES)
def test_both_are_done_together(link: float, cpu: float):
    share = share_for(link, cpu)
    assert 0 <= share <= 0.5
    if 0.02 < share < 0.5:
        whole = share / OVERLAP  # if the CPU had all of the step
        used = LINK_USE * link
        up, on_host = (PASS_BYTES + (1 - whole) * STATE_BYTES) / used, whole / cpu
        # Shares are rounded to hundredths, so each side is off by 0.005 of its slope at most.
        assert abs(up - on_host) <= 0.0051 / OVERLAP * (STATE_BYTES / used + 1 / cpu)


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
    kept_bytes, rates = 2 * state_bytes(groups[0]), (50e9, 1.6e9)

    def share(**sizes: int) -> float:
        return share_of_all(groups, StreamingOptions(**sizes), lambda: rates)

    with_rollback = 50e9, 1.6e9 / (1 + CPU_SHADOW_BYTES / CPU_UPDATE_BYTES)
    assert share() == share_for(*with_rollback, 4.0) < share_for(*rates, 4.0)
    # Of the other eight, two stay loaded.
    few = share(weight_bytes=5 * groups[0].num_bytes, resident_bytes=kept_bytes)
    assert few == round(0.8 * share_for(*with_rollback, 3.0), 2)


def test_updates_wait_for_the_forward_only_if_nothing_lives_on_level0():
    groups, _ = find_groups(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(10))), torch.bfloat16, None)
    levels = spaces([GiB, GiB])
    waiting = deferred_groups(groups, StoragePlan.empty(levels, [1], groups))
    assert waiting and waiting == deferred_groups(groups) == groups[: -1 - len(waiting) : -1]
    assert deferred_groups(groups, StoragePlan.empty(levels, [1], groups, resident=groups[:1])) == []


def test_a_slow_cpu_gets_nothing():
    assert share_for(50e9, 2e7) == 0.0


def test_the_first_groups_of_the_forward_have_shadows_where_room_is_short():
    """Their updates are needed first; what lives on level 0 has none."""
    groups, _ = find_groups(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))), torch.bfloat16, None)
    ranges = [(group, kind) for group in groups for kind in ("weight", "master")] + moment_ranges(groups)
    one = sum(groups[0].size_of(kind) for kind in ("weight", "master", "exp_avg", "exp_avg_sq"))
    for free, expected in ((0, []), (one, groups[:1]), (4 * one - 1, groups[:3]), (100 * one, groups)):
        plan = StoragePlan.empty(spaces([GiB, 6 * one + free + 64 * 4096]), [1], groups).with_ranges(ranges)
        rest = plan.levels[1].free_bytes - free  # what rounding left
        levels = (plan.levels[0], replace(plan.levels[1], capacity_bytes=plan.levels[1].capacity_bytes - rest))
        assert shadowed_groups(groups, replace(plan, levels=levels)) == expected
    kept = StoragePlan.empty(spaces([GiB, GiB]), [1], groups, resident=groups[:2], on_level0=groups).with_ranges(ranges)
    assert shadowed_groups(groups, kept) == groups[2:]
