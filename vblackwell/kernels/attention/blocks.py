"""Which tiles of a mask are worth visiting, and a boolean mask in bits: made on the GPU before the kernels that read
it. Broadcast dimensions are never expanded.

``pack_bits`` writes words of 64 keys a query and, for the gradients of keys, of 64 queries a key. ``judge_bits``
(``judge_values`` of an additive mask) calls a tile empty, whole (all see all; an additive mask is zero there) or
partial, bounds counted in. ``collect_tiles`` lists the tiles of each line and ``order_lines`` sorts the lines.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from collections import namedtuple
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.attention.device import load_mask, load_words, visible
from vblackwell.kernels.runtime.triton_launch import layout, queue

WORD = 64
# Words lie side by side by query (or key), in blocks of this many, so that a tile's loads need no separate check.
PADDING = 256
CHUNK = 64
# A mask of one head and its strides, as `load_mask` and `load_words` read it.
Plane = namedtuple("Plane", "mask mask_row mask_col q_len k_len")
Judged = namedtuple("Judged", "has_left has_right rows columns")


class Bounds(NamedTuple):
    """Who may see whom, as device.py says."""

    q_len: int
    k_len: int
    offset: int
    left: int | None
    right: int | None


class MaskBits(NamedTuple):
    """A boolean mask in bits, int64 words; 1 where a dimension is broadcast.

    Attributes:
        by_query: (1 or B, 1 or N, words of 64 keys, queries). Bits beyond the last key are zero unless the mask is
            broadcast along the keys.
        by_key: (1 or B, 1 or N, words of 64 queries, keys), or None where it was not asked for.
    """

    by_query: Tensor
    by_key: Tensor | None


class TileLists(NamedTuple):
    """Lists of tiles; the line of (batch, head, tile) is (batch * list_batch + head * list_head) * tiles + tile.

    Attributes:
        items: (lines, tiles + 1) int32: the longest run of whole tiles, then the others, ascending; the last is spare.
        counts: (lines, 2) int32, how many are in that run and how many after it.
        order: (lines,) int32: of each batch and head, its lines from the longest to the shortest.
    """

    items: Tensor
    counts: Tensor
    order: Tensor
    list_batch: int
    list_head: int

    @property
    def places(self) -> tuple[int, int, int]:
        """What finds a line: the steps of batches and heads, and the items of a line."""
        return self.list_batch, self.list_head, self.items.shape[1]


@triton.jit
def pack_bits(
    mask_ptr, by_query_ptr, by_key_ptr, strides, heads, rows, cols, query_steps, key_steps, WITH_KEYS: tl.constexpr
):
    """A tile of 64 x 64; of a dimension whose own size is 1, with steps of 0, all 64 are the same. Steps are those of a
    line, a word and a plane.
    """
    query_step, query_word, query_plane = query_steps
    key_step, key_word, key_plane = key_steps
    which = tl.program_id(2).to(tl.int64)
    row0, col0 = tl.program_id(1) * 64, tl.program_id(0) * 64
    row, col = tl.arange(0, 64), tl.arange(0, 64)
    corner = mask_ptr + which // heads * strides[0] + which % heads * strides[1]
    corner += row0.to(tl.int64) * strides[2] + col0.to(tl.int64) * strides[3]
    inside = ((row0 + row < rows) | (rows == 1))[:, None] & ((col0 + col < cols) | (cols == 1))[None, :]
    values = tl.load(corner + row[:, None] * strides[2] + col[None, :] * strides[3], inside, other=0)
    # Bits of four keys in one number, a byte each, so that a quarter as many are added up between threads.
    bit = (values != 0).to(tl.uint32)
    four = tl.sum((bit << (8 * (col & 3)).to(tl.uint32)[None, :]).reshape(64, 16, 4), 2).to(tl.uint32)
    quad, half = tl.arange(0, 16), tl.arange(0, 2)
    # One product puts the four side by side at the top; eight such make half a word, without carries. Of a broadcast
    # dimension every program writes the same.
    nibble = tl.mul(four, 0x10204080, sanitize_overflow=False) >> 28
    words = tl.sum((nibble << ((quad & 7) * 4).to(tl.uint32)[None, :]).reshape(64, 2, 8), 2).to(tl.uint32)
    at = which * query_plane + tl.program_id(0).to(tl.int64) * query_word + (row0 + row) * query_step
    tl.store(
        by_query_ptr + at[:, None] * 2 + half[None, :],
        words.to(tl.int32, bitcast=True),
        (row[:, None] + half[None, :] * 0 == 0) | (query_step > 0),
    )
    if WITH_KEYS:
        # Eight queries make a byte of each of the four keys, and eight such bytes a word of a key.
        eight = tl.sum((four << (row & 7).to(tl.uint32)[:, None]).reshape(8, 8, 16), 1).to(tl.uint32)
        byte, member = tl.arange(0, 8)[:, None, None], tl.arange(0, 4)[None, None, :]
        bits = (eight[:, :, None] >> (8 * member).to(tl.uint32)).to(tl.uint8)
        key = quad[None, :, None] * 4 + member
        at = which * key_plane + tl.program_id(1).to(tl.int64) * key_word + (col0 + key) * key_step
        tl.store(by_key_ptr.to(tl.pointer_type(tl.uint8)) + at * 8 + byte, bits, (key + byte * 0 == 0) | (key_step > 0))


@triton.jit
def judge_bits(bits_ptr, state_ptr, strides, heads, bounds, FORM: tl.constexpr):
    """Bounds are compared for the tile as one: where they cut it, it is partial if the mask has anything in it."""
    k_tile, q_tile, which = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    bits = bits_ptr + which // heads * strides[0] + which % heads * strides[1]
    plane = Plane(bits, strides[3], strides[2], bounds.q_len, bounds.k_len)
    row0, col0 = q_tile * FORM.rows, k_tile * FORM.columns
    first, second = load_words(plane, row0, col0, FORM.rows, FORM.columns)
    FULL: tl.constexpr = -1 if FORM.columns >= 64 else (1 << FORM.columns) - 1
    first &= FULL
    second &= FULL
    outside = row0 + tl.arange(0, FORM.rows) >= bounds.q_len  # such rows are nobody's concern
    some = ((first | second) != 0) & (outside == 0)
    full = ((first == FULL) & (second == FULL)) | outside
    row_last, col_last = tl.minimum(row0 + FORM.rows, bounds.q_len) - 1, col0 + FORM.columns - 1
    whole = (tl.min(full.to(tl.int32), 0) == 1) & (col_last < bounds.k_len)
    seen = tl.max(some.to(tl.int32), 0) == 1
    if FORM.has_right:
        whole = whole & (col_last <= row0 + bounds.offset + bounds.right)
        seen = seen & (col0 <= row_last + bounds.offset + bounds.right)
    if FORM.has_left:
        whole = whole & (col0 >= row_last + bounds.offset - bounds.left)
        seen = seen & (col_last >= row0 + bounds.offset - bounds.left)
    state = tl.where(seen, tl.where(whole, 2, 1), 0)
    at = (which * tl.num_programs(1) + q_tile) * tl.num_programs(0) + k_tile
    tl.store(state_ptr + at, state.to(tl.int8))


@triton.jit
def judge_values(mask_ptr, state_ptr, strides, heads, bounds, FORM: tl.constexpr):
    k_tile, q_tile, which = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    mask = mask_ptr + which // heads * strides[0] + which % heads * strides[1]
    plane = Plane(mask, strides[2], strides[3], bounds.q_len, bounds.k_len)
    row = (q_tile * FORM.rows + tl.arange(0, FORM.rows))[:, None]
    col = (k_tile * FORM.columns + tl.arange(0, FORM.columns))[None, :]
    row0, col0 = q_tile * FORM.rows, k_tile * FORM.columns
    values = load_mask(plane, row0, col0, row - row0, col - col0)
    inside = visible(row, col, bounds, FORM)
    some = inside & (values != float("-inf")) & (row < bounds.q_len)
    plain = (inside & (values == 0)) | (row >= bounds.q_len)
    any_some = tl.max(tl.max(some.to(tl.int32), 1), 0)
    all_plain = tl.min(tl.min(plain.to(tl.int32), 1), 0)
    state = tl.where(all_plain == 1, 2, any_some)
    at = (which * tl.num_programs(1) + q_tile) * tl.num_programs(0) + k_tile
    tl.store(state_ptr + at, state.to(tl.int8))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def collect_tiles(state_ptr, items_ptr, counts_ptr, stride_which, stride_line, stride_tile, tiles, BLOCK: tl.constexpr):
    """The longest run of whole tiles (of equals the first), then the partial ones, and what is whole elsewhere."""
    line, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    state = tl.load(state_ptr + which * stride_which + line * stride_line + tile * stride_tile, tile < tiles, other=0)
    gap = tl.associative_scan(tl.where(state == 2, -1, tile), 0, _larger)  # the last tile up to here that is not whole
    length = tile - gap
    num_whole = tl.max(length, 0)
    last = tl.min(tl.where(length == num_whole, tile, BLOCK), 0)
    run = (tile <= last) & (tile > last - num_whole)
    listed = (state > 0) & (run == 0)
    place = tl.where(run, tile - (last - num_whole + 1), num_whole + tl.cumsum(listed.to(tl.int32), 0) - 1)
    at = which * tl.num_programs(0) + line
    items = items_ptr + at * (tiles + 1)
    tl.store(items + place, tile, state > 0)
    num_listed = num_whole + tl.sum(listed.to(tl.int32), 0)
    tl.store(items + tile, tile * 0, (tile >= num_listed) & (tile <= tiles))
    tl.store(counts_ptr + at * 2, num_whole)
    tl.store(counts_ptr + at * 2 + 1, num_listed - num_whole)


@triton.jit
def order_lines(counts_ptr, order_ptr, lines, CHUNK: tl.constexpr):
    """Each line's rank by length, longest first and of equals the first first: a count of those before it."""
    base = tl.program_id(1).to(tl.int64) * lines
    line = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    counts = counts_ptr + base * 2
    length = tl.load(counts + line * 2, line < lines, other=0) + tl.load(counts + line * 2 + 1, line < lines, other=0)
    rank = tl.zeros([CHUNK], tl.int32)
    for start in range(0, lines, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(counts + other * 2, other < lines, other=0)
        theirs += tl.load(counts + other * 2 + 1, other < lines, other=0)
        before = (theirs[None, :] > length[:, None]) | (
            (theirs[None, :] == length[:, None]) & (other[None, :] < line[:, None])
        )
        rank += tl.sum((before & (other < lines)[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + base + rank, line, line < lines)


def bits_of(mask: Tensor, with_keys: bool) -> MaskBits:
    """``mask``, (1 or B, 1 or N, S or 1, T or 1) uint8 of any strides, in bits."""
    batch, heads, rows, cols = mask.shape
    # Tiles of 128 read two words, so their number is even; rows and keys after the last are read but count for nobody.
    q_words, k_words = (1 if size == 1 else -(-size // (2 * WORD)) * 2 for size in (rows, cols))
    padded_rows, padded_cols = (1 if size == 1 else -(-size // PADDING) * PADDING for size in (rows, cols))
    by_query = torch.empty((batch, heads, k_words, padded_rows), dtype=torch.int64, device=mask.device)
    by_key = (
        torch.empty((batch, heads, q_words, padded_cols), dtype=torch.int64, device=mask.device) if with_keys else None
    )
    steps = [
        (int(outer > 1), outer if words > 1 else 0, words * outer)
        for words, outer in ((k_words, padded_rows), (q_words, padded_cols))
    ]
    targets = (by_query.view(torch.int32), (by_query if by_key is None else by_key).view(torch.int32))
    numbers = (mask_strides(mask), heads, rows, cols, *steps, with_keys)
    grid, key = (k_words, q_words, batch * heads), (mask.device, layout(mask), numbers)
    queue(pack_bits, key, grid, (mask, *targets, *numbers), num_warps=4)
    return MaskBits(by_query, by_key)


def list_tiles(
    mask: Tensor, bits: MaskBits | None, tile: tuple[int, int], bounds: Bounds, by_column: bool
) -> TileLists:
    """Lists of key tiles for each query tile, or, ``by_column``, of query tiles for each key tile (at most 128 keys).

    ``mask``: (1 or B, 1 or N, S or 1, T or 1) of any strides, read if it has no ``bits``; None in ``bounds``: no bound.
    """
    q_tiles, k_tiles = -(-bounds.q_len // tile[0]), -(-bounds.k_len // tile[1])  # triton.cdiv takes 5 us of the host
    batch, heads = mask.shape[:2]
    state = torch.empty((batch * heads, q_tiles, k_tiles), dtype=torch.int8, device=mask.device)
    judge, source, warps = (judge_values, mask, 4) if bits is None else (judge_bits, bits.by_query, 1)
    numbers = bounds._replace(left=bounds.left or 0, right=bounds.right or 0)
    form = Judged(bounds.left is not None, bounds.right is not None, *tile)
    given, device = (mask_strides(source), heads, numbers, form), mask.device
    key = (device, layout(source), given)
    queue(judge, key, (k_tiles, q_tiles, batch * heads), (source, state, *given), num_warps=warps)
    lines, tiles = (k_tiles, q_tiles) if by_column else (q_tiles, k_tiles)
    items = torch.empty((batch * heads * lines, tiles + 1), dtype=torch.int32, device=mask.device)
    counts = torch.empty((batch * heads * lines, 2), dtype=torch.int32, device=mask.device)
    order = torch.empty(batch * heads * lines, dtype=torch.int32, device=mask.device)
    step = (1, k_tiles) if by_column else (k_tiles, 1)
    sizes = (q_tiles * k_tiles, *step, tiles, 1 << tiles.bit_length())
    queue(collect_tiles, (device, sizes), (lines, batch * heads, 1), (state, items, counts, *sizes), num_warps=4)
    grid = (-(-lines // CHUNK), batch * heads, 1)
    queue(order_lines, (device, lines), grid, (counts, order, lines, CHUNK), num_warps=4)
    return TileLists(items, counts, order, 0 if batch == 1 else heads, 0 if heads == 1 else 1)


def mask_strides(mask: Tensor) -> tuple[int, ...]:
    """Strides that read ``mask`` as if it were expanded."""
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
