"""Updates after the backward, and every way in which their step may come differently or not at all."""

from __future__ import annotations

import copy
import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.delay import set_transfer_delay
from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build, equal
from tests.waiting import wait_until
from vblackwell.errors import ConfigurationError, InsufficientMemory, StepAbandoned
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload import api, engine
from vblackwell.offload.api import enable_vgpu_stack_optimization, model_plan, offload_of, release
from vblackwell.offload.layout.forecast import FastestUpdates, forecast_step
from vblackwell.offload.layout.placement import StreamingOptions
from vblackwell.offload.movement.gradients import GradientCollector
from vblackwell.offload.movement.state import Phase, set_worker_delay
from vblackwell.offload.optimizer import VGPUAdamW, clip_grad_norm_, select_top_k_gradients

MLP, DECODER, GPT2, T5, VIT = CASES
LEVEL0 = 128 << 10
UPDATES = pytest.mark.parametrize("update", ["host", "device"])


@pytest.mark.parametrize(("limit", "clips"), [(1e-3, True), (1e9, False)])
def test_a_look_at_the_share_is_told_whether_steps_clip(limit: float, clips: bool, make_stack: MakeStack, monkeypatch):
    model, told = build(DECODER), list[bool]()
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update="device")
    ours, share = VGPUAdamW(model.parameters(), max_grad_norm=limit), offload_of(model).host_share
    monkeypatch.setattr(share, "again", lambda *given: told.append(given[-1]))
    for step in range(8):
        DECODER.loss(model, step).backward()
        ours.step()
        ours.zero_grad()
    assert told[-1] is clips and not told[0]


@pytest.mark.each_value
@UPDATES
@pytest.mark.parametrize("clipped", ["always", "random", "first"])
def test_redo_after_clipping(clipped: str, make_stack: MakeStack, update: str):
    """The speculation on factor 1 fails at every step, at some, or only at the first: the result is always torch's."""
    plain, model = build(DECODER), build(DECODER)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update=update)
    ours = VGPUAdamW(model.parameters(), max_grad_norm=1.0, update_in_backward=True)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    offload_of(model).step_control.follow_clipping = False  # speculate on, whatever the last step was
    choose = random.Random(3)
    redone = 0
    for step in range(7):
        clip = {"always": True, "random": choose.random() < 0.5, "first": step == 0}[clipped]
        ours.max_grad_norm = 1e-2 if clip else 1e3
        for module, optimizer in ((model, ours), (plain, theirs)):
            DECODER.loss(module, step).backward()
            if module is plain:
                norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), ours.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        assert ours.grad_norm == norm.item()
        redone += clip
    assert equal(model, plain) and redone >= 1
    assert f"updates were rolled back in {redone} of 7 steps" in model_plan(model)


def test_of_several_micro_batches_the_host_updates_other_groups(make_stack: MakeStack, monkeypatch):
    """From the first step on: where groups are updated does not change when another optimizer counts otherwise."""

    def measured(*args: object) -> object:
        return stream(*args[:-1], lambda: (50e9, 1.4e9))  # of a GPU's link, and of the CPU beside it

    stream = api.stream
    monkeypatch.setattr(api, "stream", measured)
    found = dict[int, list[str]]()
    for count in (1, 4):
        plain, model = build(DECODER), build(DECODER)
        enable_vgpu_stack_optimization(model, make_stack(4 * LEVEL0), name=f"of {count}")
        ours = VGPUAdamW(model.parameters(), max_grad_norm=1.0, update_in_backward=True, accumulation_steps=count)
        found[count] = offload_of(model).summary()["updated_on_level0"]
        theirs = torch.optim.AdamW(plain.parameters(), fused=True)
        for step in range(2):
            for module, optimizer in ((model, ours), (plain, theirs)):
                for micro in range(count):
                    DECODER.loss(module, step * count + micro).backward()
                if module is plain:
                    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert equal(model, plain)
        again = VGPUAdamW(model.parameters(), update_in_backward=True, accumulation_steps=5 - count)
        assert offload_of(model).summary()["updated_on_level0"] == found[count]
        del again
    assert found[1] != found[4]


