"""Gradients that stay on level 0 while steps clip, and states that come up before the norm is known: torch's bits,
whatever happens to the gradient before its update has read it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build, equal
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.movement.lane import LaneEnd, LaneJob
from vblackwell.offload.optimizer import VGPUAdamW, clip_grad_norm_

DECODER = CASES[1]
LIMIT = 1e-2  # every step's norm is larger
Between = Callable[[nn.Module, torch.optim.Optimizer], object]


def first_weight(module: nn.Module) -> nn.Parameter:
    """Of the group that the forward needs first: its gradient stays."""
    return next(module.parameters())


def train(model: nn.Module, plain: nn.Module, after_backward: Between, after_step: Between, steps: int = 4) -> None:
    """Both models, with ``LIMIT`` at every step but the last."""
    ours = VGPUAdamW(model.parameters(), max_grad_norm=LIMIT, update_in_backward=True)
    theirs, norms = torch.optim.AdamW(plain.parameters(), fused=True), list[float]()
    for step in range(steps):
        ours.max_grad_norm = LIMIT if step < steps - 1 else 1e3
        for module, optimizer in ((model, ours), (plain, theirs)):
            DECODER.loss(module, step).backward()
            after_backward(module, optimizer)
            if module is plain:
                norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), ours.max_grad_norm)
            optimizer.step()
            norms.append(ours.grad_norm or 0.0 if module is model else norm.item())
            after_step(module, optimizer)
        assert norms[-1] == norms[-2] and LIMIT < norms[-1] < 1e3, "the last step does not clip, the others do"


def nothing(module: nn.Module, optimizer: torch.optim.Optimizer) -> None: ...


def zero(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def enabled(make_stack: MakeStack, level0_bytes: int, *, late: bool) -> tuple[nn.Module, nn.Module]:
    plain, model = build(DECODER, use_checkpoint=True), build(DECODER, use_checkpoint=True)
    enable_vgpu_stack_optimization(model, make_stack(level0_bytes), update="device", placement="streamed")
    offload_of(model).level0.at_once = not late
    offload_of(model).step_control.clipping.share = 1.0  # as if steps had clipped in a row before
    return model, plain


@pytest.mark.parametrize("late", [False, True])
def test_first_groups_of_the_forward_are_updated_from_what_stayed(
    late: bool, make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
):
    """Their gradients do not come up again, and states of the first are there before the step; ``late``: updates wait
    for the forward, as on a GPU."""
    model, plain = enabled(make_stack, 1 << 20, late=late)
    control = offload_of(model).step_control
    lane, collector = control.level0._lane, control.gradients
    submit, stayed = lane.submit, list[str]()

    def spy(job: LaneJob) -> LaneEnd:
        if job.factor is not None and job.gradient is not None:
            assert job.gradient_kind is None, "the stored gradient is the same one, not more of it"
            stayed.append(job.group.name)
        return submit(job)

    monkeypatch.setattr(lane, "submit", spy)
    on_level0 = [group for group in control._groups if group in control.level0.groups]
    first = on_level0[: collector._max_staying]
    ahead = list[bool]()

    def look(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if module is model and control.num_steps:
            assert [group for group in on_level0 if collector.stays(group)] == first
            ahead.append(lane.is_ahead(first[0]))

    train(model, plain, look, zero)
    assert len(on_level0) > len(first) > 1 and ahead == [True] * 3
    offload_of(model).finish()
    assert stayed == [group.name for group in first] * 2  # steps 2 and 3 of 4: the last has no factor
    assert equal(model, plain)
    assert not collector.in_flight and not any(map(collector.stays, on_level0))


def again(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    DECODER.loss(module, 100).backward()


def halve(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    grad = first_weight(module).grad
    assert grad is not None
    grad.mul_(0.5)


def clip(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ours = isinstance(optimizer, VGPUAdamW)
    (clip_grad_norm_ if ours else torch.nn.utils.clip_grad_norm_)(module.parameters(), 0.5)


def forget(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first_weight(module).grad = None


def start_again(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    DECODER.loss(module, 200).backward()


def zero_in_place(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def step_again(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The clipped gradients of the step before are used once more."""
    if not isinstance(optimizer, VGPUAdamW):
        grads = [param.grad for param in module.parameters() if param.grad is not None]
        if torch.nn.utils.get_total_norm(grads) < 2 * LIMIT:  # that step clipped
            torch.nn.utils.clip_grad_norm_(module.parameters(), LIMIT)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.each_value
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("after_backward", "after_step"),
    [
        (again, zero),
        (halve, zero),
        pytest.param(clip, zero, marks=pytest.mark.slow),  # as halve
        (forget, zero),
        (start_again, zero),
        (nothing, nothing),
        (nothing, zero_in_place),
        (nothing, step_again),
        pytest.param(nothing, again, marks=pytest.mark.slow),  # as nothing: the next backward adds
    ],
)
def test_a_gradient_that_changes_does_not_stay(
    after_backward: Between, after_step: Between, late: bool, make_stack: MakeStack
):
    model, plain = enabled(make_stack, 1 << 20, late=late)
    train(model, plain, after_backward, after_step, steps=3)
    offload_of(model).finish()
    assert equal(model, plain)


