"""Experts of transformers' mixtures, whose linears are stacked in parameters of three dimensions, rounded to FP4 where they are read.

There is no module to replace: the experts' forward reads ``self.gate_up_proj``. Its class becomes a subclass (as in fused_modules.py)
in which that name is a property: the parameter rounded, its gradient straight through. All experts of a layer share the tensor scale
of the one parameter. The parameter stays under its name, so optimizers, stacks and files see what they saw;
``module.down_proj`` is the rounded tensor.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from vblackwell.nn.convert.fused_modules import swap
from vblackwell.nn.linear.rounded import fp4_round_trip

NAMES = ("gate_up_proj", "down_proj")


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` holds experts as (E, outputs, inputs) parameters, or the reverse."""
    held = [module._parameters.get(name) for name in NAMES]
    return all(parameter is not None and parameter.dim() == 3 for parameter in held)


def why_not(module: Any) -> str | None:
    """Why experts are not rounded; None if they can be."""
    if getattr(module, "is_transposed", False):
        return (
            "its experts are stored as (inputs, outputs), so blocks along their rows would not be blocks of a product"
        )
    if getattr(getattr(module, "config", None), "_experts_implementation", None) in (None, "eager"):
        return "its loop reads the parameter once an expert, and each reading would round all: use 'grouped_mm'"
    return None


def round_experts(module: nn.Module, format: str) -> type:
    """Let ``module`` read its experts rounded to ``format``; the class that it had."""
    before = type(module)
    swap(module, {name: _rounded(name, format) for name in NAMES})  # type: ignore[arg-type]
    return before


@functools.cache
def _rounded(name: str, format: str) -> property:
    def read(self: nn.Module) -> Tensor:
        w_ENK: Any = self._parameters[name]
        return fp4_round_trip(w_ENK.flatten(0, 1), format, w_ENK.dtype).view(w_ENK.shape)

    return property(read)
