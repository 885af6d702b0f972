"""A packed weight in its two layouts: as its device computes with it, and as a state dict keeps it.

In a state dict, and on the CPU, it has the canonical layout (numerics/packed.py), so that a file means the same on
every machine. On a GPU a layer holds the tiled layout of the fused kernels instead. Four entries stand for a packed
``weight``: ``weight_codes``, ``weight_scales``, ``weight_tensor_scale``, and ``weight_meta``, its JSON description as
bytes: a tensor, because safetensors files and ``torch.load(weights_only=True)`` hold tensors. A weight in two parts
(numerics/separation.py) has ``weight_fine`` too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vblackwell.errors import CorruptData, Unsupported
from vblackwell.kernels.fp4 import layout
from vblackwell.kernels.fp4.encode import nvfp4_tiles
from vblackwell.kernels.fp4.linear import fp4_linear
from vblackwell.kernels.fp4.two_part import two_part_linear
from vblackwell.numerics.formats import Format
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.packed import PackedTensor
from vblackwell.numerics.separation import SeparatedTensor, separate
from vblackwell.units import MiB

PARTS = CODES, SCALES, TENSOR_SCALE = ("weight_codes", "weight_scales", "weight_tensor_scale")
FINE, META = "weight_fine", "weight_meta"
STATE_NAMES = (*PARTS, META)
PACKING_BYTES = 256 * MiB  # of a GPU, while a weight is packed there
_SHUFFLE_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False)
class PlacedWeight:
    """A packed weight as its device computes with it.

    Attributes:
        layout: the format with its layout: 'nvfp4', or 'nvfp4-tiled'.
        codes, scales, tensor_scale: the coarse part, or the only one, in that layout.
        fine: None where there is none, or it is elsewhere.
    """

    layout: str
    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor
    fine: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [tensor for tensor in (self.codes, self.scales, self.tensor_scale, self.fine) if tensor is not None]

    def linear(self, x: Tensor, bias: Tensor | None, activation: str, n: int, k: int) -> Tensor:
        """``activation(x W^T + bias)``, with the fine part where it is there."""
        if self.fine is None:
            return fp4_linear(x, self.codes, self.scales, self.tensor_scale, bias, self.layout, activation, n, k)
        parts = (self.codes, self.fine, self.scales, self.tensor_scale)
        return two_part_linear(x, *parts, bias, self.layout, activation, n, k)


def pack(weight: Tensor, precision: str, name: str) -> SeparatedTensor | PackedTensor:
    """``weight`` packed as 'two-part', or in a format; raises as `quantize`.

    On a GPU with room to search many blocks at once: without, a layer of a few MiB is some seventy tiles of hundreds of
    launches each.
    """
    if precision == "two-part":
        return separate(weight, workspace_bytes=PACKING_BYTES, name=name)
    return quantize(weight, precision, workspace_bytes=PACKING_BYTES, name=name)


def place(packed: PackedTensor | SeparatedTensor, tiles: bool = False) -> PlacedWeight:
    """The layout for the device that ``packed`` is on: tiled on CUDA where the format has tiles and the values fit them.

    With ``tiles`` tiled wherever it is; raises Unsupported where the values do not fit.
    """
    on_cuda = packed.device.type == "cuda"
    if isinstance(packed, SeparatedTensor):
        coarse = packed.coarse
        if not (on_cuda or tiles):
            return PlacedWeight(coarse.format, coarse.codes, coarse.block_scales, coarse.tensor_scale, packed.fine)
        parts = (coarse.codes, packed.fine, coarse.block_scales, coarse.tensor_scale)
        codes, fine, scales, tensor_scale = layout.parts_to_tiled(*parts, coarse.n, coarse.k)
        return PlacedWeight(layout.TILED_PARTS, codes, scales, tensor_scale, fine)
    if tiles:
        return tiled(packed)
    if on_cuda and packed.format in ("nvfp4", "mxfp4"):
        try:
            return tiled(packed)
        except (
            Unsupported
        ):  # an mxfp4 tensor of extreme range: the dispatcher has backends for the canonical layout too
            pass
    return PlacedWeight(packed.format, packed.codes, packed.block_scales, packed.tensor_scale)


def tiled(packed: PackedTensor) -> PlacedWeight:
    """The tiled layout of an nvfp4 or mxfp4 tensor.

    On a GPU nvfp4 is shuffled by a kernel. Otherwise rows are shuffled in bands, because shuffling takes several bytes
    a weight while it runs, more than a GPU may have free. Bands of mxfp4 share the exponent that moves into the tensor
    scale.

    Raises:
        Unsupported: values that the layout cannot hold.
    """
    n, k, name = packed.n, packed.k, layout.tiled_name(packed.format)
    if (tensors := nvfp4_tiles(packed)) is not None:
        return PlacedWeight(name, *tensors, packed.tensor_scale)
    band_rows = layout.TILE_N * max(1, _SHUFFLE_ELEMENTS // (layout.TILE_N * k))
    top = layout.live_exponents(packed.codes, packed.block_scales)[1] if packed.format == "mxfp4" else None
    if n <= band_rows:
        tensors = (packed.codes, packed.block_scales, packed.tensor_scale)
        return PlacedWeight(name, *layout.to_tiled(*tensors, packed.format, n, k, top))
    codes_shape, scales_shape = layout.shapes(name, n, k)
    codes = torch.empty(codes_shape, dtype=torch.uint8, device=packed.device)
    scales = torch.empty(scales_shape, dtype=torch.uint8, device=packed.device)
    tensor_scale = packed.tensor_scale
    for row in range(0, n, band_rows):
        rows = slice(row, min(n, row + band_rows))
        bands = slice(row // layout.TILE_N, -(-rows.stop // layout.TILE_N))
        codes[bands], scales[bands], tensor_scale = layout.to_tiled(
            packed.codes[rows], packed.block_scales[rows], packed.tensor_scale, packed.format, rows.stop - row, k, top
        )
    return PlacedWeight(name, codes, scales, tensor_scale)


def unplace(
    placed: PlacedWeight, form: Format, shape: tuple[int, int], dtype: torch.dtype
) -> PackedTensor | SeparatedTensor:
    """The canonical tensor again, of a weight of this format, shape (N, K) and dtype; without a fine part that is elsewhere."""
    codes, scales, tensor_scale, fine = placed.codes, placed.scales, placed.tensor_scale, placed.fine
    if layout.is_tiled(placed.layout):
        if fine is None:
            codes, scales, tensor_scale = layout.from_tiled(codes, scales, tensor_scale, placed.layout, *shape)
            tensor_scale = tensor_scale.clone()  # a copy like the others: layers laid together share theirs
        else:
            codes, fine, scales, tensor_scale = layout.parts_from_tiled(codes, fine, scales, tensor_scale, *shape)
    coarse = PackedTensor(form, shape, dtype, codes, scales, tensor_scale)
    return coarse if fine is None else SeparatedTensor(coarse, fine)


def copied(packed: PackedTensor | SeparatedTensor, device: torch.device) -> PackedTensor | SeparatedTensor:
    """A copy on ``device`` that shares no memory with ``packed``."""

    def copy(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device).copy_(tensor)

    if isinstance(packed, SeparatedTensor):
        coarse = copied(packed.coarse, device)
        assert isinstance(coarse, PackedTensor)
        return SeparatedTensor(coarse, copy(packed.fine))
    tensors = {name: copy(tensor) for name, tensor in packed.tensors().items()}
    return PackedTensor(packed.form, packed.shape, packed.dtype, **tensors)


def to_state(packed: PackedTensor | SeparatedTensor) -> dict[str, Tensor]:
    """State-dict entries of a packed weight, by local name."""
    coarse = packed.coarse if isinstance(packed, SeparatedTensor) else packed
    meta = torch.frombuffer(bytearray(json.dumps(coarse.meta()).encode()), dtype=torch.uint8)
    entries = {CODES: coarse.codes, SCALES: coarse.block_scales, TENSOR_SCALE: coarse.tensor_scale, META: meta}
    return entries | ({FINE: packed.fine} if isinstance(packed, SeparatedTensor) else {})


def from_state(entries: Mapping[str, Tensor], prefix: str) -> PackedTensor | SeparatedTensor:
    """The packed weight that ``to_state`` wrote under ``prefix``.

    Raises:
        CorruptData: entries that are missing or do not fit each other.
        Unsupported, ConfigurationError: another version, an unknown format.
    """
    missing = [name for name in STATE_NAMES if prefix + name not in entries]
    if missing:
        raise CorruptData(f"packed weight {prefix}weight lacks {', '.join(missing)}: the file is incomplete")
    try:
        meta = json.loads(bytes(entries[prefix + META].cpu().tolist()))
    except (ValueError, TypeError) as error:
        raise CorruptData(f"{prefix}{META} is not the description of a packed weight ({error})") from error
    names = {"codes": CODES, "block_scales": SCALES, "tensor_scale": TENSOR_SCALE}
    packed = PackedTensor.from_tensors({key: entries[prefix + name] for key, name in names.items()}, meta)
    if prefix + FINE not in entries:
        return packed
    separated = SeparatedTensor(packed, entries[prefix + FINE])
    try:
        separated.check()
    except CorruptData as error:
        raise CorruptData(f"{prefix}{FINE}: {error}") from error
    return separated
