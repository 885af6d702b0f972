"""Triton kernels of encode.py: all formats and searches are one template, ``_encode``. A program holds a few blocks.

A scale is chosen, and elements are rounded, in fp64 as numerics/ does, and squared errors are added in its order: the
bits are the oracle's. Nothing may fuse a multiplication with an addition (``enable_fp_fusion``). nvfp4 has so many
scales that it tries them in fp32 first, from the largest magnitude over 6 upward and downward as far as
numerics/search.py proves that a scale may win; where two come close, all blocks of the program are searched again in
fp64.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.fp4 import layout
from vblackwell.kernels.fp4.tile_triton import swizzled_place
from vblackwell.kernels.runtime.registry import DTYPES, on_device
from vblackwell.numerics.formats import NF4_VALUES, Format
from vblackwell.numerics.search import FRACTIONS, LANES, PARTS

ELEMENTS = 512  # of a program at a time: with twice as many nvfp4's search spills
MAXIMA = 256  # programs that look for the largest magnitude
MAXIMA_BLOCK = 4096  # elements that one of them reads at a time
# Wider than the error of a sum in fp32, division and all: what is nearer than this is decided in fp64.
_CLOSE = tl.constexpr(2e-5)
_NF4 = tl.constexpr(NF4_VALUES)
_NF4_BOUNDS = tl.constexpr(tuple((low + high) / 2 for low, high in zip(NF4_VALUES, NF4_VALUES[1:], strict=False)))
_FRACTIONS, _PARTS = tl.constexpr(FRACTIONS), tl.constexpr(float(PARTS))
_LARGEST, _SMALLEST = tl.constexpr(torch.finfo(torch.float32).max), tl.constexpr(2.0**-126)
# Added and taken away again, in fp64 or fp32, they round to an integer, ties to even.
_WHOLE, _WHOLE32 = tl.constexpr(1.5 * 2.0**52), tl.constexpr(1.5 * 2.0**23)


class Packing(NamedTuple):
    format: str
    search: str
    levels: int  # of a sum: 2^levels elements of a block at a time
    blocks: int  # of a program
    limited: bool = False  # whether a scale may be so large that what decodes is not finite


@triton.jit
def _pow2(exponent):
    """Of an int64 exponent, fp64."""
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _log2(x):
    """Its floor, of fp64, int64; a zero's is -1023."""
    return (x.to(tl.int64, bitcast=True) >> 52) - 1023


@triton.jit
def _to_precision(x, BITS: tl.constexpr, LEAST: tl.constexpr):
    """As `numerics.rounding.round_to_precision`."""
    exponent = tl.maximum(_log2(x), LEAST) - (BITS - 1)
    return ((x * _pow2(-exponent) + _WHOLE) - _WHOLE) * _pow2(exponent)


@triton.jit
def _max_scale(top, unit, FORMAT: tl.constexpr):
    """The published block scale for the largest magnitude, both fp64; ``unit``: the tensor scale."""
    if FORMAT == "nvfp4":
        scale = tl.minimum(_to_precision(top / (unit * 6.0), 4, -6), 448.0)
    elif FORMAT == "mxfp4":
        scale = _pow2(tl.minimum(tl.maximum(_log2(top) - 2, -127), 127))
    elif FORMAT == "int4":
        scale = _to_precision(top / 7.0, 8, -126)
    elif FORMAT == "int8":
        scale = _to_precision(top / 127.0, 24, -126)
    else:
        scale = _to_precision(top, 24, -126)
    return scale


@triton.jit
def _stored(scale, FORMAT: tl.constexpr):
    """A block scale as it lies in memory; of bf16 the bits."""
    bits = scale.to(tl.int64, bitcast=True)
    if FORMAT == "nvfp4":
        normal = ((bits >> 49) - (1016 << 3)).to(tl.int32)
        stored = tl.where(scale < 0.015625, (scale * 512.0).to(tl.int32), normal).to(tl.uint8)
    elif FORMAT == "mxfp4":
        stored = ((bits >> 52) - 896).to(tl.uint8)
    elif FORMAT == "int4":
        stored = (scale.to(tl.float32).to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    else:
        stored = scale.to(tl.float32)
    return stored


@triton.jit
def _value(code):
    """The E4M3 value of codes 1 to 126, fp32."""
    normal = (((code >> 3) + 120) << 23) | ((code & 7) << 20)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal.to(tl.float32, bitcast=True))


