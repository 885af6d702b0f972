"""bf16 and fp16 compute weights over fp32 masters: one rounding, the same bits wherever the bytes live."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build
from vblackwell.errors import Unsupported
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.layout.forecast import forecast_step
from vblackwell.offload.layout.placement import StreamingOptions
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.state import export_state, import_state
from vblackwell.offload.storage.masters import round_from_fp32

MLP, DECODER, GPT2, T5, VIT = CASES


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_rounding_is_nearest_with_ties_away_and_splits_exactly(values: list[float]):
    wide = torch.tensor(values, dtype=torch.float32)
    narrow = torch.empty(len(values), dtype=torch.bfloat16)
    round_from_fp32(wide, narrow)
    bits = wide.view(torch.int32)
    # The master is the weight's bits and a signed 16-bit remainder, exactly: what a split master relies on.
    remainder = bits - (narrow.view(torch.int16).to(torch.int32) << 16)
    assert bool(((remainder >= -0x8000) & (remainder < 0x8000)).all())
    finite = narrow.isfinite()
    even = wide.to(torch.bfloat16)
    tie = (bits & 0xFFFF) == 0x8000
    assert torch.equal(narrow[finite & ~tie], even[finite & ~tie])
    assert bool((narrow[finite & tie].abs().float() >= wide[finite & tie].abs()).all())


def reference_step(
    masters: dict[str, torch.Tensor],
    moments: dict[str, list[torch.Tensor]],
    model: nn.Module,
    count: int,
    max_norm: float,
) -> float:
    """The same step written plainly, a tensor at a time:
    norms of fp32 gradients, clip, fused AdamW on masters, round.
    """
    grads = {name: param.grad.float() for name, param in model.named_parameters()}
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads.values()]))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for name, param in model.named_parameters():
        torch._fused_adamw_(
            [masters[name]],
            [grads[name] * factor],
            [moments[name][0]],
            [moments[name][1]],
            [],
            [torch.tensor(float(count))],
            lr=3e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        round_from_fp32(masters[name].reshape(-1), param.data.view(-1))
        param.grad = None
    return norm.item()


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["tight", "roomy", "resident"])
def test_masters_are_the_truth(dtype: torch.dtype, where: str, make_stack: MakeStack):
    wide = build(DECODER)
    model = copy.deepcopy(wide)
    level0 = {"tight": 64 << 10, "roomy": 4 << 20, "resident": 4 << 20}[where]
    placement = "resident" if where == "resident" else "streamed"
    enable_vgpu_stack_optimization(model, make_stack(level0), placement=placement, compute_dtype=dtype)
    assert all(param.dtype == dtype for param in model.parameters())
    optimizer = VGPUAdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0, update_in_backward=True)

    masters = {name: param.detach().clone() for name, param in wide.named_parameters()}
    moments = {name: [torch.zeros_like(master), torch.zeros_like(master)] for name, master in masters.items()}
    plain = build(DECODER).to(dtype)
    for name, param in plain.named_parameters():
        round_from_fp32(masters[name].reshape(-1), param.data.view(-1))
    for step in range(1, 5):
        loss = DECODER.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = DECODER.loss(plain, step)
        expected.backward()
        norm = reference_step(masters, moments, plain, step, 1.0)
        assert loss.item() == expected.item() and optimizer.grad_norm == norm
    exported = {name: state["weight"] for name, state in export_state(model, optimizer)}
    assert all(torch.equal(exported[name], masters[name]) for name in masters)
    if where != "resident":
        assert (
            sum(offload_of(model).summary()["bytes_by_level"]["remainder" if dtype == torch.bfloat16 else "master"]) > 0
        )
    release(model)
    assert all(torch.equal(param, masters[name]) for name, param in model.named_parameters())


def write(model: nn.Module, how: str, value: float) -> None:
    if how == "load_state_dict":
        model.load_state_dict({name: torch.full_like(old, value) for name, old in model.state_dict().items()})
    for param in model.parameters():
        if how == "init":
            nn.init.constant_(param, value)
        elif how == "fill_":
            with torch.no_grad():
                param.fill_(value)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])  # a split master, a whole one
@pytest.mark.parametrize("how", ["load_state_dict", "init", "fill_"])
def test_what_is_written_in_place_is_the_master(dtype: torch.dtype, how: str, make_stack: MakeStack):
    ended = {}
    for placement, level0 in (("resident", 1 << 20), ("streamed", 96 << 10)):
        model = build(MLP)
        enable_vgpu_stack_optimization(model, make_stack(level0), placement=placement, compute_dtype=dtype)
        optimizer = VGPUAdamW(model.parameters(), lr=3e-3)
        x = torch.randn(16, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()  # the masters now have low bits that the weights lack
        optimizer.zero_grad()
        write(model, how, 0.25)  # all of whose bits any of the types holds
        assert all(bool((state["weight"] == 0.25).all()) for _, state in export_state(model, optimizer))
        write(model, how, 1 / 64)  # sums of 0.25 would leave fp16
        for _ in range(2):  # the second keeps what the first gave the master
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        written = {name: state["weight"] for name, state in export_state(model, optimizer)}
        write(model, how, 0.25)
        import_state(model, optimizer, lambda name, written=written: {"weight": written[name]})  # the later one counts
        release(model)
        assert all(torch.equal(param, written[name]) for name, param in model.named_parameters())
        ended[placement] = written
    low_bits = torch.cat([weight.flatten() for weight in ended["resident"].values()])
    assert bool(low_bits.isfinite().all()) and not torch.equal(low_bits, low_bits.to(dtype).float())
    assert all(torch.equal(weight, ended["streamed"][name]) for name, weight in ended["resident"].items())


def test_micro_batches_sum_in_fp32(make_stack: MakeStack):
    model = build(MLP)
    plain = build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(96 << 10), compute_dtype=torch.bfloat16)
    for param in plain.parameters():
        wide = param.data
        param.data = torch.empty_like(wide, dtype=torch.bfloat16)
        round_from_fp32(wide.reshape(-1), param.data.view(-1))
    optimizer = VGPUAdamW(model.parameters(), max_grad_norm=float("inf"))
    sums = {name: torch.zeros(param.shape) for name, param in plain.named_parameters()}

    def loss_of(module: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(16, 48, generator=torch.Generator().manual_seed(seed)).bfloat16()
        return module(x).float().square().mean()

    for micro in range(3):
        loss_of(model, micro).backward()
        loss_of(plain, micro).backward()
        for name, param in plain.named_parameters():
            sums[name] += param.grad.float()
            param.grad = None
    optimizer.step()
    norms = torch.stack([torch.linalg.vector_norm(value) for value in sums.values()])
    assert optimizer.grad_norm == torch.linalg.vector_norm(norms).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_release_keeps_the_fp32_sum_of_micro_batches(dtype: torch.dtype, make_stack: MakeStack):
    released = {}
    for placement, level0 in (("resident", 1 << 20), ("streamed", 96 << 10)):
        model = build(MLP)
        enable_vgpu_stack_optimization(model, make_stack(level0), placement=placement, compute_dtype=dtype)
        for micro in range(2):
            x = torch.randn(16, 48, generator=torch.Generator().manual_seed(micro)).to(dtype)
            model(x).float().square().mean().backward()
        release(model)
        released[placement] = {name: param.grad for name, param in model.named_parameters()}
        assert all(param.grad.dtype == param.dtype == torch.float32 for param in model.parameters())
    sums = torch.cat([gradient.flatten() for gradient in released["resident"].values()])
    assert not torch.equal(sums, sums.to(dtype).float())
    assert all(torch.equal(gradient, released["streamed"][name]) for name, gradient in released["resident"].items())


class TwoLinears(nn.Module):
    """One layer group, of which a call may use a part."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ParameterList(nn.Parameter(torch.randn(48, 48) / 8) for _ in range(2))

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        return sum((x @ self.linears[int(which)] for which in used), x)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.parametrize(
    "micro_batches", [("0", "1"), ("1", "01"), ("01", "0", "01"), ("0", "0", "1"), ("01", "01", "1", "0")]
)
def test_micro_batches_sum_what_each_of_them_used(
    make_stack: MakeStack, dtype: torch.dtype | None, micro_batches: tuple[str, ...]
):
    """A gradient that is the first of its parameter joins sums of others of its group,
    and narrow ones move even if nothing joins them.
    """

    def build_layers() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList(TwoLinears() for _ in range(3))

    model, plain = build_layers(), build_layers()
    enable_vgpu_stack_optimization(
        model, make_stack(96 << 10), placement="streamed", compute_dtype=dtype, update="host"
    )
    assert len(offload_of(model).groups) == 3
    if dtype is not None:
        for param in plain.parameters():
            wide = param.data
            param.data = torch.empty_like(wide, dtype=dtype)
            round_from_fp32(wide.reshape(-1), param.data.view(-1))
    optimizer = VGPUAdamW(model.parameters(), max_grad_norm=float("inf"))
    sums = {name: torch.zeros(param.shape) for name, param in plain.named_parameters()}
    for seed, used in enumerate(micro_batches):
        start = torch.randn(16, 48, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for module in (model, plain):
            x = start
            for layer in module:
                x = layer(x, used)
            x.float().square().mean().backward()
        for name, param in plain.named_parameters():
            if param.grad is not None:
                sums[name] += param.grad.float()
                param.grad = None
    optimizer.step()
    norms = torch.stack([torch.linalg.vector_norm(value) for value in sums.values()])
    assert optimizer.grad_norm == torch.linalg.vector_norm(norms).item()


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_sums_that_rollback_needs_are_foreseen(make_stack: MakeStack, micro_batches: int):
    model, (level0, host) = build(DECODER), (512 << 10, 8 << 20)
    wishes = StreamingOptions(torch.bfloat16, update="device")
    capacities, undone = [level0, host], {"undo": True, "on_gpu": False}
    told = forecast_step(model, capacities, wishes, {}, micro_batches=micro_batches, **undone).bytes_by_level
    enable_vgpu_stack_optimization(
        model, make_stack(level0, host), placement="streamed", compute_dtype=torch.bfloat16, update="device"
    )
    optimizer = VGPUAdamW(model.parameters(), update_in_backward=True, accumulation_steps=micro_batches)
    for _ in range(2):
        for seed in range(micro_batches):
            DECODER.loss(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    real = offload_of(model).summary()["bytes_by_level"]
    assert sum(real["accumulated"]) > 0
    for kind in ("gradient", "accumulated"):
        assert told[kind] == real[kind][:2] and real[kind][2] == 0, kind  # nothing has to go to the disk


def test_updates_on_level0_are_refused_where_they_cannot_be(make_stack: MakeStack):
    """Asked for by name they are not quietly done elsewhere; 'auto' and a share leave the choice."""
    model, stack = nn.Linear(8, 8), make_stack(1 << 20)
    with pytest.raises(Unsupported, match="bf16 or fp32 alone, and 'Linear' has float16"):
        enable_vgpu_stack_optimization(model, stack, placement="streamed", compute_dtype=torch.float16, update="device")
    assert offload_of(model) is None and all(level.used_bytes == 0 for level in stack.levels)
    enable_vgpu_stack_optimization(model, stack, placement="streamed", compute_dtype=torch.float16, update=0.5)
