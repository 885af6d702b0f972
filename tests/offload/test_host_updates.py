"""Updates on the host that run while the backward still does: begun or not, given up, committed or interrupted; and
which share of all they are, looked at when steps have shown their rate, and moved without a bit's change.
"""

from __future__ import annotations

import copy
import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.delay import set_transfer_delay
from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build, equal
from tests.offload.movement import behind_twins
from tests.waiting import wait_until
from vblackwell.errors import StaleTensor, StepAbandoned
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload import api, host_share
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.engine import Offload
from vblackwell.offload.host_share import HostShare
from vblackwell.offload.layout.forecast import FastestUpdates, fastest_updates
from vblackwell.offload.layout.placement import StreamingOptions
from vblackwell.offload.movement.state import set_worker_delay
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.storage.storage import spaces_of

MLP, DECODER, *_ = CASES
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
LEVEL0 = 128 << 10


class Twins(NamedTuple):
    """One model, streamed with updates on the host, and plain."""

    model: nn.Module
    ours: VGPUAdamW
    engine: Offload
    plain: nn.Module
    theirs: torch.optim.AdamW

    def both(self) -> tuple[tuple[nn.Module, torch.optim.Optimizer], ...]:
        return (self.model, self.ours), (self.plain, self.theirs)


@pytest.fixture
def twins(make_stack: MakeStack) -> Callable[..., Twins]:
    def make(plain: nn.Module | None = None, **options: object) -> Twins:
        plain = build(MLP) if plain is None else plain
        model = copy.deepcopy(plain)
        enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed", update="host")
        ours = VGPUAdamW(model.parameters(), update_in_backward=True, **options)
        return Twins(model, ours, offload_of(model), plain, torch.optim.AdamW(plain.parameters(), fused=True))

    return make


def test_a_rollback_does_not_wait_for_updates_that_have_not_begun(twins: Callable[..., Twins]):
    """They are forgotten: nothing of them is computed, and what was stored is as it was."""
    pair = twins()
    model, ours, engine, plain, theirs = pair
    hold, begun, apply = threading.Event(), list[str](), engine.host_updates.apply

    def counted(update) -> None:
        begun.append(update.group.name)
        hold.wait(60)
        apply(update)

    engine.host_updates.apply = counted
    MLP.loss(model, 0).backward()
    wait_until(lambda: begun)
    threading.Timer(0.1, hold.set).start()
    ours.zero_grad()  # the step does not come
    assert len(begun) == 1 < len(engine.groups)
    for module, optimizer in pair.both():
        MLP.loss(module, 0).backward()
        optimizer.step()
    assert equal(model, plain)
    assert len(begun) == 1 + len(engine.groups)


