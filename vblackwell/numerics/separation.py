"""Precision separation: a weight as a coarse nvfp4 part and a fine 4-bit part, either stored and moved by itself.

The coarse part is what ``quantize(w, 'nvfp4')`` makes, byte for byte. The fine part has no scales: its 16 levels divide
the rounding cell of each coarse code. E2M1 codes are consecutive integers of a piecewise linear scale, so a magnitude
``code + (fine - 8) / 16`` on that scale is again such a number, E2M5, and the cell is the half step to either side:

    value = e2m5(16 * code + fine - 8),    e2m5(i) = max(i / 32, i / 16 - 2, i / 8 - 8)
    weight = (+-value * block_scale) * tensor_scale        in fp32, one rounding

What was exact in nvfp4 stays exact. A zero code takes fine codes 8..15 only: its sign says on which side of zero the
weight lies. 4 + 4 + 0.5 = 8.5 bits a weight.

``N`` rows, ``K`` columns, ``P`` columns padded to the block of 16, ``B`` blocks, ``E`` elements a block.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.numerics.formats import E4M3_MAX, FORMATS
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.packed import FINE_ZERO, PackedTensor, e2m5, pack_nibbles, padded_tile, tiles, unpack_nibbles
from vblackwell.numerics.round_trip import max_tensor_scale
from vblackwell.numerics.rounding import decode_scales

FORM = FORMATS["nvfp4"]
_TILE_ELEMENTS = 1 << 18  # fp64 temporaries of 2 MiB each
_TOP = 7 * 16 + 7  # the largest magnitude, in sixteenths of a code


def separate(tensor: Tensor, scale_search: str = "mse", **options: Any) -> PackedTensor:
    """``tensor`` in two parts, any shape and size; ``options``, and what is refused, as for `quantize`."""
    return refine(quantize(tensor, FORM.name, scale_search, **options), tensor)


def refine(coarse: PackedTensor, tensor: Tensor) -> PackedTensor:
    """``coarse``, which ``tensor`` was rounded to, and its fine part: the nearest level within the cell of each coarse
    code, in fp64; on a tie the upper one. Raises ConfigurationError for another format or shape.
    """
    if coarse.format != FORM.name or coarse.shape != tuple(tensor.shape):
        what = f"a {coarse.format} part of shape {coarse.shape}"
        raise ConfigurationError(f"{what} cannot be refined by a tensor of shape {tuple(tensor.shape)}")
    w_NK = tensor.detach().reshape(coarse.n, coarse.k)
    fine = torch.empty_like(coarse.codes)
    for rows, columns, half, blocks in tiles(FORM, coarse.n, coarse.k, _TILE_ELEMENTS):
        codes = unpack_nibbles(coarse.codes[rows, half])
        tile = padded_tile(w_NK[rows, columns].to(torch.float64), codes.shape[1])
        scale = decode_scales(coarse.block_scales[rows, blocks], FORM).to(torch.float64) * coarse.tensor_scale.double()
        u_BE = tile.view(*scale.shape, 16) / torch.where(scale > 0, scale, torch.inf).unsqueeze(-1)
        u = u_BE.view(codes.shape).mul_(1.0 - 2.0 * (codes >> 3))  # along the code's own sign
        magnitude = codes & 7
        offset = _position(u.clamp_min_(0)).sub_(magnitude).mul_(16).add_(0.5).floor_()
        lowest = torch.where(magnitude == 0, 0.0, -8.0).to(offset.dtype)
        fine[rows, half] = pack_nibbles(offset.clamp_(max=7).maximum(lowest).add_(FINE_ZERO).to(torch.uint8))
    return replace(coarse, fine=fine)


def _position(u: Tensor) -> Tensor:
    """In E2M1 codes, of a magnitude: the inverse of `e2m5`."""
    return torch.minimum(torch.minimum(u * 2, u + 2), u * 0.5 + 4)


@dataclass(frozen=True, eq=False)
class Scales:
    """What stays from step to step while a weight trains: uint8 (N, P / 16) E4M3, and fp32, 0-dimensional."""

    block: Tensor
    tensor: Tensor


def training_scales(w_NK: Tensor) -> Scales:
    """`max` scales of a weight, without reading a value on the host; NaN where the weight is not finite."""
    return _scales_of(_block_maxima(w_NK))


def renewed_scales(w_NK: Tensor, kept: Scales, threshold: float) -> tuple[Scales, Tensor]:
    """``kept`` as long as the weight has drifted by at most ``threshold``, else new scales; and the drift,
    0-dimensional, ``sum |amax - 6 s| / sum 6 s`` over blocks: scales of three mantissa bits leave 0.022.
    """
    amax_NB = _block_maxima(w_NK)
    old_NB = decode_scales(kept.block, FORM).mul_(kept.tensor * FORM.max_value)
    drift = (amax_NB - old_NB).abs_().sum() / old_NB.sum().clamp_min(torch.finfo(torch.float32).tiny)
    fresh = _scales_of(amax_NB)
    over = ~(drift <= threshold)  # NaN is over
    return Scales(torch.where(over, fresh.block, kept.block), torch.where(over, fresh.tensor, kept.tensor)), drift


def _scales_of(amax_NB: Tensor) -> Scales:
    tensor_scale = max_tensor_scale(amax_NB.amax(), FORM)
    wanted = (amax_NB / (FORM.max_value * tensor_scale)).clamp_max_(E4M3_MAX)
    return Scales(wanted.to(torch.float8_e4m3fn).view(torch.uint8), tensor_scale)


def _block_maxima(w_NK: Tensor) -> Tensor:
    """fp32 (N, P / 16): the largest magnitude of each block; NaN where one is in it."""
    (n, k), w_NK = w_NK.shape, w_NK.detach()
    whole = k // 16 * 16
    w_NBE = w_NK[:, :whole].reshape(n, whole // 16, 16)
    maxima = torch.maximum(w_NBE.amax(2), -w_NBE.amin(2))
    if k > whole:
        maxima = torch.cat([maxima, w_NK[:, whole:].abs().amax(1, keepdim=True)], 1)
    return maxima.to(torch.float32).abs_()  # a block of zeros has no sign


def round_to_parts(w_NK: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    """(N, K) weights rounded on kept scales to the nearest E2M5 value of all, ties to even, and back, as ``dtype``.

    In fp32: compared with ``separate(w, 'max').dequantize()`` it may take the next coarse code within 1/32 step of a
    boundary, which is nearer. Magnitudes beyond the last level saturate; NaN stays.
    """
    n, k = w_NK.shape
    out = torch.empty(n, k, dtype=dtype, device=w_NK.device)
    for rows, columns, _, blocks in tiles(FORM, n, k, _TILE_ELEMENTS):
        scale_B1 = decode_scales(scales.block[rows, blocks], FORM).unsqueeze(-1)
        tile = padded_tile(w_NK.detach()[rows, columns].to(torch.float32), 16 * scale_B1.shape[1])
        tile_BE = tile.reshape(*scale_B1.shape[:2], 16)
        u = tile_BE.abs() / torch.where(scale_B1 == 0, torch.inf, scale_B1 * scales.tensor)
        sixteenths = _position(u).mul_(16).round_().clamp_max_(_TOP)
        rounded = e2m5(sixteenths).mul_(scale_B1).mul_(scales.tensor).copysign_(tile_BE)
        out[rows, columns] = rounded.flatten(1)[:, : columns.stop - columns.start]
    return out
