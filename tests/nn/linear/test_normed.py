"""Norms that are computed with the packed linears after them: the same results, and when they must stay apart."""

import pytest
import torch
from torch import nn

from vblackwell.nn.convert.linears import replace_linears, select_linears
from vblackwell.nn.decoder.block import KVCache, RMSNorm
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear import fused_fp4 as linear_module
from vblackwell.nn.linear import one_input as module
from vblackwell.nn.linear import packed_linear
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.one_input import linears_of_one_input

K, N = 64, 48
NORMS = {"rms": lambda: nn.RMSNorm(K, eps=1e-5), "ours": lambda: RMSNorm(K, 1e-5)}


@pytest.fixture
def fused(monkeypatch):
    """As on a GPU: tiles, and the op for few rows; on the CPU it runs its reference. The op's calls, as a list."""
    calls = []

    def counted(*args):
        calls.append(args)
        return op(*args)

    op = module.fp4_norm_linear
    monkeypatch.setattr(module, "on_gpu", lambda x: True)
    monkeypatch.setattr(module, "fp4_norm_linear", counted)
    monkeypatch.setattr(linear_module, "place", lambda packed, by: packed_linear.place(packed, True, by))
    return calls


def build(name: str, dtype=torch.bfloat16, **options) -> tuple[nn.RMSNorm, FusedFP4Linear]:
    torch.manual_seed(0)
    norm = NORMS[name]()
    nn.init.normal_(norm.weight, 1.0, 0.3)
    linear = FusedFP4Linear(K, N, activation="silu", **options)
    return norm.to(dtype).requires_grad_(False), linear.to(dtype).requires_grad_(False)


def run(norm: nn.RMSNorm, linear: FusedFP4Linear, x: torch.Tensor) -> torch.Tensor:
    return linears_of_one_input(module.normed(x, norm, linear), linear)[0]


def close(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Up to three roundings to bf16, of norm, bias and output, 2^-9 each."""
    return bool((y - expected).float().norm() <= 1e-2 * expected.float().norm())


@pytest.mark.parametrize("name", NORMS)
def test_on_a_cpu_it_is_the_linear_of_the_norm(name):
    (norm, linear), x = build(name, torch.float32), torch.randn(3, K)
    assert torch.equal(run(norm, linear, x), linear(norm(x)))
    linear.quantize()
    assert torch.equal(run(norm, linear, x), linear(norm(x)))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_are_one_op_with_the_same_result(name, bias, fused):
    norm, linear = build(name, bias=bias)
    linear.quantize()
    for rows, ops in ((1, 1), (16, 1), (17, 0)):
        fused.clear()
        x = torch.randn(rows, K).bfloat16() + 3
        y = run(norm, linear, x)
        assert len(fused) == ops
        assert close(y, linear(norm(x)))


def test_it_stays_apart_where_the_op_would_be_wrong(fused):
    (norm, linear), x = build("rms"), torch.randn(2, K).bfloat16()
    run(norm, linear, x)  # not packed
    linear.quantize()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(norm, linear, x)
    run(norm, linear, x.clone().requires_grad_()).sum().backward()
    norm.requires_grad_(True)
    run(norm, linear, x).sum().backward()
    assert norm.weight.grad is not None
    wide_norm, wide = build("rms", torch.float32)
    run(wide_norm, wide.quantize(), x.float())
    assert fused == []
    with torch.no_grad():
        run(norm, linear, x)
        assert len(fused) == 1
        run(norm, build("rms", format="mxfp4", w4a8=True)[1].quantize(), x)
    assert len(fused) == 2, "few rows of w4a8 are multiplied as they are"


def packed_decoder() -> Decoder:
    config = DecoderConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, max_position=40
    )
    model = Decoder(config).bfloat16().requires_grad_(False).eval()
    replace_linears(model, select_linears(model), FusedFP4Linear.from_linear)
    for layer in model.modules():
        if isinstance(layer, FusedFP4Linear):
            layer.quantize()
    return model


def test_a_packed_decoder_decodes_with_its_first_norm_inside_the_projections(fused, monkeypatch):
    model, ids = packed_decoder(), torch.arange(20).view(1, 20) % 50
    results = []
    for inside in (True, False):
        monkeypatch.setattr(module, "on_gpu", lambda x, inside=inside: inside)
        fused.clear()
        cache = KVCache(model.config, 40)
        prompt = model(ids, cache=cache)
        assert fused == [], "a prompt of 20 rows is no few rows"
        token = model(ids[:, :1], cache=cache)
        assert len(fused) == (2 * 3 if inside else 0)
        results.append((prompt, token))
    for got, expected in zip(*results, strict=True):
        # on a CPU the op runs the same norm and the same products
        assert torch.equal(got, expected)
    model.layers[0].input_layernorm.register_forward_hook(lambda module, args, output: output * 2)
    monkeypatch.setattr(module, "on_gpu", lambda x: True)
    fused.clear()
    model(ids[:, :1])
    assert len(fused) == 3, "a norm with a hook is called"


@pytest.mark.parametrize(("capability", "inside"), [((8, 6), True), ((9, 0), False)])
def test_how_many_rows_are_few_is_the_gpu_s_own_matter(fused, monkeypatch, capability, inside):
    """Six rows of a K that has no bulk copies: on Hopper a separate norm is faster, elsewhere not."""
    monkeypatch.setattr(module, "_capability", lambda x: capability)
    norm, linear = nn.RMSNorm(K).bfloat16(), FusedFP4Linear(K, N).bfloat16().quantize().requires_grad_(False)
    norm.requires_grad_(False)
    rows = module.normed(torch.randn(6, K).bfloat16(), norm, linear)
    assert isinstance(rows, module.Unnormed) == inside


@pytest.mark.parametrize("dynamic", [None, True])
def test_rows_for_linears_compile_into_one_graph(dynamic):
    """Every block asks whether its norm goes with the linears, packed or not."""
    norm, linear = nn.RMSNorm(64), nn.Linear(64, 32)
    run = torch.compile(
        lambda x: linear(module.normed(x, norm, linear)), backend="eager", fullgraph=True, dynamic=dynamic
    )
    for rows in (2, 3):
        x = torch.randn(rows, 64)
        assert torch.equal(run(x), linear(norm(x)))
