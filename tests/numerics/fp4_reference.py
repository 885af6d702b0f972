"""The block formats once more, slowly and in exact rational arithmetic: what the codecs are compared with.

Shares no code and no table with the package: formats are built from their bit fields, rounding is a search for the
nearest value (ties to the even code), errors are fractions.
"""

from fractions import Fraction

E2M1 = [0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6]
E2M1_ODD_BOUNDARIES = [(E2M1[i] + E2M1[i + 1]) / Fraction(2) for i in range(7)]
FLOAT32_MAX = Fraction(2**24 - 1) * Fraction(2) ** 104


def two_to(exponent):
    return Fraction(2) ** exponent


def e4m3(code):
    """Value of a positive E4M3 code: 4 exponent bits, bias 7, 3 mantissa bits; 0x7F is NaN."""
    exponent, mantissa = code >> 3, code & 7
    assert 0 <= code <= 0x7E
    return two_to(-9) * mantissa if exponent == 0 else two_to(exponent - 10) * (8 + mantissa)


E4M3 = [e4m3(code) for code in range(0x7F)]


def e8m0(code):
    assert 0 <= code <= 0xFE
    return two_to(code - 127)


def nearest(x, values):
    """Index of the value nearest to x; of two equally near the even index."""
    return min(range(len(values)), key=lambda i: (abs(values[i] - x), i & 1))


def round_float(x, precision, min_exponent):
    """x >= 0 to a binary format with this many significant bits and smallest normal exponent, ties to even."""
    if x == 0:
        return Fraction(0)
    exponent = min_exponent
    while two_to(exponent + 1) <= x:
        exponent += 1
    step = two_to(exponent - precision + 1)
    down = x // step
    rest = x / step - down
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2 == 1)
    return (down + up) * step


def round_float32(x):
    return round_float(x, 24, -126)


def floor_log2(x):
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if two_to(exponent) <= x else exponent - 1


def e2m1_magnitudes(block, scale):
    """Codes 0..7 of |w| / scale."""
    return [nearest(abs(w) / scale, E2M1) if scale else 0 for w in block]


def squared_error(block, scale):
    """Exact squared error of the block rounded to E2M1 times scale."""
    return sum((abs(w) - E2M1[code] * scale) ** 2 for w, code in zip(block, e2m1_magnitudes(block, scale), strict=True))


def fast_squared_error(block, scale):
    """The same in integers of a common exponent: an exhaustive search takes 126 of these a block."""
    unit = min(floor_log2(scale) - 5, -160)
    s = int(scale / two_to(unit))
    total = 0
    for w in block:
        a = int(abs(w) / two_to(unit))
        total += min((a - int(2 * value) * s // 2) ** 2 for value in E2M1)
    return total * two_to(2 * unit)


def max_tensor_scale(elements):
    """amax / (6 * 448) in fp32, at least the smallest normal number; 1 for a tensor of zeros."""
    amax = max(abs(w) for w in elements)
    return max(round_float32(amax / 2688), two_to(-126)) if amax else Fraction(1)


def max_e4m3_code(block, tensor_scale):
    return nearest(max(abs(w) for w in block) / 6 / tensor_scale, E4M3)


def max_e8m0_code(block):
    amax = max(abs(w) for w in block)
    return min(254, max(0, floor_log2(amax) - 2 + 127)) if amax else 0
