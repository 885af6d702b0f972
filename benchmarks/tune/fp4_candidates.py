"""Every plausible plan of the fused FP4 kernels for a shape: what fp4_plans.py times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from vblackwell.kernels.fp4 import mma_plan, wgmma_plan
from vblackwell.kernels.fp4.mma_plan import MULTIPROCESSORS, MmaPlan
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan, goes_round

Plan = MmaPlan | WgmmaPlan
SHARED, REGISTERS = 227 * 1024, 65536
WARPS = (8, 10, 12, 14, 15, 16, 28)  # of a block of the mma kernel


def _fills(blocks: int, per_processor: int) -> bool:
    """Whether the grid is one wave that keeps most multiprocessors busy, or so many waves that the last one matters
    little.
    """
    slots = 132 * per_processor
    waves = -(-blocks // slots)
    return blocks / (waves * slots) >= 0.72


def mma_plans(m: int, n: int, k: int) -> Iterator[MmaPlan]:
    tokens = 1
    while tokens < min(m, 16):
        tokens *= 2
    room = 72 if tokens < 16 else 88  # registers without which the compiler spills
    shapes = [
        (row_warps, k_warps)
        for row_warps, k_warps in itertools.product(range(1, 17), repeat=2)
        if row_warps * k_warps in WARPS
    ]
    works = (_work(row_warps, splits, n, k) for (row_warps, _), splits in itertools.product(shapes, (1, 2)))
    least = min(filter(None, works), default=0)
    for (row_warps, k_warps), splits in itertools.product(shapes, (1, 2)):
        work, turn = _work(row_warps, splits, n, k), 4 * k_warps
        if not work or work > 1.2 * least or row_warps * k_warps * 32 * room > REGISTERS or k_warps * splits > k // 64:
            continue
        whole = -(-(-(-k // 64) // splits) // turn) * turn
        for chunk, stages in ((whole, 1), (turn, 3), (2 * turn, 2), (2 * turn, 3)):
            plan = MmaPlan(tokens, row_warps, k_warps, splits, 4, chunk=chunk, x_stages=stages)
            if (stages == 1 or chunk < whole) and mma_plan.fits_with_norm(plan, k):
                yield plan


def _work(row_warps: int, splits: int, n: int, k: int) -> int:
    """Windows of a block, its bands one after the other; 0 where blocks are more than multiprocessors."""
    return row_warps * -(-k // 64 // splits) if -(-n // (32 * row_warps)) * splits <= MULTIPROCESSORS else 0


def wgmma_plans(m: int, n: int, k: int) -> Iterator[WgmmaPlan]:
    for tokens, groups, k_groups, splits, most in itertools.product(
        (16, 32, 64, 128, 256), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2), (1, 2)
    ):
        columns, consumers = -(-m // tokens), groups * k_groups
        if tokens > max(m, 16) or tokens < min(m, 64) or columns > 2 or consumers > 4:
            continue
        blocks = -(-n // (64 * groups)) * splits * columns
        if not (_fills(blocks, 1) or _fills(blocks, most)):
            continue
        plan = WgmmaPlan(tokens, groups, splits, 12, 4, most, k_groups)
        for stages in (8, 6, 5, 4) if k_groups == 4 else (6, 5, 4):
            if goes_round(stages, k_groups) and replace(plan, stages=stages).fits():
                plan = replace(plan, stages=stages)
                yield plan
                pairs = replace(plan, stages=max(8, 4 * k_groups), windows_per_step=2)
                yield from [pairs] if tokens <= 128 and pairs.fits() else []
                break


def plans(m: int, n: int, k: int) -> list[Plan]:
    """What the rules choose today, then what could be."""
    found: list[Plan] = list(mma_plans(m, n, k)) if m <= 16 else []
    if 16 <= m <= 256:
        found += sorted(wgmma_plans(m, n, k), key=lambda plan: wgmma_plan.predicted_us(plan, m, n, k))
    if m > 256:
        found += [WgmmaPlan(256, 2, 1, 4), WgmmaPlan(256, 1, 1, 6, k_groups=2), WgmmaPlan(128, 3, 1, 6)]
    today: list[Plan] = [mma_plan.plan_mma(m, n, k, True)] if m <= 16 else []
    return list(dict.fromkeys([*today, wgmma_plan.plan_wgmma(m, n, k), *found]))
