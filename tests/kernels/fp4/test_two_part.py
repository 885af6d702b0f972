"""Linears with weights in two parts: the op against the oracle, and the CUDA kernels' own source on the CPU
(emulation.py).
"""

from types import SimpleNamespace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.kernels import emulation
from tests.kernels.machine_code import resources
from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import layout, two_part, two_part_round
from vblackwell.kernels.fp4.mma_plan import H200, MMA_FILES
from vblackwell.kernels.fp4.reference import ACTIVATIONS, activate
from vblackwell.kernels.fp4.two_part import TwoPartPlan, two_part_linear
from vblackwell.kernels.runtime import nvrtc
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.numerics import separation
from vblackwell.numerics.packed import PackedTensor
from vblackwell.numerics.separation import separate

MAIN = """
extern "C" void run(const u16* x, const u8* codes, const u8* fine, const u8* scales, const float* ts, const u16* bias,
        void* y, int M,
                    int N, int K, int act, int windows, int chunks, int gx, int gz, int shared) {
    launch(gx, SPLITS, gz, THREADS, shared,
           [=] { fp4_mma(x, codes, fine, scales, ts, bias, y, M, N, K, act, windows, chunks, 1, shared); });
}"""
ROUND_MAIN = """
extern "C" void run(const Source* w, const u8* scales, const float* ts, Target* out, int N, int K, int stride,
        int aligned, int gx) {
    launch(gx, 1, 1, ROUND_THREADS, 16, [=] { two_part_round(w, scales, ts, out, N, K, stride, aligned); });
}"""

RENEW_MAIN = """
extern "C" void run(const Source* w, const u8* kept, const float* ts, float* amax, float* partials, u8* scales,
        float* unit, float* drift,
                    int N, int K, int stride, int aligned, int ctas, int gx, float threshold) {
    launch(ctas, 1, 1, ROUND_THREADS, 4096, [=] { two_part_measure(w, kept, ts, amax, partials, N, K, stride, aligned,
            ctas); });
    const int total = N * ((K + 15) / 16);
    launch(gx, 1, 1, ROUND_THREADS, 4096,
           [=] { two_part_renew(amax, partials, kept, ts, scales, unit, drift, total, ctas, threshold); });
}"""


