"""Groups that come to live on level 0 after some steps: the same bits, and back below when something else needs it.

An arena's activations are outside it, so nothing is kept there by default. Here `peak` says what a GPU's
allocator would have reserved: the function that asks for it is replaced.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.delay import set_transfer_delay
from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build
from vblackwell.memory.cache.stack import Reservation
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import DoneTransfer
from vblackwell.offload.api import enable_vgpu_stack_optimization, model_plan, offload_of, release
from vblackwell.offload.engine import Offload
from vblackwell.offload.layout.placement import state_bytes
from vblackwell.offload.movement import kept
from vblackwell.offload.movement.kept import KeptGroups
from vblackwell.offload.movement.state import Level0Budget, set_worker_delay
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.state import export_state, import_state
from vblackwell.offload.storage.storage import on_disk
from vblackwell.units import format_bytes

MLP, DECODER, *_ = CASES
LEVEL0 = 1 << 20


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What a GPU would say that torch has reserved, and how often it gave its cache up."""
    found = {"reserved": LEVEL0 // 2, "retries": 0}
    monkeypatch.setattr(kept, "reserved_bytes", lambda device: (found["reserved"], found["retries"]))
    return found


@pytest.fixture
def delays() -> Iterator[None]:
    """Random waits in every copy thread and in the worker."""
    pause, chance = threading.Event(), random.Random(0)

    def delay(*_: str) -> None:
        if chance.random() < 0.25:
            pause.wait(chance.random() * 1e-3)

    set_transfer_delay(delay)
    set_worker_delay(delay)
    yield
    set_transfer_delay(None)
    set_worker_delay(None)


def streamed(make_stack: MakeStack, dtype: torch.dtype | None = None, **more: object) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "placement": "streamed",
        "update": "device",
        "compute_dtype": dtype,
        "weight_bytes": "96KiB",
        **more,
    }
    return enable_vgpu_stack_optimization(build(DECODER, use_checkpoint=True), make_stack(LEVEL0), **options)


def kept_of(model: nn.Module) -> KeptGroups:
    engine = offload_of(model)
    assert isinstance(engine, Offload) and engine.step_control.kept is not None
    return engine.step_control.kept


def names_of(model: nn.Module) -> list[str]:
    return [group.name for group in kept_of(model).below]


def step(model: nn.Module, optimizer: VGPUAdamW, seed: int, micro_batches: int = 1) -> list[float]:
    losses = []
    for micro in range(micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=next(model.parameters()).dtype is torch.bfloat16):
            loss = DECODER.loss(model, seed * micro_batches + micro)
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def result_of(model: nn.Module, optimizer: VGPUAdamW) -> list[Tensor]:
    """Weights and states, as savers see them."""
    states = optimizer.state_dict()["state"].values()
    exported = [part for _, parts in export_state(model, optimizer) for part in parts.values()]
    return [*model.state_dict().values(), *(part for state in states for part in state.values()), *exported]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.each_value
@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "due"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "numbers",
    [{}, {"undo": False}, {"max_grad_norm": 1e9}, {"max_grad_norm": 2.5}, {"max_grad_norm": 1e-3}],
    ids=["free", "final", "never-clips", "sometimes", "always"],
)
def test_what_is_kept_changes_no_bit(
    numbers: dict[str, object],
    dtype: torch.dtype | None,
    micro_batches: int,
    at_once: bool,
    make_stack: MakeStack,
    peak: dict[str, int],
    delays: None,
):
    results = []
    for resident_bytes in (0, None):
        model = streamed(make_stack, dtype, resident_bytes=resident_bytes)
        offload_of(model).level0.at_once = at_once
        more = {"update_in_backward": True, "accumulation_steps": micro_batches, **numbers}
        optimizer = VGPUAdamW(model.parameters(), lr=1e-2, **more)
        losses = [step(model, optimizer, seed, micro_batches) for seed in range(4)]
        if resident_bytes is None:
            assert len(names_of(model)) >= 2 and names_of(model)[0] == "model.embed_tokens"
            # An update that began and has not come: of a step that is not taken.
            if "undo" not in numbers:
                DECODER.loss(model, 99).backward()
                optimizer.zero_grad()
        losses += [step(model, optimizer, seed, micro_batches) for seed in range(4, 7)]
        if numbers.get("max_grad_norm") == 2.5:
            assert 0 < offload_of(model).summary()["rolled_back_steps"] < 7
        results.append((losses, result_of(model, optimizer)))
        release(model)
        results[-1][1].extend(param.detach() for param in model.parameters())
    (losses, tensors), (plain_losses, plain_tensors) = results[1], results[0]
    assert losses == plain_losses and same(tensors, plain_tensors)


