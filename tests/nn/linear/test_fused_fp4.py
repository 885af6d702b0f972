"""FusedFP4Linear: training, packing, state dicts in every combination, and the places people put a layer."""

import copy
import gc
import io
import weakref

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.nn import functional

import vblackwell
from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.nn.linear import packed_linear
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.rounded import fp4_round_trip
from vblackwell.numerics.fp4 import joint_tensor_scale, quantize
from vblackwell.numerics.packed import PackedTensor

FORMATS = ["nvfp4", "mxfp4", "nf4", "int4", "int8"]
ACTIVATIONS = {
    "none": lambda z: z,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pair(k=50, n=30, **options):
    """A layer and the input of a batch."""
    return FusedFP4Linear(k, n, **options), torch.randn(3, 4, k)


def oracle(layer, x):
    """What a packed layer must compute, from the codec alone."""
    return ACTIVATIONS[layer.activation](functional.linear(x, layer.packed.dequantize(torch.float32), layer.bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_unpacked_it_is_a_linear_and_an_activation(activation, bias):
    layer, x = pair(activation=activation, bias=bias)
    assert torch.equal(layer(x), ACTIVATIONS[activation](functional.linear(x, layer.weight, layer.bias)))


def test_it_starts_as_torch_linear_does():
    torch.manual_seed(5)
    ours = FusedFP4Linear(20, 10)
    torch.manual_seed(5)
    theirs = nn.Linear(20, 10)
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)


# fp32 sums of 50 products in another order: relative error far below 1e-5.
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_packed_output_and_gradients_match_the_oracle(format, activation):
    layer, x = pair(format=format, activation=activation)
    weight = layer.weight.detach().clone()
    layer.quantize()
    assert torch.equal(layer.packed.dequantize(), quantize(weight, format).dequantize())
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, expected = layer(ours), oracle(layer, theirs)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(y)
    (bias_grad,) = torch.autograd.grad(expected, layer.bias, dy, retain_graph=True)
    expected.backward(dy)
    layer.bias.grad = None
    y.backward(dy)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, bias_grad, rtol=1e-5, atol=1e-5)


def test_quantize_frees_the_original_and_twice_changes_nothing():
    layer, x = pair()
    original = weakref.ref(layer.weight)
    assert layer.quantize() is layer
    gc.collect()
    assert original() is None
    codes, y = layer.weight_codes, layer(x)
    layer.quantize()
    assert layer.weight_codes is codes and torch.equal(layer(x), y)
    assert list(dict(layer.named_parameters())) == ["bias"]


def test_packed_layer_holds_few_bits():
    layer = FusedFP4Linear(256, 256, bias=False).quantize()
    assert 8 * sum(buffer.nbytes for buffer in layer.buffers()) / 256**2 <= 4.6


def test_joint_tensor_scale():
    q, k = FusedFP4Linear(32, 8), FusedFP4Linear(32, 8)
    nn.init.normal_(k.weight, std=40)
    scale = joint_tensor_scale([q.weight, k.weight])
    q.quantize(tensor_scale=scale)
    k.quantize(tensor_scale=scale)
    assert torch.equal(q.packed.tensor_scale, k.packed.tensor_scale)


def test_the_loop_people_write():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = FusedFP4Linear(16, 32, activation="gelu"), FusedFP4Linear(32, 16)

        def forward(self, x):
            return x + self.down(self.up(x))

        def quantize(self):
            self.up.quantize()
            self.down.quantize()

    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 16)
    for module in model.modules():
        if hasattr(module, "quantize"):
            module.quantize()
    fresh = nn.Sequential(Block(), Block())
    file = io.BytesIO()
    torch.save({"model_state_dict": model.state_dict()}, file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True)["model_state_dict"])
    assert torch.equal(fresh(x), model(x))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("saved", "fresh"), [(False, False), (False, True), (True, False), (True, True)])
def test_every_state_dict_loads_into_every_layer(format, assign, saved, fresh):
    source, x = pair(format=format)
    target = FusedFP4Linear(50, 30, format=format)
    if saved:
        source.quantize()
    if fresh:
        target.quantize()
    state = load(save(source.state_dict()))
    target.load_state_dict(state, assign=assign)
    assert target.is_quantized == saved
    assert torch.equal(target(x), source(x))
    assert list(target.state_dict()) == list(source.state_dict())
    if saved and not assign:
        state["weight_codes"].zero_()
        assert torch.equal(target(x), source(x)), "the layer keeps no view of the state dict"


def test_a_meta_layer_loads_a_packed_state_by_assignment():
    source, x = pair()
    target = FusedFP4Linear(50, 30, device="meta")
    target.load_state_dict(source.quantize().state_dict(), assign=True)
    assert torch.equal(target(x), source(x))


