"""States that are a step behind (`movement.state.Behind`): whatever comes between two steps, the bits are PyTorch's.

Host memory has room for all groups to be behind, and for no shadow.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.delay import set_transfer_delay
from tests.offload.movement.behind_twins import FAST_BYTES, Layers, Twins, loss_of
from vblackwell.errors import StaleTensor
from vblackwell.kernels.optimizer import cpu
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.api import release
from vblackwell.offload.layout.groups import OLD_GRADIENT, OLD_WEIGHT, Group
from vblackwell.offload.movement.state import set_worker_delay
from vblackwell.offload.state import export_state, import_state

UPDATES, DTYPES = ("host", "device", 0.5), (torch.bfloat16, torch.float32)
BOTH_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])


def quick(*shown: tuple[str | float, torch.dtype]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """At each place of updates (0.5: both) in each type, slow where it is not ``shown``; with each other value."""
    pairs = [(update, dtype) for update in UPDATES for dtype in DTYPES]
    given = [pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in shown)) for pair in pairs]
    return lambda test: pytest.mark.each_value(pytest.mark.parametrize(("update", "dtype"), given, ids=str)(test))


everywhere = quick((0.5, torch.bfloat16))
in_both_types = quick((0.5, torch.bfloat16), ("device", torch.float32))  # where sums or numbers differ with the type
# So many KiB of host memory hold what all groups need to be behind, by some 20, and not one group's shadows.
HOST_KIB = {
    ("host", torch.bfloat16): 520,
    ("host", torch.float32): 624,
    ("device", torch.bfloat16): 464,
    ("device", torch.float32): 520,
    (0.5, torch.bfloat16): 500,
    (0.5, torch.float32): 584,
}


def kib_with_sums(update: str | float, dtype: torch.dtype) -> int:
    """Room for sums of bf16 gradients in fp32, too, where rollbacks give theirs up; fp32 ones are summed in place."""
    return HOST_KIB[update, dtype] + (20 if dtype == torch.bfloat16 else 0)


@pytest.fixture
def twins() -> Iterator[Callable[..., Twins]]:
    """``make(update, dtype)``: after the test, the stack has nothing of its model."""
    made: list[Twins] = []

    def make(update: str | float, dtype: torch.dtype, *, host_kib: int | None = None, **options: object) -> Twins:
        host_bytes = (HOST_KIB[update, dtype] if host_kib is None else host_kib) << 10
        levels = [{"capacity_mb": size / (1 << 20), "device": "cpu"} for size in (FAST_BYTES, host_bytes)]
        made.append(Twins(VGPUStack({"levels": levels}), update, dtype, **options))
        return made[-1]

    yield make
    for each in made:
        if not each.closed:
            release(each.model)
        assert all(level.used_bytes == 0 for level in each.stack.levels)
        each.stack.close()


# -- steps -------------------------------------------------------------------------------------------------------------


@in_both_types
def test_steps_have_the_bits_of_pytorch(update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    pair = twins(update, dtype)
    pair.steps(range(6))
    pair.assert_states()
    pair.assert_weights()


@in_both_types
def test_a_step_that_was_lacking_uses_its_own_numbers(
    update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]
):
    """They change between all steps: those of one that states lack are no longer the optimizer's when it is made."""
    pair = twins(update, dtype, weight_decay=0.1)
    for seed in range(6):
        for optimizer in (pair.ours, pair.plain.optimizer):
            (numbers,) = optimizer.param_groups
            numbers["lr"], numbers["weight_decay"] = 1e-3 * (seed + 1), 0.1 * (seed % 3)
            numbers["betas"], numbers["eps"] = (0.9 - 0.1 * (seed % 2), 0.99 - 0.02 * seed), 1e-8 * 10**seed
        pair.backward(seed)
        pair.step()
    pair.assert_states()


@everywhere
def test_numbers_that_change_between_backward_and_step(
    update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]
):
    """What looked ahead is rolled back; the step before it, which it made for good, is not made again."""
    pair = twins(update, dtype)
    for seed in range(6):
        pair.backward(seed)
        if seed % 2:
            for optimizer in (pair.ours, pair.plain.optimizer):
                optimizer.param_groups[0]["lr"] *= 2
        pair.step(behind=seed % 2 == 0) if seed % 2 == 0 else pair.step_late()
    pair.assert_states()


