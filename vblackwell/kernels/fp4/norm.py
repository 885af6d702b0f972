"""RMSNorm or LayerNorm and an FP4 linear as one op: in one kernel for up to 16 rows, where that is faster, else as two.

A norm multiplies columns by a gain and rows by a statistic. The statistic commutes with the product, so the mma kernel stages x with
its gain, adds up squares on the way, and scales the sums at its end (cuda/fp4_mma.cu): decoding a token needs no launch for the norm.
x times gain is rounded once, as the normalised rows would be. In float16 that product may overflow where normalised rows do not, so
fp16 and fp32 take two kernels.

LayerNorm's own bias is no argument: times W it is a bias of the linear. There is no backward: who needs gradients calls norm and linear.

``M`` rows, ``N`` out features, ``K`` in features.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4 import backends
from vblackwell.kernels.fp4 import blocks as fp4_blocks
from vblackwell.kernels.fp4 import launch as fp4_cuda
from vblackwell.kernels.fp4 import mma_plan as fp4_mma_plan
from vblackwell.kernels.fp4.linear import check_arguments
from vblackwell.kernels.pointwise.rms_norm import rms_norm
from vblackwell.kernels.runtime import autotune
from vblackwell.kernels.runtime.autocast import register_autocast
from vblackwell.kernels.runtime.dispatch import Backend, Request, capability, choose, request_of

MOST_ROWS = 16


def _mma_reasons(request: Request) -> list[str]:
    reasons = backends.linear_reasons(request)
    if request.dtype == torch.float16:
        reasons.append("activations are torch.float16: times the gain they may leave its range")
    if request.m > MOST_ROWS:
        reasons.append(f"{request.m} rows: it takes up to {MOST_ROWS}")
    if request.k % 8:
        reasons.append(f"{request.k} in features: it takes multiples of 8")
    return reasons


def most_rows(capability: tuple[int, int], n: int, k: int, layer_norm: bool = False) -> int:
    """Rows of K features up to which one kernel is faster than two, on an H200 by up to 1.4 times (docs/log-fp4.md).

    On Hopper x comes by bulk copies. Every block normalises all of its x again: 16 rows of a large weight cost more than a launch. With
    a LayerNorm on the way threads stage x, which for more rows costs more than the launch it saves.
    """
    if capability[0] != 9:
        return MOST_ROWS
    if layer_norm or not fp4_mma_plan.takes_bulk(k):
        return 4 if k <= 4096 else 2
    return MOST_ROWS if n * k <= 60_000_000 else MOST_ROWS // 2


def _slower(request: Request, layer_norm: bool) -> list[str]:
    most = most_rows(request.capability, request.n, request.k, layer_norm)
    if request.m <= most:
        return []
    return [f"{request.m} rows of {request.k} features: above {most} a norm of its own is faster on this GPU"]


def _mma(x_MK, gain_K, gain_sums_N, eps, codes, scales, tensor_scale, bias, format, activation, n, k) -> Tensor:  # type: ignore[no-untyped-def]
    clusters, rms = fp4_blocks.has_clusters(capability(x_MK.device)), gain_sums_N is None
    plan = fp4_mma_plan.plan_mma(x_MK.shape[0], n, k, clusters, bulk=rms)
    plan = autotune.tuned(plan, x_MK, n, k)
    norm = fp4_cuda.Norm(_aligned(gain_K), eps, gain_sums_N)
    bias = backends.like(bias, x_MK)
    return fp4_cuda.run_mma(plan, x_MK, codes, scales, tensor_scale, bias, activation, n, norm=norm)


def _aligned(vector: Tensor) -> Tensor:
    """Contiguous from a multiple of 16 bytes on, as the kernel reads it."""
    vector = vector.contiguous()
    return vector.clone() if vector.data_ptr() % 16 else vector


def _separate(x_MK, gain_K, gain_sums_N, eps, codes, scales, tensor_scale, bias, format, activation, n, k) -> Tensor:  # type: ignore[no-untyped-def]
    layer_norm = torch.nn.functional.layer_norm
    rows_MK = rms_norm(x_MK, gain_K, eps) if gain_sums_N is None else layer_norm(x_MK, (k,), gain_K, None, eps)
    backend = choose("fp4_linear", backends.LINEAR, request_of(rows_MK, format, n, k))
    return backend.run(rows_MK, codes, scales, tensor_scale, bias, format, activation, n, k)


def _none(request: Request) -> list[str]:
    return []


def _backends(layer_norm: bool) -> tuple[Backend, ...]:
    slower = functools.partial(_slower, layer_norm=layer_norm)
    return Backend("mma", _mma_reasons, _mma, slower=slower), Backend("separate", _none, _separate)


NORM_LINEAR, LAYER_NORM_LINEAR = _backends(False), _backends(True)


@torch.library.custom_op("vblackwell::fp4_norm_linear", mutates_args=())
def fp4_norm_linear(
    x_MK: Tensor,
    gain_K: Tensor,
    gain_sums_N: Tensor | None,
    eps: float,
    codes: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    bias: Tensor | None,
    format: str,
    activation: str,
    n: int,
    k: int,
) -> Tensor:
    """``activation(norm(x) W^T + bias)`` with a packed ``W``; not differentiable.

    Args:
        x_MK: (..., K) bf16, fp16 or fp32.
        gain_K: the norm's weight, of the type of ``x_MK``.
        gain_sums_N: None for RMSNorm; for LayerNorm (N,) fp32, ``W @ gain_K``.
        eps: of the norm.
        codes, block_scales, tensor_scale, bias, format, activation, n, k: as for ``fp4_linear``.

    Returns:
        (..., N) in the type of ``x_MK``.

    Raises:
        ConfigurationError: tensors that do not belong together, or an unknown format or activation.
        Unsupported: a backend asked for by name refuses.
    """
    check_arguments(x_MK, codes, block_scales, tensor_scale, format, activation, n, k)
    if gain_K.shape != (k,) or gain_K.dtype != x_MK.dtype:
        raise ConfigurationError(
            f"the norm's weight is {tuple(gain_K.shape)} {gain_K.dtype}, the input takes ({k},) {x_MK.dtype}"
        )
    if gain_sums_N is not None and (gain_sums_N.shape != (n,) or gain_sums_N.dtype != torch.float32):
        raise ConfigurationError(f"gain_sums_N is {tuple(gain_sums_N.shape)} {gain_sums_N.dtype}: give ({n},) float32")
    rows = x_MK.reshape(-1, k).contiguous()
    if rows.shape[0] == 0:
        return x_MK.new_empty((*x_MK.shape[:-1], n))
    backends_here = NORM_LINEAR if gain_sums_N is None else LAYER_NORM_LINEAR
    backend = choose("fp4_norm_linear", backends_here, request_of(rows, format, n, k))
    tensors = (codes, block_scales, tensor_scale, bias)
    y_MN = backend.run(rows, gain_K, gain_sums_N, eps, *tensors, format, activation, n, k)
    return y_MN.view(*x_MK.shape[:-1], n)


@fp4_norm_linear.register_fake
def _(x_MK, gain_K, gain_sums_N, eps, codes, block_scales, tensor_scale, bias, format, activation, n, k):  # type: ignore[no-untyped-def]
    return x_MK.new_empty((*x_MK.shape[:-1], n))


register_autocast(fp4_norm_linear, cast_input=False)