def test_moving_at_every_forward_changes_no_bit(
    make_stack: MakeStack, peak: dict[str, int], delays: None, monkeypatch: pytest.MonkeyPatch
):
    """Up before one forward, down before the next, with everything late, early updates, and some steps that clip."""
    monkeypatch.setattr(kept, "STEPS", 1)
    results = []
    for resident_bytes in (0, None):
        model = streamed(make_stack, torch.bfloat16, resident_bytes=resident_bytes)
        offload_of(model).level0.at_once = False
        optimizer = VGPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=2.5, update_in_backward=True)
        losses, moves, moving = list[list[float]](), 0, offload_of(model).step_control.kept
        for seed in range(16):
            before = None if resident_bytes == 0 else names_of(model)
            peak["reserved"] = LEVEL0 if before else LEVEL0 // 2
            if moving is not None:
                moving._watched = 1
            losses.append(step(model, optimizer, seed))
            moves += before is not None and before != names_of(model)
        assert resident_bytes == 0 or moves >= 12
        results.append((losses, result_of(model, optimizer)))
        release(model)
    assert results[0][0] == results[1][0] and same(results[0][1], results[1][1])


def test_kept_groups_are_the_first_that_steps_leave_room_for(make_stack: MakeStack, peak: dict[str, int]):
    model = streamed(make_stack)
    optimizer = VGPUAdamW(model.parameters(), update_in_backward=True)
    groups, storage = offload_of(model).groups, offload_of(model).storage
    for seed in range(3):
        step(model, optimizer, seed)
        assert not names_of(model)
        assert "kept on arena nothing yet: 3 whole steps" in model_plan(model)
    left = LEVEL0 - int(kept.MARGIN_SHARE * LEVEL0) - sum(map(state_bytes, groups[:3]))
    peak["reserved"] = left  # so that exactly three fit
    host = storage.stack.levels[1].used_bytes
    step(model, optimizer, 3)
    assert names_of(model) == [group.name for group in groups[:3]]
    assert [storage.range(group, kind).level for group in groups[:4] for kind in ("weight", "exp_avg")] == [0] * 6 + [
        1,
        1,
    ]
    assert storage.stack.levels[1].used_bytes == host, "what is below stays there, for the way back"
    above = sum(row[0] for row in offload_of(model).summary()["bytes_by_level"].values())
    assert above == sum(found.num_bytes for group in groups[:3] for found in storage.own_ranges(group).values())
    num_bytes = format_bytes(sum(map(state_bytes, groups[:3])))
    assert f"kept on arena after step 3: 3 groups, {num_bytes}" in model_plan(model)


@pytest.mark.parametrize("left", [0, 100])
def test_nothing_is_kept_where_steps_leave_nothing(left: int, make_stack: MakeStack, peak: dict[str, int]):
    model = streamed(make_stack)
    optimizer = VGPUAdamW(model.parameters(), update_in_backward=True)
    peak["reserved"] = LEVEL0 - int(kept.MARGIN_SHARE * LEVEL0) - left
    for seed in range(5):
        step(model, optimizer, seed)
    assert not names_of(model) and "kept on arena after step 3: 0 groups" in model_plan(model)


def test_a_stated_size_is_all_that_is_kept(make_stack: MakeStack, peak: dict[str, int]):
    for resident_bytes, more in ((0, {}), ("64KiB", {}), (None, {"update": "host"})):
        model = streamed(make_stack, resident_bytes=resident_bytes, **more)
        assert offload_of(model).step_control.kept is None and "kept on" not in model_plan(model)
        release(model)


def test_an_arena_keeps_nothing_by_itself(make_stack: MakeStack):
    model = streamed(make_stack)
    optimizer = VGPUAdamW(model.parameters(), update_in_backward=True)
    for seed in range(5):
        step(model, optimizer, seed)
    assert not names_of(model) and "kept on" not in model_plan(model)


def test_states_on_a_disk_stay_there(make_stack: MakeStack, peak: dict[str, int]):
    torch.manual_seed(0)
    model = build(DECODER, use_checkpoint=True)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0 // 2, host_bytes=440 << 10), update="device")
    optimizer, storage = VGPUAdamW(model.parameters(), update_in_backward=True), offload_of(model).storage
    on_level2 = [group for group in offload_of(model).groups if on_disk(storage.own_ranges(group))]
    assert on_level2 and on_level2 != offload_of(model).groups
    peak["reserved"] = LEVEL0 // 8
    for seed in range(5):
        step(model, optimizer, seed)
    assert set(kept_of(model).below).isdisjoint(on_level2)


