"""What steps leave of a GPU goes to loaded weights, and comes back before a forward that may need it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.offload.conftest import MakeStack
from vblackwell.offload import engine as engine_module
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.movement import spare as spare_module
from vblackwell.offload.movement.spare import CREEP, FILLED, FILLING, STEADY, UNUSED, WATCHED, SpareMemory
from vblackwell.offload.optimizer import VGPUAdamW

PLANNED, STATES, CAPACITY = 100, 150, 1000


class Level0:
    capacity_bytes = CAPACITY

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def used_bytes(self) -> int:
        return self._world.held


class World:
    """A GPU of which a step takes `STATES`, what weights may take, and as much as its forward's batch has tokens, and
    an allocator that keeps what it has reserved."""

    def __init__(self, patch: pytest.MonkeyPatch, most_bytes: int = CAPACITY) -> None:
        self.budget, self.reserved, self.begun = PLANNED, 0, list[int]()
        world = self
        self.busy, self.time, self.link = 0.0, 0.0, 0.0  # a step takes a second, in which the link works so long
        stats = lambda: {"links": [{"seconds": world.link}]}  # noqa: E731
        self.stack: Any = SimpleNamespace(
            levels=[Level0(self)], level0_device="cuda:0", prefetchers=[None], get_stats=stats
        )
        patch.setattr(spare_module.time, "perf_counter", lambda: world.time)
        weights: Any = SimpleNamespace(budget_bytes=PLANNED, rebudget=lambda size: setattr(world, "budget", size))
        patch.setattr(torch.cuda, "memory_reserved", lambda device: world.reserved)
        patch.setattr(torch.cuda, "memory_allocated", lambda device: world.held)
        patch.setattr(torch.cuda, "empty_cache", lambda: setattr(world, "reserved", world.held))
        patch.setattr(spare_module, "gpu_bytes_left", lambda device: CAPACITY - world.held)
        self.spare = SpareMemory(weights, self.stack, most_bytes)

    @property
    def held(self) -> int:
        return STATES + self.budget

    def forward(self, *args: Any, training: bool = True, extra: int = 0, **arguments: Any) -> None:
        self.spare.begin_forward((args, arguments), training=training)
        self.begun.append(self.budget)
        sizes = [each.numel() for each in args if isinstance(each, torch.Tensor)]
        self.reserved = max(self.reserved, self.held + sum(sizes) + extra)
        assert self.reserved <= CAPACITY, "out of memory"
        self.spare.look()  # at the backward's end

    def steps(self, number: int, *args: Any, **options: Any) -> int:
        for _ in range(number):
            self.forward(*args, **options)
            self.time, self.link = self.time + 1, self.link + self.busy
            self.spare.end_step()
        return self.budget


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def grown(tokens: int) -> int:
    return max(PLANNED, CAPACITY - STATES - tokens - int((1 - FILLED) * CAPACITY))


def test_weights_get_what_steps_leave(world: World):
    for more in (0, 20, 40):  # the first steps make what later ones find
        world.steps(1, ids(4, 64), extra=more)
    assert world.steps(STEADY - 1, ids(4, 64)) == PLANNED
    assert world.steps(1, ids(4, 64)) == grown(4 * 64 + 40)
    assert world.steps(3, ids(1, 64)) == world.steps(3, ids(4, 16)) == world.begun[-1] == grown(4 * 64 + 40)
    world.steps(1, ids(4, 64), extra=40)
    assert world.reserved == CAPACITY - int((1 - FILLED) * CAPACITY)


@pytest.mark.parametrize(
    ("page", "waited"), [(CREEP * CAPACITY / STEADY, 0), (CREEP * CAPACITY / STEADY * 2, STEADY - 1)]
)
def test_pages_that_come_late_are_counted_and_not_waited_for(world: World, page: float, waited: int):
    """But so many of them are, however slowly they come."""
    pages = [int(page * number) for number in range(STEADY)]
    for late in pages:
        world.steps(1, ids(4, 64), extra=late)
    assert world.steps(waited, ids(4, 64), extra=pages[-1]) == PLANNED
    assert world.steps(1, ids(4, 64)) == grown(4 * 64 + pages[-1])


@pytest.mark.parametrize(("held", "kept"), [(0, 0), (120, 120), (300, 300)])
def test_graphs_come_first_and_weights_get_the_rest(world: World, held: int, kept: int):
    """In the step that tries them they may have all but `UNUSED`, and weights no more than was planned."""
    graphs, left = world.spare.graphs, CAPACITY - STATES - PLANNED - 256
    allowed: list[int] = []
    world.spare.graphs = SimpleNamespace(
        num_bytes=0,
        end_step=lambda: setattr(world.spare.graphs, "num_bytes", held if allowed else 0),
        allow=lambda size: allowed.append(size) or setattr(world.spare.graphs, "num_bytes", size),
        drop=lambda: setattr(world.spare.graphs, "num_bytes", 0),
    )  # type: ignore[assignment]
    assert graphs.num_bytes == 0
    assert world.steps(STEADY + FILLING + WATCHED, ids(4, 64)) == grown(256)
    assert not allowed and world.steps(1, ids(4, 64)) == PLANNED
    assert allowed == [left - int(UNUSED * CAPACITY)]
    assert world.steps(1, ids(4, 64)) == max(PLANNED, grown(256) - kept)
    world.forward(ids(5, 64))
    assert world.begun[-1] == PLANNED and world.spare.graphs.num_bytes == 0


def test_weights_of_a_stated_size_keep_it_and_graphs_have_what_is_beside_level_0(monkeypatch: pytest.MonkeyPatch):
    """As a plan states it, whose level 0 its weights and states fill."""
    world, allowed = World(monkeypatch, most_bytes=0), list[int]()
    monkeypatch.setattr(Level0, "used_bytes", CAPACITY)
    world.spare.graphs.allow = allowed.append  # type: ignore[method-assign]
    assert world.steps(STEADY + FILLING + WATCHED + 1, ids(4, 64)) == PLANNED
    assert allowed == [CAPACITY - STATES - PLANNED - 256 - int(UNUSED * CAPACITY)]
    assert set(world.begun) == {PLANNED}


@pytest.mark.parametrize("most", [1, 50, CAPACITY])
def test_weights_get_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch, most: int):
    assert World(monkeypatch, most).steps(1 + STEADY, ids(4, 64)) == min(PLANNED + most, grown(256))


OTHERS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((ids(5, 64),), {}),
    ((ids(1, 65),), {}),
    ((ids(4, 64), ids(4)), {}),
    ((ids(4, 64),), {"labels": None}),
    ((ids(4, 64),), {"training": False}),
    ((ids(4, 64), "hidden states"), {}),
    ((ids(4, 64), True), {}),
]


@pytest.mark.parametrize("told", [False, True])
def test_what_holds_steps_up_does_not_make_links_idle(world: World, told: bool):
    """Updates that change places between two steps; weights get what is left no later for it."""
    world.busy = 0.9
    world.steps(STEADY - 1, ids(4, 64))
    world.time += 20
    if told:
        world.spare.held_up()
    world.steps(2, ids(4, 64))
    assert world.budget == grown(4 * 64)
    assert (world.spare.graphs.declined == "steps wait for the link") == told


@pytest.mark.parametrize(("busy", "allowed"), [(0.5, 1), (0.9, 0)])
def test_where_a_link_is_what_steps_wait_for_weights_get_all(world: World, busy: float, allowed: int):
    """Before steps were steady it may have been idle, or the other way round."""
    calls = list[int]()
    world.spare.graphs.allow = calls.append  # type: ignore[method-assign]
    world.busy = 1.2 - busy
    world.steps(3, ids(4, 64), extra=0)
    world.busy = busy
    world.steps(STEADY + 1, ids(4, 64), extra=40)
    world.busy = 1.2 - busy  # with the weights that there are then it is another matter
    world.steps(FILLING + WATCHED, ids(4, 64), extra=40)
    assert len(calls) == allowed and world.budget == grown(4 * 64 + 40)
    assert ("steps wait for the link" in world.spare.graphs.about) != bool(allowed)


@pytest.mark.parametrize(("args", "options"), OTHERS)
def test_a_forward_that_may_need_more_has_the_planned_budget(world: World, args: Any, options: dict[str, Any]):
    assert world.steps(1 + STEADY, ids(4, 64)) == grown(256)
    world.forward(*args, **options)
    assert world.begun[-1] == PLANNED
    tokens = max(256, sum(each.numel() for each in args if isinstance(each, torch.Tensor)))
    assert world.steps(1 + STEADY, ids(4, 64)) == grown(tokens)  # what weights had before does not count
    world.forward(*args, **options)
    assert world.begun[-1] == grown(tokens)


def test_so_has_one_without_gradients(world: World):
    world.steps(1 + STEADY, ids(4, 64))
    with torch.no_grad():
        world.forward(ids(1, 1))
    assert world.begun[-1] == PLANNED


def test_what_cannot_be_told_or_is_not_alone_gets_nothing(world: World):
    assert world.steps(3 * STEADY, SimpleNamespace(ids=ids(4, 64))) == PLANNED
    world.stack.prefetchers.append(None)  # another streamed model
    assert world.steps(3 * STEADY, ids(4, 64)) == PLANNED
    world.stack.prefetchers.pop()
    assert world.steps(1 + STEADY, {"ids": ids(2, 64)}) > PLANNED
    world.forward({"ids": ids(3, 64)})
    assert world.begun[-1] == PLANNED


def test_steps_without_a_forward_of_the_model_tell_nothing(world: World):
    for _ in range(3 * STEADY):
        world.spare.end_step()  # its parts were called
    assert world.budget == PLANNED


def test_a_cache_that_is_emptied_before_the_step_hides_nothing(world: World):
    for _ in range(1 + STEADY):
        world.forward(ids(4, 64))
        torch.cuda.empty_cache()
        world.spare.end_step()
    assert world.budget == grown(256)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 80), st.integers(1, 9)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_no_order_of_sizes_runs_out(sizes: list[tuple[int, int, int]]):
    """`World.forward` says so where one does: each fits with the planned budget."""
    with pytest.MonkeyPatch.context() as patch:
        world = World(patch)
        for batch, length, steps in sizes:
            world.steps(steps, ids(batch, length))
            assert world.budget <= grown(0)


def test_training_has_the_same_bits_with_it(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch):
    """A model in the arena, told that it is a GPU: weights have more after some steps, and loads fewer."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(spare_module, "gpu_bytes_left", lambda device: 1 << 30)
    place, found = engine_module.place_streamed, []
    for spare_bytes in (None, 0, 1 << 20):

        def placed(*args: Any, spare_bytes: int | None = spare_bytes) -> Any:
            return replace(place(*args), spare_bytes=spare_bytes, budget_bytes=20_000)

        monkeypatch.setattr(engine_module, "place_streamed", placed)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        enable_vgpu_stack_optimization(model, make_stack(1 << 20), placement="streamed", update="host")
        optimizer, engine, losses = VGPUAdamW(model.parameters(), lr=1e-2), offload_of(model), []
        for step in range(STEADY + 4):
            loss = model(torch.full((4, 64), 0.1 * step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert (engine.weights.budget_bytes > 8 * 64 * 65 * 4) is bool(spare_bytes)
        model(torch.zeros(5, 64))
        assert engine.weights.budget_bytes == 20_000
        found.append(losses)
    assert found[0] == found[1] == found[2]
