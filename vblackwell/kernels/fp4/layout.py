"""The tiled layout of E2M1 weights: what the fused kernels read, made once and turned back without loss.

A *tile* is 32 rows by 64 columns, 1024 bytes of codes and 128 of scales; tiles of a row band come in order of K. It is
cut the way ``mma.m16n8k16`` hands its A operand to a warp, so that kernels load registers and never shuffle:

* lane ``4 g + t`` owns columns ``16 t .. 16 t + 15`` (one nvfp4 block) of rows ``g + 8 r``, r = 0..3;
* codes are [half h][lane][word i] of 32 bits: word ``i`` of half ``h`` holds row ``g + 16 h + 8 (i >> 1)`` and columns
  ``16 t + 8 (i & 1) .. + 7`` in the bit order below, so that one 128-bit load is one lane's share of 16 rows;
* scales are [lane][row r], a byte each.

Bits of a word. A pair of codes must become two bf16 (or fp16) halves: sign at bit 15, exponent and mantissa at 8, 7, 6,
in each half (mask ``0x81C081C0``). Pair 0 lies there; pairs 1 and 2 come there by rotating right by 22 and 19; the bits
that remain hold pair 3, whose fields one multiplication by 2^2 + 2^7 + 2^12 moves into place without a carry. Eight
operations for eight codes.

Scales are E5M3 bytes, ``fp16(scale) >> 7``: every positive E4M3 value as a normal number, which kernels turn into the
bits of a bf16 or fp16 pair with one permute and one multiply-add. A zero scale is byte 0 with zeroed codes. mxfp4
scales become E5M3 powers of two relative to the tensor's largest, whose exponent moves into the tensor scale; a tensor
that spans more than 2^17 is refused. Rows and columns are padded to whole tiles with zero codes.

Weights in two parts (numerics/separation.py) have fine codes as well, in words of the same rows and columns. The fine
code of a column belongs into bits 5..2 of its half (mask ``0x003C003C``), where a kernel adds it and takes 8 of its
units away again. Pair ``p`` comes there by rotating right by ``4 p``: column ``2 p`` lies at bits ``4 p + 2 ..`` of the
word and column ``2 p + 1`` 16 bits further, wrapped around. Padding, and every block without a scale, holds 8, which
adds nothing.
"""

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.numerics.formats import FORMATS
from vblackwell.numerics.packed import unpack_nibbles
from vblackwell.numerics.separation import FINE_ZERO, FORM

TILE_N, TILE_K = 32, 64
CODE_BYTES, SCALE_BYTES = TILE_N * TILE_K // 2, TILE_N * TILE_K // 16
PAIR_ROTATIONS = (0, 10, 13)  # left; pair 3 is gathered by a multiplication
E5M3_TOP, _E5M3_BOTTOM = 23, 6  # exponent fields in use: 2^8 down to 2^-9
_SUFFIX = "-tiled"
_BAND_ELEMENTS = 1 << 20  # or bytes of codes, at a time
TILED_PARTS = "nvfp4-tiled"  # the tiled layout of a weight in two parts
PARTS_LAYOUTS = ("nvfp4", TILED_PARTS)
Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # codes, fine codes, block scales, tensor scale
Fields = tuple[tuple[int, int, int, int], ...]
Shape = tuple[int, ...]


def is_tiled(format: str) -> bool:
    """Whether ``format`` names a tiled layout ('nvfp4-tiled', 'mxfp4-tiled')."""
    return format.endswith(_SUFFIX)


def canonical_name(format: str) -> str:
    """The format without its layout: 'nvfp4-tiled' is 'nvfp4'."""
    return format.removesuffix(_SUFFIX)


def tiled_name(format: str) -> str:
    """The tiled layout of ``format``; raises ConfigurationError where its elements are not E2M1."""
    if canonical_name(format) not in ("nvfp4", "mxfp4"):
        raise ConfigurationError(f"there is no tiled layout for {format!r}: only nvfp4 and mxfp4 have one")
    return canonical_name(format) + _SUFFIX


