"""Who runs, who refuses and what is said about it."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

from tests.kernels.emulation import A100
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import linear, mma_plan, w4a8, wgmma_plan
from vblackwell.kernels.fp4.mma_plan import H200, Gpu
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan
from vblackwell.kernels.pointwise.cross_entropy import linear_cross_entropy
from vblackwell.kernels.pointwise.linears import shared_input_linears
from vblackwell.kernels.pointwise.rows import rms_norm
from vblackwell.kernels.runtime import registry
from vblackwell.kernels.runtime.registry import Backend, Request, choose, explain, use_backend
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear

CUDA = torch.device("cuda", 0)
RTX3070, RTX4090 = Gpu((8, 6), 46, 0.448e6), Gpu((8, 9), 128, 1.008e6)
GPUS = {gpu.capability: gpu for gpu in (H200, A100, RTX3070, RTX4090)}


def request(**changes) -> Request:
    values = {"device": CUDA, "capability": (9, 0), "dtype": torch.bfloat16, "format": "nvfp4-tiled"}
    return Request(**{**values, "m": 1, "n": 4096, "k": 4096, **changes})


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """A GPU is what its request's capability says: none is here."""
    for reasons in ("_mma_reasons", "_wgmma_reasons"):
        backend = next(backend for backend in linear.LINEAR if backend.reasons.__name__ == reasons)

        def known(request, reasons=backend.reasons):
            monkeypatch.setattr(linear, "gpu_of", lambda device: GPUS[request.capability])
            return reasons(request)

        monkeypatch.setattr(
            linear, "LINEAR", tuple(replace(each, reasons=known) if each is backend else each for each in linear.LINEAR)
        )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "mma"),
        ({"m": 16}, "mma"),
        ({"m": 32, "n": 704, "k": 1280}, "mma"),
        ({"m": 33, "n": 704, "k": 1280}, "wgmma"),
        ({"m": 32, "n": 1024, "k": 1088}, "wgmma"),
        ({"m": 17, "n": 512, "k": 512}, "wgmma"),
        ({"m": 16, "n": 8192, "k": 8192}, "mma"),
        ({"m": 16, "n": 8192, "k": 8200}, "wgmma"),
        ({"m": 300, "n": 14336}, "wgmma"),
        ({"m": 8192}, "dequantize"),
        ({"m": 4096, "n": 28672, "k": 8192}, "dequantize"),
        ({"m": 33, "capability": (8, 6)}, "mma"),
        ({"m": 64, "capability": (8, 0)}, "mma"),
        ({"m": 257, "capability": (8, 0)}, "dequantize"),
        ({"m": 256, "n": 40, "k": 65536, "capability": (8, 9)}, "dequantize"),
        ({"m": 32, "capability": (8, 9), "dtype": torch.float16}, "mma"),
        ({"capability": (7, 5)}, "dequantize"),
        ({"dtype": torch.float32}, "dequantize"),
        ({"format": "nvfp4"}, "dequantize"),
        ({"format": "int8"}, "dequantize"),
        ({"device": torch.device("cpu"), "capability": (0, 0)}, "reference"),
    ],
)
def test_first_without_a_reason_runs(changes, name):
    assert choose("fp4_linear", linear.LINEAR, request(**changes)).name == name


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"m": w4a8.MIN_ROWS}, "fused"),
        ({"m": 2048, "n": 28672, "k": 8192}, "fused"),
        ({"m": 2049, "n": 28672, "k": 8192}, "fp8"),
        ({"m": 8192}, "fused"),
        ({"m": 8192, "n": 6144}, "fused"),
        ({"m": 8192, "n": 6160}, "fp8"),
        ({"m": 1024, "capability": (8, 9)}, "fp8"),
        ({"m": 1024, "capability": (10, 0)}, "fp8"),
    ],
)
def test_w4a8_decodes_while_it_multiplies_where_that_was_faster(changes, name):
    assert choose("fp4_linear_w4a8", w4a8.W4A8, request(format=w4a8.FORMAT, **changes)).name == name


def test_every_reason_is_listed():
    reasons = explain(linear.LINEAR, request(capability=(7, 5), dtype=torch.float32, format="nf4"))["mma"]
    assert len(reasons) == 3
    assert "7.5" in reasons[0] and "nf4" in reasons[1] and "float32" in reasons[2]


