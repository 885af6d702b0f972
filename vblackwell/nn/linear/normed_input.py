"""A few rows that are still to be normalised, handed to the packed linears behind the norm, which do it themselves.

What computes several projections of one normalised input (queries, keys and values) takes `NormedByPacked` in its place and passes it to
`linears_of_one_input`; nothing else reads it. So a decoded token costs no launch for that norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vblackwell.kernels.fp4.layout import is_tiled
from vblackwell.kernels.fp4.norm import MAX_ROWS, fp4_norm_linear, max_rows
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.joint_packed import joint_packed
from vblackwell.nn.linear.plain import Unnormed, hooked


class NormedByPacked(Unnormed):
    """A few rows whose norm is one kernel with each packed linear behind it."""

    def linears(self, linears: tuple[nn.Module, ...]) -> list[Tensor]:
        """``linear(norm(x))`` of each, as one op each; as one for all where their weights lie together."""
        joint = joint_packed(linears)
        if joint is not None:
            eps = self.norm.eps if self.norm.eps is not None else torch.finfo(self.x.dtype).eps
            placed = (joint.codes, joint.scales, joint.tensor_scale, None, joint.layout, "none")
            shape = (sum(joint.rows), joint.columns)
            y = fp4_norm_linear(self.x, self.norm.weight, None, eps, *placed, *shape)
            return list(y.split(joint.rows, -1))
        return [norm_linear(self.x, self.norm, linear, None, linear.bias) for linear in linears]  # type: ignore[arg-type]


def normed(x: Tensor, norm: nn.RMSNorm, *linears: nn.Module) -> Tensor | NormedByPacked:
    """``norm(x)`` for the linears, or ``x`` and the norm, where each of them is one kernel with it.

    More rows than one kernel is faster for on this GPU are normalised once, for all of them.
    """
    if any(hooked(module) for module in (norm, *linears)) or not all(may_fuse(x, norm, linear) for linear in linears):
        return norm(x)
    columns, features = x.shape[-1], sum(linear.out_features for linear in linears)  # type: ignore[misc]
    few = x.numel() <= max_rows(_capability(x), features, columns) * columns
    return NormedByPacked(x, norm) if few else norm(x)


def may_fuse(x: Tensor, norm: nn.RMSNorm | nn.LayerNorm, linear: nn.Module) -> bool:
    """Whether norm and linear may be one op: packed into tiles, few bf16 rows on a GPU, no autocast, no gradients wanted."""
    if not isinstance(linear, FusedFP4Linear) or not linear.is_quantized or linear.w4a8 or norm.weight is None:
        return False
    if not is_tiled(linear._layout) or x.numel() > MAX_ROWS * linear.in_features:
        return False
    if not (on_gpu(x) and x.dtype == norm.weight.dtype == torch.bfloat16) or torch.is_autocast_enabled(x.device.type):
        return False
    parameters = [norm.weight, getattr(norm, "bias", None), linear.bias]
    trained = any(parameter is not None and parameter.requires_grad for parameter in parameters)
    return not (torch.is_grad_enabled() and (x.requires_grad or trained))


def norm_linear(
    x: Tensor,
    norm: nn.RMSNorm | nn.LayerNorm,
    linear: FusedFP4Linear,
    gain_sums_N: Tensor | None,
    bias_N: Tensor | None,
) -> Tensor:
    """The op on the modules' tensors; ``gain_sums_N`` and ``bias_N`` as it takes them."""
    eps = norm.eps if norm.eps is not None else torch.finfo(x.dtype).eps
    placed = (linear.weight_codes, linear.weight_scales, linear.weight_tensor_scale, bias_N, linear._layout)
    shape = (linear.out_features, linear.in_features)
    return fp4_norm_linear(x, norm.weight, gain_sums_N, eps, *placed, linear.activation, *shape)


def _capability(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)


def on_gpu(x: Tensor) -> bool:
    """Whether there is a fused kernel for the device of ``x``."""
    return x.is_cuda
