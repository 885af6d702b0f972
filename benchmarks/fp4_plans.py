"""Every plausible plan of the fused FP4 kernels for a shape against cuBLAS bf16: where the rules of kernels/fp4_cuda.py come from.

``python benchmarks/fp4_plans.py --cells 16x4096x4096,64x4096x4096 --csv plans.csv`` on a Hopper GPU. A cell is M x N x K. Plans are
compiled in parallel, checked against float64 (a wrong or unrepeatable one is not timed), then timed as in bench_fp4.py: CUDA graphs of
24 layers, all systems in turns. ``--list`` counts the plans of each cell and needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_fp4 import LAYERS, Tiled, layers_of, run_plan
from graph_timing import alternating_us

from vblackwell.kernels import fp4_cuda, nvrtc
from vblackwell.kernels.fp4_cuda import MmaPlan, WgmmaPlan

Plan = MmaPlan | WgmmaPlan
Cell = tuple[int, int, int]
OPEN = "4x14336x4096,4x4096x14336,{16},{64},128x4096x4096,128x6144x4096,128x4096x14336,128x28672x8192,256x6144x4096,256x4096x4096"
SHAPES = "4096x4096,6144x4096,14336x4096,4096x14336,8192x8192,28672x8192"
SHARED, REGISTERS = 227 * 1024, 65536


def open_cells() -> list[Cell]:
    """The cells whose floor is not reached yet, and their neighbours."""
    text = OPEN.replace("{16}", ",".join(f"16x{shape}" for shape in SHAPES.split(",")))
    return parse_cells(text.replace("{64}", "64x4096x4096,64x6144x4096,64x4096x14336,64x8192x8192"))


def parse_cells(text: str) -> list[Cell]:
    sizes = [tuple(int(size) for size in word.split("x")) for word in text.split(",")]
    return [(size[0], size[1], size[2]) for size in sizes]


def _fills(blocks: int, per_processor: int) -> bool:
    """Whether the grid is one wave that keeps most multiprocessors busy, or so many waves that the last one matters little."""
    slots = 132 * per_processor
    waves = -(-blocks // slots)
    return blocks / (waves * slots) >= 0.66


def mma_plans(m: int, n: int, k: int) -> Iterator[MmaPlan]:
    tokens = 1
    while tokens < min(m, 16):
        tokens *= 2
    shapes = [(r, w // r) for w, r in itertools.product((8, 12, 15, 16), (1, 2, 3, 4, 5, 6, 8)) if w % r == 0]
    for (rows, ways), splits, (chunk, stages), prefetch in itertools.product(
        shapes, (1, 2, 4), ((0, 2), (8, 4), (16, 3), (16, 8)), (4, 6)
    ):
        warps = rows * ways
        blocks, most = -(-n // (32 * rows)) * splits, 2 if warps <= 8 else 1
        if not _fills(blocks, most) or (splits == 4 and blocks > 120 * most and blocks <= 132 * most):
            continue  # not all multiprocessors can be had for clusters of four
        if chunk:
            chunk = -(-chunk // ways) * ways
        if chunk * stages > max(24, 1.2 * k / 64 / splits) or (prefetch == 6 and chunk == 0):
            continue
        plan = MmaPlan(tokens, rows, ways, splits, prefetch, most, chunk=chunk, x_stages=stages)
        if plan.shared_bytes(k) <= SHARED // most - 1024:
            yield plan


def wgmma_plans(m: int, n: int, k: int) -> Iterator[WgmmaPlan]:
    for tokens, groups, k_groups, splits, image, most in itertools.product(
        (16, 32, 64, 128, 256), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4), (False, True), (1, 2)
    ):
        columns, consumers = -(-m // tokens), groups * k_groups
        if (
            tokens > max(m, 16)
            or tokens < min(m, 32)
            or columns > 2
            or consumers > 4
            or (tokens == 256 and image is False)
        ):
            continue
        blocks = -(-n // (64 * groups)) * splits * columns
        if (
            not _fills(blocks, most)
            or (most == 2 and blocks <= 132)
            or (splits == 4 and 120 * most < blocks <= 132 * most)
        ):
            continue
        plan = WgmmaPlan(tokens, groups, splits, 4, 4, most, image, k_groups)
        needed = tokens // 2 + 32 + 24  # sums, fragments, addresses
        if plan.registers < needed or plan.k_groups >= plan.stages + 1:
            continue
        for stages, prefetch in ((6, 4), (8, 6), (4, 4)):
            variant = replace(plan, stages=stages, prefetch=prefetch)
            if variant.k_groups < stages and variant.shared_bytes() <= SHARED // most - 1024:
                yield variant
                break


def plans(m: int, n: int, k: int) -> list[Plan]:
    found: list[Plan] = list(mma_plans(m, n, k)) if m <= 16 else []
    if m >= 16:
        found += wgmma_plans(m, n, k)
    today: list[Plan] = [fp4_cuda.plan_mma(m, n, k, True)] if m <= 16 else []
    return list(dict.fromkeys([*today, fp4_cuda.plan_wgmma(m, n, k), *found]))


def compile_all(wanted: list[Plan]) -> None:
    def one(plan: Plan) -> None:
        files = fp4_cuda.MMA_FILES if isinstance(plan, MmaPlan) else fp4_cuda.WGMMA_FILES
        nvrtc.cached_cubin(files, plan.macros(False), "sm_90a")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, dict.fromkeys(wanted)))


def good(plan: Plan, x: torch.Tensor, tiled: Tiled, n: int, exact: torch.Tensor, theirs: float) -> bool:
    """Whether rounded outputs repeat and are as near to ``exact``, 1.1 times, as cuBLAS's, which err by ``theirs``."""
    first, second = (run_plan(plan, x, tiled, n) for _ in range(2))
    return torch.equal(first, second) and float((first.double() - exact).norm()) <= 1.1 * theirs


