"""Forward kernel of op.py: Flash Attention 2 with an online softmax in base 2 (Dao, arXiv:2307.08691).

A program takes a tile of queries of one head and walks over the tiles of keys that they see. Tiles that all its rows
see whole need no comparison; tiles on an edge (diagonal, window, end of the keys) are walked apart. With a mask the
tiles come from a list (blocks.py) that leaves the empty ones out.
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
    load_tile,
    mask_tile,
    paged_rows,
    place_of,
    query_tile,
    rows_of,
    scores,
    sequence_of,
    store_tile,
    widened,
)


@triton.jit
def merged(sums, tops, masses, acc, top, total):
    """Two parts of the keys in one: sums of values, top scores and sums of weights; exact where one saw nothing."""
    higher = tl.maximum(tops, top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2(tops - base), tl.exp2(top - base)
    # fma, which the compiler might use in one kernel and not in another
    return tl.fma(sums, old[:, None], acc * new[:, None]), higher, tl.fma(masses, old, total * new)


@triton.jit
def walk(acc, top, total, earlier, q, k, v, run, items, row0, head, FORM: tl.constexpr, EDGES: tl.constexpr):
    """Weighted sum of values, top scores and sums of weights after the tiles of ``run``, and of chunks ``earlier`` than
    the last where the form has chunks; ``items``: of a mask's list, or `Pages`."""
    begin, end = run
    row = (row0 + tl.arange(0, FORM.rows))[:, None]
    if FORM.paged:
        row = row // FORM.group
    LISTED_TILES: tl.constexpr = FORM.mask != 0 and EDGES
    tile = 0
    if LISTED_TILES:
        tile = tl.load(items + begin)
    for index in tl.range(begin, end):
        if LISTED_TILES:
            start = tile * FORM.columns
            tile = tl.load(items + index + 1)  # the list has a spare entry
        else:
            start = index * FORM.columns
        if FORM.chunk:  # noqa: SIM102 - one is decided while compiling
            if index % FORM.chunk == 0:  # nothing to merge yet is merged exactly
                sums, tops, masses = earlier
                earlier = merged(sums, tops, masses, acc, top, total)
                acc = tl.zeros(acc.shape, acc.dtype)
                top = tl.full(top.shape, float("-inf"), top.dtype)
                total = tl.zeros(total.shape, total.dtype)
        col = (start + tl.arange(0, FORM.columns))[None, :]
        values, words = mask_tile(head, row0, start, row, col, FORM, EDGES)
        k_rows, v_rows = k, v
        if FORM.paged:
            k_rows, v_rows = paged_rows(k, items, start, FORM), paged_rows(v, items, start, FORM)
        k_tile = load_tile(k_rows, start, FORM.columns, FORM, EDGES)
        s = tl.dot(q, tl.trans(k_tile), out_dtype=acc.dtype, input_precision=FORM.precision)
        if FORM.plain and FORM.mask == 2 and EDGES:
            # Not a plain sum: it would become the product's start, whose loads are not fetched ahead.
            s = tl.fma(widened(values, acc.dtype), 1.0 / head.scale, s)
        x, _ = scores(s, values, words, row, col, head, FORM, EDGES, FORM.columns)
        factor = head.scale * LOG2E if FORM.plain else 1.0
        new_top = tl.maximum(top, tl.max(x, 1) * factor)
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if EDGES else new_top  # rows that see nothing yet
        p = tl.exp2(x * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if FORM.dropout:
            p = tl.where(dropout_keep(head, row, col), p, 0.0)
        v_tile = load_tile(v_rows, start, FORM.columns, FORM, EDGES)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, out_dtype=acc.dtype, input_precision=FORM.precision)
        top = new_top
    return acc, top, total, earlier


@triton.jit(do_not_specialize=LISTED)
def attend(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, given, list_batch, list_head, list_width, FORM: tl.constexpr):
    tile, which, batch = query_tile(given, list_batch, list_head, FORM)
    kv_head = which // FORM.group
    q_start, k_start, q_len, k_len = sequence_of(batch, given, FORM)
    row0 = tile * FORM.rows
    if FORM.varlen:  # noqa: SIM102 - one is decided while compiling
        if row0 >= q_len:
            return
    q_strides, k_strides, v_strides, out_strides = given.strides
    q = rows_of(q_ptr, q_strides, batch, which, q_start, q_len, FORM.tma)
    k = rows_of(k_ptr, k_strides, batch, kv_head, k_start, k_len, FORM.tma)
    v = rows_of(v_ptr, v_strides, batch, kv_head, k_start, k_len, FORM.tma)
    out = rows_of(out_ptr, out_strides, batch, which, q_start, q_len, False)
    lse = lse_ptr + place_of(given, batch, which, q_start)
    head = head_of(batch, which, tl.num_programs(1), q_len, k_len, given, FORM)

    WIDE: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32  # fp64: interpreter only
    if not FORM.mask:
        q_values = load_tile(q, row0, FORM.rows, FORM, True)
    ROWS: tl.constexpr = FORM.rows
    D: tl.constexpr = FORM.width
    acc = tl.zeros([ROWS, D], WIDE)
    top = tl.full([ROWS], float("-inf"), WIDE)
    total = tl.zeros([ROWS], WIDE)
    items = given.items
    if FORM.mask:
        items, runs = listed_tiles(given, tile, which, batch, list_batch, list_head, list_width)
        # It is waited for; the numbers above are under way meanwhile.
        q_values = load_tile(q, row0, FORM.rows, FORM, True)
    else:
        runs = column_tiles(row0, head, FORM)
    for part in tl.static_range(3):
        if FORM.key_runs[part]:
            acc, top, total, _ = walk(
                acc, top, total, (), q_values, k, v, runs[part], items, row0, head, FORM, part != 1
            )

    empty = total == 0.0
    rest = 1.0 / (1.0 - head.dropout) if FORM.dropout else 1.0
    store_tile(out, row0, acc * (rest / tl.where(empty, 1.0, total))[:, None], FORM.rows, FORM)
    row = row0 + tl.arange(0, FORM.rows)
    # +inf for rows that see nothing: backward's probabilities exp2(score - inf) are zero
    tl.store(lse + row, tl.where(empty, float("inf"), top + tl.log2(tl.where(empty, 1.0, total))), row < q_len)