def test_asking_for_a_backend_that_refuses_raises_with_its_reasons():
    with use_backend("fp4_linear", "wgmma"), pytest.raises(Unsupported, match=r"refuses: .*8\.6: it needs 9\.0"):
        choose("fp4_linear", linear.LINEAR, request(capability=(8, 6)))
    assert choose("fp4_linear", linear.LINEAR, request()).name == "mma"


def test_asking_for_an_unknown_backend_names_those_there_are():
    with (
        use_backend("fp4_linear", "marlin"),
        pytest.raises(ConfigurationError, match="mma, wgmma, dequantize, reference"),
    ):
        choose("fp4_linear", linear.LINEAR, request())


def test_no_backend_at_all_says_why_for_each():
    table = (Backend("a", lambda request: ["too small"], print), Backend("b", lambda request: ["too large"], print))
    with pytest.raises(Unsupported, match=r"a: too small \| b: too large"):
        choose("op", table, request())


def test_a_cpu_has_no_capability():
    assert registry.capability(torch.device("cpu")) == (0, 0)


def test_consumer_blackwell_gets_the_plans_that_fit_99_kb():
    capabilities = ((8, 9), (9, 0), (10, 0), (12, 0))
    assert [H200._replace(capability=each).clusters for each in capabilities] == [False, True, True, False]


@pytest.mark.parametrize(("stages", "k_groups"), [(3, 2), (6, 4), (3, 3), (2, 2)])
def test_a_stage_that_would_change_hands_is_refused(stages, k_groups):
    with pytest.raises(ConfigurationError, match="do not go round"):
        wgmma_plan.WgmmaPlan(64, 1, 1, stages, k_groups=k_groups)
    assert wgmma_plan.WgmmaPlan(64, 1, 1, 2 * k_groups, k_groups=k_groups).stages == 2 * k_groups


@pytest.mark.parametrize(("tokens", "splits"), [(16, 4), (32, 8), (64, 16)])
def test_tokens_that_blocks_would_not_share_by_eights_are_refused(tokens, splits):
    with pytest.raises(ConfigurationError, match=f"multiple of {8 * splits} tokens"):
        wgmma_plan.WgmmaPlan(tokens, 1, splits, 2)
    assert wgmma_plan.WgmmaPlan(8 * splits, 1, splits, 2).splits == splits


@pytest.mark.parametrize(("tokens", "row_warps", "splits"), [(32, 1, 2), (16, 1, 3), (4, 2, 5)])
def test_outputs_that_blocks_would_not_share_evenly_are_refused(tokens, row_warps, splits):
    with pytest.raises(ConfigurationError, match="splits that divide"):
        mma_plan.MmaPlan(tokens, row_warps, 2, splits, 2)
    assert mma_plan.MmaPlan(tokens, row_warps, 2, 1, 2).splits == 1


def test_dequantising_wins_for_many_rows_and_never_for_few():
    for n, k in ((4096, 4096), (14336, 4096), (28672, 8192)):
        assert all(wgmma_plan.wgmma_beats_dequantize(m, n, k, H200) for m in (17, 64, 256))
        assert not wgmma_plan.wgmma_beats_dequantize(8192, n, k, H200)


def test_cublas_is_slow_where_rows_begin_anywhere():
    """N or K that is no multiple of 8: 1830 x 6683 x 5539 took 1,242 us on an H200, 197 by what it does otherwise."""
    for m, n, k in ((1830, 6683, 5544), (1830, 6688, 5539), (8192, 4096, 4093)):
        assert wgmma_plan.wgmma_beats_dequantize(m, n, k, H200)
    assert not wgmma_plan.wgmma_beats_dequantize(8192, 4096, 4096, H200)


def test_few_features_of_a_long_k_get_larger_clusters():
    for m, n, k in ((43, 1216, 26496), (71, 927, 27648)):
        plan = wgmma_plan.plan_wgmma(m, n, k, H200)
        pairs = [each for each in wgmma_plan.candidates(m, k) if each.splits <= 2]
        least = min(wgmma_plan.predicted_us(each, m, n, k, H200) for each in pairs)
        assert plan.splits > 2 and wgmma_plan.predicted_us(plan, m, n, k, H200) < 0.7 * least
    # 30 clusters of four find room on 132 multiprocessors: one more is a second round
    plan = WgmmaPlan(64, 1, 4, 6)
    one, more = (wgmma_plan.predicted_us(plan, 64, 64 * rows, 4096, H200) for rows in (30, 31))
    assert more > 1.2 * one