def sweep(cells: list[Cell], rounds: int, seconds: float, path: Path | None) -> None:
    began, rows = time.monotonic(), []
    compile_all([plan for cell in cells for plan in plans(*cell)])
    print(f"compiled in {time.monotonic() - began:.0f} s")
    cells = sorted(cells, key=lambda cell: cell[1] * cell[2])
    for (n, k), group in itertools.groupby(cells, key=lambda cell: cell[1:]):
        packed, dense = layers_of(n, k)
        w = fp4_cuda.run_dequantize(*packed[0], n, k, torch.bfloat16)
        for m, _, _ in group:
            if time.monotonic() - began > seconds:
                print(f"{m}x{n}x{k}: not run, {seconds:g} s are over")
                continue
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            exact = x.double() @ w.double().t()
            theirs = float((torch.nn.functional.linear(x, w).double() - exact).norm())
            right, wrong = [], []
            for plan in plans(m, n, k):
                try:
                    (right if good(plan, x, packed[0], n, exact, theirs) else wrong).append(plan)
                except nvrtc.KernelError as error:
                    print(f"REFUSED {plan}: {error}")
            for plan in wrong:
                print("WRONG", m, n, k, plan)
            systems = [[functools.partial(torch.nn.functional.linear, x, d) for d in dense]]
            systems += [[functools.partial(run_plan, plan, x, p, n) for p in packed] for plan in right]
            cublas, *ours = alternating_us(systems, rounds)
            ranked = sorted(zip(ours, right, strict=True), key=lambda pair: pair[0])
            print(f"{m}x{n}x{k}: cuBLAS {cublas:.2f} us; {len(right)} plans")
            for us, plan in ranked:
                rows.append([m, n, k, plan, round(us, 2), round(cublas, 2)])
            for us, plan in ranked[:4]:
                print(f"   {cublas / us:.3f} {us:.2f} {brief(plan)}")
            print(f"   {cublas / ours[0]:.3f} {ours[0]:.2f} {brief(right[0])} (the rule's)")
            if path:
                write(path, rows)
        del packed, dense, w
        torch.cuda.empty_cache()


def brief(plan: Plan) -> str:
    if isinstance(plan, MmaPlan):
        return (
            f"mma t{plan.tokens} {plan.row_warps}x{plan.k_warps} s{plan.splits} pf{plan.prefetch} mb{plan.min_blocks}"
            f" chunk {plan.chunk}x{plan.x_stages}"
        )
    return (
        f"wgmma t{plan.tokens} g{plan.groups} kg{plan.k_groups} s{plan.splits} st{plan.stages} pf{plan.prefetch}"
        f" mb{plan.min_blocks} {'image' if plan.image else 'direct'}"
    )


def write(path: Path, rows: list[list[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["m", "n", "k", "plan", "us", "cublas"])
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=parse_cells, default=open_cells(), help="MxNxK,MxNxK,..; default: open floors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=75.0, help="start no further cell after so many")
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        for cell in args.cells:
            print(cell, len(plans(*cell)))
        print(len(dict.fromkeys(plan for cell in args.cells for plan in plans(*cell))), "kernels,", LAYERS, "layers")
        return
    sweep(args.cells, args.rounds, args.seconds, args.csv)


if __name__ == "__main__":
    main()