@pytest.mark.each_value
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("level0_kib", [104, 128, 192])
def test_gradients_give_way_where_level0_is_small(level0_kib: int, late: bool, make_stack: MakeStack):
    model, plain = enabled(make_stack, level0_kib << 10, late=late)
    train(model, plain, nothing, zero, steps=4)
    release(model)
    assert equal(model, plain)


def test_a_step_that_is_skipped_leaves_nothing_behind(make_stack: MakeStack):
    """A gradient that is not finite: the step changes nothing, and the next is torch's again."""
    model, plain = enabled(make_stack, 1 << 20, late=True)

    def spoil(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if module is model and offload_of(model).step_control.num_steps == 2:
            grad = first_weight(module).grad
            assert grad is not None
            grad.mul_(float("inf"))
            optimizer.step()
            assert optimizer.skipped  # type: ignore[attr-defined]
            optimizer.zero_grad()
            DECODER.loss(module, 2).backward()

    train(model, plain, spoil, zero)
    offload_of(model).finish()
    assert equal(model, plain)


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_that_is_given_up_leaves_no_bytes_on_level0(late: bool, make_stack: MakeStack):
    """As before it is begun again with fewer sequences in a forward. What a step has made due is still read."""
    model, plain = enabled(make_stack, 1 << 20, late=late)
    engine = offload_of(model)
    given_up = list[bool]()

    def give_up(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if module is model and engine.step_control.num_steps:
            staying = list(engine.gradients._staying)
            optimizer.zero_grad()
            given_up.append(bool(staying) and not engine.gradients._staying)
            DECODER.loss(model, engine.step_control.num_steps).backward()

    def reads_later(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        staying = list(engine.gradients._staying)
        optimizer.zero_grad()
        assert list(engine.gradients._staying) == staying

    train(model, plain, give_up, reads_later)
    engine.finish()
    assert equal(model, plain) and given_up == [True] * 3


def test_a_step_after_an_interrupted_forward_waits_with_its_updates(make_stack: MakeStack):
    """What that forward has pinned is not updated at once, as on a GPU: the next forward lets it go first."""
    model, plain = enabled(make_stack, 1 << 20, late=True)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if module is model and offload_of(model).step_control.num_steps == 2:
            inner = [each for each in model.modules() if isinstance(each, nn.Linear)][0]
            hook = inner.register_forward_pre_hook(stop)
            with torch.no_grad(), pytest.raises(KeyboardInterrupt):
                DECODER.loss(model, 3)
            hook.remove()
            weights = offload_of(model).weights
            assert any(
                weights.is_pinned(group) and offload_of(model).gradients.stays(group) for group in weights._groups
            )

    train(model, plain, interrupt, zero)
    offload_of(model).finish()
    assert equal(model, plain)


@pytest.mark.parametrize("update", [pytest.param("host", marks=pytest.mark.slow), "device"])
def test_steps_that_clip_one_by_one_are_speculated_after_and_rows_of_them_are_not(make_stack: MakeStack, update: str):
    """What mostly followed a step that clipped is expected of the next one."""
    clips = [letter == "T" for letter in "FTFTFTTTTTTTFTTFTFFT"]
    plain, model = build(DECODER), build(DECODER)
    enable_vgpu_stack_optimization(model, make_stack(128 << 10), update=update)
    ours = VGPUAdamW(model.parameters(), max_grad_norm=1.0, update_in_backward=True)
    theirs, control = torch.optim.AdamW(plain.parameters(), fused=True), offload_of(model).step_control
    rolled_back = list[int]()
    for step, clip in enumerate(clips):
        ours.max_grad_norm = 1e-2 if clip else 1e3
        for module, optimizer in ((model, ours), (plain, theirs)):
            DECODER.loss(module, step).backward()
            if module is plain:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), ours.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        rolled_back.append(control.num_rolled_back)
    # The row of seven is not begun any more when four of four followed, which weigh 0.68; after it, when one and then
    # two did not, it is until these weigh less.
    began = "-T-T-TTTTT---T--T--T"
    assert rolled_back == list(itertools.accumulate(letter == "T" for letter in began))
    assert equal(model, plain)


def test_closing_gives_back_what_stayed(make_stack: MakeStack):
    model, stack = build(DECODER), make_stack(1 << 20)
    enable_vgpu_stack_optimization(model, stack, update="device", placement="streamed")
    offload_of(model).step_control.clipping.share = 1.0
    optimizer = VGPUAdamW(model.parameters(), max_grad_norm=LIMIT, update_in_backward=True)
    for seed in range(2):
        DECODER.loss(model, seed).backward()
        if seed == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert offload_of(model).gradients._staying
    offload_of(model).close()
    assert all(level["used_bytes"] == 0 for level in stack.get_stats()["levels"])
