"""Models on the meta device: filled where they will live, never twice in RAM,
and then as if they had been built with these values.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.offload.conftest import ROOMY_BYTES, MakeStack
from tests.offload.models import CASES, Case, build
from tests.offload.storage.format_cases import BF16, Form, Odd, assert_same_states, loss_of
from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.state import export_state

BY_NAME = {case.name: case for case in CASES}


def on_meta(case: Case) -> nn.Module:
    with torch.device("meta"):
        return build(case)


def filling(real: nn.Module) -> tuple[Callable[[str, torch.Tensor], None], list[str]]:
    """An ``initialize`` that copies ``real``'s values; the names that it was called with."""
    values = dict(real.named_parameters()) | dict(real.named_buffers())
    called: list[str] = []

    def initialize(name: str, tensor: torch.Tensor) -> None:
        assert tensor.device.type == "cpu" and not tensor.requires_grad and not tensor.is_inference()
        assert tensor.shape == values[name].shape and tensor.dtype == values[name].dtype
        called.append(name)
        tensor.copy_(values[name].detach())

    return initialize, called


PLACES: dict[str, dict[str, Any]] = {
    "resident": {"fast": 8 << 20, "placement": "resident"},
    "streamed": {"fast": 160 << 10, "placement": "streamed"},
    "level0": {"fast": 512 << 10, "placement": "streamed", "update": "device"},
    "kept": {"fast": 1 << 20, "placement": "streamed", "update": "device", "resident_bytes": "256KiB"},
    "disk": {"fast": 512 << 10, "placement": "streamed", "update": "device", "host": 0.75},
    "disk-host": {"fast": 160 << 10, "placement": "streamed", "update": "host", "host": 0.75},
}


def train(model: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor], **more: Any) -> tuple[list[float], Any]:
    optimizer = VGPUAdamW(model.parameters(), lr=1e-2, **more)
    losses = []
    for step in range(3):
        torch.manual_seed(step)  # dropout
        value = loss(model, step)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, dict(export_state(model, optimizer))


def placed(model: nn.Module, where: str, make_stack: MakeStack, **more: Any) -> nn.Module:
    given = dict(PLACES[where])
    fast, host = given.pop("fast"), given.pop("host", None)
    total = sum(param.numel() for param in model.parameters())
    host_bytes = ROOMY_BYTES if host is None else int(host * 16 * total)
    return enable_vgpu_stack_optimization(model, make_stack(fast, host_bytes), **given, **more)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "where", "dtype"),
    [
        (name, where, dtype)
        for name in ("decoder", "gpt2")
        for where, dtype in zip(PLACES, [None, BF16] * 3, strict=True)
    ]
    + [("gpt2", "disk", None), ("decoder", "disk-host", BF16), ("vit", "resident", None), ("vit", "streamed", None)],
    ids=str,
)
def test_it_trains_as_one_that_was_built_with_the_values(name, where, dtype, make_stack: MakeStack):
    """Tied heads (gpt2), buffers (gpt2), bare parameters and a convolution (vit)."""
    case = BY_NAME[name]
    real, found = build(case), []
    initialize, called = filling(real)
    for model in (on_meta(case), build(case)):
        meta = any(param.is_meta for param in model.parameters())
        same, names = list(model.parameters()), [each for each, _ in model.named_parameters()]
        placed(model, where, make_stack, compute_dtype=dtype, initialize=initialize if meta else None)
        assert all(a is b for a, b in zip(model.parameters(), same, strict=True)), "parameters stay the same objects"
        assert [each for each, _ in model.named_parameters()] == names, "ties stay"
        found.append(train(model, case.loss, update_in_backward=True))
        if "disk" in where:
            assert sum(row[2] for row in offload_of(model).summary()["bytes_by_level"].values()) > 0
    assert sorted(called) == sorted(
        [each for each, _ in real.named_parameters()] + [each for each, _ in real.named_buffers()]
    )
    assert found[0][0] == found[1][0]
    assert_same_states(found[0][1], found[1][1])


@pytest.mark.each_value
@pytest.mark.parametrize(
    "form", [Form("8bit", "exact", BF16), Form("8bit", "stochastic", BF16), Form("8bit", "exact", None)]
)
@pytest.mark.parametrize("where", ["resident", "level0", "disk"])
def test_stated_formats(form: Form, where: str, make_stack: MakeStack):
    real = Odd()
    initialize, _ = filling(real)
    found = []
    for model in (Odd(), Odd()):
        given = {}
        if not found:
            model, given = model.to("meta"), {"initialize": initialize}
        stack = make_stack(
            8 << 20 if where == "resident" else 1500 << 10, 1450 << 10 if where == "disk" else ROOMY_BYTES
        )
        if where == "disk" and form.dtype is None:
            stack = make_stack(3 << 20, 1500 << 10)
        enable_vgpu_stack_optimization(
            model, stack, placement="resident" if where == "resident" else "streamed", **form.given, **given
        )
        found.append(train(model, loss_of, update_in_backward=True))
        if where == "disk":
            assert stack.levels[2].used_bytes > 0
    assert found[0][0] == found[1][0]
    assert_same_states(found[0][1], found[1][1])


