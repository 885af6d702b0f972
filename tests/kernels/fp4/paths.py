"""Every path of the FP4 kernels on a GPU against float64, a line a step: ``python -m tests.kernels.fp4.paths``
(fp4/test_paths_gpu.py).

A separate process, because a kernel that waits for ever cannot be ended from within: the last line says which plan
was running.
"""

import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from tests.kernels.emulation import error_over_bound, random_weight
from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import layout, reference, w4a8
from vblackwell.kernels.fp4.mma_plan import MMA_FILES, MmaPlan
from vblackwell.kernels.fp4.wgmma_plan import WGMMA_FILES, WgmmaPlan
from vblackwell.kernels.runtime import nvrtc
from vblackwell.numerics.formats import FORMATS

# Rows, features and columns that are no multiples of what a block takes; K of one window, of fewer windows than groups,
# of many.
# Bulk x: at once, in chunks short and long, clusters, one and two blocks a multiprocessor; without: a K that is no
# multiple of 64
MMA = [
    (MmaPlan(4, 1, 15, 1, 4, chunk=60, x_stages=3), [(4, 4096, 4096), (3, 33, 960), (2, 40, 64)]),
    (MmaPlan(16, 2, 6, 2, 4, chunk=24, x_stages=3), [(16, 4096, 14336), (11, 70, 1600), (9, 1000, 1000)]),
    (MmaPlan(16, 4, 4, 2, 4, chunk=64, x_stages=1), [(16, 8192, 8192), (13, 100, 1664)]),
    (MmaPlan(4, 2, 8, 2, 4, chunk=32, x_stages=2), [(4, 4096, 8192), (3, 33, 3200)]),
    (MmaPlan(8, 7, 4, 1, 4, chunk=16, x_stages=3), [(8, 28672, 8192), (7, 230, 1664)]),
    (MmaPlan(16, 1, 4, 2, 4, 2, chunk=16, x_stages=2), [(16, 4096, 4096), (5, 65, 1088)]),
    (MmaPlan(1, 1, 16, 1, 4, chunk=256, x_stages=1), [(1, 4096, 14336), (1, 31, 128)]),
    # Without clusters: tall blocks of 64 tokens, blocks that split K and meet in global memory
    (MmaPlan(64, 8, 1, 1, 2, x_bytes=32 * 1024), [(256, 8192, 8192), (130, 300, 520)]),
    (MmaPlan(64, 4, 2, 1, 2, x_bytes=32 * 1024, k_blocks=3), [(64, 4096, 4096), (200, 130, 520)]),
    (MmaPlan(16, 2, 4, 1, 2, x_bytes=32 * 1024, k_blocks=8), [(40, 4096, 14336), (13, 33, 4104)]),
    # Two blocks of 8 warps a multiprocessor, or one of 16
    (MmaPlan(64, 8, 1, 1, 2, 2, 32 * 1024, k_blocks=2), [(256, 8192, 8192), (130, 300, 2120)]),
    (MmaPlan(64, 16, 1, 1, 2, x_bytes=32 * 1024), [(128, 14336, 4096), (130, 600, 520)]),
    (MmaPlan(32, 4, 4, 1, 2, x_bytes=64 * 1024, k_blocks=3), [(64, 4096, 4096), (40, 130, 2120)]),
    # Rows that begin anywhere
    (MmaPlan(2, 1, 16, 1, 4), [(2, 1600, 1443), (1, 31, 1027)]),
    (MmaPlan(16, 1, 8, 2, 4, chunk=32, x_stages=1), [(31, 704, 1280), (32, 1000, 1024)]),  # two columns of blocks
    (MmaPlan(16, 2, 8, 2, 4), [(13, 1280, 4969), (7, 130, 1102), (40, 33, 1039)]),
]
WGMMA = [  # K groups, clusters, both, one and two blocks a multiprocessor, one and two columns of blocks
    *[
        (
            WgmmaPlan(tokens, groups, splits, stages, min_blocks=blocks, k_groups=k_groups),
            [(m, 4096, 4096), (m - 3, 130, 520), (m, 70, 64)],
        )
        for (tokens, groups, splits, blocks, k_groups, stages), m in itertools.product(
            (
                (16, 1, 2, 1, 1, 4),
                (16, 1, 1, 1, 4, 8),
                (32, 1, 1, 2, 1, 4),
                (32, 1, 2, 1, 3, 6),
                (32, 1, 4, 1, 4, 8),
                (64, 1, 2, 1, 2, 8),
                (64, 1, 2, 2, 1, 8),
                (64, 1, 2, 1, 3, 6),
                (64, 2, 4, 1, 2, 8),
            ),
            (64,),
        )
    ],
    (WgmmaPlan(128, 1, 1, 6, k_groups=3), [(128, 4096, 4096), (250, 130, 200), (64, 70, 64)]),
    (WgmmaPlan(128, 2, 2, 6, k_groups=2), [(128, 6144, 4096), (250, 130, 200), (64, 70, 64)]),
    (WgmmaPlan(128, 1, 1, 8, k_groups=4), [(128, 6144, 4096), (250, 130, 520)]),
    (WgmmaPlan(128, 3, 2, 6), [(128, 4096, 4096), (250, 130, 200)]),
    # helpers: for each four or three tiles of rows, and fewer; more windows than there are
    # windows in pairs, the last one perhaps a half; one and two blocks a multiprocessor, helpers
    (
        WgmmaPlan(64, 1, 2, 8, min_blocks=2, k_groups=2, windows_per_step=2),
        [(64, 4096, 4096), (61, 130, 520), (64, 70, 64)],
    ),
    (WgmmaPlan(64, 1, 1, 12, k_groups=3, windows_per_step=2), [(64, 8192, 8192), (130, 130, 1864)]),
    (WgmmaPlan(32, 2, 2, 8, k_groups=2, windows_per_step=2), [(32, 6144, 4096), (20, 300, 712)]),
    (WgmmaPlan(32, 4, 1, 8, windows_per_step=2), [(32, 28672, 8192), (20, 300, 712)]),
    (WgmmaPlan(256, 1, 1, 6, k_groups=2), [(256, 4096, 4096), (250, 130, 200)]),
    # tokens that are no power of two, halves of them, whole rounds and a tail of other tokens, one that splits K
    (WgmmaPlan(224, 1, 2, 6, k_groups=2), [(200, 3072, 8192), (250, 130, 200)]),
    (WgmmaPlan(80, 1, 1, 8, k_groups=4), [(200, 2560, 6912), (250, 130, 520)]),
    (WgmmaPlan(112, 3, 1, 6), [(200, 11008, 4096), (250, 130, 200)]),
    (WgmmaPlan(176, 2, 1, 4), [(1024, 2560, 6912), (250, 130, 200)]),
    (WgmmaPlan(208, 1, 1, 6, k_groups=2), [(1000, 1000, 1000), (250, 130, 200)]),
    (WgmmaPlan(48, 1, 1, 8, k_groups=2, windows_per_step=2), [(40, 4096, 4096), (47, 130, 520), (45, 4032, 939)]),
    (WgmmaPlan(64, 1, 4, 16, k_groups=4, windows_per_step=2), [(43, 1216, 26496), (64, 130, 2202)]),
    (WgmmaPlan(96, 1, 4, 8, k_groups=4), [(71, 927, 27648), (200, 130, 1103)]),
    (WgmmaPlan(256, 2, 1, 4, tail=WgmmaPlan(256, 1, 1, 6, k_groups=2)), [(1000, 14336, 512), (1024, 6144, 4096)]),
    (WgmmaPlan(256, 2, 1, 4, tail=WgmmaPlan(176, 2, 1, 4)), [(1024, 11008, 4096)]),
    (WgmmaPlan(256, 2, 1, 4, tail=WgmmaPlan(256, 1, 2, 4, k_groups=2)), [(1024, 5120, 13824)]),
]
W4A8 = [*itertools.product(w4a8.STEP_CYCLES, (torch.bfloat16,)), (256, torch.float16)]
REPEATS = 20  # launches back to back, which overlap


