"""Backward kernels of op.py: ``query_gradient`` walks over keys, ``key_gradient`` over queries (arXiv:2307.08691,
algorithm 2). Probabilities are computed anew in both, so gradients need no atomic additions.

``query_gradient`` goes first: it also writes what the other's products start at: -delta of each row, delta = sum(out *
dout), and -lse in units of the products.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from vblackwell.kernels.attention.device import (
    LISTED,
    LOG2E,
    column_tiles,
    dropout_keep,
    head_of,
    listed_tiles,
    load_mask,
    load_rows,
    load_tile,
    load_words,
    mask_tile,
    packed_tile,
    place_in_order,
    place_of,
    query_tile,
    row_tiles,
    rows_of,
    scores,
    sequence_of,
    store_tile,
)


@triton.jit
def _walk_keys(dq, q, dout, lse, delta, k, v, run, items, row0, head, FORM: tl.constexpr, EDGES: tl.constexpr):
    begin, end = run
    row = (row0 + tl.arange(0, FORM.rows))[:, None]
    LISTED_TILES: tl.constexpr = FORM.mask != 0 and EDGES
    tile = 0
    if LISTED_TILES:
        tile = tl.load(items + begin)
    for index in tl.range(begin, end):
        if LISTED_TILES:
            start = tile * FORM.columns
            tile = tl.load(items + index + 1)
        else:
            start = index * FORM.columns
        col = (start + tl.arange(0, FORM.columns))[None, :]
        values, words = mask_tile(head, row0, start, row, col, FORM, EDGES)
        k_tile = load_tile(k, start, FORM.columns, FORM, EDGES)
        v_tile = load_tile(v, start, FORM.columns, FORM, EDGES)
        s = tl.dot(q, tl.trans(k_tile), out_dtype=dq.dtype, input_precision=FORM.precision)
        if FORM.plain and FORM.mask == 2 and EDGES:
            s = tl.fma(values.to(dq.dtype), 1.0 / head.scale, s)  # as in the forward
        x, chain = scores(s, values, words, row, col, head, FORM, EDGES, FORM.columns)
        p = tl.exp2(x * (head.scale * LOG2E if FORM.plain else 1.0) - lse[:, None])
        dp = tl.dot(dout, tl.trans(v_tile), out_dtype=dq.dtype, input_precision=FORM.precision)
        if FORM.dropout:
            dp = tl.where(dropout_keep(head, row, col), dp * (1.0 / (1.0 - head.dropout)), 0.0)
        ds = p * (dp - delta[:, None])
        if FORM.softcap:
            ds *= chain
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, out_dtype=dq.dtype, input_precision=FORM.precision)
    return dq


@triton.jit(do_not_specialize=LISTED)
def query_gradient(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, sums, dq_ptr, given, list_batch, list_head, list_width, FORM: tl.constexpr
):
    """``sums``: of the log-sum-exps, and of what it writes."""
    tile, which, batch = query_tile(given, list_batch, list_head, FORM)
    kv_head = which // FORM.group
    q_start, k_start, q_len, k_len = sequence_of(batch, given, FORM)
    row0 = tile * FORM.rows
    if FORM.varlen:  # noqa: SIM102 - one is decided while compiling
        if row0 >= q_len:
            return
    q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides = given.strides
    out = rows_of(out_ptr, out_strides, batch, which, q_start, q_len, False)
    dq_rows = rows_of(dq_ptr, dq_strides, batch, which, q_start, q_len, False)
    q = rows_of(q_ptr, q_strides, batch, which, q_start, q_len, FORM.tma)
    k = rows_of(k_ptr, k_strides, batch, kv_head, k_start, k_len, FORM.tma)
    v = rows_of(v_ptr, v_strides, batch, kv_head, k_start, k_len, FORM.tma)
    dout = rows_of(dout_ptr, dout_strides, batch, which, q_start, q_len, FORM.tma)
    head = head_of(batch, which, tl.num_programs(1), q_len, k_len, given, FORM)

    WIDE: tl.constexpr = tl.float64 if dq_ptr.dtype.element_ty == tl.float64 else tl.float32  # fp64: interpreter only
    row = row0 + tl.arange(0, FORM.rows)
    q_values = load_tile(q, row0, FORM.rows, FORM, True)
    dout_values = load_tile(dout, row0, FORM.rows, FORM, True)
    out_values = load_rows(out, row0, FORM.rows, FORM, True)
    delta = tl.sum(out_values.to(WIDE) * dout_values.to(WIDE), 1)
    place = place_of(given, batch, which, q_start)
    tl.store(sums[1] + place + row, -delta, row < q_len)
    lse = tl.load(sums[0] + place + row, row < q_len, other=float("inf"))
    tl.store(sums[2] + place + row, lse * (-1.0 / (head.scale * LOG2E)), row < q_len)
    ROWS: tl.constexpr = FORM.rows
    D: tl.constexpr = FORM.width
    dq = tl.zeros([ROWS, D], WIDE)
    items = given.items
    if FORM.mask:
        items, runs = listed_tiles(given, tile, which, batch, list_batch, list_head, list_width)
    else:
        runs = column_tiles(row0, head, FORM)
    for part in tl.static_range(3):
        if FORM.key_runs[part]:
            dq = _walk_keys(dq, q_values, dout_values, lse, delta, k, v, runs[part], items, row0, head, FORM, part != 1)
    store_tile(dq_rows, row0, dq * head.scale, FORM.rows, FORM)


@triton.jit
def _walk_queries(dk, dv, k, v, q, dout, sums, run, items, col0, head, FORM: tl.constexpr, EDGES: tl.constexpr):
    """Everything transposed, keys in lines: so the products' left operands come from registers."""
    begin, end = run
    lse, delta, first = sums
    col = (col0 + tl.arange(0, FORM.columns))[:, None]
    LISTED_TILES: tl.constexpr = FORM.mask != 0 and EDGES
    tile = 0
    if LISTED_TILES:
        tile = tl.load(items + begin)
    for index in tl.range(begin, end):
        if LISTED_TILES:
            start = tile * FORM.rows
            tile = tl.load(items + index + 1)
        else:
            start = index * FORM.rows
        line = start + tl.arange(0, FORM.rows)
        row = line[None, :]
        values, words = 0.0, (0, 0)
        if FORM.mask == 1 and EDGES:
            words = load_words(head, col0, start, FORM.columns, FORM.rows)
        if FORM.mask == 2 and EDGES:
            # read as it lies, keys side by side
            across = tl.arange(0, FORM.columns)[None, :]
            values = tl.trans(load_mask(head, start, col0, tl.arange(0, FORM.rows)[:, None], across))
        # Asked for before the tiles, so that they are on their way during the products of the tile before;
        # delta (negative, see above) only where a mask leaves the registers.
        if FORM.plain:  # rows beyond the end get no probability
            first_sum = tl.load(first + line, line < head.q_len, other=float("-inf"))
        else:
            line_lse = tl.load(lse + line, line < head.q_len, other=float("inf"))
        if not LISTED_TILES:
            line_delta = tl.load(delta + line, line < head.q_len, other=0.0)
        q_tile = load_tile(q, start, FORM.rows, FORM, True)
        if FORM.plain:
            # The sum starts at what is added or subtracted, which then holds no separate registers.
            if FORM.mask == 2 and EDGES:
                s = values.to(dk.dtype) * (1.0 / head.scale) + first_sum[None, :]
            else:
                s = tl.broadcast_to(first_sum[None, :], FORM.columns, FORM.rows)
            s = tl.dot(k, tl.trans(q_tile), s, out_dtype=dk.dtype, input_precision=FORM.precision)
        else:
            s = tl.dot(k, tl.trans(q_tile), out_dtype=dk.dtype, input_precision=FORM.precision)
        x, chain = scores(s, values, words, row, col, head, FORM, EDGES, FORM.rows)
        p = tl.exp2(x * (head.scale * LOG2E)) if FORM.plain else tl.exp2(x - line_lse[None, :])
        dout_tile = load_tile(dout, start, FORM.rows, FORM, True)
        if LISTED_TILES:
            line_delta = tl.load(delta + line, line < head.q_len, other=0.0)
        if FORM.dropout:
            keep = dropout_keep(head, row, col)
            rest = 1.0 / (1.0 - head.dropout)
            dropped = tl.where(keep, p * rest, 0.0).to(dout_tile.dtype)
            dp = tl.dot(v, tl.trans(dout_tile), out_dtype=dk.dtype, input_precision=FORM.precision)
            dp = tl.where(keep, dp * rest, 0.0) + line_delta[None, :]
        else:
            dropped = p.to(dout_tile.dtype)
            dp = tl.broadcast_to(line_delta[None, :], FORM.columns, FORM.rows)
            dp = tl.dot(v, tl.trans(dout_tile), dp, out_dtype=dk.dtype, input_precision=FORM.precision)
        dv = tl.dot(dropped, dout_tile, dv, out_dtype=dk.dtype, input_precision=FORM.precision)
        ds = p * dp
        if FORM.softcap:
            ds *= chain
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, out_dtype=dk.dtype, input_precision=FORM.precision)
    return dk, dv


