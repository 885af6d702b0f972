"""NormFP4Linear: what it computes is the linear of the norm, wherever it runs; when it is one op, and when it must not be."""

import copy

import pytest
import torch
from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.nn.convert.model import convert_linears
from vblackwell.nn.decoder.block import AddRMSNorm, RMSNorm
from vblackwell.nn.decoder.cache import KVCache
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.decoder.norm_linear import NormFP4Linear
from vblackwell.nn.linear import fp4_state, normed_input
from vblackwell.nn.linear import fused_fp4 as linear_module
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear

K, N = 64, 48
NORMS = {"rms": lambda: nn.RMSNorm(K, eps=1e-5), "ours": lambda: RMSNorm(K, 1e-5), "layer": lambda: nn.LayerNorm(K)}


@pytest.fixture
def fused(monkeypatch):
    """As on a GPU: tiles, and the op for few rows; on the CPU it runs its reference. The op's calls, as a list."""
    calls = []

    def counted(*args):
        calls.append(args)
        return op(*args)

    op = normed_input.fp4_norm_linear
    monkeypatch.setattr(normed_input, "on_gpu", lambda x: True)
    monkeypatch.setattr(normed_input, "fp4_norm_linear", counted)
    monkeypatch.setattr(linear_module, "place", lambda packed, tiles: fp4_state.tiled(packed))
    return calls


def build(name: str, dtype=torch.bfloat16, **options) -> NormFP4Linear:
    torch.manual_seed(0)
    norm = NORMS[name]()
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return NormFP4Linear(norm, FusedFP4Linear(K, N, activation="silu", **options)).to(dtype).requires_grad_(False)


def close(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Up to three roundings to bf16, of norm, bias and output, 2^-9 each."""
    return bool((y - expected).float().norm() <= 1e-2 * expected.float().norm())


@pytest.mark.parametrize("name", NORMS)
def test_on_a_cpu_it_is_the_linear_of_the_norm(name):
    module, x = build(name, torch.float32), torch.randn(3, K)
    assert torch.equal(module(x), module.linear(module.norm(x)))
    module.quantize()
    assert torch.equal(module(x), module.linear(module.norm(x)))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_are_one_op_with_the_same_result(name, bias, fused):
    module = build(name, bias=bias).quantize()
    for rows, ops in ((1, 1), (16, 1), (17, 0)):
        fused.clear()
        x = torch.randn(rows, K).bfloat16() + 3
        y = module(x)
        assert len(fused) == ops
        assert close(y, module.linear(module.norm(x)))


def test_it_stays_apart_where_the_op_would_be_wrong(fused):
    module, x = build("rms"), torch.randn(2, K).bfloat16()
    module(x)  # not packed
    module.quantize()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(x)
    module(x.clone().requires_grad_()).sum().backward()
    module.norm.requires_grad_(True)
    module(x).sum().backward()
    assert module.norm.weight.grad is not None
    build("rms", torch.float32).quantize()(x.float())
    assert fused == []
    with torch.no_grad():
        module(x)
    assert len(fused) == 1
    on_fp8 = build("rms", format="mxfp4", w4a8=True).quantize()
    on_fp8(x)
    assert len(fused) == 1


@pytest.mark.parametrize("name", NORMS)
def test_states_copies_and_casts_keep_the_folded_vectors_true(name, fused):
    module, x = build(name).quantize(), torch.randn(2, K).bfloat16()
    y = module(x)
    assert {key.split(".")[0] for key in module.state_dict()} == {"norm", "linear"}
    fresh = build(name)
    nn.init.zeros_(fresh.norm.weight)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(x), y)
    assert torch.equal(copy.deepcopy(module)(x), y)
    assert torch.equal(copy.deepcopy(module).float().bfloat16()(x), y)
    nn.init.constant_(module.norm.weight, 2.0)
    module.fold()
    assert close(module(x), module.linear(module.norm(x))) and not close(module(x), y)
    assert len(fused) == 6


def test_compiles_into_one_graph(fused):
    module, x = build("layer").quantize(), torch.randn(2, K).bfloat16()
    plain = NormFP4Linear(module.norm, module.linear)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.cat([x] * 10)), plain(torch.cat([x] * 10)))


def test_what_cannot_be_fused_is_refused():
    linear = FusedFP4Linear(K, N)
    for norm in (nn.BatchNorm1d(K), AddRMSNorm(K, 1e-5)):
        with pytest.raises(ConfigurationError, match="no norm that can be fused"):
            NormFP4Linear(norm, linear)
    for norm in (nn.RMSNorm(K, elementwise_affine=False), nn.LayerNorm(K + 1)):
        with pytest.raises(ConfigurationError, match="needs a weight"):
            NormFP4Linear(norm, linear)


def packed_decoder() -> Decoder:
    config = DecoderConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, max_position=40
    )
    model = Decoder(config).bfloat16().requires_grad_(False).eval()
    convert_linears(model, use_fp4=False)
    for module in model.modules():
        if isinstance(module, FusedFP4Linear):
            module.quantize()
    return model


def test_a_packed_decoder_decodes_with_its_first_norm_inside_the_projections(fused, monkeypatch):
    model, ids = packed_decoder(), torch.arange(20).view(1, 20) % 50
    results = []
    for inside in (True, False):
        monkeypatch.setattr(normed_input, "on_gpu", lambda x, inside=inside: inside)
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
    monkeypatch.setattr(normed_input, "on_gpu", lambda x: True)
    fused.clear()
    model(ids[:, :1])
    assert len(fused) == 3, "a norm with a hook is called"


@pytest.mark.parametrize(("capability", "inside"), [((8, 6), True), ((9, 0), False)])
def test_how_many_rows_are_few_is_the_gpu_s_own_matter(fused, monkeypatch, capability, inside):
    """Six rows of a K that has no bulk copies: on Hopper a norm of its own is faster, elsewhere not."""
    monkeypatch.setattr(normed_input, "_capability", lambda x: capability)
    norm, linear = nn.RMSNorm(K).bfloat16(), FusedFP4Linear(K, N).bfloat16().quantize().requires_grad_(False)
    norm.requires_grad_(False)
    rows = normed_input.normed(torch.randn(6, K).bfloat16(), norm, linear)
    assert isinstance(rows, normed_input.NormedByPacked) == inside


@pytest.mark.parametrize("dynamic", [None, True])
def test_rows_for_linears_compile_into_one_graph(dynamic):
    """Every block asks whether its norm goes with the linears, packed or not."""
    norm, linear = nn.RMSNorm(64), nn.Linear(64, 32)
    run = torch.compile(
        lambda x: linear(normed_input.normed(x, norm, linear)), backend="eager", fullgraph=True, dynamic=dynamic
    )
    for rows in (2, 3):
        x = torch.randn(rows, 64)
        assert torch.equal(run(x), linear(norm(x)))
