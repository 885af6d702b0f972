"""FusedFP4Linear on FP4 tensor cores, a stated option: what it computes, what it refuses and when, alone, stored in a
stack and laid next to others.
"""

import copy

import pytest
import torch
from torch import nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.fp4 import w4a4
from vblackwell.nn.convert.linears import install_packed, store_linears
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.one_input import joint_product, lay_packed_together
from vblackwell.nn.linear.packed_linear import pack
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear, adapted_linear
from vblackwell.numerics import separation

K, N = 64, 48


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return w4a4.quantize_rows(x.reshape(-1, x.shape[-1])).dequantize().view_as(x)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_it_is_the_packed_layer_on_rounded_rows(activation, format):
    fast = FusedFP4Linear(K, N, activation=activation, format=format, w4a4=True)
    plain = FusedFP4Linear(K, N, activation=activation, format=format)
    plain.load_state_dict(fast.state_dict())
    assert torch.equal(fast(torch.eye(K)), plain(torch.eye(K)))  # not packed yet
    fast.quantize(), plain.quantize()
    assert fast.layout == f"{format}-tiled" and "w4a4=True" in repr(fast)
    x = torch.randn(13, 69, K)
    assert w4a4.MIN_ROWS == 13 * 69 and torch.equal(fast(x[1:]), plain(x[1:]))
    # the same sums of fp32 products, in another order of calls
    torch.testing.assert_close(fast(x), plain(rounded(x)), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain(x), fast(x), rtol=1e-3, atol=1e-3)


def test_a_copy_and_a_checkpoint_compute_the_same():
    fast, x = FusedFP4Linear(K, N, w4a4=True).quantize(), torch.randn(w4a4.MIN_ROWS, K)
    again = FusedFP4Linear(K, N, w4a4=True)
    again.load_state_dict(fast.state_dict())
    assert again.is_quantized and again.w4a4
    assert torch.equal(again(x), fast(x)) and torch.equal(copy.deepcopy(fast)(x), fast(x))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"w4a8": True, "format": "mxfp4"}, "w4a8 rounds inputs to FP8 and w4a4 to FP4"),
        ({"format": "nf4"}, "is nf4: FP4 activations go with nvfp4 and mxfp4"),
        ({"in_features": 48}, "48 x 48: FP4 activations take multiples of 16 and 32: .*--keep"),
        ({"out_features": 40}, "40 x 64: FP4 activations take multiples of 16 and 32"),
    ],
)
def test_what_it_does_not_take_is_refused_when_built(options, part):
    with pytest.raises(ConfigurationError, match=part):
        FusedFP4Linear(**{"in_features": K, "out_features": N, "w4a4": True} | options)


def test_a_gpu_before_blackwell_is_refused_before_the_weight_is_packed(monkeypatch):
    layer = FusedFP4Linear(K, N, w4a4=True)
    packed = FusedFP4Linear(K, N, w4a4=True).quantize()
    monkeypatch.setattr(w4a4, "capability", lambda device: (9, 0))
    with pytest.raises(Unsupported, match=r"compute capability 9\.0, FP4 tensor cores begin with 10\.0"):
        layer.quantize()
    assert not layer.is_quantized
    with pytest.raises(Unsupported, match=r"9\.0"):
        packed.to("cpu")
    for found in ((10, 0), (12, 0)):
        monkeypatch.setattr(w4a4, "capability", lambda device, found=found: found)
        assert layer.quantize().is_quantized
        with pytest.raises(Unsupported, match="float32, and become FP4 from bf16 or fp16 on a GPU"):
            w4a4.check_device(torch.device("cuda"), dtype=torch.float32)


def test_a_weight_in_two_parts_is_refused():
    model = nn.Sequential(nn.Linear(K, N))
    with pytest.raises(ConfigurationError, match="0.weight is two-part: FP4 activations go with"):
        install_packed(model, "0", separation.separate(model[0].weight), w4a4=True)
    install_packed(model, "0", pack(model[0].weight, "nvfp4", "it"), w4a4=True)
    assert model[0].w4a4


def test_stored_in_a_stack_it_computes_the_same():
    linear = nn.Linear(K, N)
    fast = FusedFP4Linear.from_linear(copy.deepcopy(linear), w4a4=True).quantize()
    model = nn.Sequential(linear)
    store_linears(model, format="nvfp4", w4a4=True)
    stored = model[0]
    assert isinstance(stored, StoredFP4Linear) and stored.layout == "nvfp4-tiled"
    for name, value in stored.bytes_of(linear.weight, "it").items():
        setattr(stored, name, nn.Parameter(value, requires_grad=False))
    x = torch.randn(w4a4.MIN_ROWS, K)
    assert torch.equal(stored(x), fast(x)) and stored.parts == ("weight_codes", "weight_scales", "weight_tensor_scale")
    a, b = torch.randn(4, K), torch.randn(N, 4)
    adapted = adapted_linear(x, a, b, 0.5, stored)
    torch.testing.assert_close(adapted, fast(x) - fast.bias + 0.5 * (x @ a.t()) @ b.t(), rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigurationError, match="multiples of 16 and 32"):
        store_linears(nn.Sequential(nn.Linear(K, 40)), w4a4=True)


def test_layers_of_one_input_round_it_each_and_lie_together():
    layers = [FusedFP4Linear(K, 64, bias=False, w4a4=True).quantize() for _ in range(2)]
    few, many = torch.randn(5, K), torch.randn(w4a4.MIN_ROWS, K)
    wanted = [(layer(few), layer(many)) for layer in layers]
    assert lay_packed_together(*layers)
    assert joint_product(many, None, tuple(layers)) is None
    for layer, joint, (of_few, of_many) in zip(layers, joint_product(few, None, tuple(layers)), wanted, strict=True):
        torch.testing.assert_close(joint, of_few, rtol=1e-5, atol=1e-5)
        assert torch.equal(layer(many), of_many)
    other = FusedFP4Linear(K, 64, bias=False).quantize()
    assert not lay_packed_together(layers[0], other)