def tiles(n: int, k: int) -> tuple[int, int]:
    """Row bands and tiles a band of an (n, k) weight."""
    return -(-n // TILE_N), -(-k // TILE_K)


def shapes(format: str, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the code and scale tensors of an (n, k) weight in ``format``, tiled or canonical."""
    if is_tiled(format):
        return (*tiles(n, k), CODE_BYTES), (*tiles(n, k), SCALE_BYTES)
    form = FORMATS[format]
    return form.codes_shape(n, k), form.scales_shape(n, k)


def check_shapes(format: str, n: int, k: int, codes: Shape, block_scales: Shape, fine: Shape | None = None) -> None:
    """Raises ConfigurationError where the shapes are not those of an (n, k) weight in ``format``."""
    expected = shapes(format, n, k)
    if (codes, block_scales) != expected or (fine is not None and fine != codes):
        middle = "" if fine is None else f", fine codes {tuple(fine)}"
        found = f"{format} codes {tuple(codes)}{middle} and scales {tuple(block_scales)}"
        wanted = f"expected {expected[0]} and {expected[1]}"
        raise ConfigurationError(f"{found} do not belong to a weight of {n} x {k}: {wanted}")


def _word_fields(pair: int, half: int) -> Fields:
    """(lowest bit in the word, code 0..7, lowest bit in the code, width) of what is contiguous in a code's place."""
    code, at = 2 * pair + half, 16 * half
    if pair == 3:
        return (at + 4, code, 0, 1), (at, code, 1, 2), (at + 3, code, 3, 1)
    at -= PAIR_ROTATIONS[pair]
    return ((at + 6) % 32, code, 0, 3), ((at + 15) % 32, code, 3, 1)


WORD_FIELDS: Fields = tuple(field for code in range(8) for field in _word_fields(*divmod(code, 2)))
# The fine code of column 7 wraps around.
FINE_FIELDS: Fields = (
    *((4 * (code // 2) + 16 * (code % 2) + 2, code, 0, 4) for code in range(7)),
    *((30, 7, 0, 2), (0, 7, 2, 2)),
)


def pack_words(codes_X8: Tensor, fields: Fields) -> Tensor:
    """Codes (..., 8) as uint8 -> words (...) as int32 in the bit order of the kernels."""
    word = torch.zeros(codes_X8.shape[:-1], dtype=torch.int64, device=codes_X8.device)
    for bit, code, code_bit, width in fields:
        word |= ((codes_X8[..., code] >> code_bit) & ((1 << width) - 1)).to(torch.int64) << bit
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def unpack_words(words: Tensor, fields: Fields) -> Tensor:
    """The inverse of ``pack_words``."""
    codes = torch.zeros((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for bit, code, code_bit, width in fields:
        codes[..., code] |= ((words >> bit) & ((1 << width) - 1)).to(torch.uint8) << code_bit
    return codes


def _to_words(codes_NK: Tensor, fields: Fields, n: int, k: int, padding: int) -> Tensor:
    """Tiles (bands, steps, CODE_BYTES) of unpacked codes, a byte each, filled up with ``padding``."""
    bands, steps = tiles(n, k)
    pad = (0, steps * TILE_K - codes_NK.shape[1], 0, bands * TILE_N - n)
    codes_NK = torch.nn.functional.pad(codes_NK, pad, value=padding)
    # rows 32 = (h 2, r 2, g 8); columns 64 = (t 4, i 2, code 8) -> [band, step, h, g, t, r, i]
    words = pack_words(codes_NK.view(bands, 2, 2, 8, steps, 4, 2, 8), fields).permute(0, 4, 1, 3, 5, 2, 6)
    return words.contiguous().view(torch.uint8).view(bands, steps, CODE_BYTES)


def _from_words(codes: Tensor, fields: Fields, n: int, columns: int) -> Tensor:
    """The inverse of `_to_words`, two codes a byte: (n, columns / 2)."""
    bands, steps, _ = codes.shape
    words = codes.contiguous().view(torch.int32).view(bands, steps, 2, 8, 4, 2, 2).permute(0, 2, 5, 3, 1, 4, 6)
    unpacked = unpack_words(words.contiguous(), fields).view(bands * TILE_N, steps * TILE_K)[:n, :columns]
    return (unpacked[:, 0::2] | (unpacked[:, 1::2] << 4)).contiguous()


def _e5m3(block_scales: Tensor, format: str, top: int) -> tuple[Tensor, int]:
    """Scales as E5M3 bytes, and the exponent that moved into the tensor scale; ``top`` is mxfp4's largest E8M0 byte."""
    if format == "nvfp4":
        if bool(((block_scales & 0x7F) == 0x7F).any()):
            raise Unsupported("block scales hold NaN (E4M3 0x7F): quantise a weight without inf and NaN")
        if bool((block_scales >= 0x80).any()):
            raise Unsupported("block scales hold negative values: the tiled layout keeps scales without a sign")
        half_bits = block_scales.view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16)
        return (half_bits >> 7).to(torch.uint8), 0
    field = block_scales.to(torch.int16) - top + E5M3_TOP
    return (field.clamp_(0, E5M3_TOP) << 3).to(torch.uint8), mxfp4_exponent(top)


def mxfp4_exponent(top: int) -> int:
    """What of an mxfp4 weight's largest E8M0 byte moves into the tensor scale."""
    return top - 127 - (E5M3_TOP - 15)


def live_blocks(codes: Tensor, block_scales: Tensor) -> Tensor:
    """Which mxfp4 blocks hold a value: the others may have any exponent, and it must not widen the span."""
    return (codes & 0x77).view(*block_scales.shape, -1).amax(-1) != 0


def live_exponents(codes: Tensor, block_scales: Tensor) -> tuple[int, int, int]:
    """(lowest, highest) E8M0 byte among mxfp4 blocks that hold a value, (127, 127) if none does, and the widest span of
    a row. Waits for the device; raises Unsupported for NaN, or a span that the tiled layout does not hold."""
    if bool((block_scales == 0xFF).any()):
        raise Unsupported("block scales hold NaN (E8M0 0xFF): quantise a weight without inf and NaN")
    low, top, span, band = 255, -1, 0, max(1, _BAND_ELEMENTS // codes.shape[1])
    for row in range(0, codes.shape[0], band):  # next to a layer little memory may be free
        scales = block_scales[row : row + band]
        live, exponents = live_blocks(codes[row : row + band], scales), scales.to(torch.int16)
        high_N, low_N = torch.where(live, exponents, -1).amax(1), torch.where(live, exponents, 255).amin(1)
        low, top = min(low, int(low_N.min())), max(top, int(high_N.max()))
        span = max(span, int((high_N - low_N).max()))  # a row without a value has a negative one
    if top < 0:
        return 127, 127, 0
    if top - low > E5M3_TOP - _E5M3_BOTTOM:
        raise Unsupported(f"mxfp4 exponents span 2^{top - low}; the tiled layout holds 2^{E5M3_TOP - _E5M3_BOTTOM}")
    return low, top, span


def to_tiled(
    codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int, top: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Canonical nvfp4 or mxfp4 -> (codes, scales, tensor scale) in the tiled layout. Waits for the device.

    ``top`` is for a part of an mxfp4 weight: the whole's highest exponent, from ``live_exponents``.

    Raises:
        ConfigurationError: a format without a tiled layout, or shapes that do not fit (n, k).
        Unsupported: NaN or negative scales, or mxfp4 exponents that span more than 2^17 among non-zero blocks.
    """
    tiled_name(format)
    check_shapes(format, n, k, codes.shape, block_scales.shape)
    bands, steps = tiles(n, k)
    if format == "mxfp4" and top is None:
        top = live_exponents(codes, block_scales)[1]
    scales, exponent = _e5m3(block_scales, format, top or 0)
    if format == "mxfp4":
        scales = torch.where(live_blocks(codes, block_scales), scales, 0)
    scales = scales.repeat_interleave(FORMATS[format].block_of(k) // 16, dim=1)
    dead = (scales >> 3) < _E5M3_BOTTOM  # zero scales of nvfp4, empty blocks of mxfp4
    unpacked = torch.where(dead.repeat_interleave(16, dim=1), 0, unpack_nibbles(codes))
    pad = (0, steps * 4 - scales.shape[1], 0, bands * TILE_N - n)
    scales = torch.nn.functional.pad(torch.where(dead, 0, scales), pad)
    scales = scales.view(bands, 4, 8, steps, 4).permute(0, 3, 2, 4, 1).contiguous()
    tensor_scale = (tensor_scale.to(torch.float32) * (2.0**exponent)).reshape(())
    return _to_words(unpacked, WORD_FIELDS, n, k, 0), scales.view(bands, steps, SCALE_BYTES), tensor_scale


def from_tiled(
    codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of ``to_tiled``; blocks of value zero become plain zeros. mxfp4 gets the exponents that make its
    tensor scale 1, which waits for the device."""
    form = FORMATS[canonical_name(format)]
    bands, steps = tiles(n, k)
    packed = _from_words(codes, WORD_FIELDS, n, form.padded(k))
    scales = block_scales.view(bands, steps, 8, 4, 4).permute(0, 4, 2, 1, 3).reshape(bands * TILE_N, steps * 4)
    scales = scales[:n, : form.padded(k) // 16]
    if form.name == "nvfp4":
        exact = (scales.to(torch.int16) << 7).view(torch.float16).to(torch.float32)
        return packed, exact.to(torch.float8_e4m3fn).view(torch.uint8), tensor_scale
    scales = scales[:, ::2].to(torch.int32)
    exponent = torch.frexp(tensor_scale.double())[1].to(torch.int32) - 1
    e8m0 = torch.where(scales == 0, 0, (scales >> 3) - 15 + 127 + exponent)
    return packed, e8m0.to(torch.uint8), torch.ones_like(tensor_scale)


def check_fine(codes: Tensor, fine: Tensor) -> None:
    """Raises CorruptData for a fine code that leaves its coarse code's cell through zero. Waits for the device."""
    band = max(1, _BAND_ELEMENTS // codes.shape[1])
    for row in range(0, codes.shape[0], band):
        code = codes[row : row + band]
        zero = ~(code | (code >> 1) | (code >> 2))  # bits 0 and 4: whether the low and the high code are
        if bool((zero & ~(fine[row : row + band] >> 3) & 0x11).any()):
            raise CorruptData("a fine code lies below zero in the cell of zero: the fine part is another weight's")


def parts_to_tiled(codes: Tensor, fine: Tensor, block_scales: Tensor, tensor_scale: Tensor, n: int, k: int) -> Parts:
    """Canonical parts -> (codes, fine, scales, tensor scale) in tiles, in bands of rows to save memory. Raises as
    `to_tiled` and `check_fine`. Waits for the device.
    """
    check_shapes(FORM.name, n, k, codes.shape, block_scales.shape, fine.shape)
    check_fine(codes, fine)
    code_shape, scale_shape = shapes(TILED_PARTS, n, k)
    shapes_out = (code_shape, code_shape, scale_shape)
    all_words, all_fine, all_scales = (torch.empty(s, dtype=torch.uint8, device=codes.device) for s in shapes_out)
    rows = TILE_N * max(1, _BAND_ELEMENTS // (TILE_N * k))
    for row in range(0, n, rows):
        part, count = slice(row, row + rows), min(rows, n - row)
        words, scales, _ = to_tiled(codes[part], block_scales[part], tensor_scale, FORM.name, count, k)
        unpacked = unpack_nibbles(fine[part])
        dead = (block_scales[part] == 0).repeat_interleave(16, dim=1)
        fine_words = _to_words(torch.where(dead, FINE_ZERO, unpacked), FINE_FIELDS, count, k, FINE_ZERO)
        bands = slice(row // TILE_N, row // TILE_N + len(words))
        all_words[bands], all_fine[bands], all_scales[bands] = words, fine_words, scales
    return all_words, all_fine, all_scales, tensor_scale.to(torch.float32).reshape(())


def parts_from_tiled(codes: Tensor, fine: Tensor, block_scales: Tensor, tensor_scale: Tensor, n: int, k: int) -> Parts:
    """The inverse of ``parts_to_tiled``; blocks of value zero come back as plain zeros."""
    packed, scales, tensor_scale = from_tiled(codes, block_scales, tensor_scale, TILED_PARTS, n, k)
    return packed, _from_words(fine, FINE_FIELDS, n, FORM.padded(k)), scales, tensor_scale


def swizzled(rows: int, blocks: int, device: torch.device) -> Tensor:
    """Memory for so many scales as FP4 tensor cores take them, flat, with zeros where padding will be: tiles of 128
    rows by 4 blocks in order of rows and then blocks; in a tile, that of row 32 i + j and block b is at [j][i][b]
    (cuBLAS, "1D block scaling factors layout"; SWIZZLE_32_4_4 in PyTorch)."""
    make = torch.empty if rows % 128 == 0 and blocks % 4 == 0 else torch.zeros
    return make(-(-rows // 128) * -(-blocks // 4) * 512, dtype=torch.uint8, device=device)
