"""What runs where: the share of updates that the CPU gets, and which updates wait for the next forward."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vblackwell.errors import InsufficientMemory
from vblackwell.offload.layout.groups import Group, find_groups, moment_ranges
from vblackwell.offload.layout.placement import (
    StreamedPlacement,
    StreamingOptions,
    checkpoints_ahead,
    early_groups,
    late_groups,
    may_be_behind,
    passing_bytes,
    place_streamed,
    spaces,
    state_bytes,
)
from vblackwell.offload.layout.storage_plan import StoragePlan
from vblackwell.units import GiB, MiB


def test_another_division_keeps_what_lives_on_level0():
    """And is one of the ranges' plan, too; where nothing is updated on level 0, there is no ring for another."""
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 80, bias=False) for _ in range(40)))
    groups, levels = find_groups(model, torch.bfloat16, None)[0], spaces([4 * MiB, GiB], on_gpu=True)
    options = StreamingOptions(torch.bfloat16, update=0.25, resident_bytes=2 * state_bytes(groups[0]))
    found = place_streamed(model, levels, options)
    for update, on_host in ((0.5, 20), ("device", 0), (0.25, 10)):
        other = found.updated(update)
        assert len(other.on_level0) == 40 - on_host
        assert other.storage.resident == {0, 1} and other.on_level0[:2] == found.groups[:2]
        assert other.storage.on_level0 == {group.index for group in other.on_level0[2:]}
    assert found.updated(0.25).on_level0 == found.on_level0
    on_host = place_streamed(model, levels, StreamingOptions(torch.bfloat16, update="host"))
    assert on_host.updated("device") is on_host


def test_of_several_micro_batches_the_first_groups_of_the_backward_are_updated_late():
    groups, _ = find_groups(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(10))), torch.bfloat16, None)
    levels = spaces([GiB, GiB], on_gpu=True)
    late = late_groups(groups, StoragePlan.empty(levels, [1], groups))
    assert late and late == groups[: -1 - len(late) : -1]
    assert late_groups(groups, StoragePlan.empty(levels, [1], groups, resident=groups[:1])) == []
    assert late_groups(groups, StoragePlan.empty(spaces([GiB, GiB], on_gpu=False), [1], groups)) == []
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(10)))
    found = place_streamed(model, spaces([MiB, GiB], on_gpu=True), StreamingOptions(torch.bfloat16, update="device"))
    storage = found.storage.with_ranges([(g, "gradient") for g in found.groups] + moment_ranges(found.groups))
    early = [sum(found.early(storage, number), []) for number in (1, 2)]
    assert [len(each) for each in early] == [10, 10 - len(late)]


def test_what_sums_pass_is_in_ram_before_shadows_and_refused_where_it_has_no_room():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64 + 64 * (number == 0)) for number in range(4)))
    model[1] = torch.nn.Linear(128, 64)
    found = place_streamed(model, spaces([MiB, GiB], on_gpu=True), StreamingOptions(torch.bfloat16, update="host"))
    largest = max(group.num_bytes for group in found.groups)
    assert [found.incoming_bytes(number, undo=True) for number in (1, 2, 3)] == [0, largest, largest]
    arena = place_streamed(model, spaces([MiB, GiB], on_gpu=False), StreamingOptions(torch.bfloat16, update="host"))
    assert arena.incoming_bytes(3, undo=True) == 0, "the worker reads it where it is"

    ranges = found.gradient_ranges(found.trainable, 3, undo=True) + moment_ranges(found.trainable)
    plan = replace(found.storage, incoming_bytes=largest).with_ranges(ranges)
    alone = found.storage.with_ranges(ranges)
    pages = plan.levels[1].used_bytes - alone.levels[1].used_bytes
    assert largest <= pages < largest + 4096 and plan.ranges == alone.ranges
    assert plan.with_ranges(ranges) is plan, "it is taken once"
    full = replace(alone.levels[1], capacity_bytes=alone.levels[1].used_bytes)
    small = replace(
        found.storage, levels=(alone.levels[0], replace(full, used_bytes=found.storage.levels[1].used_bytes))
    )
    assert small.with_ranges(ranges).levels[1].free_bytes == 0
    with pytest.raises(InsufficientMemory, match="the model's bytes need"):
        replace(small, incoming_bytes=largest).with_ranges(ranges)
    with pytest.raises(InsufficientMemory, match="sums of gradients pass through RAM, which takes .* and 0 B are free"):
        replace(alone, levels=(alone.levels[0], full), incoming_bytes=largest).with_ranges([])


