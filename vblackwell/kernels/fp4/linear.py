"""FP4 linear as a PyTorch op, over the first backend that takes a request: ``mma`` and ``wgmma``, fused kernels on
tiled weights (layout.py); ``dequantize``, the weight written out once and cuBLAS, which wins for many rows;
``reference``, pure torch.

Backward reads the same packed tensor (dX = dY W), computes the value before the activation again, and has no gradient
for the weight. `packed_linear` gives w4a8.py and two_part.py the same. ``M`` rows, ``N`` out, ``K`` in features.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4 import layout, reference
from vblackwell.kernels.fp4.launch import Weight, gpu_of, run_dequantize, run_mma, run_wgmma
from vblackwell.kernels.fp4.mma_plan import mma_is_faster, plan_mma
from vblackwell.kernels.fp4.reference import activate, activation_backward, check_activation
from vblackwell.kernels.fp4.wgmma_plan import plan_wgmma, wgmma_beats_dequantize
from vblackwell.kernels.runtime import nvrtc, registry
from vblackwell.kernels.runtime.registry import Backend, Request, accept, choose, register_op
from vblackwell.numerics.formats import FORMATS

HALVES = (torch.bfloat16, torch.float16)


def run_rows(op: str, table: Sequence[Backend], x: Tensor, format: str, n: int, k: int, *args: Any) -> Tensor:
    """(..., N) of the backend that the registry picks for the rows of ``x`` (..., K)."""
    rows_MK = x.reshape(-1, k).contiguous()
    if rows_MK.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], n))
    request = Request(x.device, registry.capability(x.device), x.dtype, format, rows_MK.shape[0], n, k)
    y_MN = choose(op, table, request).run(rows_MK, *args)
    return y_MN.view(*x.shape[:-1], n)


def fake_rows(x: Tensor, *rest: Any) -> Tensor:
    """(..., N), of the arguments of an op that end with N and K."""
    return x.new_empty((*x.shape[:-1], rest[-2]))


def fake_gradient(dy: Tensor, *rest: Any) -> Tensor:
    """(..., K), of the same."""
    return dy.new_empty((*dy.shape[:-1], rest[-1]))


def packed_linear(weight_tensors: int, input_gradient: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Any]:
    """Make the decorated function of (x, so many tensors, bias or None, perhaps a format, activation, N, K) an op with
    gradients in x and bias; ``input_gradient`` is of (dY, the weight's tensors, the format if there is one, N, K)."""

    def save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        x, *tensors = inputs[: 2 + weight_tensors]
        ctx.static = inputs[2 + weight_tensors :]
        ctx.save_for_backward(None if ctx.static[-3] == "none" else x, *tensors)

    def register(run: Callable[..., Tensor]) -> Any:
        def backward(ctx, dy):  # type: ignore[no-untyped-def]
            x, *weight, bias = ctx.saved_tensors
            *format, activation, n, k = ctx.static
            if activation != "none":
                dy = activation_backward(dy, op(x, *weight, bias, *format, "none", n, k), activation)
            dx = input_gradient(dy, *weight, *format, n, k) if ctx.needs_input_grad[0] else None
            dbias = None
            if bias is not None and ctx.needs_input_grad[1 + weight_tensors]:
                dbias = dy.reshape(-1, n).sum(0, dtype=torch.float32).to(bias.dtype)
            return dx, *(None for _ in weight), dbias, *(None for _ in ctx.static)

        op = register_op(fake_rows, save=save, backward=backward, autocast="cast")(run)
        return op

    return register


def check_weight(codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int) -> None:
    """Raises ConfigurationError where the tensors of a weight do not belong together."""
    if layout.canonical_name(format) not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigurationError(f"format {format!r} is not known: choose one of {known} or a '-tiled' layout")
    if n <= 0 or k <= 0:
        raise ConfigurationError(f"a weight of {n} x {k} has no elements: both dimensions must be positive")
    if layout.is_tiled(format):
        layout.tiled_name(format)
        layout.check_shapes(format, n, k, codes, block_scales)
    if tensor_scale.numel() != 1 or tensor_scale.dtype != torch.float32:
        raise ConfigurationError(
            f"tensor_scale must be one fp32 value, got {tuple(tensor_scale.shape)} {tensor_scale.dtype}"
        )


def check_arguments(
    x: Tensor, codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, activation: str, n: int, k: int
) -> None:
    """Raises ConfigurationError where the arguments of a linear do not belong together."""
    check_weight(codes, block_scales, tensor_scale, format, n, k)
    if x.shape[-1] != k:
        raise ConfigurationError(f"the input has {x.shape[-1]} features, the weight takes {k}")
    if x.dtype not in registry.DTYPES:
        raise ConfigurationError(f"the input is {x.dtype}: use bfloat16, float16 or float32")
    if x.device != codes.device:
        raise ConfigurationError(f"the input is on {x.device} and the weight on {codes.device}: move one of them")
    check_activation(activation)


def like(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype).contiguous()


def tiled_reasons(request: Request) -> list[str]:
    """Why no kernel that is compiled here and reads tiles can take ``request``, whatever its activations."""
    unsuited = registry.cuda_reasons(request) or registry.capability_reasons(request.capability)
    reasons = unsuited or [*nvrtc.why_not()]
    if not layout.is_tiled(request.format):
        reasons.append(f"format {request.format!r} is not tiled: convert it with kernels.fp4.layout.to_tiled")
    return reasons


def linear_reasons(request: Request) -> list[str]:
    """Why no fused kernel that reads tiles can take ``request``."""
    reasons = tiled_reasons(request)
    if request.dtype not in HALVES:
        reasons += registry.dtype_reasons(request.dtype, HALVES, "activations are")
    return reasons


def hopper_reasons(request: Request) -> list[str]:
    if request.device.type != "cuda" or request.capability == (9, 0):
        return []
    return [f"compute capability {request.capability[0]}.{request.capability[1]}: it needs 9.0 (Hopper)"]


def _mma_reasons(request: Request) -> list[str]:
    reasons = linear_reasons(request)
    if not reasons and not mma_is_faster(request.m, request.n, request.k, gpu_of(request.device)):
        reasons.append(f"{request.m} rows: another backend is faster for {request.n} x {request.k} on this GPU")
    return reasons


def _wgmma_reasons(request: Request) -> list[str]:
    reasons = linear_reasons(request) + hopper_reasons(request)
    if not reasons and not wgmma_beats_dequantize(request.m, request.n, request.k, gpu_of(request.device)):
        reasons.append(f"{request.m} rows: dequantising once is faster for {request.n} x {request.k}")
    return reasons


def _mma(x_MK: Tensor, weight: Weight, bias: Tensor | None, format: str, activation: str, n: int, k: int) -> Tensor:
    plan = plan_mma(x_MK.shape[0], n, k, gpu_of(x_MK.device))
    return run_mma(plan, x_MK, weight, like(bias, x_MK), activation, n)


def _wgmma(x_MK: Tensor, weight: Weight, bias: Tensor | None, format: str, activation: str, n: int, k: int) -> Tensor:
    return run_wgmma(
        plan_wgmma(x_MK.shape[0], n, k, gpu_of(x_MK.device)), x_MK, weight, like(bias, x_MK), activation, n
    )


def whole_weight(weight: Weight, format: str, n: int, k: int, like: Tensor) -> Tensor:
    """The weight in one part or two, as `reference.weight_of`, rounded once to the type of ``like``, on its device."""
    if tiled_reasons(Request(like.device, registry.capability(like.device), like.dtype, format, 0, n, k)):
        return reference.weight_of(weight, format, n, k).to(like.dtype)
    return run_dequantize(weight, n, k, like.dtype)


def input_gradient(dy_MN: Tensor, weight: Weight, format: str, n: int, k: int) -> Tensor:
    """``dY W``, (..., K)."""
    w_NK = whole_weight(weight, format, n, k, dy_MN)
    return (dy_MN.reshape(-1, n).contiguous() @ w_NK).view(*dy_MN.shape[:-1], k)


def _whole(x_MK: Tensor, weight: Weight, bias: Tensor | None, format: str, activation: str, n: int, k: int) -> Tensor:
    w_NK = whole_weight(weight, format, n, k, x_MK)
    return activate(torch.nn.functional.linear(x_MK, w_NK, like(bias, x_MK)), activation)


def _reference(x_MK, weight, bias, format, activation, n, k):  # type: ignore[no-untyped-def]
    return reference.linear(x_MK, reference.weight_of(weight, format, n, k), bias, activation)


BY_WHOLE_WEIGHT = (Backend("dequantize", registry.cuda_reasons, _whole), Backend("reference", accept, _reference))
LINEAR = (Backend("mma", _mma_reasons, _mma), Backend("wgmma", _wgmma_reasons, _wgmma), *BY_WHOLE_WEIGHT)


@register_op(fake_gradient, autocast="keep")
def fp4_linear_dx(
    dy_MN: Tensor, codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int
) -> Tensor:
    """``dY W``: (..., N) -> (..., K), the gradient of ``fp4_linear`` (without activation) in its input."""
    check_weight(codes, block_scales, tensor_scale, format, n, k)
    return input_gradient(dy_MN, (codes, block_scales, tensor_scale), format, n, k)


@packed_linear(3, fp4_linear_dx)
def fp4_linear(
    x_MK: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    bias: Tensor | None,
    format: str,
    activation: str,
    n: int,
    k: int,
) -> Tensor:
    """``activation(x W^T + bias)`` with a packed ``W``, differentiable in ``x_MK`` and ``bias``.

    ``x_MK`` is (..., K) bf16, fp16 or fp32, to which (under autocast to its type) a sum in fp32 is rounded once; the
    weight in the layout of ``format``, of numerics/formats.py or tiled; ``activation`` 'none', 'relu', 'gelu' (with
    erf) or 'silu'.

    Raises:
        ConfigurationError: tensors that do not belong together, or an unknown format or activation.
        Unsupported: a backend asked for by name refuses.
    """
    check_arguments(x_MK, codes, block_scales, tensor_scale, format, activation, n, k)
    weight = (codes, block_scales, tensor_scale)
    return run_rows("fp4_linear", LINEAR, x_MK, format, n, k, weight, bias, format, activation, n, k)
