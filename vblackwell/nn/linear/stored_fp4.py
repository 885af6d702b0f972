"""A frozen FP4 linear whose packed bytes are parameters, so that a stack moves them as it moves any weight.

``FusedFP4Linear`` keeps what it packed in buffers, and buffers stay on level 0. Under adapters the packed base is most of a model, so here
codes and scales are frozen parameters of bytes: they have a home, are loaded before they are needed, and are read again by backward.
They may be on the meta device until the stack takes the model (`store` fills them, one linear at a time).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4 import layout
from vblackwell.kernels.fp4.encode import nvfp4_encoder
from vblackwell.nn.convert.linears import HEAD, find_linears, replace_module
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.two_part import PlacedParts, place_parts, unplace_parts
from vblackwell.nn.linear.two_part_linear import VBOptimizedLinear
from vblackwell.numerics.formats import Format, format_named
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.packed import PackedTensor
from vblackwell.numerics.separation import SeparatedTensor
from vblackwell.units import MiB

PACKING_BYTES = 512 * MiB  # of a GPU, while a weight is packed there
PARTS = ("weight_codes", "weight_scales", "weight_tensor_scale")
FINE = "weight_fine"


class StoredFP4Linear(nn.Module):
    """``x W^T + b`` with a frozen packed weight; gradients pass through to ``x``.

    Args:
        in_features, out_features: K and N.
        bias: taken as it is and frozen, or None.
        format: of `numerics.formats`, or its name.
        tiled: in the layout of the fused kernels, which level 0 on a GPU reads; for nvfp4 and mxfp4.
        fine: nvfp4 with a fine part (numerics/separation.py).
        device: of the bytes; 'meta' until they are known.
        dtype: of the weight that is packed.

    Attributes:
        parts: names of the parameters that hold the bytes.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, format: str | Format = "nvfp4", *,
        tiled: bool = False, fine: bool = False, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.form = format_named(format) if isinstance(format, str) else format
        self.dtype = dtype
        self.layout = layout.tiled_name(self.form.name) if tiled else self.form.name
        n, k = out_features, in_features
        if tiled:
            codes, scales = layout.shapes(self.layout, n, k)
            kinds = (torch.uint8, torch.uint8)
        else:
            codes, scales = self.form.codes_shape(n, k), self.form.scales_shape(n, k)
            kinds = (self.form.codes_dtype, self.form.scale_dtype)
        self._views: dict[str, tuple[torch.dtype, tuple[int, ...]]] = dict(
            zip(PARTS, ((kinds[0], codes), (kinds[1], scales), (torch.float32, ())), strict=True)
        )
        if fine:
            self._views[FINE] = (kinds[0], codes)
        self.parts = tuple(self._views)
        for name, (kind, shape) in self._views.items():
            size = torch.Size(shape).numel() * kind.itemsize
            held = nn.Parameter(torch.zeros(size, dtype=torch.uint8, device=device), requires_grad=False)
            self.register_parameter(name, held)
        self.bias = bias
        if bias is not None:
            bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N), in the dtype of ``x`` or of autocast."""
        return self.placed().linear(x, self.bias, "none", self.out_features, self.in_features)

    def placed(self, parts: Mapping[str, Tensor] | None = None) -> PlacedParts:
        """The packed weight as views of ``parts``, by default of the layer's own bytes, which must be on level 0 then."""
        views: dict[str, Tensor] = {
            name: (getattr(self, name) if parts is None else parts[name]).view(kind).view(shape)
            for name, (kind, shape) in self._views.items()
        }
        codes, scales, tensor_scale = (views[name] for name in PARTS)
        return PlacedParts(self.layout, codes, scales, tensor_scale, views.get(FINE))

    def bytes_of(self, weight_NK: Tensor, name: str) -> dict[str, Tensor]:
        """The bytes of each part that ``weight_NK``, packed on its device, becomes: the same on any.

        Raises:
            ConfigurationError: the weight has inf or NaN.
            Unsupported: values that the tiled layout cannot hold.
        """
        return self.bytes_of_packed(
            quantize(weight_NK, self.form.name, "mse", workspace_bytes=PACKING_BYTES, name=name, encoder=nvfp4_encoder)
        )

    def bytes_of_packed(self, packed: PackedTensor | SeparatedTensor) -> dict[str, Tensor]:
        """The bytes of each part of a weight that is packed already, in the layer's format and shape.

        Raises:
            Unsupported: values that the tiled layout cannot hold.
        """
        placed = place_parts(packed, tiles=layout.is_tiled(self.layout))
        tensors = dict(zip(self.parts, placed.tensors(), strict=True))
        return {part: tensor.contiguous().reshape(-1).view(torch.uint8) for part, tensor in tensors.items()}

    def over(self, parts: Mapping[str, Tensor]) -> FusedFP4Linear | VBOptimizedLinear:
        """A packed linear that computes from these bytes where they lie; for a linear without a bias."""
        assert self.bias is None
        shape, placed = (self.in_features, self.out_features), self.placed(parts)
        if placed.fine is not None:
            separated = VBOptimizedLinear(*shape, False, "inference", device="meta", dtype=self.dtype)
            separated._adopt(placed)
            return separated
        layer = FusedFP4Linear(*shape, False, format=self.form.name, device="meta")
        layer.weight, layer._layout, layer._dtype, layer.form = None, self.layout, self.dtype, self.form
        layer.weight_codes, layer.weight_scales, layer.weight_tensor_scale = placed.tensors()
        return layer

    def weight_of(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The fp32 matrix (N, K) that bytes stand for; the reverse of `bytes_of`, rounded to the format."""
        shape, placed = (self.out_features, self.in_features), self.placed(parts)
        return unplace_parts(placed, self.form, shape, torch.float32).dequantize()

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, packed={self.layout}"


def store_linears(
    model: nn.Module, pattern: str = "all", keep: str | None = None, format: str = "nvfp4", *, tiled: bool = False
) -> dict[str, str | None]:
    """Put a `StoredFP4Linear`, whose bytes are on the meta device, in the place of the selected linears of ``model``.

    Returns:
        Every linear: why it was left, or None if it was replaced.

    Raises:
        ConfigurationError: an invalid expression, or nothing is selected.
    """
    found = find_linears(model, pattern, HEAD if keep is None else f"(?:{HEAD})|(?:{keep})")
    chosen = [name for name, reason in found.items() if reason is None]
    if not chosen:
        said = next((f"{name}: {reason}" for name, reason in found.items()), "it has none")
        raise ConfigurationError(f"{pattern!r} selects no linear of {type(model).__name__} ({said})")
    for name in chosen:
        linear: Any = model.get_submodule(name)
        sizes, dtype = (linear.in_features, linear.out_features), linear.weight.dtype
        stored = StoredFP4Linear(*sizes, linear.bias, format, tiled=tiled, dtype=dtype)
        replace_module(model, name, linear, stored.train(linear.training))
    return found


def stored_part(model: nn.Module, name: str) -> tuple[StoredFP4Linear, str, str] | None:
    """The stored linear that the parameter ``name`` is a part of, its name and the part; None for any other parameter."""
    owner, _, part = name.rpartition(".")
    if part not in (*PARTS, FINE):
        return None
    module = model.get_submodule(owner)
    return (module, owner, part) if isinstance(module, StoredFP4Linear) else None