@pytest.mark.parametrize("count", [2, 4])
def test_groups_stay_with_the_host_where_ram_has_no_room_for_another_division(count: int, tmp_path, monkeypatch):
    """Ten bytes of RAM a parameter: what is updated on level 0 from a disk passes through a set of its size there."""
    stream, refused = api.stream, list[InsufficientMemory]()
    monkeypatch.setattr(api, "stream", lambda *args: stream(*args[:-1], lambda: (50e9, 4e9)))
    monkeypatch.setattr(FastestUpdates, "__call__", lambda self, count, undo: 0.5 if count == 1 else 0.0)
    reserve = engine.reserve

    def counted(*args: Any) -> None:
        try:
            reserve(*args)
        except InsufficientMemory as error:
            refused.append(error)
            raise

    monkeypatch.setattr(engine, "reserve", counted)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)), nn.Linear(64, 1024, bias=False))
    room = 10 * sum(param.numel() for param in model.parameters())
    sizes = (3, "cpu"), (room / (1 << 20), "cpu"), (64, "ssd")
    levels = [{"capacity_mb": size, "device": device} for size, device in sizes]
    with VGPUStack({"levels": [*levels[:2], levels[2] | {"path": str(tmp_path)}]}) as stack:
        enable_vgpu_stack_optimization(model, stack, placement="streamed")
        before = offload_of(model).summary()["updated_on_level0"]
        optimizer = VGPUAdamW(model.parameters(), update_in_backward=True, accumulation_steps=count)
        assert offload_of(model).summary()["updated_on_level0"] == before and len(refused) == 1
        for _ in range(count):
            model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()


def test_a_norm_that_is_still_taken_has_the_gradient_that_it_is_of(make_stack: MakeStack, monkeypatch):
    """Of gradients on a disk, given up before their step: the next copy there waits for who reads the last one."""
    measure, choose, stream = GradientCollector._measure, random.Random(5), api.stream

    def late(*args: object) -> None:
        time.sleep(choose.random() * 0.006)
        measure(*args)

    monkeypatch.setattr(GradientCollector, "_measure", late)
    monkeypatch.setattr(api, "stream", lambda *args: stream(*args[:-1], lambda: (50e9, 4e9)))
    plain = build(MLP)
    MLP.loss(plain, 9).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.AdamW(plain.parameters(), fused=True).step()
    for number in range(8):
        model = build(MLP)
        stack = make_stack(6 * LEVEL0, host_bytes=10 * sum(param.numel() for param in model.parameters()))
        enable_vgpu_stack_optimization(model, stack, placement="streamed", name=f"model {number}")
        ours = VGPUAdamW(model.parameters(), max_grad_norm=1.0, update_in_backward=True)
        for seed in (7, 8):
            MLP.loss(model, seed).backward()
            ours.zero_grad()
        MLP.loss(model, 9).backward()
        ours.step()
        assert equal(model, plain)


@UPDATES
def test_a_gradient_that_is_kept_is_what_clipping_left(make_stack: MakeStack, update: str):
    """Nobody calls `zero_grad`: the next backward adds to the clipped gradient, and the next step may use it again."""
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update=update)
    ours = VGPUAdamW(model.parameters(), max_grad_norm=1e-2, update_in_backward=True)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for seed, backward in enumerate((True, True, False, True)):
        for module, optimizer in ((model, ours), (plain, theirs)):
            if backward:
                MLP.loss(module, seed).backward()
            if module is plain:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
            optimizer.step()
    release(model)
    assert equal(model, plain)
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


@UPDATES
@pytest.mark.parametrize("how", ["clip_grad_norm_", "mul_"])
def test_a_gradient_is_scaled_after_the_update_that_is_due_has_read_it(how: str, make_stack: MakeStack, update: str):
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update=update)
    if update == "device":
        offload_of(model).level0.at_once = False  # as on a GPU
    for module, optimizer in (
        (model, VGPUAdamW(model.parameters())),
        (plain, torch.optim.AdamW(plain.parameters(), fused=True)),
    ):
        MLP.loss(module, 0).backward()
        optimizer.step()
        if how == "mul_":
            module.layers[1][0].weight.grad.mul_(0.5)
        else:
            clip = clip_grad_norm_ if module is model else torch.nn.utils.clip_grad_norm_
            clip(module.parameters(), 1e-2)
        optimizer.step()
    assert equal(model, plain)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_kept_gradient_is_the_same_wherever_adamw_runs(dtype: torch.dtype | None, make_stack: MakeStack):
    ends = []
    for update in ("host", "device"):
        model = build(DECODER)
        enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update=update, compute_dtype=dtype)
        optimizer = VGPUAdamW(model.parameters(), max_grad_norm=1e-2)
        for seed in range(3):
            DECODER.loss(model, seed).backward()
            optimizer.step()
        ends.append(model)
    assert equal(*ends)


