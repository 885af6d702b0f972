"""Models, stacks and a training loop for the tests of stated formats of optimizer states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.offload.conftest import ROOMY_BYTES, MakeStack
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.api import enable_vgpu_stack_optimization
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.state import ParameterState

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


# Level-0 bytes and placement. At 480 KiB the ring is one buffer of two or three stretches; a group of 59 k elements
# passes in pieces.
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"fast": 8 << 20, "placement": "resident"},
    "tight": {"fast": 480 << 10, "placement": "streamed"},
    "roomy": {"fast": 8 << 20, "placement": "streamed"},
    "disk": {"fast": 900 << 10, "placement": "streamed", "host": 1600 << 10},
    "kept": {"fast": 2 << 20, "placement": "streamed", "resident_bytes": "1MiB", "update": "device"},
}


def place(model: nn.Module, form: Form, where: str, make_stack: MakeStack, **more: Any) -> nn.Module:
    given = dict(PLACES[where])
    fast = given.pop("fast")
    if where == "tight" and form.dtype is None:
        fast *= 2
    host = given.pop("host", ROOMY_BYTES)
    if where == "disk" and form.masters == "stochastic":
        host -= 400 << 10
    stack = make_stack(fast, host)
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


class Vectors(nn.Module):
    """Groups of parameters of any lengths; the loss pulls each to another point."""

    def __init__(self, sizes: list[list[int]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.blocks = nn.ModuleList(Block([torch.randn(size, generator=generator) for size in row]) for row in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum()


class Block(nn.Module):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([((value.float() - x) ** 2 * value.float().cos()).sum() for value in self.values]).sum()


def stack_of(fast_bytes: int) -> VGPUStack:
    levels = [{"capacity_mb": size / (1 << 20), "device": "cpu"} for size in (fast_bytes, ROOMY_BYTES)]
    return VGPUStack({"levels": levels})


class Embedded(nn.Module):
    """An embedding that is larger than a small level 0, before layers that are not."""

    def __init__(self, rows: int = 5001) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(rows, 97)
        self.layers = nn.ModuleList(nn.Linear(97, 97) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.float().square().mean()