def test_narrow_parameters_are_filled_where_they_live_and_have_no_remainder(make_stack: MakeStack):
    """bf16 parameters on meta: the callback writes into the stored range itself, whatever lay there before."""
    stack = make_stack(1 << 20)
    used = stack.reserve("before", 2 << 20, 1)
    used.view().fill_(255)  # the slab is used again
    stack.unreserve(used)
    real = Odd().to(BF16)
    initialize, _ = filling(real)
    model = Odd().to("meta", BF16)
    places: list[int] = []

    def note(name: str, tensor: torch.Tensor) -> None:
        assert tensor.isnan().all()
        places.append(tensor.data_ptr())
        initialize(name, tensor)

    enable_vgpu_stack_optimization(model, stack, placement="streamed", update="device", initialize=note)
    engine = offload_of(model)
    for slot in engine.slots():
        assert slot.view(engine.storage.range(slot.group, "weight").view()).data_ptr() in places
        remainder = slot.flat(engine.storage.range(slot.group, "remainder").view(), torch.int16)
        assert not remainder.any()
    for name, state in export_state(model):
        assert torch.equal(state["weight"], dict(real.named_parameters())[name].float())


def test_wide_parameters_keep_their_remainder(make_stack: MakeStack):
    real = Odd()
    model = Odd().to("meta")
    enable_vgpu_stack_optimization(
        model,
        make_stack(1 << 20),
        placement="streamed",
        update="device",
        compute_dtype=BF16,
        initialize=filling(real)[0],
    )
    for name, state in export_state(model):
        assert torch.equal(state["weight"], dict(real.named_parameters())[name])
    release(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), real.parameters(), strict=True))
    assert all(type(param) is nn.Parameter and not param.is_meta for param in model.parameters())


def test_groups_of_several_types(make_stack: MakeStack):
    """One group in fp32 and bf16: both kinds of truth in one set of ranges."""
    found = []
    for meta in (True, False):
        real, model = Odd(), Odd()
        for each in (real, model):
            each.layers[2][2].to(BF16)
        given = {"initialize": filling(real)[0]} if meta else {}
        if meta:
            model.to("meta")
        enable_vgpu_stack_optimization(model, make_stack(1 << 20), placement="streamed", **given)
        found.append({name: state["weight"] for name, state in export_state(model)})
    assert list(found[0]) == list(found[1])
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_some_parameters_may_be_real(make_stack: MakeStack):
    real, model = Odd(), Odd()
    model.head.to("meta")
    initialize, called = filling(real)
    enable_vgpu_stack_optimization(model, make_stack(1 << 20), placement="streamed", initialize=initialize)
    assert called == ["head.weight", "head.bias"]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(model.parameters(), real.parameters(), strict=True))