@triton.jit(do_not_specialize=LISTED)
def key_gradient(
    q_ptr, k_ptr, v_ptr, dout_ptr, sums, dk_ptr, dv_ptr, given, list_batch, list_head, list_width, FORM: tl.constexpr
):
    """Gradients of a tile of keys and values, summed over the query heads that share them, in order."""
    tile, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if FORM.mask:
        tile, kv_head, batch = place_in_order(given.order, list_batch, list_head, FORM.group)
    if FORM.varlen:
        tile, batch = packed_tile(tile, given.k_starts, list_batch, FORM.columns)
    q_start, k_start, q_len, k_len = sequence_of(batch, given, FORM)
    col0 = tile * FORM.columns
    if FORM.varlen:  # noqa: SIM102 - one is decided while compiling
        if col0 >= k_len:
            return
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides = given.strides
    dk_rows = rows_of(dk_ptr, dk_strides, batch, kv_head, k_start, k_len, False)
    dv_rows = rows_of(dv_ptr, dv_strides, batch, kv_head, k_start, k_len, False)
    k = rows_of(k_ptr, k_strides, batch, kv_head, k_start, k_len, FORM.tma)
    v = rows_of(v_ptr, v_strides, batch, kv_head, k_start, k_len, FORM.tma)

    WIDE: tl.constexpr = tl.float64 if dk_ptr.dtype.element_ty == tl.float64 else tl.float32  # fp64: interpreter only
    k_values = load_tile(k, col0, FORM.columns, FORM, True)
    v_values = load_tile(v, col0, FORM.columns, FORM, True)
    COLUMNS: tl.constexpr = FORM.columns
    D: tl.constexpr = FORM.width
    dk = tl.zeros([COLUMNS, D], WIDE)
    dv = tl.zeros([COLUMNS, D], WIDE)
    for member in range(FORM.group):
        which = kv_head * FORM.group + member
        place = place_of(given, batch, which, q_start)
        lines = (sums[0] + place, sums[1] + place, sums[2] + place)
        q = rows_of(q_ptr, q_strides, batch, which, q_start, q_len, FORM.tma)
        dout = rows_of(dout_ptr, dout_strides, batch, which, q_start, q_len, FORM.tma)
        heads = tl.num_programs(1) * FORM.group
        head = head_of(batch, which, heads, q_len, k_len, given, FORM)
        items = given.items
        if FORM.mask:
            items, runs = listed_tiles(given, tile, which, batch, list_batch, list_head, list_width)
        else:
            runs = row_tiles(col0, head, FORM)
        for part in tl.static_range(3):
            if FORM.query_runs[part]:
                dk, dv = _walk_queries(
                    dk, dv, k_values, v_values, q, dout, lines, runs[part], items, col0, head, FORM, part != 1
                )
    store_tile(dk_rows, col0, dk * given.numbers.scale, FORM.columns, FORM)
    store_tile(dv_rows, col0, dv, FORM.columns, FORM)
