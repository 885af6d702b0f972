"""A norm and the packed linear behind it as one module, which is one kernel where a few rows are decoded.

Everywhere else it is ``linear(norm(x))``: before packing, for more rows, under autocast, where gradients are wanted, on a CPU. Both
keep their names and parameters under ``norm`` and ``linear``, so a state dict says what it would say of the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.nn.decoder.block import RMSNorm
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.normed_input import may_fuse, norm_linear
from vblackwell.numerics.packed import PackedTensor

_BAND_ELEMENTS = 1 << 22


class NormFP4Linear(nn.Module):
    """``linear(norm(x))``.

    Args:
        norm: ``nn.RMSNorm`` or ``nn.LayerNorm`` over the last dimension, with a weight.
        linear: takes what the norm gives.

    Raises:
        ConfigurationError: a norm of another class, shape or without a weight.
    """

    gain_sums: Tensor | None
    folded_bias: Tensor | None

    def __init__(self, norm: nn.RMSNorm | nn.LayerNorm, linear: FusedFP4Linear) -> None:
        super().__init__()
        if type(norm) not in (nn.RMSNorm, nn.LayerNorm, RMSNorm):  # another class may compute something else
            raise ConfigurationError(
                f"{type(norm).__name__} is no norm that can be fused: give nn.RMSNorm or nn.LayerNorm"
            )
        if norm.weight is None or tuple(norm.weight.shape) != (linear.in_features,):
            raise ConfigurationError(f"{norm} needs a weight of ({linear.in_features},), what the linear takes")
        self.norm, self.linear = norm, linear
        self.register_buffer("gain_sums", None, persistent=False)  # LayerNorm's, of the packed weight
        self.register_buffer("folded_bias", None, persistent=False)
        self.register_load_state_dict_post_hook(_fold_again)
        self.fold()

    def quantize(self, *, tensor_scale: Tensor | None = None) -> NormFP4Linear:
        """Packs the linear; see ``FusedFP4Linear.quantize``. Returns the module."""
        self.linear.quantize(tensor_scale=tensor_scale)
        self.fold()
        return self

    @torch.no_grad()
    def fold(self) -> None:
        """Multiplies a LayerNorm's weight and bias by the packed weight, for the fused kernel.

        Packing and loading do it. Call it after a change of the norm's parameters or the linear's bias in place.
        """
        self.gain_sums = self.folded_bias = None
        packed, norm = self.linear.packed, self.norm
        if packed is None or not isinstance(norm, nn.LayerNorm) or norm.weight.is_meta or packed.codes.is_meta:
            return
        self.gain_sums = _times(packed, norm.weight)
        parts = [_times(packed, norm.bias)] if norm.bias is not None else []
        parts += [self.linear.bias.float()] if self.linear.bias is not None else []
        self.folded_bias = torch.stack(parts).sum(0) if parts else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        linear, norm = self.linear, self.norm
        folded = isinstance(norm, nn.LayerNorm)
        if (folded and self.gain_sums is None) or not may_fuse(x, norm, linear):
            return linear(norm(x))
        return norm_linear(x, norm, linear, self.gain_sums, self.folded_bias if folded else linear.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> NormFP4Linear:
        self.gain_sums = self.folded_bias = None  # fp32 whatever the module is cast to: made again from what has moved
        super()._apply(fn, recurse)
        self.fold()
        return self


def _fold_again(module: nn.Module, keys: Any) -> None:
    assert isinstance(module, NormFP4Linear)
    module.fold()


def _times(packed: PackedTensor, vector_K: Tensor) -> Tensor:
    """(N,) fp32 product of the packed matrix with a vector, some rows at a time."""
    vector, band = vector_K.to(torch.float32), max(1, _BAND_ELEMENTS // packed.k)
    parts = []
    for row in range(0, packed.n, band):
        codes, scales = packed.codes[row : row + band], packed.block_scales[row : row + band]
        shape = (codes.shape[0], packed.k)
        rows = PackedTensor(packed.form, shape, torch.float32, codes, scales, packed.tensor_scale)
        parts.append((rows.dequantize() * vector).sum(1))
    return torch.cat(parts)
