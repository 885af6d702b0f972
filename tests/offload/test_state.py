"""What one stack wrote, any other stack reads, or none:
weights, moments and counts, and training that goes on alike.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, Case, build, equal
from vblackwell.errors import ConfigurationError, StaleTensor, Unsupported
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.state import ParameterState, export_state, import_state

MLP, DECODER, GPT2, T5, VIT = CASES
Place = Callable[[nn.Module], None]


def steps(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        torch.manual_seed(seed)
        loss = case.loss(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def optimizer_of(model: nn.Module) -> VGPUAdamW:
    return VGPUAdamW(model.parameters(), lr=3e-3, max_grad_norm=0.5, update_in_backward=True)


@pytest.mark.parametrize("case", [DECODER, pytest.param(GPT2, marks=pytest.mark.slow)], ids=lambda case: case.name)
def test_written_by_one_stack_read_by_another_and_by_none(case: Case, make_stack: MakeStack):
    def tight(model: nn.Module) -> None:
        enable_vgpu_stack_optimization(model, make_stack(110 << 10))

    def on_disk(model: nn.Module) -> None:  # weights stored in RAM, most of the rest in the file
        enable_vgpu_stack_optimization(model, make_stack(128 << 10, host_bytes=400 << 10))

    def resident(model: nn.Module) -> None:
        enable_vgpu_stack_optimization(model, make_stack(16 << 20))

    def plain(model: nn.Module) -> None:
        del model

    written: list[dict[str, ParameterState]] = []
    continued: list[list[float]] = []
    for place in (tight, on_disk, resident, plain):
        model = build(case)
        place(model)
        optimizer = optimizer_of(model)
        steps(case, model, optimizer, range(4))
        written.append(dict(export_state(model, optimizer)))
        continued.append(steps(case, model, optimizer, range(4, 7)))
        release(model)
    names = [name for name, _ in build(case).named_parameters()]
    for state in written:
        assert list(state) == names
        for name in names:
            assert set(state[name]) == {"weight", "exp_avg", "exp_avg_sq", "step"}
            assert all(torch.equal(state[name][key], written[0][name][key]) for key in state[name]), name
    for place, state in zip((plain, resident, on_disk, tight), written, strict=True):
        model = build(case, seed=77)
        place(model)
        optimizer = optimizer_of(model)
        import_state(model, optimizer, state.__getitem__)
        assert steps(case, model, optimizer, range(4, 7)) == continued[0]
        release(model)
    assert all(losses == continued[0] for losses in continued)


def test_optimizer_state_dict_is_torchs(make_stack: MakeStack):
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(128 << 10))
    ours = VGPUAdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    assert steps(MLP, model, ours, range(3)) == steps(MLP, plain, theirs, range(3))
    mine, reference = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == reference["param_groups"]
    assert set(mine["state"]) == set(reference["state"])
    for index, expected in reference["state"].items():
        assert all(torch.equal(mine["state"][index][key], expected[key]) for key in expected)

    # Across: each loads what the other wrote, and both go on alike.
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(copy.deepcopy(reference))
    other = build(MLP)
    other.load_state_dict(plain.state_dict())
    fresh = torch.optim.AdamW(other.parameters(), fused=True)
    fresh.load_state_dict(copy.deepcopy(mine))
    expected_losses = steps(MLP, plain, theirs, range(3, 6))
    assert steps(MLP, model, ours, range(3, 6)) == expected_losses
    assert steps(MLP, other, fresh, range(3, 6)) == expected_losses


def test_learning_rate_schedulers_drive_it(make_stack: MakeStack):
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(128 << 10))
    ours = VGPUAdamW(model.parameters(), lr=3e-3, update_in_backward=True)
    theirs = torch.optim.AdamW(plain.parameters(), lr=3e-3, fused=True)
    for module, optimizer in ((model, ours), (plain, theirs)):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for step in range(5):
            MLP.loss(module, step).backward()
            if step == 2:
                optimizer.param_groups[0]["lr"] *= 0.5  # after backward: early updates used the old rate
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_foreign_checkpoint_is_refused(make_stack: MakeStack):
    model = build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(128 << 10))
    with pytest.raises(ConfigurationError, match="no weight for 'layers.0.0.weight'"):
        import_state(model, None, lambda name: {})
    with pytest.raises(ConfigurationError, match=r"\(3,\).*\(96, 48\)"):
        import_state(model, None, lambda name: {"weight": torch.zeros(3)})


@pytest.mark.parametrize("placement", ["streamed", "resident"])
@pytest.mark.parametrize("clipped", [{}, {"max_grad_norm": 0.5}], ids=["as they are", "clipped"])
def test_an_optimizer_from_before_the_stack_says_what_to_do(placement: str, clipped: dict, make_stack: MakeStack):
    """And nothing has changed; what it says works, and goes on as if nothing had been between the steps."""
    level0 = 128 << 10 if placement == "streamed" else 16 << 20
    plain, model = build(MLP), build(MLP)
    steps(MLP, plain, VGPUAdamW(plain.parameters(), lr=3e-3, **clipped), range(3))
    enable_vgpu_stack_optimization(model, make_stack(level0), placement=placement)
    before = VGPUAdamW(model.parameters(), lr=3e-3, **clipped)
    steps(MLP, model, before, range(2))
    release(model)
    enable_vgpu_stack_optimization(model, make_stack(level0), placement=placement)

    MLP.loss(model, 2).backward()
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(before.state_dict())
    for options in ({}, {"only": [next(model.parameters())]}):
        with pytest.raises(Unsupported, match="'model' went into its stack after .* make a new VGPUAdamW .*load_state"):
            before.step(**options)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for index, state in before.state_dict()["state"].items():
        assert all(torch.equal(value, states["state"][index][key]) for key, value in state.items())

    after = VGPUAdamW(model.parameters(), **clipped)
    after.load_state_dict(before.state_dict())
    after.step()
    assert equal(model, plain)


@pytest.mark.parametrize("placement", ["streamed", "resident"])
def test_states_from_before_the_stack_become_8_bit(placement: str, make_stack: MakeStack):
    model = build(MLP)
    before = VGPUAdamW(model.parameters())
    steps(MLP, model, before, range(1))
    states = copy.deepcopy(before.state_dict())
    narrow = {"compute_dtype": torch.bfloat16, "states": "8bit"}
    enable_vgpu_stack_optimization(model, make_stack(1 << 20), placement=placement, **narrow)
    kept = before.state_dict()
    after = VGPUAdamW(model.parameters())
    after.load_state_dict(kept)
    for index, state in after.state_dict()["state"].items():
        wanted = states["state"][index]
        assert all(torch.equal(kept["state"][index][key], value) for key, value in wanted.items())
        assert state["step"] == wanted["step"] == 1
        # Codes lie 2^-4 of their value apart; what is under 1/1984 of the largest of its block may become zero.
        limit = wanted["exp_avg"].abs() / 16 + wanted["exp_avg"].abs().max() / 1984
        assert bool(((state["exp_avg"] - wanted["exp_avg"]).abs() <= limit).all())


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def opened(value: bytes, weights_only: bool = True) -> Any:
    return torch.load(io.BytesIO(value), weights_only=weights_only)


@pytest.mark.parametrize("placement", ["streamed", "resident"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_pickled_is_plain(placement: str, dtype: torch.dtype, make_stack: MakeStack):
    """Of a model in a stack, whatever its placement: by torch.save, pickle and deepcopy, whole or its parameters."""
    model = build(MLP).to(dtype)
    model.head.bias.note = "kept"
    level0 = 128 << 10 if placement == "streamed" else 16 << 20
    enable_vgpu_stack_optimization(model, make_stack(level0), placement=placement)
    optimizer = VGPUAdamW(model.parameters())
    nn.functional.mse_loss(model(torch.ones(2, 48, dtype=dtype)), torch.zeros(2, 7, dtype=dtype)).backward()
    optimizer.step()
    params = list(model.parameters())
    keys = [name for name, _ in model.named_parameters()]

    whole = saved(model)
    models = [opened(whole, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    lists = [opened(saved(params)), pickle.loads(pickle.dumps(params)), copy.deepcopy(params)]
    states = [opened(saved(model.state_dict(keep_vars=True))), opened(saved(model.state_dict()))]
    assert all(equal(made, model) and offload_of(made) is None for made in models)
    assert all(list(state) == keys for state in states)
    lists += [list(made.parameters()) for made in models] + [list(state.values()) for state in states[:1]]
    for made in lists:
        assert all(type(one) is nn.Parameter and one.requires_grad for one in made)
        assert all(one.dtype == dtype and torch.equal(one, kept) for one, kept in zip(made, params, strict=True))
        assert not any(name != "note" for one in made for name in vars(one))
    values = sum(param.numel() * param.itemsize for param in params)
    assert len(whole) < values + (64 << 10), "more than the weights was written"  # names, alignment, a zip's index

    for made in models:  # they train by themselves
        made(torch.ones(2, 48, dtype=dtype)).sum().backward()
        torch.optim.AdamW(made.parameters()).step()
        assert not equal(made, model)
    if placement == "resident":
        assert lists[0][-1].note == "kept"
    release(model)
    assert not any(name != "note" for param in model.parameters() for name in vars(param))


@pytest.mark.parametrize("host_bytes", [8 << 20, 400 << 10], ids=["RAM", "disk"])
def test_what_went_with_a_closed_stack_is_never_read_as_zeros(host_bytes: int, make_stack: MakeStack):
    model, stack = build(MLP), make_stack(110 << 10, host_bytes=host_bytes)
    enable_vgpu_stack_optimization(model, stack, placement="streamed")
    optimizer = optimizer_of(model)
    steps(MLP, model, optimizer, range(1))
    engine = offload_of(model)
    assert engine is not None
    engine.finish()  # an update that is under way ends as its disk does: cancelled
    stack.close()
    for read in (
        model.state_dict,
        optimizer.state_dict,
        lambda: dict(export_state(model)),
        lambda: copy.deepcopy(model),
        lambda: model.head.weight.sum(),
        lambda: MLP.loss(model, 0),
        lambda: release(model),
    ):
        with pytest.raises((StaleTensor, ConfigurationError), match="closed|step behind"):
            read()


def test_a_resident_model_outlives_its_stack(make_stack: MakeStack):
    plain = build(MLP)
    model, stack = copy.deepcopy(plain), make_stack(16 << 20)
    enable_vgpu_stack_optimization(model, stack, placement="resident")
    stack.close()
    expected = plain.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    release(model)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
