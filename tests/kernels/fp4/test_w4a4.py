"""Products on FP4 tensor cores (w4a4). What the kernels hand to PyTorch's matmul is compared byte for byte with the
oracle, and read by an emulation of that matmul written from cuBLAS' documentation; the matmul itself runs on Blackwell
alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from tests.kernels.pointwise.oracle import DEVICE, poisoned
from tests.sqnr import sqnr
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.fp4 import layout, reference, w4a4
from vblackwell.kernels.fp4.encode_triton import encode_rows
from vblackwell.kernels.fp4.linear import fp4_linear, fp4_linear_dx
from vblackwell.kernels.fp4.tile_triton import untile
from vblackwell.kernels.runtime.registry import Request, choose, explain
from vblackwell.numerics import fp4
from vblackwell.numerics.formats import E2M1_VALUES

# What overflows or is not a number on purpose, in numpy's words.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in|All-NaN slice:RuntimeWarning")
CUDA = torch.device("cuda", 0)
Weight = tuple[Tensor, Tensor, Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiled(format: str, n: int, k: int) -> Weight:
    packed = fp4.quantize(drawn(n, k, seed=n + k), format)
    return layout.to_tiled(packed.codes, packed.block_scales, packed.tensor_scale, format, n, k)


def place_of(row: Tensor, block: Tensor, blocks: int) -> Tensor:
    """cuBLAS, "1D block scaling factors layout": where the factor of a row's block is."""
    tiles_in_a_row = (blocks + 3) // 4
    tile = (row // 128) * tiles_in_a_row + block // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + block % 4


def unswizzled(flat: Tensor, rows: int, blocks: int) -> Tensor:
    """(rows, blocks) of what FP4 tensor cores read. All that belongs to no row or block is zero."""
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    places = place_of(row, block, blocks)
    assert flat.numel() == -(-rows // 128) * 128 * (-(-blocks // 4) * 4)
    padding = torch.ones_like(flat, dtype=torch.bool)
    padding[places.flatten()] = False
    assert padding.sum() == flat.numel() - rows * blocks and not flat[padding].any()
    return flat[places]


def e4m3(code: Tensor) -> Tensor:
    """Values of positive E4M3 codes, fp64: (8 + m) 2^(e - 10), or m 2^-9."""
    exponent, mantissa = (code >> 3).double(), (code & 7).double()
    assert not (code >= 0x7F).any()
    return torch.where(exponent > 0, (8 + mantissa) * torch.pow(2.0, exponent - 10), mantissa * 2.0**-9)


def operand(codes: Tensor, scales: Tensor) -> Tensor:
    """(rows, K) fp64 of packed codes, the low nibble's element first, and swizzled scales."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    elements = torch.stack((values[(codes & 15).long()], values[(codes >> 4).long()]), -1).flatten(1)
    factors = e4m3(unswizzled(scales, codes.shape[0], codes.shape[1] // 8))
    return elements * factors.repeat_interleave(16, 1)


def emulated(a: Tensor, b: Tensor, scale_a, recipe_a, scale_b, recipe_b, **how) -> Tensor:
    """PyTorch's `scaled_mm` in the nvfp4 recipe, rounded once, of what PyTorch itself accepts for a GPU."""
    assert a.is_contiguous() and b.t().is_contiguous() and a.dtype == b.dtype == torch.float4_e2m1fn_x2
    assert recipe_a == recipe_b == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    assert how["swizzle_a"] == how["swizzle_b"] == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]

    def stand_in(tensor: Tensor) -> Tensor:
        byte = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.uint8, device="cuda")
        return byte.view(tensor.dtype) if tensor.itemsize == 1 else torch.empty((), device="cuda")

    with FakeTensorMode():
        scales = [[stand_in(each) for each in scale] for scale in (scale_a, scale_b)]
        output = scaled_mm(stand_in(a), stand_in(b), scales[0], recipe_a, scales[1], recipe_b, **how)
        assert output.shape == (a.shape[0], b.shape[1]) and output.dtype == how["output_dtype"]
    (a_scales, a_unit), (b_scales, b_unit) = ([each.cpu() for each in scale] for scale in (scale_a, scale_b))
    sums = (
        operand(a.view(torch.uint8).cpu(), a_scales.view(torch.uint8))
        @ operand(b.t().view(torch.uint8).cpu(), b_scales.view(torch.uint8)).t()
    )
    return (sums * (a_unit * b_unit).double()).to(torch.float32).to(how["output_dtype"]).to(DEVICE)


