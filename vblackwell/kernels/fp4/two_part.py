"""Linear with a weight in two parts (numerics/separation.py) as a PyTorch op: forward, fake, backward.

``two_part_linear`` multiplies by coarse + fine at once. Backends, in order of preference: ``mma``, one kernel for up to 16 rows of
bf16 on tiled parts (two_part_cuda.py); ``dequantize``, the weight written out once and cuBLAS; ``reference``, pure torch. Without its
fine part a weight is an nvfp4 one, for ``fp4_linear``. Gradients reach ``x`` and the bias; the weight is packed and has none.

``M`` rows, ``N`` out features, ``K`` in features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4 import layout, two_part_layout
from vblackwell.kernels.fp4 import two_part_launch as two_part_cuda
from vblackwell.kernels.fp4.backends import DEQUANTIZE, like, linear_reasons
from vblackwell.kernels.fp4.blocks import has_clusters
from vblackwell.kernels.fp4.linear import check_arguments
from vblackwell.kernels.fp4.reference import activate, activation_backward
from vblackwell.kernels.runtime.autocast import register_autocast
from vblackwell.kernels.runtime.dispatch import Backend, Request, choose, request_of
from vblackwell.numerics import separation

OP = "two_part_linear"


def reference_weight(
    codes: Tensor, fine: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """The (n, k) weight, by the oracle."""
    if layout.is_tiled(format):
        parts = two_part_layout.from_tiled(codes, fine, block_scales, tensor_scale, n, k)
        codes, fine, block_scales, tensor_scale = parts
    return separation.dequantize(codes, fine, block_scales, tensor_scale, n, k, dtype)


def _weight(codes, fine, block_scales, tensor_scale, format, n, k, like: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """The weight in the type of ``like``; by the kernel where there is one for it."""
    request = request_of(like.new_empty((1, k)), format, n, k)
    if not DEQUANTIZE[0].reasons(request):  # the kernel that writes nvfp4 out needs what this one needs
        return two_part_cuda.run_dequantize(codes, fine, block_scales, tensor_scale, n, k, like.dtype)
    return reference_weight(codes, fine, block_scales, tensor_scale, format, n, k, like.dtype)


def _mma_reasons(request: Request) -> list[str]:
    reasons = linear_reasons(request)
    if request.dtype != torch.bfloat16:
        reasons.append(f"activations are {request.dtype}: it takes bfloat16")
    if request.m > two_part_cuda.MOST_ROWS:
        reasons.append(f"{request.m} rows: above {two_part_cuda.MOST_ROWS} writing the weight out is faster")
    return reasons


def _mma(x_MK, codes, fine, block_scales, tensor_scale, bias, format, activation, n, k) -> Tensor:  # type: ignore[no-untyped-def]
    capability = request_of(x_MK, format, n, k).capability
    plan = two_part_cuda.plan(x_MK.shape[0], n, k, has_clusters(capability))
    bias = like(bias, x_MK)
    return two_part_cuda.run_mma(plan, x_MK, codes, fine, block_scales, tensor_scale, bias, activation, n)


def _dequantize(x_MK, codes, fine, block_scales, tensor_scale, bias, format, activation, n, k) -> Tensor:  # type: ignore[no-untyped-def]
    w_NK = _weight(codes, fine, block_scales, tensor_scale, format, n, k, x_MK)
    return activate(torch.nn.functional.linear(x_MK, w_NK, like(bias, x_MK)), activation)


def _cuda_only(request: Request) -> list[str]:
    return [] if request.device.type == "cuda" else [f"the tensors are on {request.device}: it needs a CUDA GPU"]


def _reference(x_MK, codes, fine, block_scales, tensor_scale, bias, format, activation, n, k) -> Tensor:  # type: ignore[no-untyped-def]
    w_NK = reference_weight(codes, fine, block_scales, tensor_scale, format, n, k, torch.float32)
    z_MN = x_MK.to(torch.float32) @ w_NK.t()
    if bias is not None:
        z_MN = z_MN + bias.to(torch.float32)
    return activate(z_MN, activation).to(x_MK.dtype)


LINEAR: tuple[Backend, ...] = (
    Backend("mma", _mma_reasons, _mma),
    Backend("dequantize", _cuda_only, _dequantize),
    Backend("reference", lambda request: [], _reference),
)


def _check(codes: Tensor, fine: Tensor, format: str) -> None:
    if format not in two_part_layout.LAYOUTS:
        raise ConfigurationError(
            f"no weight in two parts has the layout {format!r}: {', '.join(two_part_layout.LAYOUTS)}"
        )
    if fine.shape != codes.shape or fine.device != codes.device:
        raise ConfigurationError(
            f"fine codes {tuple(fine.shape)} on {fine.device} beside coarse codes {tuple(codes.shape)} on {codes.device}"
        )


@torch.library.custom_op("vblackwell::two_part_linear", mutates_args=())
def two_part_linear(
    x_MK: Tensor, codes: Tensor, fine: Tensor, block_scales: Tensor, tensor_scale: Tensor, bias: Tensor | None,
    format: str, activation: str, n: int, k: int,
) -> Tensor:  # fmt: skip
    """``activation(x W^T + bias)`` with ``W`` the sum of its parts.

    Args:
        x_MK: (..., K) bf16, fp16 or fp32; a sum in fp32 is rounded once to this type.
        codes, fine, block_scales, tensor_scale: of a `SeparatedTensor`, or of ``two_part_layout.to_tiled``.
        bias: (N,) or None.
        format: 'nvfp4' or 'nvfp4-tiled', the layout of the parts.
        activation: 'none', 'relu', 'gelu' (with erf) or 'silu'.
        n, k: out and in features.

    Returns:
        (..., N) in the type of ``x_MK``, or of autocast. Differentiable in ``x_MK`` and ``bias``.

    Raises:
        ConfigurationError: tensors that do not belong together, an unknown layout or activation.
        Unsupported: a backend asked for by name refuses.
    """
    _check(codes, fine, format)
    check_arguments(x_MK, codes, block_scales, tensor_scale, format, activation, n, k)
    rows = x_MK.reshape(-1, k).contiguous()
    if rows.shape[0] == 0:
        return x_MK.new_empty((*x_MK.shape[:-1], n))
    backend = choose(OP, LINEAR, request_of(rows, format, n, k))
    y_MN = backend.run(rows, codes, fine, block_scales, tensor_scale, bias, format, activation, n, k)
    return y_MN.view(*x_MK.shape[:-1], n)


@two_part_linear.register_fake
def _(x_MK, codes, fine, block_scales, tensor_scale, bias, format, activation, n, k):  # type: ignore[no-untyped-def]
    return x_MK.new_empty((*x_MK.shape[:-1], n))


@torch.library.custom_op("vblackwell::two_part_linear_dx", mutates_args=())
def two_part_linear_dx(
    dy_MN: Tensor, codes: Tensor, fine: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int
) -> Tensor:
    """``dY W``: (..., N) -> (..., K), the gradient of ``two_part_linear`` (without activation) in its input."""
    _check(codes, fine, format)
    w_NK = _weight(codes, fine, block_scales, tensor_scale, format, n, k, dy_MN)
    return (dy_MN.reshape(-1, n) @ w_NK).view(*dy_MN.shape[:-1], k)


@two_part_linear_dx.register_fake
def _(dy_MN, codes, fine, block_scales, tensor_scale, format, n, k):  # type: ignore[no-untyped-def]
    return dy_MN.new_empty((*dy_MN.shape[:-1], k))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x_MK, codes, fine, block_scales, tensor_scale, bias, format, activation, n, k = inputs
    kept = None if activation == "none" else x_MK
    ctx.save_for_backward(kept, codes, fine, block_scales, tensor_scale, bias)
    ctx.static = (format, activation, n, k)


def _backward(ctx, dy_MN: Tensor):  # type: ignore[no-untyped-def]
    x_MK, codes, fine, block_scales, tensor_scale, bias = ctx.saved_tensors
    format, activation, n, k = ctx.static
    parts = (codes, fine, block_scales, tensor_scale)
    if activation != "none":
        z_MN = two_part_linear(x_MK, *parts, bias, format, "none", n, k)
        dy_MN = activation_backward(dy_MN, z_MN, activation)
    dx_MK = two_part_linear_dx(dy_MN, *parts, format, n, k) if ctx.needs_input_grad[0] else None
    dbias = None
    if bias is not None and ctx.needs_input_grad[5]:
        dbias = dy_MN.reshape(-1, n).sum(0, dtype=torch.float32).to(bias.dtype)
    return dx_MK, None, None, None, None, dbias, None, None, None, None


two_part_linear.register_autograd(_backward, setup_context=_save)
register_autocast(two_part_linear)
register_autocast(two_part_linear_dx, cast_input=False)
