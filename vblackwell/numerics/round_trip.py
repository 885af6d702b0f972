"""Encode and decode at once: the weights a straight-through forward multiplies by.

The numbers are exactly those of ``quantize(w, format, 'max').dequantize()``, signs of zeros included, but nothing reads
a value of a GPU on the host; inf and NaN come out as NaN. `max` scales: they move smoothly while weights train.

fp32 where fp64 would round the same way. A code depends on which boundaries ``b`` (half-way between values, at most
three bits) the quotient ``w / (s * ts)`` exceeds. Of the correctly rounded fp32 divisions ``q = w / ts`` and
``u = q / s``, ``q`` is on the side of ``c = b * s`` (7 bits) that ``w / ts`` is on, or equal to it, since rounding is
monotone and keeps ``c``; and ``u`` is on the side of ``b`` that ``q`` is on of ``c``: where they differ, ``q / s`` is
further from ``b`` than half a unit in its last place, because neighbours of ``c``, divided by ``s`` < 2 (significands),
are. So ``u`` decides, unless it is a boundary itself: those are compared again in fp64, where ``c * ts`` is exact, on a
CPU the few alone. Scales of mxfp4 (powers of two) and int4 (bf16) times boundaries fit fp32, so a quotient on a
boundary is a true tie. int8's scale takes the place of ``ts``. nf4's boundaries have 25 bits; on a CPU a table answers
for cells without a boundary, fp64 for the others.

``B`` blocks, ``E`` elements a block.
"""

import functools
import math

import torch
from torch import Tensor

from vblackwell.numerics.formats import E4M3_MAX, NF4_VALUES, Format
from vblackwell.numerics.packed import padded_tile, tiles
from vblackwell.numerics.rounding import decode_scales, max_scale, round_elements, round_to_precision

_TILE_ELEMENTS = 1 << 19  # temporaries of 2 MiB: calls cost as much as arithmetic on smaller ones
_NF4_CELLS = 1 << 12  # a unit
_EXPONENT, _ONE, _HALF = 0x7F800000, 0x3F800000, 0x3F000000  # bits of fp32


