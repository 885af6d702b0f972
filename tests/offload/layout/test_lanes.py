"""The simulated lanes: by hand where that is possible,
and against steps that were measured on an H200 (docs/journal/offload.md).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from vblackwell.machine.rates import Rates
from vblackwell.offload.layout.lanes import (
    Clock,
    Graph,
    GroupWork,
    LanePlan,
    LaneTimes,
    disk_hidden_from,
    least_seconds,
    simulate,
    spans,
)
from vblackwell.units import GiB

FAST = Rates(1e15, 1e15, 1e18, 1e15, 1e15, 1e15, 1e15, 1e15, disk_read=math.inf, disk_write=math.inf)


def chain(count: int = 6, **more) -> tuple[GroupWork, ...]:
    return tuple(GroupWork(1000, 2000, 1.0, 3.0, **more) for _ in range(count))


def busiest(times: LaneTimes) -> str:
    return max(times.busy, key=times.busy.__getitem__)


def test_with_endless_rates_only_compute_takes_time():
    times = simulate(LanePlan(chain(), 4000, 20000), FAST)
    assert times.step_seconds == pytest.approx(6 * 4.0, rel=1e-3)
    assert busiest(times) == "gpu" and times.busy["gpu"] == pytest.approx(1.0, rel=1e-3)


def test_spans_are_one_step_of_what_is_counted():
    groups = (*chain(3), *chain(3, on_host=True, input_bytes=500))
    plan, rates = (
        LanePlan(groups, 4000, 20000),
        replace(FAST, up=9e3, up_both=8e3, down=9e3, down_both=8e3, cpu_adamw=400),
    )
    times, found = simulate(plan, rates), spans(plan, rates)
    ends = [stop for pieces in found.values() for _, stop in pieces]
    assert max(ends) == pytest.approx(times.step_seconds, rel=1e-6)
    for lane, pieces in found.items():
        in_order = sorted(pieces)
        assert all(one[1] <= other[0] + 1e-9 for one, other in zip(in_order, in_order[1:], strict=False))
        assert all(0 <= start <= stop for start, stop in pieces)
        busy = sum(stop - start for start, stop in pieces) / times.step_seconds
        assert busy == pytest.approx(times.busy[lane], abs=1e-6)
    assert found["cpu"] and found["down"] and not found["disk"]


def test_weights_that_fit_stay_and_others_come_twice_a_step():
    all_there = simulate(LanePlan(chain(on_host=False), 6 * 2000, 20000, states_up=0, states_down=0), FAST)
    assert all_there.up_bytes == pytest.approx(0, abs=1)
    # Two groups fit: those at the two turns of a step stay, the others come for forward and for backward.
    few = simulate(LanePlan(chain(), 2 * 2000, 20000, states_up=0, states_down=0), FAST)
    assert few.up_bytes == pytest.approx(2 * (6 - 2) * 2000, rel=0.01)


def test_bytes_of_states_and_gradients():
    up = simulate(LanePlan(chain(), 6 * 2000, 20000), FAST)
    assert up.up_bytes == pytest.approx(6 * 10_000, rel=0.01) and up.down_bytes == pytest.approx(6 * 12_000, rel=0.01)
    late = simulate(
        LanePlan(chain(deferred=True), 6 * 2000, 20000), FAST
    )  # their gradients are written back and come up
    assert late.up_bytes == pytest.approx(6 * 12_000, rel=0.01) and late.down_bytes == pytest.approx(
        6 * 14_000, rel=0.01
    )
    host = simulate(LanePlan(chain(on_host=True), 6 * 2000, 20000), FAST)  # the CPU's weights come up anew
    assert host.up_bytes == pytest.approx(6 * 2000, rel=0.01) and host.down_bytes == pytest.approx(6 * 2000, rel=0.01)
    assert host.busy["cpu"] > 0


def test_a_slow_link_or_cpu_sets_the_pace():
    slow_link = replace(FAST, up=100.0, up_both=100.0)
    times = simulate(LanePlan(chain(), 4000, 20000), slow_link)
    assert busiest(times) == "up" and times.busy["up"] > 0.95
    assert times.step_seconds == pytest.approx(times.up_bytes / 100.0, rel=0.06)
    slow_cpu = simulate(LanePlan(chain(on_host=True), 4000, 20000), replace(FAST, cpu_adamw=10.0))
    assert busiest(slow_cpu) == "cpu" and slow_cpu.step_seconds >= 6 * 1000 / 10.0


def test_a_narrow_ring_holds_updates_back():
    link = replace(FAST, up=4e3, up_both=4e3, down=4e3, down_both=4e3)
    narrow, wide = (simulate(LanePlan(chain(), 12000, ring, piece_bytes=500), link) for ring in (500, 20000))
    assert narrow.step_seconds > 1.2 * wide.step_seconds


def test_groups_that_live_on_level_0_take_no_transfer():
    kept = simulate(LanePlan(chain(resident=True), 2 * 2000, 20000), FAST)
    assert kept.up_bytes == kept.down_bytes == 0 and kept.busy["gpu"] == pytest.approx(1.0, rel=1e-3)
    # With rollback there is none from level 0: their gradients are written back, and come up for the step.
    undo = simulate(LanePlan(chain(resident=True), 2 * 2000, 20000, stores_gradients=True), FAST)
    assert undo.up_bytes == undo.down_bytes == pytest.approx(6 * 2000, rel=0.01)


def test_updates_on_host_hold_the_next_step_up_whatever_lives_on_level_0():
    kept, *rest = chain(resident=True)[:1] + chain(on_host=True)
    times = simulate(LanePlan((kept, *rest), 20000, 20000), replace(FAST, cpu_adamw=100.0))
    assert times.step_seconds >= 6 * 1000 / 100.0 and busiest(times) == "cpu"


def test_while_steps_clip_states_and_gradients_wait_for_the_norm():
    link = replace(FAST, up=4e3, up_both=4e3, down=4e3, down_both=4e3)
    free, clipped = (simulate(LanePlan(chain(), 12000, 20000, clips=clips), link) for clips in (False, True))
    assert clipped.up_bytes == pytest.approx(6 * 12_000, rel=0.01)  # gradients come back
    # Nothing overlaps with backward, three quarters of the compute: the forward and the link are what is left.
    assert clipped.step_seconds > free.step_seconds + 6
    host = simulate(LanePlan(chain(on_host=True), 12000, 20000, clips=True), replace(FAST, cpu_adamw=1000.0))
    assert host.step_seconds >= 6 * 3 + 6  # the CPU's six seconds begin after backward, and end before forward's last


def test_what_stays_and_what_comes_ahead_of_a_step_that_clips_is_off_the_link_after_it():
    link = replace(FAST, up=4e3, up_both=4e3)
    plan = LanePlan(chain(), 12000, 20000, piece_bytes=1000, clips=True)
    none, two, six = (simulate(replace(plan, max_staying=count), link) for count in (0, 2, 6))
    # The backward, what still comes up after it, and the last group's forward. The ring holds the states of two groups.
    assert none.up_bytes == pytest.approx(72_000) and none.step_seconds == pytest.approx(18 + 72 / 4 + 1, abs=0.3)
    assert two.up_bytes == pytest.approx(68_000) and two.step_seconds == pytest.approx(18 + 48 / 4 + 1, abs=0.3)
    assert six.up_bytes == pytest.approx(60_000) and six.step_seconds == pytest.approx(18 + 40 / 4 + 1, abs=0.3)
    several = [simulate(replace(plan, max_staying=count, micro_batches=2), link) for count in (0, 6)]
    assert several[0] == several[1]  # what stays would be one of two that have to be added
    kept = simulate(replace(plan, groups=chain(resident=True), max_staying=6), FAST)
    assert kept.up_bytes == 0 and kept.down_bytes == pytest.approx(6 * 2000)


def test_micro_batches_pass_weights_and_gradients_again():
    once, thrice = (simulate(LanePlan(chain(), 2 * 2000, 20000, micro_batches=count), FAST) for count in (1, 3))
    assert thrice.step_seconds == pytest.approx(3 * once.step_seconds, rel=1e-3)
    # Weights come three times, and the sum of two gradients, in fp32, once for the update.
    weights = 2 * (6 - 2) * 2000
    assert thrice.up_bytes == pytest.approx(3 * weights + 6 * (10_000 + 4000), rel=0.01)
    assert thrice.down_bytes == pytest.approx(6 * (12_000 + 2 * 2000), rel=0.01) and thrice.busy["cpu"] > 0


@pytest.mark.parametrize("where", ["on_host", "deferred"])
def test_the_cpu_adds_up_what_the_last_micro_batch_writes_back(where: str):
    """Also of groups whose update is late: their gradients pass the host before it, and come up in fp32."""
    cpu = replace(FAST, cpu_adamw=2000.0, adds_per_update=0.5)  # an update takes half a second, a sum one
    times = simulate(LanePlan(chain(**{where: True}), 12000, 20000, micro_batches=2), cpu)
    updates = 6 * 0.5 * (1 + 2 / 26) if where == "on_host" else 0  # of a gradient that is 2 bytes wider
    assert times.busy["cpu"] * times.step_seconds == pytest.approx(6 * 1.0 + updates, rel=1e-3)
    if where == "deferred":
        assert times.up_bytes == pytest.approx(6 * (10_000 + 4000), rel=0.01)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_rollback_needs_the_sum_of_all_micro_batches_on_host(micro_batches: int):
    cpu = replace(FAST, cpu_adamw=2000.0, adds_per_update=0.5)
    plan = LanePlan(chain(), 12000, 20000, micro_batches=micro_batches, stores_gradients=True)
    times = simulate(plan, cpu)
    assert times.busy["cpu"] * times.step_seconds == pytest.approx(6 * 1.0 * (micro_batches - 1), abs=1e-6)


def test_gradients_of_earlier_micro_batches_come_up_for_groups_that_live_on_level_0():
    kept = simulate(LanePlan(chain(resident=True), 2 * 2000, 20000, micro_batches=2), FAST)
    assert kept.up_bytes == kept.down_bytes == pytest.approx(6 * 2000, rel=0.01)
    slow = replace(FAST, up=50.0, up_both=50.0)  # 40 s for a group, where a step computes for 48
    late = simulate(LanePlan(chain(resident=True), 2 * 2000, 20000, micro_batches=2), slow)
    assert late.step_seconds >= 6 * 2000 / 50.0 and busiest(late) == "up"


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("stored", [False, True])
def test_a_step_takes_no_less_than_its_busiest_lane(micro_batches: int, stored: bool):
    """And in the long run of a step that one lane bounds, next to nothing more."""
    for share, cpu in itertools.product((0.0, 0.3, 0.6), (5e8, 3e9)):
        rates, plan = replace(H200, cpu_adamw=cpu, memory=math.inf), llama(share, 3.0)
        plan = replace(plan, micro_batches=micro_batches, stores_gradients=stored)
        times, least = simulate(plan, rates), least_seconds(plan, rates)
        assert 0.5 * times.step_seconds < least <= times.step_seconds
        if times.busy["cpu"] > 0.97:
            assert least > 0.95 * times.step_seconds
        late = replace(plan, clips=True, groups=tuple(replace(group, behind=True) for group in plan.groups))
        assert least_seconds(late, rates) <= simulate(late, rates).step_seconds


def test_sums_go_before_updates_of_other_groups():
    """The runtime's worker does what need not wait first, and updates when nothing else could be done."""
    cpu = replace(FAST, cpu_adamw=100.0, adds_per_update=1.0)
    graph = Graph(LanePlan(chain(on_host=True), 12000, 20000, micro_batches=2), cpu, 4)
    clock = Clock(graph)
    clock.run()
    tasks = [(begun, task) for task, begun in clock.ends.items() if task.lane == "cpu" and task.step == 0]
    kinds = [task.postponable for _, task in sorted(tasks, key=lambda each: each[0])]
    # All six gradients come within a second or two of each other, while the first sum takes ten.
    assert kinds[:2] == [False, False] and kinds[-1] and sum(kinds) == 6 and len(kinds) == 12