@in_both_types
@pytest.mark.parametrize("clips", ["FTFTT", "FFFTF", "TTFFT"])
def test_a_clip_after_steps_that_did_not(
    clips: str, update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]
):
    pair = twins(update, dtype, max_grad_norm=1e3)
    pair.engine.step_control.follow_clipping = False  # speculate on, whatever the last step was
    for seed, clip in enumerate(clips):
        pair.limit(1e-2 if clip == "T" else 1e3)
        pair.backward(seed)
        pair.step_late() if clip == "T" else pair.step()
    assert pair.engine.summary()["rolled_back_steps"] == clips.count("T")
    pair.assert_states()


@everywhere
def test_a_clip_that_the_next_step_expects(update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    """Where most steps that followed one that clipped did, nothing starts early then: states lack nothing, and look
    ahead once more later."""
    pair = twins(update, dtype, max_grad_norm=1e3)
    pair.engine.step_control.clipping.share = 1.0
    for seed, clip in enumerate("FFTTFFF"):
        pair.limit(1e-2 if clip == "T" else 1e3)
        pair.backward(seed)
        early = any(state.early is not None for state in pair.engine.states.values())
        assert early == (seed not in (3, 4))
        pair.step() if seed not in (2, 3, 4) else pair.step_late()
    pair.assert_states()


# -- steps that do not come --------------------------------------------------------------------------------------------


@in_both_types
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_step_that_does_not_come(after: int, update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    pair = twins(update, dtype)
    pair.steps(range(after))
    pair.backward(10)
    pair.zero_grad()
    pair.assert_weights()
    pair.backward(11)
    with torch.no_grad():
        assert loss_of(pair.model, 12).item() == loss_of(pair.plain.model, 12).item()  # another forward
    pair.step_late()
    pair.steps(range(20, 23))
    pair.assert_states()


@everywhere
def test_every_other_step_does_not_come(update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    pair = twins(update, dtype)
    for seed in range(8):
        pair.backward(seed)
        pair.step() if seed % 2 == 0 else pair.zero_grad()
    pair.assert_states()


@everywhere
def test_gradients_that_are_not_finite(update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    """The step is skipped: NaN is in weights that nobody keeps, and in a gradient that no states will lack."""
    pair = twins(update, dtype, max_grad_norm=1e3)
    pair.limit(1e3)
    pair.steps(range(2))
    (loss_of(pair.model, 5) * float("nan")).backward()
    pair.engine.worker.drain()
    pair.ours.step()
    assert pair.ours.skipped and pair.behind == 0
    pair.ours.zero_grad()
    pair.steps(range(6, 9))
    pair.assert_states()


# -- readers -----------------------------------------------------------------------------------------------------------


@everywhere
def test_states_that_are_read_every_other_step(update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    pair = twins(update, dtype)
    for seed in range(6):
        pair.backward(seed)
        pair.step()
        if seed % 2 == 0:
            weights, states = pair.model.state_dict(), pair.ours.state_dict()["state"]
            assert pair.behind == 0
            for found, param in zip(weights.values(), pair.plain.model.parameters(), strict=True):
                assert torch.equal(found, param)
            for index, truth in enumerate(pair.plain.truths):
                for key, value in pair.plain.optimizer.state[truth].items():
                    assert torch.equal(states[index][key], value), (index, key)
    pair.assert_states()


@everywhere
def test_states_that_are_read_between_backward_and_step(
    update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]
):
    pair = twins(update, dtype)
    for seed in range(5):
        pair.backward(seed)
        if seed % 2:
            pair.assert_states()  # of the last step
        pair.step() if seed % 2 == 0 else pair.step_late()
    pair.assert_states()


@in_both_types
def test_a_gradient_is_read_after_its_step(update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    """Where states lack the step, its gradient is what they lack: it is read, and stays."""
    pair = twins(update, dtype)
    for seed in range(4):
        pair.backward(seed)
        pair.step(zero=False)
        for param, truth in zip(pair.model.parameters(), pair.plain.truths, strict=True):
            assert torch.equal(param.grad.cpu(), truth.grad.to(dtype))
        assert pair.behind == len(pair.engine.groups)
        pair.zero_grad()
        assert all(param.grad is None for param in pair.model.parameters())
    pair.assert_states()


@everywhere
def test_export_and_going_on_elsewhere(update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    pair, fresh = twins(update, dtype), twins(update, dtype)
    pair.steps(range(3))
    fresh.steps(range(7, 9))  # its states are behind when others are written over them
    state = dict(export_state(pair.model, pair.ours))
    import_state(fresh.model, fresh.ours, state.__getitem__)
    fresh.plain = copy.deepcopy(pair.plain)
    for each in (pair, fresh):
        each.steps(range(3, 6))
        each.assert_states()


@in_both_types
def test_weights_that_are_changed_between_steps(update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    pair = twins(update, dtype)
    for seed in range(4):
        pair.backward(seed)
        pair.step()
        with torch.no_grad():
            for param in pair.model.parameters():
                param.mul_(0.5)
            for param, truth in zip(pair.plain.model.parameters(), pair.plain.truths, strict=True):
                param.mul_(0.5)
                truth.copy_(param)  # what is written to a compute weight is its truth
    pair.assert_states()


@everywhere
@pytest.mark.parametrize("given_up", [False, True])
def test_release_and_going_on_with_torchs_adamw(
    given_up: bool, update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]
):
    pair = twins(update, dtype)
    pair.steps(range(3))
    if given_up:
        pair.backward(9)
        pair.zero_grad()
    pair.steps(range(3, 4))
    states = pair.ours.state_dict()
    release(pair.model)
    pair.closed = True
    plain = Layers()
    for model in (pair.model, plain):
        assert all(param.dtype == torch.float32 for param in model.parameters())
    with torch.no_grad():
        for param, truth in zip(plain.parameters(), pair.plain.truths, strict=True):
            param.copy_(truth)
    ours, theirs = (torch.optim.AdamW(model.parameters(), fused=True) for model in (pair.model, plain))
    ours.load_state_dict(states)
    theirs.load_state_dict(pair.plain.optimizer.state_dict())
    for seed in range(4, 6):
        for model, optimizer in ((pair.model, ours), (plain, theirs)):
            loss_of(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(pair.model.parameters(), plain.parameters(), strict=True))


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.each_pair
@pytest.mark.parametrize("update", UPDATES)
@BOTH_DTYPES
@pytest.mark.parametrize("more_kib", [20, 400])
def test_gradients_add_up_over_steps(
    more_kib: int, update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]
):
    """Nobody calls `zero_grad`: the gradient that states lack is about to have another one added to it, and bf16 ones
    need a range for sums, which has room only where rollbacks make it, or at once.
    """
    pair = twins(update, dtype, host_kib=HOST_KIB[update, dtype] + more_kib)
    for seed in range(2):
        pair.backward(seed)
        pair.step_any(zero=False)
        assert seed > 0 or pair.behind > 0 or more_kib == 400
    pair.backward(2)
    pair.step_any()
    for seed in range(3, 7):
        pair.backward(seed)
        pair.step_any(zero=seed % 2 == 0)
    pair.assert_states()


@in_both_types
def test_gradients_that_are_made_zero(update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    pair = twins(update, dtype, host_kib=kib_with_sums(update, dtype))
    for seed in range(5):
        pair.backward(seed)
        pair.step_any(zero=False)
        assert seed > 0 or pair.behind == len(pair.engine.groups)
        pair.engine.worker.drain()
        pair.zero_grad(set_to_none=False)
        if seed == 2:
            pair.step_any(zero=False)  # with zeros
    pair.assert_states()


@in_both_types
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_of_some_parameters_are_given_up(
    set_to_none: bool, update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]
):
    """The others add up: one range holds both."""
    pair = twins(update, dtype, host_kib=kib_with_sums(update, dtype))
    for seed in range(5):
        pair.backward(seed)
        pair.step_any(zero=False)
        assert seed > 0 or pair.behind == len(pair.engine.groups)
        for params in (pair.model.parameters(), pair.plain.truths):
            for index, param in enumerate(params):
                if index % 2 == 0 or index >= 6:
                    if set_to_none:
                        param.grad = None
                    else:
                        param.grad.zero_()
    pair.assert_states()


@in_both_types
def test_micro_batches_and_single_ones(update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    """What is accumulated is not one whole gradient: states that lacked a step have it before."""
    pair = twins(update, dtype, host_kib=kib_with_sums(update, dtype))
    pair.steps_any(range(2))
    assert pair.behind == len(pair.engine.groups)
    for step, micro_batches in enumerate((1, 2, 2, 1, 1, 3, 1)):
        pair.ours.accumulation_steps = micro_batches
        for micro in range(micro_batches):
            pair.backward(10 * step + micro, 1 / micro_batches)
        pair.step_any()
    pair.assert_states()


@in_both_types
def test_a_parameter_without_gradient_in_one_step(update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]):
    """Its group's update waits for the step, and its own states lack none that it had no part in."""
    pair = twins(update, dtype)
    for seed in range(6):
        for model in (pair.model, pair.plain.model):
            model.unused = 2 if seed == 3 else None
        pair.backward(seed)
        pair.step() if seed != 3 else pair.step_any()
        assert pair.behind == len(pair.engine.groups) - (seed == 3)
    pair.assert_states()


# -- memory ------------------------------------------------------------------------------------------------------------


@in_both_types
@pytest.mark.parametrize("when", ["after the step", "after the backward"])
def test_memory_for_rollbacks_is_given_back_in_mid_run(
    when: str, update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]
):
    pair = twins(update, dtype)
    groups, storage, control = pair.engine.groups, pair.engine.storage, pair.engine.step_control
    kinds = [(group, kind) for group in groups for kind in (OLD_WEIGHT, OLD_GRADIENT)]
    pair.steps(range(3))
    held = sum(storage.range(*pair).num_bytes for pair in kinds if pair in storage)
    assert held >= sum(group.num_bytes for group in groups)
    used = pair.stack.levels[1].used_bytes
    if when == "after the backward":
        pair.backward(3)
        assert control.free_spare() and pair.engine.states[groups[-1]].early is None  # which is rolled back
        pair.step_any()
        assert pair.behind == len(groups) - 1
        pair.backward(4)
        pair.zero_grad()
        groups = groups[:-1]
    for group in reversed(groups):  # one after the other, as many as somebody needs
        assert (group, OLD_WEIGHT) in storage and control.free_spare() and (group, OLD_WEIGHT) not in storage
    assert pair.stack.levels[1].used_bytes <= used - held and not any(pair in storage for pair in kinds)
    assert pair.behind == 0 and not control.free_spare()
    pair.steps(range(5, 8))  # nobody has needed it
    pair.assert_states()


@everywhere
def test_a_model_that_is_closed_in_any_state_gives_all_back(
    update: str | float, dtype: torch.dtype, twins: Callable[..., Twins]
):
    for stop in range(4):
        pair = twins(update, dtype)
        pair.steps(range(min(stop, 2)))
        if stop % 2:
            pair.backward(5)
        pair.engine.close()
        pair.closed = True
        assert all(level.used_bytes == 0 for level in pair.stack.levels)


# -- failures ----------------------------------------------------------------------------------------------------------


def refuse(*args: object, **more: object) -> None:
    raise OSError("the CPU said no")


def weights_of(pair: Twins, group: Group) -> list[torch.Tensor]:
    flat = pair.engine.storage.open(group, "weight")
    return [slot.view(flat).clone() for slot in group.slots]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Twins, Group], threading.Event]:
    """``failing(pair, group)``: the group's next update on the host waits for the event, then fails to compute."""

    def begin(pair: Twins, group: Group) -> threading.Event:
        go, apply = threading.Event(), pair.engine.host_updates.apply

        def fail(update: Any) -> None:
            if update.group is not group:
                return apply(update)
            go.wait(60)
            with monkeypatch.context() as patch:
                patch.setattr(cpu, "update", refuse)
                apply(update)

        monkeypatch.setattr(pair.engine.host_updates, "apply", fail)
        return go

    return begin


@BOTH_DTYPES
@pytest.mark.parametrize("committed", [False, True])
def test_an_update_that_looks_ahead_and_fails_breaks_the_model(
    committed: bool, dtype: torch.dtype, twins: Callable[..., Twins], failing: Callable[..., threading.Event]
):
    """It was making the step that states lack, where they are. ``committed``: its own step has come by then."""
    pair = twins("host", dtype)
    pair.steps(range(2))
    pair.engine.worker.drain()
    group, expected = pair.engine.groups[2], {each: weights_of(pair, each) for each in pair.engine.groups}
    go = failing(pair, group)
    loss_of(pair.model, 5).backward()
    if committed:
        pair.ours.step()
        go.set()
        with pytest.raises(OSError, match="said no"):
            pair.engine.finish()
    else:
        go.set()
        with pytest.raises(OSError, match="said no"):
            pair.engine.worker.drain()
    for use in (pair.ours.step, pair.model.state_dict, pair.ours.state_dict):
        with pytest.raises(StaleTensor, match="a step behind others: go on from a checkpoint"):
            for _ in range(20):
                with suppress(OSError):
                    use()
    assert all(map(torch.equal, weights_of(pair, group), expected[group]))
    if not committed:
        assert all(all(map(torch.equal, weights_of(pair, each), kept)) for each, kept in expected.items())


@BOTH_DTYPES
def test_a_first_update_that_looks_ahead_and_fails_changes_nothing(
    dtype: torch.dtype, twins: Callable[..., Twins], failing: Callable[..., threading.Event], monkeypatch
):
    """Its states lack no step, and are only read: who gives the gradients up goes on."""
    pair = twins("host", dtype)
    apply = pair.engine.host_updates.apply
    go = failing(pair, pair.engine.groups[2])
    loss_of(pair.model, 5).backward()
    go.set()
    with pytest.raises(OSError, match="said no"):
        pair.engine.worker.drain()
    monkeypatch.setattr(pair.engine.host_updates, "apply", apply)
    pair.ours.zero_grad()
    pair.assert_weights()
    pair.steps(range(3))
    pair.assert_states()


# -- races -------------------------------------------------------------------------------------------------------------


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


@in_both_types
@pytest.mark.parametrize("redone", ["every", "some", "no"])
def test_delays_change_no_bit(
    redone: str, update: str | float, dtype: torch.dtype, delays: None, twins: Callable[..., Twins]
):
    """Speculation on steps that clip fails at every, some and no steps; now and then one does not come, or is read."""
    pair, chance = twins(update, dtype, max_grad_norm=1e3), random.Random(1)
    pair.engine.step_control.follow_clipping = False
    for seed in range(16):
        clips = {"every": True, "some": chance.random() < 0.5, "no": False}[redone]
        pair.limit(1e-2 if clips else 1e3)
        pair.backward(seed)
        if chance.random() < 0.15:
            pair.zero_grad()
            continue
        pair.step_late() if clips else pair.step()
        if chance.random() < 0.15:
            pair.ours.state_dict()
        if chance.random() < 0.15:
            pair.assert_weights()
    pair.assert_states()


def test_a_sum_that_the_worker_has_yet_to_add_to_is_not_taken_for_another(twins: Callable[..., Twins]):
    """Of fp32 gradients, one range holds sums, too: it becomes the last step's while what is added to it waits."""
    pair, go = twins("host", torch.float32, host_kib=2048), threading.Event()
    pair.backward(0)
    pair.step_any(zero=False)
    pair.zero_grad(set_to_none=False)
    pair.engine.worker.drain()
    pair.engine.worker.submit(go.wait, 60)
    timer = threading.Timer(1.0, go.set)  # whatever waits for the worker goes on
    timer.start()
    pair.backward(1)  # is added to zeros
    pair.step_any(zero=False)
    pair.zero_grad(set_to_none=False)
    go.set()
    timer.cancel()
    pair.backward(2)
    pair.step_any()
    pair.assert_states()


@pytest.mark.each_value
@BOTH_DTYPES
@pytest.mark.parametrize("copies", [0, 1, 4, 8])
def test_an_update_that_is_refused_in_its_middle_is_not_made_again(
    copies: int, dtype: torch.dtype, twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch
):
    """Some pieces have made the step that states lack by then, in storage: the model says so, or is right."""
    pair = twins("device", dtype)
    pair.steps(range(2))
    queues, left = pair.engine.level0._lane._queues, iter(range(copies))
    copy_pieces = queues.copy

    def copy_some(*given: Any) -> Any:
        return copy_pieces(*given) if next(left, None) is not None else refuse()

    monkeypatch.setattr(queues, "copy", copy_some)
    with pytest.raises(OSError, match="said no"):
        loss_of(pair.model, 5).backward()
    monkeypatch.setattr(queues, "copy", copy_pieces)
    with suppress(StaleTensor):
        pair.ours.zero_grad()
        for seed in range(6, 8):
            pair.backward(seed)
            pair.step_any()
        pair.assert_states()
