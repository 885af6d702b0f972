"""Encode and decode at once: the weights a straight-through forward multiplies by.

The numbers are exactly those of ``quantize(w, format, 'max').dequantize()``. Unlike there nothing here looks at a value from
the host, so a training step stays asynchronous; inf and NaN are not refused but come out as NaN, where the loss shows
them. `max` scales and not `mse`, because the search would cost more than the layer's matmul, and because a scale that
follows the largest weight moves smoothly while weights train.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.numerics.formats import E4M3_MAX, Format
from vblackwell.numerics.packed import tiles
from vblackwell.numerics.rounding import decode_elements, decode_scales, max_scale, round_elements

_TILE_ELEMENTS = 1 << 18  # about 12 MiB of fp64 temporaries


def round_trip(w_NK: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """(N, K) weights rounded to ``form`` and back, once to fp32 and then to ``dtype``."""
    (n, k), block = w_NK.shape, form.block_of(w_NK.shape[1])
    low, high = torch.aminmax(w_NK.detach())
    tensor_scale = max_tensor_scale(torch.maximum(low.abs(), high.abs()).to(torch.float32), form)
    out = torch.empty(n, k, dtype=dtype, device=w_NK.device)
    for rows, columns in tiles(n, form.padded(k), block, _TILE_ELEMENTS):
        stop = min(columns.stop, k)
        tile = w_NK.detach()[rows, columns.start : stop].to(torch.float64)
        w_BE = torch.nn.functional.pad(tile, (0, columns.stop - stop)).view(-1, block)
        scale_B = decode_scales(max_scale(w_BE.abs().amax(1), tensor_scale, form), form)
        codes_BE = round_elements(w_BE, scale_B.to(torch.float64) * tensor_scale.to(torch.float64), form)
        values = decode_elements(codes_BE, form).to(torch.float32).mul_(scale_B.unsqueeze(-1)).mul_(tensor_scale)
        out[rows, columns.start : stop] = values.view(tile.shape[0], -1)[:, : tile.shape[1]]
    return out


def max_tensor_scale(amax: Tensor, form: Format) -> Tensor:
    """nvfp4: amax / (6 * 448) in fp32, at least 2^-126 so that it is never subnormal; 1 for all zeros.

    The other formats have none: 1, or NaN where ``amax`` is not finite, since an E8M0 or integer block could not say so.
    """
    if form.name != "nvfp4":
        return torch.where(torch.isfinite(amax), 1.0, torch.nan)
    return torch.where(amax == 0, 1.0, (amax / (form.max_value * E4M3_MAX)).clamp_min(2.0**-126))
