"""Blocks that were timed fastest on an H200 for shapes of common models, where `fp4_plan`'s rules choose others; 2 and 8 rows are
interpolated.

Keys are (rows of x rounded up to a power of two, N, K). Like the rules they depend on the shape alone, so the order of additions does, too.
From benchmarks/fp4_plans.py, 2026-11-22 and 23 (benchmarks/results/fp4-h200-plans-5.csv to -7.csv); without them the rules are at most 11 %
behind.
"""

from __future__ import annotations

# row warps, K warps, splits of an `MmaPlan` that takes x in bulk copies
MMA: dict[tuple[int, int, int], tuple[int, int, int]] = {
    (1, 28672, 8192): (7, 4, 1),
    (2, 28672, 8192): (7, 4, 1),
    (4, 28672, 8192): (7, 4, 1),
    (8, 28672, 8192): (7, 4, 1),
    (16, 4096, 14336): (2, 6, 2),
    (16, 28672, 8192): (16, 1, 2),
}
# tokens, groups, K groups, splits, blocks a multiprocessor, windows that helpers do, windows together, of a `WgmmaPlan`
WGMMA: dict[tuple[int, int, int], tuple[int, int, int, int, int, int, int]] = {
    (32, 4096, 4096): (32, 1, 2, 2, 2, 0, 2),
    (32, 6144, 4096): (32, 2, 2, 2, 1, 0, 2),
    (32, 14336, 4096): (32, 2, 2, 1, 1, 0, 2),
    (32, 4096, 14336): (32, 1, 2, 2, 2, 0, 2),
    (32, 8192, 8192): (32, 2, 2, 2, 1, 0, 2),
    (32, 28672, 8192): (32, 4, 1, 1, 1, 0, 2),
    (64, 4096, 4096): (64, 1, 2, 2, 2, 0, 2),
    (64, 6144, 4096): (64, 1, 3, 1, 1, 12, 1),
    (64, 4096, 14336): (64, 1, 2, 2, 2, 0, 2),
    (64, 8192, 8192): (64, 2, 2, 2, 1, 0, 1),
    (128, 4096, 4096): (128, 1, 3, 2, 1, 0, 1),
    (128, 6144, 4096): (128, 1, 3, 1, 1, 13, 1),
    (128, 14336, 4096): (128, 2, 2, 1, 1, 0, 1),
    (128, 4096, 14336): (128, 1, 3, 2, 1, 0, 1),
    (128, 8192, 8192): (128, 2, 2, 2, 1, 0, 1),
    (128, 28672, 8192): (128, 4, 1, 1, 1, 0, 1),
    (256, 4096, 4096): (256, 1, 1, 2, 1, 0, 1),
    (256, 6144, 4096): (128, 3, 1, 2, 1, 0, 1),
    (256, 4096, 14336): (256, 1, 1, 2, 1, 0, 1),
    (256, 8192, 8192): (256, 1, 2, 1, 1, 0, 1),
}
# (rows rounded up to blocks of 256, N, K) where `fp4_wgmma` ends before dequantising once and cuBLAS, though the rule of many rows says
# otherwise: 2805 us for 2916 (docs/log-fp4.md, "what a trace of w4a8 says")
FUSED = {(4096, 28672, 8192)}
