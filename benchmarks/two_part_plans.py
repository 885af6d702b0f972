"""Every sensible plan of the two-part kernel for a shape, timed in turns: what ``bench_two_part.py --linear --tune``
prints.

Plans are compiled several at a time before the first is timed; then each is a CUDA graph over all layers, replayed in
turns with the others, and the fastest again with cuBLAS bf16. Nothing is stored: the rule is `two_part.plan_two_part`,
which may depend on the shape alone.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from graph_timing import graph_of, turns_us
from torch import Tensor
from torch.nn import functional

from vblackwell.kernels.fp4 import two_part
from vblackwell.kernels.fp4.mma_plan import ceil_div
from vblackwell.kernels.fp4.two_part import TwoPartPlan
from vblackwell.kernels.runtime import nvrtc

MULTIPROCESSORS = 132
BEST = 4  # plans that are timed again beside cuBLAS
# By warps of a multiprocessor: windows that a warp has in flight, and (windows a chunk of x, stages).
PREFETCH = {8: (3, 4, 5), 12: (2, 3, 4), 16: (2, 3, 4)}
CHUNKS = {8: ((4, 4), (8, 2), (8, 3)), 12: ((8, 2), (16, 3), (24, 3)), 16: ((8, 3), (16, 2), (16, 3), (16, 4))}
FEW_ROWS_CHUNKS = ((0, 2), (8, 3))  # 0: no bulk copies


def plans_of(m: int, n: int, k: int) -> list[TwoPartPlan]:
    """The plan of the rule first, and with sums fetched instead of sent; then grids of one wave, of one or of two
    blocks a multiprocessor, with 8 to 16 warps on each.

    ``min_blocks`` of 2 with one block a multiprocessor leaves half of its memory and registers to the next layer's
    block, whose first weights then come while this one ends.
    """
    tokens = 1
    while tokens < m:
        tokens *= 2
    rule = two_part.plan_two_part(m, n, k, True)
    found = [rule, replace(rule, push=False)]
    for row_warps, splits, each, warps in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2), PREFETCH):
        blocks, k_warps = ceil_div(n, 32 * row_warps) * splits, warps // (row_warps * each)
        if not 0.8 * MULTIPROCESSORS * each < blocks <= MULTIPROCESSORS * each or not k_warps:
            continue
        if (splits == 4 and tokens < 16) or (warps == 8 and each == 1):  # x is little; too few warps everywhere
            continue
        chunks = FEW_ROWS_CHUNKS if tokens <= 2 else CHUNKS[warps]
        for min_blocks, prefetch, (chunk, stages) in itertools.product({each, 2}, PREFETCH[warps], chunks):
            chunk = ceil_div(chunk, k_warps) * k_warps
            plan = TwoPartPlan(tokens, row_warps, k_warps, splits, prefetch, 80 * 1024, min_blocks, chunk, stages)
            if plan.fits(k) and chunk * (stages - 1) < windows_of(plan, k):
                found.append(plan)
    return list(dict.fromkeys(found))


def windows_of(plan: TwoPartPlan, k: int) -> int:
    """Of a block's share of K."""
    return ceil_div(ceil_div(k, 64), plan.splits)


def line_of(plan: TwoPartPlan) -> str:
    return (
        f"rows {plan.row_warps} k {plan.k_warps} splits {plan.splits} prefetch {plan.prefetch} "
        f"chunk {plan.chunk}x{plan.x_stages if plan.chunk else 1} blocks {plan.min_blocks}"
        f"{' fetched' if plan.splits > 1 and not plan.push else ''}"
    )


def run_plan(plan: TwoPartPlan, x_MK: Tensor, parts: tuple[Tensor, ...], n: int) -> Tensor:
    return two_part.run_mma(plan, x_MK, parts, None, "none", n)  # type: ignore[arg-type]


def tune(
    counts: Sequence[int], parts: list[tuple[Tensor, ...]], dense: list[Tensor], n: int, k: int, show: int = 6
) -> None:
    """Print the fastest plans for each number of rows, beside cuBLAS bf16 in the same turns."""
    device = torch.device("cuda", torch.cuda.current_device())
    plans = {m: plans_of(m, n, k) for m in counts}
    macros = {tuple(plan.macros().items()) for each in plans.values() for plan in each}
    began = time.perf_counter()
    with ThreadPoolExecutor(15) as pool:
        entry = (two_part.FILES, "two_part_mma")
        list(pool.map(lambda each: nvrtc.kernel(*entry, dict(each), device), macros))
    print(f"{len(macros)} plans compiled in {time.perf_counter() - began:.1f} s", flush=True)
    for m in counts:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        exact = two_part.run_mma(plans[m][0], x, parts[0], None, "none", n, torch.float32)  # type: ignore[arg-type]
        graphs = []
        for plan in list(plans[m]):
            try:
                graphs.append(graph_of([functools.partial(run_plan, plan, x, each, n) for each in parts]))
            except nvrtc.KernelError as error:
                plans[m].remove(plan)
                print(f"  left out: {line_of(plan)}: {error}", flush=True)
        first = [us / len(parts) for us in turns_us(graphs, 3)]
        order = sorted(range(len(first)), key=first.__getitem__)
        again = list(dict.fromkeys([0, *order[:BEST]]))  # the rule's own is plan 0
        bf16 = graph_of([functools.partial(functional.linear, x, w) for w in dense])
        *times, dense_us = (us / len(parts) for us in turns_us([*(graphs[i] for i in again), bf16], 9))
        print(f"M={m}: {len(first)} plans; cuBLAS {dense_us:.2f} us")
        for index, us in sorted(zip(again, times, strict=True), key=lambda pair: pair[1]):
            error = (run_plan(plans[m][index], x, parts[0], n).float() - exact).norm() / exact.norm()
            note = " (the rule's)" if index == 0 else ""
            print(
                f"  {us:6.2f} us {dense_us / us:.3f} x, off by {float(error):.1e}: {line_of(plans[m][index])}{note}",
                flush=True,
            )
        others = [index for index in order if index not in again][:show]
        print("  then " + "; ".join(f"{first[index]:.2f} {line_of(plans[m][index])}" for index in others), flush=True)
