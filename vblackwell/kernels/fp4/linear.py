"""FP4 linear as a PyTorch op, over the first backend that takes a request: ``mma`` and ``wgmma``, fused kernels on
tiled weights (layout.py); ``dequantize``, the weight written out once and cuBLAS, which wins for many rows;
``reference``, pure torch.

Backward reads the same packed tensor (dX = dY W), computes the value before the activation again, and has no gradient
for the weight. `packed_linear` gives w4a8.py and two_part.py the same. ``M`` rows, ``N`` out, ``K`` in features.
"""

import functools
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4 import layout, reference
from vblackwell.kernels.fp4.launch import (
    Given,
    Product,
    Weight,
    gpu_of,
    like,
    prepare_mma,
    prepare_wgmma,
    run_dequantize,
)
from vblackwell.kernels.fp4.layout import Shape
from vblackwell.kernels.fp4.mma_plan import Gpu, mma_is_faster, plan_mma, round_up
from vblackwell.kernels.fp4.reference import activate, activation_backward, check_activation
from vblackwell.kernels.fp4.wgmma_plan import launches, plan_wgmma, wgmma_beats_dequantize
from vblackwell.kernels.runtime import nvrtc, registry
from vblackwell.kernels.runtime.registry import Backend, Request, accept, choose, differentiating_forward, register_op
from vblackwell.numerics.formats import FORMATS

HALVES = (torch.bfloat16, torch.float16)
_shape = attrgetter("shape")


def run_rows(
    op: str,
    table: Sequence[Backend],
    x: Tensor,
    format: str,
    n: int,
    k: int,
    weight: Weight,
    bias: Tensor | None,
    activation: str,
    *more: Any,
) -> Tensor:
    """(..., N) of the backend that the registry picks for the rows of ``x`` (..., K): what its ``run`` makes of the
    request and of `Given`, which is kept, and called with x, weight, bias and ``more``.

    Raises ConfigurationError where the arguments do not belong together."""
    how = registry.asked_for(op), differentiating_forward(), None if bias is None else (bias.shape, bias.device)
    kinds = x.device, weight[0].device, x.dtype, weight[-1].dtype, x.shape, *map(_shape, weight)
    prepared = _prepare(op, table, format, activation, n, k, *how, *kinds)
    return prepared(x.contiguous(), weight, bias, *more)


@functools.lru_cache(4096)
def _prepare(
    op: str,
    table: Sequence[Backend],
    format: str,
    activation: str,
    n: int,
    k: int,
    name: str | None,
    forward_mode: bool,  # `choose` sees it by itself
    bias: tuple[Shape, torch.device] | None,
    device: torch.device,
    weight_device: torch.device,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    x_shape: Shape,
    *weight_shapes: Shape,
) -> Product:
    codes, *_, scales, tensor_scale = weight_shapes
    _check_weight(codes, scales, tensor_scale, scale_dtype, format, n, k)
    *rows, features = x_shape
    if features != k:
        raise ConfigurationError(f"the input has {features} features, the weight takes {k}")
    if dtype not in registry.DTYPES:
        raise ConfigurationError(f"the input is {dtype}: use bfloat16, float16 or float32")
    if device != weight_device:
        raise ConfigurationError(f"the input is on {device} and the weight on {weight_device}: move one of them")
    if bias not in (None, ((n,), device)):
        raise ConfigurationError(f"a bias of {tuple(bias[0])} on {bias[1]}: give ({n},) on {device}")
    check_activation(activation)
    if (m := math.prod(rows)) == 0:
        return lambda x, *_: x.new_empty(*rows, n)
    request = Request(device, registry.capability(device), dtype, format, m, n, k)
    given = Given((*rows, n, k), dtype, activation, len(weight_shapes), device)
    return choose(op, table, request, name).run(request, given)


def each_time(function: Callable[..., Tensor]) -> Callable[[Request, Given], Product]:
    """A backend's ``run`` that keeps nothing: calls of ``function`` with rows (M, K), weight, bias, the request, the
    activation and ``more``."""

    def prepare(request: Request, given: Given) -> Product:
        def product(x: Tensor, weight: Weight, bias: Tensor | None, *more: Any) -> Tensor:
            y_MN = function(x.view(-1, request.k), weight, bias, request, given.activation, *more)
            # To autograd no view, so that a caller may add to it in place (Falcon does).
            return torch.ops.aten._unsafe_view(y_MN, given.shape[:-1])

        return product

    return prepare


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
        ctx.static = inputs[2 + weight_tensors :]
        ctx.save_for_backward(None if inputs[-3] == "none" else inputs[0], *inputs[1 : 2 + weight_tensors])

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

        op = register_op(fake_rows, save=save, backward=backward, autocast="cast", direct=True)(run)
        return op

    return register


