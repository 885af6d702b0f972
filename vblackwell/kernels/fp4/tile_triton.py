"""The tiled layout of nvfp4 (layout.py) from the canonical one in two launches: words of eight codes are gathered and their bits moved.

torch's expressions take a hundred passes over bands of a weight, which for a folder of 6.7B cost seconds of launches while it is opened.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.fp4 import layout
from vblackwell.kernels.runtime.fused import on_device

BLOCK = 1024
# Where bit i of a word comes from, in eight codes as they lie in memory.
_SOURCES = tl.constexpr(
    tuple(4 * code + code_bit for _, code, code_bit in sorted(layout._MOVES))  # noqa: SLF001
)


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
    # A normal value's exponent is biased by 8 more; a subnormal one, m * 2^-9, has the place of its highest bit as exponent.
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
    with on_device(codes):
        _words[(triton.cdiv(words, BLOCK),)](
            codes.view(torch.int32), block_scales, out_codes.view(torch.int32), n, codes.shape[1] // 4, steps, words, BLOCK=BLOCK
        )  # fmt: skip
        _scales[(triton.cdiv(scales, BLOCK),)](
            block_scales, out_scales, n, block_scales.shape[1], steps, scales, BLOCK=BLOCK
        )
    return out_codes, out_scales
