"""Codecs against exact rational arithmetic (fp4_reference.py):
decoders over all codes and scales, encoders bit for bit.
"""

import math
from fractions import Fraction

import pytest
import torch

from tests.numerics import fp4_reference as reference
from vblackwell.numerics.formats import FORMATS
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.packed import PackedTensor, unpack_nibbles
from vblackwell.numerics.search import best_e4m3

BLOCK = {"nvfp4": 16, "mxfp4": 32}


def fractions(tensor):
    return [Fraction(value) for value in tensor.double().flatten().tolist()]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def ties(block, rows, gen):
    """Blocks of elements on rounding boundaries of power-of-two scales and one float32 to either side of them."""
    boundaries = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    w = boundaries[torch.randint(7, (rows, block), generator=gen)]
    w[:, 0] = 6.0
    side = torch.randint(-1, 2, (rows, block), generator=gen)
    w = torch.where(side > 0, torch.nextafter(w, torch.tensor(9.0)), w)
    w = torch.where(side < 0, torch.nextafter(w, torch.tensor(0.0)), w)
    sign = torch.randint(0, 2, (rows, block), generator=gen) * 2 - 1
    return w * sign * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=gen).float())


def degenerate(block, rows, gen):
    """Zero, constant, one-hot, sparse, negative-zero, on-grid blocks."""
    w = torch.zeros(rows, block)
    w[1::6] = 0.37
    w[2::6, 3] = torch.randn(w[2::6].shape[0], generator=gen)
    w[3::6] = torch.randn(w[3::6].shape, generator=gen) * (torch.rand(w[3::6].shape, generator=gen) < 0.15)
    w[4::6] = -0.0
    w[5::6] = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[torch.randint(8, w[5::6].shape, generator=gen)]
    return w


def spread(block, rows, gen):
    """Magnitudes of blocks from far below to far above each other, so that E4M3's subnormals and zero are met."""
    return torch.randn(rows, block, generator=gen) * torch.exp2(torch.linspace(-24, 4, rows)).unsqueeze(1)


KINDS = {
    "gaussian": lambda block, rows, gen: torch.randn(rows, block, generator=gen) * 0.02,
    "bfloat16": lambda block, rows, gen: (torch.randn(rows, block, generator=gen) * 0.02).bfloat16(),
    "float16": lambda block, rows, gen: (torch.randn(rows, block, generator=gen) * 0.02).half(),
    "ties": ties,
    "degenerate": degenerate,
    "spread": spread,
    "subnormal": lambda block, rows, gen: torch.randn(rows, block, generator=gen) * 1e-40,
    "smallest": lambda block, rows, gen: torch.randint(-2, 3, (rows, block), generator=gen) * 2.0**-149,
    "huge": lambda block, rows, gen: torch.randn(rows, block, generator=gen) * 2e37,
}


def make(kind, format, rows=24):
    return KINDS[kind](BLOCK[format], rows, generator(sum(map(ord, kind + format))))


def check_elements(w, packed, scales):
    """Every element code is the nearest to the exact product of scales, ties to even, with the sign of the weight."""
    codes = unpack_nibbles(packed.codes)
    for row, scale in enumerate(scales):
        block = fractions(w[row])
        magnitudes = reference.e2m1_magnitudes(block, scale)
        signs = [8 if scale and math.copysign(1, value) < 0 else 0 for value in w[row].tolist()]
        assert codes[row].tolist() == [m | s for m, s in zip(magnitudes, signs, strict=True)], (row, block)


@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4_max_is_bit_equal(kind):
    w = make(kind, "nvfp4")
    packed = quantize(w, "nvfp4", "max")
    tensor_scale = reference.max_tensor_scale(fractions(w))
    assert Fraction(float(packed.tensor_scale)) == tensor_scale
    codes = [reference.max_e4m3_code(fractions(row), tensor_scale) for row in w]
    assert packed.block_scales.flatten().tolist() == codes
    check_elements(w, packed, [reference.E4M3[code] * tensor_scale for code in codes])


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4_max_is_bit_equal(kind):
    w = make(kind, "mxfp4")
    packed = quantize(w, "mxfp4", "max")
    codes = [reference.max_e8m0_code(fractions(row)) for row in w]
    assert packed.block_scales.flatten().tolist() == codes
    check_elements(w, packed, [reference.e8m0(code) for code in codes])