@pytest.fixture
def training(make_stack: MakeStack, peak: dict[str, int]) -> tuple[nn.Module, VGPUAdamW]:
    """A model of which level 0 keeps some groups, and its optimizer."""
    model = streamed(make_stack)
    optimizer = VGPUAdamW(model.parameters(), update_in_backward=True)
    for seed in range(4):
        step(model, optimizer, seed)
    assert names_of(model)
    return model, optimizer


def rows(count: int, length: int) -> Tensor:
    return torch.randint(97, (count, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", ["more tokens", "a longer row", "evaluation", "no graph"])
def test_a_forward_of_which_the_steps_said_nothing(how: str, training: tuple[nn.Module, VGPUAdamW]):
    """Before it, kept groups go to the ranges that they came from; six steps later they are back."""
    model, optimizer = training
    storage, below = offload_of(model).storage, {group: dict(found) for group, found in kept_of(model).below.items()}
    held = storage.stack.levels[0].used_bytes
    with torch.set_grad_enabled(how != "no graph"):
        if how == "evaluation":
            model.eval()
        shape = {"more tokens": (3, 12), "a longer row": (1, 20)}.get(how, (2, 12))
        model(rows(*shape), rows(*shape))
    assert not names_of(model)
    assert all(storage.range(group, kind) is each for group, found in below.items() for kind, each in found.items())
    assert storage.stack.levels[0].used_bytes <= held - sum(map(state_bytes, below))
    assert "nothing yet" in model_plan(model)
    model.train()
    for seed in range(4, 11):
        assert not names_of(model)
        step(model, optimizer, seed)
    assert set(kept_of(model).below) == set(below)
    with torch.set_grad_enabled(how != "no graph"):  # they know of it now
        if how == "evaluation":
            model.eval()
        model(rows(*shape), rows(*shape))
    assert set(kept_of(model).below) == set(below)


def test_smaller_inputs_and_a_part_of_the_model_take_nothing(training: tuple[nn.Module, VGPUAdamW]):
    model, _ = training
    before = names_of(model)
    model(rows(1, 7), rows(1, 7))
    model.lm_head(torch.randn(200, 32))
    assert names_of(model) == before


def test_a_peak_that_reaches_into_the_margin(training: tuple[nn.Module, VGPUAdamW], peak: dict[str, int]):
    model, optimizer = training
    half = int(kept.MARGIN_SHARE * LEVEL0 / 2)
    peak["reserved"] = LEVEL0 - half - 1
    step(model, optimizer, 4)
    assert names_of(model)
    peak["reserved"] = LEVEL0 - half + 1
    for seed in range(5, 13):  # and they do not come again while torch holds as much
        step(model, optimizer, seed)
        assert not names_of(model)


def test_steps_that_gave_the_cache_up_do_not_say_what_they_need(make_stack: MakeStack, peak: dict[str, int]):
    model = streamed(make_stack)
    optimizer = VGPUAdamW(model.parameters(), update_in_backward=True)
    for seed in range(5):
        peak["retries"] = int(seed > 1)
        step(model, optimizer, seed)
    assert not names_of(model)


def test_the_most_that_was_reserved_counts(make_stack: MakeStack, peak: dict[str, int]):
    """A caller may empty torch's cache between two steps, as benchmarks do."""
    model = streamed(make_stack)
    optimizer = VGPUAdamW(model.parameters(), update_in_backward=True)
    for seed in range(5):
        peak["reserved"] = LEVEL0 if seed == 2 else 0
        step(model, optimizer, seed)
    assert not names_of(model)


def test_another_model_gets_what_was_kept(training: tuple[nn.Module, VGPUAdamW], peak: dict[str, int]):
    """When it is put into the stack, and before its first forward, of which nobody's steps said anything."""
    model, optimizer = training
    stack, held = offload_of(model).stack, sum(map(state_bytes, kept_of(model).below))
    used, other = stack.levels[0].used_bytes, build(DECODER, use_checkpoint=True)
    enable_vgpu_stack_optimization(other, stack, "other", placement="streamed", update="host")
    assert not names_of(model) and stack.levels[0].used_bytes <= used - held
    release(other)
    for seed in range(4, 11):
        step(model, optimizer, seed)
    assert names_of(model)
    other = build(DECODER, use_checkpoint=True)
    enable_vgpu_stack_optimization(other, stack, "other", placement="streamed", update="device")
    for seed in range(11, 25):
        step(model, optimizer, seed)
    assert names_of(model)
    DECODER.loss(other, 0)
    assert not names_of(model)


@pytest.mark.parametrize("undo", [True, False])
def test_they_may_go_back_in_the_midst_of_a_step(undo: bool, make_stack: MakeStack, peak: dict[str, int], delays: None):
    """As for another model, or for memory that a step did not find: after a backward with its early updates."""
    results = []
    for resident_bytes in (0, None):
        model = streamed(make_stack, torch.bfloat16, resident_bytes=resident_bytes)
        optimizer = VGPUAdamW(model.parameters(), lr=1e-2, update_in_backward=True, undo=undo)
        losses = [step(model, optimizer, seed) for seed in range(4)]
        loss = DECODER.loss(model, 4)
        assert Level0Budget.give_back_kept(offload_of(model).stack) == (resident_bytes is None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [step(model, optimizer, seed) for seed in range(5, 12)]
        DECODER.loss(model, 12).backward()
        assert Level0Budget.give_back_kept(offload_of(model).stack) == (resident_bytes is None)
        optimizer.step()
        optimizer.zero_grad()
        results.append((losses, result_of(model, optimizer)))
        release(model)
    assert results[0][0] == results[1][0] and same(results[0][1], results[1][1])


def test_what_is_written_reaches_what_is_kept(training: tuple[nn.Module, VGPUAdamW], make_stack: MakeStack):
    """A checkpoint, a weight that is changed in place, and an optimizer that begins anew."""
    model, optimizer = training
    saved = {name: parts for name, parts in export_state(model, optimizer)}
    saved = {name: {kind: part.clone() for kind, part in parts.items()} for name, parts in saved.items()}
    for seed in range(4, 6):
        step(model, optimizer, seed)
    import_state(model, optimizer, saved.__getitem__)
    assert names_of(model)
    again = {name: parts for name, parts in export_state(model, optimizer)}
    assert all(torch.equal(part, saved[name][kind]) for name, parts in again.items() for kind, part in parts.items())
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(0.5)
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], torch.full((97, 32), 0.5))
    fresh = VGPUAdamW(model.parameters(), update_in_backward=True)
    assert names_of(model) and not fresh.state_dict()["state"]
    step(model, fresh, 0)
    assert all(part["step"] == 1 for part in fresh.state_dict()["state"].values())


def test_a_load_is_over_before_its_source_is_given_away(
    training: tuple[nn.Module, VGPUAdamW], monkeypatch: pytest.MonkeyPatch
):
    model, _ = training
    engine, order = offload_of(model), []

    class Load(DoneTransfer):
        def wait(self) -> None:
            order.append("load")

    for group in kept_of(model).below:
        engine.states[group].last_load = Load()
    give = engine.storage.give
    monkeypatch.setattr(engine.storage, "give", lambda reservation: (order.append("given"), give(reservation)))
    count, kinds = len(kept_of(model).below), 3
    assert kept_of(model).give_back()
    assert order == ["load", *["given"] * kinds] * count


@pytest.mark.parametrize("back", [False, True])
def test_a_copy_that_fails_leaves_a_group_where_it_was(
    back: bool, training: tuple[nn.Module, VGPUAdamW], monkeypatch: pytest.MonkeyPatch
):
    model, optimizer = training
    engine, moving = offload_of(model), kept_of(model)
    if not back:
        assert moving.give_back()
    expected, names, used = result_of(model, optimizer), names_of(model), engine.stack.levels[0].used_bytes
    write, calls = engine.stack.write, iter(range(100))

    def failing(reservation: Reservation, source: Tensor) -> Transfer:
        if next(calls) == 1:
            raise OSError("no copy today")
        return write(reservation, source)

    monkeypatch.setattr(engine.stack, "write", failing)
    with pytest.raises(OSError, match="no copy today"):
        moving.give_back() if back else moving._keep(LEVEL0 // 2)
    monkeypatch.undo()
    assert names_of(model) == names and engine.stack.levels[0].used_bytes == used
    assert same(result_of(model, optimizer), expected)


def test_a_released_model_leaves_nothing_to_give_back(training: tuple[nn.Module, VGPUAdamW]):
    model, _ = training
    engine = offload_of(model)
    stack = engine.stack
    release(model)
    assert stack.levels[0].used_bytes == stack.levels[1].used_bytes == 0
    assert not Level0Budget.give_back_kept(stack)