def test_strict_loading_names_what_is_missing_or_too_much():
    packed, plain = FusedFP4Linear(16, 8).quantize(), FusedFP4Linear(16, 8)
    with pytest.raises(RuntimeError, match="weight_codes.*weight_meta"):
        packed.load_state_dict({"bias": torch.zeros(8)})
    with pytest.raises(RuntimeError, match="Unexpected.*other"):
        plain.load_state_dict(packed.state_dict() | {"other": torch.zeros(1)})
    assert plain.is_quantized


def test_foreign_packed_states_are_refused():
    state = FusedFP4Linear(16, 8).quantize().state_dict()
    with pytest.raises(ConfigurationError, match="nvfp4.*mxfp4.*format='nvfp4'"):
        FusedFP4Linear(16, 8, format="mxfp4").load_state_dict(state)
    with pytest.raises(ConfigurationError, match=r"\(8, 16\).*\(8, 32\)"):
        FusedFP4Linear(32, 8).load_state_dict(state)
    with pytest.raises(CorruptData, match="weight_scales"):
        FusedFP4Linear(16, 8).load_state_dict({k: v for k, v in state.items() if k != "weight_scales"})
    with pytest.raises(CorruptData, match="weight_meta"):
        FusedFP4Linear(16, 8).load_state_dict(state | {"weight_meta": torch.zeros(4, dtype=torch.uint8)})
    text = bytes(state["weight_meta"].tolist()).replace(b'"version": 1', b'"version": 9')
    with pytest.raises(Unsupported, match="version 9"):
        FusedFP4Linear(16, 8).load_state_dict(
            state | {"weight_meta": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        )


@pytest.mark.parametrize("format", FORMATS)
def test_conversions_leave_packed_numbers_alone(format):
    layer, x = pair(format=format)
    y = layer.quantize()(x)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items() if name != "bias"}
    twin = copy.deepcopy(layer)
    twin.half().to("cpu").to(torch.bfloat16).float()
    assert all(torch.equal(twin.state_dict()[name], state[name]) for name in state)
    assert twin.weight_codes.data_ptr() != layer.weight_codes.data_ptr()
    assert layer.to(torch.bfloat16).packed.dtype == torch.bfloat16
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    # bf16 input, weight and bias: three roundings of 2^-9 each on sums of 50 terms of order 0.1
    torch.testing.assert_close(layer(x.bfloat16()).float(), y, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("state", ["plain", "use_fp4", "packed"])
def test_autocast_gives_its_dtype(state):
    layer, x = pair(use_fp4=state == "use_fp4")
    if state == "packed":
        layer.quantize()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.bias.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), layer(x), rtol=0.05, atol=0.05)  # as above


@pytest.mark.parametrize("state", [pytest.param("plain", marks=pytest.mark.slow), "use_fp4", "packed"])
def test_compiles_into_one_graph(state):
    layer, x = pair(activation="silu", use_fp4=state == "use_fp4")
    if state == "packed":
        layer.quantize()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for run in (layer, compiled):
        inputs = x.clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(inputs)
        y.float().square().sum().backward()
        results.append([y, inputs.grad] + [p.grad.clone() for p in layer.parameters()])
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=0, atol=0)


def test_straight_through_uses_rounded_weights_and_their_gradient():
    layer, x = pair(use_fp4=True, bias=False)
    rounded = quantize(layer.weight, "nvfp4", "max").dequantize().requires_grad_()
    y, expected = layer(x), functional.linear(x, rounded)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    assert torch.equal(layer.weight.grad, rounded.grad)
    layer.quantize()
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)  # packing keeps the trained numbers


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_the_max_codec(format, dtype):
    for w in (torch.randn(70, 90), torch.randn(8, 33) * 1e-38, torch.zeros(3, 16)):
        w = w.to(dtype)
        assert torch.equal(fp4_round_trip(w, format, dtype), quantize(w, format, "max").dequantize())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_straight_through_shows_nan_instead_of_hiding_it(format, bad):
    layer, x = pair(format=format, use_fp4=True)
    layer.weight.data[3, 7] = bad
    assert layer(x).isnan().any()
    with pytest.raises(ConfigurationError, match=r"weight of FusedFP4Linear.*1 inf or NaN"):
        layer.quantize()
    assert not layer.is_quantized


