"""What the attention kernels share on the device: tiles, scores (in units of log2) and who may see whom.

A query i of a sequence stands at position i + offset among the keys; key j is visible where i + offset - left <= j <= i
+ offset + right (each bound optional) and j < k_len.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Numbers that only find a list: a kernel compiled anew for a 0, a 1 or a multiple of 16 among them would be no faster.
LISTED = ("list_batch", "list_head", "list_width")
TOGETHER: tl.constexpr = tl.constexpr(16)  # of a mask, lines of a head that run at a time
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def load_tile(
    source, start, stride, batch, head, length,
    ROWS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(ROWS, D) rows from ``start`` on of a descriptor or a head; zeros beyond ``length`` (if CHECK) and H."""
    if TMA:
        return source.load([batch, head, start, 0]).reshape(ROWS, D)
    else:
        row, d = tl.arange(0, ROWS), tl.arange(0, D)
        at = source + tl.cast(start, tl.int64) * stride + row[:, None] * stride + d[None, :]
        if CHECK:
            return tl.load(at, (row[:, None] + start < length) & (d[None, :] < H), other=0.0)
        elif H != D:
            return tl.load(at, d[None, :] < H, other=0.0)
        else:
            return tl.load(at)


@triton.jit
def store_tile(target, start, stride, length, value, ROWS: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    at = target + tl.cast(start, tl.int64) * stride + row[:, None] * stride + d[None, :]
    tl.store(at, value.to(target.dtype.element_ty), (row[:, None] + start < length) & (d[None, :] < H))


@triton.jit
def load_mask(mask, row0, col0, row, col, stride_row, stride_col, q_len, k_len):
    """The mask's values of rows and columns (from row0 and col0) that broadcast to a tile; zero outside."""
    corner = mask + tl.cast(row0, tl.int64) * stride_row + tl.cast(col0, tl.int64) * stride_col
    return tl.load(corner + (row * stride_row + col * stride_col), (row0 + row < q_len) & (col0 + col < k_len), other=0)


@triton.jit
def widened(values, WIDE: tl.constexpr):
    """``values`` in the type of scores. bf16 two at a time, a shift and a mask: the compiler takes three steps."""
    if INTERPRETED or values.dtype != tl.bfloat16 or tl.float32 != WIDE:
        return values.to(WIDE)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; shl.b32 low, $2, 16; and.b32 high, $2, 0xFFFF0000; "
            "mov.b32 $0, low; mov.b32 $1, high; }",
            "=f,=f,r", [values], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def load_words(bits, outer0, inner0, stride_outer, stride_word, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Two words of 64 bits (OUTER,) of lines from ``outer0`` for INNER bits from ``inner0`` (a multiple of INNER); the
    second is the first where INNER is at most 64.
    """
    tl.static_assert(INNER <= 128)
    at = bits + tl.cast(inner0 // 64, tl.int64) * stride_word + (outer0 + tl.arange(0, OUTER)) * stride_outer
    first = tl.load(at)
    second = first
    if INNER == 128:
        second = tl.load(at + stride_word)
    if INNER < 64:
        first = first >> (inner0 & 63)
        second = first
    return first, second


@triton.jit
def mask_tile(
    mask, row0, start, row, col, stride_row, stride_col, q_len, k_len, MASK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """What ``scores`` wants of a tile of the mask: numbers to add, and words of bits; zeros for what MASK has not."""
    values, first, second = 0.0, 0, 0
    if MASK == 1:
        first, second = load_words(mask, row0, start, stride_row, stride_col, ROWS, COLUMNS)
    elif MASK == 2:
        values = load_mask(mask, row0, start, row - row0, col - start, stride_row, stride_col, q_len, k_len)
    return values, first, second


@triton.jit
def hide(x, first, second, INNER: tl.constexpr):
    """``x`` (OUTER, INNER), -inf where the bits of ``load_words`` are 0.

    A product's thread has columns 8 j + c: shifted by c once a word, a constant bit is tested for each value. Written
    out, because the compiler packs comparisons into words again, bit by bit.
    """
    place = tl.arange(0, INNER)[None, :]
    low = place & 7
    picked = first.to(tl.int32)[:, None] >> low
    if INNER > 32:
        picked = tl.where((place & 32) == 0, picked, (first >> 32).to(tl.int32)[:, None] >> low)
    if INNER > 64:
        other = second.to(tl.int32)[:, None] >> low
        other = tl.where((place & 32) == 0, other, (second >> 32).to(tl.int32)[:, None] >> low)
        picked = tl.where((place & 64) == 0, picked, other)
    bit = 1 << (place & 24)
    if INTERPRETED:
        return tl.where((picked & bit) != 0, x, float("-inf"))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred seen; .reg .b32 met; and.b32 met, $2, $3; "
            "setp.ne.b32 seen, met, 0; selp.f32 $0, $1, 0fFF800000, seen; }",
            "=f,f,r,r", [x, picked, bit], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def place_in_order(order_ptr, list_batch, list_head, GROUP: tl.constexpr):
    """Which (tile, head of the grid, batch) this program takes: the longest lines first, in blocks of TOGETHER lines of
    every head in turn, as programs of one head that run at a time share its keys and values in the L2.
    """
    tiles, heads = tl.num_programs(0), tl.num_programs(1)
    of_all = heads * tl.num_programs(2)
    program = tl.program_id(0) + tiles * (tl.program_id(1) + heads * tl.program_id(2))
    block = program // (TOGETHER * of_all)
    rest = program - block * (TOGETHER * of_all)
    together = tl.minimum(TOGETHER, tiles - block * TOGETHER)
    which = rest // together
    place = block * TOGETHER + rest - which * together
    batch = which // heads
    head = which - batch * heads
    line = (batch * list_batch + head * GROUP * list_head) * tiles + place
    return tl.load(order_ptr + line), head, batch


@triton.jit
def visible(row, col, k_len, offset, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    inside = (col < k_len) & (row >= 0)
    if HAS_RIGHT:
        inside = inside & (col <= row + (offset + right))
    if HAS_LEFT:
        inside = inside & (col >= row + (offset - left))
    return inside


@triton.jit
def scores(
    s, values, first, second, row, col, k_len, offset, left, right, scale, softcap, slope,
    MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    EDGES: tl.constexpr, SCALED: tl.constexpr, ENDS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Products of queries and keys as log2 scores, hidden ones -inf; and the soft cap's derivative.

    ``first``, ``second``: a boolean mask's words; ``values``: an additive one's, which without SCALED are in ``s``
    already, as the caller then multiplies by scale * log2(e) itself. Without ENDS a mask hides what is beyond the keys.
    """
    chain = 1.0
    x = s
    if SOFTCAP:
        turned = 1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * LOG2E * scale / softcap)))  # tanh
        chain = 1.0 - turned * turned
        x = turned * (softcap * LOG2E)
    elif SCALED:
        x = s * (scale * LOG2E)
    if ALIBI:
        x -= tl.abs(row + offset - col).to(s.dtype) * (slope * LOG2E)
    if EDGES:
        if MASK == 1:
            x = hide(x, first, second, INNER)
        if MASK == 2 and SCALED:
            x += values.to(s.dtype) * LOG2E
        if MASK == 0 or ENDS or HAS_LEFT or HAS_RIGHT:
            x = tl.where(visible(row, col, k_len, offset, left, right, HAS_LEFT, HAS_RIGHT), x, float("-inf"))
    return x, chain


