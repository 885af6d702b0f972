"""Updates on the host that run while the backward still does: begun or not, given up, committed or interrupted."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.delay import set_transfer_delay
from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build, equal
from tests.waiting import wait_until
from vblackwell.errors import StaleTensor, StepAbandoned
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.engine import Offload
from vblackwell.offload.movement.state import set_worker_delay
from vblackwell.offload.optimizer import VGPUAdamW

MLP = CASES[0]
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


def test_a_failure_at_a_commit_leaves_a_group_that_is_said_to_be_a_step_behind(twins: Callable[..., Twins]):
    """What the commit hands to the worker is refused, as where another task has failed meanwhile."""
    model, ours, engine, *_ = twins()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    MLP.loss(model, 0).backward()
    engine.worker.drain()
    submit, refused = engine.worker.submit, []

    def refusing(work: Callable[..., object], *args: object, **more: object) -> object:
        if work == engine.host_updates._end_commit and not refused:
            refused.append(args[0])
            raise RuntimeError("another task failed")
        return submit(work, *args, **more)

    engine.worker.submit = refusing
    with pytest.raises(RuntimeError, match="another task failed"):
        ours.step()
    ours.zero_grad()
    MLP.loss(model, 1).backward()
    with pytest.raises(StaleTensor, match="a step behind"):
        ours.step()
    (group,) = refused
    names = {name for name, param in model.named_parameters() if any(slot.param is param for slot in group.slots)}
    release(model)
    assert names and all(torch.equal(model.state_dict()[name], before[name]) for name in names)


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