@UPDATES
def test_a_lack_of_room_for_shadows_only_defers(make_stack: MakeStack, update: str):
    plain, model = build(MLP), build(MLP)
    state = sum(param.nbytes for param in model.parameters())
    enable_vgpu_stack_optimization(
        model, make_stack(LEVEL0, host_bytes=int(state * 4.6), disk_bytes=1 << 20), update=update
    )
    ours = VGPUAdamW(model.parameters(), update_in_backward=True)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(4):
        for module, optimizer in ((model, ours), (plain, theirs)):
            MLP.loss(module, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(model, plain)
    assert 0 < offload_of(model).summary()["undo_bytes"] < 3 * state


@UPDATES
def test_a_step_that_never_comes(make_stack: MakeStack, update: str):
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update=update)
    ours = VGPUAdamW(model.parameters(), update_in_backward=True)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for module, optimizer in ((model, ours), (plain, theirs)):
        MLP.loss(module, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        MLP.loss(module, 1).backward()
        optimizer.zero_grad()  # given up
        MLP.loss(module, 2).backward()
        MLP.loss(module, 3).backward()  # accumulated after all
        optimizer.step()
        optimizer.zero_grad()
        MLP.loss(module, 4).backward()
    assert equal(model, plain)  # reading in between: no step yet
    ours.step()
    theirs.step()
    assert equal(model, plain)


@pytest.mark.each_value
@UPDATES
@pytest.mark.parametrize("update_in_backward", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_not_finite_gradients_never_reach_the_weights(
    poison: float, update_in_backward: bool, make_stack: MakeStack, update: str
):
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update=update)
    ours = VGPUAdamW(model.parameters(), max_grad_norm=1.0, update_in_backward=update_in_backward)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(4):
        MLP.loss(model, step).mul(poison if step == 2 else 1.0).backward()
        ours.step()
        ours.zero_grad()
        assert ours.skipped == (step == 2)
        if step != 2:
            MLP.loss(plain, step).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            theirs.step()
            theirs.zero_grad()
    assert equal(model, plain)


@UPDATES
def test_loss_scale_is_exact(make_stack: MakeStack, update: str):
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update=update)
    ours = VGPUAdamW(model.parameters(), max_grad_norm=0.3, loss_scale=1024.0)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(3):
        (MLP.loss(model, step) * 1024.0).backward()
        MLP.loss(plain, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        # Powers of two commute with rounding; only the clip factor times 1/1024 is formed once more.
        assert ours.grad_norm == norm.item()
    assert equal(model, plain)


@UPDATES
def test_only_the_chosen_groups_move(make_stack: MakeStack, update: str):
    model, plain = build(DECODER), build(DECODER)
    stack = make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack, update=update)
    ours = VGPUAdamW(model.parameters(), max_grad_norm=0.1)
    DECODER.loss(model, 0).backward()
    DECODER.loss(plain, 0).backward()
    keys = select_top_k_gradients(model, 0.3)
    chosen = select_top_k_gradients(plain, 0.3)
    stack.prefetch(keys)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    ours.step(only=keys)
    moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    names = {param: name for name, param in plain.named_parameters()}
    assert moved == {names[param] for param in chosen} and 0 < len(moved) < len(before)
    alone = VGPUAdamW(plain.parameters(), max_grad_norm=0.1)
    alone.step(only=chosen)
    assert equal(model, plain)


@pytest.mark.each_value
@UPDATES
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_without_undo_the_result_is_the_same(
    dtype: torch.dtype | None, accumulation: int, make_stack: MakeStack, update: str
):
    """No log, and on level 0 not even a range for the gradient: the update after the backward uses it up there."""
    runs = []
    for undo in (True, False):
        model = build(DECODER, use_checkpoint=True)
        enable_vgpu_stack_optimization(
            model, make_stack(LEVEL0), placement="streamed", compute_dtype=dtype, update=update
        )
        optimizer = VGPUAdamW(
            model.parameters(), lr=3e-3, update_in_backward=True, undo=undo, accumulation_steps=accumulation
        )
        losses, early = [], 0
        for step in range(2):
            for micro in range(accumulation):
                loss = DECODER.loss(model, accumulation * step + micro)
                loss.backward()
                losses.append(loss.item())
            engine = offload_of(model)
            early += sum(engine.states[group].phase is Phase.EARLY for group in engine.groups)
            optimizer.step()
            optimizer.zero_grad()
        found = offload_of(model).summary()
        assert early == 2 * len(offload_of(model).groups)
        release(model)
        runs.append((losses, model, found))
    (kept, kept_model, with_log), (final, final_model, without) = runs
    assert kept == final and equal(kept_model, final_model)
    assert without["undo_bytes"] == 0 < with_log["undo_bytes"]
    if dtype is not None and accumulation == 1:
        assert ("gradient" in without["bytes_by_level"]) == (update != "device")
        elements = sum(param.numel() for param in final_model.parameters())
        total = sum(map(sum, without["bytes_by_level"].values()))
        # 12 bytes a parameter, and 2 of the gradient; the smallest parameters here are 32 elements in 256-element
        # places.
        assert total <= (12 if update == "device" else 14) * elements * 1.06


