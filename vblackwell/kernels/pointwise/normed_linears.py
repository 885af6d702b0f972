"""Linear layers of one normalised input, ``[rms_norm(x) @ w.T for w in weights]``, that keep ``x`` and not what the
norm made of it.

For blocks that are computed again in backward, whose input is kept in any case: the norm is computed once more there,
49 us for 16k x 2560 on an H200, instead of being held in addition. The operations and their order are those of
`rms_norm` and `shared_input_linears`, so are the bits.

Legend: M rows, D features in, N features out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise.shared_input import linears_dx
from vblackwell.kernels.runtime.op import register_op
from vblackwell.kernels.runtime.registry import refuse_forward_mode


def normed_linears(x: Tensor, norm_D: Tensor, eps: float, weights_ND: list[Tensor]) -> list[Tensor]:
    """(..., D) in, (..., N) each out. Differentiable in ``x``, the norm's weight and every weight; saves these alone.
    Triton only.

    Raises:
        ConfigurationError: a weight is not (N, D), the norm's not (D,), or one is of another type than ``x``.
    """
    for weight, shape in [(norm_D, (x.shape[-1],)), *((w, (w.shape[0], x.shape[-1])) for w in weights_ND)]:
        if tuple(weight.shape) != shape or weight.dtype != x.dtype:
            raise ConfigurationError(
                f"a weight of {tuple(weight.shape)} {weight.dtype} "
                f"for an input of {tuple(x.shape)} {x.dtype}: they do not fit"
            )
    return _normed_linears(x, norm_D, eps, weights_ND)


def _fake_normed_linears(x, norm_D, eps, weights_ND):  # type: ignore[no-untyped-def]
    return [x.new_empty(*x.shape[:-1], w_ND.shape[0]) for w_ND in weights_ND]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, norm_D, ctx.eps, weights_ND = inputs
    ctx.save_for_backward(x, norm_D, *weights_ND)


def _backward(ctx, dys: list[Tensor]):  # type: ignore[no-untyped-def]
    x, norm_D, *weights_ND = ctx.saved_tensors
    needed = [*ctx.needs_input_grad[:2], *ctx.needs_input_grad[3]]
    found = _normed_linears_backward(dys, x, norm_D, ctx.eps, weights_ND, needed)
    dx, dnorm_D, *dweights = (gradient if wanted else None for gradient, wanted in zip(found, needed, strict=True))
    return dx, dnorm_D, None, dweights


@register_op(_fake_normed_linears, save=_save, backward=_backward)
def _normed_linears(x: Tensor, norm_D: Tensor, eps: float, weights_ND: list[Tensor]) -> list[Tensor]:
    refuse_forward_mode("normed_linears")
    from vblackwell.kernels.pointwise import rms_norm_triton

    n_MD, _, _ = rms_norm_triton.forward(x.reshape(-1, x.shape[-1]), None, norm_D, eps)
    return [torch.mm(n_MD, w_ND.t()).view(*x.shape[:-1], w_ND.shape[0]) for w_ND in weights_ND]


def _fake_normed_linears_backward(dys, x, norm_D, eps, weights_ND, needed):  # type: ignore[no-untyped-def]
    tensors = zip((x, norm_D, *weights_ND), [True, *needed[1:]], strict=True)
    return [x.new_empty(each.shape if wanted else (0,)) for each, wanted in tensors]


@register_op(_fake_normed_linears_backward)
def _normed_linears_backward(
    dys: list[Tensor], x: Tensor, norm_D: Tensor, eps: float, weights_ND: list[Tensor], needed: list[bool]
) -> list[Tensor]:
    """Gradients of x, the norm's weight and each weight; but for x's, which is always there, empty where they are not
    ``needed``.
    """
    from vblackwell.kernels.pointwise import rms_norm_triton

    x_MD = x.reshape(-1, x.shape[-1])
    n_MD, _, scale_M = rms_norm_triton.forward(x_MD, None, norm_D, eps)
    rows = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
    dweights = [
        torch.mm(dy_MN.t(), n_MD) if wanted else dy_MN.new_empty(0)
        for dy_MN, wanted in zip(rows, needed[2:], strict=True)
    ]
    del n_MD
    dn_MD = linears_dx(rows, weights_ND)
    dx_MD, dnorm_D = rms_norm_triton.backward(dn_MD, None, x_MD, norm_D, scale_M, needed[1])
    return [dx_MD.view(x.shape), dnorm_D, *dweights]