def test_one_block_gets_a_multiprocessor_where_each_can_have_one():
    for m, n, k in ((1, 4096, 4096), (16, 14336, 4096), (32, 4096, 4096)):
        plan = mma_plan.plan_mma(m, n, k, H200) if m <= 16 else wgmma_plan.plan_wgmma(m, n, k, H200)
        needed = plan.shared_bytes(k) if isinstance(plan, mma_plan.MmaPlan) else plan.shared_bytes()
        h100 = H200._replace(processors=114)
        asked = mma_plan.launch_bytes(needed, 114, h100)
        assert needed <= asked <= 227 * 1024 < 2 * asked
        assert mma_plan.launch_bytes(needed, 128, h100) == needed
    # Those of an RTX 5090 begin early, too, and have 100 KB, of which each block takes 1 KB more than it asks for
    assert mma_plan.launch_bytes(40 * 1024, 46, Gpu((8, 6), 46, 0.448e6)) == 40 * 1024  # its launches do not overlap
    asked = mma_plan.launch_bytes(40 * 1024, 96, Gpu((12, 0), 170, 1.792e6))
    assert asked <= 99 * 1024 and 2 * (asked + 1024) > 100 * 1024


def test_registers_that_a_block_does_not_need_are_for_rows_that_are_swizzled_early():
    """What is left of 65536 next to one block holds blocks of 4096; a second block of the product finds none."""
    for m, k in ((64, 4096), (401, 1472), (1809, 704), (4096, 4096)):
        for plan in wgmma_plan.candidates(m, k):
            taken = plan.launch_registers * plan.threads * plan.min_blocks
            assert plan.registers >= plan.needed_registers and 65536 - taken >= 4096
            assert plan.min_blocks > 1 or 2 * taken > 65536
    assert 65536 - WgmmaPlan(112, 1, 1, 6, k_groups=2).launch_registers * 384 >= 6 * 4096


@pytest.mark.parametrize("k_groups", [1, 2, 3, 4])
def test_a_stage_of_pairs_belongs_to_one_group(k_groups):
    assert wgmma_plan.WgmmaPlan(32, 1, 1, 4 * k_groups, k_groups=k_groups, windows_per_step=2).fragments == 1
    for stages in (2 * k_groups, 4 * k_groups + 1):
        with pytest.raises(ConfigurationError, match="do not go round"):
            wgmma_plan.WgmmaPlan(32, 1, 1, stages, k_groups=k_groups, windows_per_step=2)


def test_a_chunk_that_begins_between_slots_is_refused():
    with pytest.raises(ConfigurationError, match="multiple of 16 windows"):
        mma_plan.MmaPlan(4, 2, 4, 1, 4, chunk=24)


def test_what_was_timed_is_taken_and_fits_on_gpus_of_that_kind_alone():
    for (m, n, k), (row_warps, k_warps, splits) in mma_plan._TIMED[(9, 0), 132].items():
        plan = mma_plan.plan_mma(m, n, k, H200)
        assert (plan.row_warps, plan.k_warps, plan.splits) == (row_warps, k_warps, splits)
        assert plan.shared_bytes(k, norm=True) <= 227 * 1024
    for (m, n, k), blocks in wgmma_plan._TIMED[(9, 0), 132].items():
        for rows in (m - 15, m):
            plan = wgmma_plan.plan_wgmma(rows, n, k, H200)
            assert plan.blocks == blocks and plan.fits()
        assert wgmma_plan.plan_wgmma(m, n, k, H200._replace(processors=114)).blocks != blocks or m == 256


@pytest.mark.parametrize(
    ("n", "k", "blocks", "tail"),
    [
        (4096, 4096, (256, 2, 1), None),
        (4096, 14336, (256, 2, 1), None),
        (2560, 6912, (176, 2, 1), None),
        (11008, 4096, (256, 2, 1), (176, 2, 1, 1)),
        (5120, 13824, (256, 2, 1), (256, 1, 2, 2)),
    ],
)
def test_many_rows_go_in_whole_rounds_of_blocks(n, k, blocks, tail):
    """1024 rows on 132 multiprocessors: blocks of 256 by 128 are 128 (twice), 80 of which 52 multiprocessors have none,
    344 that leave 80 after two rounds, 160 that leave 28 after one.
    """
    plan = wgmma_plan.plan_wgmma(1024, n, k, H200)
    assert (plan.tokens, plan.groups, plan.k_groups) == blocks and plan.splits == plan.min_blocks == 1
    assert (plan.tail and plan.tail.blocks[:4]) == tail
    assert wgmma_plan.wgmma_beats_dequantize(1024, n, k, H200)
    assert not wgmma_plan.wgmma_beats_dequantize(4096, 4096, 4096, H200)


