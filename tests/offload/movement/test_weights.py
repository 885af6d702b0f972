"""Streaming a model that nothing trains:
which groups stay, and that a pass moves the others once, in whatever order it goes; and what the budget counts.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vblackwell.errors import InsufficientMemory, StaleTensor
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.layout.generation import WEIGHT_PLACES
from vblackwell.offload.layout.groups import Group
from vblackwell.offload.movement.weights import WeightStreamer, groups_that_stay
from vblackwell.offload.optimizer import VGPUAdamW

LAYERS, WIDTH = 12, 32
LAYER_BYTES = WIDTH * WIDTH * 4


def group_of(index: int, num_bytes: int) -> Group:
    made = Group(index, f"g{index}")
    made.append("w", nn.Parameter(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), False), torch.uint8)
    return made


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.order = list(range(LAYERS))

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x


@pytest.fixture
def chain(make_stack):
    """``chain(places)``: a frozen model of which level 0 holds so many layers, a plain copy,
    and the bytes that a call of it loads.
    """

    def make(places: int):
        torch.manual_seed(0)
        plain, streamed = Chain().requires_grad_(False), Chain().requires_grad_(False)
        streamed.load_state_dict(plain.state_dict())
        stack = make_stack(places * LAYER_BYTES)
        enable_vgpu_stack_optimization(streamed, stack, placement="streamed")

        def loaded_by(model) -> int:
            def count():
                return sum(link["bytes"] for link in stack.get_stats()["links"] if link["destination"] == "arena")

            before, x = count(), torch.randn(3, WIDTH)
            with torch.no_grad():
                assert torch.equal(model(x), plain(x))
            return (count() - before) // LAYER_BYTES

        return streamed, plain, loaded_by

    return make


@pytest.mark.parametrize("places", [5, 8, LAYERS])
def test_a_pass_moves_what_does_not_stay_once(places, chain):
    model, _, loaded_by = chain(places)
    weights = offload_of(model).weights
    assert weights.frozen
    loaded_by(model)
    stays = places if places == LAYERS else places - WEIGHT_PLACES
    assert len(weights.staying) == stays
    assert [loaded_by(model) for _ in range(4)] == [LAYERS - stays] * 4


def test_the_next_pass_is_on_its_way_before_it_begins(chain):
    model, _, loaded_by = chain(5)
    loaded_by(model)
    engine = offload_of(model)
    first = [group for group in engine.groups if group.index not in engine.weights.staying][: WEIGHT_PLACES - 1]
    assert all(map(engine.weights.is_loaded, first))


def test_any_order_is_right_and_is_learned(chain):
    model, plain, loaded_by = chain(5)
    back = list(reversed(range(LAYERS)))
    for order in (list(range(LAYERS)), [3, 1, 1, 7, 0], back, back, back):
        model.order = plain.order = order
        last = loaded_by(model)
    assert last == LAYERS - 2


def test_the_budget_may_change(chain):
    model, _, loaded_by = chain(9)
    weights = offload_of(model).weights
    assert [loaded_by(model) for _ in range(2)][1] == LAYERS - 6
    weights.rebudget(5 * LAYER_BYTES)
    assert weights.loaded_bytes <= 5 * LAYER_BYTES
    assert [loaded_by(model) for _ in range(2)][1] == LAYERS - 2
    weights.rebudget(0)  # never less than a group
    assert [loaded_by(model) for _ in range(2)][1] == LAYERS


def test_a_model_with_something_to_train_keeps_beladys_rule(make_stack):
    model = Chain().requires_grad_(False)
    model.layers[3].requires_grad_(True)
    enable_vgpu_stack_optimization(model, make_stack(9 * LAYER_BYTES), placement="streamed")
    assert not offload_of(model).weights.frozen


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20), budget=st.integers(0, 120))
def test_what_stays_leaves_room_for_what_passes(sizes, budget):
    groups = [group_of(index, 512 * size) for index, size in enumerate(sizes)]
    stays = groups_that_stay(groups, 512 * budget)
    held = sum(group.num_bytes for group in stays) // 512
    assert len(set(stays)) == len(stays) and held <= budget
    if sum(sizes) <= budget:
        assert len(stays) == len(sizes)
    elif stays:
        assert held + WEIGHT_PLACES * max(sizes) <= budget


def test_groups_of_one_size_stay_evenly():
    groups = [group_of(index, 512) for index in range(12)]
    chosen = sorted(group.index for group in groups_that_stay(groups, 512 * (WEIGHT_PLACES + 4)))
    assert [later - earlier for earlier, later in zip(chosen, chosen[1:], strict=False)] == [3, 3, 3]


@pytest.fixture
def trained(make_stack):
    model = Chain()
    enable_vgpu_stack_optimization(model, make_stack(5 * LAYER_BYTES), placement="streamed")
    return model, offload_of(model)


def test_a_load_ahead_that_finds_no_memory_for_an_update_is_left_out(trained, monkeypatch):
    """An update that is due is queued before the load, and may need memory too."""
    model, engine = trained

    def full(group: Group) -> None:
        raise InsufficientMemory("host memory is full", needed_bytes=1, available_bytes=0)

    monkeypatch.setattr(engine.step_control, "order_loads", full)
    assert not engine.step_control.prefetch(engine.groups[0])


def test_what_backward_is_refused_is_not_loaded_for_it(trained):
    model, engine = trained
    loss = model(torch.randn(3, WIDTH)).sum()
    with torch.no_grad():
        model.layers[-1].weight.mul_(2)
    engine.weights.drop_all()
    with pytest.raises(StaleTensor, match="changed since"):
        loss.backward()
    assert not any(map(engine.weights.is_loaded, engine.groups))


@pytest.mark.parametrize("at_once", [False, True])
def test_the_budget_counts_what_is_loaded_and_not_locked(make_stack, monkeypatch, at_once):
    """After each load, drop, lock and unlock, in whatever order layers are used, with steps and without."""
    seen = set[str]()

    def noted(name: str) -> None:
        own = getattr(WeightStreamer, name)

        def check(self: WeightStreamer, *args: Any, **options: Any) -> Any:
            try:
                return own(self, *args, **options)
            finally:
                loaded = self._by_storage.values()
                locked = sum(each.group.num_bytes for each in loaded if each.locked)
                assert self.loaded_bytes + locked == sum(each.group.num_bytes for each in loaded), name
                seen.add(f"{name}, some locked" if locked else name)

        monkeypatch.setattr(WeightStreamer, name, check)

    for name in ("load", "_forget", "lock", "unlock", "rebudget"):
        noted(name)
    torch.manual_seed(0)
    model, draw = Chain(), random.Random(0)
    stack = make_stack(2 << 20)
    enable_vgpu_stack_optimization(model, stack, placement="streamed", update="level0")
    engine = offload_of(model)
    engine.level0.at_once = at_once
    optimizer = VGPUAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, update_in_backward=True)
    for step in range(12):
        model.order = draw.choices(range(LAYERS), k=LAYERS)
        engine.weights.rebudget(draw.randint(1, 6) * LAYER_BYTES)
        model(torch.randn(3, WIDTH)).square().sum().backward()
        if step % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()
    assert {"load", "_forget", "lock, some locked", "unlock", "rebudget"} <= seen


def test_views_and_parameters_of_one_model_are_read_together(make_stack):
    """A view is a snapshot; a parameter beside it is loaded as by itself, whatever stands first."""
    torch.manual_seed(0)
    plain, streamed = Chain(), Chain()
    streamed.load_state_dict(plain.state_dict())
    enable_vgpu_stack_optimization(streamed, make_stack(2 * LAYER_BYTES), placement="streamed")
    x = torch.randn(3, WIDTH)
    cases = (
        lambda w, v: w.T @ w,
        lambda w, v: w @ w.T,
        lambda w, v: w.T + v,
        lambda w, v: w.detach() - w,
        lambda w, v: w.data - v,
        lambda w, v: torch.cat([w.T, v]),
        lambda w, v: nn.functional.linear(x, w[:], v[0]),
        lambda w, v: nn.functional.mse_loss(w.T, v),
        lambda w, v: torch.einsum("ij,jk->ik", w.T, v),
        lambda w, v: torch.addmm(w[0], w, v.T),
        lambda w, v: sum((a.detach() - b).norm() for a, b in ((w, v), (v, w))),
    )
    for place, case in enumerate(cases):
        found = case(streamed.layers[0].weight, streamed.layers[7].weight)
        assert torch.equal(found.detach(), case(plain.layers[0].weight, plain.layers[7].weight).detach()), place
    view, other = streamed.layers[0].weight.detach(), streamed.layers[7].weight
    for write in (
        lambda: view.add_(other),
        lambda: torch.add(other, other, out=view),
        lambda: torch.add(other, view, out=view),
    ):
        with torch.no_grad(), pytest.raises(StaleTensor, match="no_grad"):
            write()


def test_a_loss_of_weights_alone_trains_as_plain(make_stack):
    losses = []
    for level0 in (64 * LAYER_BYTES, 2 * LAYER_BYTES):
        torch.manual_seed(0)
        model = Chain()
        placement = "resident" if level0 > 32 * LAYER_BYTES else "streamed"
        enable_vgpu_stack_optimization(model, make_stack(level0), placement=placement)
        optimizer = VGPUAdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            loss = model(torch.ones(1, WIDTH)).sum()
            for layer in model.layers:
                loss = loss + (layer.weight.T @ layer.weight - torch.eye(WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:] and losses[2] < losses[0]
