"""Packed linears of one input laid together: the same numbers from one product, whatever their tensor scales."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import nn

from vblackwell.generate.steps import lay_out_for_decoding
from vblackwell.kernels.fp4 import w4a8
from vblackwell.nn.decoder import decoder as decoder_module
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.linear import one_input as module
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.one_input import Unnormed, joint_packed, lay_packed_together, linears_of_one_input
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear


def packed(n: int, k: int, spread: float, seed: int, device: str = "cpu") -> FusedFP4Linear:
    """In tiles, as on a GPU."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * spread
    weight[3, :16] = 0.0
    stored = StoredFP4Linear(nn.Linear(k, n, bias=False), tiled=True)
    return stored.over(stored.bytes_of(weight.to(device), "w"))


@pytest.mark.parametrize("spreads", [(1.0, 1.0, 1.0), (1.0, 0.02, 5.0)])
@torch.no_grad()
def test_one_product_gives_what_each_gives(spreads, monkeypatch):
    linears = tuple(packed(n, 96, spread, n) for n, spread in zip((64, 32, 37), spreads, strict=True))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(9))
    expected = [linear(x) for linear in linears]
    weights = [linear.packed.dequantize() for linear in linears]
    assert joint_packed(linears) is None
    assert lay_packed_together(*linears)
    calls = []
    monkeypatch.setattr(module, "fp4_linear", lambda *args: calls.append(args) or module_linear(*args))
    got = linears_of_one_input(x, *linears)
    assert len(calls) == 1
    for linear, one, other, weight in zip(linears, got, expected, weights, strict=True):
        assert torch.equal(linear(x), other)  # alone as before: scales are shifted by powers of two
        assert torch.equal(linear.packed.dequantize(), weight)
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)  # a matrix of another shape, fp32 sums in another order
    norm = torch.nn.RMSNorm(96, 1e-5)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    for one, linear in zip(Unnormed(x, norm).linears(linears), linears, strict=True):
        assert torch.allclose(one, linear(norm(x)), rtol=1e-5, atol=1e-5)
    with torch.enable_grad():
        linears_of_one_input(x, *linears)
    assert len(calls) == 1


def test_what_lies_together_is_saved_apart(monkeypatch):
    pair = packed(32, 64, 1.0, 3), packed(32, 64, 2.0, 4)
    assert lay_packed_together(*pair)
    state = {f"{number}.{name}": tensor for number, one in enumerate(pair) for name, tensor in one.state_dict().items()}
    assert safetensors.torch.save(state)  # which refuses tensors that share memory
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert joint_packed(pair) is None  # a compiler cannot ask where tensors lie


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
@torch.no_grad()
def test_one_launch_gives_what_each_gives(rows):
    linears = tuple(packed(n, 512, spread, n, "cuda") for n, spread in ((512, 1.0), (256, 0.02), (128, 5.0)))
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(9)).cuda().bfloat16()
    expected = [linear(x).float() for linear in linears]
    assert lay_packed_together(*linears)
    assert joint_packed(linears) is not None
    for linear, one, other in zip(linears, linears_of_one_input(x, *linears), expected, strict=True):
        assert torch.equal(linear(x).float(), other)
        assert (one.float() - other).norm() < 2**-8 * other.norm()  # fp32 sums in another order, rounded to bf16 once


module_linear = module.fp4_linear


@torch.no_grad()
def test_what_cannot_lie_together():
    one, other = packed(32, 64, 1.0, 1), packed(32, 64, 1.0, 2)
    assert not lay_packed_together(one) and not lay_packed_together(packed(33, 64, 1.0, 1), other)
    assert not lay_packed_together(one, packed(32, 128, 1.0, 1))
    assert not lay_packed_together(one, torch.nn.Linear(64, 32, bias=False))
    other.weight_tensor_scale = other.weight_tensor_scale * 3
    assert not lay_packed_together(one, other)  # no power of two between them
    other.weight_tensor_scale = torch.zeros(())
    assert not lay_packed_together(one, other)  # no number between them
    other.weight_tensor_scale = torch.full((), 2.0**30)
    assert not lay_packed_together(one, other)  # block scales have no room for it
    assert joint_packed((one, other)) is None
    pair = packed(32, 64, 1.0, 3), packed(32, 64, 2.0, 4)
    assert lay_packed_together(*pair) and joint_packed(pair) is not None
    handle = pair[0].register_forward_hook(lambda *args: None)
    assert joint_packed(pair) is None
    handle.remove()
    pair[1].weight_codes = pair[1].weight_codes.clone()
    assert joint_packed(pair) is None


@pytest.mark.parametrize("fp8", [False, True])
@torch.no_grad()
def test_a_packed_decoder_is_laid_out(fp8, monkeypatch):
    monkeypatch.setattr(w4a8, "MIN_ROWS", 12)
    config = DecoderConfig(vocab_size=50, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=2)
    model = decoder_module.Decoder(config)
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    for owner, name in (
        (attention, "q_proj"),
        (attention, "k_proj"),
        (attention, "v_proj"),
        (mlp, "gate_proj"),
        (mlp, "up_proj"),
    ):
        linear = getattr(owner, name)
        linear.weight.mul_(8.0 if name in ("k_proj", "up_proj") else 1.0)
        stored = StoredFP4Linear(linear, "mxfp4" if fp8 else "nvfp4", tiled=True, w4a8=fp8)
        setattr(owner, name, stored.over(stored.bytes_of(linear.weight, name)))
    ids = torch.arange(12)[None]
    expected = model(ids)
    lay_out_for_decoding(model)
    assert joint_packed((attention.q_proj, attention.k_proj, attention.v_proj)) is not None
    assert joint_packed((mlp.gate_proj, mlp.up_proj)) is not None
    if fp8:  # each rounds its input and multiplies by scales that were moved by powers of two
        assert torch.equal(model(ids), expected)
        products = module.joint_product(torch.randn(11, 64), None, (mlp.gate_proj, mlp.up_proj))
        assert products is not None, "few rows are one product"
    assert torch.allclose(model(ids), expected, rtol=1e-5, atol=1e-5)
