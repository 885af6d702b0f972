"""Precision separation: a weight as a coarse nvfp4 part and a fine 4-bit part, either stored and moved by itself.

The coarse part is what ``quantize(w, 'nvfp4')`` makes, byte for byte, and a weight by itself. The fine part has no
scales: its 16 levels divide the rounding cell of each coarse code. E2M1 codes are consecutive integers of a piecewise
linear scale, so a magnitude ``code + (fine - 8) / 16`` on that scale is again such a number, E2M5, and the cell of a
code is exactly the half step to either side:

    value = e2m5(16 * code + fine - 8),    e2m5(i) = max(i / 32, i / 16 - 2, i / 8 - 8)
    weight = (+-value * block_scale) * tensor_scale        in fp32, one rounding

(`i / 32` below code 4, `i / 16 - 2` below 6, ...: the largest of the three lines is the curve.) So steps follow the
gaps between codes; what was exact in nvfp4, zero included, stays exact; and a kernel adds the fine bits to the coarse
ones instead of decoding a second number. A zero code takes fine codes 8..15 only: its sign says on which side of zero
the weight lies. 4 + 4 + 0.5 = 8.5 bits a weight.

Why not levels that are uniform within a cell: 0.3 dB better (the cells of 2 and 4 are lopsided), but no longer a binary
fraction of the scale, and zero no level.

``N`` rows, ``K`` columns, ``P`` columns padded to the block of 16, ``B`` blocks, ``E`` elements a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.numerics.formats import E4M3_MAX, FORMATS
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.packed import PackedTensor, pack_nibbles, tiles, unpack_nibbles
from vblackwell.numerics.round_trip import max_tensor_scale
from vblackwell.numerics.rounding import decode_scales

FORM = FORMATS["nvfp4"]
BITS = 8.5
_TILE_ELEMENTS = 1 << 18  # fp64 temporaries of 2 MiB each
_ROUND_ELEMENTS = 1 << 18
FINE_ZERO = 8  # the fine code that adds nothing, and what padding holds
_TOP = 7 * 16 + 7  # the largest magnitude, in sixteenths of a code


@dataclass(frozen=True, eq=False)
class SeparatedTensor:
    """A tensor in two parts: nvfp4, and ``fine``, uint8 (N, P / 2), packed as the coarse codes. A stack holds it whole,
    or its parts under separate keys.
    """

    coarse: PackedTensor
    fine: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.coarse.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.coarse.dtype

    @property
    def device(self) -> torch.device:
        return self.coarse.device

    @property
    def nbytes(self) -> int:
        return self.coarse.nbytes + self.fine.nbytes

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of ``shape``, each element rounded once to fp32 and then to ``dtype`` (default: the tensor's)."""
        coarse = self.coarse
        tensors = (coarse.codes, self.fine, coarse.block_scales, coarse.tensor_scale)
        return dequantize(*tensors, coarse.n, coarse.k, dtype or self.dtype).view(self.shape)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SeparatedTensor:
        return SeparatedTensor(self.coarse.to(device, non_blocking), self.fine.to(device, non_blocking=non_blocking))

    def tensors(self) -> dict[str, Tensor]:
        return self.coarse.tensors() | {"fine": self.fine}

    def meta(self) -> dict[str, Any]:
        return self.coarse.meta() | {"parts": 2}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> SeparatedTensor:
        """What ``tensors()`` and ``meta()`` described; raises as `PackedTensor.from_tensors`."""
        if meta.get("parts") != 2 or "fine" not in tensors:
            raise CorruptData("a tensor in two parts without its fine part: the file is incomplete")
        separated = cls(PackedTensor.from_tensors(tensors, meta), tensors["fine"])
        separated.check()
        return separated

    def check(self) -> None:
        coarse = self.coarse
        coarse.check()
        if coarse.format != FORM.name:
            raise ConfigurationError(f"the coarse part is {coarse.format}: a fine part refines nvfp4 only")
        if self.fine.shape != coarse.codes.shape or self.fine.dtype != torch.uint8:
            raise CorruptData(
                f"two-part tensor of shape {self.shape}: the fine part is {self.fine.dtype} {tuple(self.fine.shape)}, "
                f"expected torch.uint8 {tuple(coarse.codes.shape)}"
            )


def separate(
    tensor: Tensor, scale_search: str = "mse", *, tensor_scale: Tensor | None = None,
    workspace_bytes: int | None = None, name: str = "tensor",
) -> SeparatedTensor:  # fmt: skip
    """``tensor`` in two parts, any shape and size; arguments, and what is refused, as for `quantize`."""
    options = {"tensor_scale": tensor_scale, "workspace_bytes": workspace_bytes, "name": name}
    coarse = quantize(tensor, FORM.name, scale_search, **options)
    return SeparatedTensor(coarse, fine_part(tensor, coarse))


