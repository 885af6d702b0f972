"""A frozen linear whose packed bytes are parameters:
in either layout it is the packed layer, and its bytes give the weight back.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vblackwell.nn.convert.linears import store_linears
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.stored_fp4 import PARTS, StoredFP4Linear, stored_part


@pytest.mark.parametrize(
    ("format", "tiled"),
    [("nvfp4", False), ("nvfp4", True), ("mxfp4", True), ("nf4", False), ("int4", False), ("int8", False)],
)
@pytest.mark.parametrize("shape", [(40, 64), (24, 50)])
def test_it_is_the_packed_layer(format, tiled, shape):
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0])
    weight = linear.weight.detach().clone()
    packed = FusedFP4Linear.from_linear(linear, format=format, scale_search="mse").freeze()
    stored = StoredFP4Linear(linear, format, tiled=tiled)
    parts = stored.bytes_of(weight, "weight")
    for name, value in parts.items():
        held = getattr(stored, name)
        assert held.is_meta and held.shape == value.shape and value.dtype == torch.uint8
        setattr(stored, name, nn.Parameter(value, requires_grad=False))
    assert torch.equal(stored.weight_of(parts), packed.packed.dequantize())
    x, y = (torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1), requires_grad=True) for _ in range(2))
    out, expected = stored(x), packed(y)
    torch.testing.assert_close(
        out, expected, rtol=1e-5, atol=1e-5
    )  # sums of 64 terms, of which tiles may add in another order
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in stored.parameters())


def test_its_parts_are_found_by_name():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4, bias=False))
    reasons = store_linears(model, keep="^1$")
    assert reasons == {"0": None, "1": "its name is among those to keep"}
    names = [name for name, _ in model.named_parameters()]
    assert [name for name in names if stored_part(model, name)] == [f"0.{part}" for part in PARTS]
    assert stored_part(model, "0.bias") is stored_part(model, "1.weight") is None