@pytest.fixture
def matmul(monkeypatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", emulated)


def by_tensor_cores(x: Tensor, weight: Weight, bias: Tensor | None, format: str, activation: str, n: int) -> Tensor:
    """The backend's own code, kernels and all, on whatever device is here."""
    device = torch.device(DEVICE)
    request = Request(device, (10, 0), x.dtype, format, x.shape[0], n, x.shape[1])
    here = [each.to(device) for each in weight]
    with poisoned():
        y = w4a4._scaled_mm(x.to(device), here, None if bias is None else bias.to(device), request, activation)
    return y.cpu()


# -- operands ----------------------------------------------------------------------------------------------------------


def halves(rows: int) -> Tensor:
    """Elements half-way between two values of E2M1, at scales half-way between two of E4M3 and just next to them."""
    between = (torch.tensor(E2M1_VALUES[:8]).unfold(0, 2, 1).mean(1)).repeat(3)[:15]
    step = torch.arange(rows)[:, None]
    scale = (8 + (step % 8) + 0.5 * (step % 2)) * 2.0 ** (step % 19 - 12)
    return torch.cat((between * scale, 6 * scale, between * scale, torch.full_like(scale, 6.0) * scale), 1)


def subnormal(rows: int) -> Tensor:
    """Blocks whose scales are below E4M3's normal ones, down to none, next to one of 2688."""
    w = drawn(rows, 64) * 2.0 ** -torch.arange(rows)[:, None].float()
    w[0, 0] = 2688.0
    return w


def extremes(rows: int) -> Tensor:
    w = torch.zeros(rows, 64)
    w[0, 3], w[1], w[2, 5], w[3, 20] = 6e4, -0.0, -3.1e4, 2.0**-14
    return w


ROWS = {
    "plain": lambda: drawn(5, 96),
    "many": lambda: drawn(130, 32, seed=1),
    "tiles": lambda: drawn(128, 64, seed=2),
    "spread": lambda: drawn(9, 96, seed=3) * 2.0 ** drawn(9, 96, seed=4).mul(4).clamp(-9, 9),
    "halves": lambda: halves(40),
    "subnormal": lambda: subnormal(30),
    "extremes": lambda: extremes(4),
    "zeros": lambda: torch.zeros(3, 32),
    "least": lambda: drawn(3, 32, seed=5) * 2.0**-22,
}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ROWS)
def test_rows_are_the_oracle_s_bytes(case, dtype):
    x = ROWS[case]().to(dtype)
    expected = w4a4.quantize_rows(x)
    with poisoned():
        codes, scales, unit = (each.cpu() for each in encode_rows(x.to(DEVICE)))
    assert torch.equal(codes, expected.codes) and torch.equal(unit, expected.tensor_scale)
    assert torch.equal(unswizzled(scales, *expected.block_scales.shape), expected.block_scales)


# Triton's interpreter takes subnormal bf16 for zeros.
@pytest.mark.parametrize("largest", [*([2.0**-133, 2.0**-124] if DEVICE == "cuda" else []), 1e-30, 3.0, 3.3e38])
def test_bf16_of_any_size(largest):
    x = drawn(3, 32).mul(largest / 4).bfloat16()
    x[1, 7] = largest
    expected = w4a4.quantize_rows(x)
    codes, scales, unit = (each.cpu() for each in encode_rows(x.to(DEVICE)))
    assert torch.equal(codes, expected.codes) and torch.equal(unit, expected.tensor_scale)
    assert torch.equal(unswizzled(scales, 3, 2), expected.block_scales)


@pytest.mark.parametrize("amax", [2688.0, 2688.1, 1344.0, 1.0, 448.0, 2.0**-120, 0.0])
def test_the_tensor_scale_is_the_least_power_of_two_that_fits(amax):
    unit = float(w4a4.power_scale(torch.tensor([[0.5 * amax, -amax]])))
    assert torch.frexp(torch.tensor(unit))[0] == 0.5
    assert amax <= 2688 * unit and (amax > 2688 * unit / 2 or unit == 2.0**-126)


