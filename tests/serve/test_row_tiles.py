"""A row's product has the same bits, whatever rows are with it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.packed_linear import pack
from vblackwell.serve.row_tiles import (
    RowTiles,
    in_tiles,
    join_linears,
    restore_linears,
    tile_linears,
    tile_packed,
    tiles_of,
)


class Adapter(nn.Module):
    """An adapter around a packed linear, in whose forward torch's functions see the rows at once."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.low = nn.Parameter(torch.randn(48, 4))
        self.high = nn.Parameter(torch.randn(4, 40))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        return y.view(-1, 40).addmm_((x @ self.low).view(-1, 4), self.high).view(y.shape)


def packed() -> nn.Module:
    linear = nn.Linear(48, 40)
    return FusedFP4Linear.from_packed(pack(linear.weight.detach(), "nvfp4", "weight"), linear.bias)


MAKE: dict[str, Any] = {
    "linear": lambda: nn.Linear(48, 40),
    "conv1d": lambda: Conv1D(40, 48),
    "packed": packed,
    "adapter": lambda: Adapter(packed()),
}


@pytest.mark.parametrize("kind", MAKE)
@torch.no_grad()
def test_a_row_is_the_same_in_any_company(kind: str):
    torch.manual_seed(0)
    model = nn.Sequential(MAKE[kind]())
    x = torch.randn(1, 37, 48)
    before = model(x)
    tile_packed(model)
    assert torch.equal(model(x), before)  # outside tiles it computes as it did
    with RowTiles(16, 8):
        together = model(x)
        assert torch.allclose(together, before, atol=1e-4)  # fp32 sums of 48 in another order
        for count in (1, 5, 16, 17, 36):
            assert torch.equal(model(x[:, :count]), together[:, :count])
            assert torch.equal(model(x.flip(1)[:, :count]), together.flip(1)[:, :count])


@torch.no_grad()
def test_linears_tile_themselves_and_join():
    """As the mode tiles them, and as one product of those that share rows; afterwards they are torch's own."""
    torch.manual_seed(0)
    model = nn.Module()
    for name, width in (("q_proj", 24), ("k_proj", 8), ("v_proj", 8)):
        model.add_module(name, nn.Linear(48, width, bias=False))
    model.add_module("o_proj", nn.Linear(48, 40))
    linears, x = [*model.children()], torch.randn(1, 37, 48)
    plain = [linear(x) for linear in linears]
    with RowTiles(16, 16):
        tiled = [linear(x) for linear in linears]
    changed = [*join_linears(model, lambda weights: len(weights) == 3), *tile_linears(model)]
    assert changed == linears and all(map(torch.equal, plain, [linear(x) for linear in linears]))
    with tiles_of(16, 16):
        found = [linear(x) for linear in linears]
        assert torch.equal(found[3], tiled[3])
        for one, other in zip(found, tiled, strict=True):
            assert torch.allclose(one, other, atol=1e-5)  # fp32 sums of 48 in another order
        for count in (1, 16, 17):
            parts = [linear(part) for part in [x[:, :count]] for linear in linears]
            assert all(torch.equal(part, whole[:, :count]) for part, whole in zip(parts, found, strict=True))
        assert torch.equal(linears[1](x), found[1])  # asked for alone
    restore_linears(changed)
    assert {type(linear) for linear in linears} == {nn.Linear} and "_vb_joint" not in linears[0].__dict__


def test_every_product_sees_one_number_of_rows():
    seen = []

    def product(part: Tensor) -> Tensor:
        seen.append(tuple(part.shape))
        return F.linear(part, torch.ones(3, 5))

    assert in_tiles(torch.ones(2, 9, 5), product, 8).shape == (2, 9, 3)
    assert in_tiles(torch.ones(0, 5), product, 8).shape == (0, 3)
    assert seen == [(8, 5)] * 3 + [(0, 5)]


def test_preparing_twice_changes_nothing():
    model = nn.Sequential(packed())
    tile_packed(model)
    kind = type(model[0])
    tile_packed(model)
    assert type(model[0]) is kind and isinstance(model[0], FusedFP4Linear)


@pytest.mark.parametrize("width", [1, 3])
def test_gates_of_few_numbers_a_row_are_the_same_in_any_company(width: int):
    """Also where fewer numbers than fill a processor's registers are computed by another function."""
    x_MSW = torch.randn(1 << 12, 5, width, generator=torch.Generator().manual_seed(0)) * 3
    with RowTiles(16, 16):
        together, alone = torch.sigmoid(x_MSW), torch.stack([F.sigmoid(rows) for rows in x_MSW])
        assert torch.tensor(0.0).sigmoid() == 0.5 and torch.empty(0, 1).sigmoid().shape == (0, 1)
        out = torch.empty(5, width)
        assert torch.sigmoid(input=x_MSW[0], out=out) is out and torch.equal(out, torch.sigmoid(input=x_MSW[0]))
    assert torch.equal(together, alone) and together.shape == x_MSW.shape
    # fp32: torch's two functions are within some last bits of each other
    torch.testing.assert_close(together, torch.sigmoid(x_MSW), rtol=1e-6, atol=0)