class Layouts(nn.Module):
    """A parameter whose memory is not row-major, a child of Parameter with an attribute, shared buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3, 5, 5, device="meta").to(memory_format=torch.channels_last))
        self.named = Named(torch.empty(7, device="meta"))
        self.named.note = "kept"
        self.inner = nn.BatchNorm1d(3, device="meta")
        self.other = nn.Module()
        self.other.register_buffer("again", self.inner.running_mean)
        self.frozen = nn.Parameter(torch.empty(3, dtype=torch.int64, device="meta"), requires_grad=False)


class Named(nn.Parameter):
    note: str


@pytest.mark.parametrize("placement", ["resident", "streamed"])
def test_what_else_a_model_has(placement: str, make_stack: MakeStack):
    model, seen = Layouts(), {}

    def initialize(name: str, tensor: torch.Tensor) -> None:
        seen[name] = tensor.stride()
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))

    enable_vgpu_stack_optimization(model, make_stack(1 << 20), placement=placement, initialize=initialize)
    assert seen["weight"] == (75, 1, 15, 3)
    assert "other.again" not in seen and model.other.again is model.inner.running_mean
    assert model.inner.running_mean.tolist() == [0, 1, 2] and model.inner.num_batches_tracked.item() == 0
    assert model.named.note == "kept" and model.frozen.tolist() == [0, 1, 2] and not model.frozen.requires_grad
    release(model)
    assert torch.equal(model.weight.detach().flatten(), torch.arange(300.0)) and type(model.named) is Named


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["resident", "streamed", "auto"])
def test_nobody_to_fill_it(placement: str, make_stack: MakeStack):
    stack = make_stack(8 << 20)
    with pytest.raises(
        ConfigurationError, match=r"'layers\.0\.0\.weight' of Odd is on the meta device.*give\s+initialize=function"
    ):
        enable_vgpu_stack_optimization(Odd().to("meta"), stack, placement=placement)
    with pytest.raises(ConfigurationError, match="nothing of Odd is"):
        enable_vgpu_stack_optimization(Odd(), stack, placement=placement, initialize=lambda name, tensor: None)
    hooked = Odd().to("meta")
    hooked.head.bias.register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigurationError, match=r"'head\.bias'.*hooks"):
        enable_vgpu_stack_optimization(hooked, stack, placement=placement, initialize=lambda name, tensor: None)
    assert all(level.used_bytes == 0 for level in stack.levels)


@pytest.mark.parametrize("placement", ["resident", "streamed"])
def test_a_callback_that_fails_leaves_everything_as_it_was(placement: str, make_stack: MakeStack):
    stack, model, real = make_stack(8 << 20), Odd().to("meta"), Odd()
    good, called = filling(real)

    def fail(name: str, tensor: torch.Tensor) -> None:
        if name == "head.weight":
            raise OSError("the checkpoint is gone")
        good(name, tensor)

    def forget(name: str, tensor: torch.Tensor) -> None:
        if name != "layers.3.0.bias":
            good(name, tensor)

    for wrong, error, text in (
        (fail, OSError, "checkpoint is gone"),
        (forget, ConfigurationError, r"left 'layers\.3\.0\.bias' of shape \(301,\) unfilled"),
    ):
        with pytest.raises(error, match=text):
            enable_vgpu_stack_optimization(model, stack, placement=placement, initialize=wrong)
        assert all(param.is_meta and type(param) is nn.Parameter for param in model.parameters())
        assert offload_of(model) is None and all(level.used_bytes == 0 for level in stack.levels)
    enable_vgpu_stack_optimization(model, stack, placement=placement, initialize=good)
    assert {name: state["weight"].sum() for name, state in export_state(model)} == {
        name: param.detach().sum() for name, param in real.named_parameters()
    }


# -- memory ------------------------------------------------------------------------------------------------------------


FILL = """
import ctypes, gc
from pathlib import Path
import torch
from torch import nn
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.api import enable_vgpu_stack_optimization

def memory(key):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) << 10

def fill(width, count, host_mib):
    with torch.device("meta"):
        layers = (nn.Linear(width, width, bias=False, dtype=getattr(torch, sys.argv[1])) for _ in range(count))
        model = nn.Sequential(nn.ModuleList(layers))
    block = torch.randn(width)
    ram = [{"device": "cpu", "capacity_mb": size} for size in (16, host_mib)]
    stack = VGPUStack({"levels": [*ram, {"device": "ssd", "capacity_mb": 64, "path": "."}]})
    gc.collect()
    libc.malloc_trim(0)  # so that nothing finds room that counts already
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    enable_vgpu_stack_optimization(
        model, stack, placement="streamed", update="device", compute_dtype=torch.bfloat16,
        initialize=lambda name, tensor: tensor.copy_(block),
    )
    return memory("VmHWM") - before, stack

torch.set_num_threads(1)
libc = ctypes.CDLL(None)
libc.mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD, which no longer grows: memory of tensors that are gone is gone
fill(64, 2, 1)  # loads what loads at its first use
taken, stack = fill(1024, 24, 96)
print(taken, *(level.used_bytes for level in stack.levels))
stack.close()
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not reset peaks")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_host_never_holds_it_twice(dtype: str, program: Callable[..., str]):
    """The process grows by the ranges (96 MiB), level 0 (RAM too) and one parameter at a time (4 MiB, and twice as much
    while it is split), not by the model once more (96 or 48). 8 MiB are for what the kernel counts late.

    A separate process: in one that ran other tests, what they had freed decides how much of the heap stays.
    """
    taken, ring, ranges, on_disk = map(int, program(FILL, dtype).split())
    assert (ranges, on_disk) == (96 << 20, 0)
    assert 90 << 20 < taken < ranges + ring + ((4 + 8 + 8) << 20)


def test_activations_have_room_where_states_spill(make_stack: MakeStack):
    """States fill RAM before they spill; what is said to be for activations stays free."""
    real = Odd()
    total = sum(param.numel() for param in real.parameters())
    for aside in (0, 1 << 20):
        stack = make_stack(2 << 20, host_bytes=int(11 * total), disk_bytes=64 << 20)
        model = Odd()
        enable_vgpu_stack_optimization(
            model, stack, placement="streamed", update="device", activations="host", activation_bytes=aside
        )
        optimizer = VGPUAdamW(model.parameters(), update_in_backward=True, undo=False)
        assert stack.levels[2].used_bytes > 0
        free = stack.levels[1].capacity_bytes - stack.levels[1].used_bytes
        assert (free >= aside) if aside else free < 1 << 19
        loss_of(model, 0).backward()
        optimizer.step()
    with pytest.raises(InsufficientMemory):
        enable_vgpu_stack_optimization(
            Odd(),
            make_stack(2 << 20, int(4.5 * total), 4096),
            placement="streamed",
            update="device",
            activation_bytes="1MiB",
        )