@functools.cache
def weight(format: str, n: int, k: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    w_NK, tiled = random_weight(format, n, k)
    return w_NK.cuda(), tuple(tensor.cuda() for tensor in tiled)


def in_tiles(plan: MmaPlan | WgmmaPlan, dtype: torch.dtype) -> bool:
    """Whether rounded outputs leave by another way than fp32's; one type is enough."""
    return isinstance(plan, WgmmaPlan) and plan.tokens // plan.splits % 16 == 0 and dtype == torch.bfloat16


def compile_all() -> None:
    """Into the cache on disk, on all cores."""
    jobs = []
    tails = [(plan.tail, ()) for plan, _ in WGMMA if plan.tail]
    for (plan, _), fp16 in itertools.product((*MMA, *WGMMA, *tails), (False, True)):
        jobs.append((MMA_FILES if isinstance(plan, MmaPlan) else WGMMA_FILES, plan.macros(fp16, True)))
        if not fp16 and in_tiles(plan, torch.bfloat16):
            jobs.append((WGMMA_FILES, plan.macros(False)))
    jobs += [(w4a8.E4M3_FILES, w4a8.prepare_macros(fp16, k)) for fp16 in (False, True) for k in (64, 4096)]
    jobs += [
        (w4a8.FILES, w4a8.of_width(width).macros(dtype == torch.float16, k))
        for width, dtype in W4A8
        for k in (96, 544, 4096)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: nvrtc.cached_cubin(*job, "sm_90a"), jobs))


