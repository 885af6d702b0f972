"""FP4 linear against cuBLAS bf16 and 4-bit peers: first that it is right, then how long it takes.

``python benchmarks/bench_fp4.py --check --bench --out results.csv`` on a CUDA GPU. Times are medians of CUDA-graph replays over 24 layers
whose weights exceed the L2 many times, the same count for every system; ratios are to cuBLAS bf16 in the same run.
``--tune`` times plans around the heuristics; ``--peers`` adds the installed 4-bit packages.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton

from vblackwell.kernels import fp4_cuda, layout, nvrtc, reference
from vblackwell.kernels.fp4_cuda import MmaPlan, WgmmaPlan
from vblackwell.numerics.formats import FORMATS

SHAPES = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))
LAYERS = 24
DEVICE = torch.device("cuda")
ROWS: list[dict[str, object]] = []


def random_tiled(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight of random codes and scales, made in the tiled layout."""
    codes_shape, scales_shape = layout.shapes("nvfp4-tiled", n, k)
    codes = torch.randint(0, 256, codes_shape, dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(12 << 3, 18 << 3, scales_shape, dtype=torch.uint8, device=DEVICE)
    return codes, scales, torch.tensor(2.0**-7, device=DEVICE)


def time_us(calls: list[Callable[[], object]], replays: int = 9) -> float:
    """Median time of one call, in us, from replays of a graph of all ``calls``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return sorted(times)[len(times) // 2]


def prebuild(jobs: list[tuple[tuple[str, ...], dict[str, int]]]) -> None:
    """Compile in parallel into the cache."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: nvrtc._cached_cubin(job[0], job[1], "sm_90a"), jobs))


def error_over_bound(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """Largest error over 4 * 2^-24 * sqrt(K) * sum |w||x|; NaN counts as infinite."""
    exact = x.double() @ w.double().t()
    bound = 4 * 2**-24 * x.shape[1] ** 0.5 * (x.double().abs() @ w.double().abs().t()) + 1e-30
    ratio = ((y.double() - exact).abs() / bound).max().item()
    return ratio if ratio == ratio else float("inf")


CHECK_SHAPES = ((40, 136), (200, 1000), (1056, 4096), (512, 14336))
CHECK_ROWS = (1, 3, 4, 8, 13, 16, 33, 64, 100, 256, 300)


def check_plans(m: int, n: int, k: int) -> list[MmaPlan | WgmmaPlan]:
    """Plans whose results are held to the bound."""
    plans: list[MmaPlan | WgmmaPlan] = []
    if m <= 16:
        plans += [fp4_cuda.plan_mma(m, n, k, True), fp4_cuda.plan_mma(m, n, k, False)]
    elif m <= 64:
        plans += [fp4_cuda.plan_mma(m, n, k, False)]
    if m >= 13:
        plans += [WgmmaPlan(64, 4, 2, 6), WgmmaPlan(128, 2, 2, 4), WgmmaPlan(256, 2, 1, 4, image=True), WgmmaPlan(32, 2, 4, 6, 4, 2)]
    return plans


def check(verbose: bool = False) -> None:
    """fp32 outputs of plans on odd and even shapes against float64."""
    torch.manual_seed(0)
    worst: dict[str, float] = {}
    for (n, k), fmt in itertools.product(CHECK_SHAPES, ("nvfp4", "mxfp4")):
        form = FORMATS[fmt]
        codes = torch.randint(0, 256, form.codes_shape(n, k), dtype=torch.uint8, device=DEVICE)
        low, high = (0, 127) if fmt == "nvfp4" else (115, 132)
        scales = torch.randint(low, high, form.scales_shape(n, k), dtype=torch.uint8, device=DEVICE)
        scale = torch.tensor(0.37 if fmt == "nvfp4" else 1.0, device=DEVICE)
        w = reference.dequantize(codes, scales, scale, fmt, n, k)
        tiled = layout.to_tiled(codes, scales, scale, fmt, n, k)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            same = torch.equal(fp4_cuda.run_dequantize(*tiled, n, k, dtype), w.to(dtype))
            worst[f"dequantize {dtype}"] = max(worst.get(f"dequantize {dtype}", 0), 0.0 if same else float("inf"))
        for m, dtype in itertools.product(CHECK_ROWS, (torch.bfloat16, torch.float16)):
            if fmt == "nvfp4" and dtype == torch.float16:
                continue
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            for plan in check_plans(m, n, k):
                run = fp4_cuda.run_mma if isinstance(plan, MmaPlan) else fp4_cuda.run_wgmma
                if verbose:
                    print(m, n, k, fmt, dtype, plan, flush=True)
                y = run(plan, x, *tiled, None, "none", n, torch.float32)  # type: ignore[arg-type]
                torch.cuda.synchronize()
                again = run(plan, x, *tiled, None, "none", n, torch.float32)  # type: ignore[arg-type]
                ratio = error_over_bound(y, x, w) if torch.equal(y, again) else float("inf")
                if ratio > 1:
                    print("WRONG", plan, n, k, fmt, m, dtype, ratio, "repeat", torch.equal(y, again))
                worst[type(plan).__name__] = max(worst.get(type(plan).__name__, 0), ratio)
    print("check, error over bound:", worst)


def candidates(ms: list[int]) -> list[tuple[int, MmaPlan | WgmmaPlan]]:
    """(rows, plan) around the heuristics."""
    table: list[tuple[int, MmaPlan | WgmmaPlan]] = []
    for m in ms:
        plans: list[MmaPlan | WgmmaPlan] = []
        if m <= 16:
            tokens = 1 << (m - 1).bit_length()
            for rw, k_warps, splits, prefetch in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4), (4, 6)):
                if not 8 <= rw * k_warps <= 16 or (m == 1 and splits > 1) or (m > 1 and rw == 1) or (m == 16 and rw < 4):
                    continue
                blocks = max(1, (24 if m == 1 else 16) // (rw * k_warps))
                plans.append(MmaPlan(tokens, rw, k_warps, splits, prefetch, blocks))
        else:
            for tokens, groups, splits, blocks in itertools.product((32, 64, 128, 256), (1, 2, 4), (1, 2, 4), (1, 2)):
                if tokens > m or tokens < min(m, 256) / 2 or tokens * groups > 512 or (blocks == 2 and tokens * groups > 128):
                    continue
                if (m > 256 and splits > 1) or (m >= 256 and tokens < 128) or (groups == 1 and blocks == 1):
                    continue
                for image in (False, True) if tokens >= 128 else (False,):
                    plan = WgmmaPlan(tokens, groups, splits, 6 if tokens < 256 else 5, 4, blocks, image)
                    if plan.shared_bytes() * blocks < 226 * 1024:
                        plans.append(plan)
        table += [(m, plan) for plan in dict.fromkeys(plans)]
    return table


def prebuild_candidates(ms: list[int]) -> None:
    jobs = [(fp4_cuda._DEQUANTIZE_FILES, {"FP16": 0, "OUT": out}) for out in range(4)]
    wanted = [(plan, False, False) for _, plan in candidates(ms)]
    for (n, k), m, fp16 in itertools.product(CHECK_SHAPES, CHECK_ROWS, (False, True)):
        wanted += [(plan, fp16, True) for plan in check_plans(m, n, k)]
    for plan, fp16, out32 in dict.fromkeys(wanted):
        files = fp4_cuda._MMA_FILES if isinstance(plan, MmaPlan) else fp4_cuda._WGMMA_FILES
        jobs.append((files, plan.macros(fp16, out32)))
    print(len(jobs), "kernels")
    prebuild(jobs)


def explore(ms: list[int], shapes: list[tuple[int, int]]) -> None:
    """Times of many plans; prints the best few for each shape."""
    prebuild_candidates(ms)
    table = candidates(ms)
    for n, k in shapes:
        layers = [random_tiled(n, k) for _ in range(LAYERS)]
        dense = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(LAYERS)]
        for m in ms:
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            base = time_us([lambda w=w: x @ w.t() for w in dense])
            results = []
            for plan in [plan for rows, plan in table if rows == m]:
                run = fp4_cuda.run_mma if isinstance(plan, MmaPlan) else fp4_cuda.run_wgmma
                if isinstance(plan, WgmmaPlan) and plan.splits > -(-k // 64):
                    continue
                bytes_ = plan.shared_bytes(k) if isinstance(plan, MmaPlan) else plan.shared_bytes()
                if bytes_ > 227 * 1024:
                    continue
                try:
                    us = time_us([lambda w=w, p=plan, r=run: r(p, x, *w, None, "none", n) for w in layers], 6)  # type: ignore[arg-type]
                except nvrtc.KernelError as error:
                    print("refused", plan, error)
                    continue
                results.append((us, plan))
                ROWS.append({"m": m, "n": n, "k": k, "plan": str(plan), "us": round(us, 2), "cublas": round(base, 2)})
            results.sort(key=lambda r: r[0])
            chosen = ""
            print(f"{m}x{n}x{k} cublas {base:.1f}")
            for us, plan in results[:4]:
                print(f"   {us:7.2f} {base / us:5.2f}  {plan}")
            best = results[0][1]
            run = fp4_cuda.run_mma if isinstance(best, MmaPlan) else fp4_cuda.run_wgmma
            nvrtc._OVERLAP[0].value[0] = 0
            us = time_us([lambda w=w: run(best, x, *w, None, "none", n) for w in layers])  # type: ignore[arg-type]
            nvrtc._OVERLAP[0].value[0] = 1
            print(f"   {us:7.2f} {base / us:5.2f}  the best without overlap")
            for us, plan in results:
                if str(plan) == chosen:
                    print(f"   {us:7.2f} {base / us:5.2f}  heuristic {plan}")
        for dtype_layers in ([lambda w=w: fp4_cuda.run_dequantize(*w, n, k, torch.bfloat16) for w in layers],):
            us = time_us(dtype_layers)
            print(f"dequantize {n}x{k}: {us:.1f} us, {n * k * 2.5625 / us / 1e6:.2f} TB/s")
        del layers, dense


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--prebuild", action="store_true")
    parser.add_argument("--explore", type=int, nargs="*", default=[])
    parser.add_argument("--shapes", type=int, nargs="*", default=[2, 0, 4])
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.prebuild:
        prebuild_candidates(args.explore)
        return
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    if args.check:
        check(args.verbose)
    if args.explore:
        explore(args.explore, [SHAPES[i] for i in args.shapes])
    if args.out and ROWS:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(ROWS)


if __name__ == "__main__":
    main()