def test_a_row_does_not_depend_on_the_others():
    x = drawn(6, 64) * torch.tensor([1.0, 0.02, 3.0, 50.0, 0.03, 7.0])[:, None]
    together = w4a4.quantize_rows(x).dequantize()
    for row in range(6):
        assert torch.equal(w4a4.quantize_rows(x[row : row + 1]).dequantize()[0], together[row])


@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 96), (128, 64), (144, 160)])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_tiles_come_back_as_codes_and_e4m3_scales(format, n, k):
    weight = tiled(format, n, k)
    with poisoned():
        codes, scales = (each.cpu() for each in untile(weight[0].to(DEVICE), weight[1].to(DEVICE), n, k))
    assert torch.equal(codes, layout.from_tiled(*weight, f"{format}-tiled", n, k)[0])
    assert torch.equal(
        (operand(codes, scales) * weight[2].double()).float(), reference.weight_of(weight, f"{format}-tiled", n, k)
    )


def test_every_scale_and_every_code():
    """All 127 of E4M3, and mxfp4 blocks as far apart as tiles hold."""
    codes = torch.arange(128, dtype=torch.uint8)[:, None].repeat(1, 16) * 2 + torch.arange(16, dtype=torch.uint8) % 2
    scales = torch.arange(128, dtype=torch.uint8).clamp(max=126)[:, None].repeat(1, 2)
    weight = layout.to_tiled(codes, scales, torch.tensor(0.25), "nvfp4", 128, 32)
    found, flat = (each.cpu() for each in untile(weight[0].to(DEVICE), weight[1].to(DEVICE), 128, 32))
    assert torch.equal(unswizzled(flat, 128, 2), scales) and torch.equal(found[1:], codes[1:]) and not found[0].any()
    exponents = (torch.arange(16, dtype=torch.uint8) + 100)[:, None].repeat(1, 1)
    exponents[15] = 117
    weight = layout.to_tiled(codes[112:], exponents, torch.tensor(1.0), "mxfp4", 16, 32)
    found, flat = (each.cpu() for each in untile(weight[0].to(DEVICE), weight[1].to(DEVICE), 16, 32))
    exact = reference.weight_of(weight, "mxfp4-tiled", 16, 32)
    assert torch.equal((operand(found, flat) * weight[2].double()).float(), exact) and (exact != 0).any(1).all()


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 16, 32), (130, 144, 96)])
def test_integers_are_multiplied_exactly(matmul, format, m, n, k):
    """Sums of K products of integers up to 6 are exact in fp32 in any order, and the output's rounding is the one."""
    values = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    x, w = (values[torch.randint(6, shape)] * (-1) ** torch.randint(2, shape) for shape in ((m, k), (n, k)))
    x[:, ::16], w[:, ::16] = 6.0, 6.0  # so that every block's scale is a power of two
    packed = fp4.quantize(w, format, "mse")
    weight = layout.to_tiled(packed.codes, packed.block_scales, packed.tensor_scale, format, n, k)
    y = by_tensor_cores(x.bfloat16(), weight, None, f"{format}-tiled", "none", n)
    assert torch.equal(packed.dequantize(), w) and torch.equal(y, (x @ w.t()).bfloat16())


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_products_are_the_reference_s(matmul, format, dtype, activation):
    m, n, k = 9, 48, 160
    weight, x, bias = tiled(format, n, k), drawn(m, k).to(dtype), drawn(n, seed=9).to(dtype)
    y = by_tensor_cores(x, weight, bias, f"{format}-tiled", activation, n)
    request = Request(torch.device("cpu"), (0, 0), dtype, f"{format}-tiled", m, n, k)
    exact = w4a4._reference(x.float(), weight, bias, request, activation)
    product = w4a4._reference(x.float(), weight, None, request, "none")
    # The product is rounded to bf16, 2^-9 of it, and so are the bias, their sum and, of a slope of 1.13 at most, what
    # the activation makes of it.
    bound = 2.0**-8 * (product.abs() + bias.float().abs() + 2 * (product + bias.float()).abs()) + 1e-6
    assert y.dtype == dtype and ((y.float() - exact).abs() <= bound).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_nan_throughout(matmul, bad):
    weight, x = tiled("nvfp4", 16, 32), drawn(5, 32).bfloat16()
    x[2, 3] = bad
    _, _, unit = encode_rows(x.to(DEVICE))
    assert unit.isnan()
    request = Request(torch.device("cpu"), (0, 0), x.dtype, "nvfp4-tiled", 5, 16, 32)
    assert w4a4._reference(x, weight, None, request, "none").isnan().all()


