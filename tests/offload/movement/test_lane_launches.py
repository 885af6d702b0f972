"""One launch of AdamW for neighbouring parameters, to the bits of one each: by the kernel's own source on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.kernels import emulation
from tests.kernels.optimizer.test_adamw_source import INTRINSICS, MAIN, MAIN_THEN
from vblackwell.kernels.optimizer import adamw
from vblackwell.kernels.optimizer.adamw import AdamWStep, Order
from vblackwell.offload.layout.groups import OLD_KINDS, Group, Piece, Slot, element_type, num_elements, parts_of
from vblackwell.offload.movement import lane_cuda as lane_module
from vblackwell.offload.movement.lane import LaneJob, update_piece
from vblackwell.offload.movement.lane_cuda import CudaLane, runs_of

# Torch's vector and scalar loop that round alike, and two that do not.
ALIKE, OF_8, OF_16 = (
    Order(8, (True, True), (1, 1)),
    Order(8, (True, True), (2, 1)),
    Order(16, (True, False), (0, 1)),
)
STEP = AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 7)
OTHER = replace(STEP, weight_decay=0.0)
SIZES = [256, 4096 + 8, 7, 0, 1500, 2600, 32, 5000]
NUMBERS = [STEP, replace(STEP), STEP, STEP, OTHER, None, OTHER, OTHER]  # equal ones need not be one object
# Of the step before, where states lack it: one that differs where this one does not, and the other way.
BEFORE = replace(STEP, step=6)
WARMER = replace(BEFORE, lr=3e-2)


def group_of(dtype: torch.dtype) -> Group:
    group = Group(0, "g")
    for index, size in enumerate(SIZES):
        group.append(f"p{index}", nn.Parameter(torch.empty(size)), dtype)
    return group


def numbers_of(group: Group) -> dict[Slot, AdamWStep]:
    return {slot: each for slot, each in zip(group.slots, NUMBERS, strict=True) if each is not None}


def use_order(patch: pytest.MonkeyPatch, order: Order) -> None:
    for module in (adamw, lane_module):
        patch.setattr(module, "torch_order", lambda: order)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        # 1500 is no multiple of 8 or 16, and 4096 + 8 none of 16; a parameter without numbers is passed over
        (ALIKE, [(0, 2), (4, 4), (6, 7)]),
        (OF_8, [(0, 2), (4, 4), (6, 7)]),
        (OF_16, [(0, 1), (2, 2), (4, 4), (6, 7)]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_launch_ends_at_a_scalar_loop_and_where_numbers_change(order, expected, dtype, monkeypatch):
    use_order(monkeypatch, order)
    group = group_of(dtype)
    piece = Piece(0, num_elements(group))
    parts = {group.slots.index(slot): (start, stop) for slot, start, stop in parts_of(group, piece)}
    found = runs_of(LaneJob(group, numbers_of(group), {}, {}), piece)
    assert [(start, stop) for _, _, start, stop in found] == [(parts[a][0], parts[b][1]) for a, b in expected]
    assert [numbers for numbers, *_ in found] == [NUMBERS[first] for first, _ in expected]


def test_scalar_loops_keep_parameters_of_equal_numbers_apart(monkeypatch):
    group = group_of(torch.bfloat16)
    job, piece = LaneJob(group, dict.fromkeys(group.slots, STEP), {}, {}), Piece(0, num_elements(group))
    for order, count in ((ALIKE, 1), (OF_8, 3), (OF_16, 5)):  # after 7 and 1500, and after 4096 + 8 and 2600 too
        use_order(monkeypatch, order)
        assert len(runs_of(job, piece)) == count


@pytest.mark.parametrize(
    ("lacked", "expected"),
    [
        ([BEFORE] * 8, [(0, 2), (4, 7)]),  # an empty parameter is in no launch
        ([BEFORE, replace(BEFORE), WARMER, WARMER, *[BEFORE] * 4], [(0, 1), (2, 2), (4, 7)]),
        ([BEFORE] * 6 + [WARMER, BEFORE], [(0, 2), (4, 5), (6, 6), (7, 7)]),
    ],
)
def test_a_launch_of_two_steps_ends_where_the_numbers_of_either_change(lacked, expected, monkeypatch):
    use_order(monkeypatch, ALIKE)
    group = group_of(torch.bfloat16)
    numbers = [STEP, STEP, STEP, replace(STEP), *[OTHER] * 4]
    given = [dict(zip(group.slots, each, strict=True)) for each in (numbers, lacked)]
    piece = Piece(0, num_elements(group))
    parts = {group.slots.index(slot): (start, stop) for slot, start, stop in parts_of(group, piece)}
    found = runs_of(LaneJob(group, given[0], {}, {}, behind=given[1]), piece)
    assert [(start, stop) for _, _, start, stop in found] == [(parts[a][0], parts[b][1]) for a, b in expected]
    assert [both for *both, _, _ in found] == [[numbers[a], lacked[a]] for a, _ in expected]


class Source:
    """`CudaLane`'s launches, by the kernel's source: what an update makes of a group's ranges."""

    def __init__(self, files: tuple[str, ...], patch: pytest.MonkeyPatch) -> None:
        self.launches = 0
        self._files = files
        patch.setattr(adamw, "_launcher", self._launcher)
        patch.setattr(adamw, "_ahead_launcher", self._ahead_launcher)
        self._lane = CudaLane.__new__(CudaLane)
        self._lane._queues = SimpleNamespace(update=SimpleNamespace(device=None, cuda_stream=0))  # type: ignore
        patch.setattr(self._lane, "_is_resident", lambda group: False)

    def _launcher(self, weight: int, gradient: torch.dtype, previous: torch.dtype | None, device: Any) -> Any:
        macros = adamw.macros(weight, adamw.GRADIENTS[gradient], adamw.PREVIOUS[previous])

        def launch(grid: tuple[int, int, int], values: tuple[int, ...], stream: int) -> None:
            places = [SimpleNamespace(data_ptr=lambda at=at: at) for at in values[:8]]
            assert grid == (-(-values[8] // 4096), 1, 1)
            emulation._call(self._files, macros, MAIN, [*places, *values[8:]])
            self.launches += 1

        return launch

    def _ahead_launcher(self, weight: int, gradient: torch.dtype, device: Any) -> Any:
        macros = adamw.macros(weight, adamw.GRADIENTS[gradient], 0, 1)

        def launch(grid: tuple[int, int, int], values: tuple[int, ...], stream: int) -> None:
            places, after = (
                [SimpleNamespace(data_ptr=lambda at=at: at) for at in each] for each in (values[:8], values[18:20])
            )
            assert grid == (-(-values[8] // 4096), 1, 1) and values[5:8] == (0, 0, 0)
            emulation._call(self._files, macros, MAIN_THEN, [*places, *values[8:18], *after, *values[20:]])
            self.launches += 1

        return launch

    def update(self, job: LaneJob, ranges: dict[str, torch.Tensor], pieces: list[Piece]) -> None:
        for piece in pieces:
            held = {kind: flat[piece.start :].data_ptr() for kind, flat in ranges.items() if kind != "gradient"}
            self._lane._compute(job, piece, None, held)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    path = tmp_path / "intrinsics.h"
    path.write_text(INTRINSICS)
    return Source((str(path), *adamw.FILES[1:]), monkeypatch)


@emulation.needs_compiler
@pytest.mark.each_value
@pytest.mark.parametrize("order", [ALIKE, OF_8, OF_16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_are_those_of_a_launch_for_each_parameter(source, order, dtype, monkeypatch):
    use_order(monkeypatch, order)
    group, generator = group_of(dtype), torch.Generator().manual_seed(0)
    count = num_elements(group)
    kinds = ["weight", *(["remainder"] if dtype == torch.bfloat16 else []), "exp_avg", "exp_avg_sq", "accumulated"]
    given = {}
    for kind in (*kinds, "gradient"):
        values, kept = torch.rand(count, generator=generator), torch.full((count,), torch.nan)  # gaps are NaN
        for _, start, stop in parts_of(group, Piece(0, count)):
            kept[start:stop] = values[start:stop]
        given[kind] = (100 * values).to(torch.int16) if kind == "remainder" else kept.to(element_type(kind, dtype))
    job = LaneJob(
        group,
        numbers_of(group),
        {},
        {},
        gradient=given["gradient"].view(torch.uint8),
        gradient_kind="accumulated",
        factor=torch.tensor(0.37),
    )
    cut = SIZES[0] + 1024  # in the second parameter
    merged, single = ({kind: flat.clone() for kind, flat in given.items()} for _ in range(2))
    source.update(job, merged, [Piece(0, cut), Piece(cut, count)])
    launches = source.launches
    parts = [*parts_of(group, Piece(0, cut)), *parts_of(group, Piece(cut, count))]
    source.update(job, single, [Piece(start, stop) for _, start, stop in parts])
    assert launches < source.launches - launches == len(numbers_of(group))  # an empty one has none, one is cut in two
    for kind in kinds:
        integer = {4: torch.int32, 2: torch.int16}[given[kind].itemsize]
        for slot, start, stop in parts_of(group, Piece(0, count)):
            found, wanted = (every[kind][start:stop].view(integer) for every in (merged, single))
            assert torch.equal(found, wanted), (kind, slot.name)
            same = torch.equal(found, given[kind][start:stop].view(integer))
            assert same == (kind == "accumulated" or slot not in job.numbers), (kind, slot.name)


@emulation.needs_compiler
@pytest.mark.each_value
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("order", [ALIKE, OF_8, OF_16, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_of_a_step_and_one_more_are_those_of_a_launch_for_each_parameter(
    source, order, dtype, elsewhere, monkeypatch
):
    """``elsewhere``: the new weights' place is not that of the old, which stay as they are. ``order``: None for that of
    torch on this machine, whose bits are known.
    """
    exact = order is None
    use_order(monkeypatch, adamw.torch_order() if order is None else order)
    group, generator = group_of(dtype), torch.Generator().manual_seed(0)
    count = num_elements(group)
    kinds = [*(["remainder"] if dtype == torch.bfloat16 else []), "exp_avg", "exp_avg_sq", *OLD_KINDS]
    given = {}
    for kind in (*kinds, "weight", "gradient"):
        values, kept = torch.rand(count, generator=generator), torch.full((count,), torch.nan)  # gaps are NaN
        for _, start, stop in parts_of(group, Piece(0, count)):
            kept[start:stop] = values[start:stop]
        given[kind] = (100 * values).to(torch.int16) if kind == "remainder" else kept.to(element_type(kind, dtype))
    numbers = dict(zip(group.slots, [STEP, STEP, OTHER, OTHER, STEP, STEP, OTHER, OTHER], strict=True))
    lacked = dict(zip(group.slots, [BEFORE] * 5 + [WARMER, BEFORE, BEFORE], strict=True))
    gradient = given.pop("gradient")
    job = LaneJob(group, numbers, {}, {}, gradient=gradient.view(torch.uint8), behind=lacked)
    cut = SIZES[0] + 1024  # in the second parameter
    merged, single, wanted = ({kind: flat.clone() for kind, flat in given.items()} for _ in range(3))
    for ranges in (merged, single, wanted):
        if not elsewhere:
            ranges["weight"] = ranges["old_weight"]
    source.update(job, merged, [Piece(0, cut), Piece(cut, count)])
    launches = source.launches
    parts = [*parts_of(group, Piece(0, cut)), *parts_of(group, Piece(cut, count))]
    source.update(job, single, [Piece(start, stop) for _, start, stop in parts])
    assert launches < source.launches - launches == len(group.slots)  # an empty one has none, one is cut in two
    if exact:
        update_piece(job, Piece(0, count), {kind: flat.view(torch.uint8) for kind, flat in wanted.items()})
    for kind in given:
        integer = {4: torch.int32, 2: torch.int16}[given[kind].itemsize]
        for slot, start, stop in parts_of(group, Piece(0, count)):
            found, same, right = (every[kind][start:stop].view(integer) for every in (merged, single, wanted))
            assert torch.equal(found, same), (kind, slot.name)
            assert not exact or torch.equal(found, right), (kind, slot.name)
            kept = torch.equal(found, given[kind][start:stop].view(integer))
            reads = ("old_gradient", *(["old_weight"] if elsewhere else []))
            assert kept == (kind in reads), (kind, slot.name)