@given(m=st.integers(257, 3000), n=st.integers(1, 40000), processors=st.integers(1, 200), groups=st.integers(1, 2))
def test_launches_cover_every_row_once(m, n, processors, groups):
    tail = WgmmaPlan(176, groups, 1, 6)
    found = wgmma_plan.launches(WgmmaPlan(256, 2, 1, 4, tail=tail), m, n, processors)
    ends = [(64 * each.plan.groups * each.first, 64 * each.plan.groups * (each.first + each.blocks)) for each in found]
    assert ends[0][0] == 0 and ends[-1][1] - 64 * found[-1].plan.groups < n <= ends[-1][1]
    assert all(each.blocks > 0 for each in found) and len(found) <= 2
    if len(found) == 2:
        columns, rows = -(-m // 256), -(-n // 128)
        assert ends[0][1] == ends[1][0]
        assert -(-found[0].blocks * columns // processors) <= rows * columns // processors


@pytest.mark.parametrize("gpu", [A100, RTX3070, RTX4090], ids=str)
def test_blocks_without_clusters_are_as_many_as_the_multiprocessors_need(gpu):
    """From 33 rows on, whose products take longer than their weights: no multiprocessor has more than 2/5 above its
    share, and no block more shared memory than an RTX 3070's.
    """
    for m, n, k in itertools.product((33, 64, 100, 256), (2560, 4096, 8192, 14336), (4096, 14336)):
        plan = mma_plan.plan_mma(m, n, k, gpu)
        windows = math.prod(plan.chunks(k)) * plan.row_warps  # of a block
        blocks = -(-n // (32 * plan.row_warps)) * plan.k_blocks * -(-m // plan.tokens)
        share = -(-n // 32) * (k // 64) * -(-m // plan.tokens) / gpu.processors
        assert -(-blocks // gpu.processors) * windows <= 1.4 * share, (m, n, k, plan)
        assert plan.shared_bytes(k) <= 99 * 1024 and plan.threads <= 512


@given(m=st.integers(1, 256), n=st.integers(1, 20000), k=st.integers(1, 20000))
def test_plans_without_clusters_cover_k(m, n, k):
    plan = mma_plan.plan_mma(m, n, k, A100)
    windows, count = plan.chunks(k)
    assert windows * count * plan.k_blocks * 64 >= k and windows % plan.k_warps == 0
    assert count == 1 or windows % (plan.k_warps * plan.prefetch) == 0
    assert mma_plan.plan_mma(m, n, k, A100, one_block=True).k_blocks == 1


@pytest.mark.parametrize(
    ("shape", "rows_by_k_warps", "splits"),
    [
        ((15, 832, 960), (1, 4), 2),
        ((2, 1024, 512), (1, 4), 1),
        ((16, 12288, 832), (3, 4), 1),
        ((9, 20032, 576), (5, 3), 1),
    ],
)
def test_short_k_is_spread_over_the_gpu(shape, rows_by_k_warps, splits):
    """Cells of docs/journal/fp4.md: two windows in flight, one chunk of x, and no warp without a window."""
    plan = mma_plan.plan_mma(*shape, H200)
    assert ((plan.row_warps, plan.k_warps), plan.splits) == (rows_by_k_warps, splits)
    assert (plan.prefetch, plan.x_stages) == (2, 1) and plan.k_warps * plan.splits <= shape[2] // 64


@pytest.mark.parametrize("m", [1, 3, 8, 16])
def test_x_comes_in_bulk_where_it_may(m):
    common = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192))
    for n, k in (*common, (40, 1024), (128256, 8192), (64, 65536), (2048, 28672), (832, 960), (70000, 512)):
        plan = mma_plan.plan_mma(m, n, k, H200)
        assert 0 < plan.chunk < k // 64 // plan.splits + plan.k_warps * plan.prefetch
        assert plan.shared_bytes(k, norm=True) <= 227 * 1024 and plan.threads <= 1024
        # A chunk is copied while others are read, or it is the only one.
        assert plan.x_stages > 1 or plan.chunk >= k / 64 / plan.splits
    for other in ((m, 4096, 4104, H200), (m, 4096, 448, H200), (m, 4096, 4096, A100)):
        assert not mma_plan.plan_mma(*other).chunk
    assert not mma_plan.plan_mma(m, 4096, 4096, H200, bulk=False).chunk
    x_MK = torch.zeros(m, 4096, dtype=torch.bfloat16)
    with pytest.raises(ConfigurationError, match="does not go with this norm"):
        plan = mma_plan.MmaPlan(4, 3, 1, 1, 4)
        fp4_launch.run_mma(plan, x_MK, (x_MK,) * 3, None, "none", 4096, gain_K=x_MK[0], eps=1e-5)


def tangent(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def packed_linear(x):
    layer = FusedFP4Linear(32, 16)
    layer.quantize()
    return layer(x)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.jit"
)  # torch scripts its own rules when they are first asked for
@pytest.mark.parametrize(
    "function",
    [
        packed_linear,
        lambda x: linear_cross_entropy(x, torch.ones(16, 32), torch.arange(3)),
        lambda x: shared_input_linears(x, [torch.ones(16, 32)])[0],
    ],
)
def test_no_derivative_is_no_zero(function):
    """torch hands operators without a rule on without their tangents: a derivative of zero, and no word of it."""
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with pytest.raises(Unsupported, match="forward-mode derivative"):
        tangent(function, x)
    function(x)  # and nothing is left over


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.jit"
)  # torch scripts its own rules when they are first asked for
def test_rows_are_differentiated_forward_by_torch():
    x = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = tangent(lambda x: rms_norm(x, torch.ones(32, dtype=torch.float64), 1e-6), x)
    wanted = tangent(lambda x: x * (x.square().mean(-1, True) + 1e-6).rsqrt(), x)
    torch.testing.assert_close(found, wanted)  # the same expression in float64
    with use_backend("rms_norm", "triton"), pytest.raises(Unsupported, match="forward-mode"):
        tangent(lambda x: rms_norm(x, torch.ones(32, dtype=torch.float64), 1e-6), x)


@pytest.mark.parametrize("m", [897, 1024, 1025, 2048, 4096, 8192])
def test_clusters_begin_with_rows_that_the_head_rounds(m):
    """Whose rows the product's own warps round first waits for nearly all of its time."""
    clusters = 66
    for n in range(256, 8192, 176):
        plan = w4a8.plan_w4a8(m, n, 4096, 2 * clusters)
        sizes = w4a8.cut(plan, m, n, 4096, clusters)
        pairs = min(sizes.pairs, plan.head_rows // 256)
        ready = pairs * sizes.columns  # tiles: they are dealt out by four pairs
        assert ready >= min(clusters - w4a8.MAX_WAITING, sizes.pairs * sizes.columns), (n, plan)
        assert plan.head_rows < m + w4a8.HEAD_ROWS


@pytest.mark.parametrize(
    ("m", "n", "k", "rows"),
    [(2048, 4096, 4096, 1024), (2048, 4096, 14336, 2048), (4096, 6144, 4096, 2048), (4096, 14336, 4096, 1024)],
)
def test_heads_of_large_weights_round_what_a_second_round_begins_with(m, n, k, rows):
    """As timed, unless the first four pairs' tiles fill a round and a half."""
    assert w4a8.plan_w4a8(m, n, k, 132).head_rows == rows


def test_a_driver_that_reports_no_memory_clock_gets_a_rate_by_its_multiprocessors(monkeypatch):
    """As some do where a CPU shares the memory: plans divide by it."""
    properties = SimpleNamespace(multi_processor_count=48)
    monkeypatch.setattr(fp4_launch, "driver", lambda: SimpleNamespace(cuDeviceGetAttribute=lambda value, *which: 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 1))
    gpu = fp4_launch.gpu_of.__wrapped__(torch.device("cuda", 0))
    assert gpu == Gpu((12, 1), 48, H200.memory_bytes_a_us * 48 / 132)
    assert mma_plan.mma_is_faster(1, 4096, 4096, gpu)
