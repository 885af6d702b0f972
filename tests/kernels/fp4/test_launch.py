"""The CUDA kernels' own source, run on the CPU (emulation.py): values, odd shapes, every split, both half types."""

import pytest
import torch

from tests.kernels import emulation
from vblackwell.kernels.fp4 import layout, reference, w4a8, wgmma_plan
from vblackwell.kernels.fp4.mma_plan import MmaPlan
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan

pytestmark = emulation.needs_compiler
HALVES = [torch.bfloat16, torch.float16]

MMA = [  # plan, rows, n, k: one of each shape of block, chunked and whole, padded in N, K and M
    (MmaPlan(4, 2, 1, 2, 2), 3, 33, 320),
    (MmaPlan(16, 2, 2, 2, 2, x_bytes=16384), 11, 70, 1024),
    (MmaPlan(8, 1, 4, 1, 2), 20, 32, 264),
    (MmaPlan(32, 1, 2, 1, 1, x_bytes=16384), 33, 64, 512),
    (MmaPlan(16, 1, 2, 2, 2, chunk=8, x_stages=2), 31, 40, 1088),  # two columns of blocks
    (MmaPlan(8, 1, 2, 1, 2, chunk=8, x_stages=2), 5, 40, 1600),  # a separate first round, stages that come round
]
WGMMA = [
    (WgmmaPlan(32, 1, 1, 2, 4), 20, 40, 392),
    (WgmmaPlan(32, 2, 2, 3, 2), 33, 130, 264),
    (WgmmaPlan(64, 1, 4, 2), 70, 40, 264),
]