@triton.jit
def _total(x, LEVELS: tl.constexpr, BLOCKS: tl.constexpr):
    """The sum of 2^LEVELS columns, in the order of `numerics.search`: the first half plus the second, and so on."""
    for level in tl.static_range(LEVELS):
        halves = tl.permute(tl.reshape(x, (BLOCKS, 2, 1 << (LEVELS - level - 1))), (0, 2, 1))
        left, right = tl.split(tl.reshape(halves, (BLOCKS << (LEVELS - level - 1), 2)))  # in one dimension fewest spill
        x = left + right
    return x


@triton.jit
def _error(a, s, limit, LIMITED: tl.constexpr, LEVELS: tl.constexpr, BLOCKS: tl.constexpr):
    """Squared error of magnitudes (BLOCKS, 2^LEVELS) rounded to E2M1 times ``s``, in the type of both; inf where one
    passes ``limit``. In fp64 summed in the oracle's order."""
    s = s[:, None]
    u = tl.minimum(a / s, 6.0)
    if a.dtype == tl.float64:
        field = tl.maximum(u.to(tl.int64, bitcast=True) & (0x7FF << 52), 1023 << 52) + (51 << 52)
        shift = field.to(tl.float64, bitcast=True)
    else:
        field = tl.maximum(u.to(tl.int32, bitcast=True) & 0x7F800000, 127 << 23) + (22 << 23)
        shift = field.to(tl.float32, bitcast=True)
    decoded = ((u + shift) - shift) * s
    apart = decoded - a
    error = _total(apart * apart, LEVELS, BLOCKS) if a.dtype == tl.float64 else tl.sum(apart * apart, 1)
    if LIMITED:
        error = tl.where(tl.max(decoded, 1) > limit, float("inf"), error)
    return error


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
def _more(
    a, start, best, error, second, begin, count, limit, STEP: tl.constexpr, LIMITED: tl.constexpr, BLOCKS: tl.constexpr
):
    """The best code, its error and the least error of another one, after ``count`` more from ``start + begin`` on."""
    for number in range(0, count):
        code = tl.minimum(tl.maximum(start + (begin + number * STEP), 1), 126)
        new_error = _error(a, _value(code).to(a.dtype), limit, LIMITED, 4, BLOCKS)
        better = (new_error < error) | ((new_error == error) & (code < best))
        second = tl.where(code == best, second, tl.minimum(second, tl.where(better, error, new_error)))
        best, error = tl.where(better, code, best), tl.where(better, new_error, error)
    return best, error, second


@triton.jit
def _best_e4m3(w, unit, LIMITED: tl.constexpr, BLOCKS: tl.constexpr):
    """The value, fp64, of the E4M3 code of least squared error; ``unit``: the tensor scale, a power of two."""
    inverse = 1.0 / unit
    a = (tl.abs(w).to(tl.float64) * inverse).to(tl.float32)
    limit = (inverse * (_LARGEST if LIMITED else 0.0)).to(tl.float32)
    top = tl.max(a, 1)
    start = _code_of(top / 6, True)
    # Upward: eight codes further the scale has doubled, 3.5 s is above the largest; of the lowest 15 all are tried.
    best, error = start, _error(a, _value(start), limit, LIMITED, 4, BLOCKS)
    second = tl.full((BLOCKS,), float("inf"), tl.float32)
    upward = tl.maximum(tl.max(tl.where(start < 16, 16 - start, 0), 0), 9) + 2
    best, error, second = _more(a, start, best, error, second, -2, upward, limit, 1, LIMITED, BLOCKS)
    # Downward as long as the largest alone does not err more, by the error so far: a better one only ends it sooner.
    least = _code_of(tl.maximum(top - tl.sqrt(error) * 1.001, 0.0) / 6 * 0.999, False)
    downward = tl.maximum(tl.max(start - 2 - least, 0), 0)
    best, error, second = _more(a, start, best, error, second, -3, downward, limit, -1, LIMITED, BLOCKS)
    close = (second <= error * (1 + _CLOSE)) & (error > 0)
    if tl.max(close.to(tl.int32), 0) > 0:
        a_wide, wide = a.to(tl.float64), limit.to(tl.float64)
        exact, least_error = start, _error(a_wide, _value(start).to(tl.float64), wide, LIMITED, 4, BLOCKS)
        next_error = tl.full((BLOCKS,), float("inf"), tl.float64)
        exact, least_error, next_error = _more(
            a_wide, start, exact, least_error, next_error, -2 - downward, upward + downward, wide, 1, LIMITED, BLOCKS
        )
        best = tl.where(close, exact, best)
    return _value(best).to(tl.float64)


