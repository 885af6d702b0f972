"""Several linear layers of one input (queries, keys and values; gate and up), whose input gradients add up inside the
matrix kernels.

Autograd multiplies each output's gradient by its weight and adds the results one after the other, three passes over
memory an addition. Here every product but the first starts from the sum so far (``addmm`` with beta 1): the same
roundings, no pass of its own. Weights stay parameters of their own; nothing is concatenated.

Legend: M rows, K features in, N features out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.runtime.op import register_op
from vblackwell.kernels.runtime.registry import refuse_forward_mode


def shared_input_linears(x: Tensor, weights_NK: list[Tensor]) -> list[Tensor]:
    """``[x @ w.T for w in weights_NK]``: (..., K) in, (..., N) each out. Differentiable in ``x`` and every weight.

    Raises:
        ConfigurationError: a weight is not (N, K), or of another type than ``x``.
    """
    for w_NK in weights_NK:
        if w_NK.dim() != 2 or w_NK.shape[1] != x.shape[-1] or w_NK.dtype != x.dtype:
            raise ConfigurationError(
                f"a weight of {tuple(w_NK.shape)} {w_NK.dtype} "
                f"for an input of {tuple(x.shape)} {x.dtype}: they do not fit"
            )
    return _shared_input_linears(x, weights_NK)


def _fake_shared_input_linears(x, weights_NK):  # type: ignore[no-untyped-def]
    return [x.new_empty(*x.shape[:-1], w_NK.shape[0]) for w_NK in weights_NK]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weights_NK = inputs
    ctx.save_for_backward(x, *weights_NK)
    ctx.set_materialize_grads(False)


def _backward(ctx, dys: list[Tensor | None]):  # type: ignore[no-untyped-def]
    x, *weights_NK = ctx.saved_tensors
    given = [(dy, w_NK) for dy, w_NK in zip(dys, weights_NK, strict=True) if dy is not None]
    dx = None
    if ctx.needs_input_grad[0] and given:
        dx = _shared_input_linears_dx([dy for dy, _ in given], [w_NK for _, w_NK in given])
    x_MK = x.reshape(-1, x.shape[-1])
    return dx, [
        torch.mm(dy.reshape(-1, dy.shape[-1]).t(), x_MK) if dy is not None and needed else None
        for dy, needed in zip(dys, ctx.needs_input_grad[1], strict=True)
    ]


@register_op(_fake_shared_input_linears, save=_save, backward=_backward)
def _shared_input_linears(x: Tensor, weights_NK: list[Tensor]) -> list[Tensor]:
    refuse_forward_mode("shared_input_linears")
    x_MK = x.reshape(-1, x.shape[-1])
    return [torch.mm(x_MK, w_NK.t()).view(*x.shape[:-1], w_NK.shape[0]) for w_NK in weights_NK]


@register_op(lambda dys, weights_NK: dys[0].new_empty(*dys[0].shape[:-1], weights_NK[0].shape[1]))
def _shared_input_linears_dx(dys: list[Tensor], weights_NK: list[Tensor]) -> Tensor:
    return linears_dx(dys, weights_NK)


def linears_dx(dys: list[Tensor], weights_NK: list[Tensor]) -> Tensor:
    """``sum dy @ w`` of dys (..., N) and weights (N, K), in order: (..., K). No autograd."""
    rows = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
    dx_MK = torch.mm(rows[0], weights_NK[0])
    for dy_MN, w_NK in zip(rows[1:], weights_NK[1:], strict=True):
        torch.addmm(dx_MK, dy_MN, w_NK, out=dx_MK)
    return dx_MK.view(*dys[0].shape[:-1], dx_MK.shape[1])  # a size of -1 is not known of no rows