ONE_TYPE = [  # nothing in which halves differ
    (WgmmaPlan(32, 1, 2, 6, 2, k_groups=3), 20, 40, 840),  # warpgroups of which one has a window less
    (WgmmaPlan(16, 1, 2, 4, 2, k_groups=2), 15, 70, 520),  # a block writes one group of 8 tokens
    # Pairs of windows: 14 and 15, of which one group has a half; a half alone.
    (WgmmaPlan(64, 1, 2, 12, 4, k_groups=3, windows_per_step=2), 50, 40, 1800),
    (WgmmaPlan(32, 2, 1, 4, 4, windows_per_step=2), 33, 130, 60),
    # All of x at once, fewer windows than a round.
    (MmaPlan(4, 3, 4, 2, 4, chunk=32, x_stages=1), 3, 70, 4032),
    # Tokens that are no power of two.
    (WgmmaPlan(208, 1, 1, 4, 2, k_groups=2), 200, 40, 264),
    # Blocks that split K and meet in global memory: shares that end before K does, and one that begins after it.
    (MmaPlan(4, 1, 4, 1, 2, k_blocks=4), 6, 40, 840),
    # Rows that begin at any half: at every other one, or all at words; in chunks, too.
    (MmaPlan(4, 1, 4, 1, 2), 3, 40, 519),
    (WgmmaPlan(32, 1, 1, 4, 2), 20, 40, 333),
    # Four blocks that share tokens by an odd number of eights.
    (WgmmaPlan(96, 1, 4, 8, 2, k_groups=4), 90, 40, 1032),
]
LIKE_OTHERS = [  # of those above, or of NORMS, in another size
    # Pairs of windows: 5, the first group's second one a half; fewer than groups.
    (WgmmaPlan(32, 1, 1, 8, 2, k_groups=2, windows_per_step=2), 20, 40, 264),
    (WgmmaPlan(16, 1, 2, 16, 4, k_groups=4, windows_per_step=2), 9, 40, 520),
    # The shape of a plan that a rule takes; one stage that comes round.
    (MmaPlan(16, 2, 6, 2, 4, chunk=24, x_stages=3), 11, 33, 4160),
    (MmaPlan(1, 1, 2, 1, 2, chunk=8, x_stages=1), 1, 40, 1600),
    (WgmmaPlan(80, 1, 2, 4, 2), 130, 40, 264),  # halves of an odd number of eights
    (MmaPlan(32, 4, 4, 1, 2, x_bytes=32768, k_blocks=2), 40, 130, 560),  # 16 warps
    (MmaPlan(1, 1, 2, 1, 2), 1, 40, 136),
    (MmaPlan(16, 2, 2, 2, 2, chunk=4, x_stages=2), 11, 70, 1088),
    (MmaPlan(4, 1, 3, 1, 2, chunk=6, x_stages=2), 3, 33, 960),
    (MmaPlan(32, 4, 4, 1, 2, x_bytes=32768, k_blocks=2), 40, 130, 1104),
    (MmaPlan(64, 1, 2, 1, 2, x_bytes=32768), 70, 40, 520),
    (MmaPlan(16, 2, 2, 2, 2, x_bytes=16384), 11, 70, 1003),
    (WgmmaPlan(32, 2, 2, 3, 2), 33, 200, 264),
    (WgmmaPlan(64, 1, 4, 2), 70, 70, 264),
    (WgmmaPlan(32, 1, 1, 4, 2), 33, 40, 520),
    (WgmmaPlan(32, 1, 2, 6, 2, k_groups=3), 20, 40, 712),
    (WgmmaPlan(64, 1, 1, 4, 2, k_groups=2), 50, 70, 520),
    (WgmmaPlan(32, 2, 2, 4, 2, k_groups=2), 33, 130, 1032),
    (WgmmaPlan(48, 1, 1, 4, 2, k_groups=2), 45, 70, 520),
    (WgmmaPlan(64, 1, 2, 12, 4, k_groups=3, windows_per_step=2), 50, 70, 1800),
    (WgmmaPlan(32, 1, 1, 8, 2, k_groups=2, windows_per_step=2), 20, 130, 264),
    (WgmmaPlan(32, 2, 1, 4, 4, windows_per_step=2), 33, 200, 60),
    (WgmmaPlan(64, 1, 1, 4, 2, k_groups=2), 70, 70, 392),
    (WgmmaPlan(128, 1, 1, 4, 2), 100, 40, 328),
    (WgmmaPlan(32, 2, 1, 4, 2, k_groups=2), 40, 130, 328),
    (MmaPlan(4, 1, 8, 2, 4, chunk=32, x_stages=1), 3, 40, 1024),
    (WgmmaPlan(96, 1, 2, 4, 2, k_groups=2), 90, 40, 520),
    (MmaPlan(16, 2, 2, 1, 2, x_bytes=8192, k_blocks=3), 40, 70, 1600),
    (MmaPlan(64, 1, 2, 1, 1, x_bytes=32768, k_blocks=2), 50, 33, 700),
    (MmaPlan(8, 1, 2, 1, 2), 5, 33, 262),
    (WgmmaPlan(48, 1, 2, 6, 2), 45, 70, 402),
]
# Each in one type, in turns; in the other one with what is slow.
CASES = [pytest.param(*case, HALVES[place % 2]) for place, case in enumerate(MMA + WGMMA)]
CASES += [pytest.param(*case, HALVES[1 - place % 2], marks=pytest.mark.slow) for place, case in enumerate(MMA + WGMMA)]
CASES += [pytest.param(*case, torch.bfloat16) for case in ONE_TYPE]
CASES += [pytest.param(*case, dtype, marks=pytest.mark.slow) for case in LIKE_OTHERS for dtype in HALVES]


@pytest.mark.parametrize(("plan", "m", "n", "k", "dtype"), CASES, ids=str)
def test_linear_within_the_bound_of_float64(plan, m, n, k, dtype):
    format = "nvfp4" if dtype == torch.bfloat16 else "mxfp4"
    w_NK, tiled = emulation.random_weight(format, n, k)
    x_MK = torch.randn(m, k).to(dtype)
    y_MN = emulation.linear(plan, x_MK, tiled, None, "none", n)
    assert emulation.error_over_bound(y_MN, x_MK, w_NK) <= 1


def test_the_first_round_of_x_does_not_stand_for_the_others():
    plan = MmaPlan(4, 1, 1, 1, 2, chunk=16, x_stages=1)
    w_NK, tiled = emulation.random_weight("nvfp4", 32, 1024)
    x_MK = torch.randn(3, 1024).bfloat16()
    for _ in range(12):  # x lands late in about every second
        assert emulation.error_over_bound(emulation.linear(plan, x_MK, tiled, None, "none", 32), x_MK, w_NK) <= 1