def test_straight_through_training_learns():
    """A regression whose target is itself an FP4 linear: the loss falls by a factor of 20."""
    target = FusedFP4Linear(32, 16, bias=False).quantize()
    layer = FusedFP4Linear(32, 16, bias=False, use_fp4=True)
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-2)
    losses = []
    for _ in range(60):
        x = torch.randn(64, 32)
        loss = (layer(x) - target(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20


def test_frozen_base_trains_only_the_adapter():
    base, x = pair()
    base.freeze()
    down, up = nn.Linear(50, 4, bias=False), nn.Linear(4, 30, bias=False)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    inputs = x.requires_grad_()
    (base(inputs) + up(down(inputs))).square().sum().backward()
    assert not any(parameter.requires_grad for parameter in base.parameters())
    assert inputs.grad.abs().sum() > 0 and down.weight.grad is not None
    assert all(torch.equal(base.state_dict()[name], before[name]) for name in before)


def test_from_linear_shares_parameters_and_from_packed_needs_none():
    linear, x = nn.Linear(24, 12).eval(), torch.randn(2, 24)
    layer = FusedFP4Linear.from_linear(linear, activation="relu")
    assert layer.weight is linear.weight and layer.bias is linear.bias and not layer.training
    packed = quantize(linear.weight, "mxfp4")
    loaded = FusedFP4Linear.from_packed(packed, linear.bias.detach(), "relu")
    assert torch.equal(loaded(x), FusedFP4Linear.from_linear(linear, activation="relu", format="mxfp4").quantize()(x))
    assert not loaded.bias.requires_grad
    with pytest.raises(ConfigurationError, match="N, K"):
        FusedFP4Linear.from_packed(quantize(torch.randn(2, 3, 16)))


def test_empty_batches_and_any_leading_shape():
    layer = FusedFP4Linear(16, 8).quantize()
    assert layer(torch.randn(0, 16)).shape == (0, 8)
    assert layer(torch.randn(16)).shape == (8,)
    assert layer(torch.randn(2, 3, 4, 16)).shape == (2, 3, 4, 8)


def test_bad_arguments_are_refused():
    for options in ({"activation": "tanh"}, {"format": "fp4"}, {"scale_search": "best"}):
        with pytest.raises(ConfigurationError, match="choose one of"):
            FusedFP4Linear(4, 4, **options)
    with pytest.raises(ConfigurationError, match="at least 1"):
        FusedFP4Linear(0, 4)
    layer = FusedFP4Linear(16, 4).quantize()
    with pytest.raises(ConfigurationError, match="15 features"):
        layer(torch.randn(2, 15))
    with pytest.raises(ConfigurationError, match="float64"):
        layer(torch.randn(2, 16, dtype=torch.float64))
    with pytest.raises(ConfigurationError, match="float64"):
        FusedFP4Linear(16, 4, dtype=torch.float64).quantize()


def test_public_name():
    assert vblackwell.FusedFP4Linear is FusedFP4Linear
    assert "packed=nvfp4" in repr(FusedFP4Linear(4, 4).quantize())


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", [(30, 50), (200, 70)])
def test_tiles_made_in_bands_turn_back_into_the_same_state(format, shape, monkeypatch):
    packed = quantize(torch.randn(shape), format)
    whole = packed_linear.tiled(packed)
    monkeypatch.setattr(packed_linear, "_SHUFFLE_ELEMENTS", 64 * shape[1])
    banded = packed_linear.tiled(packed)
    assert torch.equal(banded.codes, whole.codes) and torch.equal(banded.scales, whole.scales)
    layer = FusedFP4Linear.from_packed(packed)
    assert torch.equal(layer.canonical(banded, packed.dtype).dequantize(), packed.dequantize())
    layer.hold(banded)  # as on a GPU
    canonical = FusedFP4Linear.from_packed(packed)
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in canonical.state_dict().items())
    x = torch.randn(3, shape[1])
    torch.testing.assert_close(layer(x), canonical(x), rtol=1e-6, atol=1e-6)


class OnGpu(PackedTensor):
    """Says that it is where `place` lays tiles out."""

    device = torch.device("cuda")  # type: ignore[assignment]


def test_a_weight_that_fits_no_tiles_is_named_and_kept_as_it_is():
    w_NK = torch.cat((torch.randn(2, 64), torch.randn(3, 64) * 2.0**40))
    packed = OnGpu(**vars(quantize(w_NK, "mxfp4")))
    with pytest.warns(UserWarning, match=r"5 x 64 is not laid out .* computes slowly: mxfp4 exponents span 2\^"):
        placed = packed_linear.place(packed)
    assert placed.layout == "mxfp4" and placed.codes is packed.codes
    fitting = OnGpu(**vars(quantize(w_NK[:2], "mxfp4")))
    assert packed_linear.place(fitting).layout == "mxfp4-tiled"