@triton.jit
def kept(seed_ptr, head, row, col, dropout):
    """Whether dropout keeps the probability of (row, col) of a head: Philox (SC 2011) counted by position."""
    seed, offset = tl.load(seed_ptr), tl.load(seed_ptr + 1)
    column = (col + row * 0).to(tl.uint32)
    line = (row + col * 0).to(tl.uint32)
    zero = column * 0
    random, _, _, _ = tl.philox(seed, column, line, zero + head.to(tl.uint32), zero + offset.to(tl.uint32))
    return (random >> 8).to(tl.float32) * 5.9604644775390625e-08 >= dropout  # 24 bits, exact in fp32


@triton.jit
def sequence_of(batch, q_starts_ptr, k_starts_ptr, q_length, k_length, VARLEN: tl.constexpr):
    """First query, first key (int64) and numbers of queries and keys of a sequence."""
    q_start, k_start = batch.to(tl.int64) * 0, batch.to(tl.int64) * 0
    q_len, k_len = q_length, k_length
    if VARLEN:
        q_start, k_start = tl.load(q_starts_ptr + batch).to(tl.int64), tl.load(k_starts_ptr + batch).to(tl.int64)
        q_len = (tl.load(q_starts_ptr + batch + 1) - q_start).to(tl.int32)
        k_len = (tl.load(k_starts_ptr + batch + 1) - k_start).to(tl.int32)
    return q_start, k_start, q_len, k_len


