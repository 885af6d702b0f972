"""Which tiles of a mask are worth visiting: made on the GPU before each kernel that reads the mask, in two short launches.

``_judge`` reads the mask once, every tile in a program of its own, and calls a tile empty (nobody sees anybody), whole (all see all;
an additive mask is zero there) or partial, with causality, window and the end of the keys counted in. ``_collect`` turns each line of
that into a list, whole tiles first. A mask of 16k x 16k bytes is read in the time of a copy, 0.1 ms beside some 10 ms of attention, and is
never expanded: broadcast dimensions are judged once.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.attention_device import load_mask, visible

EMPTY, PARTIAL, WHOLE = 0, 1, 2


class TileLists(NamedTuple):
    """Lists of tiles, one a line (batch x head x tile of the walking kernel).

    Attributes:
        items: (lines, tiles + 1) int32 tile numbers, whole ones first; the last entry is spare.
        counts: (lines, 2) int32, how many are whole and how many partial.
        list_batch, list_head: line of (batch, head, tile) is (batch * list_batch + head * list_head) * tiles of the kernel + tile.
    """

    items: Tensor
    counts: Tensor
    list_batch: int
    list_head: int


@triton.jit
def judge_tiles(
    mask_ptr, state_ptr, stride_mb, stride_mn, stride_row, stride_col, heads, q_len, k_len, offset, left, right,
    ADDITIVE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    k_tile, q_tile, which = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    mask = mask_ptr + which // heads * stride_mb + which % heads * stride_mn
    row = (q_tile * ROWS + tl.arange(0, ROWS))[:, None]
    col = (k_tile * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    row0, col0 = q_tile * ROWS, k_tile * COLUMNS
    values = load_mask(mask, row0, col0, row - row0, col - col0, stride_row, stride_col, q_len, k_len)
    inside = visible(row, col, k_len, offset, left, right, HAS_LEFT, HAS_RIGHT)
    outside = row >= q_len  # such rows are nobody's concern
    if ADDITIVE:
        some = inside & (values != float("-inf"))
        plain = inside & (values == 0)
    else:
        some = inside & (values != 0)
        plain = some
    any_some = tl.max(tl.max((some & (row < q_len)).to(tl.int32), 1), 0)
    all_plain = tl.min(tl.min((plain | outside).to(tl.int32), 1), 0)
    state = tl.where(all_plain == 1, 2, any_some)
    at = (which * tl.num_programs(1) + q_tile) * tl.num_programs(0) + k_tile
    tl.store(state_ptr + at, state.to(tl.int8))


@triton.jit
def collect_tiles(state_ptr, items_ptr, counts_ptr, stride_which, stride_line, stride_tile, tiles, BLOCK: tl.constexpr):
    line, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    state = tl.load(state_ptr + which * stride_which + line * stride_line + tile * stride_tile, tile < tiles, other=0)
    whole, partial = (state == 2).to(tl.int32), (state == 1).to(tl.int32)
    num_whole = tl.sum(whole, 0)
    place = tl.where(whole == 1, tl.cumsum(whole, 0) - 1, num_whole + tl.cumsum(partial, 0) - 1)
    at = which * tl.num_programs(0) + line
    items = items_ptr + at * (tiles + 1)
    tl.store(items + place, tile, state > 0)
    num_listed = num_whole + tl.sum(partial, 0)
    tl.store(items + tile, tile * 0, (tile >= num_listed) & (tile <= tiles))
    tl.store(counts_ptr + at * 2, num_whole)
    tl.store(counts_ptr + at * 2 + 1, num_listed - num_whole)


def list_tiles(
    mask: Tensor, lengths: tuple[int, int], tile: tuple[int, int], offset: int, left: int | None, right: int | None,
    by_column: bool,
) -> TileLists:  # fmt: skip
    """Lists of key tiles for each query tile, or, ``by_column``, of query tiles for each key tile.

    Args:
        mask: (1 or B, 1 or N, S or 1, T or 1), uint8 for a boolean mask, floating point for an additive one, of any strides.
        lengths: S and T.
        tile: queries and keys of a tile.
        offset, left, right: as in attention_device.py.
    """
    q_tiles, k_tiles = triton.cdiv(lengths[0], tile[0]), triton.cdiv(lengths[1], tile[1])
    batch, heads = mask.shape[:2]
    strides = mask_strides(mask)
    state = torch.empty((batch * heads, q_tiles, k_tiles), dtype=torch.int8, device=mask.device)
    judge_tiles[(k_tiles, q_tiles, batch * heads)](
        mask, state, *strides, heads, *lengths, offset, left or 0, right or 0, ADDITIVE=mask.is_floating_point(),
        HAS_LEFT=left is not None, HAS_RIGHT=right is not None, ROWS=tile[0], COLUMNS=tile[1], num_warps=4,
    )  # fmt: skip
    lines, tiles = (k_tiles, q_tiles) if by_column else (q_tiles, k_tiles)
    items = torch.empty((batch * heads * lines, tiles + 1), dtype=torch.int32, device=mask.device)
    counts = torch.empty((batch * heads * lines, 2), dtype=torch.int32, device=mask.device)
    step = (1, k_tiles) if by_column else (k_tiles, 1)
    collect_tiles[(lines, batch * heads)](
        state, items, counts, q_tiles * k_tiles, *step, tiles, BLOCK=triton.next_power_of_2(tiles + 1), num_warps=4
    )
    return TileLists(items, counts, 0 if batch == 1 else heads, 0 if heads == 1 else 1)


def mask_strides(mask: Tensor) -> tuple[int, ...]:
    """Strides that read ``mask`` as if it were expanded."""
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
