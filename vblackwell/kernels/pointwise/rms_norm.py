"""RMSNorm (Zhang & Sennrich, arXiv:1910.07467), alone or with the residual addition before it.

``y = (x * rsqrt(mean(x^2) + eps)) * w`` in fp32, rounded once; with a residual ``x + residual`` is rounded to its type
first, as the unfused addition would, and returned too. One pass over memory each way. The weight's gradient is
deterministic: every program sums its own rows, and the partial sums are added in order.

Legend: R rows, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.runtime.op import register_op
from vblackwell.kernels.runtime.registry import runs_triton


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x`` (..., D) normalised over its last dimension and scaled by ``weight_D``, in the type that both promote to.
    Differentiable in both. Raises ConfigurationError where the weight is not one value for each feature.
    """
    _check(x, weight_D, None)
    if runs_triton("rms_norm", x, x.shape[-1]):
        return _rms_norm(x, weight_D, eps)[0]
    return functional.rms_norm(x, (x.shape[-1],), weight_D, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)`` in one pass; all (..., D). Raises ConfigurationError where they do not
    fit.
    """
    _check(x, weight_D, residual)
    if runs_triton("rms_norm", x, x.shape[-1]):
        y, total, _ = _add_rms_norm(x, residual, weight_D, eps)
        return y, total
    total = x + residual
    return functional.rms_norm(total, (x.shape[-1],), weight_D, eps), total


def _check(x: Tensor, weight_D: Tensor, residual: Tensor | None) -> None:
    if weight_D.dim() != 1 or x.dim() == 0 or weight_D.shape[0] != x.shape[-1]:
        raise ConfigurationError(
            f"rms_norm of {tuple(x.shape)} with a weight of {tuple(weight_D.shape)}: give ({x.shape[-1:]},)"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ConfigurationError(
            f"rms_norm of {tuple(x.shape)} {x.dtype} "
            f"with a residual of {tuple(residual.shape)} {residual.dtype}: they must match"
        )


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight_D, _ = inputs
    ctx.save_for_backward(x, weight_D, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy: Tensor | None, dscale: None):  # type: ignore[no-untyped-def]
    if dy is None:
        return None, None, None
    dx, dweight_D = _rms_norm_backward(dy, None, *ctx.saved_tensors, ctx.needs_input_grad[1])
    return dx, dweight_D if ctx.needs_input_grad[1] else None, None


@register_op(lambda x, weight_D, eps: _fake_forward(x, weight_D), save=_save, backward=_backward)
def _rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from vblackwell.kernels.pointwise import rms_norm_triton

    y, _, scale_R = rms_norm_triton.forward(x, None, weight_D, eps)
    return y, scale_R


def _fake_add_rms_norm(x, residual, weight_D, eps):  # type: ignore[no-untyped-def]
    y, scale_R = _fake_forward(x, weight_D)
    return y, x.new_empty(x.shape), scale_R


def _save_add(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.set_materialize_grads(False)


def _backward_add(ctx, dy: Tensor | None, dtotal: Tensor | None, dscale: None):  # type: ignore[no-untyped-def]
    if dy is None:
        return dtotal, dtotal, None, None
    dx, dweight_D = _rms_norm_backward(dy, dtotal, *ctx.saved_tensors, ctx.needs_input_grad[2])
    return dx, dx, dweight_D if ctx.needs_input_grad[2] else None, None


@register_op(_fake_add_rms_norm, save=_save_add, backward=_backward_add)
def _add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    from vblackwell.kernels.pointwise import rms_norm_triton

    return rms_norm_triton.forward(x, residual, weight_D, eps)


def _fake_forward(x: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, weight_D.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


def _fake_rms_norm_backward(dy, dtotal, x, weight_D, scale_R, with_weight):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight_D.new_empty(weight_D.shape if with_weight else (0,))


@register_op(_fake_rms_norm_backward)
def _rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight_D: Tensor, scale_R: Tensor, with_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` (that of the sum as well, if given, is added) and of the weight (empty if not wanted)."""
    from vblackwell.kernels.pointwise import rms_norm_triton

    return rms_norm_triton.backward(dy, dtotal, x, weight_D, scale_R, with_weight)
