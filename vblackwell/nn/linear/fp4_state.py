"""A packed weight between its two homes: the module that computes with it and the state dict that keeps it.

In a state dict, and on the CPU, it has the canonical layout (numerics/packed.py), so that a file means the same on every
machine. On a GPU the module holds the tiled layout of the fused kernels instead, not beside it. Four entries stand for a
packed ``weight``: ``weight_codes``, ``weight_scales``, ``weight_tensor_scale``, and ``weight_meta``, its JSON description as
bytes: a tensor, because safetensors files and ``torch.load(weights_only=True)`` hold tensors.
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
from vblackwell.numerics.formats import Format
from vblackwell.numerics.packed import PackedTensor

CODES, SCALES, TENSOR_SCALE, META = "weight_codes", "weight_scales", "weight_tensor_scale", "weight_meta"
_SHUFFLE_ELEMENTS = 1 << 20
STATE_NAMES = (CODES, SCALES, TENSOR_SCALE, META)


def to_state(packed: PackedTensor) -> dict[str, Tensor]:
    """State-dict entries of a packed weight, by local name."""
    meta = torch.frombuffer(bytearray(json.dumps(packed.meta()).encode()), dtype=torch.uint8)
    return {CODES: packed.codes, SCALES: packed.block_scales, TENSOR_SCALE: packed.tensor_scale, META: meta}


def from_state(entries: Mapping[str, Tensor], prefix: str) -> PackedTensor:
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
    return PackedTensor.from_tensors({key: entries[prefix + name] for key, name in names.items()}, meta)


@dataclass(frozen=True, eq=False)
class Placed:
    """A packed weight as its device computes with it.

    Attributes:
        name: the format with its layout: 'nvfp4', or 'nvfp4-tiled'.
        codes, scales, tensor_scale: in that layout.
    """

    name: str
    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor


def place(packed: PackedTensor, tiles: bool = False) -> Placed:
    """The layout for the device that ``packed`` is on: tiled on CUDA where the format has tiles and the values fit them.

    With ``tiles`` tiled wherever it is; raises Unsupported where the values do not fit.
    """
    if tiles:
        return tiled(packed)
    canonical = Placed(packed.format, packed.codes, packed.block_scales, packed.tensor_scale)
    if packed.device.type != "cuda" or packed.format not in ("nvfp4", "mxfp4"):
        return canonical
    try:
        return tiled(packed)
    except Unsupported:  # an mxfp4 tensor of extreme range: the dispatcher has backends for the canonical layout too
        return canonical


def tiled(packed: PackedTensor) -> Placed:
    """The tiled layout of an nvfp4 or mxfp4 tensor.

    On a GPU nvfp4 is shuffled by a kernel. Otherwise rows are shuffled in bands, because shuffling takes several bytes a weight while
    it runs, more than a GPU may have beside the layer. Bands of mxfp4 share the exponent that moves into the tensor scale.

    Raises:
        Unsupported: values that the layout cannot hold.
    """
    n, k, name = packed.n, packed.k, layout.tiled_name(packed.format)
    if (tensors := nvfp4_tiles(packed)) is not None:
        return Placed(name, *tensors, packed.tensor_scale)
    band_rows = layout.TILE_N * max(1, _SHUFFLE_ELEMENTS // (layout.TILE_N * k))
    top = layout.live_exponents(packed.codes, packed.block_scales)[1] if packed.format == "mxfp4" else None
    if n <= band_rows:
        tensors = (packed.codes, packed.block_scales, packed.tensor_scale)
        return Placed(name, *layout.to_tiled(*tensors, packed.format, n, k, top))
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
    return Placed(name, codes, scales, tensor_scale)


def unplace(placed: Placed, form: Format, shape: tuple[int, int], dtype: torch.dtype) -> PackedTensor:
    """The canonical packed tensor again, of a weight of this format, shape (N, K) and dtype."""
    tensors = (placed.codes, placed.scales, placed.tensor_scale)
    if layout.is_tiled(placed.name):
        codes, scales, tensor_scale = layout.from_tiled(*tensors, placed.name, *shape)
        tensors = (codes, scales, tensor_scale.clone())  # a copy like the others: layers laid together share theirs
    return PackedTensor(form, shape, dtype, *tensors)
