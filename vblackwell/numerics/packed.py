"""Codes packed two to a byte, and a tensor that is stored that way. A matrix (N, K) in a 4-bit format is

    codes         uint8 (N, Kp / 2)         element 2j in the low nibble of byte j, 2j + 1 in the high one
    block_scales  (N, Kp / block)           dtype by format (``formats.py``)
    tensor_scale  fp32, 0-dimensional       1 where the format has none
    fine          uint8 (N, Kp / 2)         of nvfp4 in two parts (``separation.py``), packed as ``codes``

with Kp = K rounded up to the block, the layout of nvfp4 and compressed-tensors files. Tensors of other ranks are stored
as their rows: N is the product of all dimensions but the last. Padding holds the code of zero and is never seen.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.numerics.formats import Format, format_named
from vblackwell.numerics.rounding import decode_scales

META_VERSION = 1
FINE_ZERO = 8  # the fine code that adds nothing, and what padding holds
_TILE_ELEMENTS = 1 << 20  # dequantised at a time: fp32 temporaries stay at 4 MiB


def pack_nibbles(codes: Tensor) -> Tensor:
    """(..., 2m) codes 0..15 -> (..., m) bytes, low nibble first."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """(..., m) bytes -> (..., 2m) codes 0..15, low nibble first."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def tiles(form: Format, n: int, k: int, budget: int) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Tiles of about ``budget`` elements: rows, columns up to ``k``, and those of codes and scales with padding."""
    padded, block, per_code = form.padded(k), form.block_of(k), 8 // form.bits
    width = padded if padded <= budget else max(block, budget // block * block)
    height = max(1, budget // padded)
    for row in range(0, n, height):
        for start in range(0, padded, width):
            stop = min(padded, start + width)
            coded, blocks = slice(start // per_code, stop // per_code), slice(start // block, stop // block)
            yield slice(row, min(n, row + height)), slice(start, min(stop, k)), coded, blocks


def padded_tile(tile: Tensor, width: int) -> Tensor:
    """``tile`` (rows, columns) with columns of zeros up to ``width``."""
    return pad(tile, (0, width - tile.shape[1])) if tile.shape[1] < width else tile


def _values(codes: Tensor, fine: Tensor | None, form: Format) -> Tensor:
    if fine is not None:
        code = unpack_nibbles(codes).to(torch.int16)
        sixteenths = (code & 7) * 16 + unpack_nibbles(fine) - FINE_ZERO
        return e2m5(sixteenths.to(torch.float32)).mul_((1 - 2 * (code >> 3)).to(torch.float32))
    if form.bits == 8:
        return codes.to(torch.float32)
    pairs = torch.tensor([(low, high) for high in form.values for low in form.values], device=codes.device)
    return pairs.index_select(0, codes.reshape(-1).to(torch.int32))


def e2m5(sixteenths: Tensor) -> Tensor:
    """The magnitude at a position in sixteenths of an E2M1 code (``separation.py``), exact."""
    low, high = sixteenths / 32, sixteenths / 8 - 8
    return torch.maximum(torch.maximum(low, sixteenths / 16 - 2), high)


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A tensor in a block format, of logical ``shape`` without padding, that ``dequantize`` returns as ``dtype``; in
    two parts with ``fine``. Its tensors may be shared, moved and stored, never written to.
    """

    form: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
    codes: Tensor
    block_scales: Tensor
    tensor_scale: Tensor
    fine: Tensor | None = None

    @property
    def format(self) -> str:
        return self.form.name

    @property
    def precision(self) -> str:
        return self.format if self.fine is None else "two-part"

    @property
    def coarse(self) -> "PackedTensor":
        return replace(self, fine=None)

    @property
    def k(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def n(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of ``shape``: ``(value * s) * ts`` rounded once to fp32, then to ``dtype`` (default: that of the
        tensor that was packed).
        """
        out = torch.empty(self.n, self.k, dtype=dtype or self.dtype, device=self.device)
        for rows, columns, coded, blocks in tiles(self.form, self.n, self.k, _TILE_ELEMENTS):
            values = _values(self.codes[rows, coded], None if self.fine is None else self.fine[rows, coded], self.form)
            scales = decode_scales(self.block_scales[rows, blocks], self.form)
            decoded = values.view(*scales.shape, -1).mul_(scales.unsqueeze(-1)).mul_(self.tensor_scale).flatten(-2)
            out[rows, columns] = decoded[:, : columns.stop - columns.start]
        return out.view(self.shape)

    def to(self, device: torch.device | str, non_blocking: bool = False, copy: bool = False) -> "PackedTensor":
        """The same numbers on ``device``; itself where they are there already and no ``copy`` is asked for."""
        moved = {name: each.to(device, non_blocking=non_blocking, copy=copy) for name, each in self.tensors().items()}
        return self if all(each is getattr(self, name) for name, each in moved.items()) else replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        coarse = {"codes": self.codes, "block_scales": self.block_scales, "tensor_scale": self.tensor_scale}
        return coarse if self.fine is None else coarse | {"fine": self.fine}

    def meta(self) -> dict[str, Any]:
        described = {"version": META_VERSION, "format": self.form.name, "block_size": self.form.block_size}
        described |= {"shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}
        return described if self.fine is None else described | {"parts": 2}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> "PackedTensor":
        """The packed tensor that ``tensors()`` and ``meta()`` described. Raises Unsupported for another version,
        ConfigurationError for an unknown format or a fine part of another than nvfp4, CorruptData for what is missing
        or does not fit.
        """
        if meta.get("version") != META_VERSION:
            found = f"packed tensor of version {meta.get('version')!r}; this release reads version {META_VERSION}"
            raise Unsupported(f"{found}: quantise the original weights again")
        if meta.get("parts") == 2 and "fine" not in tensors:
            raise CorruptData("a tensor in two parts without its fine part: the file is incomplete")
        try:
            form = format_named(meta["format"], meta["block_size"])
            shape, dtype = tuple(int(size) for size in meta["shape"]), getattr(torch, meta["dtype"])
            coarse = (tensors["codes"], tensors["block_scales"], tensors["tensor_scale"])
        except (KeyError, AttributeError) as error:
            raise CorruptData(f"packed tensor without its field or tensor {error}: the file is incomplete") from error
        packed = cls(form, shape, dtype, *coarse, tensors.get("fine"))
        packed.check()
        return packed

    def check(self) -> None:
        if self.fine is not None and self.format != "nvfp4":
            raise ConfigurationError(f"the coarse part is {self.format}: a fine part refines nvfp4 only")
        codes = (self.form.codes_shape(self.n, self.k), self.form.codes_dtype)
        scales = (self.form.scales_shape(self.n, self.k), self.form.scale_dtype)
        expected = {"codes": codes, "block_scales": scales, "tensor_scale": ((), torch.float32), "fine": codes}
        for name, tensor in self.tensors().items():
            shape, dtype = expected[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                found = f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}"
                raise CorruptData(f"{self.precision} tensor of shape {self.shape}: {found}")
            if tensor.device != self.codes.device:
                found = f"{name} is on {tensor.device}, codes on {self.codes.device}"
                raise ConfigurationError(f"{self.precision} tensor: {found}; move them together")