@triton.jit
def _best_e8m0(w, BLOCKS: tl.constexpr):
    """The specification's power of two, half or twice of it, whichever errs least."""
    a = tl.abs(w).to(tl.float64)
    floor = tl.minimum(tl.maximum(_log2(tl.max(a, 1)) - 2, -127), 127)
    limit = tl.max(a * 0.0) + _LARGEST
    best = _pow2(tl.maximum(floor - 1, -127))
    error = _error(a, best, limit, True, 5, BLOCKS)
    for step in tl.static_range(2):
        scale = _pow2(tl.minimum(floor + step, 127))
        new_error = _error(a, scale, limit, True, 5, BLOCKS)
        better = new_error < error
        best, error = tl.where(better, scale, best), tl.where(better, new_error, error)
    return best


@triton.jit
def _nf4_count(u, AT_MOST: tl.constexpr):
    """How many boundaries are below fp64 ``u``, or at most it: its code, but for ties."""
    count = tl.zeros_like(u).to(tl.int32)
    for i in tl.static_range(15):
        bound = tl.full((1, 1), _NF4_BOUNDS[i], tl.float64)  # of 25 bits: as a number it would be fp32
        count += ((u >= bound) if AT_MOST else (u > bound)).to(tl.int32)
    return count


@triton.jit
def _nf4_value(code):
    value = tl.where(code > 0, _NF4[1], _NF4[0])
    for i in tl.static_range(2, 16):
        value = tl.where(code >= i, _NF4[i], value)
    return value


