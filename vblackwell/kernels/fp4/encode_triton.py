"""Triton kernels of encode.py.

``encode`` finds scales of least squared error and codes in one pass. It tries scales in fp32 first, from the largest
magnitude over 6 upward and downward as far as numerics/search.py proves that a scale may win. Where two come close, all
blocks of the program are searched again in fp64, with the additions in the oracle's order and without fused
multiply-adds: the bits are the oracle's. ``tile`` makes the tiled layout (layout.py) from the canonical one.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.fp4 import layout
from vblackwell.kernels.runtime.registry import on_device

BLOCKS = 32  # of a program: with 64 it spills
TILE_BLOCK = 1024  # words or bytes that a program writes
# Where bit i of a word comes from, in eight codes as they lie in memory.
_SOURCES = tl.constexpr(
    tuple(4 * code + at + i for _, code, at, width in sorted(layout.WORD_FIELDS) for i in range(width))
)
# Wider than the error of a sum in fp32, division and all: what is nearer than this is decided in fp64.
_CLOSE = tl.constexpr(2e-5)


@triton.jit
def _value(code):
    """The E4M3 value of codes 1 to 126, fp32."""
    normal = (((code >> 3) + 120) << 23) | ((code & 7) << 20)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal.to(tl.float32, bitcast=True))


@triton.jit
def _halved(x, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    """First half of the columns plus the second."""
    left, right = tl.split(tl.permute(tl.reshape(x, (BLOCKS, 2, WIDTH // 2)), (0, 2, 1)))
    return left + right


@triton.jit
def _error(a, code, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """Squared error of magnitudes (BLOCKS, 16) rounded to E2M1 times the scale of the code."""
    if WIDE:
        s = _value(code).to(tl.float64)[:, None]
        u = tl.minimum(a / s, 6.0)
        field = tl.maximum(u.to(tl.int64, bitcast=True) & (0x7FF << 52), 1023 << 52) + (51 << 52)
        shift = field.to(tl.float64, bitcast=True)
    else:
        s = _value(code)[:, None]
        u = tl.minimum(a / s, 6.0)
        field = tl.maximum(u.to(tl.int32, bitcast=True) & 0x7F800000, 127 << 23) + (22 << 23)
        shift = field.to(tl.float32, bitcast=True)
    apart = ((u + shift) - shift) * s - a
    squares = apart * apart
    if WIDE:
        squares = _halved(_halved(_halved(squares, 16, BLOCKS), 8, BLOCKS), 4, BLOCKS)
        squares = tl.reshape(_halved(squares, 2, BLOCKS), (BLOCKS,))
    else:
        squares = tl.sum(squares, 1)
    return squares


@triton.jit
def _code_of(x, UP: tl.constexpr):
    """The E4M3 code, 1 to 126, of the value nearest to fp32 ``x`` that is not below it (UP) or not above."""
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits >> 20) - (120 << 3)
    low = (x * 512).to(tl.int32)
    if UP:
        normal += ((bits & 0xFFFFF) != 0).to(tl.int32)
        low = tl.ceil(x * 512).to(tl.int32)
    return tl.minimum(tl.maximum(tl.where(x < 0.015625, low, normal), 1), 126)


@triton.jit
def _more(a, start, best, error, second, begin, count, step: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """The best code, its error and the least error of another one, after ``count`` more from ``start + begin`` on."""
    for number in range(0, count):
        code = tl.minimum(tl.maximum(start + (begin + number * step), 1), 126)
        new_error = _error(a, code, WIDE, BLOCKS)
        better = (new_error < error) | ((new_error == error) & (code < best))
        second = tl.where(code == best, second, tl.minimum(second, tl.where(better, error, new_error)))
        best, error = tl.where(better, code, best), tl.where(better, new_error, error)
    return best, error, second


@triton.jit
def _encode(w_ptr, codes_ptr, scales_ptr, unit_ptr, k, row_blocks, total, BLOCKS: tl.constexpr):
    """``unit_ptr``: one over the tensor scale, a power of two, in fp64."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    column = (block % row_blocks)[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (block < total)[:, None] & (column < k)
    w = tl.load(w_ptr + (block // row_blocks)[:, None] * k + column, inside, other=0.0).to(tl.float32)
    negative = w.to(tl.int32, bitcast=True) < 0
    a64 = tl.abs(w).to(tl.float64) * tl.load(unit_ptr)
    a = a64.to(tl.float32)
    top = tl.max(a, 1)
    start = _code_of(top / 6, True)
    # Upward: eight codes further the scale has doubled, 3.5 s is above the largest; of the lowest 15 all are tried.
    best, error = start, _error(a, start, False, BLOCKS)
    second = tl.full((BLOCKS,), float("inf"), tl.float32)
    upward = tl.maximum(tl.max(tl.where(start < 16, 16 - start, 0), 0), 9) + 2
    best, error, second = _more(a, start, best, error, second, -2, upward, 1, False, BLOCKS)
    # Downward as long as the largest alone does not err more, by the error so far: a better one only ends it sooner.
    least = _code_of(tl.maximum(top - tl.sqrt(error) * 1.001, 0.0) / 6 * 0.999, False)
    downward = tl.maximum(tl.max(start - 2 - least, 0), 0)
    best, error, second = _more(a, start, best, error, second, -3, downward, -1, False, BLOCKS)
    close = (second <= error * (1 + _CLOSE)) & (error > 0)
    if tl.max(close.to(tl.int32), 0) > 0:
        a_wide = a.to(tl.float64)
        exact, least_error = start, _error(a_wide, start, True, BLOCKS)
        next_error = tl.full((BLOCKS,), float("inf"), tl.float64)
        exact, least_error, next_error = _more(
            a_wide, start, exact, least_error, next_error, -2 - downward, upward + downward, 1, True, BLOCKS
        )
        best = tl.where(close, exact, best)
    tl.store(scales_ptr + block, best.to(tl.uint8), block < total)
    # The codes of magnitudes are the integers of min(2u, u + 2, u/2 + 4), to the nearest, ties to even.
    u = a64 / _value(best).to(tl.float64)[:, None]
    position = tl.minimum(tl.minimum(tl.minimum(u * 2, u + 2), u * 0.5 + 4), 7.0)
    code = ((position + 4503599627370496.0) - 4503599627370496.0).to(tl.int32) | (negative.to(tl.int32) << 3)
    left, right = tl.split(tl.reshape(code, (BLOCKS, 8, 2)))
    to = codes_ptr + block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(to, (left | (right << 4)).to(tl.uint8), (block < total)[:, None])


def encode(w_NK: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """As `encode.nvfp4_encoder`, of two to the power of ``exponent`` as tensor scale."""
    n, k = w_NK.shape
    row_blocks = -(-k // 16)
    codes = torch.empty((n, row_blocks * 8), dtype=torch.uint8, device=w_NK.device)
    scales = torch.empty((n, row_blocks), dtype=torch.uint8, device=w_NK.device)
    unit = torch.full((1,), 2.0**-exponent, dtype=torch.float64, device=w_NK.device)
    total = n * row_blocks
    args = (w_NK.contiguous(), codes, scales, unit, k, row_blocks, total)
    with on_device(w_NK):
        _encode[(triton.cdiv(total, BLOCKS),)](*args, BLOCKS=BLOCKS, num_warps=4, enable_fp_fusion=False)
    return codes, scales


@triton.jit
def _words(codes_ptr, scales_ptr, out_ptr, n, row_words, steps, total, BLOCK: tl.constexpr):
    """Words [band][step][h 2][g 8][t 4][r 2][i 2]: row g + 16 h + 8 r, columns 16 t + 8 i and on."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile, place = at // 256, (at % 256).to(tl.int32)
    row = tile // steps * 32 + (place >> 7) * 16 + ((place >> 1) & 1) * 8 + ((place >> 4) & 7)
    word = (tile % steps) * 8 + ((place >> 2) & 3) * 2 + (place & 1)
    inside = (at < total) & (row < n) & (word < row_words)
    codes = tl.load(codes_ptr + row * row_words + word, inside, other=0)
    scale = tl.load(scales_ptr + row * (row_words // 2) + word // 2, inside, other=0)
    moved = tl.zeros((BLOCK,), tl.int32)
    for bit in tl.static_range(32):
        moved |= ((codes >> _SOURCES[bit]) & 1) << bit
    tl.store(out_ptr + at, tl.where(scale == 0, 0, moved), at < total)


@triton.jit
def _scales(scales_ptr, out_ptr, n, row_blocks, steps, total, BLOCK: tl.constexpr):
    """Bytes [band][step][g 8][t 4][r 4]: row g + 8 r, block t of the step; E4M3 as E5M3."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile, place = at // 128, (at % 128).to(tl.int32)
    row = tile // steps * 32 + (place & 3) * 8 + (place >> 4)
    block = (tile % steps) * 4 + ((place >> 2) & 3)
    inside = (at < total) & (row < n) & (block < row_blocks)
    code = tl.load(scales_ptr + row * row_blocks + block, inside, other=0).to(tl.int32)
    # A normal value's exponent is biased by 8 more; a subnormal one, m * 2^-9, has the place of its highest bit as
    # exponent.
    low = tl.where(code >= 4, 2, tl.where(code >= 2, 1, 0))
    subnormal = ((6 + low) << 3) | ((code << (3 - low)) & 7)
    byte = tl.where(code >= 8, code + (8 << 3), tl.where(code == 0, 0, subnormal))
    tl.store(out_ptr + at, byte.to(tl.uint8), at < total)


def tile(codes: Tensor, block_scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Tiled codes and scales of a canonical nvfp4 weight (n, k) whose scales are neither negative nor NaN."""
    bands, steps = layout.tiles(n, k)
    out_codes = torch.empty((bands, steps, layout.CODE_BYTES), dtype=torch.uint8, device=codes.device)
    out_scales = torch.empty((bands, steps, layout.SCALE_BYTES), dtype=torch.uint8, device=codes.device)
    codes, block_scales = codes.contiguous(), block_scales.contiguous()
    words, scales = out_codes.numel() // 4, out_scales.numel()
    word_args = (codes.view(torch.int32), block_scales, out_codes.view(torch.int32), n, codes.shape[1] // 4)
    scale_args = (block_scales, out_scales, n, block_scales.shape[1])
    with on_device(codes):
        _words[(triton.cdiv(words, TILE_BLOCK),)](*word_args, steps, words, BLOCK=TILE_BLOCK)
        _scales[(triton.cdiv(scales, TILE_BLOCK),)](*scale_args, steps, scales, BLOCK=TILE_BLOCK)
    return out_codes, out_scales
