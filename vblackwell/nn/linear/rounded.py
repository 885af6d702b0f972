"""Products with weights that were rounded, whose gradients are the weights' (straight through; Bengio et al. 2013).

One node for autograd, however many weights have one input: as ops and a hook that counts, a layer costs the host three
times what ``nn.Linear`` does. Rounding as ``w + (round(w) - w).detach()`` keeps two more copies and is not exact.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from vblackwell.kernels.fp4.encode import round_trip
from vblackwell.kernels.pointwise.linears import linears_dx
from vblackwell.kernels.pointwise.rows import kernels
from vblackwell.kernels.runtime.registry import register_op
from vblackwell.numerics.formats import format_named


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.dtype = inputs[0].dtype


@register_op(
    lambda w_NK, format, dtype: torch.empty_like(w_NK, dtype=dtype, memory_format=torch.contiguous_format),
    save=_save,
    backward=lambda ctx, dw_NK: (dw_NK.to(ctx.dtype), None, None),
)
def fp4_round_trip(w_NK: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """``w_NK`` rounded to ``format`` with `max` scales and back, as ``dtype``; the gradient passes unchanged."""
    return round_trip(w_NK, format_named(format), dtype)


class Rounded(NamedTuple):
    """A weight for one forward. A tuple, because a step makes hundreds."""

    weight: Tensor  # (N, K), which gets the gradient
    value: Tensor  # what is multiplied by, in the type of the input; kept for backward
    reached: Callable[[], None]  # called when a backward pass has come to the weight


class _RoundedLinears(torch.autograd.Function):
    """Products of ``x``, or with ``up`` of ``silu(x) * up``, which is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        rounded: Sequence[Rounded],
        bias_N: Tensor | None,
        wanted: bool,
        *weights_NK: Tensor,
    ) -> tuple[Tensor, ...]:
        gated = () if up is None else (x, up)
        x = kernels().swiglu(*gated) if gated else x
        ctx.save_for_backward(*gated, x, *(each.value for each in rounded))
        ctx.set_materialize_grads(False)
        ctx.reached = [each.reached for each in rounded]
        ctx.types = [None if bias_N is None else bias_N.dtype, *(weight.dtype for weight in weights_NK)]
        if not wanted:
            return tuple(x.new_empty(*x.shape[:-1], weight_NK.shape[0]) for weight_NK in weights_NK)
        return tuple(functional.linear(x, each.value, bias_N) for each in rounded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad  # read once: a checkpoint unpacks them
        (*gated, x), values = saved[: -len(dys)], saved[-len(dys) :]
        dx, dup, dbias_N, x_MK = None, None, None, x.reshape(-1, x.shape[-1])
        rows = [None if dy is None else dy.reshape(-1, dy.shape[-1]) for dy in dys]
        given = [(dy_MN, value) for dy_MN, value in zip(rows, values, strict=True) if dy_MN is not None]
        if (wanted[0] or wanted[1]) and given:
            dx = linears_dx([dy_MN for dy_MN, _ in given], [value for _, value in given]).view(x.shape)
            if gated:
                dx, dup, _ = kernels().swiglu_backward(dx, *gated, False)
        dweights: list[Tensor | None] = [None] * len(rows)
        for at, (dy_MN, reached) in enumerate(zip(rows, ctx.reached, strict=True)):
            if dy_MN is not None and wanted[5 + at]:
                reached()
                dweights[at] = torch.mm(dy_MN.t(), x_MK).to(ctx.types[1 + at])
        if wanted[3] and rows[0] is not None:
            dbias_N = rows[0].sum(0).to(ctx.types[0])
        return (dx, dup, None, dbias_N, None, *dweights)


def rounded_linears(x: Tensor, rounded: Sequence[Rounded], bias_N: Tensor | None = None) -> Sequence[Tensor]:
    """``x value^T + bias`` of each, (..., K) to (..., N), with gradients for all three, but no second ones; one alone
    may have a bias.
    """
    found: Any = _RoundedLinears.apply(x, None, rounded, bias_N, True, *(each.weight for each in rounded))
    return found


def rounded_swiglu_linear(gate: Tensor, up: Tensor, rounded: Rounded, wanted: bool = True) -> Tensor:
    """``(silu(gate) * up) value^T``, (..., I) to (..., D), in one node, as `swiglu_linear`. Triton only."""
    return _RoundedLinears.apply(gate, up, (rounded,), None, wanted, rounded.weight)[0]  # type: ignore[index]