# -- the disk ----------------------------------------------------------------------------------------------------------

ON_DISK = {"disk_read": 8000, "disk_write": 8000}


def test_a_disk_that_keeps_up_costs_nothing_and_a_slow_one_sets_the_pace():
    plan = LanePlan(chain(**ON_DISK), 12000, 20000)
    rates = replace(FAST, disk_read=4e4, disk_write=4e4)
    fast = simulate(plan, rates)
    assert fast.step_seconds == pytest.approx(
        24, rel=0.03
    )  # compute; the last group's states are all that nothing hides
    assert fast.disk_bytes == pytest.approx(6 * 16_000, rel=0.02) and busiest(fast) == "gpu"
    slow = simulate(plan, replace(FAST, disk_read=1e3, disk_write=2e3))
    assert busiest(slow) == "disk" and slow.step_seconds == pytest.approx(6 * (8 + 4), rel=0.05)
    half = simulate(
        LanePlan(chain(on_host=True, **ON_DISK), 12000, 20000), replace(FAST, disk_read=1e3, disk_write=2e3)
    )
    assert busiest(half) == "disk" and half.step_seconds >= 6 * (8 + 4)


def test_updates_on_the_host_wait_for_the_disk_in_the_worker():
    """Which reads, updates and writes a group before it comes to the next: 8, 10 and 4 seconds each."""
    rates = replace(FAST, cpu_adamw=100.0, disk_read=1e3, disk_write=2e3)
    times = simulate(LanePlan(chain(on_host=True, **ON_DISK), 12000, 20000), rates)
    # In addition the first read and the last write, which the lanes have apart, and a group's compute.
    assert 6 * (8 + 10 + 4) <= times.step_seconds <= 6 * (8 + 10 + 4) + 8 + 4 + 4
    assert times.busy["cpu"] == pytest.approx(6 * 10 / times.step_seconds, rel=1e-3)
    assert times.busy["disk"] == pytest.approx(6 * (8 + 4) / times.step_seconds, rel=1e-3)