def round_trip(w_NK: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """(N, K) weights rounded to ``form`` and back, once to fp32 and then to ``dtype``."""
    (n, k), block = w_NK.shape, form.block_of(w_NK.shape[1])
    w_NK = w_NK.detach()
    low, high = torch.aminmax(w_NK)
    tensor_scale = max_tensor_scale(torch.maximum(low.abs(), high.abs()).to(torch.float32), form)
    out = torch.empty(n, k, dtype=dtype, device=w_NK.device)
    for rows, columns, _, blocks in tiles(form, n, k, _TILE_ELEMENTS):
        padded = (blocks.stop - blocks.start) * block
        tile = padded_tile(w_NK[rows, columns].to(torch.float32), padded).contiguous()
        values_BE = _round_blocks(tile.reshape(-1, block), tensor_scale, form)
        out[rows, columns] = values_BE.view(-1, padded)[:, : columns.stop - columns.start]
    return out


def max_tensor_scale(amax: Tensor, form: Format) -> Tensor:
    """nvfp4: amax / (6 * 448) in fp32, at least 2^-126 so that it is never subnormal; 1 for all zeros. Else 1, or NaN
    where ``amax`` is not finite, since an E8M0 or integer block could not say so.
    """
    if form.name != "nvfp4":
        return torch.where(torch.isfinite(amax), 1.0, torch.nan)
    most = torch.full_like(amax, form.max_value * E4M3_MAX)  # by a number CUDA would multiply with the reciprocal
    return torch.where(amax == 0, 1.0, (amax / most).clamp_min(2.0**-126))


def _round_blocks(w_BE: Tensor, tensor_scale: Tensor, form: Format) -> Tensor:
    # The bits of magnitudes are in order as integers, NaN last, and torch's integer maximum is several times faster.
    amax_B = w_BE.abs().view(torch.int32).amax(1).view(torch.float32).to(torch.float64)
    if form.name == "nvfp4":
        # What `max_scale` stands for, without the way through eight bits; NaN throughout if the tensor scale is.
        quotient_B = amax_B / (form.max_value * tensor_scale.to(torch.float64))
        scale_B1 = round_to_precision(quotient_B, 4, -6).clamp_max_(E4M3_MAX).to(torch.float32).unsqueeze(-1)
        u_BE = (w_BE / tensor_scale).div_(scale_B1.clamp_min(2.0**-9))
        v_BE = _round_e2m1(u_BE, w_BE, scale_B1, tensor_scale).mul_(scale_B1).mul_(tensor_scale)
        if not _may_look(w_BE) or float(scale_B1.amin()) == 0:  # a block without a scale has no negative zeros
            v_BE.masked_fill_(scale_B1 * tensor_scale == 0, 0.0)  # NaN stays
        return v_BE
    scale_B1 = (decode_scales(max_scale(amax_B, tensor_scale, form), form) * tensor_scale).unsqueeze(-1)
    u_BE = w_BE / torch.where(scale_B1 > 0, scale_B1, torch.inf)
    if form.name == "nf4":
        return _round_nf4(u_BE, w_BE, scale_B1, form).mul_(scale_B1)
    if form.name == "mxfp4":
        return _round_e2m1(u_BE, w_BE, None, tensor_scale).mul_(scale_B1)
    v_BE = torch.round(u_BE)
    if form.name == "int8":
        one = torch.ones((), device=w_BE.device)
        v_BE = _round_halves(u_BE, v_BE, one, w_BE, scale_B1, one)
    return v_BE.clamp_(-form.max_value, form.max_value).mul_(scale_B1).add_(0.0)  # there is no negative zero


def _may_look(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _round_e2m1(u_BE: Tensor, w_BE: Tensor, scale_B1: Tensor | None, tensor_scale: Tensor) -> Tensor:
    """E2M1 values nearest to ``w / (scale * tensor_scale)``, whose fp32 quotient, exact without scales, is ``u``."""
    # Values around u are 2^floor(log2 u) / 2 apart, at least 1/2; the even multiple is the even code.
    step_BE = u_BE.view(torch.int32).bitwise_and(_EXPONENT).clamp_min_(_ONE).view(torch.float32).mul_(0.5)
    t_BE = u_BE.div_(step_BE)
    v_BE = torch.round(t_BE)
    if scale_B1 is not None:
        v_BE = _round_halves(t_BE, v_BE, step_BE, w_BE, scale_B1, tensor_scale)
    return v_BE.mul_(step_BE).clamp_(-6.0, 6.0)


def _round_halves(t_BE: Tensor, v_BE: Tensor, step_BE: Tensor, w_BE: Tensor, scale_B1: Tensor, unit: Tensor) -> Tensor:
    """``v``, the rounded ``t``, with those half-way compared exactly; t is ``t * step * scale * unit``."""
    if not _may_look(w_BE):
        return _round_halves_exactly(t_BE, v_BE, step_BE, w_BE, scale_B1, unit)
    at = _positions_of_halves((t_BE - v_BE).abs_())
    t, v, w = (tensor.view(-1)[at] for tensor in (t_BE, v_BE, w_BE))
    step = step_BE.view(-1)[at] if step_BE.dim() else step_BE
    v_BE.view(-1)[at] = _round_halves_exactly(t, v, step, w, scale_B1[at // w_BE.shape[1], 0], unit)
    return v_BE


def _positions_of_halves(distance_BE: Tensor) -> Tensor:
    """Positions of 1/2, the most there is, in pieces that hold one: a search of all would cost too much."""
    pieces = distance_BE.view(torch.int32).view(-1, math.gcd(distance_BE.numel(), 64))
    hot = (pieces.amax(1) == _HALF).nonzero()[:, 0]
    piece, place = (pieces[hot] == _HALF).nonzero(as_tuple=True)
    return hot[piece] * pieces.shape[1] + place


def _round_halves_exactly(t: Tensor, v: Tensor, step: Tensor, w: Tensor, scale: Tensor, unit: Tensor) -> Tensor:
    """``v`` where ``t`` is not half-way or at a true tie, else its neighbour on the weight's side."""
    boundary = t.to(torch.float64) * step.to(torch.float64) * scale.to(torch.float64) * unit.to(torch.float64)
    side = torch.sign(w.to(torch.float64) - boundary).to(torch.float32)  # exact: at most 8 + 24 bits
    return torch.where(((t - v).abs() == 0.5) & (side != 0), torch.copysign(t + 0.5 * side, t), v)


def _round_nf4(u_BE: Tensor, w_BE: Tensor, scale_B1: Tensor, form: Format) -> Tensor:
    """Table values nearest to ``w / scale``, whose fp32 quotient, in [-1, 1], is ``u``."""
    if not _may_look(w_BE):
        return _nf4_exactly(w_BE, scale_B1[:, 0], form)
    cell = u_BE.add_(1.0).mul_(_NF4_CELLS).to(torch.int32).clamp_(0, 2 * _NF4_CELLS)
    v_BE = _nf4_cells().index_select(0, cell.view(-1)).view_as(w_BE)
    at = v_BE.isnan().nonzero(as_tuple=True)
    v_BE[at] = _nf4_exactly(w_BE[at].unsqueeze(-1), scale_B1.expand_as(w_BE)[at], form).squeeze(-1)
    return v_BE


def _nf4_exactly(w_BE: Tensor, scale_B: Tensor, form: Format) -> Tensor:
    codes_BE = round_elements(w_BE.to(torch.float64), scale_B.to(torch.float64), form)
    return torch.tensor(form.values, device=w_BE.device)[codes_BE.to(torch.int32)]


@functools.lru_cache
def _nf4_cells() -> Tensor:
    """What each cell of width 1 / _NF4_CELLS from -1 on rounds to, or NaN where a boundary is near it."""
    values = torch.tensor(NF4_VALUES, dtype=torch.float64)
    boundaries = (values[1:] + values[:-1]) / 2
    start = torch.arange(2 * _NF4_CELLS + 1, dtype=torch.float64) / _NF4_CELLS - 1
    slack = 2.0**-20  # u + 1 is rounded, to 2^-24
    low = torch.bucketize(start - slack, boundaries)
    high = torch.bucketize(start + 1 / _NF4_CELLS + slack, boundaries)
    return torch.where(low == high, values[low], torch.nan).to(torch.float32)
