"""The ops as users call them, on the CPU: values, gradients, fake tensors, compilation, refusals."""

import pytest
import torch

from tests.kernels.emulation import random_weight
from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4 import layout, reference, w4a8
from vblackwell.kernels.fp4.linear import fp4_linear, fp4_linear_dx, whole_weight
from vblackwell.numerics.formats import FORMATS
from vblackwell.numerics.fp4 import quantize

N, K = 40, 72


def packed(format: str) -> tuple[torch.Tensor, ...]:
    if format.endswith("-tiled"):
        return random_weight(format.removesuffix("-tiled"), N, K)[1]
    form = FORMATS[format]
    codes = torch.randint(-127 if form.bits == 8 else 0, 128, form.codes_shape(N, K)).to(form.codes_dtype)
    if form.scale_dtype == torch.uint8:
        scales = torch.randint(100, 118, form.scales_shape(N, K), dtype=torch.uint8)
    else:
        scales = torch.rand(form.scales_shape(N, K)).to(form.scale_dtype)
    return codes, scales, torch.tensor(0.5 if format == "nvfp4" else 1.0)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
@pytest.mark.parametrize("format", [*FORMATS, "nvfp4-tiled", "mxfp4-tiled"])
def test_values_and_gradients(format, activation):
    weight = packed(format)
    w_NK = whole_weight(weight, format, N, K, torch.empty(0))
    assert torch.equal(w_NK, reference.dequantize(*weight, format, N, K))
    x, bias = torch.randn(2, 3, K, requires_grad=True), torch.randn(N, requires_grad=True)
    y = fp4_linear(x, *weight, bias, format, activation, N, K)
    dy = torch.randn_like(y)
    y.backward(dy)
    mine = y.detach(), x.grad.clone(), bias.grad.clone()
    x.grad = bias.grad = None
    y = reference.activate(x @ w_NK.t() + bias, activation)
    y.backward(dy)
    for got, expected in zip(mine, (y, x.grad, bias.grad), strict=True):
        # the same fp32 operations in another order of calls: a few units in the last place of the largest term
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("activation", [pytest.param("none", marks=pytest.mark.slow), "gelu"])
def test_opcheck(activation):
    """Schema, fake tensor, autograd registration and AOT dispatch, as torch.library checks them."""
    x, bias = torch.randn(3, K, requires_grad=True), torch.randn(N, requires_grad=True)
    args = (x, *packed("nvfp4-tiled"), bias, "nvfp4-tiled", activation, N, K)
    torch.library.opcheck(torch.ops.vblackwell.fp4_linear, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(5,), (2, 3), ()])
