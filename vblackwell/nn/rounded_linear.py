"""Products with weights that were rounded, whose gradients are the weights': one node for autograd, however many have one input.

As an op that rounds, an op that multiplies and a hook that counts, a layer costs the host three times what ``nn.Linear`` does, and a step
of a model that a GPU computes quickly is the host's time. The gradient passes the rounding unchanged (Bengio et al. 2013). Gradients of
one input add up inside the matrix kernels, as in kernels/shared_input.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from vblackwell.kernels.shared_input import linears_dx


@dataclass(frozen=True, eq=False)
class Rounded:
    """A weight for one forward.

    Attributes:
        weight: (N, K), which gets the gradient. value: what is multiplied by, in the type of the input; kept for backward.
        reached: called when a backward pass has come to the weight.
    """

    weight: Tensor
    value: Tensor
    reached: Callable[[], None]


class _RoundedLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rounded: Sequence[Rounded], bias_N: Tensor | None, *weights_NK: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *(each.value for each in rounded))
        ctx.set_materialize_grads(False)
        ctx.reached = [each.reached for each in rounded]
        ctx.types = [None if bias_N is None else bias_N.dtype, *(weight.dtype for weight in weights_NK)]
        return tuple(functional.linear(x, each.value, bias_N) for each in rounded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *values = ctx.saved_tensors
        wanted, x_MK, dx, dbias_N = ctx.needs_input_grad, None, None, None
        given = [(dy, value) for dy, value in zip(dys, values, strict=True) if dy is not None]
        if wanted[0] and given:
            dx = linears_dx([dy for dy, _ in given], [value for _, value in given])
        dweights: list[Tensor | None] = []
        for dy, reached, dtype, needed in zip(dys, ctx.reached, ctx.types[1:], wanted[3:], strict=True):
            if dy is None or not needed:
                dweights.append(None)
                continue
            reached()
            x_MK = x.reshape(-1, x.shape[-1]) if x_MK is None else x_MK
            dweights.append((dy.reshape(-1, dy.shape[-1]).t() @ x_MK).to(dtype))
        if wanted[2] and dys[0] is not None:
            dbias_N = dys[0].reshape(-1, dys[0].shape[-1]).sum(0).to(ctx.types[0])
        return (dx, None, dbias_N, *dweights)


def rounded_linear(x: Tensor, rounded: Rounded, bias_N: Tensor | None) -> Tensor:
    """``x value^T + bias``, (..., K) to (..., N), with gradients for ``x``, the bias and the weight, but no second ones."""
    return _RoundedLinears.apply(x, (rounded,), bias_N, rounded.weight)[0]  # type: ignore[index]


def rounded_linears(x: Tensor, rounded: Sequence[Rounded]) -> list[Tensor]:
    """The products of ``x`` with several; as `rounded_linear`, without biases."""
    return list(_RoundedLinears.apply(x, rounded, None, *(each.weight for each in rounded)))  # type: ignore[arg-type]
