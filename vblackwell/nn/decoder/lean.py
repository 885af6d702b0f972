"""Halves of a block that keep the residual stream alone, for blocks that a checkpoint computes again in backward.

What a norm makes of the stream, and gate and up, are computed once more where backward needs them, instead of being held from the second
pass on. Only on CUDA, and only where every module involved is plain: elsewhere the modules are called one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vblackwell.kernels.pointwise.feed_forward import feed_forward_block
from vblackwell.kernels.pointwise.normed_linears import normed_linears
from vblackwell.nn.linear.plain import Unnormed, hooked, may_fuse


class NormedLater(Unnormed):
    """Rows whose norm is computed with the linears behind it, and once more in their backward."""

    def linears(self, linears: tuple[nn.Module, ...]) -> list[Tensor]:
        """``[linear(norm(x)) for linear in linears]`` as one operation."""
        weights = [linear.weight for linear in linears]
        return normed_linears(self.x, self.norm.weight, epsilon(self.norm), weights)  # type: ignore[arg-type]


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
    return feed_forward_block(x + residual, norm.weight, epsilon(norm), *weights, wanted)  # type: ignore[arg-type]


def epsilon(norm: nn.RMSNorm) -> float:
    """What the norm adds to the mean square."""
    return norm.eps if norm.eps is not None else torch.finfo(norm.weight.dtype).eps


def _plain(x: Tensor, norm: nn.RMSNorm) -> bool:
    return (
        isinstance(norm, nn.RMSNorm) and not hooked(norm) and norm.weight is not None and norm.weight.dtype == x.dtype
    )