# Three runs of tiles, as their begins and their ends: on the first edge, whole, and on the others.


@triton.jit
def listed_tiles(items_ptr, counts_ptr, line, list_width):
    """A line of a ``TileLists``: its items, and runs of tiles (the first is empty, the last is of places in items)."""
    items = items_ptr + tl.cast(line, tl.int64) * list_width
    run = tl.load(counts_ptr + line * 2)
    whole_first = tl.load(items)
    end = run + tl.load(counts_ptr + line * 2 + 1)
    return items, (0, whole_first, run), (0, whole_first + run, end)


@triton.jit
def column_tiles(
    row0, k_len, offset, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tiles of keys that rows from ``row0`` see."""
    first, end = 0, tl.cdiv(k_len, COLUMNS)
    whole_first, whole_end = 0, k_len // COLUMNS
    if HAS_LEFT:
        first = tl.maximum(row0 + offset - left, 0) // COLUMNS
        whole_first = tl.cdiv(tl.maximum(row0 + ROWS - 1 + offset - left, 0), COLUMNS)
    if HAS_RIGHT:
        end = tl.minimum(end, tl.cdiv(tl.maximum(row0 + ROWS + offset + right, 0), COLUMNS))
        whole_end = tl.minimum(whole_end, tl.maximum(row0 + offset + right + 1, 0) // COLUMNS)
    end = tl.maximum(end, first)
    whole_first = tl.minimum(tl.maximum(whole_first, first), end)
    whole_end = tl.minimum(tl.maximum(whole_end, whole_first), end)
    return (first, whole_first, whole_end), (whole_first, whole_end, end)


@triton.jit
def row_tiles(
    col0, q_len, offset, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tiles of queries that see columns from ``col0``."""
    first, end = 0, tl.cdiv(q_len, ROWS)
    whole_first, whole_end = first, end
    if HAS_RIGHT:
        first = tl.maximum(col0 - offset - right, 0) // ROWS
        whole_first = tl.cdiv(tl.maximum(col0 + COLUMNS - 1 - offset - right, 0), ROWS)
    if HAS_LEFT:
        end = tl.minimum(end, tl.cdiv(tl.maximum(col0 + COLUMNS - offset + left, 0), ROWS))
        last = tl.maximum(col0 - offset + left + 1, 0)  # first row that no longer sees all of them
        whole_end = tl.where(last >= q_len, end, tl.minimum(end, last // ROWS))
    end = tl.maximum(end, first)
    whole_first = tl.minimum(tl.maximum(whole_first, first), end)
    whole_end = tl.minimum(tl.maximum(whole_end, whole_first), end)
    return (first, whole_first, whole_end), (whole_first, whole_end, end)
