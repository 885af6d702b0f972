"""When layers may be computed together, because each is what it looks like: its own ``nn.Linear`` and nothing more."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vblackwell.kernels.shared_input import shared_input_linears


def is_plain(linear: nn.Module) -> bool:
    """Whether calling ``linear`` is the product with its weight alone: no bias, no hooks, no other class (FP4, a parametrisation)."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return type(linear) is nn.Linear and linear.bias is None and not any(hooks)


def linears_of_one_input(x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """``[linear(x) for linear in linears]``; on CUDA as one operation whose backward adds the input's gradients up on the way."""
    together = (
        x.is_cuda
        and all(is_plain(linear) and linear.weight.dtype == x.dtype for linear in linears)  # type: ignore[union-attr]
        and not torch.is_autocast_enabled(x.device.type)
    )
    if together:
        return shared_input_linears(x, [linear.weight for linear in linears])  # type: ignore[misc]
    return [linear(x) for linear in linears]
