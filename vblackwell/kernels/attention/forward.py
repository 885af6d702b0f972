"""Forward kernel of op.py: Flash Attention 2 with an online softmax in base 2 (Dao, arXiv:2307.08691).

A program takes a tile of queries of one head and walks over the tiles of keys that they see. Tiles that all its rows
see whole need no comparison; tiles on an edge (diagonal, window, end of the keys) are walked apart. With a mask the
tiles come from a list (blocks.py) that leaves the empty ones out.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from vblackwell.kernels.attention.device import (
    LISTED,
    LOG2E,
    column_tiles,
    kept,
    listed_tiles,
    load_tile,
    mask_tile,
    place_in_order,
    scores,
    sequence_of,
    store_tile,
    widened,
)


@triton.jit
def _walk(
    acc, top, total, q, k, v, begin, end, items, row0, batch, head, kv_head, stride_k, stride_v, mask, stride_mask_row,
    stride_mask_col, q_len, k_len, offset, left, right, scale, softcap, slope, seed_ptr, dropout, dropout_head,
    MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, EDGES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    PLAIN: tl.constexpr = not SOFTCAP and not ALIBI
    row = (row0 + tl.arange(0, ROWS))[:, None]
    LISTED_TILES: tl.constexpr = MASK != 0 and EDGES
    tile = 0
    if LISTED_TILES:
        tile = tl.load(items + begin)
    for index in tl.range(begin, end):
        if LISTED_TILES:
            start = tile * COLUMNS
            tile = tl.load(items + index + 1)  # the list has a spare entry
        else:
            start = index * COLUMNS
        col = (start + tl.arange(0, COLUMNS))[None, :]
        values, first, second = mask_tile(
            mask, row0, start, row, col, stride_mask_row, stride_mask_col, q_len, k_len, MASK if EDGES else 0, ROWS,
            COLUMNS
        )  # fmt: skip
        k_tile = load_tile(k, start, stride_k, batch, kv_head, k_len, COLUMNS, H, D, EDGES, TMA)
        s = tl.dot(q, tl.trans(k_tile), out_dtype=acc.dtype, input_precision=PRECISION)
        if PLAIN and MASK == 2 and EDGES:
            # Not a plain sum: it would become the product's start, whose loads are not fetched ahead.
            s = tl.fma(widened(values, acc.dtype), 1.0 / scale, s)
        x, _ = scores(
            s, values, first, second, row, col, k_len, offset, left, right, scale, softcap, slope,
            MASK, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, EDGES, not PLAIN, ENDS, COLUMNS,
        )  # fmt: skip
        factor = scale * LOG2E if PLAIN else 1.0
        new_top = tl.maximum(top, tl.max(x, 1) * factor)
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if EDGES else new_top  # rows that see nothing yet
        p = tl.exp2(x * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept(seed_ptr, dropout_head, row, col, dropout), p, 0.0)
        v_tile = load_tile(v, start, stride_v, batch, kv_head, k_len, COLUMNS, H, D, EDGES, TMA)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, out_dtype=acc.dtype, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=LISTED)
def attend(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, items_ptr, counts_ptr, order_ptr, slope_ptr, seed_ptr,
    q_starts_ptr, k_starts_ptr, stride_qb, stride_qn, stride_q, stride_kb, stride_kn, stride_k, stride_vb, stride_vn,
    stride_v, stride_ob, stride_on, stride_o, stride_lb, stride_ln, stride_mb, stride_mn, stride_mask_row,
    stride_mask_col, list_batch, list_head, list_width, q_length, k_length, left, right, scale, softcap, dropout,
    GROUP: tl.constexpr, MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr,
    EVEN: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    q_tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if MASK:
        q_tile, head, batch = place_in_order(order_ptr, list_batch, list_head, 1)
    elif HAS_RIGHT:
        q_tile = tl.num_programs(0) - 1 - q_tile  # the longest walks first
    kv_head = head // GROUP
    wide_head, wide_kv, wide_batch = head.to(tl.int64), kv_head.to(tl.int64), batch.to(tl.int64)
    q_start, k_start, q_len, k_len = sequence_of(batch, q_starts_ptr, k_starts_ptr, q_length, k_length, VARLEN)
    row0 = q_tile * ROWS
    if VARLEN:  # noqa: SIM102 - one is decided while compiling
        if row0 >= q_len:
            return
    out = out_ptr + wide_head * stride_on + (q_start * stride_o if VARLEN else wide_batch * stride_ob)
    lse = lse_ptr + wide_head * stride_ln + (q_start if VARLEN else wide_batch * stride_lb)
    q, k, v = q_ptr, k_ptr, v_ptr
    if not TMA:
        q += wide_batch * stride_qb + wide_head * stride_qn + q_start * stride_q
        k += wide_batch * stride_kb + wide_kv * stride_kn + k_start * stride_k
        v += wide_batch * stride_vb + wide_kv * stride_vn + k_start * stride_v
    offset = k_len - q_len if BOTTOM_RIGHT else 0
    slope = tl.load(slope_ptr + head) if ALIBI else 0.0
    mask = mask_ptr + (wide_batch * stride_mb + wide_head * stride_mn) if MASK else mask_ptr
    dropout_head = batch * tl.num_programs(1) + head

    WIDE: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32  # fp64: interpreter only
    if not MASK:
        q_values = load_tile(q, row0, stride_q, batch, head, q_len, ROWS, H, D, True, TMA)
    acc = tl.zeros([ROWS, D], WIDE)
    top = tl.full([ROWS], float("-inf"), WIDE)
    total = tl.zeros([ROWS], WIDE)
    items = items_ptr
    if MASK:
        line = (batch * list_batch + head * list_head) * tl.num_programs(0) + q_tile
        items, begins, ends = listed_tiles(items_ptr, counts_ptr, line, list_width)
        # It is waited for; the numbers above are under way meanwhile.
        q_values = load_tile(q, row0, stride_q, batch, head, q_len, ROWS, H, D, True, TMA)
    else:
        begins, ends = column_tiles(row0, k_len, offset, left, right, HAS_LEFT, HAS_RIGHT, ROWS, COLUMNS)
    for part in tl.static_range(3):  # tiles on an edge to the left, whole ones, and those on other edges or of the list
        if part == 1 or (part == 0 and HAS_LEFT and not MASK) or (
            part == 2 and (HAS_LEFT or HAS_RIGHT or MASK or not EVEN)
        ):  # fmt: skip
            acc, top, total = _walk(
                acc, top, total, q_values, k, v, begins[part], ends[part], items, row0, batch, head, kv_head, stride_k,
                stride_v, mask, stride_mask_row, stride_mask_col, q_len, k_len, offset, left, right, scale, softcap,
                slope, seed_ptr, dropout, dropout_head, MASK, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, DROPOUT, part != 1,
                H, D, ROWS, COLUMNS, PRECISION, TMA, ENDS,
            )  # fmt: skip

    empty = total == 0.0
    rest = 1.0 / (1.0 - dropout) if DROPOUT else 1.0
    out_values = acc * (rest / tl.where(empty, 1.0, total))[:, None]
    store_tile(out, row0, stride_o, q_len, out_values, ROWS, H, D)
    row = row0 + tl.arange(0, ROWS)
    # +inf for rows that see nothing: backward's probabilities exp2(score - inf) are zero
    tl.store(lse + row, tl.where(empty, float("inf"), top + tl.log2(tl.where(empty, 1.0, total))), row < q_len)
