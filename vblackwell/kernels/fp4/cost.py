"""How long a plan of ``fp4_wgmma`` takes on an H200: the arithmetic by which `fp4_plan.plan_wgmma` chooses.

A block of a plan walks its share of windows (64 columns). For a window a warpgroup issues its decode and waits for its products. Alone
on a multiprocessor it also waits for its own latencies in a row; several take turns. Measured, the issue of one warpgroup adds
whole to the tensor cores' time of the others, so what counts is work a multiprocessor and rounds of blocks, not tensor cores alone.

The terms have reasons, their constants are those of a regression that ranks plans: a product of 64 rows by 64 columns takes the tensor
cores 2 cycles a token, not `_TENSOR`, and 256 rows are predicted 6 to 19 % too short. It is of 329 plans in 18 cells (64 to 256 rows,
benchmarks/results/fp4-h200-plans-5.csv): the plan of least predicted time is on average 1.9 %, at most 11.4 %, slower than the fastest of
its cell; cells where it is 2 % or more behind are in fp4_shapes.py. 17 to 32 rows were timed with the kernels of a day before only. What it
says of a cluster in grids of many rounds is too little, so `many_rows_us` compares the plans for more rows.
"""

from __future__ import annotations

import math

MULTIPROCESSORS = 132  # of an H200, on every GPU: a plan may not depend on where it runs
_CYCLES_A_US = 1755.0
_TENSOR = 0.519  # cycles of products, a token and window of 64 rows
_ALONE = 1.29  # more of all cycles where one warpgroup has the multiprocessor, half of it with two, ..
_LATENCY = (
    149.0  # cycles between a window's first product and the next one's, beside the products, of a warpgroup alone
)
_ISSUE = 142.0  # cycles of a scheduler to decode a window of 64 rows
_ADDED = 1.13  # of the shorter of products and decode, what the longer does not hide, and what both cost each other
_SUM = 15.1  # cycles a token of a block's epilogue, for each K group
_START_US, _CLUSTER_US = 0.51, 1.74  # a launch and what is in front of it; what two blocks that split K send each other
_L2_BYTES_A_US, _MEMORY_BYTES_A_US = 8.89e6, 4.2e6
# Microseconds a window of a block that has a multiprocessor to itself, by (tokens, groups, K groups): 1024 rows of 6144 and 14336 x 4096.
MANY_ROWS_US = {(256, 2, 1): 0.75, (128, 3, 1): 0.59, (256, 1, 2): 0.405}


def wgmma_us(
    shape: tuple[int, int, int], tokens: int, groups: int, k_groups: int, splits: int, blocks_at_once: int
) -> float:
    """Predicted microseconds of a launch for ``shape`` (M, N, K); the other arguments are those of `fp4_plan.WgmmaPlan`.

    ``blocks_at_once``: blocks that a multiprocessor holds.
    """
    m, n, k = shape
    windows = math.ceil(math.ceil(k / 64) / splits)
    blocks = math.ceil(n / (64 * groups)) * splits * math.ceil(m / tokens)
    rounds, rest = divmod(blocks, MULTIPROCESSORS * blocks_at_once)

    def block_cycles(at_once: int) -> float:
        warpgroups = groups * k_groups * at_once
        tensor = _TENSOR * tokens
        together = warpgroups * (max(tensor, _ISSUE) + _ADDED * min(tensor, _ISSUE))
        window = max(_LATENCY + tensor, together) * (1 + _ALONE / warpgroups)
        return window * math.ceil(windows / k_groups)

    cycles = rounds * block_cycles(blocks_at_once)
    if rest:
        cycles += block_cycles(math.ceil(rest / MULTIPROCESSORS))
    cycles += (rounds + bool(rest)) * tokens * _SUM * k_groups * blocks_at_once
    x_us = blocks * windows * tokens * 128 / _L2_BYTES_A_US
    weights_us = n * k * 0.5625 / _MEMORY_BYTES_A_US
    return max(cycles / _CYCLES_A_US, x_us, weights_us) + _START_US + _CLUSTER_US * math.log2(splits)


def many_rows_us(shape: tuple[int, int, int], blocks: tuple[int, int, int]) -> float:
    """Predicted microseconds for ``shape`` (M, N, K) in whole rounds of ``blocks`` of `MANY_ROWS_US`, which do not split K.

    With a last round of blocks of half the height where `fp4_plan.launches` makes one.
    """
    m, n, k = shape
    tokens, groups, k_groups = blocks
    columns, windows = math.ceil(m / tokens), math.ceil(k / 64)
    rows = math.ceil(n / (64 * groups))
    last_us = 0.0
    if (groups, k_groups) == (2, 1) and (whole := rows_in_whole_rounds(rows, columns)) < rows:
        rows, last_us = whole, MANY_ROWS_US[tokens, 1, 2]
    return windows * (math.ceil(rows * columns / MULTIPROCESSORS) * MANY_ROWS_US[blocks] + last_us) + 3.0


def rows_in_whole_rounds(rows: int, columns: int, processors: int = MULTIPROCESSORS) -> int:
    """Of ``rows`` by ``columns`` blocks those rows that fill rounds of the GPU; all where the others, cut in two, exceed one round."""
    whole = rows * columns // processors * processors // columns
    return whole if whole > 0 and 2 * (rows - whole) * columns <= processors else rows
