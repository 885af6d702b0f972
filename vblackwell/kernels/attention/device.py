"""What the attention kernels share on the device: tiles, scores (in units of log2) and who may see whom.

A query i of a sequence stands at position i + offset among the keys; key j is visible where i + offset - left <= j <= i
+ offset + right (each bound optional) and j < k_len. What a kernel is compiled for comes as one `Form`, and what a
program knows of its head is one `Head`: Triton takes named tuples apart, so neither costs an instruction.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Numbers that only find a list: a kernel compiled anew for a 0, a 1 or a multiple of 16 among them would be no faster.
LISTED = ("list_batch", "list_head", "list_width")
BLOCK_LINES: tl.constexpr = tl.constexpr(16)  # of a mask, lines of a head that run at a time
STARTS_AT_ONCE: tl.constexpr = tl.constexpr(128)  # of packed sequences, that a program loads to find its own
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


class Form(NamedTuple):
    """What a kernel is compiled for."""

    mask: int  # 0 none, 1 boolean, in bits, 2 additive
    has_left: bool
    has_right: bool
    bottom_right: bool
    softcap: bool
    alibi: bool
    dropout: bool
    varlen: bool
    group: int  # query heads that share a key head
    head: int
    width: int  # ``head`` padded
    rows: int  # queries of a tile
    columns: int  # keys of a tile
    precision: str  # of products: 'ieee' or 'tf32'
    stages: int  # of hopper.py's rings, or of the loops
    tma: bool  # tiles come by tensor descriptors
    ends: bool  # a mask's tiles may have visible places beyond the last key
    even: bool  # no tile of keys reaches beyond the last one
    paged: bool = False  # keys lie in pages, and rows of a tile are the query heads of a group, query after query
    page: int = 0  # keys of a page, where a tile may take several; 0: a tile lies in one
    chunk: int = 0  # tiles of keys that are added up on their own and then merged; 0: all

    @property
    def queries(self) -> int:
        """Most queries that a tile has rows of, from its first on."""
        return (self.rows + self.group - 2) // self.group + 1 if self.paged else self.rows

    @property
    def plain(self) -> bool:
        """Whether scores are products times the scale, so that exponentials can take them as they are."""
        return not self.softcap and not self.alibi

    @property
    def key_runs(self) -> tuple[bool, bool, bool]:
        """Which of the runs of `column_tiles` or `listed_tiles` can have tiles."""
        masked = self.mask != 0
        return self.has_left and not masked, True, masked or self.has_left or self.has_right or not self.even

    @property
    def query_runs(self) -> tuple[bool, bool, bool]:
        """Which of the runs of `row_tiles` or `listed_tiles` can; rows beyond the last get no probability."""
        masked = self.mask != 0
        return self.has_right and not masked, True, masked or self.has_left


# What programs are given in addition to tensors. Addresses of what only some calls have (another tensor stands in where
# there is none): a mask and its `blocks.TileLists`, ALiBi's slopes, the dropout's seed, where packed sequences begin.
# Of each tensor the strides of batch, head and row; then those of log-sum-exps and of the mask; and `Numbers`.
Given = namedtuple(
    "Given", "mask items counts order slopes seed q_starts k_starts strides lse_strides mask_strides numbers"
)
Numbers = namedtuple("Numbers", "q_length k_length left right scale softcap dropout")
# Rows of one head, by address or by the descriptor of all heads.
Rows = namedtuple("Rows", "source stride batch head length")
# Where a request's keys lie: the page of each ``size`` positions, and the stride of pages.
Pages = namedtuple("Pages", "table size stride")
# What a program knows of the head that it works on; the last two are strides.
Head = namedtuple(
    "Head", "q_len k_len offset left right scale softcap slope seed dropout dropout_head mask mask_row mask_col"
)


@triton.jit
def sequence_of(batch, given, FORM: tl.constexpr):
    """First query, first key (int64) and numbers of queries and keys of a sequence."""
    q_start, k_start = batch.to(tl.int64) * 0, batch.to(tl.int64) * 0
    q_len, k_len = given.numbers.q_length, given.numbers.k_length
    if FORM.varlen:
        q_start = tl.load(given.q_starts + batch).to(tl.int64)
        k_start = tl.load(given.k_starts + batch).to(tl.int64)
        q_len = (tl.load(given.q_starts + batch + 1) - q_start).to(tl.int32)
        k_len = (tl.load(given.k_starts + batch + 1) - k_start).to(tl.int32)
    return q_start, k_start, q_len, k_len


@triton.jit
def head_of(batch, head, heads, q_len, k_len, given, FORM: tl.constexpr):
    """The `Head` of query head ``head`` of ``heads``."""
    offset = k_len - q_len if FORM.bottom_right else 0
    slope = tl.load(given.slopes + head) if FORM.alibi else 0.0
    mask, mask_strides = given.mask, given.mask_strides
    if FORM.mask:
        mask += tl.cast(batch, tl.int64) * mask_strides[0] + tl.cast(head, tl.int64) * mask_strides[1]
    _, _, left, right, scale, softcap, dropout = given.numbers
    return Head(
        q_len,
        k_len,
        offset,
        left,
        right,
        scale,
        softcap,
        slope,
        given.seed,
        dropout,
        batch * heads + head,
        mask,
        mask_strides[2],
        mask_strides[3],
    )


@triton.jit
def rows_of(source, strides, batch, head, start, length, TMA: tl.constexpr):
    """`Rows` of a head from ``start`` on: batch strides are zero with variable lengths, and starts are zero without."""
    if not TMA:
        source += tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1] + start * strides[2]
    return Rows(source, strides[2], batch, head, length)


@triton.jit
def place_of(given, batch, head, start):
    """Where a head's rows begin among numbers that are one a row."""
    strides = given.lse_strides
    return tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1] + start