def test_the_first_groups_of_the_forward_have_shadows_where_room_is_short():
    """Their updates are needed first; what lives on level 0 has none."""
    groups, _ = find_groups(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))), torch.bfloat16, None)
    ranges = [(group, kind) for group in groups for kind in ("weight", "master")] + moment_ranges(groups)
    host = spaces([GiB, GiB], on_gpu=False)[1]
    one = sum(host.held_bytes(groups[0].size_of(kind)) for kind in ("weight", "master", "exp_avg", "exp_avg_sq"))
    for free, expected in ((0, []), (one, groups[:1]), (4 * one - 1, groups[:3]), (100 * one, groups)):
        plan = StoragePlan.empty(spaces([GiB, 6 * one + free], on_gpu=False), [1], groups).with_ranges(ranges)
        assert early_groups(groups, [], [], plan) == ([], expected)
    levels = spaces([GiB, 6 * one + 4 * one], on_gpu=False)
    less = StoragePlan.empty(levels, [1], groups, set_aside_bytes=one).with_ranges(ranges)
    assert early_groups(groups, [], [], less) == ([], groups[:3])
    levels = spaces([GiB, GiB], on_gpu=False)
    kept = StoragePlan.empty(levels, [1], groups, resident=groups[:2], on_level0=groups).with_ranges(ranges)
    assert early_groups(groups, [], [], kept) == ([], groups[2:])


def test_groups_that_are_a_step_behind_leave_room_for_each_other_first():
    """Those updated on level 0 take a weight each, those of the host a gradient more; what is left makes shadows."""
    groups, _ = find_groups(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))), torch.bfloat16, None)
    kinds, on_level0 = ("weight", "remainder", "exp_avg", "exp_avg_sq", "gradient"), groups[::2]
    ranges = [(group, kind) for group in groups for kind in kinds]
    host = spaces([GiB, GiB], on_gpu=True)[1]
    narrow, all_of_one = (
        sum(host.held_bytes(groups[0].size_of(kind)) for kind in some) for some in (kinds[:1], kinds[:4])
    )

    def early(free: int) -> tuple[list[Group], list[Group]]:
        levels = spaces([GiB, 6 * (all_of_one + narrow) + free], on_gpu=True)
        plan = StoragePlan.empty(levels, [1], groups, on_level0=on_level0).with_ranges(ranges)
        assert all(may_be_behind(group, plan) for group in groups)
        return early_groups(groups, groups, on_level0, plan)

    assert early(narrow - 1) == ([], [])
    assert early(3 * narrow) == (on_level0, [])
    assert early(5 * narrow) == ([group for group in groups if group is not groups[3] and group is not groups[5]], [])
    assert early(9 * narrow) == (groups, [])
    behind, shadowed = early(9 * narrow + all_of_one - narrow)
    assert len(shadowed) == 1 and shadowed[0] in on_level0 and set(behind) == set(groups) - set(shadowed)
    assert early(GiB) == (groups[1::2], on_level0)