def test_more_sets_of_host_memory_let_the_disk_read_further_ahead():
    rates = replace(FAST, disk_read=5e3, disk_write=5e3, up=1e4, up_both=1e4, down=1e4, down_both=1e4)
    one, three = (simulate(LanePlan(chain(**ON_DISK), 12000, 20000, disk_sets=sets), rates) for sets in (1, 3))
    assert one.step_seconds > 1.1 * three.step_seconds
    assert one.disk_bytes == pytest.approx(three.disk_bytes, rel=0.05)


def test_weights_on_a_disk_are_read_for_every_load():
    plan = LanePlan(chain(weights_on_disk=True), 2 * 2000, 20000)
    times = simulate(plan, replace(FAST, disk_read=1e6, disk_write=1e6))
    assert times.disk_bytes == pytest.approx(2 * (6 - 2) * 2000, rel=0.01)


def test_tokens_a_step_from_which_the_disk_is_hidden():
    rates = replace(FAST, disk_read=1e3, disk_write=1e3)
    plan = LanePlan(chain(**ON_DISK), 12000, 20000)
    tokens = disk_hidden_from(plan, rates, 1000)
    # 96 seconds of disk a step; 24 of compute for 1000 tokens, and a start and an end that nothing hides.
    assert tokens is not None and 4000 <= tokens <= 5600
    assert disk_hidden_from(LanePlan(chain(), 12000, 20000), rates, 1000) == 0
    idle = LanePlan(tuple(replace(group, forward=0.0, backward=0.0) for group in plan.groups), 12000, 20000)
    assert disk_hidden_from(idle, rates, 1000) is None


