"""A step's work for the host grows with the number of parameters, not with its square: experts come in hundreds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.offload.conftest import MakeStack
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.optimizer import VGPUAdamW


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            x = x + expert(x)
        return x


class Mixture(nn.Module):
    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(experts) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def calls_of_a_step(make_stack: MakeStack, experts: int, update: str) -> int:
    """Python's and C's functions that the thread of the model calls in the third step."""
    model = Mixture(2, experts)
    enable_vgpu_stack_optimization(model, make_stack(2 << 20), placement="streamed", update=update)
    optimizer = VGPUAdamW(model.parameters(), max_grad_norm=1.0, update_in_backward=True)
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for step in range(3):
        if step == 2:
            sys.setprofile(note)
        try:
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            sys.setprofile(None)
    return count


@pytest.mark.parametrize("update", [pytest.param("host", marks=pytest.mark.slow), "device"])
def test_work_grows_with_the_parameters_of_a_group(make_stack: MakeStack, update: str):
    few, many = (calls_of_a_step(make_stack, experts, update) for experts in (32, 128))
    assert many < 5 * few


class Counted(list[Any]):
    """Counts how often one of its items is asked for."""

    asked = 0

    def __getitem__(self, index: Any) -> Any:
        self.asked += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        self.asked += len(self)
        return super().__iter__()


@pytest.mark.parametrize("experts", [32, 512])
def test_a_saved_tensor_asks_only_the_parameters_that_it_lies_in(make_stack: MakeStack, experts: int):
    """The first of them is found by halving; autograd saves one tensor a parameter."""
    model = Mixture(1, experts)
    enable_vgpu_stack_optimization(model, make_stack(2 << 20), placement="streamed")
    engine = offload_of(model)
    assert isinstance(engine, Offload)
    group = max(engine.groups, key=lambda group: len(group.slots))
    assert len(group.slots) == experts
    slots = group.slots = Counted(group.slots)  # type: ignore[misc]
    middle = list.__getitem__(slots, experts // 2)
    engine.weights.stamp(group, middle.offset, middle.offset + 64)
    assert 0 < slots.asked <= experts.bit_length() + 5