def test_a_step_that_does_not_clip_leaves_updates_on_the_host_running(twins: Callable[..., Twins]):
    """It needs the norms; the update of the group whose gradient came last has not even been made when it returns."""
    model, ours, engine, plain, theirs = twins(max_grad_norm=1e9)
    go, apply = threading.Event(), engine.host_updates.apply

    def late(update) -> None:
        if update.group is engine.groups[0]:
            go.wait(60)
        apply(update)

    engine.host_updates.apply = late
    MLP.loss(model, 0).backward()
    timer = threading.Timer(30, go.set)
    timer.start()
    ours.step()
    assert not go.is_set(), "the step waited for an update"
    timer.cancel()
    go.set()
    MLP.loss(plain, 0).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    theirs.step()
    assert equal(model, plain)


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_what_is_given_up_is_not_added_to_the_next_gradient(delay: float, twins: Callable[..., Twins]):
    """A rollback forgets an update that has not begun, and not the sum that came before it."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(2)))
    pair = twins(layers, accumulation_steps=2)
    set_worker_delay((lambda: time.sleep(delay)) if delay else None)
    try:
        for module, optimizer in pair.both():
            for seed in range(4):
                x = torch.randn(8, 48, generator=torch.Generator().manual_seed(seed))
                module(x).square().mean().backward()
                if seed == 1:
                    optimizer.zero_grad()
            optimizer.step()
    finally:
        set_worker_delay(None)
    assert equal(pair.model, pair.plain)


def test_an_interrupted_rollback_leaves_nothing_to_commit(twins: Callable[..., Twins]):
    """Ctrl-C comes while a forward waits for the one update that has begun; the others are forgotten as well."""
    model, ours, engine, plain, theirs = twins()
    begun, go, apply = threading.Event(), threading.Event(), engine.host_updates.apply

    def late(*args) -> None:
        begun.set()
        go.wait(60)
        apply(*args)

    engine.host_updates.apply = late
    MLP.loss(model, 0).backward()
    assert begun.wait(60)

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        go.set()

    threading.Timer(0.2, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        MLP.loss(model, 1)
    engine.host_updates.apply = apply
    ours.step()  # of the gradients that are still there
    MLP.loss(plain, 0).backward()
    theirs.step()
    assert equal(model, plain)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_final_update_that_has_not_begun_is_made_although_its_step_never_comes(dtype, make_stack: MakeStack):
    """It has consumed its gradient, which may lie where the weight was: forgotten, it would leave that there."""
    ends = []
    for hold in (False, True):
        model = build(MLP)
        enable_vgpu_stack_optimization(
            model, make_stack(LEVEL0), placement="streamed", update="host", compute_dtype=dtype
        )
        VGPUAdamW(model.parameters(), update_in_backward=True, undo=False)
        if hold:
            set_worker_delay(lambda: time.sleep(0.02))
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                MLP.loss(model, 0).backward()
                if not hold:
                    offload_of(model).worker.drain()
                with pytest.raises(StepAbandoned):
                    MLP.loss(model, 1)
        finally:
            set_worker_delay(None)
        ends.append(release(model))
    assert equal(*ends)


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("begun", [False, True], ids=["not begun", "not handed on"])
def test_after_a_failure_each_group_is_released_as_its_last_step_left_it(begun: bool, place: int):
    """In bf16 its states are a part of that; they lack a step, which is made by then, once. ``begun``: the update has
    made it, and what the commit hands to the worker is refused; else the update fails before it begins.
    """
    levels = [{"capacity_mb": size / 1024, "device": "cpu"} for size in (behind_twins.FAST_BYTES >> 10, 520)]
    with VGPUStack({"levels": levels}) as stack:
        pair = behind_twins.Twins(stack, "host", torch.bfloat16)
        pair.steps(range(2))
        truths, engine, go = pair.plain.truths, pair.engine, threading.Event()
        engine.worker.drain()  # else it is an update of these steps that fails
        before, group, failed = [truth.detach().clone() for truth in truths], engine.groups[place], []
        host, submit, apply = engine.host_updates, engine.worker.submit, engine.host_updates.apply

        def submitting(work: Callable[..., object], *args: object, **more: object) -> object:
            if begun and work == host._end_commit and args[0] is group:
                raise RuntimeError("it failed")
            return submit(work, *args, **more)

        def applying(update: Any) -> None:
            if not begun and update.group is group and not failed:
                failed.append(group)
                go.wait(60)
                raise RuntimeError("it failed")
            apply(update)

        engine.worker.submit, host.apply = submitting, applying
        pair.backward(5)
        with pytest.raises(RuntimeError, match="it failed"):
            pair.ours.step()
            go.set()
            engine.finish()
        pair.ours.zero_grad()
        with pytest.raises(StaleTensor, match="a step behind"):
            behind_twins.loss_of(pair.model, 6).backward()
            pair.ours.step()
        pair.plain.step()
        release(pair.model)
        made = [each for each in engine.groups if (each.index < place if begun else each is not group)]
        stepped = {id(slot.param) for each in made for slot in each.slots}
        for param, old, new in zip(pair.model.parameters(), before, truths, strict=True):
            assert torch.equal(param, new if id(param) in stepped else old)


def test_gradients_are_made_zero_after_updates_on_the_host_without_a_wait(twins: Callable[..., Twins]):
    pair = twins()
    go, apply = threading.Event(), pair.engine.host_updates.apply

    def late(update) -> None:
        go.wait(60)
        apply(update)

    pair.engine.host_updates.apply = late
    timer = threading.Timer(30, go.set)
    timer.start()
    MLP.loss(pair.model, 0).backward()
    pair.ours.step()
    pair.ours.zero_grad(set_to_none=False)
    assert not go.is_set(), "it waited for an update"
    timer.cancel()
    go.set()
    MLP.loss(pair.plain, 0).backward()
    pair.theirs.step()
    pair.theirs.zero_grad(set_to_none=False)
    for module, optimizer in pair.both():
        MLP.loss(module, 1).backward()
        optimizer.step()
    assert equal(pair.model, pair.plain)


def refuse(*args: object, **more: object) -> None:
    raise RuntimeError("refused")


def test_an_early_update_that_the_worker_refuses_keeps_no_shadows(
    twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch
):
    pair = twins()
    updates, group, stack = pair.engine.host_updates, pair.engine.groups[0], pair.engine.stack
    pair.engine.step_control._make_room()  # which takes its bytes once
    before = stack.levels[1].used_bytes
    monkeypatch.setattr(pair.engine.worker, "submit", refuse)
    with pytest.raises(RuntimeError, match="refused"):
        pair.engine.step_control._start_early(group, None)
    assert stack.levels[1].used_bytes == before and not any(updates.shadows.spare.values())


@pytest.mark.parametrize(("update", "refused"), [("host", "pinned"), ("host", "submit"), ("device", "pinned")])
def test_a_refused_step_changes_no_version(
    update: str, refused: str, make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
):
    """A graph that was made before it is still the weights': its backward goes on."""
    model = enable_vgpu_stack_optimization(build(MLP), make_stack(LEVEL0), placement="streamed", update=update)
    optimizer, engine = VGPUAdamW(model.parameters()), offload_of(model)
    MLP.loss(model, 0).backward()
    loss, before = MLP.loss(model, 1), [state.version for state in engine.states.values()]
    if refused == "submit":
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="refused"):
            patch.setattr(engine.worker, "submit", refuse)
            optimizer.step()
    else:
        with engine.reading([engine.groups[0].slots[0]]), pytest.raises(StaleTensor, match="while its forward runs"):
            optimizer.step()
    assert [state.version for state in engine.states.values()] == before
    loss.backward()