def test_it_costs_the_rounding_of_activations_alone():
    n, k, m = 48, 160, w4a4.MIN_ROWS
    weight, x = tiled("nvfp4", n, k), drawn(m, k).requires_grad_()
    how = (None, "nvfp4-tiled", "none", n, k)
    y = w4a4.fp4_linear_w4a4(x, *weight, *how)
    rows = w4a4.quantize_rows(x.detach()).dequantize()
    assert torch.equal(y, fp4_linear(rows, *weight, *how))
    exact = fp4_linear(x, *weight, *how)
    assert 19 < sqnr(exact, y) < 22  # 20.4 dB: E2M1 in blocks of 16 with `max` scales on Gaussian rows
    y.sum().backward()
    assert torch.equal(x.grad, fp4_linear_dx(torch.ones_like(y), *weight, "nvfp4-tiled", n, k))
    few = x.detach()[1:].view(2, 448, k)
    assert torch.equal(w4a4.fp4_linear_w4a4(few, *weight, *how), fp4_linear(few, *weight, *how))


def test_under_compile_and_on_meta():
    n, k, m = 16, 32, w4a4.MIN_ROWS
    weight, x, how = tiled("mxfp4", n, k), drawn(m, k), (None, "mxfp4-tiled", "silu", n, k)
    compiled = torch.compile(lambda x: w4a4.fp4_linear_w4a4(x, *weight, *how), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), w4a4.fp4_linear_w4a4(x, *weight, *how))
    meta = [each.to("meta") for each in (x.bfloat16().view(1, m, k), *weight)]
    y = w4a4.fp4_linear_w4a4(*meta, *how)
    assert y.shape == (1, m, n) and y.dtype == torch.bfloat16
    torch.library.opcheck(torch.ops.vblackwell.fp4_linear_w4a4, (x[:3], *weight, *how))


# -- who runs ----------------------------------------------------------------------------------------------------------


def request(**changes) -> Request:
    values = {"device": CUDA, "capability": (10, 0), "dtype": torch.bfloat16, "format": "nvfp4-tiled"}
    return Request(**{**values, "m": 1024, "n": 4096, "k": 4096, **changes})


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)])
def test_blackwell_takes_it(capability):
    for dtype in (torch.bfloat16, torch.float16):
        for format in ("nvfp4-tiled", "mxfp4-tiled"):
            found = request(capability=capability, dtype=dtype, format=format)
            assert choose("fp4_linear_w4a4", w4a4.W4A4, found).name == "scaled_mm"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"capability": (9, 0)}, "9.0 has no FP4 tensor cores"),
        ({"capability": (8, 6)}, "8.6 has no FP4 tensor cores"),
        ({"dtype": torch.float32}, "float32"),
        ({"format": "nvfp4"}, "not tiled"),
        ({"n": 24}, "24 x 4096"),
        ({"k": 4112}, "4096 x 4112"),
    ],
)
def test_other_gpus_and_requests_are_refused_with_the_reason(changes, part):
    reasons = explain(w4a4.W4A4, request(**changes))
    assert len(reasons["scaled_mm"]) == 1 and part in reasons["scaled_mm"][0]
    with pytest.raises(Unsupported, match="slow"):  # the reference's reason
        choose("fp4_linear_w4a4", w4a4.W4A4, request(**changes))


def test_the_cpu_emulates():
    cpu = request(device=torch.device("cpu"), capability=(0, 0), dtype=torch.float32)
    assert choose("fp4_linear_w4a4", w4a4.W4A4, cpu).name == "reference"