def test_it_needs_groups_and_micro_batches():
    with pytest.raises(ValueError, match="0 micro-batches"):
        simulate(LanePlan(chain(), 4000, 20000, micro_batches=0), FAST)
    with pytest.raises(ValueError, match="0 groups"):
        simulate(LanePlan((), 4000, 20000), FAST)


# -- the 2.70B Llama shape at 16,384 tokens a step on an H200 ----------------------------------------------------------

TOKENS, HIDDEN, WIDE, LAYERS, VOCAB, SEQ = 16384, 2560, 6912, 32, 32000, 2048
BLOCK, EDGE = 4 * HIDDEN**2 + 3 * HIDDEN * WIDE + 2 * HIDDEN, VOCAB * HIDDEN
RESIDENT = 26_391  # tokens/s with everything on the GPU, of which compute is all but AdamW's 28 bytes a parameter
H200 = Rates(
    779e12,
    50e12,
    4.2e12,
    up=55e9,
    down=55e9,
    up_both=49.6e9,
    down_both=49.6e9,
    cpu_adamw=1.9e9,
    disk_read=math.inf,
    disk_write=math.inf,
)


def llama(share: float, weight_gib: float) -> LanePlan:
    """What the engine plans: groups on the host spread over all but the first 15 %, the others' last 15 % late."""
    sizes = [EDGE, *[BLOCK] * LAYERS, EDGE]
    compute = TOKENS / RESIDENT - sum(sizes) * 28 / H200.memory
    block, head = 2 * BLOCK * TOKENS + 2 * TOKENS * SEQ * HIDDEN, 2 * EDGE * TOKENS
    unit = compute / (LAYERS * 4 * block + 3 * head)
    late = sizes[int(len(sizes) * 0.15) :]
    on_host, taken, seen = set[int](), 0, 0
    for index in reversed(range(len(sizes) - len(late), len(sizes))):
        seen += sizes[index]
        if taken + sizes[index] / 2 <= share * sum(sizes) * seen / sum(late):
            on_host.add(index)
            taken += sizes[index]
    on_level0 = [index for index in range(len(sizes)) if index not in on_host]
    deferred = set(on_level0[len(on_level0) - round(0.15 * len(on_level0)) :])
    groups = []
    for index, size in enumerate(sizes):
        inner = 0 < index <= LAYERS
        forward = block if inner else head if index else 0
        backward = 3 * block if inner else 2 * head if index else 0
        inputs = TOKENS * HIDDEN * 2 if inner else 0
        groups.append(
            GroupWork(size, 2 * size, unit * forward, unit * backward, inputs, index in on_host, index in deferred)
        )
    return LanePlan(tuple(groups), int(weight_gib * GiB), int(1.5 * 10 * BLOCK))


@pytest.mark.parametrize(
    ("share", "weight_gib", "tokens_per_second", "up_gb"),
    [(0.0, 1.6, 18_277, 38.2), (0.2, 1.6, 20_581, 32.7), (0.3, 2.2, 22_015, 28.9), (0.35, 2.0, 22_478, 27.7)],
)  # fmt: skip
def test_measured_steps(share, weight_gib, tokens_per_second, up_gb):
    """Bytes come out within 2 %, tokens/s within 8 % and always too high: what the host itself takes between lanes is
    not simulated.

    Measured when the CPU took groups as they came, from the last to the first; at 0.4 that cost a tenth, which is why
    it no longer does.
    """
    times = simulate(llama(share, weight_gib), H200)
    assert times.up_bytes / 1e9 == pytest.approx(up_gb, rel=0.02)
    assert tokens_per_second < TOKENS / times.step_seconds < 1.08 * tokens_per_second