LOW = WgmmaPlan(256, 1, 1, 6, k_groups=2)


@pytest.mark.parametrize(
    ("m", "n", "processors", "tail", "parts"),
    [
        pytest.param(60, 330, 2, LOW, [(0, 2), (4, 2)], marks=pytest.mark.slow),
        (260, 300, 5, LOW, [(0, 2), (4, 1)]),
        pytest.param(60, 330, 2, WgmmaPlan(48, 2, 1, 4), [(0, 2), (2, 1)], marks=pytest.mark.slow),
        (60, 330, 2, WgmmaPlan(64, 2, 4, 3), [(0, 2), (2, 1)]),
    ],
)
def test_a_tail_after_whole_rounds(m, n, processors, tail, parts):
    """After two blocks, or two in each of two columns: blocks of half the height, of other tokens, that split K. The
    second product has no row in the other half of its last block, which is left out.
    """
    plan, k = WgmmaPlan(256, 2, 1, 4, tail=tail), 200
    assert [(rows.first, rows.blocks) for rows in wgmma_plan.launches(plan, m, n, processors)] == parts
    w_NK, tiled = emulation.random_weight("nvfp4", n, k)
    x_MK = torch.randn(m, k).bfloat16()
    y_MN = emulation.linear(plan, x_MK, tiled, None, "none", n, processors=processors)
    assert emulation.error_over_bound(y_MN, x_MK, w_NK) <= 1
    rounded = emulation.linear(plan, x_MK, tiled, None, "none", n, rounded=True, processors=processors)
    assert torch.equal(rounded, y_MN.bfloat16())


LAYERS = [
    MmaPlan(4, 1, 2, 2, 2),
    MmaPlan(8, 2, 2, 1, 2, chunk=4, x_stages=2),
    pytest.param(WgmmaPlan(16, 1, 2, 2, 2), marks=pytest.mark.slow),
    pytest.param(WgmmaPlan(32, 1, 1, 4, 2, k_groups=2), marks=pytest.mark.slow),
    WgmmaPlan(32, 1, 2, 8, 2, k_groups=2, windows_per_step=2),
]


@pytest.mark.parametrize("plan", LAYERS, ids=str)
def test_layers_that_begin_before_the_last_one_has_ended(plan):
    """Each has what the one before wrote as its x, arranged in memory that all of them use."""
    m, n = min(20, plan.tokens), 128
    weights = []
    for seed in range(3):
        codes, scales, _ = emulation.random_weight("nvfp4", n, n, seed)[1]
        weights.append((codes, scales, torch.tensor(2.0**-8)))
    x_MK = torch.randn(m, n).bfloat16()
    wanted = [x_MK]
    for tiled in weights:
        wanted.append(emulation.linear(plan, wanted[-1], tiled, None, "none", n, rounded=True))
    for _ in range(4):
        outputs = emulation.linear_layers(plan, x_MK, weights)
        assert [torch.equal(y_MN, right) for y_MN, right in zip(outputs, wanted[1:], strict=True)] == [True] * 3


@pytest.mark.parametrize("plan", [MmaPlan(4, 1, 2, 2, 2), WgmmaPlan(32, 1, 2, 2, 2)], ids=str)
def test_one_hot_rows_return_exact_columns(plan):
    n, k = 40, 192
    w_NK, tiled = emulation.random_weight("nvfp4", n, k)
    tiled = (tiled[0], tiled[1], torch.tensor(1.0))
    columns = torch.arange(0, k, 7)
    x_MK = torch.zeros(len(columns), k, dtype=torch.bfloat16)
    x_MK[torch.arange(len(columns)), columns] = 1
    y_MN = emulation.linear(plan, x_MK, tiled, None, "none", n)
    exact = reference.dequantize(*tiled, "nvfp4-tiled", n, k)
    assert torch.equal(y_MN, exact[:, columns].t())


