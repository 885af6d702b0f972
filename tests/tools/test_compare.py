"""compare: figures that can be worked out by hand, and layers in order."""

import copy
import math

import pytest
import torch
from torch import nn

import vblackwell
from vblackwell.errors import ConfigurationError
from vblackwell.nn.convert.linears import replace_linears, select_linears
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.tools.compare import compare


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return (x * self.factor,)


def test_figures():
    found = vblackwell.compare(Scale(1.0), Scale(0.9), torch.tensor([3.0, 4.0]))
    assert found.absolute == pytest.approx(0.4, rel=1e-6)  # fp32 products
    assert found.relative == pytest.approx(0.1, rel=1e-6)
    assert found.sqnr_db == pytest.approx(20.0, rel=1e-6)
    assert found.layers == {}
    same = compare(Scale(2.0), Scale(2.0), torch.ones(3))
    assert (same.absolute, same.relative, same.sqnr_db) == (0.0, 0.0, math.inf)


def test_layers_and_modes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Linear(32, 8))
    packed = copy.deepcopy(model)
    replace_linears(packed, select_linears(packed, "^(2|3)$"), FusedFP4Linear.from_linear)
    for module in packed.modules():
        if hasattr(module, "quantize"):
            module.quantize()
    model[1].eval()
    found = compare(model, packed, (torch.randn(16, 32),), per_layer=True)
    assert list(found.layers) == ["0", "1", "2", "3"]
    assert found.layers["0"].sqnr_db == found.layers["1"].sqnr_db == math.inf, "dropout is off"
    assert found.layers["2"].sqnr_db > 15 and found.layers["3"].sqnr_db == found.sqnr_db
    assert model.training and not model[1].training and packed[1].training, "modes are put back"
    assert not model[0]._forward_hooks


def test_transformers_outputs_and_refusals():
    class Output(dict):
        pass

    class Model(nn.Module):
        def forward(self, x):
            return Output(logits=x)

    assert compare(Model(), Model(), {"x": torch.ones(2)}).sqnr_db == math.inf
    with pytest.raises(ConfigurationError, match="no tensor"):
        compare(nn.Identity(), nn.Identity(), "text")
    with pytest.raises(ConfigurationError, match="shapes"):
        compare(nn.Linear(2, 3), nn.Linear(2, 4), torch.ones(1, 2))
    with pytest.raises(ConfigurationError, match="no layer of the same name"):
        compare(nn.Sequential(nn.Linear(2, 3)), nn.Linear(2, 3), torch.ones(1, 2), per_layer=True)
