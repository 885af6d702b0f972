"""RMSNorms that are computed with the linears after them.

What computes several projections of one normalised input (queries, keys and values) takes an `Unnormed` in its place
and passes it to `linears_of_one_input`; nothing else reads it. A few rows of packed linears meet their norm inside the
products' kernels, so a decoded token costs no launch for it. And in blocks that a checkpoint computes again in
backward, the residual stream alone is kept: what a norm makes of it, and gate and up, are computed once more where
backward needs them. That is done on CUDA only, and only where every module involved is plain: elsewhere the modules are
called one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vblackwell.kernels.fp4.layout import is_tiled
from vblackwell.kernels.fp4.norm import MAX_ROWS, fp4_norm_linear, max_rows
from vblackwell.kernels.pointwise.linears import feed_forward_block, normed_linears
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.one_input import Unnormed, hooked, joint_packed, may_fuse


def epsilon(norm: nn.RMSNorm, x: Tensor) -> float:
    """What the norm adds to the mean square of ``x``."""
    return norm.eps if norm.eps is not None else torch.finfo(x.dtype).eps


# -- packed linears ----------------------------------------------------------------------------------------------------


class NormedByPacked(Unnormed):
    """A few rows whose norm is one kernel with each packed linear after it."""

    def linears(self, linears: tuple[nn.Module, ...]) -> list[Tensor]:
        """``linear(norm(x))`` of each, as one op each; as one for all where their weights lie together."""
        joint = joint_packed(linears)
        if joint is not None:
            placed = (joint.codes, joint.scales, joint.tensor_scale, None, joint.layout, "none")
            shape = (sum(joint.rows), joint.columns)
            y = fp4_norm_linear(self.x, self.norm.weight, None, epsilon(self.norm, self.x), *placed, *shape)
            return list(y.split(joint.rows, -1))
        return [self._linear(linear) for linear in linears]  # type: ignore[arg-type]

    def _linear(self, linear: FusedFP4Linear) -> Tensor:
        placed = (linear.weight_codes, linear.weight_scales, linear.weight_tensor_scale, linear.bias, linear._layout)
        shape, norm = (linear.out_features, linear.in_features), self.norm
        return fp4_norm_linear(self.x, norm.weight, None, epsilon(norm, self.x), *placed, linear.activation, *shape)


def normed(x: Tensor, norm: nn.RMSNorm, *linears: nn.Module) -> Tensor | NormedByPacked:
    """``norm(x)`` for the linears, or ``x`` and the norm, where each of them is one kernel with it.

    More rows than one kernel is faster for on this GPU are normalised once, for all of them.
    """
    if any(hooked(module) for module in (norm, *linears)) or not all(_goes_with(x, norm, linear) for linear in linears):
        return norm(x)
    columns, features = x.shape[-1], sum(linear.out_features for linear in linears)  # type: ignore[misc]
    few = x.numel() <= max_rows(_capability(x), features, columns) * columns
    return NormedByPacked(x, norm) if few else norm(x)


def _goes_with(x: Tensor, norm: nn.RMSNorm, linear: nn.Module) -> bool:
    """Whether norm and linear may be one op: packed into tiles, few bf16 rows on a GPU, no autocast, no gradients wanted."""
    if not isinstance(linear, FusedFP4Linear) or not linear.is_quantized or linear.w4a8 or norm.weight is None:
        return False
    if not is_tiled(linear._layout) or x.numel() > MAX_ROWS * linear.in_features:
        return False
    if not (on_gpu(x) and x.dtype == norm.weight.dtype == torch.bfloat16) or torch.is_autocast_enabled(x.device.type):
        return False
    parameters = [norm.weight, linear.bias]
    trained = any(parameter is not None and parameter.requires_grad for parameter in parameters)
    return not (torch.is_grad_enabled() and (x.requires_grad or trained))


def _capability(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)


def on_gpu(x: Tensor) -> bool:
    """Whether there is a fused kernel for the device of ``x``."""
    return x.is_cuda


# -- blocks under a checkpoint -----------------------------------------------------------------------------------------


class NormedLater(Unnormed):
    """Rows whose norm is computed with the linears after it, and once more in their backward."""

    def linears(self, linears: tuple[nn.Module, ...]) -> list[Tensor]:
        """``[linear(norm(x)) for linear in linears]`` as one operation."""
        weights = [linear.weight for linear in linears]
        return normed_linears(self.x, self.norm.weight, epsilon(self.norm, self.norm.weight), weights)  # type: ignore[arg-type]


def normed_later(x: Tensor, norm: nn.RMSNorm, *linears: nn.Module) -> NormedLater | None:
    """What stands for ``norm(x)`` before these linears; None where norm and linears must be called as they are."""
    return NormedLater(x, norm) if _plain(x, norm) and may_fuse(x, *linears) else None


def lean_feed_forward(
    x: Tensor,
    residual: Tensor,
    norm: nn.RMSNorm,
    mlp: nn.Module,
    linears: tuple[nn.Module, nn.Module, nn.Module],
    wanted: bool,
) -> Tensor | None:
    """``total + mlp(norm(total))`` of ``total = x + residual``, which alone is kept; None where modules must be called as they are.

    Args:
        linears: gate, up and down of ``mlp``, which is ``down(silu(gate) * up)``.
        wanted: False: the caller throws the result away.
    """
    if hooked(mlp) or not _plain(x, norm) or not may_fuse(x, *linears):
        return None
    weights = [linear.weight for linear in linears]
    return feed_forward_block(x + residual, norm.weight, epsilon(norm, norm.weight), *weights, wanted)  # type: ignore[arg-type]


def _plain(x: Tensor, norm: nn.RMSNorm) -> bool:
    return (
        isinstance(norm, nn.RMSNorm) and not hooked(norm) and norm.weight is not None and norm.weight.dtype == x.dtype
    )
