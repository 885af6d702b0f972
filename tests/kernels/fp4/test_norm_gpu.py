"""A norm and an FP4 linear in one kernel, on a GPU:
against float64, bits on repetition, graphs, and which rows are few.
"""

import copy
import functools

import pytest
import torch
from torch import nn

from tests.kernels.emulation import random_weight
from vblackwell.kernels.fp4.norm import fp4_norm_linear
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.nn.convert.linears import replace_linears, select_linears
from vblackwell.nn.decoder.block import KVCache
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear import one_input
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.one_input import linears_of_one_input

pytestmark = pytest.mark.gpu


# Every power of two of rows, whole and with tokens missing; N of fewer and of more rows than blocks, and
# none a multiple of what a block takes; K that is no multiple of 64, short, and of several chunks. Odd rows have a mean
# of ten spreads.
SHAPES = {(40, 136): (1, 13), (1056, 4096): (2, 5, 16), (512, 14336): (8, 16), (9000, 512): (4,)}
# x comes in bulk copies where K is a multiple of 64 and at least 1024.
CASES = [(n, k, m) for (n, k), rows in SHAPES.items() for m in rows]


@functools.cache
def weight(n, k):
    w_NK, tiled = random_weight("nvfp4", n, k)
    return w_NK.cuda(), tuple(tensor.cuda() for tensor in tiled)


@pytest.mark.parametrize(("n", "k", "m"), CASES)
def test_against_float64(n, k, m):
    w_NK, tiled = weight(n, k)
    mean = 30.0 * (m % 2)
    scales = torch.logspace(-1, 2, m, device="cuda")[:, None]
    x = (torch.randn(m, k, device="cuda") * scales * 3 + mean).bfloat16()
    gain = (1 + 0.3 * torch.randn(k, device="cuda")).bfloat16()
    bias = torch.randn(n, device="cuda").bfloat16()
    args = (x, gain, 1e-5, *tiled, bias, "nvfp4-tiled", "none", n, k)
    with use_backend("fp4_norm_linear", "mma"):
        y, again = fp4_norm_linear(*args), fp4_norm_linear(*args)
    assert torch.equal(y, again)
    exact = nn.functional.rms_norm(x.double(), (k,), gain.double(), eps=1e-5) @ w_NK.double().t() + bias.double()
    # As in test_cuda_source.py: 2^-8 of what is summed up for rounding x times gain, 1e-5 for fp32; and 2^-8 for the
    # output's rounding.
    spread = x.double().square().mean(1)
    products = (x.double() * gain.double()).abs() @ w_NK.double().abs().t() / (spread + 1e-5).sqrt()[:, None]
    slack = 1e-5 * (products + exact.abs() + bias.abs())
    bound = 2**-8 * products + slack
    assert ((y.double() - exact).abs() <= bound + 2**-8 * (exact.abs() + bound)).all()
    with use_backend("fp4_norm_linear", "separate"):
        apart = fp4_norm_linear(*args)
    ours, theirs = ((got.double() - exact).norm() for got in (y, apart))
    if n >= 512:  # fewer rows of weights leave the sum of errors to a few large ones
        assert (
            ours <= 2 * theirs
        )  # one rounding on the way each, of values that a factor moves to another place between powers of two


def run(norm, linear, x):
    return linears_of_one_input(one_input.normed(x, norm, linear), linear)[0]


def test_few_rows_are_fused_and_say_the_same():
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    linear = FusedFP4Linear(512, 256, activation="gelu", **options).quantize().requires_grad_(False)
    norm = nn.RMSNorm(512, eps=1e-5, **options).requires_grad_(False)
    nn.init.normal_(norm.weight, 1.0, 0.2)
    most = 4 if torch.cuda.get_device_capability()[0] == 9 else 16
    for rows in (1, 4, 7, 17):
        x = torch.randn(rows, 512, **options) + 5
        y, apart = run(norm, linear, x), linear(norm(x))
        assert (y - apart).float().norm() <= 1e-2 * apart.float().norm()  # three roundings of 2^-9 each
        assert torch.equal(y, apart) == (rows > most), "another order of roundings, up to there alone"
        assert torch.equal(run(norm, copy.deepcopy(linear), x), y)
    x = torch.randn(4, 512, **options)
    expected = run(norm, linear, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(norm, linear, x)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, expected)
    moved = copy.deepcopy(linear).cpu().cuda()
    assert torch.equal(run(norm, moved, x), expected)


# torch 2.11 warns of itself when inductor is imported under Python 3.12.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_norm_and_linear_compile_into_one_graph():
    options = {"device": "cuda", "dtype": torch.bfloat16}
    norm, linear = nn.RMSNorm(512, eps=1e-5, **options), FusedFP4Linear(512, 256, **options).quantize()
    x = torch.randn(4, 512, **options)
    compiled = torch.compile(lambda x: run(norm, linear, x), fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), run(norm, linear, x))


def test_a_packed_decoder_decodes_the_same_with_and_without(monkeypatch):
    config = DecoderConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_layers=3, num_heads=4, max_position=64
    )
    model = Decoder(config, device="cuda", dtype=torch.bfloat16).requires_grad_(False).eval()
    replace_linears(model, select_linears(model), FusedFP4Linear.from_linear)
    for layer in model.modules():
        if isinstance(layer, FusedFP4Linear):
            layer.quantize()
    ids = torch.arange(40, device="cuda").view(1, 40)
    results = []
    for inside in (True, False):
        monkeypatch.setattr(one_input, "on_gpu", lambda x, inside=inside: inside)
        cache = KVCache(config, 64)
        model(ids, cache=cache)
        results.append(torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(3)]).float())
    got, expected = results
    assert not torch.equal(got, expected), "one of them has its norms in the kernels"
    assert (got - expected).norm() <= 2e-2 * expected.norm()  # bf16 activations through three layers, 2^-9 a rounding