def test_a_gradient_waits_for_the_copy_of_one_that_was_given_up(twins: Callable[..., Twins]):
    """Both go to the same range: without a step between them, nothing else is in the way of the second."""
    torch.manual_seed(0)
    pair = twins(nn.Sequential(nn.Linear(48, 48)))
    late = [0.3]

    def first_is_late(kind: str) -> None:
        if late:
            time.sleep(late.pop())

    try:
        for module, optimizer in pair.both():
            for seed in range(2):
                loss = module(torch.randn(8, 48, generator=torch.Generator().manual_seed(seed))).square().mean()
                set_transfer_delay(first_is_late)  # its weights are there
                loss.backward()
                if seed == 0:
                    optimizer.zero_grad()
            optimizer.step()
    finally:
        set_transfer_delay(None)
    assert not late and equal(pair.model, pair.plain)


# -- when their share is looked at -------------------------------------------------------------------------------------


class Updates(FastestUpdates):
    """A share for each rate."""

    def __init__(self, cpu: float, place: Callable[[float], Any]) -> None:
        super().__init__({}, 0.0, cpu)
        self.place, self.asked = place, list[tuple[int, bool, float]]()

    def __call__(self, micro_batches: int, undo: bool, cpu: Any = None, shown: Any = None, clips: bool = False) -> Any:
        self.asked.append((micro_batches, undo, cpu or self.cpu))
        return self.place(cpu or self.cpu) / 2 if clips else self.place(cpu or self.cpu)


