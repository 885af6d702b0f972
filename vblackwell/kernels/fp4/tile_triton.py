"""Triton kernels that make the tiled layout (layout.py) from the canonical one, and operands of PyTorch's FP4 matmul
(w4a4.py) from tiles."""
# What @triton.jit makes of a function has no type.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.fp4 import layout
from vblackwell.kernels.runtime.registry import on_device
from vblackwell.numerics.packed import FINE_ZERO

TILE_BLOCK = 1024  # words or bytes that a program writes
# Where bit i of a word comes from, in eight codes as they lie in memory.
_SOURCES, _FINE_SOURCES = (
    tl.constexpr(tuple(4 * code + at + i for _, code, at, width in sorted(fields) for i in range(width)))
    for fields in (layout.WORD_FIELDS, layout.FINE_FIELDS)
)
_FINE_ZEROS = tl.constexpr(FINE_ZERO * 0x11111111 - (1 << 32))  # eight of them, as int32
_E5M3_TOP = tl.constexpr(layout.E5M3_TOP)


@triton.jit
def _e5m3(codes_ptr, scales_ptr, row, block, row_words, inside, top, MX: tl.constexpr):
    """The scale of 16 columns as an E5M3 byte, int32; 0 where all of its block is. ``top``: mxfp4's largest."""
    if MX:
        block = block // 2
        live = tl.zeros_like(row).to(tl.int32)
        for word in tl.static_range(4):
            live |= tl.load(codes_ptr + row * row_words + block * 4 + word, inside, other=0) & 0x77777777
        code = tl.load(scales_ptr + row * (row_words // 4) + block, inside, other=0).to(tl.int32)
        byte = tl.where(live != 0, (code - top + _E5M3_TOP) << 3, 0)
    else:
        code = tl.load(scales_ptr + row * (row_words // 2) + block, inside, other=0).to(tl.int32)
        # A normal value's exponent is biased by 8 more; a subnormal one, m * 2^-9, has the place of its highest bit as
        # exponent.
        low = tl.where(code >= 4, 2, tl.where(code >= 2, 1, 0))
        subnormal = ((6 + low) << 3) | ((code << (3 - low)) & 7)
        byte = tl.where(code >= 8, code + (8 << 3), tl.where(code == 0, 0, subnormal))
    return byte


@triton.jit
def _words(
    codes_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    shape,
    total,
    top,
    MX: tl.constexpr,
    FINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words [band][step][h 2][g 8][t 4][r 2][i 2]: row g + 16 h + 8 r, columns 16 t + 8 i and on; of the codes, or of
    FINE ones next to them. ``shape``: rows, words in a row, tiles in a band."""
    n, row_words, steps = shape
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile, place = at // 256, (at % 256).to(tl.int32)
    row = tile // steps * 32 + (place >> 7) * 16 + ((place >> 1) & 1) * 8 + ((place >> 4) & 7)
    word = (tile % steps) * 8 + ((place >> 2) & 3) * 2 + (place & 1)
    inside = (at < total) & (row < n) & (word < row_words)
    codes = tl.load(words_ptr + row * row_words + word, inside, other=0)
    scale = _e5m3(codes_ptr, scales_ptr, row, word // 2, row_words, inside, top, MX)
    codes = tl.where(scale == 0, _FINE_ZEROS if FINE else 0, codes)
    moved = tl.zeros((BLOCK,), tl.int32)
    for bit in tl.static_range(32):
        moved |= ((codes >> (_FINE_SOURCES[bit] if FINE else _SOURCES[bit])) & 1) << bit
    tl.store(out_ptr + at, moved, at < total)


@triton.jit
def _scales(codes_ptr, scales_ptr, out_ptr, shape, total, top, MX: tl.constexpr, BLOCK: tl.constexpr):
    """Bytes [band][step][g 8][t 4][r 4]: row g + 8 r, block t of the step; ``shape`` as for `_words`."""
    n, row_words, steps = shape
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile, place = at // 128, (at % 128).to(tl.int32)
    row = tile // steps * 32 + (place & 3) * 8 + (place >> 4)
    block = (tile % steps) * 4 + ((place >> 2) & 3)
    inside = (at < total) & (row < n) & (block * 2 < row_words)
    byte = _e5m3(codes_ptr, scales_ptr, row, block, row_words, inside, top, MX)
    tl.store(out_ptr + at, byte.to(tl.uint8), at < total)


def tile(
    codes: Tensor, block_scales: Tensor, n: int, k: int, top: int | None = None, fine: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tiled codes, scales and fine codes of a canonical nvfp4 weight (n, k) whose scales are neither negative nor NaN,
    or of an mxfp4 one with ``top`` the largest exponent among blocks that hold a value."""
    bands, steps = layout.tiles(n, k)
    codes, block_scales = codes.contiguous().view(torch.int32), block_scales.contiguous()
    code_shape, scale_shape = (bands, steps, layout.CODE_BYTES), (bands, steps, layout.SCALE_BYTES)
    out = [torch.empty(code_shape, dtype=torch.uint8, device=codes.device) for _ in range(1 if fine is None else 2)]
    out_scales = torch.empty(scale_shape, dtype=torch.uint8, device=codes.device)
    words, scales, shape = out[0].numel() // 4, out_scales.numel(), (n, codes.shape[1], steps)
    how: dict[str, Any] = {"top": top or 0, "MX": top is not None, "BLOCK": TILE_BLOCK}
    with on_device(codes):
        for place, source in enumerate([codes] if fine is None else [codes, fine.contiguous().view(torch.int32)]):
            args = (codes, source, block_scales, out[place].view(torch.int32), shape, words)
            _words[(triton.cdiv(words, TILE_BLOCK),)](*args, **how, FINE=place == 1)
        scale_args = (codes, block_scales, out_scales, shape, scales)
        _scales[(triton.cdiv(scales, TILE_BLOCK),)](*scale_args, **how)
    return out[0], out_scales, None if fine is None else out[1]


@triton.jit
def swizzled_place(row, block, row_blocks):
    """Where `layout.swizzled` memory has the scale of a row's block, of so many in a row."""
    tile = (row // 128) * ((row_blocks + 3) // 4) + block // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4


@triton.jit
def _untile(words_ptr, e5m3_ptr, out_ptr, scales_ptr, shape, total, BLOCK: tl.constexpr):
    """Codes, two words a block of 16 columns, and the E4M3 scales of ``total`` blocks, swizzled. ``shape``: blocks in a
    row, tiles in a band."""
    row_blocks, steps = shape
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, block, inside = at // row_blocks, at % row_blocks, at < total
    tile, g = row // 32 * steps + block // 4, row % 8
    byte = tl.load(e5m3_ptr + tile * 128 + g * 16 + block % 4 * 4 + row % 32 // 8, inside, other=0).to(tl.int32)
    # As in `_e5m3`: of what E4M3 has as a subnormal, the leading one comes back among the bits.
    subnormal = ((byte & 7) | 8) >> tl.minimum(tl.maximum(9 - (byte >> 3), 0), 3)
    code = tl.where(byte >= (9 << 3), byte - (8 << 3), tl.where(byte == 0, 0, subnormal))
    tl.store(scales_ptr + swizzled_place(row, block, row_blocks), code.to(tl.uint8), inside)
    place = tile * 256 + row % 32 // 16 * 128 + g * 16 + block % 4 * 4 + row % 16 // 8 * 2
    for word in tl.static_range(2):
        moved = tl.load(words_ptr + place + word, inside, other=0)
        codes = tl.zeros((BLOCK,), tl.int32)
        for bit in tl.static_range(32):
            codes |= ((moved >> bit) & 1) << _SOURCES[bit]
        tl.store(out_ptr + at * 2 + word, codes, inside)


def untile(codes: Tensor, block_scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes (n, k / 2) of a tiled weight, two a byte, and its scales per 16 columns as E4M3 in `layout.swizzled`
    memory; k is a multiple of 16. The scales of mxfp4's tiles are E4M3 values, too."""
    out = torch.empty(n, k // 2, dtype=torch.uint8, device=codes.device)
    scales = layout.swizzled(n, k // 16, codes.device)
    words, total = codes.view(torch.int32), n * k // 16
    with on_device(codes):
        shape = (k // 16, codes.shape[1])
        args = (words, block_scales, out.view(torch.int32), scales, shape, total)
        _untile[(triton.cdiv(total, TILE_BLOCK),)](*args, BLOCK=TILE_BLOCK)
    return out, scales
