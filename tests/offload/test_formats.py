"""Stated formats of optimizer states: one result wherever the bytes live, in what order and in what pieces they are updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.offload.conftest import MakeStack
from vblackwell.offload.enable import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.resident import Resident
from vblackwell.offload.state import ParameterState, export_state

BF16 = torch.bfloat16
LIMIT = 3.5  # of gradient norms: of the models here, about half the steps exceed it


@dataclass(frozen=True)
class Form:
    """How a model is kept."""

    states: str
    masters: str
    dtype: torch.dtype | None

    @property
    def given(self) -> dict[str, Any]:
        return {"states": self.states, "masters": self.masters, "compute_dtype": self.dtype}


PACKED = [Form("8bit", "exact", BF16), Form("8bit", "exact", None), Form("8bit", "stochastic", BF16)]
FORMS = [*PACKED, Form("fp32", "exact", BF16)]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.states}-{form.masters}-{form.dtype}")
packed_form = pytest.mark.parametrize("form", PACKED, ids=lambda form: f"{form.states}-{form.masters}-{form.dtype}")


class Odd(nn.Module):
    """Layers of lengths that are multiples of nothing, several pieces of the ring each; 0.24 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(97, 301), nn.GELU(), nn.Linear(301, 97)) for _ in range(4))
        self.head = nn.Linear(97, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 97, generator=generator), torch.randint(7, (16,), generator=generator)
    first = next(model.parameters())
    return nn.functional.cross_entropy(model(x.to(first.device, first.dtype)).float(), y.to(first.device))


# Level-0 bytes and placement. At 480 KiB the ring is one buffer of two or three stretches; a group of 59 k elements passes in pieces.
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"fast": 8 << 20, "placement": "resident"},
    "tight": {"fast": 480 << 10, "placement": "streamed"},
    "roomy": {"fast": 8 << 20, "placement": "streamed"},
    "disk": {"fast": 900 << 10, "placement": "streamed", "host": 1600 << 10},
    "kept": {"fast": 2 << 20, "placement": "streamed", "resident_bytes": "1MiB"},
}


def place(model: nn.Module, form: Form, where: str, make_stack: MakeStack, **more: Any) -> nn.Module:
    given = dict(PLACES[where])
    fast = given.pop("fast")
    if where == "tight" and form.dtype is None:
        fast *= 2
    stack = make_stack(fast, given.pop("host", 64 << 20))
    return enable_vgpu_stack_optimization(model, stack, **given, **form.given, **more)


def optimizer_of(model: nn.Module, **more: Any) -> VGPUAdamW:
    given = {"lr": 3e-3, "betas": (0.9, 0.95), "max_grad_norm": LIMIT, "update_in_backward": True} | more
    return VGPUAdamW(model.parameters(), **given)


def train(model: nn.Module, optimizer: VGPUAdamW, steps: range, accumulation: int = 1) -> list[tuple[float, ...]]:
    """(loss, norm) of each step."""
    seen: list[tuple[float, ...]] = []
    for step in steps:
        losses = []
        for micro in range(accumulation):
            loss = loss_of(model, 100 * step + micro) / accumulation
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        norm = optimizer.grad_norm
        seen.append((*losses, -1.0 if norm is None else norm))
    return seen


def assert_same_states(mine: dict[str, ParameterState], its: dict[str, ParameterState]) -> None:
    assert list(mine) == list(its)
    for name, state in mine.items():
        assert set(state) == set(its[name]) == {"weight", "exp_avg", "exp_avg_sq", "step"}
        for key, value in state.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, its[name][key]), (name, key)


@pytest.mark.parametrize("where", ["tight", "roomy", "disk", "kept"])
@each_form
def test_streamed_is_resident(form: Form, where: str, make_stack: MakeStack):
    found = []
    for place_of in ("resident", where):
        model = place(Odd(), form, place_of, make_stack)
        optimizer = optimizer_of(model)
        seen = train(model, optimizer, range(8))
        found.append((seen, dict(export_state(model, optimizer))))
        engine = offload_of(model)
        assert isinstance(engine, Resident if place_of == "resident" else Offload)
    assert found[0][0] == found[1][0]
    assert_same_states(found[0][1], found[1][1])
    clipped = [norm > LIMIT for *_, norm in found[0][0]]
    assert any(clipped) and not all(clipped), found[0][0]  # both branches