@functools.lru_cache(4096)
def _check_weight(
    codes: Shape, scales: Shape, tensor_scale: Shape, scale_dtype: torch.dtype, format: str, n: int, k: int
) -> None:
    if layout.canonical_name(format) not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigurationError(f"format {format!r} is not known: choose one of {known} or a '-tiled' layout")
    if n <= 0 or k <= 0:
        raise ConfigurationError(f"a weight of {n} x {k} has no elements: both dimensions must be positive")
    if layout.is_tiled(format):
        layout.tiled_name(format)
        layout.check_shapes(format, n, k, codes, scales)
    if math.prod(tensor_scale) != 1 or scale_dtype != torch.float32:
        raise ConfigurationError(f"tensor_scale must be one fp32 value, got {tuple(tensor_scale)} {scale_dtype}")


def check_weight(codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int) -> None:
    """Raises ConfigurationError where the tensors of a weight do not belong together."""
    _check_weight(codes.shape, block_scales.shape, tensor_scale.shape, tensor_scale.dtype, format, n, k)


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


def _mma(request: Request, given: Given) -> Product:
    return prepare_mma(plan_mma(request.m, request.n, request.k, gpu_of(given.device)), given)


def _wgmma(request: Request, given: Given) -> Product:
    return prepare_wgmma(plan_wgmma(request.m, request.n, request.k, gpu_of(given.device)), given)


def workspace_bytes(m: int, n: int, k: int, dtype: torch.dtype, gpu: Gpu) -> int:
    """At most what `fp4_linear` of a tiled weight takes during a call, next to its output: the sums of blocks that
    split K, x as wgmma reads it, or the weight written out in ``dtype``. Beyond 128 rows the more of the last two."""
    written = n * k * dtype.itemsize
    if dtype not in HALVES or registry.capability_reasons(gpu.capability):
        return written
    if m <= 128 and mma_is_faster(m, n, k, gpu):
        return 4 * plan_mma(m, n, k, gpu).left_sums(m, n)
    if gpu.capability != (9, 0) or not wgmma_beats_dequantize(m, n, k, gpu):
        return written
    parts = launches(plan_wgmma(m, n, k, gpu), m, n, gpu.processors)
    read = round_up(k, 64) * sum(round_up(m, tokens) for tokens in {part.plan.tokens for part in parts})
    return read * dtype.itemsize if m <= 128 else max(written, read * dtype.itemsize)


@functools.lru_cache
def _kernel_decodes(device: torch.device, format: str) -> bool:
    return not tiled_reasons(Request(device, registry.capability(device), torch.float32, format, 0, 0, 0))


def whole_weight(weight: Weight, format: str, n: int, k: int, like: Tensor) -> Tensor:
    """The weight in one part or two, as `reference.weight_of`, rounded once to the type of ``like``, on its device."""
    if _kernel_decodes(like.device, format):
        return run_dequantize(weight, n, k, like.dtype)
    return reference.weight_of(weight, format, n, k).to(like.dtype)


def input_gradient(dy_MN: Tensor, weight: Weight, format: str, n: int, k: int) -> Tensor:
    """``dY W``, (..., K)."""
    w_NK = whole_weight(weight, format, n, k, dy_MN)
    return (dy_MN.reshape(-1, n).contiguous() @ w_NK).view(*dy_MN.shape[:-1], k)


def _whole(x_MK: Tensor, weight: Weight, bias: Tensor | None, request: Request, activation: str) -> Tensor:
    w_NK = whole_weight(weight, request.format, request.n, request.k, x_MK)
    return activate(torch.nn.functional.linear(x_MK, w_NK, like(bias, x_MK)), activation)


def _reference(x_MK: Tensor, weight: Weight, bias: Tensor | None, request: Request, activation: str) -> Tensor:
    return reference.linear(x_MK, reference.weight_of(weight, request.format, request.n, request.k), bias, activation)


BY_WHOLE_WEIGHT = (
    Backend("dequantize", registry.cuda_reasons, each_time(_whole)),
    Backend("reference", accept, each_time(_reference)),
)
LINEAR = (Backend("mma", _mma_reasons, _mma), Backend("wgmma", _wgmma_reasons, _wgmma), *BY_WHOLE_WEIGHT)


@register_op(fake_gradient, autocast="keep", direct=True)
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
    weight = (codes, block_scales, tensor_scale)
    return run_rows("fp4_linear", LINEAR, x_MK, format, n, k, weight, bias, activation)
