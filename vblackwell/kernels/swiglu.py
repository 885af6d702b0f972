"""``silu(gate) * up``, the gating of SwiGLU feed-forwards (Shazeer, arXiv:2002.05202), forward and backward in one pass each.

Computed in fp32 and rounded once; PyTorch's two operations round ``silu(gate)`` as well. ``gate`` and ``up`` may be halves of one tensor
(rows at equal distances, elements adjacent): nothing is copied. Only ``gate`` and ``up`` are saved; whoever needs the product again in
backward gets it from ``swiglu_backward`` in the same pass, for one more write instead of a read of a saved copy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fused import runs_triton


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, all (..., I) of one floating-point type. Differentiable in both.

    Raises:
        ConfigurationError: shapes or types differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ConfigurationError(
            f"swiglu of {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}: they must match"
        )
    if runs_triton("swiglu", gate, 0):
        return _swiglu(gate, up)
    return functional.silu(gate) * up


@torch.library.custom_op("vblackwell::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from vblackwell.kernels import swiglu_triton

    return swiglu_triton.forward(gate, up)


@_swiglu.register_fake
def _(gate, up):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape)


@torch.library.custom_op("vblackwell::swiglu_backward", mutates_args=())
def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, with_product: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``(dgate, dup, silu(gate) * up)`` from ``dy``, all (..., I); the product is empty unless asked for. Triton only."""
    from vblackwell.kernels import swiglu_triton

    return swiglu_triton.backward(dy, gate, up, with_product)


@swiglu_backward.register_fake
def _(dy, gate, up, with_product):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape if with_product else (0,))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    dgate, dup, _ = swiglu_backward(dy, *ctx.saved_tensors, False)
    return dgate, dup


_swiglu.register_autograd(_backward, setup_context=_save)