def check(plan: MmaPlan | WgmmaPlan, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    w_NK, tiled = weight("nvfp4" if dtype == torch.bfloat16 else "mxfp4", n, k)
    x_MK = torch.randn(m, k, device="cuda").to(dtype)
    run = fp4_launch.run_mma if isinstance(plan, MmaPlan) else fp4_launch.run_wgmma
    launch = lambda: run(plan, x_MK, tiled, None, "none", n, torch.float32)  # noqa: E731
    torch.full((m, n), torch.nan, device="cuda")  # what the next allocation of this size is likely to hold
    y_MN = launch()
    ratio = error_over_bound(y_MN, x_MK, w_NK)
    assert ratio <= 1, f"error {ratio} times the bound"
    stream = [launch() for _ in range(REPEATS)]
    assert all(torch.equal(y_MN, again) for again in stream), "launches that overlap do not repeat"
    if in_tiles(plan, dtype):
        rounded = [run(plan, x_MK, tiled, None, "none", n) for _ in range(REPEATS)]
        assert all(torch.equal(again, y_MN.to(dtype)) for again in rounded), "rounded in tiles"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [launch() for _ in range(3)]
    for _ in range(3):
        for output in outputs:
            output.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(y_MN, output) for output in outputs), "a graph's replay differs"


