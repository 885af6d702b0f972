"""RMSNorm and an FP4 linear as one op: in one kernel for up to 16 rows, where that is faster, else as two.

A norm multiplies columns by a gain and rows by a statistic, which commutes with the product: the mma kernel stages x
with its gain, adds up squares on the way, and scales the sums at its end (cuda/fp4_mma.cu). x times gain is rounded
once, as the normalised rows would be; in float16 it may overflow where they do not. There is no backward.
"""

import torch
from torch import Tensor
from torch.nn import functional

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4.launch import Given, Product, Weight, gpu_of, prepare_mma
from vblackwell.kernels.fp4.linear import LINEAR, each_time, fake_rows, linear_reasons, run_rows
from vblackwell.kernels.fp4.mma_plan import plan_mma, takes_bulk
from vblackwell.kernels.runtime.registry import Backend, Request, accept, register_op

MAX_ROWS = 16


def _mma_reasons(request: Request) -> list[str]:
    reasons = linear_reasons(request)
    if request.dtype == torch.float16:
        reasons.append("activations are torch.float16: times the gain they may leave its range")
    if request.m > MAX_ROWS:
        reasons.append(f"{request.m} rows: it takes up to {MAX_ROWS}")
    if request.k % 8:
        reasons.append(f"{request.k} in features: it takes multiples of 8")
    return reasons


def max_rows(capability: tuple[int, int], n: int, k: int) -> int:
    """Rows of K features up to which one kernel, each block of which normalises all of its x, is faster than two."""
    if capability[0] != 9:
        return MAX_ROWS
    if not takes_bulk(k):
        return 4 if k <= 4096 else 2
    return MAX_ROWS if n * k <= 60_000_000 else MAX_ROWS // 2


def _slower(request: Request) -> list[str]:
    if request.m <= (most := max_rows(request.capability, request.n, request.k)):
        return []
    return [f"{request.m} rows of {request.k} features: above {most} a separate norm is faster on this GPU"]


def _mma(request: Request, given: Given) -> Product:
    plan = plan_mma(request.m, request.n, request.k, gpu_of(given.device), one_block=True)
    product = prepare_mma(plan, given, norm=True)

    def aligned(x_MK: Tensor, weight: Weight, bias: Tensor | None, gain_K: Tensor, eps: float) -> Tensor:
        gain_K = gain_K.contiguous()
        return product(x_MK, weight, bias, gain_K.clone() if gain_K.data_ptr() % 16 else gain_K, eps)

    return aligned


def _separate(x_MK, weight, bias, request, activation, gain_K, eps):  # type: ignore[no-untyped-def]
    rows_MK = functional.rms_norm(x_MK, (request.k,), gain_K, eps=eps)
    how = (request.format, request.n, request.k, weight, bias, activation)
    return run_rows("fp4_linear", LINEAR, rows_MK, *how)


NORM_LINEAR = (Backend("mma", _mma_reasons, _mma, slower=_slower), Backend("separate", accept, each_time(_separate)))


@register_op(fake_rows, autocast="keep", direct=True)
def fp4_norm_linear(
    x_MK: Tensor,
    gain_K: Tensor,
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
    """``activation(rms_norm(x) W^T + bias)`` with a packed ``W``; not differentiable. ``gain_K`` is the norm's weight
    in the type of ``x_MK``; the rest as in ``fp4_linear``."""
    if gain_K.shape != (k,) or gain_K.dtype != x_MK.dtype:
        raise ConfigurationError(
            f"the norm's weight is {tuple(gain_K.shape)} {gain_K.dtype}, the input takes ({k},) {x_MK.dtype}"
        )
    args = ((codes, block_scales, tensor_scale), bias, activation, gain_K, eps)
    return run_rows("fp4_norm_linear", NORM_LINEAR, x_MK, format, n, k, *args)
