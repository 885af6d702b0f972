"""Launches of ``cuda/two_part.cu``, and how they cover a shape.

One block of 12 to 16 warps a multiprocessor, and from three rows on x in bulk copies and a cluster of two that splits K, as
`fp4_mma_plan` had it for the coarse part alone when these were timed. Windows hold 2176 bytes instead of 1152, so x has less room, and
weights of 2^25 elements and more are worth what `_of_large_weights` says.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vblackwell.kernels.fp4.blocks import ceil_div
from vblackwell.kernels.fp4.cost import MULTIPROCESSORS
from vblackwell.kernels.fp4.launch import aligned
from vblackwell.kernels.fp4.mma_plan import plan_mma, takes_bulk
from vblackwell.kernels.fp4.reference import ACTIVATIONS
from vblackwell.kernels.runtime.nvrtc import kernel

FILES = ("ptx.cuh", "decode.cuh", "barrier.cuh", "epilogue.cuh", "staged_x.cuh", "two_part.cu")
MOST_ROWS = 16
MOST_SHARED_BYTES = {True: 227 * 1024, False: 99 * 1024}  # of a block, with and without clusters
_WINDOW_BYTES = 2176
# Of x that a block stages at a time without bulk copies, and windows that a warp has in flight.
_X_BYTES = {True: 80 * 1024, False: 24 * 1024}
_PREFETCH = {True: 4, False: 3}
_LARGE = 1 << 25


@dataclass(frozen=True)
class TwoPartPlan:
    """How ``two_part_mma`` covers a shape; fields as of `fp4_mma_plan.MmaPlan`.

    ``push``: whether blocks that split K send their sums to the one that finishes them, and meet once, or fetch them, and meet twice.
    """

    tokens: int
    row_warps: int
    k_warps: int
    splits: int
    prefetch: int
    x_bytes: int
    min_blocks: int = 1
    chunk: int = 0
    x_stages: int = 2
    push: bool = True

    def macros(self, out32: bool = False) -> dict[str, int]:
        """What the source is compiled with."""
        macros = {
            "FP16": 0, "TOKENS": self.tokens, "ROW_WARPS": self.row_warps, "K_WARPS": self.k_warps, "SPLITS": self.splits,
            "PREFETCH": self.prefetch, "MIN_BLOCKS": self.min_blocks, "OUT32": int(out32), "PUSH": int(self.pushes),
        }  # fmt: skip
        return macros | ({"BULK": 1, "CHUNK": self.chunk, "X_STAGES": self.x_stages} if self.chunk else {})

    @property
    def pushes(self) -> bool:
        """Whether sums are sent."""
        return self.push and self.splits > 1

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps

    def chunks(self, k: int) -> tuple[int, int]:
        """(windows a chunk of x, chunks a block): one chunk where it fits, else equal ones in two buffers. Bulk copies take ``chunk``."""
        share = ceil_div(ceil_div(k, 64), self.splits)
        most = self.x_bytes // (self.tokens * 128)
        whole = ceil_div(share, self.k_warps) * self.k_warps
        if whole <= most:
            return whole, 1
        unit = self.k_warps * self.prefetch  # so that a chunk of x is older than the windows that a warp waits for
        windows = max(1, most // 2 // unit) * unit
        count = ceil_div(share, windows)
        return ceil_div(ceil_div(share, count), unit) * unit, count

    def shared_bytes(self, k: int) -> int:
        """Of a block, for rows of ``k``."""
        windows, count = self.chunks(k)
        staged = windows * self.tokens * 128 * min(2, count)
        if self.chunk:
            staged = self.x_stages * (self.tokens * (self.chunk * 128 + 16) + 16)  # and two barriers each
        ring = self.row_warps * self.k_warps * self.prefetch * _WINDOW_BYTES
        given = self.tokens * 32 * self.row_warps * 4 if self.pushes else 0
        return max(staged + ring, self.k_warps * self.tokens * (32 * self.row_warps + 4) * 4) + given

    def fits(self, k: int, clusters: bool = True) -> bool:
        """Whether ``min_blocks`` of them fit a multiprocessor's shared memory, of which each takes a KB more."""
        return self.shared_bytes(k) <= (MOST_SHARED_BYTES[clusters] + 1024) // self.min_blocks - 1024


