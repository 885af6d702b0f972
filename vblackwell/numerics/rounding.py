"""Exact rounding: fp64 arithmetic arranged so that every decision equals that of rational arithmetic.

A weight has 24 significant bits; the product of block scale, tensor scale and a rounding boundary has at most
4 + 24 + 3 = 31, or 24 + 25 = 49 for nf4: exact in fp64. Where a quotient is compared with a boundary instead, they are
equal or apart by at least 2^-49 relative, and fp64's 2^-53 cannot carry the quotient across. No intermediate leaves
fp64's exponent range. In fp32 ``w / (s * ts)`` crosses ties, and two machines pack different bytes.

``B`` blocks, ``E`` elements a block.
"""

import torch
from torch import Tensor

from vblackwell.numerics.formats import E4M3_MAX, E8M0_MAX_CODE, Format


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2(x)) of fp64 ``x`` >= 0 as int64, exactly; a zero gives -1023."""
    return (x.view(torch.int64) >> 52) - 1023


def pow2(exponent: Tensor) -> Tensor:
    """2 ** exponent as fp64, exactly, for int64 exponents from -1022 to 1023 (torch.ldexp goes through fp32)."""
    return ((exponent + 1023) << 52).view(torch.float64)


def round_to_precision(x: Tensor, significand_bits: int, min_exponent: int) -> Tensor:
    """``x`` >= 0 (fp64) rounded, ties to even, to a binary format with this precision and smallest normal exponent."""
    step = pow2(floor_log2(x).clamp_min(min_exponent) - (significand_bits - 1))
    return torch.round(x / step) * step


def e8m0_floor(amax: Tensor) -> Tensor:
    """E8M0 bits (uint8) of ``2 ** (floor(log2 amax) - 2)``, saturating: the scale of the microscaling specification."""
    return (floor_log2(amax) - 2 + 127).clamp(0, E8M0_MAX_CODE).to(torch.uint8)


def decode_scales(bits: Tensor, form: Format) -> Tensor:
    """Block scales as fp32. E4M3 0x7F and 0xFF, and E8M0 0xFF, are NaN."""
    if form.name == "nvfp4":
        return bits.view(torch.float8_e4m3fn).to(torch.float32)
    if form.name == "mxfp4":
        return bits.view(torch.float8_e8m0fnu).to(torch.float32)
    return bits.to(torch.float32)


def max_scale(amax: Tensor, tensor_scale: Tensor, form: Format) -> Tensor:
    """The published block scale for blocks of largest magnitude ``amax`` (fp64): amax / largest code, rounded once."""
    if form.name == "nvfp4":
        quotient = amax / (form.max_value * tensor_scale.to(torch.float64))
        rounded = round_to_precision(quotient, 4, -6).clamp_max(E4M3_MAX)
        return rounded.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    if form.name == "mxfp4":
        return e8m0_floor(amax)
    significand_bits = 8 if form.scale_dtype == torch.bfloat16 else 24
    largest = torch.full_like(amax, form.max_value)  # CUDA would multiply with the reciprocal of a number
    return round_to_precision(amax / largest, significand_bits, -126).to(form.scale_dtype)


def round_elements(w_BE: Tensor, scale_B: Tensor, form: Format) -> Tensor:
    """Codes (uint8; int8 for int8) of fp64 ``w_BE``: nearest to ``w / scale``, the exact fp64 product of both scales,
    ties to even codes, saturating. A block whose scale is zero gets zero codes.
    """
    scale_B1 = scale_B.unsqueeze(-1)
    u = torch.where(scale_B1 > 0, w_BE / scale_B1, 0.0)
    if form.name in ("nvfp4", "mxfp4"):
        # E2M1's codes 0..7 of magnitudes are the integers of min(2u, u + 2, u/2 + 4): one rounding to even does all.
        magnitude = u.abs()
        position = torch.minimum(magnitude * 2, magnitude + 2)
        position = torch.minimum(position, magnitude.mul_(0.5).add_(4)).clamp_max_(7)
        return position.round_().to(torch.uint8) | (u.signbit().to(torch.uint8) << 3)
    if form.name == "nf4":
        table = torch.tensor(form.values, dtype=torch.float64, device=u.device)
        boundaries = (table[1:] + table[:-1]) / 2  # exact: fp32 values, 25 bits
        low = torch.bucketize(u, boundaries, out_int32=True)
        high = torch.bucketize(u, boundaries, out_int32=True, right=True)  # one more than `low` on a tie only
        return (low + ((high - low) & low & 1)).to(torch.uint8)
    q = torch.round(u).clamp_(-form.max_value, form.max_value)
    return (q + form.zero_code).to(form.codes_dtype)