def test_max_scale_is_exact_next_to_its_ties():
    """Block maxima one float32 around amax / 6 / ts = midpoint of two E4M3 scales, for a tensor scale of 24 bits."""
    anchor = torch.tensor(1.2345678)
    tensor_scale = reference.max_tensor_scale([Fraction(float(anchor))])
    rows = [[float(anchor)] + [0.0] * 15]
    for code in range(0x7E):
        middle = (reference.E4M3[code] + reference.E4M3[code + 1]) / 2 * 6 * tensor_scale
        near = torch.tensor(float(middle))
        for value in (torch.nextafter(near, torch.tensor(0.0)), near, torch.nextafter(near, torch.tensor(9.0))):
            if value < anchor:
                rows.append([float(value)] + [0.0] * 15)
    w = torch.tensor(rows)
    codes = [reference.max_e4m3_code(fractions(row), tensor_scale) for row in w]
    assert quantize(w, "nvfp4", "max").block_scales.flatten().tolist() == codes


@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4_mse_is_the_optimum_of_all_scales(kind):
    w = make(kind, "nvfp4", 12)
    packed = quantize(w, "nvfp4", "mse")
    tensor_scale = Fraction(float(packed.tensor_scale))
    assert tensor_scale == reference.two_to(reference.floor_log2(tensor_scale)), "a power of two"
    chosen = packed.block_scales.flatten().tolist()
    for row, code in list(zip(w, chosen, strict=True))[::4]:  # fractions are slow
        block = fractions(row)
        errors = [reference.fast_squared_error(block, scale * tensor_scale) for scale in reference.E4M3[1:]]
        assert code >= 1
        assert errors[code - 1] <= min(errors) * (1 + Fraction(1, 10**6))
        assert errors[code - 1] == reference.squared_error(block, reference.E4M3[code] * tensor_scale)
    check_elements(w, packed, [reference.E4M3[code] * tensor_scale for code in chosen])


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4_mse_is_the_best_of_three(kind):
    w = make(kind, "mxfp4", 12)
    packed = quantize(w, "mxfp4", "mse")
    chosen = packed.block_scales.flatten().tolist()
    for row, code in zip(w, chosen, strict=True):
        block, floor = fractions(row), reference.max_e8m0_code(fractions(row))
        candidates = [min(254, max(0, floor + step)) for step in (-1, 0, 1)]
        errors = [reference.squared_error(block, reference.e8m0(candidate)) for candidate in candidates]
        assert code in candidates
        assert errors[candidates.index(code)] <= min(errors) * (1 + Fraction(1, 10**6))
    check_elements(w, packed, [reference.e8m0(code) for code in chosen])


def test_a_tied_pair_of_scales_gives_the_smaller_code():
    w = torch.zeros(2, 16)
    w[0, 0] = 1.0  # every scale 2^n * {1, 1.5} / ... that reaches 1.0 has no error; row 1 has none with any scale
    packed = quantize(w, "nvfp4", "mse")
    tensor_scale = Fraction(float(packed.tensor_scale))
    exact = [c for c in range(1, 127) if Fraction(1) / (reference.E4M3[c] * tensor_scale) in reference.E2M1]
    assert packed.block_scales.flatten().tolist() == [min(exact), 1]


