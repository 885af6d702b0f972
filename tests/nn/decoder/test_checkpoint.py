"""Activations that checkpointing keeps: the same bits, and not computed again."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nn.decoder.test_decoder_equality import config, tokens
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.pointwise.linears import shared_input_linears
from vblackwell.nn.decoder.checkpoint import Keeping, checkpoint
from vblackwell.nn.decoder.decoder import Decoder


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_attention_is_computed_once_and_no_bit_changes():
    runs = {}
    for kept in ((), ("attention",)):
        model = Decoder(config(num_kv_heads=2), seed=3)
        model.gradient_checkpointing, model.kept_activations = True, kept
        with Counting() as counting:
            loss = model(tokens(), tokens(seed=2))
            loss.backward()
        attention = counting.counts["aten::_scaled_dot_product_flash_attention_for_cpu"]
        assert attention == (3 if kept else 6)  # three layers, forward and recompute
        runs[kept] = [loss.detach(), *(param.grad for param in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(*runs.values(), strict=True))


@pytest.mark.parametrize("kept", [("projections",), ("gates",), ("projections", "gates")])
def test_linears_of_one_input(kept):
    weights = [nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(i))) for i in range(5)]

    def block(x):
        q, k, v = shared_input_linears(x.sin(), weights[:3])
        gate, up = shared_input_linears(q * k * v, weights[3:])
        return (gate * up).cos()

    x = torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), [x, *weights])
    with Counting() as counting:
        output = checkpoint(Keeping(block, kept), x, modules=())
        got = torch.autograd.grad(output.sum(), [x, *weights])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    # two calls in the forward, and in the recompute those that were not kept
    assert counting.counts["vblackwell::shared_input_linears"] == 4 - len(kept)


def test_a_second_backward_is_refused():
    x = torch.randn(3, requires_grad=True)
    output = checkpoint(Keeping(lambda x: x.sin().cos(), ("attention",)), x, modules=()).sum()
    output.backward(retain_graph=True)
    with pytest.raises(Unsupported, match="second backward"):
        output.backward()


def test_unknown_names_are_refused():
    model = Decoder(config())
    model.kept_activations = ("everything",)
    with pytest.raises(ConfigurationError, match="choose among"):
        model(tokens())
