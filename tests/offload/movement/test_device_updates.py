"""Updates that wait for the forward, as they do on a GPU, and everything that may come between a step and them.

Also what an update after the backward must not do: touch parameters that are frozen, or another optimizer's, or lose a
NaN.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build, equal
from vblackwell.kernels.optimizer.adamw import join, split
from vblackwell.memory.transfer import DoneTransfer
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.movement.lane import LaneEnd, LaneJob
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.storage.masters import round_from_fp32

MLP, DECODER, GPT2, T5, VIT = CASES
LEVEL0 = 128 << 10
Optimizers = tuple[VGPUAdamW, torch.optim.Optimizer]


@pytest.fixture
def pair(make_stack: MakeStack) -> tuple[nn.Module, nn.Module]:
    """A streamed model whose updates wait for their groups, and a plain one with the same weights."""
    plain, model = build(DECODER, use_checkpoint=True), build(DECODER, use_checkpoint=True)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update="device")
    offload_of(model).level0.at_once = False
    return model, plain


def step_both(
    pair: tuple[nn.Module, nn.Module], optimizers: Optimizers, seed: int, between: Callable[[nn.Module], object] = id
) -> list[float]:
    losses = []
    for module, optimizer in zip(pair, optimizers, strict=True):
        loss = DECODER.loss(module, seed)
        loss.backward()
        optimizer.step()
        between(module)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def optimizers_of(pair: tuple[nn.Module, nn.Module]) -> Optimizers:
    return VGPUAdamW(pair[0].parameters(), lr=3e-3), torch.optim.AdamW(pair[1].parameters(), lr=3e-3, fused=True)


def clamp(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.clamp_(-0.02, 0.02)


def read(module: nn.Module) -> float:
    return sum(float(param.detach().abs().sum()) for param in module.parameters())


def test_an_interrupt_while_an_update_is_queued_comes_after_it(
    pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
):
    """It was queued, so it must not be queued again by the forward that follows."""
    model, lane = pair[0], offload_of(pair[0]).level0._lane
    optimizers, submit, interrupts = optimizers_of(pair), lane.submit, iter([True])

    def interrupted(job: LaneJob) -> LaneEnd:
        end = submit(job)
        if next(interrupts, False):
            signal.raise_signal(signal.SIGINT)
        return end

    step_both(pair, optimizers, 0)
    monkeypatch.setattr(lane, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        DECODER.loss(model, 1)
    for seed in range(1, 3):
        ours, theirs = step_both(pair, optimizers, seed)
        assert ours == theirs
    assert equal(*pair)


class InterruptedOnce(DoneTransfer):
    """Over only when it has been waited for twice."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt


def test_an_interrupted_wait_for_what_is_stored_is_waited_for_again(pair: tuple[nn.Module, nn.Module]):
    engine, over, stored = offload_of(pair[0]), DoneTransfer(), InterruptedOnce()
    group = engine.groups[0]
    engine.states[group].update_end = LaneEnd(over, stored, over)
    with pytest.raises(KeyboardInterrupt):
        engine.level0.wait(group)
    engine.level0.wait(group)
    assert stored.waits == 2 and engine.states[group].update_end is None


@pytest.mark.parametrize("between", [id, clamp, read, lambda module: module.state_dict()])
def test_the_first_to_come_finds_the_step_done(
    pair: tuple[nn.Module, nn.Module], between: Callable[[nn.Module], object]
):
    optimizers = optimizers_of(pair)
    for seed in range(3):
        losses = step_both(pair, optimizers, seed, between)
        assert losses[0] == losses[1], seed
    assert equal(*pair)


def test_read_right_after_the_step(pair: tuple[nn.Module, nn.Module]):
    seen: list[float] = []
    step_both(pair, optimizers_of(pair), 0, lambda module: seen.append(read(module)))
    assert seen[0] == seen[1]


def test_two_steps_with_one_gradient(pair: tuple[nn.Module, nn.Module]):
    optimizers = optimizers_of(pair)
    for module, optimizer in zip(pair, optimizers, strict=True):
        DECODER.loss(module, 0).backward()
        optimizer.step()
        optimizer.step()
    assert equal(*pair)
    assert {float(state["step"]) for state in optimizers[0].state_dict()["state"].values()} == {2.0}


