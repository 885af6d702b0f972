"""A norm and an FP4 linear as one op, on the CPU: values, the rule of autocast, one graph, refusals.
test_cuda_source.py has the kernel.
"""

import pytest
import torch
from torch.nn import functional

from tests.kernels.emulation import random_weight
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.fp4 import norm as fp4_norm
from vblackwell.kernels.fp4.linear import fp4_linear
from vblackwell.kernels.fp4.norm import fp4_norm_linear
from vblackwell.kernels.runtime.registry import Request, choose, explain, use_backend

N, K, EPS = 40, 72, 1e-5
REST = ("nvfp4-tiled", "silu", N, K)


def case(dtype=torch.float32):
    torch.manual_seed(0)
    _, tiled = random_weight("nvfp4", N, K)
    x, gain, bias = torch.randn(2, 3, K).to(dtype), torch.randn(K).to(dtype), torch.randn(N).to(dtype)
    return x, gain, tiled, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_linear_of_the_norm(dtype):
    x, gain, tiled, bias = case(dtype)
    y = fp4_norm_linear(x, gain, EPS, *tiled, bias, *REST)
    rows = functional.rms_norm(x, (K,), gain, EPS)
    assert y.dtype == dtype and torch.equal(y, fp4_linear(rows, *tiled, bias, *REST))


def test_opcheck_autocast_and_one_graph():
    x, gain, tiled, bias = case()
    torch.library.opcheck(torch.ops.vblackwell.fp4_norm_linear, (x, gain, EPS, *tiled, bias, *REST))
    expected = fp4_norm_linear(x, gain, EPS, *tiled, bias, *REST)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fp4_norm_linear(x, gain, EPS, *tiled, bias, *REST), expected), "norms are not cast"
    compiled = torch.compile(fp4_norm_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, gain, EPS, *tiled, bias, *REST), expected)
    assert fp4_norm_linear(x[:0], gain, EPS, *tiled, bias, *REST).shape == (0, 3, N)


def request(**changes):
    values = {"device": torch.device("cuda", 0), "capability": (9, 0), "dtype": torch.bfloat16, "format": "mxfp4-tiled"}
    return Request(**{**values, "m": 16, "n": 4096, "k": 4096, **changes})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "mma"),
        ({"k": 14336}, "mma"),
        ({"m": 8, "n": 8192, "k": 8192}, "mma"),
        ({"m": 9, "n": 8192, "k": 8192}, "separate"),
        ({"m": 4, "k": 4104}, "separate"),
        ({"m": 2, "k": 4104}, "mma"),
        ({"m": 5, "k": 1000}, "separate"),
        ({"m": 4, "k": 1000}, "mma"),
        ({"m": 1, "n": 28672, "k": 8192}, "mma"),
        ({"n": 28672, "k": 8192, "capability": (8, 6)}, "mma"),
        ({"m": 17, "capability": (8, 6)}, "separate"),
        ({"m": 1, "dtype": torch.float16}, "separate"),
        ({"m": 1, "dtype": torch.float32}, "separate"),
        ({"m": 1, "k": 4100}, "separate"),
        ({"m": 1, "format": "nf4"}, "separate"),
        ({"m": 1, "device": torch.device("cpu")}, "separate"),
    ],
)
def test_one_kernel_where_it_is_faster(changes, name):
    assert choose("fp4_norm_linear", fp4_norm.NORM_LINEAR, request(**changes)).name == name


def test_the_slower_one_is_there_for_who_asks():
    large = request(n=28672, k=8192)
    assert "16 rows of 8192 features: above 8" in explain(fp4_norm.NORM_LINEAR, large)["mma"][0]
    with use_backend("fp4_norm_linear", "mma"):
        assert choose("fp4_norm_linear", fp4_norm.NORM_LINEAR, large).name == "mma"
        with pytest.raises(Unsupported, match="17 rows: it takes up to 16"):
            choose("fp4_norm_linear", fp4_norm.NORM_LINEAR, request(m=17))


def test_refusals_say_why():
    reasons = explain(fp4_norm.NORM_LINEAR, request(m=17, dtype=torch.float16, k=4100, capability=(8, 6)))["mma"]
    assert len(reasons) == 4 and "float16" in reasons[0] and "17 rows" in reasons[1] and "multiples of 8" in reasons[2]
    x, gain, tiled, bias = case()
    with pytest.raises(ConfigurationError, match="norm's weight"):
        fp4_norm_linear(x, gain[:8], EPS, *tiled, bias, *REST)
    with pytest.raises(ConfigurationError, match="norm's weight"):
        fp4_norm_linear(x.bfloat16(), gain, EPS, *tiled, bias, *REST)
    with pytest.raises(ConfigurationError, match="tanh"):
        fp4_norm_linear(x, gain, EPS, *tiled, bias, "nvfp4-tiled", "tanh", N, K)
    with use_backend("fp4_norm_linear", "mma"), pytest.raises(Unsupported, match="on cpu"):
        fp4_norm_linear(x, gain, EPS, *tiled, bias, *REST)