@UPDATES
def test_a_final_update_without_its_step_is_an_error(make_stack: MakeStack, update: str):
    def broken(act: Callable[[nn.Module, VGPUAdamW], object]) -> None:
        model = build(DECODER)
        enable_vgpu_stack_optimization(
            model, make_stack(LEVEL0), placement="streamed", compute_dtype=torch.bfloat16, update=update
        )
        optimizer = VGPUAdamW(model.parameters(), update_in_backward=True, undo=False)
        DECODER.loss(model, 0).backward()
        with pytest.raises(StepAbandoned, match="reload the last checkpoint"):
            act(model, optimizer)

    def changed(model: nn.Module, optimizer: VGPUAdamW) -> None:
        optimizer.param_groups[0]["lr"] *= 2
        optimizer.step()

    broken(lambda model, optimizer: optimizer.zero_grad())
    broken(lambda model, optimizer: DECODER.loss(model, 1))
    broken(lambda model, optimizer: model.state_dict())
    broken(changed)
    with pytest.raises(ConfigurationError, match="before the norm is known"):
        VGPUAdamW(build(MLP).parameters(), undo=False, max_grad_norm=1.0)
    with pytest.raises(ConfigurationError, match="no parameters to update"):
        VGPUAdamW(param for param in build(MLP).requires_grad_(False).parameters() if param.requires_grad)


@UPDATES
def test_gradients_that_a_final_update_consumes_are_not_ranked_and_nothing_is_lost(make_stack: MakeStack, update: str):
    models = []
    for ranked in (True, False):
        model = build(DECODER)
        enable_vgpu_stack_optimization(
            model, make_stack(LEVEL0), placement="streamed", compute_dtype=torch.bfloat16, update=update
        )
        optimizer = VGPUAdamW(model.parameters(), update_in_backward=True, undo=False)
        DECODER.loss(model, 0).backward()
        if ranked:
            with pytest.raises(ConfigurationError, match="undo=False consumes gradients"):
                select_top_k_gradients(model, 0.5)
        optimizer.step()
        models.append(model)
    assert equal(*models)


@UPDATES
def test_an_abandoned_update_has_consumed_its_gradient(make_stack: MakeStack, update: str):
    """A caller steps again despite the error: there is no gradient, least of all the bytes that lie in its place."""
    model = build(DECODER)
    enable_vgpu_stack_optimization(
        model, make_stack(LEVEL0), placement="streamed", compute_dtype=torch.bfloat16, update=update
    )
    optimizer = VGPUAdamW(model.parameters(), update_in_backward=True, undo=False)
    DECODER.loss(model, 0).backward()
    with pytest.raises(StepAbandoned):
        model.state_dict()
    assert all(param.grad is None for param in model.parameters())
    before = model.state_dict()
    optimizer.step()
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    optimizer.zero_grad()
    DECODER.loss(model, 1).backward()
    optimizer.step()
    assert not all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# -- races -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def delays() -> Iterator[Callable[..., None]]:
    """Random waits in every copy thread and in the worker, reproducible in distribution, not in order:
    that is the point.
    """
    pause = threading.Event()
    chance = random.Random(0)

    def delay(*_: str) -> None:
        if chance.random() < 0.25:
            pause.wait(chance.random() * 1e-3)

    set_transfer_delay(delay)
    set_worker_delay(delay)
    yield delay
    set_transfer_delay(None)
    set_worker_delay(None)


@pytest.mark.each_value
@UPDATES
@pytest.mark.parametrize("update_in_backward", [False, True])
def test_delays_change_no_bit(update_in_backward: bool, delays: object, make_stack: MakeStack, update: str):
    plain, model = build(DECODER, use_checkpoint=True), build(DECODER, use_checkpoint=True)
    # Weights in RAM, most states in the file: every kind of copy takes part.
    enable_vgpu_stack_optimization(
        model, make_stack((96 if update == "host" else 128) << 10, host_bytes=500 << 10), update=update
    )
    # More steps where most runs at the same time: updates ahead of their step, on separate streams. Rare orders
    # are not left to luck here: test_any_order.py and test_disk_lane.py run work in orders of which most show a missing
    # wait.
    steps, micros = (12, 1) if update_in_backward and update == "device" else (8, 2)
    ours = VGPUAdamW(
        model.parameters(), max_grad_norm=0.5, update_in_backward=update_in_backward, accumulation_steps=micros
    )
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(steps):
        losses = []
        for module, optimizer in ((model, ours), (plain, theirs)):
            for micro in range(micros):
                loss = DECODER.loss(module, 2 * step + micro)
                loss.backward()
                losses.append(loss.item())
            if module is plain:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert losses[:micros] == losses[micros:], step
    release(model)
    assert equal(model, plain)