def test_an_evaluation_between_backward_and_step(pair: tuple[nn.Module, nn.Module]):
    optimizers = optimizers_of(pair)
    optimizers[0].update_in_backward = True
    for seed in range(3):
        for module, optimizer in zip(pair, optimizers, strict=True):
            DECODER.loss(module, seed).backward()
            with torch.no_grad():
                DECODER.loss(module, seed + 10)
            optimizer.step()
            optimizer.zero_grad()
    assert equal(*pair)


def test_micro_batches_and_single_ones_in_turn(pair: tuple[nn.Module, nn.Module]):
    """Which range holds a gradient is known when the update is queued, not when the worker has got there."""
    optimizers = optimizers_of(pair)
    for micro_batches in (2, 1, 3, 1):
        for module, optimizer in zip(pair, optimizers, strict=True):
            for seed in range(micro_batches):
                DECODER.loss(module, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(*pair)


# -- what is not whole is not updated early ---------------------------------------------------------------------------


@pytest.mark.each_pair
@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("update", ["host", "device"])
@pytest.mark.parametrize("which", ["biases frozen", "adapters only", "one group's optimizer"])
def test_parameters_that_are_not_updated_keep_their_bits(which: str, update: str, undo: bool, make_stack: MakeStack):
    plain, model = build(MLP), build(MLP)
    wanted = {
        "biases frozen": lambda name: not name.endswith("bias"),
        "adapters only": lambda name: name.endswith("2.weight"),
        "one group's optimizer": lambda name: name.startswith("layers.2."),
    }[which]
    if which != "one group's optimizer":
        for module in (plain, model):
            for name, param in module.named_parameters():
                param.requires_grad_(wanted(name))
    enable_vgpu_stack_optimization(
        model, make_stack(LEVEL0), placement="streamed", compute_dtype=torch.bfloat16, update=update
    )
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    ours = VGPUAdamW(
        [param for name, param in model.named_parameters() if wanted(name)], lr=3e-3, update_in_backward=True, undo=undo
    )
    for seed in range(3):
        x = torch.randn(16, 48, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(x).float().square().mean().backward()
        ours.step()
        model.zero_grad()
    for name, param in model.named_parameters():
        assert bool(param.isfinite().all()), name
        assert torch.equal(param, before[name]) != wanted(name), name


@pytest.mark.parametrize("update", ["host", "device"])
def test_a_scaled_loss_without_undo(update: str, make_stack: MakeStack):
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), update=update)
    ours = VGPUAdamW(model.parameters(), update_in_backward=True, undo=False, loss_scale=256.0)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for seed in range(3):
        (MLP.loss(model, seed) * 256.0).backward()
        MLP.loss(plain, seed).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert equal(model, plain)


@pytest.mark.parametrize("update", ["host", "device"])
def test_gradients_are_gone_after_a_final_update(update: str, make_stack: MakeStack):
    """They were never written back, or lie where the weights were: nobody may zero, sum or hand out what is there."""
    model = build(MLP)
    enable_vgpu_stack_optimization(
        model, make_stack(LEVEL0), placement="streamed", compute_dtype=torch.bfloat16, update=update
    )
    ours = VGPUAdamW(model.parameters(), update_in_backward=True, undo=False)
    for seed in range(2):
        x = torch.randn(16, 48, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(x).float().square().mean().backward()
        ours.step()
        after = {name: value.clone() for name, value in model.state_dict().items()}
        ours.zero_grad(set_to_none=False)
        assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    offload_of(model).finish()
    release(model)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("undo", [False, True])
def test_close_right_after_a_step(undo: bool, make_stack: MakeStack):
    model = build(MLP)
    stack = make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack, update="device")
    optimizer = VGPUAdamW(model.parameters(), update_in_backward=True, undo=undo)
    MLP.loss(model, 0).backward()
    optimizer.step()
    offload_of(model).close()
    assert all(level["used_bytes"] == 0 for level in stack.get_stats()["levels"])


# -- NaN ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7FC00000, 0x7F80FFFF, 0x7F800001, -1, -0x400000, -0x7F0001])
def test_a_nan_stays_one(pattern: int):
    """A NaN with a full low half, such as the GPU makes, would round up to a zero and look healthy."""
    truth = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    assert truth.isnan()
    weight, remainder = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int16)
    round_from_fp32(truth, weight)
    assert weight.isnan()
    scratch = torch.empty(1, dtype=torch.int32)
    split(truth.view(torch.int32), weight, remainder, scratch)
    assert weight.isnan() and join(weight, remainder, scratch).isnan()