@triton.jit
def load_rows(rows, start, COUNT: tl.constexpr, FORM: tl.constexpr, CHECK: tl.constexpr):
    """(COUNT, width) from ``start`` on, by address; zeros beyond the length (if CHECK) and the head."""
    row, d = tl.arange(0, COUNT), tl.arange(0, FORM.width)
    at = rows.source + tl.cast(start, tl.int64) * rows.stride + row[:, None] * rows.stride + d[None, :]
    if CHECK:
        return tl.load(at, (row[:, None] + start < rows.length) & (d[None, :] < FORM.head), other=0.0)
    elif FORM.head != FORM.width:
        return tl.load(at, d[None, :] < FORM.head, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_tile(rows, start, COUNT: tl.constexpr, FORM: tl.constexpr, CHECK: tl.constexpr):
    """`load_rows`, or the same by the descriptor."""
    if FORM.tma:
        return rows.source.load([rows.batch, rows.head, start, 0]).reshape(COUNT, FORM.width)
    else:
        return load_rows(rows, start, COUNT, FORM, CHECK)


@triton.jit
def paged_rows(rows, pages, start, FORM: tl.constexpr):
    """``rows``, for a tile of keys from ``start`` on, at the addresses of the pages that have them."""
    position, size = start, pages.size
    if FORM.page:
        position, size = (start + tl.arange(0, FORM.columns))[:, None], FORM.page
    page = tl.load(pages.table + position // size, position < rows.length, other=0)
    step = tl.cast(position % size, tl.int64) - position
    source = rows.source + (page.to(tl.int64) * pages.stride + step * rows.stride)
    return Rows(source, rows.stride, rows.batch, rows.head, rows.length)


@triton.jit
def store_tile(rows, start, value, COUNT: tl.constexpr, FORM: tl.constexpr):
    row, d = tl.arange(0, COUNT), tl.arange(0, FORM.width)
    at = rows.source + tl.cast(start, tl.int64) * rows.stride + row[:, None] * rows.stride + d[None, :]
    inside = (row[:, None] + start < rows.length) & (d[None, :] < FORM.head)
    tl.store(at, value.to(rows.source.dtype.element_ty), inside)


@triton.jit
def load_mask(head, row0, col0, row, col):
    """The mask's values of rows and columns (from row0 and col0) that broadcast to a tile; zero outside."""
    corner = head.mask + tl.cast(row0, tl.int64) * head.mask_row + tl.cast(col0, tl.int64) * head.mask_col
    inside = (row0 + row < head.q_len) & (col0 + col < head.k_len)
    return tl.load(corner + (row * head.mask_row + col * head.mask_col), inside, other=0)


@triton.jit
def widened(values, WIDE: tl.constexpr):
    """``values`` in the type of scores. bf16 two at a time, a shift and a mask: the compiler takes three steps."""
    if INTERPRETED or values.dtype != tl.bfloat16 or tl.float32 != WIDE:
        return values.to(WIDE)
    else:
        code: tl.constexpr = """{ .reg .b32 low, high; shl.b32 low, $2, 16; and.b32 high, $2, 0xFFFF0000;
            mov.b32 $0, low; mov.b32 $1, high; }"""
        return tl.inline_asm_elementwise(code, "=f,=f,r", [values], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def load_words(head, outer0, inner0, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Two words of 64 bits (OUTER,) of lines from ``outer0`` for INNER bits from ``inner0`` (a multiple of INNER); the
    second is the first where INNER is at most 64.
    """
    tl.static_assert(INNER <= 128)
    at = head.mask + tl.cast(inner0 // 64, tl.int64) * head.mask_col + (outer0 + tl.arange(0, OUTER)) * head.mask_row
    first = tl.load(at)
    second = first
    if INNER == 128:
        second = tl.load(at + head.mask_col)
    if INNER < 64:
        first = first >> (inner0 & 63)
        second = first
    return first, second


@triton.jit
def mask_tile(head, row0, start, row, col, FORM: tl.constexpr, EDGES: tl.constexpr):
    """What ``scores`` wants of a tile of the mask: numbers to add, and words of bits; zeros for what it has not."""
    values, first, second = 0.0, 0, 0
    if FORM.mask == 1 and EDGES:
        first, second = load_words(head, row0, start, FORM.rows, FORM.columns)
    elif FORM.mask == 2 and EDGES:
        values = load_mask(head, row0, start, row - row0, col - start)
    return values, (first, second)


@triton.jit
def apply_bitmask(x, words, INNER: tl.constexpr):
    """``x`` (OUTER, INNER), -inf where the bits of ``load_words`` are 0.

    A product's thread has columns 8 j + c: shifted by c once a word, a constant bit is tested for each value. Written
    out, because the compiler packs comparisons into words again, bit by bit.
    """
    first, second = words
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
        code: tl.constexpr = """{ .reg .pred seen; .reg .b32 met; and.b32 met, $2, $3;
            setp.ne.b32 seen, met, 0; selp.f32 $0, $1, 0fFF800000, seen; }"""
        return tl.inline_asm_elementwise(code, "=f,f,r,r", [x, picked, bit], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def place_in_order(order_ptr, list_batch, list_head, GROUP: tl.constexpr):
    """Which (tile, head of the grid, batch) this program takes: the longest lines first, in blocks of BLOCK_LINES lines
    of every head in turn, as programs of one head that run at a time share its keys and values in the L2.
    """
    tiles, heads = tl.num_programs(0), tl.num_programs(1)
    of_all = heads * tl.num_programs(2)
    program = tl.program_id(0) + tiles * (tl.program_id(1) + heads * tl.program_id(2))
    block = program // (BLOCK_LINES * of_all)
    rest = program - block * (BLOCK_LINES * of_all)
    lines = tl.minimum(BLOCK_LINES, tiles - block * BLOCK_LINES)
    which = rest // lines
    place = block * BLOCK_LINES + rest - which * lines
    batch = which // heads
    head = which - batch * heads
    line = (batch * list_batch + head * GROUP * list_head) * tiles + place
    return tl.load(order_ptr + line), head, batch


@triton.jit
def packed_tile(place, starts, count, SIZE: tl.constexpr):
    """The tile that is at ``place``, and which of ``count`` packed sequences it is of: sequence i has the places from
    starts[i] // SIZE + i on, at least one, and so at most one more than it has tiles.
    """
    passed = 0
    for first in range(0, count, STARTS_AT_ONCE):
        index = first + tl.arange(0, STARTS_AT_ONCE)
        begins = tl.load(starts + index, index < count, other=0) // SIZE + index
        passed += tl.sum(((begins <= place) & (index < count)).to(tl.int32), 0)
    sequence = passed - 1
    return place - tl.load(starts + sequence) // SIZE - sequence, sequence


@triton.jit
def query_tile(given, list_batch, list_head, FORM: tl.constexpr):
    """Which (tile, head, batch) a program over queries takes: the longest walks first."""
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if FORM.mask:
        tile, head, batch = place_in_order(given.order, list_batch, list_head, 1)
    elif FORM.has_right:
        tile = tl.num_programs(0) - 1 - tile
    if FORM.varlen:
        tile, batch = packed_tile(tile, given.q_starts, list_batch, FORM.rows)
    return tile, head, batch


@triton.jit
def visible(row, col, head, FORM: tl.constexpr):
    inside = (col < head.k_len) & (row >= 0)
    if FORM.has_right:
        inside = inside & (col <= row + (head.offset + head.right))
    if FORM.has_left:
        inside = inside & (col >= row + (head.offset - head.left))
    return inside


@triton.jit
def scores(s, values, words, row, col, head, FORM: tl.constexpr, EDGES: tl.constexpr, INNER: tl.constexpr):
    """Products of queries and keys as log2 scores, hidden ones -inf; and the soft cap's derivative.

    ``words``: a boolean mask's; ``values``: an additive one's, which are in the products of a plain form already, as
    the caller then multiplies by scale * log2(e) itself. Unless the form's mask ends there it hides what is beyond the
    keys.
    """
    chain = 1.0
    x = s
    if FORM.softcap:
        turned = 1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * LOG2E * head.scale / head.softcap)))  # tanh
        chain = 1.0 - turned * turned
        x = turned * (head.softcap * LOG2E)
    elif not FORM.plain:
        x = s * (head.scale * LOG2E)
    if FORM.alibi:
        x -= tl.abs(row + head.offset - col).to(s.dtype) * (head.slope * LOG2E)
    if EDGES:
        if FORM.mask == 1:
            x = apply_bitmask(x, words, INNER)
        if FORM.mask == 2 and not FORM.plain:
            x += values.to(s.dtype) * LOG2E
        if FORM.mask == 0 or FORM.ends or FORM.has_left or FORM.has_right:
            x = tl.where(visible(row, col, head, FORM), x, float("-inf"))
    return x, chain


@triton.jit
def dropout_keep(head, row, col):
    """Whether dropout keeps the probability of (row, col) of a head: Philox (SC 2011) counted by position."""
    seed, offset = tl.load(head.seed), tl.load(head.seed + 1)
    column = (col + row * 0).to(tl.uint32)
    line = (row + col * 0).to(tl.uint32)
    zero = column * 0
    random, _, _, _ = tl.philox(seed, column, line, zero + head.dropout_head.to(tl.uint32), zero + offset.to(tl.uint32))
    return (random >> 8).to(tl.float32) * 5.9604644775390625e-08 >= head.dropout  # 24 bits, exact in fp32


# Three runs of tiles, each its begin and end: on the first edge, whole, and on the others.


@triton.jit
def listed_tiles(given, tile, head, batch, list_batch, list_head, list_width):
    """A line of a ``TileLists``: its items, and runs of tiles (the first is empty, the last is of places in items)."""
    line = (batch * list_batch + head * list_head) * tl.num_programs(0) + tile
    items = given.items + tl.cast(line, tl.int64) * list_width
    run = tl.load(given.counts + line * 2)
    whole_first = tl.load(items)
    end = run + tl.load(given.counts + line * 2 + 1)
    return items, ((0, 0), (whole_first, whole_first + run), (run, end))


@triton.jit
def column_tiles(row0, head, FORM: tl.constexpr):
    """Tiles of keys that rows from ``row0`` see."""
    first, end = 0, tl.cdiv(head.k_len, FORM.columns)
    whole_first, whole_end = 0, head.k_len // FORM.columns
    if FORM.has_left:
        first = tl.maximum(row0 + head.offset - head.left, 0) // FORM.columns
        whole_first = tl.cdiv(tl.maximum(row0 + FORM.queries - 1 + head.offset - head.left, 0), FORM.columns)
    if FORM.has_right:
        end = tl.minimum(end, tl.cdiv(tl.maximum(row0 + FORM.queries + head.offset + head.right, 0), FORM.columns))
        whole_end = tl.minimum(whole_end, tl.maximum(row0 + head.offset + head.right + 1, 0) // FORM.columns)
    return _runs(first, whole_first, whole_end, end)


@triton.jit
def row_tiles(col0, head, FORM: tl.constexpr):
    """Tiles of queries that see columns from ``col0``."""
    first, end = 0, tl.cdiv(head.q_len, FORM.rows)
    whole_first, whole_end = first, end
    if FORM.has_right:
        first = tl.maximum(col0 - head.offset - head.right, 0) // FORM.rows
        whole_first = tl.cdiv(tl.maximum(col0 + FORM.columns - 1 - head.offset - head.right, 0), FORM.rows)
    if FORM.has_left:
        end = tl.minimum(end, tl.cdiv(tl.maximum(col0 + FORM.columns - head.offset + head.left, 0), FORM.rows))
        last = tl.maximum(col0 - head.offset + head.left + 1, 0)  # first row that no longer sees all of them
        whole_end = tl.where(last >= head.q_len, end, tl.minimum(end, last // FORM.rows))
    return _runs(first, whole_first, whole_end, end)


@triton.jit
def _runs(first, whole_first, whole_end, end):
    end = tl.maximum(end, first)
    whole_first = tl.minimum(tl.maximum(whole_first, first), end)
    whole_end = tl.minimum(tl.maximum(whole_end, whole_first), end)
    return (first, whole_first), (whole_first, whole_end), (whole_end, end)