@given(level0=st.integers(1, 40), frozen=st.integers(8, 64), asked=st.sampled_from([None, 1]))
def test_what_one_forward_holds_fits_the_weights_budget(level0: int, frozen: int, asked: int | None):
    """A layer of frozen weights and adapters is two groups, and a parameter of the model's own is there all the time:
    either the plan is refused, or the budget holds all that is in use at once.
    """

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(frozen * 8, 128, bias=False).requires_grad_(False)
            self.lora = torch.nn.Linear(128, 8, bias=False)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Adapted() for _ in range(3))
            self.scale = torch.nn.Parameter(torch.ones(2000))

    with torch.device("meta"):
        model = Model()
    options = StreamingOptions(torch.bfloat16, update="device", weight_bytes=asked)
    try:
        found = place_streamed(model, spaces([level0 * 16 * 1024, GiB], on_gpu=True), options)
    except InsufficientMemory:
        return
    sizes = {group.name: group.num_bytes for group in found.groups}
    assert {"layers.0", "layers.0/trained", "Model"} <= set(sizes)
    assert found.budget_bytes >= sizes["layers.0"] + sizes["layers.0/trained"] + sizes["Model"]


def on_gpu(layer: tuple[int, int], num_layers: int, level0_bytes: int) -> StreamedPlacement:
    """A bf16 model of as many layers of ``layer`` elements, streamed on a GPU and updated there."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(*layer, bias=False) for _ in range(num_layers)))
    options = StreamingOptions(torch.bfloat16, update="device")
    return place_streamed(model, spaces([level0_bytes, 1 << 40], on_gpu=True), options)


def bytes_of(found: StreamedPlacement) -> int:
    """All that streaming takes of level 0, which activations do not get."""
    places = found.max_locked + found.max_in_flight
    return found.budget_bytes + found.ring_bytes + places * found.groups[0].num_bytes


def test_streaming_leaves_room_for_activations_on_a_small_gpu():
    """At 2.70B groups of 0.16 GB have all that they profit from; at 6.7B, of 0.4 GB, activations and workspace of 16 x
    2048 tokens (3.84 GB by the estimator's trace) fit next to them with 0.5 GB left.
    """
    small = on_gpu((2560, 32_000), 34, 8 * GiB)
    group = small.groups[0].num_bytes
    assert small.budget_bytes == 6 * group
    assert small.ring_bytes == pytest.approx(1.5 * passing_bytes(small.groups[0]), abs=512)
    assert (small.max_locked, small.max_in_flight) == (4, 5)
    large = on_gpu((4096, 4 * 4096 + 3 * 11_008), 32, 8 * GiB)
    assert large.budget_bytes // large.groups[0].num_bytes == 3 and (large.max_locked, large.max_in_flight) == (2, 2)
    assert bytes_of(large) + 3.84e9 < 8 * GiB - 0.5e9


@pytest.mark.parametrize("share", [0.05, 0.07, 0.1, 0.15, 0.2])
def test_a_plan_never_takes_all_of_a_gpu(share: float):
    found = on_gpu((1024, 1024), 12, int(2 * 1024 * 1024 / share))
    assert found.budget_bytes >= found.groups[0].num_bytes and min(found.max_locked, found.max_in_flight) >= 1
    assert bytes_of(found) <= 0.8 * 2 * 1024 * 1024 / share


def test_two_groups_and_the_ring_are_the_least():
    group = 2 * 1024 * 1024
    assert on_gpu((1024, 1024), 12, int(2.4 * group)).budget_bytes == group
    with pytest.raises(InsufficientMemory, match="the largest layer group, '0', needs 4.00 MiB there"):
        on_gpu((1024, 1024), 12, int(2.2 * group))


@pytest.mark.parametrize(("megabytes", "calls"), [(16, 3), (80, 3), (128, 2), (256, 1), (1024, 1)])
def test_fewer_large_inputs_of_checkpoints_are_under_way(megabytes: int, calls: int):
    """Of 8 GiB: 16 x 2048 tokens of a width of 4096 are 256 MiB, and three of them were what such a run lacked."""
    assert checkpoints_ahead(megabytes * MiB, 8 * GiB, on_gpu=True) == calls
    assert checkpoints_ahead(megabytes * MiB, 8 * GiB, on_gpu=False) == 3