def test_refusals_of_the_op():
    weight, x = tiled("nvfp4", 16, 32), drawn(2, 32)
    with pytest.raises(ConfigurationError, match="has 16 features"):
        w4a4.fp4_linear_w4a4(x[:, :16], *weight, None, "nvfp4-tiled", "none", 16, 32)
    with pytest.raises(ConfigurationError, match="int8: FP4 activations go with nvfp4 and mxfp4"):
        w4a4.check_shape("int8", 16, 32)
    with pytest.raises(ConfigurationError, match="two-part"):
        w4a4.check_shape("two-part", 16, 32)


# -- on GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1000, 144, 4096), (257, 4096, 1056)])
def test_operands_of_any_gpu_are_the_oracle_s_bytes(m, n, k, dtype):
    """What the kernels write once they are compiled; more than one program, and padding."""
    cases = [case().to(dtype) for case in ROWS.values()]
    for x in (*cases, (drawn(m, k) * torch.logspace(-3, 3, m)[:, None]).to(dtype)):
        expected = w4a4.quantize_rows(x)
        with poisoned():
            codes, scales, unit = (each.cpu() for each in encode_rows(x.cuda()))
        assert torch.equal(codes, expected.codes) and torch.equal(unit, expected.tensor_scale)
        assert torch.equal(unswizzled(scales, *expected.block_scales.shape), expected.block_scales)
    for format in ("nvfp4", "mxfp4"):
        weight = tiled(format, n, k)
        with poisoned():
            codes, scales = (each.cpu() for each in untile(weight[0].cuda(), weight[1].cuda(), n, k))
        found = (operand(codes, scales) * weight[2].double()).float()
        assert torch.equal(found, reference.weight_of(weight, f"{format}-tiled", n, k))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (144, 96), (4096, 4096), (1024, 14336)])
def test_the_matmul_itself(n, k, format, dtype):
    if torch.cuda.get_device_capability() < w4a4.FP4_CAPABILITY:
        pytest.skip(f"compute capability {torch.cuda.get_device_capability()} has no FP4 tensor cores")
    m = 1000
    weight = tuple(each.cuda() for each in tiled(format, n, k))
    x, bias = drawn(m, k).to("cuda", dtype), drawn(n).to("cuda", dtype)
    layout_name = f"{format}-tiled"
    y = w4a4.fp4_linear_w4a4(x, *weight, bias, layout_name, "none", n, k)
    rows = w4a4.quantize_rows(x).dequantize().double()
    w_NK = reference.weight_of(weight, layout_name, n, k).double()
    product, size = rows @ w_NK.t(), rows.abs() @ w_NK.abs().t()
    exact = product + bias.double()
    # The product, the bias and their sum are rounded to bf16; sums of K products in fp32, in any order, err by K 2^-24
    # of the sum of magnitudes at most.
    bound = 2.0**-8 * (product.abs() + bias.double().abs() + exact.abs()) + k * 2.0**-24 * size + 1e-6
    assert ((y.double() - exact).abs() <= bound).all()
    assert torch.equal(y, w4a4.fp4_linear_w4a4(x, *weight, bias, layout_name, "none", n, k))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = w4a4.fp4_linear_w4a4(x, *weight, bias, layout_name, "none", n, k)
    again.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, again)


@pytest.mark.gpu
def test_gpus_before_blackwell_refuse():
    found, (n, k) = torch.cuda.get_device_capability(), (48, 128)
    if found >= w4a4.FP4_CAPABILITY:
        pytest.skip("this one has FP4 tensor cores")
    weight, how = [each.cuda() for each in tiled("nvfp4", n, k)], (None, "nvfp4-tiled", "none", n, k)
    x = drawn(w4a4.MIN_ROWS, k).cuda().bfloat16()
    with pytest.raises(Unsupported, match=f"{found[0]}.{found[1]} has no FP4 tensor cores"):
        w4a4.fp4_linear_w4a4(x, *weight, *how)
    few = x[:8].contiguous()  # are not rounded
    assert torch.equal(w4a4.fp4_linear_w4a4(few, *weight, *how), fp4_linear(few, *weight, *how))
    with pytest.raises(Unsupported, match=r"compute capability .*--fp4-activations"):
        w4a4.check_device(torch.device("cuda"))