@triton.jit
def _load(w_ptr, block, chunk, shape, WIDTH: tl.constexpr):
    """Elements ``chunk * WIDTH`` and on of each block, fp32; 0 beyond its row or its end; ``shape``: see `_encode`."""
    k, row_blocks, total, size = shape
    place = chunk * WIDTH + tl.arange(0, WIDTH)[None, :]
    column = (block % row_blocks)[:, None] * size + place
    inside = (block < total)[:, None] & (place < size) & (column < k)
    return tl.load(w_ptr + (block // row_blocks)[:, None] * k + column, inside, other=0.0).to(tl.float32)


@triton.jit
def _quotient(w, scale):
    """fp64 ``w / scale``, 0 without a scale."""
    there = scale > 0
    u = w.to(tl.float64) / tl.where(there, scale, 1.0)[:, None]
    return tl.where(there[:, None], u, 0.0)


@triton.jit
def _best_fraction(w_ptr, block, top, shape, chunks, BY: tl.constexpr):
    """The `max` scale of least squared error among those of fractions of the largest magnitude."""
    FORMAT: tl.constexpr = BY.format
    BLOCKS: tl.constexpr = BY.blocks
    LEVELS: tl.constexpr = BY.levels
    best = _max_scale(top, 1.0, FORMAT)
    least = tl.full((BLOCKS,), float("inf"), tl.float64)
    step = tl.zeros((BLOCKS,), tl.float64)
    for _ in range(0, _FRACTIONS, 2 if FORMAT == "nf4" else 1):
        scale = _max_scale(top * (1.0 - step / _PARTS), 1.0, FORMAT)
        errors = tl.zeros((BLOCKS, 1 << LEVELS), tl.float64)
        for chunk in range(0, chunks):
            w = _load(w_ptr, block, chunk, shape, 1 << LEVELS)
            u = _quotient(w, scale)
            if FORMAT == "nf4":
                value = _nf4_value(_nf4_count(u, False)).to(tl.float64)
            else:
                most: tl.constexpr = 7.0 if FORMAT == "int4" else 127.0
                value = tl.minimum(tl.maximum((u + _WHOLE) - _WHOLE, -most), most)
            apart = value * scale[:, None] - w.to(tl.float64)
            errors += apart * apart
        error = _total(errors, LEVELS, BLOCKS)
        better = error < least
        best, least = tl.where(better, scale, best), tl.where(better, error, least)
        step += 2.0 if FORMAT == "nf4" else 1.0
    return best


@triton.jit
def _code(u, FORMAT: tl.constexpr):
    """int32 codes of elements whose quotient is ``u``, to the nearest, ties to even codes; int8's have a sign."""
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        code = ((tl.minimum(_position(u), 7.0) + _WHOLE) - _WHOLE).to(tl.int32)
        negative = (u.to(tl.int64, bitcast=True) < 0).to(tl.int32)
        code |= negative << 3
    elif FORMAT == "nf4":
        low = _nf4_count(u, False)
        code = low + ((_nf4_count(u, True) - low) & low & 1)
    elif FORMAT == "int4":
        code = tl.minimum(tl.maximum((u + _WHOLE) - _WHOLE, -7.0), 7.0).to(tl.int32) + 8
    else:
        code = tl.minimum(tl.maximum((u + _WHOLE) - _WHOLE, -127.0), 127.0).to(tl.int32)
    return code


@triton.jit
def _position(u):
    """In E2M1 codes, of a magnitude: piecewise linear."""
    u = tl.abs(u)
    return tl.minimum(tl.minimum(u * 2.0, u + 2.0), u * 0.5 + 4.0)


@triton.jit
def _meaning(code, FORMAT: tl.constexpr):
    """The value of a code, fp32."""
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        magnitude = code & 7
        normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
        bits = tl.where(magnitude < 2, magnitude * 0x3F000000, normal) | ((code & 8) << 28)
        value = bits.to(tl.float32, bitcast=True)
    elif FORMAT == "nf4":
        value = _nf4_value(code)
    elif FORMAT == "int4":
        value = (code - 8).to(tl.float32)
    else:
        value = code.to(tl.float32)
    return value


@triton.jit
def _joined(codes, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    """Two codes a byte, low nibble first."""
    left, right = tl.split(tl.reshape(codes, (BLOCKS, WIDTH // 2, 2)))
    return (left | (right << 4)).to(tl.uint8)


@triton.jit
def _encode(
    w_ptr, codes_ptr, scales_ptr, fine_ptr, values_ptr, unit_ptr, shape, chunks, BY: tl.constexpr, MAXIMA: tl.constexpr
):
    """``shape``: elements in a row, its blocks, all blocks, elements in a block, which come in ``chunks``.

    ``unit_ptr``: the tensor scale, fp32; or, for ``values_ptr``, bits of so many magnitudes, the largest among them.
    """
    FORMAT: tl.constexpr = BY.format
    BLOCKS: tl.constexpr = BY.blocks
    WIDTH: tl.constexpr = 1 << BY.levels
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    if values_ptr is None:
        unit = tl.load(unit_ptr)
    else:
        bits = tl.max(tl.load(unit_ptr + tl.arange(0, MAXIMA)), 0)
        unit = tl.where(bits < 0x7F800000, 1.0, float("nan"))
        if FORMAT == "nvfp4":  # rounded to fp32 once: fp64 has more than twice its bits
            most = (bits.to(tl.float32, bitcast=True).to(tl.float64) / 2688.0).to(tl.float32)
            unit = tl.where(bits == 0, 1.0, tl.maximum(most, _SMALLEST) * unit)
    k, row_blocks, total, size = shape
    unit64 = unit.to(tl.float64)
    w = _load(w_ptr, block, 0, shape, WIDTH)
    top = tl.max(tl.abs(w), 1)
    for chunk in range(1, chunks):
        top = tl.maximum(top, tl.max(tl.abs(_load(w_ptr, block, chunk, shape, WIDTH)), 1))
    top64 = top.to(tl.float64)
    if BY.search == "max":
        scale = _max_scale(top64, unit64, FORMAT)
    elif FORMAT == "nvfp4":
        scale = _best_e4m3(w, unit64, BY.limited, BLOCKS)
    elif FORMAT == "mxfp4":
        scale = _best_e8m0(w, BLOCKS)
    else:
        scale = _best_fraction(w_ptr, block, top64, shape, chunks, BY)
    if values_ptr is None:
        tl.store(scales_ptr + block, _stored(scale, FORMAT), block < total)
    for chunk in range(0, chunks):
        w = _load(w_ptr, block, chunk, shape, WIDTH)
        u = _quotient(w, scale * unit64)
        code = _code(u, FORMAT)
        place = chunk * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = (block < total)[:, None] & (place < size)
        if values_ptr is not None:
            value = (_meaning(code, FORMAT) * scale.to(tl.float32)[:, None]) * unit
            column = (block % row_blocks)[:, None] * size + place
            to = values_ptr + (block // row_blocks)[:, None] * k + column
            tl.store(to, value.to(values_ptr.dtype.element_ty), inside & (column < k))
        elif FORMAT == "int8":
            tl.store(codes_ptr + block[:, None] * size + place, code.to(tl.int8), inside)
        else:
            to = block[:, None] * (size // 2) + chunk * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
            tl.store(codes_ptr + to, _joined(code, WIDTH, BLOCKS), (block < total)[:, None])
            if fine_ptr is not None:
                magnitude = code & 7
                offset = tl.floor((_position(u) - magnitude.to(tl.float64)) * 16.0 + 0.5)
                least = tl.where(magnitude == 0, 0, -8)
                fine = tl.maximum(tl.minimum(offset, 7.0).to(tl.int32), least) + 8
                tl.store(fine_ptr + to, _joined(fine, WIDTH, BLOCKS), (block < total)[:, None])


@triton.jit
def _maxima(w_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """The largest magnitude that a program meets, as fp32's bits: in their order NaN comes last."""
    most = tl.zeros((BLOCK,), tl.int32)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(begin, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + at, at < count, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(w).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(out_ptr + tl.program_id(0), tl.max(most, 0))


def _launch(w_NK: Tensor, form: Format, search: str, unit: Tensor, limited: bool, *out: Tensor | None) -> None:
    n, k = w_NK.shape
    size = form.block_of(k)
    row_blocks, width = -(-k // size), min(LANES, max(2, triton.next_power_of_2(size)))
    by = Packing(form.name, search, width.bit_length() - 1, ELEMENTS // width, limited)
    shape, chunks = (k, row_blocks, n * row_blocks, size), triton.cdiv(size, width)
    grid = (triton.cdiv(n * row_blocks, by.blocks),)
    _encode[grid](w_NK, *out, unit, shape, chunks, by, MAXIMA, num_warps=4, enable_fp_fusion=False)


def encode(
    w_NK: Tensor, form: Format, scale_search: str, tensor_scale: Tensor, exponent: int, parts: bool = False
) -> tuple[Tensor, ...]:
    """Codes, block scales and, with ``parts``, fine codes of finite weights, as `numerics.fp4.Encoder`."""
    n, k = w_NK.shape
    codes = torch.empty(form.codes_shape(n, k), dtype=form.codes_dtype, device=w_NK.device)
    scales = torch.empty(form.scales_shape(n, k), dtype=form.scale_dtype, device=w_NK.device)
    fine = torch.empty_like(codes) if parts else None
    with on_device(w_NK):
        limited = exponent > 115  # what an nvfp4 scale decodes to may leave fp32
        bits = scales.view(torch.int16) if scales.dtype == torch.bfloat16 else scales
        _launch(w_NK.contiguous(), form, scale_search, tensor_scale, limited, codes, bits, fine, None)
    return (codes, scales) if fine is None else (codes, scales, fine)


def round_trip(w_NK: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """As `encode.round_trip`, in two launches."""
    w_NK = w_NK.detach().contiguous()
    out = torch.empty(w_NK.shape, dtype=dtype if dtype in DTYPES else torch.float32, device=w_NK.device)
    maxima = torch.empty(MAXIMA, dtype=torch.int32, device=w_NK.device)
    with on_device(w_NK):
        _maxima[(MAXIMA,)](w_NK, maxima, w_NK.numel(), BLOCK=MAXIMA_BLOCK, num_warps=8)
        _launch(w_NK, form, "max", maxima, False, None, None, None, out)
    return out.to(dtype)


@triton.jit
def _encode_rows(x_ptr, codes_ptr, scales_ptr, unit_ptr, maxima_ptr, shape, BLOCKS: tl.constexpr, MAXIMA: tl.constexpr):
    """nvfp4 codes, `max` scales, swizzled, and the tensor scale `w4a4.power_scale`; ``shape`` as for `_encode`.

    In fp32, exactly: elements of half types have 11 significant bits at most and the tensor scale is a power of two, so
    a quotient lies on a rounding boundary, whose product with the divisor has as few, or 2^-12 of it and more apart.
    """
    bits = tl.max(tl.load(maxima_ptr + tl.arange(0, MAXIMA)), 0)
    most = tl.maximum(tl.div_rn(bits.to(tl.float32, bitcast=True), 2688.0), _SMALLEST)
    power = (most.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    if tl.program_id(0) == 0:
        tl.store(unit_ptr, tl.where(bits < 0x7F800000, power.to(tl.float32, bitcast=True), float("nan")))
    _, row_blocks, total, _ = shape
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    x = _load(x_ptr, block, 0, shape, 16) * (0x7F000000 - power).to(tl.float32, bitcast=True)  # over the tensor scale
    top = tl.div_rn(tl.max(tl.abs(x), 1), 6.0)
    bits = top.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((top * 512.0 + _WHOLE32) - _WHOLE32).to(tl.int32)
    stored = tl.where(top < 0.015625, subnormal, tl.minimum(normal, 126))
    place = swizzled_place(block // row_blocks, block % row_blocks, row_blocks)
    tl.store(scales_ptr + place, stored.to(tl.uint8), block < total)
    there = (stored > 0)[:, None]
    scale = tl.broadcast_to(tl.where(stored > 0, _value(stored), 1.0)[:, None], (BLOCKS, 16))
    u = tl.where(there, tl.div_rn(x, scale), 0.0)
    code = ((tl.minimum(_position(u), 7.0) + _WHOLE32) - _WHOLE32).to(tl.int32)
    code |= (u.to(tl.int32, bitcast=True) < 0).to(tl.int32) << 3
    to = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(codes_ptr + to, _joined(code, 16, BLOCKS), (block < total)[:, None])


def encode_rows(x_MK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`w4a4.quantize_rows` of bf16 or fp16: codes, scales in `layout.swizzled` memory, and the tensor scale, in two
    launches; K is a multiple of 16. Reads no value on the host; of inf and NaN the tensor scale is NaN."""
    (m, k), device = x_MK.shape, x_MK.device
    codes, scales = torch.empty(m, k // 2, dtype=torch.uint8, device=device), layout.swizzled(m, k // 16, device)
    unit = torch.empty((), dtype=torch.float32, device=device)
    maxima = torch.empty(MAXIMA, dtype=torch.int32, device=device)
    blocks, count = ELEMENTS // 16, m * k // 16
    with on_device(x_MK):
        _maxima[(MAXIMA,)](x_MK, maxima, x_MK.numel(), BLOCK=MAXIMA_BLOCK, num_warps=8)
        args = (x_MK, codes, scales, unit, maxima, (k, k // 16, count, 16), blocks, MAXIMA)
        _encode_rows[(triton.cdiv(count, blocks),)](*args, num_warps=4, enable_fp_fusion=False)
    return codes, scales, unit
