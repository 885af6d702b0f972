"""Replacing linears in models: what is taken, what is kept, and that training goes on."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from vblackwell.errors import ConfigurationError
from vblackwell.nn.convert.linears import (
    LARGE_ELEMENTS,
    find_linears,
    head_and,
    install_packed,
    replace_linears,
    select_linears,
)
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.numerics.fp4 import quantize


class Tiny(nn.Module):
    """An embedding tied to the head, an attention that never calls its projection, a shared module, a shared weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.again = self.up
        self.left, self.right = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.right.weight = self.left.weight
        self.output = nn.Linear(16, 20, bias=False)
        self.output.weight = self.embed.weight
        self.lm_head = nn.Linear(16, 20, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x, x, x)[0] + self.left(x) + self.right(x)
        x = self.down(torch.relu(self.up(x) + self.again(x)))
        return self.output(x) + self.lm_head(x)


def test_heads_tied_weights_and_uncalled_projections_are_kept():
    torch.manual_seed(0)
    model, tokens = Tiny(), torch.arange(12).view(2, 6)
    reference = model(tokens)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    chosen = select_linears(model)
    assert list(chosen) == ["up", "down"]
    replace_linears(model, chosen, FusedFP4Linear.from_linear)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert model.again is model.up and isinstance(model.up, FusedFP4Linear)
    assert torch.equal(model(tokens), reference)
    model.up.quantize()
    assert model.again.is_quantized


def test_patterns():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(4, 4))
    assert list(select_linears(model, "large")) == ["0"]
    assert list(select_linears(model, "^1$")) == ["1"]
    assert list(select_linears(model, keep="0")) == ["1"]
    with pytest.raises(ConfigurationError, match="selects no linear.*: 0 and 1 more .its name does not match 'mlp'"):
        select_linears(model, "mlp")
    with pytest.raises(ConfigurationError, match="regular expression"):
        select_linears(model, "(")
    with pytest.raises(ConfigurationError, match="Conv2d: it has none"):
        select_linears(nn.Conv2d(1, 1, 1))


@pytest.mark.parametrize("keep", ["(?i)DOWN", "(?x) down  # not packed"])
def test_names_to_keep_may_be_any_expression_that_compiles_alone(keep):
    """Joined to the heads', flags would stand in the middle, and groups have other numbers."""
    assert list(select_linears(Tiny(), keep=head_and(keep))) == ["up"]


def test_a_group_is_repeated_by_its_own_number():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    assert set(find_linears(model)) - set(select_linears(model, keep=head_and(r"^(\d)\1$"))) == {"11"}


@pytest.mark.parametrize("wrong", ["(", "x)|(?:y", "x(?i)"])
def test_a_wrong_expression_is_shown_as_it_was_given(wrong):
    said = re.escape(f"{wrong!r} is no regular expression: ")
    for keep, pattern in ((wrong, "all"), (None, wrong)):
        with pytest.raises(ConfigurationError, match=f"^{said}"):
            find_linears(Tiny(), pattern, head_and(keep))


def test_an_optimizer_made_before_still_trains_the_model():
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    straight_through = partial(FusedFP4Linear.from_linear, format="mxfp4", use_fp4=True)
    replace_linears(model, select_linears(model), straight_through)
    tokens = torch.randint(20, (8, 6))
    losses = []
    for _ in range(15):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_a_packed_weight_is_installed_on_meta():
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(32, 8, bias=False), nn.ReLU()).eval()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 8, bias=False), nn.ReLU()).eval()
    packed = quantize(source[0].weight, "nvfp4")
    install_packed(model, "0", packed)
    layer = model.get_submodule("0")
    x = torch.randn(2, 32)
    assert model[0] is layer and not layer.training
    expected = torch.relu(x @ packed.dequantize().t())
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)  # another order of 32 additions
    with pytest.raises(ConfigurationError, match="no module 'nope'"):
        install_packed(model, "nope", packed)
    with pytest.raises(ConfigurationError, match="shape"):
        install_packed(source, "0", quantize(torch.randn(4, 32), "nvfp4"))
    with pytest.raises(ConfigurationError, match="ReLU"):
        install_packed(model, "1", packed)


def test_a_large_linear_without_a_weight_of_its_own_is_left_alone():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(64, 64))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    found = find_linears(model, "large")
    assert found["0"] is not None and "hooks" in found["0"]
    assert found["1"] is None and found["2"] == f"smaller than {LARGE_ELEMENTS} elements"


def test_a_linear_whose_weight_is_none_has_no_size():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = None
    assert find_linears(model, "^0$")["0"] is None
    assert find_linears(model, "large")["0"] == f"smaller than {LARGE_ELEMENTS} elements"
