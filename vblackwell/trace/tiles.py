"""Which share of a GPU's arithmetic a matrix product reaches: it is cut into tiles, one a multiprocessor at a time.

A product in fp32 on CUDA cores reaches the full rate where its tiles fill all multiprocessors evenly: bytes come fast enough for tiles of
128 x 128. What is lost is the part of the last tiles that lies outside, and the multiprocessors that idle in the last round.
Tensor cores lose by other things as well (`vblackwell.trace.work.MATMUL_SHARE`).
"""

from __future__ import annotations

import functools

NUM_SMS = 132  # multiprocessors of an H100 or H200, where no card is named
# (rows, columns, of the full rate): a smaller tile reads its operands more often.
TILES = ((128, 128, 1.0), (128, 64, 0.95), (64, 64, 0.85))
LEAST_INNER = 256  # of a part, where a product with fewer tiles than multiprocessors is cut along its inner dimension


@functools.lru_cache(maxsize=4096)
def tiled_share(rows: int, columns: int, inner: int, count: int = 1, num_sms: int = NUM_SMS) -> float:
    """Of the full rate, for ``count`` products (rows, inner) x (inner, columns): of the best tile.

    Raises:
        ValueError: a size below 1.
    """
    if min(rows, columns, inner, count) < 1:
        raise ValueError(f"{count} products of {rows} x {inner} x {columns}: sizes from 1 on are needed")
    return max(_share(rows, columns, inner, count, num_sms, *tile) for tile in TILES)


def _share(
    rows: int, columns: int, inner: int, count: int, num_sms: int, high: int, wide: int, of_full: float
) -> float:  # fmt: skip
    down, across = -(-rows // high), -(-columns // wide)
    inside = rows * columns / (down * high * across * wide)
    tiles = count * down * across
    most = max(1, inner // LEAST_INNER) if tiles < num_sms else 1
    rounds = max(tiles * parts / (-(-tiles * parts // num_sms) * num_sms) for parts in range(1, min(most, 16) + 1))
    return of_full * inside * rounds
