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
    here,
    kept,
    load_mask,
    load_tile,
    load_words,
    place_in_order,
    scaled_now,
    scores,
    store_tile,
    widened,
)


@triton.jit
def _mask_tile(
    mask, row0, start, row, col, stride_row, stride_col, q_len, k_len, MASK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """What ``scores`` wants of a tile of the mask: numbers to add, and two words of bits; zeros stand for what MASK has
    not.
    """
    values, first, second = 0.0, 0, 0
    if MASK == 1:
        first, second = load_words(mask, row0, start, stride_row, stride_col, ROWS, COLUMNS)
    elif MASK == 2:
        values = load_mask(mask, row0, start, row - row0, col - start, stride_row, stride_col, q_len, k_len)
    return values, first, second


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
        values, first, second = _mask_tile(
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


@triton.jit
def _walk_ahead(
    acc, top, total, q, k, v, begin, end, items, row0, batch, head, kv_head, stride_k, stride_v, mask, stride_mask_row,
    stride_mask_col, q_len, k_len, offset, left, right, scale, MASK: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, EDGES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ENDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``_walk`` of a mask, over at least one tile: the next tile's scores are computed under the exponentials of this
    one.

    Triton starts a product without waiting for it only if nothing but the loop's next pass uses its result, after a
    wait. So each pass begins with the product of values and the last pass's probabilities, which is waited for, and
    with it this pass's scores. The first such product is of zeros, and the last scores are unused. Each pass loads
    three numbers of tiles, those of the next pass, though two are known: where a variable of a loop becomes another
    one's value, Triton 3.6 gives what it fetches ahead the value from before the loop.
    """
    row = (row0 + tl.arange(0, ROWS))[:, None]
    tile, next_tile = begin, begin + 1
    if EDGES:
        tile, next_tile = tl.load(items + begin), tl.load(items + begin + 1)  # the list has a spare entry
    last_tile = tile
    k_tile = load_tile(k, tile * COLUMNS, stride_k, batch, kv_head, k_len, COLUMNS, H, D, True, TMA)
    s = tl.dot(q, tl.trans(k_tile), out_dtype=acc.dtype, input_precision=PRECISION)
    p = tl.zeros([ROWS, COLUMNS], k_tile.dtype)
    for index in tl.range(
        begin, end, num_stages=STAGES
    ):  # said here too: else the mask's loads would not be fetched ahead
        if not EDGES:
            last_tile, tile, next_tile = tl.maximum(index - 1, begin), index, index + 1
        start = tile * COLUMNS
        v_tile = load_tile(v, last_tile * COLUMNS, stride_v, batch, kv_head, k_len, COLUMNS, H, D, True, TMA)
        acc = tl.dot(here(p), v_tile, acc, out_dtype=acc.dtype, input_precision=PRECISION)
        x = scaled_now(s, scale * LOG2E)  # before the next scores are begun: both would not fit the same registers
        k_tile = load_tile(k, next_tile * COLUMNS, stride_k, batch, kv_head, k_len, COLUMNS, H, D, True, TMA)
        next_s = tl.dot(q, tl.trans(k_tile), out_dtype=acc.dtype, input_precision=PRECISION)
        col = (start + tl.arange(0, COLUMNS))[None, :]
        values, first, second = _mask_tile(
            mask, row0, start, row, col, stride_mask_row, stride_mask_col, q_len, k_len, MASK if EDGES else 0, ROWS,
            COLUMNS
        )  # fmt: skip
        if MASK == 2 and EDGES:
            x = tl.fma(widened(values, acc.dtype), LOG2E, x)
        x, _ = scores(
            x, values, first, second, row, col, k_len, offset, left, right, scale, 0.0, 0.0,
            MASK, HAS_LEFT, HAS_RIGHT, False, False, EDGES, False, ENDS, COLUMNS,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(x, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if EDGES else new_top  # rows that see nothing yet
        wide_p = tl.exp2(x - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(wide_p, 1)
        p = wide_p.to(k_tile.dtype)
        acc = acc * shrink[:, None]
        top, s = new_top, next_s
        if EDGES:
            last_tile, tile = tl.load(items + index), tl.load(items + index + 1)
            next_tile = tl.load(items + tl.minimum(index + 2, end))
    v_tile = load_tile(
        v, (last_tile if EDGES else end - 1) * COLUMNS, stride_v, batch, kv_head, k_len, COLUMNS, H, D, True, TMA
    )
    acc = tl.dot(p, v_tile, acc, out_dtype=acc.dtype, input_precision=PRECISION)
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
    PRECISION: tl.constexpr, TMA: tl.constexpr, ENDS: tl.constexpr, TOGETHER: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    q_tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if MASK:
        q_tile, head, batch = place_in_order(order_ptr, list_batch, list_head, 1, TOGETHER)
    elif HAS_RIGHT:
        q_tile = tl.num_programs(0) - 1 - q_tile  # the longest walks first
    kv_head = head // GROUP
    q_len, k_len = q_length, k_length
    out = out_ptr + head.to(tl.int64) * stride_on
    lse = lse_ptr + head.to(tl.int64) * stride_ln
    wide_batch = batch.to(tl.int64)
    q_start, k_start = wide_batch * 0, wide_batch * 0
    if VARLEN:
        q_start, k_start = tl.load(q_starts_ptr + batch).to(tl.int64), tl.load(k_starts_ptr + batch).to(tl.int64)
        q_len = (tl.load(q_starts_ptr + batch + 1) - q_start).to(tl.int32)
        k_len = (tl.load(k_starts_ptr + batch + 1) - k_start).to(tl.int32)
        out += q_start * stride_o
        lse += q_start
    else:
        out += wide_batch * stride_ob
        lse += wide_batch * stride_lb
    row0 = q_tile * ROWS
    if VARLEN:  # noqa: SIM102 - one is decided while compiling
        if row0 >= q_len:
            return
    q, k, v = q_ptr, k_ptr, v_ptr
    if not TMA:
        q += wide_batch * stride_qb + head.to(tl.int64) * stride_qn + q_start * stride_q
        k += wide_batch * stride_kb + kv_head.to(tl.int64) * stride_kn + k_start * stride_k
        v += wide_batch * stride_vb + kv_head.to(tl.int64) * stride_vn + k_start * stride_v
    offset = k_len - q_len if BOTTOM_RIGHT else 0
    slope = tl.load(slope_ptr + head) if ALIBI else 0.0
    mask = mask_ptr
    if MASK:
        mask += wide_batch * stride_mb + head.to(tl.int64) * stride_mn
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
        items += line.to(tl.int64) * list_width
        run = tl.load(counts_ptr + line * 2)
        first, whole_first = 0, tl.load(items)
        whole_end = whole_first + run
        edge_first, end = run, run + tl.load(counts_ptr + line * 2 + 1)
        # It is waited for; the numbers above are under way meanwhile.
        q_values = load_tile(q, row0, stride_q, batch, head, q_len, ROWS, H, D, True, TMA)
    else:
        first, whole_first, whole_end, end = column_tiles(
            row0, k_len, offset, left, right, HAS_LEFT, HAS_RIGHT, ROWS, COLUMNS
        )
        edge_first = whole_end
    if HAS_LEFT and not MASK:
        acc, top, total = _walk(
            acc, top, total, q_values, k, v, first, whole_first, items, row0, batch, head, kv_head, stride_k, stride_v,
            mask, stride_mask_row, stride_mask_col, q_len, k_len, offset, left, right, scale, softcap, slope,
            seed_ptr, dropout, dropout_head,
            MASK, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, DROPOUT, True, H, D, ROWS, COLUMNS, PRECISION, TMA, ENDS,
        )  # fmt: skip
    if MASK and AHEAD and not (SOFTCAP or ALIBI or DROPOUT):
        if whole_first < whole_end:
            acc, top, total = _walk_ahead(
                acc, top, total, q_values, k, v, whole_first, whole_end, items, row0, batch, head, kv_head, stride_k,
                stride_v, mask, stride_mask_row, stride_mask_col, q_len, k_len, offset, left, right, scale, MASK,
                HAS_LEFT, HAS_RIGHT, False, H, D, ROWS, COLUMNS, PRECISION, TMA, ENDS, STAGES,
            )  # fmt: skip
        if edge_first < end:
            acc, top, total = _walk_ahead(
                acc, top, total, q_values, k, v, edge_first, end, items, row0, batch, head, kv_head, stride_k, stride_v,
                mask, stride_mask_row, stride_mask_col, q_len, k_len, offset, left, right, scale,
                MASK, HAS_LEFT, HAS_RIGHT, True, H, D, ROWS, COLUMNS, PRECISION, TMA, ENDS, STAGES,
            )  # fmt: skip
    else:
        acc, top, total = _walk(
            acc, top, total, q_values, k, v, whole_first, whole_end, items, row0, batch, head, kv_head, stride_k,
            stride_v, mask, stride_mask_row, stride_mask_col, q_len, k_len, offset, left, right, scale, softcap, slope,
            seed_ptr, dropout, dropout_head, MASK, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, DROPOUT, False, H, D, ROWS,
            COLUMNS, PRECISION, TMA, ENDS,
        )  # fmt: skip
        if HAS_LEFT or HAS_RIGHT or MASK or not EVEN:
            acc, top, total = _walk(
                acc, top, total, q_values, k, v, edge_first, end, items, row0, batch, head, kv_head, stride_k, stride_v,
                mask, stride_mask_row, stride_mask_col, q_len, k_len, offset, left, right, scale, softcap, slope,
                seed_ptr, dropout, dropout_head,
                MASK, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, DROPOUT, True, H, D, ROWS, COLUMNS, PRECISION, TMA, ENDS,
            )  # fmt: skip

    empty = total == 0.0
    rest = 1.0 / (1.0 - dropout) if DROPOUT else 1.0
    out_values = acc * (rest / tl.where(empty, 1.0, total))[:, None]
    store_tile(out, row0, stride_o, q_len, out_values, ROWS, H, D)
    row = row0 + tl.arange(0, ROWS)
    # +inf for rows that see nothing: backward's probabilities exp2(score - inf) are zero
    tl.store(lse + row, tl.where(empty, float("inf"), top + tl.log2(tl.where(empty, 1.0, total))), row < q_len)
