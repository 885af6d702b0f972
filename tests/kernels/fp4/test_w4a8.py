"""cuda/w4a8.cu's own source on the CPU (emulation.py) against w4a8's reference: odd shapes, each width, who does what
before.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels import emulation
from vblackwell.kernels.fp4 import layout, reference, w4a8
from vblackwell.kernels.fp4.w4a8 import FILES, W4A8Plan, of_width
from vblackwell.numerics.formats import FORMATS

pytestmark = emulation.needs_compiler

Tiled = tuple[Tensor, Tensor, Tensor]
BF16, FP16 = torch.bfloat16, torch.float16
# Few stages, so that they are filled anew often; few head steps and rows, so that most is left to the product's own
# warps.
WIDE = W4A8Plan(256, 2, head_steps=2, head_rows=128)
MIDDLE = replace(of_width(224), head_rows=128)
NARROW = W4A8Plan(192, 3, head_steps=3, head_rows=128)
ROUNDED = replace(NARROW, head_rows=1024)  # the head rounds all rows
CASES = [  # plan, clusters, m, n, k, dtype
    (WIDE, 2, 1, 16, 16, BF16),  # a cluster without tiles
    (WIDE, 1, 127, 272, 272, BF16),  # the cluster's other block has no rows
    pytest.param(WIDE, 2, 300, 528, 400, BF16, marks=pytest.mark.slow),  # the last tile has half a band of features
    (WIDE, 3, 1155, 272, 112, BF16),  # a fifth pair of token tiles, which goes through the columns alone; one step
    (MIDDLE, 2, 131, 240, 656, FP16),  # the head does every step
    pytest.param(MIDDLE, 3, 257, 464, 144, FP16, marks=pytest.mark.slow),
    pytest.param(MIDDLE, 1, 9, 32, 1024, FP16, marks=pytest.mark.slow),  # as many steps as the head does
    (ROUNDED, 1, 140, 400, 592, BF16),  # and does one of three columns of tiles
    pytest.param(NARROW, 2, 33, 208, 128, BF16, marks=pytest.mark.slow),  # as one-hot rows
    # More steps than fit one look at the counters; rows longer than a thread keeps: the last case of any order, too.
    pytest.param(NARROW, 2, 40, 208, 4240, FP16, marks=pytest.mark.slow),
]


def weight_of(n: int, k: int) -> Tiled:
    """Tiles of random codes; exponents of a row span 14, those of all rows 16."""
    generator, form = torch.Generator().manual_seed(n + k), FORMATS["mxfp4"]
    codes = torch.randint(0, 256, form.codes_shape(n, k), dtype=torch.uint8, generator=generator)
    scales = torch.randint(108, 123, form.scales_shape(n, k), generator=generator) + torch.arange(n)[:, None] % 3
    return layout.to_tiled(codes, scales.to(torch.uint8), torch.tensor(1.0), "mxfp4", n, k)


def rows_of(m: int, k: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(m + k)
    return (torch.randn(m, k, generator=generator) * torch.logspace(-1, 1, m)[:, None]).to(dtype)


def assert_right(y_MN: Tensor, x_MK: Tensor, tiled: Tiled, bias: Tensor | None, activation: str, n: int) -> None:
    """Each output within what rounding allows.

    Sums of K products in fp32, in any order, err by at most K 2^-24 of the sum of magnitudes: so may the reference's,
    on rows that are rounded once more. Ours round 32 exact products at a time, then those of a step, at most 5 times a
    step; scales, bias, erff and expf are another 8 of that at most. Activations have slopes of at most 1.13. The last
    rounding adds half a unit of y's type.
    """
    k = x_MK.shape[1]
    q_MK, scale_M1 = w4a8.quantize_rows(x_MK)
    w_NK = reference.dequantize(*tiled, w4a8.FORMAT, n, k)
    exact = reference.linear(q_MK.float() * scale_M1, w_NK, None if bias is None else bias.float(), activation)
    sums = (q_MK.float() * scale_M1).abs() @ w_NK.abs().t() + (0 if bias is None else bias.float().abs())
    errors = 1.13 * (k + 5 * -(-k // 128) + 9) * 2**-24 * sums
    half_unit = (
        torch.finfo(y_MN.dtype).eps / 2 * (exact.abs() + errors) + torch.finfo(y_MN.dtype).smallest_normal * 2**-10
    )
    assert ((y_MN.float() - exact).abs() <= errors + half_unit).all()  # not of a NaN


@pytest.mark.parametrize(("plan", "clusters", "m", "n", "k", "dtype"), CASES, ids=str)
def test_it_is_the_reference_and_repeats_bit_for_bit(plan, clusters, m, n, k, dtype):
    tiled, x_MK = weight_of(n, k), rows_of(m, k, dtype)
    y_MN = emulation.run_w4a8(plan, x_MK, tiled, None, "none", n, clusters)
    assert_right(y_MN, x_MK, tiled, None, "none", n)
    assert torch.equal(emulation.run_w4a8(plan, x_MK, tiled, None, "none", n, clusters), y_MN)  # in another order


@pytest.mark.each_value
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
@pytest.mark.parametrize(("plan", "dtype"), [(WIDE, BF16), (MIDDLE, FP16)], ids=str)
def test_bias_and_activation(plan, dtype, activation):
    n, k, m = 272, 144, 133
    tiled, x_MK = weight_of(n, k), rows_of(m, k, dtype)
    bias_N = torch.linspace(-4, 4, n).to(dtype)
    y_MN = emulation.run_w4a8(plan, x_MK, tiled, bias_N, activation, n, 2)
    assert_right(y_MN, x_MK, tiled, bias_N, activation, n)


@pytest.mark.parametrize("plan", [NARROW, MIDDLE, WIDE], ids=str)
def test_one_hot_rows_return_the_weight(plan):
    """Each of them once and alone, in its place: 448 times 1 / 448 rounded is 1 within a unit of fp32, far below
    y's.
    """
    dtype = FP16 if plan is MIDDLE else BF16
    n, k = 272, 272
    tiled = weight_of(n, k)
    y_MN = emulation.run_w4a8(plan, torch.eye(k, dtype=dtype), tiled, None, "none", n, 2)
    assert torch.equal(y_MN.float(), reference.dequantize(*tiled, w4a8.FORMAT, n, k).t())


def test_rows_of_zeros_give_the_bias():
    n, k, m = 48, 144, 130
    bias_N = torch.randn(n).bfloat16()
    y_MN = emulation.run_w4a8(WIDE, torch.zeros(m, k).bfloat16(), weight_of(n, k), bias_N, "none", n, 1)
    assert torch.equal(y_MN, bias_N.expand(m, n))


CONSUMERS, COPIER, PRODUCERS = range(8), range(8, 9), range(9, 16)


# Tiles so narrow that nothing is made long before it is multiplied: several columns of them, rows left to the product,
# many steps.
@pytest.mark.parametrize(
    ("head_steps", "m", "n", "k", "clusters"),
    [pytest.param(1, 20, 336, 16, 1, marks=pytest.mark.slow), (1, 150, 112, 272, 2), (8, 3, 48, 4240, 1)],
)
def test_any_order_gives_the_same_bits(head_steps, m, n, k, clusters):
    plan, tiled, x_MK = W4A8Plan(64, 2, head_steps, head_rows=128), weight_of(n, k), rows_of(m, k, BF16)
    first = emulation.run_w4a8(plan, x_MK, tiled, None, "none", n, clusters)
    assert_right(first, x_MK, tiled, None, "none", n)
    for lagging in (CONSUMERS, COPIER, PRODUCERS):
        again = emulation.run_w4a8(plan, x_MK, tiled, None, "none", n, clusters, lagging)
        assert torch.equal(again, first), lagging


@pytest.mark.parametrize(
    ("head_rows", "m", "clusters"),
    [(128, 150, 2), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((128, 20, 1), (1024, 150, 1)))],
)
def test_layers_that_begin_before_the_last_one_has_ended(head_rows, m, clusters):
    """Each has what the one before wrote as its x, in memory that both use: image, decoded weight, the counters in
    turns.
    """
    plan, n = W4A8Plan(64, 2, 1, head_rows), 144
    weights = [weight_of(n, n), weight_of(n, n), weight_of(n, n)]
    weights[1] = (weights[1][0].flip(0).contiguous(), *weights[1][1:])
    x_MK = rows_of(m, n, BF16)
    wanted = [x_MK]
    for tiled in weights:
        wanted.append(emulation.run_w4a8(plan, wanted[-1], tiled, None, "none", n, clusters))
    for lagging in (range(0), CONSUMERS, COPIER, PRODUCERS):
        outputs = emulation.run_w4a8_layers(plan, x_MK, weights, None, "none", n, clusters, lagging)
        assert [torch.equal(y_MN, right) for y_MN, right in zip(outputs, wanted[1:], strict=True)] == [True] * 3


DIVIDE_MAIN = """
extern "C" void run(int* wrong) {
    for (int b = 1; b < 8192; b++)
        for (int q = 1, last = ((1 << 22) - 1) / b; q <= last; q += 1 + last / 300)
            for (int a = q * b - 1; a <= q * b; a++) wrong[0] += divide(a, b) != a / b;
}"""


def test_quotients_around_multiples():
    wrong = torch.zeros(1, dtype=torch.int32)
    emulation._call(FILES, WIDE.macros(False, 16), DIVIDE_MAIN, [wrong])
    assert wrong.item() == 0
