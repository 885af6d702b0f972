"""The tiled layout of two-part weights: that of nvfp4 (layout.py), and the fine codes cut the same way.

Fine codes are [half][lane][word] of 32 bits as the coarse ones are: a word holds the same row and the same eight columns. A pair of
coarse codes becomes two halves with exponent and mantissa at bits 8, 7, 6; the fine code of a column belongs into bits 5..2 of its
half (mask ``0x003C003C``), where a kernel adds it and takes 8 of its units away again. Pair ``p`` comes there by rotating right by
``4 p``: column ``2 p`` lies at bits ``4 p + 2 ..`` of the word and column ``2 p + 1`` 16 bits further, wrapped around. Padding holds 8,
which
adds nothing, and so does every block without a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.kernels.fp4 import layout
from vblackwell.numerics.packed import unpack_nibbles
from vblackwell.numerics.separation import FINE_ZERO, FORM

FINE_MASK = 0x003C003C
FINE_NOTHING = 0x00200020  # what a fine code of 8 adds to a pair
TILED = "nvfp4-tiled"
LAYOUTS = ("nvfp4", TILED)
_BAND_ELEMENTS = 1 << 20
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def _starts() -> list[int]:
    """Lowest bit of the fine code of each of a word's eight columns."""
    return [(4 * (column // 2) + 16 * (column % 2) + 2) % 32 for column in range(8)]


def _pack_words(codes_X8: Tensor) -> Tensor:
    word = torch.zeros(codes_X8.shape[:-1], dtype=torch.int64, device=codes_X8.device)
    for column, start in enumerate(_starts()):
        shifted = codes_X8[..., column].to(torch.int64) << start
        word |= (shifted | (shifted >> 32)) & 0xFFFFFFFF
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _unpack_words(words: Tensor) -> Tensor:
    wide = words.to(torch.int64) & 0xFFFFFFFF
    twice = wide | (wide << 32)
    return torch.stack([(twice >> start) & 0xF for start in _starts()], dim=-1).to(torch.uint8)


def to_tiled(codes: Tensor, fine: Tensor, block_scales: Tensor, tensor_scale: Tensor, n: int, k: int) -> Parts:
    """Canonical parts -> (codes, fine, scales, tensor scale) in tiles, on the same device. Waits for the device.

    Rows are shuffled in bands, because shuffling takes several bytes a weight while it runs.

    Raises:
        ConfigurationError: shapes that do not fit (n, k).
        CorruptData: a fine code that leaves its coarse code's cell through zero.
        Unsupported: NaN or negative scales.
    """
    if (tuple(codes.shape), tuple(fine.shape), tuple(block_scales.shape)) != shapes(FORM.name, n, k):
        raise ConfigurationError(
            f"codes {tuple(codes.shape)}, fine codes {tuple(fine.shape)} and scales {tuple(block_scales.shape)} do not belong to a "
            f"weight of {n} x {k}: expected {shapes(FORM.name, n, k)}"
        )
    out = [torch.empty(shape, dtype=torch.uint8, device=codes.device) for shape in shapes(TILED, n, k)]
    rows = layout.TILE_N * max(1, _BAND_ELEMENTS // (layout.TILE_N * k))
    for row in range(0, n, rows):
        stop = min(n, row + rows)
        bands = slice(row // layout.TILE_N, -(-stop // layout.TILE_N))
        coarse = layout.to_tiled(codes[row:stop], block_scales[row:stop], tensor_scale, FORM.name, stop - row, k)
        words = _fine_words(codes[row:stop], fine[row:stop], block_scales[row:stop], stop - row, k)
        for whole, part in zip(out, (coarse[0], words, coarse[1]), strict=True):
            whole[bands] = part
    return out[0], out[1], out[2], tensor_scale.to(torch.float32).reshape(())


def _fine_words(codes: Tensor, fine: Tensor, block_scales: Tensor, n: int, k: int) -> Tensor:
    unpacked, at_zero = unpack_nibbles(fine), unpack_nibbles(codes) & 7 == 0
    if bool(((unpacked < FINE_ZERO) & at_zero).any()):
        raise CorruptData(
            "a fine code lies below zero in the cell of zero: the fine part belongs to another coarse part"
        )
    dead = (block_scales == 0).repeat_interleave(16, dim=1)
    unpacked = torch.where(dead, FINE_ZERO, unpacked)
    bands, steps = layout.tiles(n, k)
    padding = (0, steps * layout.TILE_K - unpacked.shape[1], 0, bands * layout.TILE_N - n)
    unpacked = torch.nn.functional.pad(unpacked, padding, value=FINE_ZERO)
    words = _pack_words(unpacked.view(bands, 2, 2, 8, steps, 4, 2, 8)).permute(0, 4, 1, 3, 5, 2, 6).contiguous()
    return words.view(torch.uint8).view(bands, steps, layout.CODE_BYTES)


def from_tiled(
    codes: Tensor, fine: Tensor, block_scales: Tensor, tensor_scale: Tensor, n: int, k: int
) -> Parts:  # fmt: skip
    """The inverse of ``to_tiled``; blocks of value zero come back as plain zeros."""
    coarse = layout.from_tiled(codes, block_scales, tensor_scale, TILED, n, k)
    bands, steps = layout.tiles(n, k)
    words = fine.contiguous().view(torch.int32).view(bands, steps, 2, 8, 4, 2, 2).permute(0, 2, 5, 3, 1, 4, 6)
    unpacked = _unpack_words(words.contiguous()).view(bands * layout.TILE_N, steps * layout.TILE_K)
    unpacked = unpacked[:n, : FORM.padded(k)]
    return coarse[0], (unpacked[:, 0::2] | (unpacked[:, 1::2] << 4)).contiguous(), coarse[1], coarse[2]


def shapes(format: str, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of coarse codes, fine codes and block scales of an (n, k) weight, tiled or canonical."""
    codes, scales = layout.shapes(format, n, k)
    return codes, codes, scales