def looks(
    updates: FastestUpdates, rates: list[float], seconds: float = 1.0, clips: range = range(0)
) -> tuple[HostShare, dict[int, Any]]:
    """What is found after each step whose updates have the next of ``rates``, and which of them clip; steps after which
    nothing is asked are left out. What is found is done.
    """
    total = [0, 0.0]
    share, found = HostShare(updates, lambda: (total[0], total[1])), dict[int, Any]()
    share.moved(share.first(1, True), 0)
    for step, rate in enumerate(rates, 1):
        total[0] += int(rate * seconds)
        total[1] += seconds
        if step >= share.next_look:
            found[step] = share.again(step, 1, True, step in clips)
            if found[step] is not None:
                share.moved(found[step], step)
    return share, found


def test_new_steps_do_not_count_and_looks_become_rare():
    updates = Updates(1000.0, lambda cpu: round(cpu / 4000, 2))
    share, found = looks(updates, [10.0, 10.0, 2000.0, 2000.0, 2000.0, 10.0, 10.0, *[2000.0] * 33])
    assert found == {2: None, 5: 0.5, 7: None, 10: None, 20: None, 40: None}
    assert updates.asked == [(1, True, 1000.0), (1, True, 2000.0)]
    assert share.rates == [(1000.0, 0.25), (2000.0, 0.5)]


def test_what_was_simulated_keeps_no_placement_alive():
    """Of a model that is gone, without a collection: its memory is wanted now."""

    class Placed:
        pass

    placed: Any = Placed()
    seen, updates = weakref.ref(placed), FastestUpdates({0.5: placed}, 1e9, 1e9)
    gc.disable()
    try:
        del placed, updates
        assert seen() is None
    finally:
        gc.enable()


def test_a_rate_that_changes_later_is_met():
    _, found = looks(Updates(1000.0, lambda cpu: cpu / 4000), [1000.0] * 10 + [2000.0] * 10)
    assert found == {2: None, 5: None, 10: None, 20: 0.5}


def test_steps_that_clip_have_a_share_of_their_own():
    """From the next look on, by the same rate; and those that no longer do."""
    _, found = looks(Updates(1000.0, lambda cpu: cpu / 4000), [1000.0] * 40, clips=range(3, 15))
    assert found == {2: None, 5: 0.125, 7: None, 10: None, 20: 0.25, 22: None, 40: None}


@pytest.mark.parametrize(
    ("rate", "seconds", "place"),
    [
        (1090.0, 1.0, lambda cpu: cpu / 1000),  # as good as the rate that was taken
        (2000.0, 0.01, lambda cpu: cpu / 4000),  # in too short a time
        (2000.0, 1.0, lambda cpu: 0.25 + cpu / 1e5),  # a hundredth more is not worth a move
        (2000.0, 1.0, lambda cpu: "host"),
    ],
)
def test_little_is_no_reason(rate: float, seconds: float, place: Callable[[float], Any]):
    share, found = looks(Updates(1000.0, place), [rate] * 12, seconds)
    assert set(found) == {2, 5, 10} and not any(found.values())
    assert share.place == place(1000.0)


