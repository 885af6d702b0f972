"""An adapter around a packed linear in few passes over memory: ``x W^T + s (x A^T) B^T``, forward and backward.

peft's expression writes ``(x A^T) B^T``, its multiple and the sum one after the other, each as large as the output, and autograd adds
the two gradients of ``x`` up in another pass: on a GPU these passes took as long as a fifth of the products. Here the product with B
is added where the packed linear's result lies, and so is the gradient's with A.

What backward needs is kept by an operation of its own, in front of the product: where torch's checkpointing computes a layer again, it
stops at the last tensor that is kept, so that the product of the layer's last linear is not computed for nothing.

It replaces the forward of peft's module while that is what it computes: one adapter, on, not merged, no dropout, in the type of ``x``, its
weights not streaming: a stack reads those again in backward, by hooks that see peft's operations. The rest is peft's.

Legend: M rows, K in features, N out features, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.kernels.fp4.linear import fp4_linear, fp4_linear_dx
from vblackwell.nn.convert.fused_modules import Overrides, plain_class
from vblackwell.nn.linear.plain import hooked
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear


def fused_adapter(module: nn.Module) -> Overrides | str | None:
    """As `fused_norm`, for peft's LoRA around a `StoredFP4Linear`."""
    base: Any = getattr(module, "base_layer", None)
    if not isinstance(base, StoredFP4Linear) or not type(module).__module__.startswith("peft.tuners.lora"):
        return None
    return {"forward": _forward} if base.bias is None else "its base has a bias"


def _forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    # A compiler fuses peft's expression itself, and cannot look into what `_only_adapter` asks.
    name = None if args or options or torch.compiler.is_compiling() else _only_adapter(self, x)
    if name is None:
        return plain_class(self).forward(self, x, *args, **options)
    return adapted_linear(
        x, self.lora_A[name].weight, self.lora_B[name].weight, float(self.scaling[name]), self.base_layer
    )


def _only_adapter(module: Any, x: Tensor) -> str | None:
    """The adapter whose sum with the base is all that the module computes; None where peft's own forward has to run."""
    active = module.active_adapters
    if (
        not on_gpu(x)
        or module.disable_adapters
        or module.merged
        or len(active) != 1
        or torch.is_autocast_enabled("cuda")
    ):
        return None
    name = active[0]
    if (
        name not in module.lora_A
        or name in module.lora_variant
        or not isinstance(module.lora_dropout[name], nn.Identity)
    ):
        return None
    parts = (module.base_layer, module.lora_A[name], module.lora_B[name])
    if any(hooked(part) or getattr(part, "bias", None) is not None for part in parts):
        return None
    weights = (parts[0].weight_codes, parts[1].weight, parts[2].weight)
    here = not any("_vb_binding" in weight.__dict__ for weight in weights)
    return name if here and weights[1].dtype == weights[2].dtype == x.dtype else None


def on_gpu(x: Tensor) -> bool:
    """Whether passes over memory are what counts; on the CPU peft's expression keeps its bits."""
    return x.is_cuda


def adapted_linear(x: Tensor, a_RK: Tensor, b_NR: Tensor, scale: float, base: StoredFP4Linear) -> Tensor:
    """(..., K) to (..., N), differentiable in ``x``, ``a_RK`` and ``b_NR``, all of one type."""
    packed = base.placed().tensors()
    assert len(packed) == 3, "a base in two parts has no adapters"
    shape = (base.layout, base.out_features, base.in_features)
    token, low = _Keep.apply(x, a_RK, b_NR, *packed, scale, *shape)
    return _Product.apply(token, x.detach(), low, b_NR.detach(), *packed, scale, *shape)  # type: ignore[return-value]


class _Keep(torch.autograd.Function):
    """``x A^T``, and something of the result's shape that takes no memory: its gradient is the result's."""

    @staticmethod
    def forward(ctx: Any, x, a_RK, b_NR, codes, scales, tensor_scale, scale, layout, n, k):  # type: ignore[no-untyped-def]
        low = torch.matmul(x, a_RK.t())
        ctx.save_for_backward(x, a_RK, b_NR, codes, scales, tensor_scale, low)
        ctx.static = (scale, layout, n, k)
        ctx.mark_non_differentiable(low)
        return x.new_zeros(()).expand(*x.shape[:-1], n), low

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> Any:  # type: ignore[override]
        x, a_RK, b_NR, codes, scales, tensor_scale, low = ctx.saved_tensors
        scale, layout, n, k = ctx.static
        dy_MN = dy.reshape(-1, n)
        dlow_MR = torch.mm(dy_MN, b_NR).mul_(scale)
        dx = da_RK = db_NR = None
        if ctx.needs_input_grad[0]:
            dx_MK = fp4_linear_dx(dy_MN, codes, scales, tensor_scale, layout, n, k)
            dx = dx_MK.addmm_(dlow_MR, a_RK).view(x.shape)
        if ctx.needs_input_grad[1]:
            da_RK = torch.mm(dlow_MR.t(), x.reshape(-1, k))
        if ctx.needs_input_grad[2]:
            db_NR = torch.mm(dy_MN.t(), low.reshape(dy_MN.shape[0], -1)).mul_(scale)
        return dx, da_RK, db_NR, None, None, None, None, None, None, None


class _Product(torch.autograd.Function):
    """The result; it keeps nothing."""

    @staticmethod
    def forward(ctx: Any, token, x, low, b_NR, codes, scales, tensor_scale, scale, layout, n, k):  # type: ignore[no-untyped-def]
        y = fp4_linear(x, codes, scales, tensor_scale, None, layout, "none", n, k)
        y.view(-1, n).addmm_(low.reshape(-1, low.shape[-1]), b_NR.t(), alpha=scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return dy, None, None, None, None, None, None, None, None, None, None