@pytest.mark.each_value
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize(
    "plan", [MmaPlan(8, 2, 2, 1, 2), WgmmaPlan(32, 1, 1, 2, 2), WgmmaPlan(32, 1, 2, 2, 2)], ids=str
)
def test_bias_and_activation(plan, activation):
    n, k, m = 70, 128, 7
    w_NK, tiled = emulation.random_weight("nvfp4", n, k)
    tiled, w_NK = (tiled[0], tiled[1], torch.tensor(2.0**-8)), w_NK / 0.37 * 2.0**-8
    x_MK, bias = torch.randn(m, k).bfloat16(), torch.randn(n).bfloat16()
    y_MN = emulation.linear(plan, x_MK, tiled, bias, activation, n)
    exact = reference.activate(x_MK.double() @ w_NK.double().t() + bias.double(), activation)
    # sums err by at most 4e-6 of sum |w||x| (about 40 here), erff and expf by a few units in the last place
    assert (y_MN - exact).abs().max() < 2e-4


@pytest.mark.parametrize(
    ("plan", "dtype", "k"),
    [
        (WgmmaPlan(16, 2, 1, 2, 2), torch.float16, 64),
        pytest.param(WgmmaPlan(16, 1, 2, 2, 2), torch.bfloat16, 200, marks=pytest.mark.slow),
        (WgmmaPlan(32, 1, 2, 4, 2, k_groups=2), torch.bfloat16, 200),
        pytest.param(WgmmaPlan(16, 1, 1, 6, 2, k_groups=3), torch.bfloat16, 200, marks=pytest.mark.slow),
        pytest.param(WgmmaPlan(32, 1, 2, 2, 2), torch.float16, 200, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_outputs_rounded_in_tiles_are_those_of_fp32(plan, dtype, k):
    """Eight neighbours are copied at a time where rows of y allow it: 72 features end inside a block, 68 take the other
    way.
    """
    x_MK = torch.randn(11, k).to(dtype)
    for n in (72, 68):
        _, tiled = emulation.random_weight("nvfp4", n, k)
        tiled = (tiled[0], tiled[1], torch.tensor(2.0**-8))
        bias = torch.randn(n).to(dtype)
        exact = emulation.linear(plan, x_MK, tiled, bias, "none", n)
        assert torch.equal(emulation.linear(plan, x_MK, tiled, bias, "none", n, rounded=True), exact.to(dtype))


def test_odd_k_is_padded():
    w_NK, tiled = emulation.random_weight("nvfp4", 33, 77)
    x_MK = torch.randn(2, 77).bfloat16()
    y_MN = emulation.linear(MmaPlan(2, 1, 1, 1, 2), x_MK, tiled, None, "none", 33)
    assert emulation.error_over_bound(y_MN, x_MK, w_NK) <= 1


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("format", "n", "k"), [("nvfp4", 40, 136), ("nvfp4", 33, 77), ("mxfp4", 70, 600)])
def test_dequantize_is_the_reference_rounded_once(format, n, k, dtype):
    w_NK, tiled = emulation.random_weight(format, n, k)
    assert torch.equal(emulation.dequantize(tiled, n, k, dtype), w_NK.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_e4m3_weights_are_exact_where_rows_span_14_and_rows_are_rounded_once(dtype):
    n, k, m = 40, 544, 5
    codes, scales = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), torch.randint(100, 115, (n, k // 32))
    tiled = layout.to_tiled(codes, scales.to(torch.uint8), torch.tensor(1.0), "mxfp4", n, k)
    x_MK = (torch.randn(m, k) * torch.logspace(-3, 3, m)[:, None]).to(dtype)
    x_MK[2] = 0
    top = w4a8.row_tops(tiled[1], n, k)
    q_MK, scale_M1, w8_NK, scale_1N = emulation.prepare_e4m3(x_MK, tiled, top, n, k, 1)
    assert torch.equal(w8_NK.float() * scale_1N.t(), reference.dequantize(*tiled, "mxfp4-tiled", n, k))
    wanted, wanted_scale = w4a8.quantize_rows(x_MK)
    assert torch.equal(scale_M1, wanted_scale) and torch.equal(q_MK.float(), wanted.float())


def normed(x_MK: torch.Tensor, gain_K: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float64, unrounded."""
    return torch.nn.functional.rms_norm(x_MK.double(), x_MK.shape[-1:], gain_K.double(), eps)


# Few and many threads a token, several windows, splits, chunks, blocks of tokens; tokens and rows that are not there
NORMS = [
    (MmaPlan(1, 1, 2, 1, 2), 1, 40, 136),
    pytest.param(MmaPlan(4, 2, 1, 2, 2), 3, 33, 320, marks=pytest.mark.slow),
    (MmaPlan(16, 2, 2, 2, 2, x_bytes=16384), 11, 70, 1024),
    pytest.param(MmaPlan(8, 1, 4, 1, 2), 20, 32, 264, marks=pytest.mark.slow),
    (MmaPlan(2, 1, 8, 1, 2), 2, 32, 1096),
]


@pytest.mark.each_value
@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize(("plan", "m", "n", "k"), NORMS, ids=str)
def test_norm_on_the_way(plan, m, n, k, mean):
    """Against float64, each output within what rounding x times gain to bf16 can do."""
    w_NK, tiled = emulation.random_weight("nvfp4", n, k)
    x_MK = (torch.randn(m, k) * torch.logspace(-1, 2, m)[:, None] * 3 + mean).bfloat16()
    gain_K, bias_N = (1 + 0.3 * torch.randn(k)).bfloat16(), torch.randn(n).bfloat16()
    y_MN = emulation.linear(plan, x_MK, tiled, bias_N, "none", n, gain_K, 1e-5)
    exact = normed(x_MK, gain_K, 1e-5) @ w_NK.double().t() + bias_N.double()
    x, gain = x_MK.double(), gain_K.double()
    products = (x * gain).abs() @ w_NK.double().abs().t() / (x.square().mean(1) + 1e-5).sqrt()[:, None]
    # Half a unit of bf16 is at most 2^-8 of a value; fp32 sums and the bias are good to 1e-5 of what they add up.
    assert ((y_MN - exact).abs() <= 2**-8 * products + 1e-5 * (products + exact.abs() + bias_N.abs())).all()


@pytest.mark.parametrize(
    ("plan", "m", "n", "k"),
    [
        (MmaPlan(4, 2, 3, 2, 2, chunk=6, x_stages=2), 3, 70, 832),
        pytest.param(MmaPlan(16, 1, 2, 1, 2, chunk=4, x_stages=3), 13, 40, 640, marks=pytest.mark.slow),
        pytest.param(MmaPlan(8, 1, 2, 1, 2, chunk=8, x_stages=2), 7, 40, 1600, marks=pytest.mark.slow),
        # as the rules have it: x at once, a first round, a cluster
        pytest.param(MmaPlan(8, 2, 2, 2, 2, chunk=16, x_stages=1), 7, 70, 1984, marks=pytest.mark.slow),
        (MmaPlan(16, 1, 4, 2, 2, chunk=16, x_stages=1), 16, 40, 1984),
    ],
    ids=str,
)
def test_rms_norm_on_the_way_of_bulk_copies(plan, m, n, k):
    test_norm_on_the_way(plan, m, n, k, 0.0)


def test_norm_with_activation_repeats_bit_for_bit():
    n, k, m = 70, 128, 7
    w_NK, tiled = emulation.random_weight("nvfp4", n, k)
    x_MK, gain_K = torch.randn(m, k).bfloat16(), torch.ones(k).bfloat16()
    given = (MmaPlan(8, 2, 2, 2, 2), x_MK, tiled, None, "silu", n, gain_K, 1e-6)
    first, second = (emulation.linear(*given) for _ in range(2))
    assert torch.equal(first, second)
    exact = reference.activate(normed(x_MK, gain_K, 1e-6) @ w_NK.double().t(), "silu")
    assert (first - exact).norm() / exact.norm() < 3e-3  # 2^-9 / sqrt(3) relative RMS; silu's slope is at most 1.1


def test_rows_of_zeros_are_normalised_to_zeros():
    _, tiled = emulation.random_weight("nvfp4", 32, 64)
    x_MK, gain_K = torch.zeros(2, 64).bfloat16(), torch.ones(64).bfloat16()
    y_MN = emulation.linear(MmaPlan(2, 1, 1, 1, 2), x_MK, tiled, None, "none", 32, gain_K, 1e-5)
    assert torch.equal(y_MN, torch.zeros(2, 32))
