"""Packed linears of one input as one product: queries, keys and values of a token in one launch, gate and up in another.

At one row a packed product of 4096 x 4096 takes an H200 5.5 us, of which its bytes need 2.2: the rest is what any launch costs, so three
of them want to be one. Tiles lie band after band of 32 rows, so the weights one behind the other are the tiles of all rows. They share a
tensor scale: those with a smaller one have their block scales, whose exponents have room, moved down by the difference. It is a power of
two wherever this is done, and no number changes.

Each linear keeps its own buffers, which are views of the joint ones: whatever else is done with it works as before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vblackwell.kernels.fp4.layout import TILE_N, is_tiled
from vblackwell.kernels.fp4.linear import fp4_linear
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.joined import joined

_LEAST_FIELD = 9  # of an E5M3 scale that is also a normal E4M3 one: 2^-6


@dataclass(frozen=True, eq=False)
class JointPacked:
    """The weights of several linears, one behind the other.

    Attributes:
        codes, scales, tensor_scale: in the tiled layout ``layout``.
        rows: of each linear; columns: of all.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor
    layout: str
    rows: list[int]
    columns: int

    def product(self, x: Tensor) -> list[Tensor]:
        """``linear(x)`` of each, as views of one tensor."""
        placed, shape = (self.codes, self.scales, self.tensor_scale, None, self.layout), (sum(self.rows), self.columns)
        return list(fp4_linear(x, *placed, "none", *shape).split(self.rows, -1))


def joint_packed(linears: tuple[nn.Module, ...]) -> JointPacked | None:
    """The linears as one, if `lay_packed_together` has put their weights where that is possible."""
    if torch.compiler.is_compiling():  # where tensors lie cannot be traced
        return None
    layers = _packed_alike(linears)
    if layers is None:
        return None
    first = layers[0]
    if any(layer.weight_tensor_scale.data_ptr() != first.weight_tensor_scale.data_ptr() for layer in layers):
        return None
    codes = joined([layer.weight_codes for layer in layers])
    scales = joined([layer.weight_scales for layer in layers])
    if codes is None or scales is None:
        return None
    rows = [layer.out_features for layer in layers]
    return JointPacked(codes, scales, first.weight_tensor_scale, first._layout, rows, first.in_features)


@torch.no_grad()
def lay_packed_together(*linears: nn.Module) -> bool:
    """Let the tiles of packed linears with one input lie one behind the other, so that one product computes them all.

    False, and nothing is done, where they are not all packed into tiles without bias, activation or hooks, where rows do not fill bands,
    or where tensor scales differ by what block scales have no room for. Waits for the device.
    """
    layers = _packed_alike(linears)
    if layers is None or len(layers) < 2:
        return False
    tensor_scales = [float(layer.weight_tensor_scale) for layer in layers]
    if not all(0 < tensor_scale < math.inf for tensor_scale in tensor_scales):  # of a damaged file
        return False
    largest, shifted = max(tensor_scales), list[Tensor]()
    for layer, tensor_scale in zip(layers, tensor_scales, strict=True):
        scales = _shifted(layer.weight_codes, layer.weight_scales, largest / tensor_scale)
        if scales is None:
            return False
        shifted.append(scales)
    codes, scales = torch.cat([layer.weight_codes for layer in layers]), torch.cat(shifted)
    shared, band = torch.full_like(layers[0].weight_tensor_scale, largest), 0
    for layer in layers:
        bands = slice(band, band + layer.weight_codes.shape[0])
        layer.weight_codes, layer.weight_scales, layer.weight_tensor_scale = codes[bands], scales[bands], shared
        band = bands.stop
    return True


def _packed_alike(linears: tuple[nn.Module, ...]) -> list[FusedFP4Linear] | None:
    layers = [linear for linear in linears if isinstance(linear, FusedFP4Linear) and linear.is_quantized]
    if len(layers) < len(linears) or any(
        layer.bias is not None or layer.activation != "none" or layer.w4a8 or not is_tiled(layer._layout)
        or layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
        for layer in layers
    ):  # fmt: skip
        return None
    alike = len({(layer.in_features, layer._layout, layer.weight_codes.device) for layer in layers}) == 1
    return layers if alike and all(layer.out_features % TILE_N == 0 for layer in layers[:-1]) else None


def _shifted(codes: Tensor, scales: Tensor, ratio: float) -> Tensor | None:
    """E5M3 scales divided by ``ratio``, a power of two of at least 1; None where that is none, or one is too small for it."""
    mantissa, exponent = math.frexp(ratio)
    if mantissa != 0.5:
        return None
    down = exponent - 1
    if not down:
        return scales
    # A block of zeros may have any scale. Words of codes are [h][g][t][r][i] in a tile, scales [g][t][h r] (kernels/fp4/layout.py).
    words = codes.contiguous().view(torch.int32).view(*scales.shape[:2], 2, 8, 4, 2, 2)
    scales = torch.where((words != 0).any(-1).permute(0, 1, 3, 4, 2, 5).reshape(scales.shape), scales, 0)
    live = scales[scales != 0]
    if live.numel() and (int(live.min()) >> 3) - down < _LEAST_FIELD:
        return None
    return torch.where(scales == 0, scales, scales - (down << 3))
