"""``silu(gate) * up``, the gating of SwiGLU feed-forwards (Shazeer, arXiv:2002.05202), forward and backward in one pass
each, in fp32 and rounded once (PyTorch's two operations round ``silu(gate)`` as well).

``gate`` and ``up`` may be halves of one tensor: nothing is copied. `swiglu_linear` multiplies by the next weight too:
its backward computes the product again in the same pass as the gradients, so that it is not kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.runtime.op import register_op
from vblackwell.kernels.runtime.registry import refuse_forward_mode, runs_triton


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, all (..., I) of one type. Differentiable in both. Raises ConfigurationError where they
    differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ConfigurationError(
            f"swiglu of {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}: they must match"
        )
    if runs_triton("swiglu", gate, 0):
        return _swiglu(gate, up)
    return functional.silu(gate) * up


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    dgate, dup, _ = swiglu_backward(dy, *ctx.saved_tensors, False)
    return dgate, dup


@register_op(lambda gate, up: gate.new_empty(gate.shape), save=_save, backward=_backward)
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from vblackwell.kernels.pointwise import swiglu_triton

    return swiglu_triton.forward(gate, up)


def _fake_swiglu_backward(dy, gate, up, with_product):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape if with_product else (0,))


@register_op(_fake_swiglu_backward)
def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, with_product: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``(dgate, dup, silu(gate) * up)`` from ``dy``, all (..., I); the product is empty unless asked for. Triton only."""
    from vblackwell.kernels.pointwise import swiglu_triton

    return swiglu_triton.backward(dy, gate, up, with_product)


def swiglu_linear(gate: Tensor, up: Tensor, weight_DI: Tensor, wanted: bool = True) -> Tensor:
    """``(silu(gate) * up) @ weight.T``, (..., I) to (..., D), which keeps ``gate``, ``up`` and the weight alone. Triton
    only.

    ``wanted``: False leaves the result unwritten, for the second pass of a checkpoint, which needs what backward reads
    alone. Raises ConfigurationError where shapes or types differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dtype != weight_DI.dtype:
        raise ConfigurationError(
            f"swiglu of {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype} "
            f"for a {weight_DI.dtype} weight: they must match"
        )
    if weight_DI.dim() != 2 or weight_DI.shape[1] != gate.shape[-1]:
        raise ConfigurationError(f"a weight of {tuple(weight_DI.shape)} for {gate.shape[-1]} features: they do not fit")
    return _swiglu_linear(gate, up, weight_DI, wanted)


def _fake_swiglu_linear(gate, up, weight_DI, wanted):  # type: ignore[no-untyped-def]
    return gate.new_empty(*gate.shape[:-1], weight_DI.shape[0])


def _save_linear(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:3])


def _backward_linear(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    gate, up, weight_DI = ctx.saved_tensors
    dy_MD = dy.reshape(-1, dy.shape[-1])
    dproduct = torch.mm(dy_MD, weight_DI).view(gate.shape)
    dgate, dup, product = swiglu_backward(dproduct, gate, up, ctx.needs_input_grad[2])
    del dproduct
    dweight_DI = torch.mm(dy_MD.t(), product.view(-1, product.shape[-1])) if ctx.needs_input_grad[2] else None
    return dgate, dup, dweight_DI, None


@register_op(_fake_swiglu_linear, save=_save_linear, backward=_backward_linear)
def _swiglu_linear(gate: Tensor, up: Tensor, weight_DI: Tensor, wanted: bool) -> Tensor:
    from vblackwell.kernels.pointwise import swiglu_triton

    refuse_forward_mode("swiglu_linear")
    if not wanted:
        return gate.new_empty(*gate.shape[:-1], weight_DI.shape[0])
    product = swiglu_triton.forward(gate, up)
    return torch.mm(product.view(-1, product.shape[-1]), weight_DI.t()).view(*gate.shape[:-1], weight_DI.shape[0])