def test_a_direct_call_gives_the_bits_of_the_op(rows, dtype):
    weight, generator = packed("nvfp4-tiled"), torch.Generator().manual_seed(1)
    x, bias = torch.randn(*rows, K, generator=generator).to(dtype), torch.randn(N, generator=generator)
    found = []
    for function in (fp4_linear, torch.ops.vblackwell.fp4_linear.default):
        mine, its_bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
        y = function(mine, *weight, its_bias, "nvfp4-tiled", "gelu", N, K)
        y.float().square().sum().backward()
        with torch.no_grad():
            assert torch.equal(function(mine, *weight, its_bias, "nvfp4-tiled", "gelu", N, K), y)
        found.append((y.detach(), mine.grad, its_bias.grad))
    assert found[0][0].shape == (*rows, N) and found[0][0].dtype == dtype
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_compiles_as_one_graph():
    weight = packed("nvfp4-tiled")

    def layer(x, bias):
        return fp4_linear(x, *weight, bias, "nvfp4-tiled", "silu", N, K) * 2

    x, bias = torch.randn(3, K, requires_grad=True), torch.randn(N, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, bias), layer(x, bias))
    compiled(x, bias).sum().backward()
    grad = x.grad.clone()
    x.grad = None
    layer(x, bias).sum().backward()
    assert torch.equal(grad, x.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_autocast_casts_the_input_and_nothing_else(dtype):
    """Under autocast an op gives what it gives on the cast input: with all bits of scales and bias, and fp32 sums
    inside.
    """
    bias = torch.randn(N, requires_grad=True)
    for format in ("nvfp4-tiled", "nf4"):  # nf4 has fp32 block scales
        weight, x = packed(format), torch.randn(3, K, requires_grad=True)
        expected = fp4_linear(x.detach().to(dtype), *weight, bias, format, "gelu", N, K)
        with torch.autocast("cpu", dtype=dtype):
            y = fp4_linear(x, *weight, bias, format, "gelu", N, K)
            compiled = torch.compile(fp4_linear, fullgraph=True, backend="aot_eager")
            again = compiled(x, *weight, bias, format, "gelu", N, K)
            y.sum().backward()  # its products must not be cast either
        assert torch.equal(y, expected) and y.dtype == dtype and torch.equal(again, expected)
        grads = x.grad.clone(), bias.grad.clone()
        assert x.grad.dtype == bias.grad.dtype == torch.float32
        x.grad = bias.grad = None
        fp4_linear(x.to(dtype), *weight, bias, format, "gelu", N, K).sum().backward()
        assert torch.equal(grads[0], x.grad) and torch.equal(grads[1], bias.grad)
        bias.grad = None
    dy = torch.randn(3, N)
    expected = fp4_linear_dx(dy, *weight, format, N, K)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(fp4_linear_dx(dy, *weight, format, N, K), expected)


def test_no_rows_and_half_types():
    weight = packed("nvfp4-tiled")
    assert fp4_linear(torch.empty(0, K), *weight, None, "nvfp4-tiled", "none", N, K).shape == (0, N)
    x = torch.randn(4, K).bfloat16()
    assert fp4_linear(x, *weight, None, "nvfp4-tiled", "none", N, K).dtype == torch.bfloat16
    assert fp4_linear_dx(torch.empty(0, N), *weight, "nvfp4-tiled", N, K).shape == (0, K)


def test_refusals():
    codes, scales, scale = packed("nvfp4-tiled")
    x = torch.randn(2, K)
    for match, args in {
        "has 8 features": (x[:, :8], codes, scales, scale, None, "nvfp4-tiled", "none", N, K),
        "int64": (x.long(), codes, scales, scale, None, "nvfp4-tiled", "none", N, K),
        "format 'fp4'": (x, codes, scales, scale, None, "fp4", "none", N, K),
        "tanh": (x, codes, scales, scale, None, "nvfp4-tiled", "tanh", N, K),
        "do not belong": (x, codes[:, :1], scales, scale, None, "nvfp4-tiled", "none", N, K),
        "one fp32 value": (x, codes, scales, scale.double(), None, "nvfp4-tiled", "none", N, K),
        "no elements": (x, codes, scales, scale, None, "nvfp4-tiled", "none", 0, K),
        "a bias of .1,.": (x, codes, scales, scale, torch.ones(1), "nvfp4-tiled", "none", N, K),
        "a bias .* on meta": (x, codes, scales, scale, torch.ones(N, device="meta"), "nvfp4-tiled", "none", N, K),
    }.items():
        with pytest.raises(ConfigurationError, match=match):
            fp4_linear(*args)


def test_w4a8_costs_the_rounding_of_activations_alone():
    n, k = 48, 160
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    exponents = torch.randint(100, 115, (n, k // 32)).to(torch.uint8)
    tiled = layout.to_tiled(codes, exponents, torch.tensor(1.0), "mxfp4", n, k)
    top = w4a8.row_tops(tiled[1], n, k)
    x = torch.randn(w4a8.MIN_ROWS, k, requires_grad=True)
    y = w4a8.fp4_linear_w4a8(x, *tiled, top, None, "none", n, k)
    q, scale = w4a8.quantize_rows(x.detach())
    assert torch.equal(y, fp4_linear(q.float() * scale, *tiled, None, "mxfp4-tiled", "none", n, k))
    exact = fp4_linear(x, *tiled, None, "mxfp4-tiled", "none", n, k)
    sqnr = 10 * torch.log10(exact.square().sum() / (y - exact).square().sum())
    assert sqnr > 29  # E4M3 keeps 3 bits after the leading one: 31.5 dB on Gaussian rows
    y.sum().backward()
    assert torch.equal(x.grad, fp4_linear_dx(torch.ones_like(y), *tiled, "mxfp4-tiled", n, k))
    few = x.detach()[1:].view(2, 448, k)
    wanted = fp4_linear(few, *tiled, None, "mxfp4-tiled", "none", n, k)
    assert torch.equal(w4a8.fp4_linear_w4a8(few, *tiled, top, None, "none", n, k), wanted)


@pytest.mark.parametrize(
    ("format", "block_size"),
    [
        ("nvfp4", None),
        ("mxfp4", None),
        ("nf4", None),
        ("int4", 32),
        ("int4", 128),
        ("int8", None),
        ("int8", 32),
        ("int8", 6),
    ],
)
@pytest.mark.parametrize("k", [32, 88, 192, 4096])
def test_the_reference_decodes_the_blocks_that_were_packed(format: str, block_size: int | None, k: int):
    w_NK = torch.randn(70, k, generator=torch.Generator().manual_seed(k))
    packed = quantize(w_NK, format, scale_search="max", block_size=block_size)
    weight = packed.codes, packed.block_scales, packed.tensor_scale
    assert torch.equal(reference.dequantize(*weight, format, 70, k), packed.dequantize())
