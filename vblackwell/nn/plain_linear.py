"""When layers may be computed together, because each is what it looks like: its own ``nn.Linear`` and nothing more."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vblackwell.kernels.gated_mlp import gated_mlp
from vblackwell.kernels.shared_input import shared_input_linears
from vblackwell.kernels.swiglu import swiglu, swiglu_linear
from vblackwell.nn.normed_input import Unnormed


def is_plain(linear: nn.Module) -> bool:
    """Whether calling ``linear`` is the product with its weight alone: no bias, no hooks, no other class (FP4, a parametrisation)."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return type(linear) is nn.Linear and linear.bias is None and not any(hooks)


def may_fuse(x: Tensor, *linears: nn.Module) -> bool:
    """Whether the products of ``x`` with the linears' weights may be computed by our operators: CUDA, plain, of one type, no autocast."""
    return (
        x.is_cuda
        and all(is_plain(linear) and linear.weight.dtype == x.dtype for linear in linears)  # type: ignore[union-attr]
        and not torch.is_autocast_enabled(x.device.type)
    )


def linears_of_one_input(x: Tensor | Unnormed, *linears: nn.Module) -> list[Tensor]:
    """``[linear(x) for linear in linears]``; on CUDA as one operation whose backward adds the input's gradients up on the way.

    What `normed` made of an input for these linears passes as ``x`` too.
    """
    if isinstance(x, Unnormed):
        return [x.linear(linear) for linear in linears]  # type: ignore[arg-type]
    if may_fuse(x, *linears):
        return shared_input_linears(x, [linear.weight for linear in linears])  # type: ignore[misc]
    return [linear(x) for linear in linears]


def gated_product(gate: Tensor, up: Tensor, down: nn.Module, wanted: bool = True) -> Tensor:
    """``down(silu(gate) * up)``; on CUDA as one operation that keeps no product. ``wanted`` as for `swiglu_linear`."""
    if may_fuse(gate, down) and gate.dtype == up.dtype:
        return swiglu_linear(gate, up, down.weight, wanted)  # type: ignore[arg-type]
    return down(swiglu(gate, up))


def lean_feed_forward(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, wanted: bool = True) -> Tensor | None:
    """``down(silu(gate(x)) * up(x))`` as one operation that keeps ``x`` alone; None where the linears must be called as they are."""
    if not may_fuse(x, gate, up, down):
        return None
    return gated_mlp(x, gate.weight, up.weight, down.weight, wanted)  # type: ignore[arg-type]