def test_an_optimum_that_would_decode_to_infinity_is_not_taken():
    w = torch.full((1, 16), torch.finfo(torch.float32).max)
    for format in ("nvfp4", "mxfp4"):
        assert torch.isfinite(quantize(w, format, "mse").dequantize()).all()
        assert torch.isfinite(quantize(w, format, "max").dequantize()).all()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_decoder_is_exact_over_all_codes_and_scales(format):
    """16 codes x 256 scales x two tensor scales, against bit fields; the product is rounded once, to fp32."""
    block, form = BLOCK[format], FORMATS[format]
    byte = torch.tensor([low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2), strict=True)])
    codes = byte.to(torch.uint8).repeat(256, block // 16)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    for tensor_scale in (1.0, 3.4e-5) if format == "nvfp4" else (1.0,):
        packed = PackedTensor(form, (256, block), torch.float32, codes, scales, torch.tensor(tensor_scale))
        decoded = packed.dequantize()
        factor = Fraction(float(packed.tensor_scale))
        values = dict[int, list[float]]()
        for code in range(256):
            negative_scale = format == "nvfp4" and code >= 128
            magnitude_code = code - 128 if negative_scale else code
            if magnitude_code == (0x7F if format == "nvfp4" else 0xFF):
                assert decoded[code].isnan().all()
                continue
            scale = reference.e4m3(magnitude_code) if format == "nvfp4" else reference.e8m0(code)
            if magnitude_code not in values:
                expected = [reference.round_float32(value * scale * factor) for value in reference.E2M1]
                values[magnitude_code] = [
                    math.inf if each > reference.FLOAT32_MAX else float(each) for each in expected
                ]
            signed = values[magnitude_code] + [-value for value in values[magnitude_code]]
            if negative_scale:
                signed = [-value for value in signed]
            assert decoded[code].tolist() == signed * (block // 16), code


def nf4_boundaries():
    """Midpoints of neighbouring nf4 values; those that float32 holds are ties for a scale of 1."""
    values = FORMATS["nf4"].values
    return [(low + high) / 2 for low, high in zip(values, values[1:], strict=False)]


def brute_force(a, chunk=128):
    """(blocks, 126) squared errors over all positive scales, in float64 by distance to every value."""
    scales = torch.tensor([float(scale) for scale in reference.E4M3[1:]], dtype=torch.float64)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[:, None] * scales
    parts = [(part[:, :, None, None] - grid).abs().amin(2).square().sum(1) for part in a.double().split(chunk)]
    return torch.cat(parts)


SEARCHED = {
    "gaussian": lambda n, gen: torch.randn(n, 16, generator=gen) * 100,
    "heavy": lambda n, gen: torch.randn(n, 16, generator=gen) ** 3 * 40,
    "subnormal scales": lambda n, gen: (
        torch.randn(n, 16, generator=gen) * torch.exp2(-torch.rand(n, 1, generator=gen) * 8)
    ),
    "sparse": lambda n, gen: torch.randn(n, 16, generator=gen) * (torch.rand(n, 16, generator=gen) < 0.2),
    "integers": lambda n, gen: torch.randint(0, 9, (n, 16), generator=gen).float(),
    "few subnormal": lambda n, gen: torch.randint(0, 9, (n, 16), generator=gen) * 2.0**-9,
}


@pytest.mark.parametrize("kind", SEARCHED)
def test_pruned_search_finds_the_code_of_the_exhaustive_one(kind):
    """A thousand blocks against all 126 scales; of scales that err the same the smallest wins."""
    a = SEARCHED[kind](1000, generator(11)).abs()
    errors = brute_force(a)
    found = best_e4m3(a.t().contiguous()).long() - 1
    least = errors.amin(1)
    smallest = (errors <= least[:, None] * (1 + 1e-12)).int().argmax(1)
    assert torch.equal(found, smallest)


@pytest.mark.slow
def test_nf4_int4_int8_elements_are_nearest():
    """`max` scales are amax over the largest code, rounded once;
    elements nearest to the exact product, ties to even.
    """
    for format, block, precision, top in (("nf4", 64, 24, 1), ("int4", 32, 8, 7), ("int8", 12, 24, 127)):
        values = [Fraction(value) for value in FORMATS[format].values] or list(range(-127, 128))
        gen = generator(7)
        w = torch.randn(12, block, generator=gen) * torch.exp2(torch.linspace(-30, 10, 12)).unsqueeze(1)
        w[3] = 0
        w[4] = torch.arange(block) / 2 * 2.0**-5  # ties of the integer formats
        w[5, :12] = torch.tensor([1.0] + nf4_boundaries()[:11])
        w[6, :5] = torch.tensor([1.0] + nf4_boundaries()[11:])
        packed = quantize(w, format, "max")
        codes = packed.codes.tolist() if format == "int8" else unpack_nibbles(packed.codes).tolist()
        first = {"nf4": 0, "int4": 0, "int8": -127}[format]
        for row in range(12):
            elements = fractions(w[row])
            scale = reference.round_float(max(map(abs, elements)) / top, precision, -126)
            assert Fraction(float(packed.block_scales[row, 0])) == scale
            for code, element in zip(codes[row], elements, strict=True):
                if scale == 0:
                    assert values[code - first] == 0
                    continue
                allowed = values[1:] if format == "int4" else values  # -8 is never produced
                distances = [abs(value * scale - element) for value in allowed]
                best = [values.index(v) for v, d in zip(allowed, distances, strict=True) if d == min(distances)]
                assert code - first in best
                if len(best) == 2:
                    assert code % 2 == 0, "ties to even"


def test_fraction_search_never_loses_to_the_plain_scale():
    gen = generator(3)
    w = torch.randn(64, 128, generator=gen)
    w[::7, 5] *= 12
    for format in ("nf4", "int4", "int8"):
        plain, searched = (quantize(w, format, search).dequantize() for search in ("max", "mse"))
        assert ((searched - w).square().sum(1) <= (plain - w).square().sum(1) * (1 + 1e-6)).all(), format