@pytest.mark.parametrize(("micro_batches", "found"), [(1, None), (4, 0.3)])
def test_of_several_micro_batches_seconds_are_shown_though_the_rate_is_as_it_was(micro_batches, found, monkeypatch):
    """And though the CPU has updated nothing."""
    asked, now = list[Any](), [0.0]

    class Shown(Updates):
        def __call__(self, micro_batches: int, undo: bool, cpu: Any = None, shown: Any = None, clips: Any = 0) -> Any:
            asked.append((micro_batches, cpu, shown))
            return 0.0 if shown is None else 0.3

    monkeypatch.setattr(host_share, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    share = HostShare(Shown(1000.0, lambda cpu: 0.0), lambda: (0, 0.0))
    share.moved(share.first(micro_batches, True), 0)
    step = 2

    def look(until: int, seconds: float, pause: float = 0.0) -> Any:
        """After steps of so many seconds; two forwards begin before each, and the first comes after a pause."""
        nonlocal step
        now[0] += pause
        for step in range(step + 1, until + 1):  # noqa: B020 - goes on
            now[0] += seconds
            share.begin(step)
            share.begin(step)
        return share.again(until, micro_batches, True)

    share.begin(2)
    assert share.again(2, micro_batches, True) is None and share.next_look == (5 if micro_batches == 1 else 10)
    assert look(10, 2.0, pause=60.0) == found
    assert look(20, 2.1) is None  # as long as before, about
    assert asked[1:] == ([] if found is None else [(4, 1000.0, (0.0, 2.0))])
    assert look(40, 2.5) == found


def test_a_first_look_that_comes_late_is_followed_by_steps():
    """As nothing is moved inside of windows that several backwards make."""
    share = HostShare(Updates(1000.0, lambda cpu: 0.25), lambda: (0, 0.0))
    share.moved(0.25, 0)
    for _ in range(2):  # two forwards after the same step
        share.begin(25)
        assert share.again(25, 4, True) is None and share.next_look >= 28


@pytest.mark.parametrize("place", [0.25, "host"])
def test_a_place_that_was_stated_stays(place: float | str):
    share, found = looks(FastestUpdates({}, 0.0, 0.0, place), [1000.0] * 12)
    assert set(found) == {2, 5, 10} and not any(found.values())
    assert share.place == place and share.about == ""


def test_what_fails_in_a_look_is_done_at_the_next():
    """A simulation that Ctrl-C ends, or a move that fails: nothing is as if it had been."""

    def interrupted(cpu: float) -> float:
        if cpu > 1500 and fails.pop():
            raise KeyboardInterrupt
        return cpu / 4000

    fails, total = [False, True], [0.0]
    share = HostShare(Updates(1000.0, interrupted), lambda: (int(2000 * total[0]), total[0]))
    share.moved(share.first(1, True), 0)
    found = list[Any]()
    for step in (2, 5, 10):
        total[0] += 1.0
        try:
            found.append(share.again(step, 1, True))
        except KeyboardInterrupt:
            found.append("interrupted")
    assert found == [None, "interrupted", 0.5] and share.place == 0.25


# -- and changes -------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("micro_batches", "faster"), [(1, 8.0), (1, 1 / 8), (2, 8.0)])
def test_a_run_moves_updates_when_its_steps_show_another_rate(
    micro_batches: int, faster: float, planned: bool, make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
):
    """That was told nothing, or that a plan for another copy of the model gave a share."""
    stream, rates = api.stream, lambda: (20e9, 2e9)  # of a GPU's link, and of the CPU
    plain, model = build(DECODER), build(DECODER)
    stack = make_stack(512 << 10)
    if planned:
        updates = fastest_updates(build(DECODER), spaces_of(stack), StreamingOptions(), rates)
        share = updates(micro_batches, True)
        enable_vgpu_stack_optimization(model, stack, placement="streamed", update=share)
        offload_of(model).share_by(updates)
    else:
        monkeypatch.setattr(api, "stream", lambda *args: stream(*args[:-1], rates))
        enable_vgpu_stack_optimization(model, stack, placement="streamed")
    ours = VGPUAdamW(model.parameters(), max_grad_norm=1.0, update_in_backward=True, accumulation_steps=micro_batches)
    theirs, engine = torch.optim.AdamW(plain.parameters(), fused=True), offload_of(model)
    shown, shared = engine.host_share.rates[0][0] * faster, engine.host_share.place
    assert not planned or shared == share
    monkeypatch.setattr(engine.host_share, "_updated", lambda: (int(shown * ours.num_steps_seen), ours.num_steps_seen))
    ours.num_steps_seen = 0  # a second a step, and in no time
    monkeypatch.setattr(host_share, "time", SimpleNamespace(perf_counter=lambda: 1e-9 * ours.num_steps_seen))
    places = list[list[str]]()
    looked = 6 if micro_batches == 1 else 11
    for step in range(looked + 2):
        places.append(engine.summary()["updated_on_level0"])
        for module, optimizer in ((model, ours), (plain, theirs)):
            for micro in range(micro_batches):
                DECODER.loss(module, step * micro_batches + micro).backward()
            if module is plain:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ours.num_steps_seen += 1
    first, last = places[0], places[-1]
    assert all(each == first for each in places[:looked]) and all(each == last for each in places[looked:])
    size = {group.name: group.num_bytes for group in engine.groups}
    after, before = (sum(map(size.__getitem__, each)) for each in (last, first))
    assert after < before if faster > 1 else after > before
    assert equal(model, plain)


@pytest.mark.each_value
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("host_kib", [540, 1200])  # not all states can be a step behind, or all, and some have shadows
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_moving_between_any_steps_changes_no_bit(dtype: torch.dtype, host_kib: int, delayed: bool):
    """Steps that come, clip, do not come, or are several backwards long, and updates that move before each of them."""
    choose, late, moved = random.Random(host_kib), random.Random(7), 0
    levels = [{"capacity_mb": size / 1024, "device": "cpu"} for size in (behind_twins.FAST_BYTES / 1024, host_kib)]
    with VGPUStack({"levels": levels}) as stack:
        pair = behind_twins.Twins(stack, 0.5, dtype, max_grad_norm=1e9)
        control = pair.engine.step_control
        if delayed:
            set_transfer_delay(lambda kind: time.sleep(late.random() * 0.001))
            set_worker_delay(lambda: time.sleep(late.random() * 0.001))
        try:
            for window in range(16):
                if control.between_steps and choose.random() < 0.7:
                    control.divide_anew(pair.engine._placed.updated(choose.choice(SHARES)))
                    moved += 1
                pair.limit(choose.choice([1e9, 1e9, 1e-3]))
                for number in range(choose.choice([1, 1, 1, 2])):
                    pair.backward(10 * window + number)
                if choose.random() < 0.85:
                    pair.step_any(zero=choose.random() < 0.9)
                else:
                    pair.zero_grad()
        finally:
            set_transfer_delay(None)
            set_worker_delay(None)
        assert moved > 5
        pair.assert_states()
        release(pair.model)
        assert all(level.used_bytes == 0 for level in stack.levels)


def test_gradients_that_are_given_up_after_a_move_get_no_sums():
    """Of a step that clipped, when the next forward has begun: memory for sums would be kept for nothing."""
    levels = [{"capacity_mb": size / 1024, "device": "cpu"} for size in (behind_twins.FAST_BYTES / 1024, 540)]
    with VGPUStack({"levels": levels}) as stack:
        pair = behind_twins.Twins(stack, 0.5, torch.bfloat16)
        pair.limit(1e-3)
        engine, control = pair.engine, pair.engine.step_control
        for step in range(4):
            loss = behind_twins.loss_of(pair.model, step)
            control.divide_anew(engine._placed.updated(SHARES[step]))
            pair.zero_grad()
            loss.backward()
            pair.plain.backward(step)
            pair.step_any(zero=False)
        assert not any((group, "accumulated") in engine.storage for group in engine.groups)
        pair.assert_states()
        release(pair.model)


def test_no_states_come_up_for_groups_that_have_moved_to_the_host(make_stack: MakeStack):
    """What the last backward's order has of them is not what this one needs."""
    model = build(DECODER)
    enable_vgpu_stack_optimization(model, make_stack(512 << 10), placement="streamed", update=0.0)
    ours, engine = VGPUAdamW(model.parameters(), update_in_backward=True), offload_of(model)
    expected, expect = list[Any](), engine.level0._lane.expect

    def noted(groups: Any, *more: Any) -> None:
        expected[:] = groups
        expect(groups, *more)

    engine.level0._lane.expect = noted
    for step in range(4):
        if step == 3:
            engine.step_control.divide_anew(engine._placed.updated(0.5))
        DECODER.loss(model, step).backward()
        assert set(expected) == (engine.level0.groups if step else set())
        ours.step()
        ours.zero_grad()
    assert 0 < len(engine.level0.groups) < len(engine.groups)
    assert any(state.behind is not None for state in engine.states.values()), "room for rollbacks was made anew"
