"""Codes packed two to a byte, and a tensor that is stored that way. A matrix (N, K) in a 4-bit format is

    codes         uint8 (N, Kp / 2)         element 2j in the low nibble of byte j, 2j + 1 in the high one
    block_scales  (N, Kp / block)           dtype by format (``formats.py``)
    tensor_scale  fp32, 0-dimensional       1 where the format has none

with Kp = K rounded up to the block, the layout of nvfp4 and compressed-tensors files. Tensors of other ranks are stored
as their rows: N is the product of all dimensions but the last. Padding holds the code of zero and is never seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.numerics.formats import Format, format_named
from vblackwell.numerics.rounding import decode_scales

META_VERSION = 1
_TILE_ELEMENTS = 1 << 20  # dequantised at a time: fp32 temporaries stay at 4 MiB


def pack_nibbles(codes: Tensor) -> Tensor:
    """(..., 2m) codes 0..15 -> (..., m) bytes, low nibble first."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """(..., m) bytes -> (..., 2m) codes 0..15, low nibble first."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def decode_blocks(codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, form: Format) -> Tensor:
    """fp32 (R, Kp) of ``R`` packed rows: ``(value[code] * s) * ts``, one rounding."""
    if form.bits == 8:
        values = codes.to(torch.float32)
    else:
        pairs = torch.tensor([(low, high) for high in form.values for low in form.values], device=codes.device)
        values = pairs.index_select(0, codes.reshape(-1).to(torch.int32))
    scales = decode_scales(block_scales, form)
    blocks = values.view(*scales.shape, -1).mul_(scales.unsqueeze(-1)).mul_(tensor_scale)
    return blocks.flatten(-2)


def tiles(n: int, row_elements: int, block: int, budget: int) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) slices of about ``budget`` elements each; column cuts at multiples of ``block``."""
    columns = row_elements if row_elements <= budget else max(block, budget // block * block)
    rows = max(1, budget // row_elements)
    for row in range(0, n, rows):
        for column in range(0, row_elements, columns):
            yield slice(row, min(n, row + rows)), slice(column, min(row_elements, column + columns))


def dequantize(
    codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, form: Format, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    """The (n, k) matrix that packed tensors stand for, each element rounded once to fp32 and then to ``dtype``."""
    out = torch.empty(n, k, dtype=dtype, device=codes.device)
    per_code, block = 8 // form.bits, form.block_of(k)
    for rows, columns in tiles(n, form.padded(k), block, _TILE_ELEMENTS):
        tile = decode_blocks(
            codes[rows, columns.start // per_code : columns.stop // per_code],
            block_scales[rows, columns.start // block : columns.stop // block],
            tensor_scale,
            form,
        )
        stop = min(columns.stop, k)
        out[rows, columns.start : stop] = tile[:, : stop - columns.start]
    return out


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A tensor in a block format, of logical ``shape`` without padding, that ``dequantize`` returns as ``dtype``. Its
    tensors may be shared, moved and stored, never written to.
    """

    form: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
    codes: Tensor
    block_scales: Tensor
    tensor_scale: Tensor

    @property
    def format(self) -> str:
        return self.form.name

    @property
    def k(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def n(self) -> int:
        """Number of rows: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of ``shape``, in ``dtype`` (default: that of the tensor that was packed)."""
        matrix = dequantize(
            self.codes, self.block_scales, self.tensor_scale, self.form, self.n, self.k, dtype or self.dtype
        )
        return matrix.view(self.shape)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedTensor:
        """The same numbers on ``device``; itself where they are there already."""
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.tensors().items()}
        if all(tensor is getattr(self, name) for name, tensor in moved.items()):
            return self
        return PackedTensor(self.form, self.shape, self.dtype, **moved)

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "block_scales": self.block_scales, "tensor_scale": self.tensor_scale}

    def meta(self) -> dict[str, Any]:
        return {
            "version": META_VERSION,
            "format": self.form.name,
            "block_size": self.form.block_size,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> PackedTensor:
        """The packed tensor that ``tensors()`` and ``meta()`` described.

        Raises:
            Unsupported: written by another version.
            ConfigurationError: an unknown format.
            CorruptData: tensors or fields that are missing or do not fit each other.
        """
        if meta.get("version") != META_VERSION:
            raise Unsupported(
                f"packed tensor of version {meta.get('version')!r}; this release reads version {META_VERSION}: "
                "quantise the original weights again"
            )
        try:
            form = format_named(meta["format"], meta["block_size"])
            shape, dtype = tuple(int(size) for size in meta["shape"]), getattr(torch, meta["dtype"])
            packed = cls(form, shape, dtype, tensors["codes"], tensors["block_scales"], tensors["tensor_scale"])
        except (KeyError, AttributeError) as error:
            raise CorruptData(f"packed tensor without its field or tensor {error}: the file is incomplete") from error
        packed.check()
        return packed

    def check(self) -> None:
        expected = {
            "codes": (self.form.codes_shape(self.n, self.k), self.form.codes_dtype),
            "block_scales": (self.form.scales_shape(self.n, self.k), self.form.scale_dtype),
            "tensor_scale": ((), torch.float32),
        }
        for name, (shape, dtype) in expected.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise CorruptData(
                    f"{self.format} tensor of shape {self.shape}: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"expected {dtype} {shape}"
                )
            if tensor.device != self.codes.device:
                raise ConfigurationError(
                    f"{self.format} tensor: {name} is on {tensor.device}, codes on {self.codes.device}; move them"
                    " together"
                )