def test_two_threads_give_the_same_bits(make_stack: MakeStack):
    """Norms are reductions: they must be taken with as many threads as in the plain run, also in the worker."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(300, 1100), nn.ReLU(), nn.Linear(1100, 300))  # beyond torch's grain for one thread
    model = copy.deepcopy(plain)
    enable_vgpu_stack_optimization(model, make_stack(4 << 20))
    ours = VGPUAdamW(model.parameters(), max_grad_norm=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    x = torch.randn(64, 300)
    for _ in range(3):
        for module, optimizer in ((model, ours), (plain, theirs)):
            module(x).square().mean().backward()
            if module is plain:
                norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        assert ours.grad_norm == norm.item()
    assert equal(model, plain)


def main_thread_waits() -> bool:
    gc.disable()  # a collection inside the next call waits for ever for a lock that this holds, in Python 3.11
    try:
        frame = sys._current_frames()[threading.main_thread().ident]
    finally:
        gc.enable()
    return frame.f_code.co_filename == threading.__file__


@pytest.mark.parametrize("early", [False, True])
def test_an_interrupted_wait_is_waited_for_again(early: bool, make_stack: MakeStack):
    """Ctrl-C while the forward waits for an update, or for its rollback: who needs the group next must wait as well."""
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update="host")
    ours = VGPUAdamW(model.parameters(), update_in_backward=early)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    reached, interrupted = threading.Event(), threading.Event()

    def delay() -> None:
        reached.wait()
        if not interrupted.is_set():
            wait_until(main_thread_waits)
            interrupted.set()
            signal.pthread_kill(
                threading.main_thread().ident, signal.SIGINT
            )  # wakes it, unlike `_thread.interrupt_main`
        time.sleep(0.02)

    set_worker_delay(delay)
    try:
        for module, optimizer in ((plain, theirs), (model, ours)):
            MLP.loss(module, 0).backward()
            if not early:
                optimizer.step()
        with pytest.raises(KeyboardInterrupt):
            reached.set()
            MLP.loss(model, 1)
            interrupted.wait()
        assert MLP.loss(model, 1).item() == MLP.loss(plain, 1).item()
    finally:
        reached.set()
        interrupted.set()
        set_worker_delay(None)
    assert equal(model, plain)


@UPDATES
def test_gradients_made_zero_right_after_the_step(make_stack: MakeStack, update: str):
    """`zero_grad(set_to_none=False)` overwrites gradients that updates under the next forward have yet to read."""
    plain, model = build(DECODER), build(DECODER)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update=update)
    ours = VGPUAdamW(model.parameters())
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(3):
        for module, optimizer in ((model, ours), (plain, theirs)):
            DECODER.loss(module, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert equal(model, plain)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_ways_back_take_what_is_foreseen(make_stack: MakeStack, dtype: torch.dtype | None):
    """All of what an update on the host overwrites, the compute weight next to a master, too."""
    model, stack = build(MLP), make_stack(96 << 10)
    wishes = StreamingOptions(dtype, update="host")
    capacities = [level.capacity_bytes for level in stack.levels]
    seconds = {"forward": 1.0, "backward": 1.0}
    told = forecast_step(build(MLP), capacities, wishes, seconds, undo=True, on_gpu=False).bytes_by_level["undo"]
    enable_vgpu_stack_optimization(model, stack, placement="streamed", compute_dtype=dtype, update="host")
    optimizer = VGPUAdamW(model.parameters(), max_grad_norm=1e9, update_in_backward=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        MLP.loss(model, 0).backward()
    optimizer.step()
    taken = offload_of(model).summary()["undo_bytes"]  # type: ignore[union-attr]
    assert taken == told[1] > 0 and told[0] == 0


@pytest.mark.parametrize(("name", "older"), [("device", "level0"), ("host", "home")])
def test_a_place_of_updates_has_two_names(name: str, older: str, make_stack: MakeStack):
    found = []
    for update in (name, older):
        model = enable_vgpu_stack_optimization(build(MLP), make_stack(LEVEL0), placement="streamed", update=update)
        found.append(offload_of(model).summary()["updated_on_level0"])
    assert found[0] == found[1] and bool(found[0]) == (name == "device")
