"""Products that bench_fp4.py times, of a list or drawn from a seed, and the summary of their ratios."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.draw import Goal, odd_or_round_size, size_between, worst_and_median
from benchmarks.lib.kernels.fp4_layers import LAYERS, Source, gpu, sources
from benchmarks.lib.kernels.fp4_peers import PEERS
from vblackwell.kernels.fp4 import mma_plan, wgmma_plan

SIZES, ODD = (512, 32768), 0.25  # of N and K
STREAMED_BYTES = 128 << 20  # of packed weights that a replay reads: 2.5 times the L2 of a Hopper GPU
# Rows of x, and floor and aim of the worst and the median ratio to cuBLAS bf16.
GOALS: dict[tuple[int, int], tuple[Goal, Goal]] = {
    (1, 16): ((1.7, 2.2), (2.4, 2.8)),
    (17, 64): ((1.1, 1.3), (None, None)),
    (65, 300): ((0.85, 0.95), (None, None)),
    (301, 8192): ((0.88, 0.95), (None, None)),
}
PEERS_GOAL: Goal = (1.0, 1.3)


@dataclass(frozen=True)
class Product:
    """``m`` rows of x by weights (n, k), as many ``layers`` of them as a replay goes through."""

    n: int
    k: int
    m: int
    layers: int = LAYERS

    @property
    def weights(self) -> tuple[int, int, int]:
        """What two products share that need the same weights."""
        return self.n, self.k, self.layers


def draws(count: int, seed: int) -> list[Product]:
    """``count`` products; the ranges of rows in `GOALS` take turns. Peers and scratch included they take 20 GB at most:
    the largest weight has 2^30 elements, of which 2 layers need 2 bytes an element, and of 4 bits 4 times 0.5625."""
    draw, found = random.Random(seed), list[Product]()
    ranges = tuple(GOALS)
    for number in range(count):
        m = size_between(draw, *ranges[number % len(ranges)])
        n, k = (odd_or_round_size(draw, *SIZES, ODD) for _ in range(2))
        packed_bytes = n * k * 9 // 16
        found.append(Product(n, k, m, max(2, -(-STREAMED_BYTES // packed_bytes))))
    return found


def linear_sources(product: Product) -> list[Source]:
    """What fp4_linear runs on Hopper, to compile ahead: nothing where it dequantises, nor on other GPUs."""
    m, n, _, here = problem = product.m, product.n, product.k, gpu()
    if here.capability != (9, 0):
        return []
    if mma_plan.mma_is_faster(*problem):
        return sources(mma_plan.plan_mma(*problem), *problem[:3])
    return sources(wgmma_plan.plan_wgmma(*problem), *problem[:3]) if wgmma_plan.wgmma_beats_dequantize(*problem) else []


def case_line(product: Product, rows: Iterable[dict[str, Any]]) -> str:
    """ms of every system, and the ratio to what it is compared with."""
    cells = []
    for row in rows:
        ratio = f": {row['ratio']:.3f}" if row.get("ratio") else ""
        cells.append(f"{row['system']} " + (f"{row['us'] / 1000:.4f} ms{ratio}" if "us" in row else row["note"]))
    return f"{product.m} rows, {product.n} x {product.k}, {product.layers} layers; {'; '.join(cells)}"


def times(rows: Iterable[dict[str, object]]) -> dict[str, float]:
    """us by system."""
    return {str(row["system"]): float(str(row["us"])) for row in rows if "us" in row}


def fastest_peer(us: dict[str, float]) -> str | None:
    return min(us.keys() & {peer.name for peer in PEERS}, key=us.__getitem__, default=None)


def summary(rows: Sequence[dict[str, object]]) -> list[str]:
    """Worst and median ratio to cuBLAS by rows of x, and the worst to the fastest peer."""
    timed = [row for row in rows if "us" in row]
    cases = dict.fromkeys((int(str(row["m"])), row["n"], row["k"]) for row in timed)
    found = {case: times(row for row in timed if (row["m"], row["n"], row["k"]) == case) for case in cases}
    lines = list[str]()
    for (low, high), goals in GOALS.items():
        ratios = [us["cublas bf16"] / us["fp4_linear nvfp4"] for (m, *_), us in found.items() if low <= m <= high]
        lines += worst_and_median(f"{low} to {high} rows, graphed, over cuBLAS bf16", ratios, *goals)
    over = [us[best] / us["fp4_linear nvfp4"] for us in found.values() if (best := fastest_peer(us)) is not None]
    return [*lines, *worst_and_median("graphed, over the fastest peer", over, PEERS_GOAL)]
