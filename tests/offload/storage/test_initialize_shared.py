"""Memory that several names lead to, and types that AdamW's fp32 arithmetic is too narrow for,
are refused before anything moves.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.offload.conftest import MakeStack
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.optimizer import VGPUAdamW

LEVEL0 = 32 << 10


class Bare(nn.Module):
    """A linear layer whose attributes a test adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def expanded(model: Bare) -> None:
    model.scale = nn.Parameter(torch.ones(1).expand(16))


def transposed(model: Bare) -> None:
    model.layers[1].kept = model.layers[1].weight.t()


def in_a_dict(model: Bare) -> None:
    model.views = {"first": model.layers[0].weight.detach()[:2]}


def a_buffer(model: Bare) -> None:
    model.register_buffer("row", model.layers[2].weight.data[3])


def a_second_parameter(model: Bare) -> None:
    model.layers[2].weight = nn.Parameter(model.layers[0].weight.data)


@pytest.mark.parametrize("placement", ["streamed", "resident"])
@pytest.mark.parametrize(
    ("add", "names"),
    [
        (expanded, "'scale' share memory"),
        (transposed, "'layers.1.kept'.*'layers.1.weight'"),
        (in_a_dict, "'views'.*'layers.0.weight'"),
        (a_buffer, "'row'.*'layers.2.weight'"),
        (a_second_parameter, "'layers.2.weight'.*'layers.0.weight'"),
    ],
)
def test_memory_of_two_names_is_refused(add: Callable[[Bare], None], names: str, placement: str, make_stack: MakeStack):
    model, stack = Bare(), make_stack(LEVEL0)
    add(model)
    with pytest.raises(ConfigurationError, match=names):
        enable_vgpu_stack_optimization(model, stack, placement=placement)
    assert offload_of(model) is None and not any(level.used_bytes for level in stack.levels)


def test_memory_of_one_name_each_is_taken(make_stack: MakeStack):
    """Columns of one matrix, pieces of one buffer, tied modules, copies,
    and what spectral_norm computes anew at each forward.
    """
    model = Bare()
    both = torch.randn(16, 32)
    model.layers[0].weight, model.layers[1].weight = nn.Parameter(both[:, :16]), nn.Parameter(both[:, 16:])
    model.layers[2].bias = model.layers[1].bias
    model.known = [model.layers[0].weight, model.layers[0].weight.detach().clone()]
    model.recurrent = nn.LSTM(8, 8)
    model.normed = torch.nn.utils.spectral_norm(nn.Linear(8, 8))
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed")
    assert torch.equal(model.layers[0].weight, both[:, :16]) and torch.equal(model.layers[1].weight, both[:, 16:])


@pytest.mark.parametrize("placement", ["streamed", "resident"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_parameter_too_wide_for_fp32_arithmetic_is_refused_where_it_is_trained(
    dtype: torch.dtype, placement: str, make_stack: MakeStack
):
    model, stack = Bare(), make_stack(LEVEL0)
    model.wide = nn.Parameter(torch.ones(4, dtype=dtype))
    with pytest.raises(Unsupported, match=r"'wide' is (float64|complex64).*requires_grad_"):
        enable_vgpu_stack_optimization(model, stack, placement=placement)
    model.wide.requires_grad_(False)
    enable_vgpu_stack_optimization(model, stack, placement=placement)
    assert torch.equal(model.wide, torch.ones(4, dtype=dtype))
    model.wide.requires_grad_(True)
    with pytest.raises(Unsupported, match="'wide'"):
        VGPUAdamW(model.parameters())


def test_float64_weights_train_where_another_compute_type_is_asked_for(make_stack: MakeStack):
    model = Bare().double()
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed", compute_dtype=torch.float32)
    assert model.layers[0].weight.dtype == torch.float32
    release(model)


def test_what_numpy_makes_of_a_parameter_is_read_only(make_stack: MakeStack):
    model = Bare().requires_grad_(False)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed")
    weight = model.layers[0].weight
    for array in (weight.numpy(), weight.detach().numpy(), weight.data[0].numpy(), weight.detach().__array__()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0
