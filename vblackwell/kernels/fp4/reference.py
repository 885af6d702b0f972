"""Decoding packed weights in pure torch: the oracle of the kernels, and the backend that runs anywhere.

``M`` rows, ``N`` out features, ``K`` in features.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4 import layout
from vblackwell.numerics.formats import FORMATS
from vblackwell.numerics.packed import PackedTensor

_FUNCTIONS = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
ACTIVATIONS = ("none", *_FUNCTIONS)


def weight_of(weight: Sequence[Tensor], format: str, n: int, k: int) -> Tensor:
    """The (n, k) weight in fp32, in one part (three tensors) or two (four)."""
    if len(weight) == 3:
        return dequantize(*weight, format=format, n=n, k=k)
    parts = layout.parts_from_tiled(*weight, n=n, k=k) if layout.is_tiled(format) else weight
    codes, fine, scales, tensor_scale = parts
    return PackedTensor(FORMATS["nvfp4"], (n, k), torch.float32, codes, scales, tensor_scale, fine).dequantize()


def dequantize(codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int) -> Tensor:
    """The (n, k) weight in fp32, exactly ``(value[code] * block_scale) * tensor_scale``."""
    if layout.is_tiled(format):
        codes, block_scales, tensor_scale = layout.from_tiled(codes, block_scales, tensor_scale, format, n, k)
        format = layout.canonical_name(format)
    block_size = codes.shape[1] * 8 // FORMATS[format].bits // block_scales.shape[1]  # int4 and int8 have a choice
    form = replace(FORMATS[format], block_size=block_size)
    return PackedTensor(form, (n, k), torch.float32, codes, block_scales, tensor_scale).dequantize()


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ConfigurationError(f"activation {activation!r} is not known: choose one of {', '.join(ACTIVATIONS)}")


def activate(z: Tensor, activation: str) -> Tensor:
    """``z`` through 'none', 'relu', 'gelu' (exact, with erf) or 'silu'."""
    if activation == "none":
        return z
    check_activation(activation)
    return _FUNCTIONS[activation](z)


def activation_backward(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """The gradient in ``z`` of ``activate(z, activation)``, which is not 'none'."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dy, z, 0)
    return (torch.ops.aten.gelu_backward if activation == "gelu" else torch.ops.aten.silu_backward)(dy, z)


def linear(x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``activation(x W^T + bias)`` of an fp32 weight; all in fp32, rounded once to the type of ``x``."""
    z_MN = x_MK.to(torch.float32) @ w_NK.t()
    if bias is not None:
        z_MN = z_MN + bias.to(torch.float32)
    return activate(z_MN, activation).to(x_MK.dtype)