def _with_bulk_copies(m: int, n: int, k: int) -> TwoPartPlan:
    """From three rows on: most blocks in one wave, to within 8, then the tallest up to 128 rows; x by 16 windows."""
    tokens, windows = max(4, 1 << (m - 1).bit_length()), k // 64
    best, row_warps, splits = (0, 0), 8, 1
    for its_splits, rows in itertools.product((1, 2), (1, 2, 3, 4, 6, 8)):
        blocks = ceil_div(n, 32 * rows) * its_splits
        merit = (blocks // 8, rows if rows <= 4 else -rows)
        if blocks <= MULTIPROCESSORS and merit > best:
            best, row_warps, splits = merit, rows, its_splits
    warps = 16 if (splits == 2) == (tokens <= 8) or (tokens, n, k) == (16, 4096, 14336) else 12  # the last as timed
    k_warps = min(max(2, warps // row_warps), windows // splits)
    chunk = ceil_div(min(16, windows // splits), k_warps) * k_warps
    return TwoPartPlan(tokens, row_warps, k_warps, splits, _PREFETCH[True], _X_BYTES[True], chunk=chunk, x_stages=3)


def _of_large_weights(n: int, windows: int, base: TwoPartPlan) -> TwoPartPlan:
    """Plans for weights that take long enough to be worth filling a multiprocessor with care, among
    the fastest in turns on an H200 (docs/log.md).

    Up to 8 rows two blocks of 8 warps: while one ends, and its sums meet, the other or the next layer's first one computes. From 9 on x
    takes too much of the memory and of the way there for each half to have its own: one block of 16 warps, and long chunks of x with as
    many windows in flight as leave room; where blocks split K, all of their x, so that no warp waits for another to give room back.
    """
    if base.tokens <= 8:
        fitting = [
            (ceil_div(n, 32 * rows) * splits // 8, rows, splits)
            for splits in (1, 2)
            for rows in (1, 2, 4, 8)
            if ceil_div(n, 32 * rows) * splits <= 2 * MULTIPROCESSORS
        ]
        if fitting:
            _, rows, splits = max(fitting)
            return replace(
                base, row_warps=rows, k_warps=8 // rows, splits=splits, prefetch=4, min_blocks=2, chunk=8, x_stages=3
            )
    k_warps = max(1, 16 // base.row_warps)
    chunk = ceil_div(16, k_warps) * k_warps
    whole = ceil_div(ceil_div(windows, base.splits), chunk)
    kind = replace(base, k_warps=k_warps, chunk=chunk)
    if base.splits > 1 and whole <= 4:
        found = replace(kind, x_stages=whole, prefetch=2)
        if found.fits(64 * windows):
            return found
    return replace(kind, x_stages=3, prefetch=3)


def plan(m: int, n: int, k: int, clusters: bool) -> TwoPartPlan:
    """The plan for up to 16 rows, with or without clusters of blocks (sm_90); a function of the shape alone."""
    if clusters and m > 2 and takes_bulk(k):
        found = _with_bulk_copies(m, n, k)
    else:
        base = plan_mma(m, n, k, clusters, bulk=False)
        prefetch = min(_PREFETCH[clusters], base.prefetch)
        found = TwoPartPlan(base.tokens, base.row_warps, base.k_warps, base.splits, prefetch, _X_BYTES[clusters])
    if clusters and n * k >= _LARGE and takes_bulk(k):
        large = _of_large_weights(n, k // 64, found)
        if large.fits(k):
            return large
    if found.chunk and not found.fits(k, clusters):
        found = replace(found, x_stages=2)
    return found


def run_mma(
    plan: TwoPartPlan, x_MK: Tensor, codes: Tensor, fine: Tensor, block_scales: Tensor, tensor_scale: Tensor,
    bias: Tensor | None, activation: str, n: int, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """One launch; x is bf16, ``out_dtype`` bf16 or fp32. With bulk copies K is a multiple of 64."""
    x_MK, k = aligned(x_MK)
    m = x_MK.shape[0]
    y_MN = torch.empty(m, n, dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    grid = (ceil_div(n, 32 * plan.row_warps), plan.splits, ceil_div(m, plan.tokens))
    args = (
        x_MK, codes, fine, block_scales, tensor_scale, bias, y_MN, m, n, k, ACTIVATIONS.index(activation), *plan.chunks(k), 1,
        plan.shared_bytes(k),
    )  # fmt: skip
    macros = plan.macros(y_MN.dtype == torch.float32)
    weight = (codes, fine, block_scales, tensor_scale)
    kernel(FILES, "two_part_mma", macros, x_MK.device).launch(grid, plan.threads, plan.shared_bytes(k), args, weight)
    return y_MN


def run_dequantize(
    codes: Tensor, fine: Tensor, block_scales: Tensor, tensor_scale: Tensor, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    """The (n, k) weight as bf16, fp16 or fp32, by one launch."""
    w_NK = torch.empty(n, k, dtype=dtype, device=codes.device)
    macros = {"FP16": 0, "OUT": {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype]}
    grid = (ceil_div(ceil_div(k, 64), 4), ceil_div(n, 32), 1)
    args = (codes, fine, block_scales, tensor_scale, w_NK, n, k)
    weight = (codes, fine, block_scales, tensor_scale)
    kernel(FILES, "two_part_dequantize", macros, codes.device).launch(grid, 128, 0, args, weight)
    return w_NK
