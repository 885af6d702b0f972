"""Every plausible plan of the fused FP4 kernels for a shape: what fp4_plans.py times."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from vblackwell.kernels.fp4 import mma_plan, wgmma_plan
from vblackwell.kernels.fp4.mma_plan import Gpu, MmaPlan
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan

Plan = MmaPlan | WgmmaPlan
SHARED, REGISTERS = 227 * 1024, 65536
MOST = 14  # wgmma plans of a cell
LOW = WgmmaPlan(256, 1, 1, 6, k_groups=2)
WARPS = (8, 10, 12, 14, 15, 16, 28)  # of a block of the mma kernel


def mma_plans(m: int, n: int, k: int, processors: int) -> Iterator[MmaPlan]:
    tokens = 1
    while tokens < min(m, 16):
        tokens *= 2
    room = 72 if tokens < 16 else 88  # registers without which the compiler spills
    shapes = [
        (row_warps, k_warps)
        for row_warps, k_warps in itertools.product(range(1, 17), repeat=2)
        if row_warps * k_warps in WARPS
    ]
    works = (_work(row_warps, splits, n, k, processors) for (row_warps, _), splits in itertools.product(shapes, (1, 2)))
    least = min(filter(None, works), default=0)
    for (row_warps, k_warps), splits in itertools.product(shapes, (1, 2)):
        work, turn = _work(row_warps, splits, n, k, processors), 4 * k_warps
        if not work or work > 1.2 * least or row_warps * k_warps * 32 * room > REGISTERS or k_warps * splits > k // 64:
            continue
        whole = -(-(-(-k // 64) // splits) // turn) * turn
        for chunk, stages in ((whole, 1), (turn, 3), (2 * turn, 2), (2 * turn, 3)):
            plan = MmaPlan(tokens, row_warps, k_warps, splits, 4, chunk=chunk, x_stages=stages)
            if (stages == 1 or chunk < whole) and mma_plan.fits_with_norm(plan, k):
                yield plan


def _work(row_warps: int, splits: int, n: int, k: int, processors: int) -> int:
    """Windows of a block, its bands one after the other; 0 where blocks are more than multiprocessors."""
    return row_warps * -(-k // 64 // splits) if -(-n // (32 * row_warps)) * splits <= processors else 0


def wgmma_plans(m: int, n: int, k: int, gpu: Gpu) -> list[WgmmaPlan]:
    """Those that the model expects to be fastest, no more than four of a number of tokens; with a tail the fastest two
    of each number."""
    cost = functools.partial(wgmma_plan.predicted_us, m=m, n=n, k=k, gpu=gpu)
    found, by_tokens = list[WgmmaPlan](), defaultdict[int, list[WgmmaPlan]](list)
    for plan in sorted(wgmma_plan.candidates(m, k), key=cost):
        by_tokens[plan.tokens].append(plan)
    for several in by_tokens.values():
        found += several[:4]
        tall = [plan for plan in several if plan.blocks[1:] == (2, 1, 1, 1, 1)] if m > 256 else []
        found += [tailed for plan in tall if (tailed := wgmma_plan.with_tail(plan, m, n, k, gpu)).tail]
        found += [replace(plan, tail=LOW) for plan in tall if plan.tokens == 256 and n > 128]
    return sorted(found, key=cost)[:MOST]


def plans(m: int, n: int, k: int, gpu: Gpu) -> list[Plan]:
    """What the rules choose today, then what could be."""
    found: list[Plan] = list(mma_plans(m, n, k, gpu.processors)) if m <= 16 else []
    if m >= 16:
        found += wgmma_plans(m, n, k, gpu)
    today: list[Plan] = [mma_plan.plan_mma(m, n, k, gpu)] if m <= 16 else [wgmma_plan.plan_wgmma(m, n, k, gpu)]
    return list(dict.fromkeys([*today, *found]))
