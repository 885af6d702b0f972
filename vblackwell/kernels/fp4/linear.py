"""FP4 linear as a PyTorch op: forward, fake, backward, over whichever backend the dispatcher picks.

``fp4_linear`` multiplies by a packed weight and adds bias and activation in one op; ``fp4_dequantize`` gives the weight back.
Both take canonical layouts (numerics/formats.py) and tiled ones (kernels/fp4/layout.py), whose names end in '-tiled'; only tiled weights
reach the fused kernels. The backward of ``x`` reads the same packed tensor (dX = dY W): there is no second copy, and no
gradient for the weight. The value before the activation is computed again in backward instead of being kept.

``M`` rows, ``N`` out features, ``K`` in features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4 import backends, layout
from vblackwell.kernels.fp4.reference import ACTIVATIONS, activation_backward
from vblackwell.kernels.runtime.autocast import register_autocast
from vblackwell.kernels.runtime.dispatch import choose, request_of
from vblackwell.numerics.formats import FORMATS

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _check(
    x: Tensor | None, codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int
) -> None:
    """Raises ConfigurationError where the tensors do not belong together."""
    if layout.canonical_name(format) not in FORMATS:
        raise ConfigurationError(
            f"format {format!r} is not known: choose one of {', '.join(FORMATS)} or a '-tiled' layout"
        )
    if n <= 0 or k <= 0:
        raise ConfigurationError(f"a weight of {n} x {k} has no elements: both dimensions must be positive")
    if layout.is_tiled(format):
        layout.tiled_name(format)
        expected = layout.shapes(format, n, k)
        if (tuple(codes.shape), tuple(block_scales.shape)) != expected:
            raise ConfigurationError(
                f"{format} codes {tuple(codes.shape)} and scales {tuple(block_scales.shape)} do not belong to a weight"
                f" of {n} x {k}: expected {expected[0]} and {expected[1]}"
            )
    if tensor_scale.numel() != 1 or tensor_scale.dtype != torch.float32:
        raise ConfigurationError(
            f"tensor_scale must be one fp32 value, got {tuple(tensor_scale.shape)} {tensor_scale.dtype}"
        )
    if x is None:
        return
    if x.shape[-1] != k:
        raise ConfigurationError(f"the input has {x.shape[-1]} features, the weight takes {k}")
    if x.dtype not in FLOAT_DTYPES:
        raise ConfigurationError(f"the input is {x.dtype}: use bfloat16, float16 or float32")
    if x.device != codes.device:
        raise ConfigurationError(f"the input is on {x.device} and the weight on {codes.device}: move one of them")


def check_arguments(
    x: Tensor, codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, activation: str, n: int, k: int
) -> None:
    """Raises ConfigurationError where the arguments of a linear do not belong together, or name what there is not."""
    _check(x, codes, block_scales, tensor_scale, format, n, k)
    if activation not in ACTIVATIONS:
        raise ConfigurationError(f"activation {activation!r} is not known: choose one of {', '.join(ACTIVATIONS)}")


@torch.library.custom_op("vblackwell::fp4_linear", mutates_args=())
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
    """``activation(x W^T + bias)`` with a packed ``W``.

    Args:
        x_MK: (..., K) activations, bf16, fp16 or fp32; a sum in fp32 is rounded once to this type.
        codes: element codes in the layout of ``format``.
        block_scales: block scales in the layout of ``format``.
        tensor_scale: one fp32 value.
        bias: (N,) or None.
        format: 'nvfp4', 'mxfp4', 'nf4', 'int4', 'int8', or 'nvfp4-tiled', 'mxfp4-tiled'.
        activation: 'none', 'relu', 'gelu' (with erf) or 'silu'.
        n: out features.
        k: in features.

    Returns:
        (..., N) in the type of ``x_MK``, or of autocast, to which ``x_MK`` is then cast. Differentiable in ``x_MK`` and ``bias``.

    Raises:
        ConfigurationError: tensors that do not belong together, or an unknown format or activation.
        Unsupported: a backend asked for by name refuses.
    """
    check_arguments(x_MK, codes, block_scales, tensor_scale, format, activation, n, k)
    rows = x_MK.reshape(-1, k).contiguous()
    if rows.shape[0] == 0:
        return x_MK.new_empty((*x_MK.shape[:-1], n))
    backend = choose("fp4_linear", backends.LINEAR, request_of(rows, format, n, k))
    y_MN = backend.run(rows, codes, block_scales, tensor_scale, bias, format, activation, n, k)
    return y_MN.view(*x_MK.shape[:-1], n)


@fp4_linear.register_fake
def _(x_MK, codes, block_scales, tensor_scale, bias, format, activation, n, k):  # type: ignore[no-untyped-def]
    return x_MK.new_empty((*x_MK.shape[:-1], n))


@torch.library.custom_op("vblackwell::fp4_linear_dx", mutates_args=())
def fp4_linear_dx(
    dy_MN: Tensor, codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int
) -> Tensor:
    """``dY W``: (..., N) -> (..., K), the gradient of ``fp4_linear`` (without activation) in its input."""
    _check(None, codes, block_scales, tensor_scale, format, n, k)
    rows = dy_MN.reshape(-1, n).contiguous()
    if rows.shape[0] == 0:
        return dy_MN.new_empty((*dy_MN.shape[:-1], k))
    request = request_of(rows, format, k, n)  # the product's own shape: out features are K, the sum runs over N
    backend = choose("fp4_linear_dx", backends.LINEAR_DX, request)
    dx_MK = backend.run(rows, codes, block_scales, tensor_scale, format, n, k)
    return dx_MK.view(*dy_MN.shape[:-1], k)


@fp4_linear_dx.register_fake
def _(dy_MN, codes, block_scales, tensor_scale, format, n, k):  # type: ignore[no-untyped-def]
    return dy_MN.new_empty((*dy_MN.shape[:-1], k))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x_MK, codes, block_scales, tensor_scale, bias, format, activation, n, k = inputs
    plain = activation == "none"
    ctx.save_for_backward(None if plain else x_MK, codes, block_scales, tensor_scale, bias)
    ctx.static = (format, activation, n, k)


def _backward(ctx, dy_MN: Tensor):  # type: ignore[no-untyped-def]
    x_MK, codes, block_scales, tensor_scale, bias = ctx.saved_tensors
    format, activation, n, k = ctx.static
    if activation != "none":
        z_MN = fp4_linear(x_MK, codes, block_scales, tensor_scale, bias, format, "none", n, k)
        dy_MN = activation_backward(dy_MN, z_MN, activation)
    dx_MK = None
    if ctx.needs_input_grad[0]:
        dx_MK = fp4_linear_dx(dy_MN, codes, block_scales, tensor_scale, format, n, k)
    dbias = None
    if bias is not None and ctx.needs_input_grad[4]:
        dbias = dy_MN.reshape(-1, n).sum(0, dtype=torch.float32).to(bias.dtype)
    return dx_MK, None, None, None, dbias, None, None, None, None


fp4_linear.register_autograd(_backward, setup_context=_save)
register_autocast(fp4_linear)
register_autocast(fp4_linear_dx, cast_input=False)


@torch.library.custom_op("vblackwell::fp4_dequantize", mutates_args=())
def fp4_dequantize(
    codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    """The (n, k) weight in ``dtype``: ``(value * block_scale) * tensor_scale`` in fp32, rounded once."""
    _check(None, codes, block_scales, tensor_scale, format, n, k)
    request = request_of(codes.new_empty((1, k), dtype=dtype), format, n, k)
    backend = choose("fp4_dequantize", backends.DEQUANTIZE, request)
    return backend.run(codes, block_scales, tensor_scale, format, n, k, dtype)


@fp4_dequantize.register_fake
def _(codes, block_scales, tensor_scale, format, n, k, dtype):  # type: ignore[no-untyped-def]
    return codes.new_empty((n, k), dtype=dtype)