@functools.cache
def w4a8_weight(n: int, k: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """An mxfp4 weight whose rows' exponents span 14: in fp32, its tiles, its rows' largest scales."""
    form = FORMATS["mxfp4"]
    codes = torch.randint(0, 256, form.codes_shape(n, k), dtype=torch.uint8)
    scales = torch.randint(112, 127, form.scales_shape(n, k)).to(torch.uint8)
    tiled = tuple(tensor.cuda() for tensor in layout.to_tiled(codes, scales, torch.tensor(1.0), "mxfp4", n, k))
    return reference.dequantize(*tiled, "mxfp4-tiled", n, k), tiled, w4a8.row_tops(tiled[1], n, k)


def check_w4a8(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Both operands, bit for bit what the reference makes, from one launch."""
    w_NK, tiled, top = w4a8_weight(n, k)
    x_MK = (torch.randn(m, k, device="cuda") * torch.logspace(-3, 3, m, device="cuda")[:, None]).to(dtype)
    x_MK[m // 2] = 0
    wanted, wanted_scale = w4a8.quantize_rows(x_MK)
    for _ in range(REPEATS):
        q_MK, scale_M1, w8_NK, scale_1N = w4a8.run_prepare_e4m3(x_MK, (*tiled, top), n, k)
        assert torch.equal(w8_NK.float() * scale_1N.t(), w_NK), "the weight"
        assert torch.equal(scale_M1, wanted_scale) and torch.equal(q_MK.float(), wanted.float()), "the rows"


def check_w4a8_product(width: int, m: int, n: int, k: int, dtype: torch.dtype, activation: str) -> None:
    """One kernel that decodes and multiplies, against the exact product of rounded rows; launches that overlap
    repeat.
    """
    w_NK, tiled, top = w4a8_weight(n, k)
    x_MK, bias_N = torch.randn(m, k, device="cuda").to(dtype), torch.randn(n, device="cuda").to(dtype)
    q_MK, scale_M1 = w4a8.quantize_rows(x_MK)
    codes, scales, tensor_scale = tiled
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    plan = replace(w4a8.of_width(width), head_rows=w4a8.plan_w4a8(m, n, k, processors).head_rows)
    weight = (codes, scales, tensor_scale, top)
    launch = lambda: w4a8.run_w4a8(plan, x_MK, weight, bias_N, activation, n, k)  # noqa: E731
    y_MN = launch()
    rows_MK = q_MK.double() * scale_M1.double()
    exact_MN = reference.activate(rows_MK @ w_NK.double().t() + bias_N.double(), activation)
    error_MN = (y_MN.double() - exact_MN).abs()
    # A tensor core cuts 32 products and their sum so far off 13 bits below the largest. Where one is the largest by
    # far, the others' errors add up: to 5.5 units of the magnitudes' sum at most when that is done in float64 with such
    # weights (96 to 4096 columns), and to 1.9e-4 of the norm. y is rounded once more.
    eps = 2.0 ** (-8 if dtype == torch.bfloat16 else -11)
    bound_MN = 8 * 2.0**-13 * (rows_MK.abs() @ w_NK.double().abs().t()) + eps * exact_MN.abs() + 1e-30
    ratio = (error_MN / bound_MN).max().item()
    assert ratio <= 1, f"error {ratio} times the bound"
    rounding = (exact_MN.to(dtype).double() - exact_MN).norm()
    over = (error_MN.norm() / (rounding**2 + (2.5e-4 * exact_MN.norm()) ** 2).sqrt()).item()
    assert over <= 1.1, f"the error's norm is {over} times that of rounding the result"
    assert all(torch.equal(y_MN, launch()) for _ in range(REPEATS)), "launches that overlap do not repeat"


def check_w4a8_launches() -> None:
    """Shapes one after another share counters (kernels/runtime/counters.py): in a stream, in others at the same time,
    in graphs of one pool."""
    shapes = [(1024, 4096, 4096), (300, 1008, 96), (2500, 784, 656), (1, 48, 544)]
    inputs = [torch.randn(m, k, device="cuda").bfloat16() for m, _, k in shapes]

    def run(at: int) -> torch.Tensor:
        _, n, k = shapes[at]
        _, tiled, top = w4a8_weight(n, k)
        return w4a8.run_w4a8(w4a8.of_width(256), inputs[at], (*tiled, top), None, "none", n, k)

    wanted = [run(at) for at in range(len(shapes))]
    order = [0, 1, 2, 2, 0, 3, 1, 0, 0] * 3
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outputs = [(at, run(at)) for at in order]
    for at in order:
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append((at, run(at)))
    torch.cuda.synchronize()
    assert all(torch.equal(y_MN, wanted[at]) for at, y_MN in outputs), "launches in a row, or at the same time"
    graphs, kept = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph, part in zip(graphs, (order[:8], order[:5]), strict=True):
        with torch.cuda.graph(graph, pool=graphs[0].pool() if kept else None):
            kept.append([(at, run(at)) for at in part])
    for _ in range(5):
        for graph, outputs in zip(graphs, kept, strict=True):
            for _, y_MN in outputs:
                y_MN.fill_(torch.nan)
            graph.replay()
            assert all(torch.equal(y_MN, wanted[at]) for at, y_MN in outputs), "a graph's replay"


def main() -> None:
    torch.manual_seed(0)
    print("compiling", flush=True)
    compile_all()
    for (plan, shapes), dtype in itertools.product((*MMA, *WGMMA), (torch.bfloat16, torch.float16)):
        for m, n, k in shapes[:: 1 if dtype == torch.bfloat16 else 2]:
            print(f"{m}x{n}x{k} {dtype} {plan}", flush=True)
            check(plan, m, n, k, dtype)
    for (m, n, k), dtype in itertools.product(
        ((1000, 4096, 4096), (5, 48, 544), (300, 1008, 96)), (torch.bfloat16, torch.float16)
    ):
        print(f"w4a8 {m}x{n}x{k} {dtype}", flush=True)
        check_w4a8(m, n, k, dtype)
    for (width, dtype), (m, n, k) in itertools.product(
        W4A8, ((1, 48, 544), (300, 1008, 96), (1024, 4096, 4096), (2500, 784, 656))
    ):
        activation = "silu" if m == 300 else "none"
        print(f"w4a8 in one kernel, tiles of {width}: {m}x{n}x{k} {dtype} {activation}", flush=True)
        check_w4a8_product(width, m, n, k, dtype, activation)
    print("w4a8: streams and graphs", flush=True)
    check_w4a8_launches()
    print("all paths are right")


if __name__ == "__main__":
    main()
