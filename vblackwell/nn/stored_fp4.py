"""A frozen FP4 linear whose packed bytes are parameters, so that a stack moves them as it moves any weight.

``FusedFP4Linear`` keeps what it packed in buffers, and buffers stay on level 0. Under adapters the packed base is most of a model, so here
codes and scales are frozen parameters of bytes: they have a home, are loaded before they are needed, and are read again by backward.
They may be on the meta device until the stack takes the model (`store` fills them, one linear at a time).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.kernels import layout
from vblackwell.kernels.fp4 import fp4_linear
from vblackwell.kernels.nvfp4_encode import nvfp4_encoder
from vblackwell.nn.convert_linears import HEAD, find_linears, replace_module
from vblackwell.nn.fp4_state import place
from vblackwell.nn.linear import FusedFP4Linear
from vblackwell.numerics.formats import format_named
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.packed import PackedTensor
from vblackwell.units import MiB

PACKING_BYTES = 512 * MiB  # of a GPU, while a weight is packed there
PARTS = ("weight_codes", "weight_scales", "weight_tensor_scale")


class StoredFP4Linear(nn.Module):
    """``x W^T + b`` with a frozen packed weight; gradients pass through to ``x``.

    Args:
        in_features, out_features: K and N.
        bias: taken as it is and frozen, or None.
        format: of `numerics.formats`.
        tiled: in the layout of the fused kernels, which level 0 on a GPU reads; for nvfp4 and mxfp4.
        device: of the bytes; 'meta' until they are known.
        dtype: of the weight that is packed.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, format: str = "nvfp4", *, tiled: bool = False,
        device: torch.device | str = "meta", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.form = in_features, out_features, format_named(format)
        self.dtype = dtype
        self.layout = layout.tiled_name(format) if tiled else format
        codes, scales = layout.shapes(self.layout, out_features, in_features)
        kinds = (torch.uint8, torch.uint8) if tiled else (self.form.codes_dtype, self.form.scale_dtype)
        self._views = ((kinds[0], codes), (kinds[1], scales), (torch.float32, ()))
        for name, (dtype, shape) in zip(PARTS, self._views, strict=True):
            size = torch.Size(shape).numel() * dtype.itemsize
            held = nn.Parameter(torch.zeros(size, dtype=torch.uint8, device=device), requires_grad=False)
            self.register_parameter(name, held)
        self.bias = bias
        if bias is not None:
            bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N), in the dtype of ``x`` or of autocast."""
        codes, scales, tensor_scale = self.tensors()
        shape = (self.out_features, self.in_features)
        return fp4_linear(x, codes, scales, tensor_scale, self.bias, self.layout, "none", *shape)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and tensor scale as views of the bytes, which must be on level 0."""
        codes, scales, tensor_scale = (
            getattr(self, name).view(dtype).view(shape) for name, (dtype, shape) in zip(PARTS, self._views, strict=True)
        )
        return codes, scales, tensor_scale

    def bytes_of(self, weight_NK: Tensor, name: str) -> dict[str, Tensor]:
        """The bytes of each part that ``weight_NK``, packed on its device, becomes: the same on any.

        Raises:
            ConfigurationError: the weight has inf or NaN.
            Unsupported: values that the tiled layout cannot hold.
        """
        packed = quantize(
            weight_NK, self.form.name, "mse", workspace_bytes=PACKING_BYTES, name=name, encoder=nvfp4_encoder
        )
        placed = place(packed, tiles=layout.is_tiled(self.layout))
        tensors = (placed.codes, placed.scales, placed.tensor_scale)
        return {
            part: tensor.contiguous().reshape(-1).view(torch.uint8) for part, tensor in zip(PARTS, tensors, strict=True)
        }

    def over(self, parts: dict[str, Tensor]) -> FusedFP4Linear:
        """A packed linear that computes from these bytes where they lie; for a linear without a bias."""
        assert self.bias is None
        layer = FusedFP4Linear(self.in_features, self.out_features, False, format=self.form.name, device="meta")
        layer.weight, layer._layout, layer._dtype = None, self.layout, self.dtype
        layer.weight_codes, layer.weight_scales, layer.weight_tensor_scale = (
            parts[name].view(dtype).view(shape) for name, (dtype, shape) in zip(PARTS, self._views, strict=True)
        )
        return layer

    def weight_of(self, parts: dict[str, Tensor]) -> Tensor:
        """The fp32 matrix (N, K) that bytes stand for; the reverse of `bytes_of`, rounded to the format."""
        shape = (self.out_features, self.in_features)
        tensors = [parts[name].view(dtype).view(size) for name, (dtype, size) in zip(PARTS, self._views, strict=True)]
        if layout.is_tiled(self.layout):
            tensors = list(layout.from_tiled(tensors[0], tensors[1], tensors[2], self.layout, *shape))
        return PackedTensor(self.form, shape, torch.float32, tensors[0], tensors[1], tensors[2]).dequantize()

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
    if part not in PARTS:
        return None
    module = model.get_submodule(owner)
    return (module, owner, part) if isinstance(module, StoredFP4Linear) else None