def random_parts(n: int, k: int):
    """(fp32 weight, canonical parts) of random codes under all finite scales, blocks without a scale among them."""
    generator = torch.Generator().manual_seed(n + k)
    padded = separation.FORM.padded(k)
    codes = torch.randint(0, 16, (n, padded), dtype=torch.uint8, generator=generator)
    fine = torch.randint(0, 16, (n, padded), dtype=torch.uint8, generator=generator)
    fine = torch.where(codes & 7 == 0, fine | 8, fine)
    scales = torch.randint(0, 127, (n, padded // 16), dtype=torch.uint8, generator=generator)
    pairs = [tensor[:, 0::2] | (tensor[:, 1::2] << 4) for tensor in (codes, fine)]
    parts = (pairs[0], pairs[1], scales, torch.tensor(0.37))
    return dequantize(*parts, n, k, torch.float32), parts


def dequantize(codes, fine, scales, tensor_scale, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return PackedTensor(separation.FORM, (n, k), dtype, codes, scales, tensor_scale, fine).dequantize()


def bf16_weight(parts, n: int, k: int) -> torch.Tensor:
    """What the kernel multiplies by: code times scale rounded to bf16, then the tensor scale in fp32's sum."""
    codes, fine, scales, _ = parts
    return dequantize(codes, fine, scales, torch.tensor(1.0), n, k, torch.bfloat16).double() * 0.37


def emulated(plan: TwoPartPlan, x_MK, tiled, bias, activation, n):
    m, k = x_MK.shape
    y_MN = torch.full((m, n), torch.nan)
    grid = (-(-n // (32 * plan.row_warps)), -(-m // plan.tokens), plan.shared_bytes(k))
    args = [x_MK, *tiled, bias, y_MN, m, n, k, ACTIVATIONS.index(activation), *plan.chunks(k), *grid]
    emulation._call(MMA_FILES, plan.macros(out32=True, unaligned=k % 8 > 0), MAIN, args)
    return y_MN


@pytest.mark.parametrize("shape", [(40, 136), (33, 77), (100, 64)])
def test_tiles_are_turned_back(shape, monkeypatch):
    monkeypatch.setattr(layout, "_BAND_ELEMENTS", 2 * 32 * 64)  # the last one in two bands
    w_NK, parts = random_parts(*shape)
    tiled, (codes, scales) = layout.parts_to_tiled(*parts, *shape), layout.shapes("nvfp4-tiled", *shape)
    assert [tuple(tensor.shape) for tensor in tiled[:3]] == [codes, codes, scales]
    assert torch.equal(dequantize(*layout.parts_from_tiled(*tiled, *shape), *shape, torch.float32), w_NK)


def test_a_fine_part_of_another_weight_is_refused():
    _, (codes, fine, scales, scale) = random_parts(32, 64)
    with pytest.raises(CorruptData, match="below zero"):
        layout.parts_to_tiled(torch.zeros_like(codes), torch.zeros_like(fine), scales, scale, 32, 64)
    with pytest.raises(ConfigurationError, match="do not belong"):
        layout.parts_to_tiled(codes, fine[:16], scales, scale, 32, 64)
    x_MK = torch.zeros(1, 64)
    with pytest.raises(ConfigurationError, match="next to coarse"):
        two_part_linear(x_MK, codes, fine[:16], scales, scale, None, "nvfp4", "none", 32, 64)
    with pytest.raises(ConfigurationError, match="layout"):
        two_part_linear(x_MK, codes, fine, scales, scale, None, "mxfp4", "none", 32, 64)
    with use_backend("two_part_linear", "mma"), pytest.raises(Unsupported, match="CUDA"):
        two_part_linear(x_MK, codes, fine, scales, scale, None, "nvfp4", "none", 32, 64)


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_op_and_gradients_against_float64(activation):
    n, k = 24, 40
    separated = separate(torch.randn(n, k) * 0.1)
    coarse, w_NK = separated.coarse, separated.dequantize().double()
    parts = (coarse.codes, separated.fine, coarse.block_scales, coarse.tensor_scale)
    x, bias = torch.randn(2, 3, k), torch.randn(n)
    ours = [tensor.clone().requires_grad_() for tensor in (x, bias)]
    theirs = [tensor.double().requires_grad_() for tensor in (x, bias)]
    y = two_part_linear(ours[0], *parts, ours[1], "nvfp4", activation, n, k)
    exact = activate(torch.nn.functional.linear(theirs[0], w_NK, theirs[1]), activation)
    dy = torch.randn_like(y)
    y.backward(dy)
    exact.backward(dy.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)  # fp32 sums of 40 products of size 0.1
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-5, atol=1e-5)
    torch.library.opcheck(
        torch.ops.vblackwell.two_part_linear,
        (x, *parts, bias, "nvfp4", activation, n, k),
        test_utils=("test_schema", "test_faketensor"),
    )


@emulation.needs_compiler
@pytest.mark.parametrize(
    ("plan", "m", "n", "k"),
    [
        (TwoPartPlan(4, 2, 1, 2, 2, x_bytes=8192), 3, 70, 330),
        (TwoPartPlan(16, 1, 2, 1, 1, x_bytes=8192), 11, 40, 648),
        (TwoPartPlan(1, 2, 1, 2, 2, x_bytes=8192, min_blocks=2, chunk=1, x_stages=3), 1, 40, 320),
        (TwoPartPlan(2, 1, 2, 2, 2, x_bytes=8192, chunk=2, x_stages=3), 2, 40, 320),
        (
            TwoPartPlan(16, 2, 2, 2, 2, x_bytes=8192, chunk=2, x_stages=2),
            11,
            70,
            704,
        ),  # 6 and 5 windows: the second block's last chunk has one
    ],
    ids=str,
)
def test_kernel_source_within_the_bound_of_float64(plan, m, n, k):
    w_NK, parts = random_parts(n, k)
    x_MK = torch.randn(m, k).bfloat16()
    tiled = layout.parts_to_tiled(*parts, n, k)
    y_MN = emulated(plan, x_MK, tiled, None, "none", n)
    assert emulation.error_over_bound(y_MN, x_MK, bf16_weight(parts, n, k)) <= 1
    # And compared with the unrounded weight: half a unit in the last of bf16's 8 bits, 2^-8 of each product at most.
    exact = x_MK.double() @ w_NK.double().t()
    bound = 2**-8 * (x_MK.double().abs() @ w_NK.double().abs().t()) * 1.01
    assert ((y_MN - exact).abs() <= bound).all()
    bias = torch.randn(n).bfloat16()
    again = emulated(plan, x_MK, (*tiled[:3], tiled[3] * 2.0**-9), bias, "silu", n)
    expected = torch.nn.functional.silu(y_MN.double() * 2.0**-9 + bias.double())
    torch.testing.assert_close(again.double(), expected, rtol=1e-5, atol=1e-5)  # expf to a few units in the last place


@emulation.needs_compiler
@pytest.mark.parametrize(
    "plan",
    [TwoPartPlan(4, 2, 1, 2, 2, x_bytes=8192), TwoPartPlan(4, 1, 2, 2, 2, x_bytes=8192, chunk=2, x_stages=2)],
    ids=str,
)
def test_layers_that_begin_before_the_last_one_has_ended(plan):
    """Each has what the one before wrote as its x."""
    n, x_MK = 128, torch.randn(3, 128).bfloat16()
    codes, fine, scales, _ = layout.parts_to_tiled(*random_parts(n, n)[1], n, n)
    tiled = (codes, fine, scales, torch.tensor(2.0**-9))
    written = torch.full((8, 3, n), torch.nan, dtype=torch.bfloat16)

    def call(x, y):
        grid = (-(-n // (32 * plan.row_warps)), 1, plan.shared_bytes(n))
        return [x, *tiled, None, y, 3, n, n, 0, *plan.chunks(n), *grid]

    for x, y in zip([x_MK, *written[:3]], written[:4], strict=True):
        emulation._call(MMA_FILES, plan.macros(), MAIN, call(x, y))
    calls = [call(x, y) for x, y in zip([x_MK, *written[4:7]], written[4:], strict=True)]
    for _ in range(4):
        written[4:] = torch.nan
        emulation._call_all(MMA_FILES, plan.macros(), MAIN, calls)
        assert torch.equal(written[4:], written[:4])


@emulation.needs_compiler
@pytest.mark.parametrize(
    ("dtype", "n", "k"),
    [(torch.bfloat16, 33, 77), (torch.float16, 33, 200), pytest.param(torch.float32, 40, 136, marks=pytest.mark.slow)],
)
def test_dequantize_source_is_the_oracle(dtype, n, k):
    w_NK, parts = random_parts(n, k)
    tiled = layout.parts_to_tiled(*parts, n, k)
    assert torch.equal(emulation.dequantize(tiled, n, k, dtype), w_NK.to(dtype))


def wide_weight(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows apart from each other in memory, with magnitudes of every kind: blocks of zeros, saturated ones, NaN."""
    w_NK = torch.randn(n, k + 16).mul_(torch.logspace(-3, 1, n)[:, None]).to(dtype)[:, :k]
    w_NK[0, :16], w_NK[1, 0] = 0.0, 40.0
    return w_NK


@emulation.needs_compiler
@pytest.mark.parametrize(
    ("dtype", "k"),
    [(torch.bfloat16, 96), (torch.bfloat16, 77), pytest.param(torch.float32, 64, marks=pytest.mark.slow)],
    ids=str,
)
def test_round_source_is_the_oracle(dtype, k):
    w_NK = wide_weight(6, k, dtype)
    scales = separation.training_scales(w_NK)
    w_NK[2, 3], w_NK[3, 4] = torch.nan, 1e4  # beyond what the scales were made for
    scales.block[4, 0], scales.block[5, 1] = 0x7F, 3  # NaN, a subnormal scale
    out = torch.full((6, k), 7.0, dtype=dtype)
    macros = two_part_round.macros(dtype, dtype)
    grid = -(-6 * -(-k // 16) // two_part_round.THREADS)
    args = [w_NK, scales.block, scales.tensor, out, 6, k, w_NK.stride(0), int(k % 16 == 0), grid]
    emulation._call(two_part_round.FILES, macros, ROUND_MAIN, args)
    expected = separation.round_to_parts(w_NK, scales, dtype)
    assert bool(expected.isnan().any()) and torch.equal(out.nan_to_num(nan=99.0), expected.nan_to_num(nan=99.0))


@emulation.needs_compiler
@pytest.mark.parametrize(
    ("factor", "k"), [(1.0, 77), (1.02, 96), (1.3, 96), (torch.nan, 77), (torch.inf, 96), (None, 77), (0.0, 96)]
)
def test_renewal_source_is_the_oracle(factor, k):
    """Scales bit for bit, of a weight that stayed, moved, moved far, broke; without old ones (None), and with nothing
    in it.
    """
    w_NK = wide_weight(12, k, torch.bfloat16)
    kept = separation.training_scales(w_NK) if factor is not None else None
    if factor is not None and not 0 < factor < 2:
        w_NK[5, 20:] = factor
        w_NK.mul_(factor if factor == 0 else 1)
    elif factor is not None:
        w_NK.mul_(factor)
    total, ctas = 12 * -(-k // 16), 2
    room = torch.full((total + 3 * ctas,), torch.nan)
    found = separation.Scales(torch.full((12, -(-k // 16)), 77, dtype=torch.uint8), torch.tensor(torch.nan))
    drift = torch.tensor(torch.nan)
    old = (None, None) if kept is None else (kept.block, kept.tensor)
    whole = int(k % 16 == 0)
    args = [
        w_NK,
        *old,
        room,
        room[total:],
        found.block,
        found.tensor,
        drift,
        12,
        k,
        w_NK.stride(0),
        whole,
        ctas,
        1,
        0.05,
    ]
    emulation._call(two_part_round.FILES, two_part_round.macros(w_NK.dtype, w_NK.dtype), RENEW_MAIN, args)
    expected, far = two_part_round.renewed_scales(w_NK, kept, 0.05)
    assert torch.equal(
        found.block, torch.where(expected.block == 0xFF, 0x7F, expected.block)
    )  # x86's inf / inf has a sign
    torch.testing.assert_close(found.tensor, expected.tensor, rtol=0, atol=0, equal_nan=True)
    # Sums of 60 to 72 numbers in another order.
    torch.testing.assert_close(drift, far, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize(("k", "whole"), [(96, 1), (77, 0)])
def test_what_is_queued_is_of_the_weight_at_hand(k, whole, monkeypatch):
    queued = []
    launcher = SimpleNamespace(queue=lambda *parameters: queued.append(parameters))
    monkeypatch.setattr(two_part_round, "_launcher", lambda *_: launcher)
    monkeypatch.setattr(two_part_round, "_rounding", two_part_round._rounding.__wrapped__)
    monkeypatch.setattr(two_part_round, "_by_kernel", lambda device, dtype: True)
    first, second = wide_weight(60, k, torch.bfloat16), wide_weight(60, k, torch.bfloat16)
    for w_NK in (first, second):
        scales = separation.training_scales(w_NK)
        out = two_part_round.rounded(w_NK, scales.block, scales.tensor, torch.float32)
        assert out.shape == (60, k) and out.dtype == torch.float32
        at = (w_NK.data_ptr(), scales.block.data_ptr(), scales.tensor.data_ptr(), out.data_ptr())
        assert queued.pop() == ((-(-60 * -(-k // 16) // 256), 1, 1), (*at, 60, k, k + 16, whole))
    with pytest.raises(Unsupported, match="no memory"):
        two_part_round.rounded(TwoTensor(first, first), scales.block, scales.tensor, torch.float32)
    assert two_part_round.rounded(first, scales.block, scales.tensor, torch.float64).dtype == torch.float64
    assert queued.pop()[1][0] == first.data_ptr()
    column = wide_weight(60, 1, torch.bfloat16)[:, :1].as_strided((60, 1), (1, 60))  # which to torch is contiguous
    out = two_part_round.rounded(column, scales.block, scales.tensor, torch.float32)
    assert out.shape == (60, 1) and queued.pop()[1][4:] == (60, 1, 1, 0)


@pytest.mark.gpu
def test_weights_are_rounded_on_the_gpu_whatever_came_before():
    w_NK, other = wide_weight(70, 96, torch.bfloat16), wide_weight(70, 96, torch.bfloat16) * 3
    for weight, dtype in (
        (w_NK, torch.bfloat16),
        (other, torch.bfloat16),
        (w_NK.contiguous(), torch.float32),
        (w_NK, torch.float64),
    ):
        scales = separation.training_scales(weight)
        found = two_part_round.rounded(weight.cuda(), scales.block.cuda(), scales.tensor.cuda(), dtype)
        assert torch.equal(found.cpu(), separation.round_to_parts(weight, scales, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("k", [96, 77, 4096])
def test_rounding_on_the_gpu(dtype, k):
    w_NK = wide_weight(70, k, dtype)
    scales = separation.training_scales(w_NK)
    for target in {dtype, torch.float32}:
        expected = separation.round_to_parts(w_NK, scales, target)
        found = two_part_round.rounded(w_NK.cuda(), scales.block.cuda(), scales.tensor.cuda(), target)
        assert torch.equal(found.cpu(), expected)
    on_gpu = separation.Scales(scales.block.cuda(), scales.tensor.cuda())
    for kept, moved in ((None, 1.0), (on_gpu, 1.01), (on_gpu, 1.3)):
        cpu = None if kept is None else scales
        expected, far = two_part_round.renewed_scales(w_NK * moved, cpu, 0.05)
        renewed, drift = two_part_round.renewed_scales((w_NK * moved).cuda(), kept, 0.05)
        assert torch.equal(renewed.block.cpu(), expected.block) and torch.equal(renewed.tensor.cpu(), expected.tensor)
        torch.testing.assert_close(drift.cpu(), far, rtol=1e-4, atol=0)  # fp32 sums of up to 17,920 numbers


@pytest.mark.skipif(bool(nvrtc.why_not()), reason="nvidia-cuda-nvrtc is not installed")
@pytest.mark.parametrize(
    ("arch", "m"),
    [
        ("sm_90a", 16),
        pytest.param("sm_90a", 1, marks=pytest.mark.slow),
        pytest.param("sm_86", 16, marks=pytest.mark.slow),
    ],
)
def test_compiles_without_spills_and_fits(arch, m, tmp_path):
    plan = two_part.plan_two_part(m, 8192, 8192, H200 if arch == "sm_90a" else emulation.A100)
    usage = resources(nvrtc.compile_cubin(MMA_FILES, plan.macros(), arch), tmp_path)["fp4_mma"]
    assert usage["STACK"] == usage["LOCAL"] == 0, (plan, usage)
    assert usage["REG"] * plan.threads <= 65536, (plan, usage)


@pytest.mark.slow
@pytest.mark.skipif(bool(nvrtc.why_not()), reason="nvidia-cuda-nvrtc is not installed")
def test_rounding_compiles_without_spills(tmp_path):
    macros = two_part_round.macros(torch.bfloat16, torch.bfloat16)
    usage = resources(nvrtc.compile_cubin(two_part_round.FILES, macros, "sm_90a"), tmp_path)["two_part_round"]
    assert usage["STACK"] == usage["LOCAL"] == 0 and usage["REG"] <= 64, (
        usage
    )  # four blocks of 256 threads a multiprocessor


@pytest.mark.parametrize(("gpu", "most"), [(H200, 227 * 1024), (emulation.A100, 99 * 1024)])
def test_plans_fit_shared_memory(gpu, most):
    for rows in range(1, 17):
        for n, k in ((256, 64), (768, 3072), (4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672)):
            plan = two_part.plan_two_part(rows, n, k, gpu)
            windows, count = plan.chunks(k)
            assert plan.shared_bytes(k) <= most, (plan, k)
            if plan.chunk:
                assert plan.chunk % plan.k_warps == 0 and k % 64 == 0
                continue
            assert windows * count * plan.splits * 64 >= k and windows % plan.k_warps == 0
            assert count == 1 or windows % (plan.k_warps * plan.prefetch) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 13, 16])
@pytest.mark.parametrize(("n", "k"), [(40, 136), (200, 1000), (1056, 4096), (512, 14336)])
def test_kernel_on_the_gpu(m, n, k):
    w_NK, parts = random_parts(n, k)
    tiled = [tensor.cuda() for tensor in layout.parts_to_tiled(*parts, n, k)]
    x_MK = torch.randn(m, k).bfloat16().cuda()
    for gpu in (H200, emulation.A100) if torch.cuda.get_device_capability()[0] == 9 else (emulation.A100,):
        plan = two_part.plan_two_part(m, n, k, gpu)
        first, second = (fp4_launch.run_mma(plan, x_MK, tiled, None, "none", n, torch.float32) for _ in range(2))
        assert torch.equal(first, second)
        assert emulation.error_over_bound(first.cpu(), x_MK.cpu(), bf16_weight(parts, n, k)) <= 1, plan
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        written = fp4_launch.run_dequantize(tiled, n, k, dtype)
        assert torch.equal(written.cpu(), w_NK.to(dtype))
    # The op, whose sums are rounded to bf16: by 2^-8 of a sum at most. What is multiplied by is rounded in another
    # place by each, so each is compared with its own float64.
    x_MK, ours, theirs = x_MK.cpu(), bf16_weight(parts, n, k), w_NK.bfloat16().double()
    with use_backend("two_part_linear", "mma"):
        fused = two_part_linear(x_MK.cuda(), *tiled, None, "nvfp4-tiled", "none", n, k).double().cpu()
    exact = x_MK.double() @ ours.t()
    sums = 4 * 2**-24 * k**0.5 * (x_MK.double().abs() @ ours.abs().t())  # as error_over_bound has them
    assert ((fused - exact).abs() <= 2**-8 * exact.abs() + 1.01 * sums).all()
    with use_backend("two_part_linear", "dequantize"):
        written = two_part_linear(x_MK.cuda(), *tiled, None, "nvfp4-tiled", "none", n, k).double().cpu()
    exact = x_MK.double() @ theirs.t()
    # cuBLAS may split K and add the parts in bf16: as much again.
    assert (written - exact).norm() <= 2**-7 * exact.norm()
