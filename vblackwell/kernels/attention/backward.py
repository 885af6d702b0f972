"""Backward kernels of op.py: ``query_gradient`` walks over keys, ``key_gradient`` over queries (arXiv:2307.08691,
algorithm 2). Probabilities are computed anew in both, so gradients need no atomic additions.

``query_gradient`` goes first: it also writes what the other's products start at: -delta of each row, delta = sum(out *
dout), and -lse in units of the products.
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
    load_mask,
    load_tile,
    load_words,
    mask_tile,
    place_in_order,
    row_tiles,
    scores,
    sequence_of,
    store_tile,
)


@triton.jit
def _walk_keys(
    dq, q, dout, lse, delta, k, v, begin, end, items, row0, batch, head, kv_head, stride_k, stride_v, mask,
    stride_mask_row, stride_mask_col, q_len, k_len, offset, left, right, scale, softcap, slope, seed_ptr, dropout,
    dropout_head, MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, EDGES: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    row = (row0 + tl.arange(0, ROWS))[:, None]
    PLAIN: tl.constexpr = not SOFTCAP and not ALIBI
    LISTED_TILES: tl.constexpr = MASK != 0 and EDGES
    tile = 0
    if LISTED_TILES:
        tile = tl.load(items + begin)
    for index in tl.range(begin, end):
        if LISTED_TILES:
            start = tile * COLUMNS
            tile = tl.load(items + index + 1)
        else:
            start = index * COLUMNS
        col = (start + tl.arange(0, COLUMNS))[None, :]
        values, first, second = mask_tile(
            mask, row0, start, row, col, stride_mask_row, stride_mask_col, q_len, k_len, MASK if EDGES else 0, ROWS,
            COLUMNS
        )  # fmt: skip
        k_tile = load_tile(k, start, stride_k, batch, kv_head, k_len, COLUMNS, H, D, EDGES, TMA)
        v_tile = load_tile(v, start, stride_v, batch, kv_head, k_len, COLUMNS, H, D, EDGES, TMA)
        s = tl.dot(q, tl.trans(k_tile), out_dtype=dq.dtype, input_precision=PRECISION)
        if PLAIN and MASK == 2 and EDGES:
            s = tl.fma(values.to(dq.dtype), 1.0 / scale, s)  # as in the forward
        x, chain = scores(
            s, values, first, second, row, col, k_len, offset, left, right, scale, softcap, slope,
            MASK, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, EDGES, not PLAIN, ENDS, COLUMNS,
        )  # fmt: skip
        p = tl.exp2(x * (scale * LOG2E if PLAIN else 1.0) - lse[:, None])
        dp = tl.dot(dout, tl.trans(v_tile), out_dtype=dq.dtype, input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(kept(seed_ptr, dropout_head, row, col, dropout), dp * (1.0 / (1.0 - dropout)), 0.0)
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds *= chain
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, out_dtype=dq.dtype, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=LISTED)
def query_gradient(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, delta_ptr, start_ptr, dq_ptr, mask_ptr, items_ptr, counts_ptr,
    order_ptr, slope_ptr, seed_ptr, q_starts_ptr, k_starts_ptr, stride_qb, stride_qn, stride_q, stride_kb, stride_kn,
    stride_k, stride_vb, stride_vn, stride_v, stride_ob, stride_on, stride_o, stride_gb, stride_gn, stride_g,
    stride_dqb, stride_dqn, stride_dq, stride_lb, stride_ln, stride_mb, stride_mn, stride_mask_row, stride_mask_col,
    list_batch, list_head, list_width, q_length, k_length, left, right, scale, softcap, dropout, GROUP: tl.constexpr,
    MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, EVEN: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    q_tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if MASK:
        q_tile, head, batch = place_in_order(order_ptr, list_batch, list_head, 1)
    elif HAS_RIGHT:
        q_tile = tl.num_programs(0) - 1 - q_tile
    kv_head = head // GROUP
    wide_head, wide_kv, wide_batch = head.to(tl.int64), kv_head.to(tl.int64), batch.to(tl.int64)
    q_start, k_start, q_len, k_len = sequence_of(batch, q_starts_ptr, k_starts_ptr, q_length, k_length, VARLEN)
    row0 = q_tile * ROWS
    if VARLEN:  # noqa: SIM102 - one is decided while compiling
        if row0 >= q_len:
            return
    # batch strides are zero with variable lengths, and starts are zero without
    out = out_ptr + wide_batch * stride_ob + wide_head * stride_on + q_start * stride_o
    dq_out = dq_ptr + wide_batch * stride_dqb + wide_head * stride_dqn + q_start * stride_dq
    per_row = wide_batch * stride_lb + wide_head * stride_ln + q_start
    q, k, v, dout = q_ptr, k_ptr, v_ptr, dout_ptr
    if not TMA:
        q += wide_batch * stride_qb + wide_head * stride_qn + q_start * stride_q
        k += wide_batch * stride_kb + wide_kv * stride_kn + k_start * stride_k
        v += wide_batch * stride_vb + wide_kv * stride_vn + k_start * stride_v
        dout += wide_batch * stride_gb + wide_head * stride_gn + q_start * stride_g
    offset = k_len - q_len if BOTTOM_RIGHT else 0
    slope = tl.load(slope_ptr + head) if ALIBI else 0.0
    mask = mask_ptr + wide_batch * stride_mb + wide_head * stride_mn if MASK else mask_ptr
    dropout_head = batch * tl.num_programs(1) + head

    WIDE: tl.constexpr = tl.float64 if dq_ptr.dtype.element_ty == tl.float64 else tl.float32  # fp64: interpreter only
    row = row0 + tl.arange(0, ROWS)
    q_values = load_tile(q, row0, stride_q, batch, head, q_len, ROWS, H, D, True, TMA)
    dout_values = load_tile(dout, row0, stride_g, batch, head, q_len, ROWS, H, D, True, TMA)
    out_values = load_tile(out, row0, stride_o, batch, head, q_len, ROWS, H, D, True, False)
    delta = tl.sum(out_values.to(WIDE) * dout_values.to(WIDE), 1)
    tl.store(delta_ptr + per_row + row, -delta, row < q_len)
    lse = tl.load(lse_ptr + per_row + row, row < q_len, other=float("inf"))
    tl.store(start_ptr + per_row + row, lse * (-1.0 / (scale * LOG2E)), row < q_len)
    dq = tl.zeros([ROWS, D], WIDE)
    items = items_ptr
    if MASK:
        line = (batch * list_batch + head * list_head) * tl.num_programs(0) + q_tile
        items, begins, ends = listed_tiles(items_ptr, counts_ptr, line, list_width)
    else:
        begins, ends = column_tiles(row0, k_len, offset, left, right, HAS_LEFT, HAS_RIGHT, ROWS, COLUMNS)
    for part in tl.static_range(3):  # as in the forward
        if part == 1 or (part == 0 and HAS_LEFT and not MASK) or (
            part == 2 and (HAS_LEFT or HAS_RIGHT or MASK or not EVEN)
        ):  # fmt: skip
            dq = _walk_keys(
                dq, q_values, dout_values, lse, delta, k, v, begins[part], ends[part], items, row0, batch, head,
                kv_head, stride_k, stride_v, mask, stride_mask_row, stride_mask_col, q_len, k_len, offset, left, right,
                scale, softcap, slope, seed_ptr, dropout, dropout_head, MASK, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI,
                DROPOUT, part != 1, H, D, ROWS, COLUMNS, PRECISION, TMA, ENDS,
            )  # fmt: skip
    store_tile(dq_out, row0, stride_dq, q_len, dq * scale, ROWS, H, D)


@triton.jit
def _walk_queries(
    dk, dv, k, v, q, dout, lse_ptr, delta_ptr, start_ptr, begin, end, items, col0, batch, head, stride_q, stride_g,
    mask, stride_mask_row, stride_mask_col, q_len, k_len, offset, left, right, scale, softcap, slope, seed_ptr, dropout,
    dropout_head, MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, EDGES: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Everything transposed, keys in lines: so the products' left operands come from registers."""
    PLAIN: tl.constexpr = not SOFTCAP and not ALIBI
    col = (col0 + tl.arange(0, COLUMNS))[:, None]
    LISTED_TILES: tl.constexpr = MASK != 0 and EDGES
    tile = 0
    if LISTED_TILES:
        tile = tl.load(items + begin)
    for index in tl.range(begin, end):
        if LISTED_TILES:
            start = tile * ROWS
            tile = tl.load(items + index + 1)
        else:
            start = index * ROWS
        line = start + tl.arange(0, ROWS)
        row = line[None, :]
        values, first, second = 0.0, 0, 0
        if MASK == 1 and EDGES:
            first, second = load_words(mask, col0, start, stride_mask_row, stride_mask_col, COLUMNS, ROWS)
        if MASK == 2 and EDGES:
            # read as it lies, keys side by side
            values = tl.trans(load_mask(
                mask, start, col0, tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], stride_mask_row,
                stride_mask_col, q_len, k_len,
            ))  # fmt: skip
        # Asked for before the tiles, so that they are on their way during the products of the tile before;
        # delta (negative, see above) only where a mask leaves the registers.
        if PLAIN:  # rows beyond the end get no probability
            first_sum = tl.load(start_ptr + line, line < q_len, other=float("-inf"))
        else:
            lse = tl.load(lse_ptr + line, line < q_len, other=float("inf"))
        if not LISTED_TILES:
            delta = tl.load(delta_ptr + line, line < q_len, other=0.0)
        q_tile = load_tile(q, start, stride_q, batch, head, q_len, ROWS, H, D, True, TMA)
        if PLAIN:
            # The sum starts at what is added or subtracted, which then holds no separate registers.
            if MASK == 2 and EDGES:
                s = values.to(dk.dtype) * (1.0 / scale) + first_sum[None, :]
            else:
                s = tl.broadcast_to(first_sum[None, :], COLUMNS, ROWS)
            s = tl.dot(k, tl.trans(q_tile), s, out_dtype=dk.dtype, input_precision=PRECISION)
        else:
            s = tl.dot(k, tl.trans(q_tile), out_dtype=dk.dtype, input_precision=PRECISION)
        x, chain = scores(
            s, values, first, second, row, col, k_len, offset, left, right, scale, softcap, slope,
            MASK, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, EDGES, not PLAIN, ENDS, ROWS,
        )  # fmt: skip
        p = tl.exp2(x * (scale * LOG2E)) if PLAIN else tl.exp2(x - lse[None, :])
        dout_tile = load_tile(dout, start, stride_g, batch, head, q_len, ROWS, H, D, True, TMA)
        if LISTED_TILES:
            delta = tl.load(delta_ptr + line, line < q_len, other=0.0)
        if DROPOUT:
            keep = kept(seed_ptr, dropout_head, row, col, dropout)
            rest = 1.0 / (1.0 - dropout)
            dropped = tl.where(keep, p * rest, 0.0).to(dout_tile.dtype)
            dp = tl.dot(v, tl.trans(dout_tile), out_dtype=dk.dtype, input_precision=PRECISION)
            dp = tl.where(keep, dp * rest, 0.0) + delta[None, :]
        else:
            dropped = p.to(dout_tile.dtype)
            dp = tl.broadcast_to(delta[None, :], COLUMNS, ROWS)
            dp = tl.dot(v, tl.trans(dout_tile), dp, out_dtype=dk.dtype, input_precision=PRECISION)
        dv = tl.dot(dropped, dout_tile, dv, out_dtype=dk.dtype, input_precision=PRECISION)
        ds = p * dp
        if SOFTCAP:
            ds *= chain
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, out_dtype=dk.dtype, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=LISTED)
def key_gradient(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, start_ptr, dk_ptr, dv_ptr, mask_ptr, items_ptr, counts_ptr,
    order_ptr, slope_ptr, seed_ptr, q_starts_ptr, k_starts_ptr, stride_qb, stride_qn, stride_q, stride_kb, stride_kn,
    stride_k, stride_vb, stride_vn, stride_v, stride_gb, stride_gn, stride_g, stride_dkb, stride_dkn, stride_dk,
    stride_dvb, stride_dvn, stride_dv, stride_lb, stride_ln, stride_mb, stride_mn, stride_mask_row, stride_mask_col,
    list_batch, list_head, list_width, q_length, k_length, left, right, scale, softcap, dropout, GROUP: tl.constexpr,
    MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    ENDS: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, summed over the query heads that share them, in order."""
    k_tile, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if MASK:
        k_tile, kv_head, batch = place_in_order(order_ptr, list_batch, list_head, GROUP)
    wide_kv, wide_batch = kv_head.to(tl.int64), batch.to(tl.int64)
    q_start, k_start, q_len, k_len = sequence_of(batch, q_starts_ptr, k_starts_ptr, q_length, k_length, VARLEN)
    col0 = k_tile * COLUMNS
    if VARLEN:  # noqa: SIM102 - one is decided while compiling
        if col0 >= k_len:
            return
    dk_out = dk_ptr + wide_batch * stride_dkb + wide_kv * stride_dkn + k_start * stride_dk
    dv_out = dv_ptr + wide_batch * stride_dvb + wide_kv * stride_dvn + k_start * stride_dv
    k, v = k_ptr, v_ptr
    if not TMA:
        k += wide_batch * stride_kb + wide_kv * stride_kn + k_start * stride_k
        v += wide_batch * stride_vb + wide_kv * stride_vn + k_start * stride_v
    offset = k_len - q_len if BOTTOM_RIGHT else 0

    WIDE: tl.constexpr = tl.float64 if dk_ptr.dtype.element_ty == tl.float64 else tl.float32  # fp64: interpreter only
    k_values = load_tile(k, col0, stride_k, batch, kv_head, k_len, COLUMNS, H, D, True, TMA)
    v_values = load_tile(v, col0, stride_v, batch, kv_head, k_len, COLUMNS, H, D, True, TMA)
    dk = tl.zeros([COLUMNS, D], WIDE)
    dv = tl.zeros([COLUMNS, D], WIDE)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        wide_head = tl.cast(head, tl.int64)
        per_row = wide_batch * stride_lb + wide_head * stride_ln + q_start
        lse, delta, start = lse_ptr + per_row, delta_ptr + per_row, start_ptr + per_row
        q, dout = q_ptr, dout_ptr
        if not TMA:
            q += wide_batch * stride_qb + wide_head * stride_qn + q_start * stride_q
            dout += wide_batch * stride_gb + wide_head * stride_gn + q_start * stride_g
        slope = tl.load(slope_ptr + head) if ALIBI else 0.0
        mask = mask_ptr + wide_batch * stride_mb + wide_head * stride_mn if MASK else mask_ptr
        dropout_head = batch * (tl.num_programs(1) * GROUP) + head
        items = items_ptr
        if MASK:
            line = (batch * list_batch + head * list_head) * tl.num_programs(0) + k_tile
            items, begins, ends = listed_tiles(items_ptr, counts_ptr, line, list_width)
        else:
            begins, ends = row_tiles(col0, q_len, offset, left, right, HAS_LEFT, HAS_RIGHT, ROWS, COLUMNS)
        for part in tl.static_range(3):  # tiles on an edge to the top, whole ones, and those on other edges
            if part == 1 or (part == 0 and HAS_RIGHT and not MASK) or (part == 2 and (HAS_LEFT or MASK)):
                dk, dv = _walk_queries(
                    dk, dv, k_values, v_values, q, dout, lse, delta, start, begins[part], ends[part], items, col0,
                    batch, head, stride_q, stride_g, mask, stride_mask_row, stride_mask_col, q_len, k_len, offset, left,
                    right, scale, softcap, slope, seed_ptr, dropout, dropout_head, MASK, HAS_LEFT, HAS_RIGHT, SOFTCAP,
                    ALIBI, DROPOUT, part != 1, H, D, ROWS, COLUMNS, PRECISION, TMA, ENDS,
                )  # fmt: skip
    store_tile(dk_out, col0, stride_dk, k_len, dk * scale, COLUMNS, H, D)
    store_tile(dv_out, col0, stride_dv, k_len, dv, COLUMNS, H, D)