def fine_part(tensor: Tensor, coarse: PackedTensor) -> Tensor:
    """The fine codes (N, P / 2) of ``tensor`` for a coarse part that it could have been rounded to: the nearest level
    within the cell of each coarse code, in fp64; on a tie the upper one. Raises ConfigurationError for another format
    or shape.
    """
    if coarse.format != FORM.name or coarse.shape != tuple(tensor.shape):
        raise ConfigurationError(
            f"a {coarse.format} part of shape {coarse.shape} cannot be refined by a tensor of shape"
            f" {tuple(tensor.shape)}"
        )
    w_NK = tensor.detach().reshape(coarse.n, coarse.k)
    fine = torch.empty_like(coarse.codes)
    for rows, columns in tiles(coarse.n, FORM.padded(coarse.k), 16, _TILE_ELEMENTS):
        half, blocks = slice(columns.start // 2, columns.stop // 2), slice(columns.start // 16, columns.stop // 16)
        codes = unpack_nibbles(coarse.codes[rows, half])
        tile = w_NK[rows, columns.start : min(columns.stop, coarse.k)].to(torch.float64)
        tile = torch.nn.functional.pad(tile, (0, codes.shape[1] - tile.shape[1]))
        scale = decode_scales(coarse.block_scales[rows, blocks], FORM).to(torch.float64) * coarse.tensor_scale.double()
        u_BE = tile.view(*scale.shape, 16) / torch.where(scale > 0, scale, torch.inf).unsqueeze(-1)
        u = u_BE.view(codes.shape).mul_(1.0 - 2.0 * (codes >> 3))  # along the code's own sign
        magnitude = codes & 7
        offset = _position(u.clamp_min_(0)).sub_(magnitude).mul_(16).add_(0.5).floor_()
        lowest = torch.where(magnitude == 0, 0.0, -8.0).to(offset.dtype)
        fine[rows, half] = pack_nibbles(offset.clamp_(max=7).maximum(lowest).add_(FINE_ZERO).to(torch.uint8))
    return fine


def dequantize(
    codes: Tensor, fine: Tensor, block_scales: Tensor, tensor_scale: Tensor, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    """The (n, k) matrix that canonical parts stand for: the oracle of everything that computes with two parts."""
    out = torch.empty(n, k, dtype=dtype, device=codes.device)
    for rows, columns in tiles(n, FORM.padded(k), 16, _TILE_ELEMENTS):
        half, blocks = slice(columns.start // 2, columns.stop // 2), slice(columns.start // 16, columns.stop // 16)
        code = unpack_nibbles(codes[rows, half]).to(torch.int16)
        sixteenths = (code & 7) * 16 + unpack_nibbles(fine[rows, half]) - FINE_ZERO
        values = _value(sixteenths.to(torch.float32)).mul_((1 - 2 * (code >> 3)).to(torch.float32))
        scales = decode_scales(block_scales[rows, blocks], FORM)
        tile = values.view(*scales.shape, 16).mul_(scales.unsqueeze(-1)).mul_(tensor_scale).flatten(-2)
        stop = min(columns.stop, k)
        out[rows, columns.start : stop] = tile[:, : stop - columns.start]
    return out


def _position(u: Tensor) -> Tensor:
    return torch.minimum(torch.minimum(u * 2, u + 2), u * 0.5 + 4)


def _value(sixteenths: Tensor) -> Tensor:
    """The magnitude at a position in sixteenths of a code; the inverse of `_position`, and exact."""
    low, high = sixteenths / 32, sixteenths / 8 - 8
    return torch.maximum(torch.maximum(low, sixteenths / 16 - 2), high)


# -- training: encode and decode at once, on scales that are kept ------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scales:
    """What stays from step to step while a weight trains: uint8 (N, P / 16) E4M3, and fp32, 0-dimensional."""

    block: Tensor
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.block.nbytes + self.tensor.nbytes


def training_scales(w_NK: Tensor) -> Scales:
    """`max` scales of a weight, without reading a value on the host; NaN where the weight is not finite."""
    return _scales_of(_block_maxima(w_NK))


def renewed_scales(w_NK: Tensor, kept: Scales, threshold: float) -> tuple[Scales, Tensor]:
    """``kept`` as long as the weight has drifted by at most ``threshold``, else new scales; and the drift,
    0-dimensional.

    Drift is how far the blocks' largest magnitudes have moved from where ``kept`` was made for them: ``sum |amax - 6 s|
    / sum 6 s``. Scales of three mantissa bits leave 0.022 of it right after they were made. The host reads nothing.
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
    n, k = w_NK.shape
    whole = k // 16 * 16
    w_NK = w_NK.detach()
    maxima = w_NK.new_empty(n, 0)
    if whole:
        w_NBE = w_NK[:, :whole].reshape(n, -1, 16)
        maxima = torch.maximum(w_NBE.amax(2), -w_NBE.amin(2))
    if k > whole:
        maxima = torch.cat([maxima, w_NK[:, whole:].abs().amax(1, keepdim=True)], 1)
    return maxima.to(torch.float32).abs_()  # a block of zeros has no sign


def round_to_parts(w_NK: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    """(N, K) weights rounded to both parts on kept scales and back, as ``dtype``.

    The nearest E2M5 value of all, ties to even, in fp32: compared with ``separate(w, 'max').dequantize()`` it may take
    the next coarse code within 1/32 step of a boundary, which is nearer. Magnitudes beyond the last level saturate; NaN
    stays.
    """
    (n, k), padded = w_NK.shape, FORM.padded(w_NK.shape[1])
    out = torch.empty(n, k, dtype=dtype, device=w_NK.device)
    for rows, columns in tiles(n, padded, 16, _ROUND_ELEMENTS):
        blocks, stop = slice(columns.start // 16, columns.stop // 16), min(columns.stop, k)
        scale_B1 = decode_scales(scales.block[rows, blocks], FORM).unsqueeze(-1)
        tile = w_NK.detach()[rows, columns.start : stop].to(torch.float32)
        if stop < columns.stop:
            tile = torch.nn.functional.pad(tile, (0, columns.stop - stop))
        tile_BE = tile.reshape(*scale_B1.shape[:2], 16)
        u = tile_BE.abs() / torch.where(scale_B1 == 0, torch.inf, scale_B1 * scales.tensor)
        sixteenths = _position(u).mul_(16).round_().clamp_max_(_TOP)
        rounded = _value(sixteenths).mul_(scale_B1).mul_(scales.tensor).copysign_(tile_BE)
        out[rows, columns.start : stop] = rounded.flatten(1)[:, : stop - columns.start]
    return out
