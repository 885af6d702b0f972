"""When layers may be computed together, because each is what it looks like: its own ``nn.Linear`` and nothing more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.kernels.pointwise.shared_input import shared_input_linears
from vblackwell.kernels.pointwise.swiglu import swiglu, swiglu_linear
from vblackwell.nn.linear.joined import joined
from vblackwell.nn.linear.joint_packed import joint_packed
from vblackwell.nn.linear.rounded import Rounded, rounded_linears, rounded_swiglu_linear


def is_plain(linear: nn.Module) -> bool:
    """Whether calling ``linear`` is the product with its weight alone: no bias, no hooks, no other class (FP4, a parametrisation)."""
    return type(linear) is nn.Linear and linear.bias is None and not hooked(linear)


def hooked(module: nn.Module) -> bool:
    """Whether something happens around a call of ``module`` beside its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def may_fuse(x: Tensor, *linears: nn.Module) -> bool:
    """Whether the products of ``x`` with the linears' weights may be computed by our operators: CUDA, plain, of one type, no autocast."""
    return (
        x.is_cuda
        and all(is_plain(linear) and linear.weight.dtype == x.dtype for linear in linears)  # type: ignore[union-attr]
        and not torch.is_autocast_enabled(x.device.type)
    )


@dataclass(frozen=True, eq=False)
class Unnormed(ABC):
    """Rows and the RMSNorm that they have not been through: for linears that compute the norm themselves.

    Attributes:
        x: (..., D).
        norm: over D.
    """

    x: Tensor
    norm: nn.RMSNorm

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def device(self) -> torch.device:
        return self.x.device

    @abstractmethod
    def linears(self, linears: tuple[nn.Module, ...]) -> list[Tensor]:
        """``[linear(norm(x)) for linear in linears]``."""


def linears_of_one_input(x: Tensor | Unnormed, *linears: nn.Module) -> list[Tensor]:
    """``[linear(x) for linear in linears]``; on CUDA as one operation whose backward adds the input's gradients up on the way."""
    if not isinstance(x, Tensor):
        return x.linears(linears)
    if may_fuse(x, *linears):
        weights: list[Tensor] = [linear.weight for linear in linears]  # type: ignore[misc]
        joint = None if torch.is_grad_enabled() else joined(weights)
        if joint is not None:
            return list(functional.linear(x, joint).split([weight.shape[0] for weight in weights], -1))
        return shared_input_linears(x, weights)
    packed = None if torch.is_grad_enabled() else joint_packed(linears)
    if packed is not None:
        return packed.product(x)
    found = rounded_of(x, linears)
    return [linear(x) for linear in linears] if found is None else rounded_linears(x, found)


def rounded_of(x: Tensor, linears: tuple[nn.Module, ...]) -> list[Rounded] | None:
    """What layers that round their weights in training multiply ``x`` by; None where one of them is no such layer, or does not now."""
    found: list[Rounded] = []
    for linear in linears:
        give: Any = getattr(type(linear), "rounded_for", None)
        rounded = None if give is None or hooked(linear) else give(linear, x)
        if rounded is None:
            return None
        found.append(rounded)
    return found


@torch.no_grad()
def lay_together(*linears: nn.Module) -> bool:
    """Let the weights of plain linears with one input lie one behind the other, so that without gradients one product computes them all.

    Parameters keep names and identity. False, and nothing is done, where one of them is not plain, or in a stack.
    """
    weights = [linear.weight for linear in linears if is_plain(linear)]
    alike = len(weights) == len(linears) and len({(w.dtype, w.device, w.shape[1]) for w in weights}) == 1  # type: ignore[index]
    if not alike or any("_vb_binding" in w.__dict__ or "_vb_resident" in w.__dict__ for w in weights):
        return False
    joint = torch.cat(weights)  # type: ignore[arg-type]
    for weight, rows in zip(weights, joint.split([len(w) for w in weights]), strict=True):  # type: ignore[arg-type]
        weight.data = rows
    return True


def gated_product(gate: Tensor, up: Tensor, down: nn.Module, wanted: bool = True) -> Tensor:
    """``down(silu(gate) * up)``; on CUDA as one operation that keeps no product. ``wanted`` as for `swiglu_linear`."""
    if may_fuse(gate, down) and gate.dtype == up.dtype:
        return swiglu_linear(gate, up, down.weight, wanted)  # type: ignore[arg-type]
    if gate.is_cuda and gate.shape == up.shape and gate.dtype == up.dtype:
        found = rounded_of(gate, (down,))
        if found is not None:
            return rounded_swiglu_linear(gate, up, found[0], wanted)
    return down(swiglu(gate, up))
