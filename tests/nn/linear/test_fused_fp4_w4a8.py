"""FusedFP4Linear on FP8 arithmetic, a stated option:
what it computes, what it refuses and when, and where the layer may go.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from tests.sqnr import sqnr
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.fp4 import w4a8
from vblackwell.nn.convert.linears import replace_linears, select_linears
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.packed import PackedTensor

K, N = 64, 48


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def layer(**options):
    return FusedFP4Linear(K, N, format="mxfp4", w4a8=True, **options)


def with_spans(tensor_span: int, row_span: int) -> PackedTensor:
    """An mxfp4 matrix whose first row spans ``row_span`` exponents, and all of it ``tensor_span``."""
    packed = quantize(torch.randn(N, K), "mxfp4", "max")
    codes = torch.full_like(packed.codes, 0x11)
    scales = torch.full_like(packed.block_scales, 120)
    scales[0, 0] -= row_span
    scales[1] -= tensor_span
    return PackedTensor(packed.form, packed.shape, packed.dtype, codes, scales, packed.tensor_scale)


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_it_is_the_packed_layer_on_rounded_rows(activation):
    fast = layer(activation=activation)
    plain = FusedFP4Linear(K, N, activation=activation, format="mxfp4")
    plain.load_state_dict(fast.state_dict())
    fast.quantize(), plain.quantize()
    x = torch.randn(13, 69, K)
    assert w4a8.MIN_ROWS == 13 * 69 and torch.equal(fast(x[1:]), plain(x[1:]))
    q, scale = w4a8.quantize_rows(x.view(-1, K))
    # the same sums of fp32 products, in another order of calls
    torch.testing.assert_close(fast(x), plain((q.float() * scale).view_as(x)), rtol=1e-5, atol=1e-5)
    assert sqnr(plain(x), fast(x)) > 29  # 31.5 dB on Gaussian rows: E4M3 keeps three bits after the leading one
    assert not torch.equal(plain(x), fast(x))


def test_gradients_go_straight_through_the_rounding():
    fast, x = layer().freeze(), torch.randn(w4a8.MIN_ROWS, K, requires_grad=True)
    dy = torch.randn(w4a8.MIN_ROWS, N)
    fast(x).backward(dy)
    torch.testing.assert_close(x.grad, dy @ fast.packed.dequantize(), rtol=1e-5, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in fast.parameters())


def test_before_packing_it_trains_in_full_precision():
    fast, x = layer(), torch.randn(3, K)
    assert torch.equal(fast(x), nn.functional.linear(x, fast.weight, fast.bias))


@pytest.mark.parametrize(("tensor_span", "row_span", "fits"), [(14, 14, True), (17, 3, True), (14, 15, False)])
def test_rows_that_span_more_than_14_are_refused_when_packed(tensor_span, row_span, fits):
    packed = with_spans(tensor_span, row_span)
    if fits:
        built = FusedFP4Linear.from_packed(packed, w4a8=True)
        assert torch.equal(built.packed.dequantize(), packed.dequantize())
        return
    with pytest.raises(Unsupported, match=f"a row span {row_span}.*without --fp8-activations"):
        FusedFP4Linear.from_packed(packed, w4a8=True)
    assert FusedFP4Linear.from_packed(packed).is_quantized


def test_a_layer_that_is_refused_keeps_its_weight():
    fast = layer()
    weight = fast.weight
    with torch.no_grad():
        weight[3, :32] *= 2.0**-15
    with pytest.raises(Unsupported, match="a row span 15"):
        fast.quantize()
    assert fast.weight is weight
    with torch.no_grad():
        weight[3, :32] *= 2.0**15
        weight[3] *= 2.0**-20  # no row spans much, all of them together do
    with pytest.raises(Unsupported, match=r"span 2\^"):
        fast.quantize()
    assert fast.weight is weight and not fast.is_quantized


def test_a_gpu_without_fp8_is_refused_when_packed_or_moved_to(monkeypatch):
    there = layer().quantize()
    codes = there.weight_codes
    monkeypatch.setattr(w4a8, "capability", lambda device: (8, 6))
    fresh = layer()
    for use in (fresh.quantize, there.half):
        with pytest.raises(Unsupported, match=r"capability 8.6.*without --fp8-activations"):
            use()
    assert not fresh.is_quantized and there.weight_codes is codes
    monkeypatch.setattr(w4a8, "capability", lambda device: (8, 9))
    assert fresh.quantize().is_quantized


def test_blocks_without_a_value_widen_no_span():
    fast = layer()
    with torch.no_grad():
        fast.weight[3, :32] = 0
        fast.weight[5] = 0
    assert fast.quantize().is_quantized
    assert torch.equal(fast.packed.dequantize(), FusedFP4Linear.from_packed(fast.packed).packed.dequantize())


@pytest.mark.parametrize("options", [{"format": "nvfp4"}, {"format": "mxfp4", "out_features": 40}])
def test_other_formats_and_sizes_are_refused_at_once(options):
    with pytest.raises(
        ConfigurationError, match="FP8 activations (go with mxfp4|take multiples of 16).* without --fp8-activations"
    ):
        FusedFP4Linear(**{"in_features": K, "out_features": N, "w4a8": True, **options})
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, 40))
    with pytest.raises(
        ConfigurationError, match="FP8 activations (go with mxfp4|take multiples of 16).* without --fp8-activations"
    ):
        make = partial(FusedFP4Linear.from_linear, format=options["format"], w4a8=True)
        replace_linears(model, select_linears(model), make)
    assert all(type(module) is nn.Linear for module in model)


def test_states_are_those_of_any_mxfp4_layer():
    fast, x = layer().quantize(), torch.randn(w4a8.MIN_ROWS, K)
    plain = FusedFP4Linear(K, N, format="mxfp4").quantize()
    assert list(fast.state_dict()) == list(plain.state_dict())
    fresh = layer()
    fresh.load_state_dict(fast.state_dict())
    assert torch.equal(fresh(x), fast(x))
    plain.load_state_dict(fast.state_dict())
    assert torch.equal(FusedFP4Linear.from_packed(plain.packed, plain.bias, w4a8=True)(x), fast(x))
    wide = FusedFP4Linear.from_packed(with_spans(14, 15))
    with pytest.raises(Unsupported, match="a row span 15"):
        layer(bias=False).load_state_dict(wide.state_dict())


def test_copies_conversions_autocast_and_one_graph():
    fast, x = layer(activation="silu").quantize(), torch.randn(w4a8.MIN_ROWS, K)
    twin = copy.deepcopy(fast)
    assert torch.equal(twin.half().to("cpu").float().packed.dequantize(), fast.packed.dequantize())
    assert torch.equal(twin.weight_row_top, fast.weight_row_top)
    assert twin.weight_row_top.data_ptr() != fast.weight_row_top.data_ptr()
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fast(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(compiled(x), y)
    assert torch.equal(y, fast(x.bfloat16()))
