"""FP4 weights on FP8 tensor cores: a stated choice with its own accuracy, never a silent default.

mxfp4 weights become E4M3 exactly, each row relative to its largest block scale, because E2M1 times a power of two needs two
significant bits; that holds where a row's block exponents span at most 14, which ``check_packed`` finds out when the layer is
packed. Activations are rounded to E4M3 with one scale a row, amax / 448: about 31 dB on Gaussian rows, the price of the option. It pays
from about a thousand rows on. On Hopper one kernel decodes weights and rounds rows while it multiplies others (``w4a8_cuda``).
Elsewhere, and for many rows of large weights, the product is PyTorch's row-scaled FP8 matmul, without fast accumulation, of both
operands written out by one launch.

The backward ignores the rounding of the activations (straight through): dX = dY W with the same packed weight.

``M`` rows, ``N`` out features, ``K`` in features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.fp4 import backends, layout, reference
from vblackwell.kernels.fp4 import launch as fp4_cuda
from vblackwell.kernels.fp4 import w4a8_launch as w4a8_cuda
from vblackwell.kernels.fp4.linear import fp4_linear_dx
from vblackwell.kernels.runtime.autocast import register_autocast
from vblackwell.kernels.runtime.dispatch import Backend, Request, capability, choose, request_of
from vblackwell.numerics.packed import PackedTensor

E4M3_MAX = 448.0
LEAST_TOP = 2.0**-100  # as in cuda/round_row.cuh
MAX_SPAN = 14
FP8_CAPABILITY = (8, 9)
MULTIPLE = 16  # of N and of K, for PyTorch's FP8 matmul
# By times on an H200 (docs/log-fp4.md): one kernel decodes and multiplies from as many rows on as have the tiles of 1024; above MOST_ROWS
# PyTorch's matmul of whole operands is at least as fast, but for small weights.
LEAST_ROWS, MOST_ROWS, LARGEST_WEIGHT = 897, 2048, 6144 * 4096
_BAND_ELEMENTS = 1 << 20
FORMAT = "mxfp4-tiled"


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 rows, (M, 1) fp32 scales): x is about rows * scales.

    Exactly: scales are amax / 448 and rows x * (448 / amax), each operation rounded once to fp32, then to the nearest E4M3, ties to even;
    amax is taken to be 2^-100 at least.
    """
    values = x_MK.to(torch.float32)
    amax = values.abs().amax(1, keepdim=True).clamp(min=LEAST_TOP)
    # A tensor: to divide by a number, PyTorch multiplies by its rounded inverse on a GPU.
    top = torch.full_like(amax, E4M3_MAX)
    return (values * (top / amax)).to(torch.float8_e4m3fn), amax / top


def check_shape(format: str, n: int, k: int, name: str = "the weight") -> None:
    """That a weight of this format and shape (N, K) may compute by w4a8; raises ConfigurationError otherwise."""
    if format != "mxfp4":
        raise ConfigurationError(f"{name} is {format}: w4a8 takes mxfp4, whose scales are powers of two")
    if n % MULTIPLE or k % MULTIPLE:
        raise ConfigurationError(f"{name} is {n} x {k}: w4a8 takes multiples of {MULTIPLE}")


def check_device(device: torch.device, name: str = "the weight") -> None:
    """That ``device`` can multiply by w4a8: a GPU with FP8 tensor cores, or the CPU by its reference.

    Raises:
        Unsupported: a GPU before compute capability 8.9.
    """
    found = capability(device)
    if (0, 0) < found < FP8_CAPABILITY:
        raise Unsupported(
            f"{name}: {device} has compute capability {found[0]}.{found[1]}, and w4a8 multiplies on FP8 tensor cores, from 8.9 on: "
            "use this layer without w4a8"
        )


def check_packed(packed: PackedTensor, name: str = "the weight") -> None:
    """That w4a8 can multiply by a canonical mxfp4 matrix where it is: its rows become E4M3 without loss. Waits for the device.

    Raises:
        ConfigurationError: another format, or sizes that the FP8 matmul does not take.
        Unsupported: a GPU without FP8; a row's block exponents span more than 14, or those of all rows more than tiles hold.
    """
    check_shape(packed.format, packed.n, packed.k, name)
    check_device(packed.device, name)
    layout.live_exponents(packed.codes, packed.block_scales)  # the layout refuses, too, what spans more over all rows
    band, widest = max(1, _BAND_ELEMENTS // packed.k), 0
    for row in range(0, packed.n, band):
        codes, scales = packed.codes[row : row + band], packed.block_scales[row : row + band]
        live = layout.live_blocks(codes, scales)
        exponents = scales.to(torch.int16)
        span_N = torch.where(live, exponents, -1).amax(1) - torch.where(live, exponents, 255).amin(1)
        widest = max(widest, int(span_N.max()))  # a row without a value has a negative one
    if widest > MAX_SPAN:
        raise Unsupported(
            f"{name}: block exponents of a row span {widest}, E4M3 holds {MAX_SPAN}: use this layer without w4a8"
        )


def row_tops_for_w4a8(block_scales: Tensor, n: int, k: int) -> Tensor:
    """(N,) bytes that ``fp4_linear_w4a8`` needs beside the tiled weight. Waits for the device.

    Raises:
        Unsupported: a row's block exponents span more than 14, so E4M3 would not hold its weights exactly.
    """
    bands, windows = layout.tiles(n, k)
    field = block_scales.view(bands, windows, 8, 4, 4) >> 3
    low = torch.where(field == 0, 255, field).amin((1, 3)).to(torch.int32)
    top = field.amax((1, 3)).to(torch.int32)
    span = int(torch.where(top == 0, 0, top - low).max())
    if span > MAX_SPAN:
        raise Unsupported(
            f"block exponents of a row span {span}, E4M3 holds {MAX_SPAN}: run this layer without w4a8 (fp4_linear)"
        )
    return fp4_cuda.row_tops(block_scales, n, k)


def _fp8_reasons(request: Request) -> list[str]:
    reasons = backends.linear_reasons(request)
    if request.device.type == "cuda" and request.capability < FP8_CAPABILITY:
        reasons.append(f"compute capability {request.capability[0]}.{request.capability[1]} has no FP8 tensor cores")
    if request.n % MULTIPLE or request.k % MULTIPLE:
        reasons.append(f"{request.n} x {request.k}: PyTorch's FP8 matmul takes multiples of {MULTIPLE}")
    return reasons


def multiply_rows(q_MK: Tensor, scale_M1: Tensor, w_NK: Tensor, scale_1N: Tensor) -> Tensor:
    """(M, N) bf16 product of E4M3 operands and their rows' scales, as of ``fp4_cuda.run_prepare_e4m3``; sums in fp32."""
    return torch.ops.aten._scaled_mm(q_MK, w_NK.t(), scale_M1, scale_1N, out_dtype=torch.bfloat16, use_fast_accum=False)


def _fused_reasons(request: Request) -> list[str]:
    reasons = backends.linear_reasons(request)
    if request.device.type == "cuda" and request.capability != (9, 0):
        reasons.append(f"compute capability {request.capability[0]}.{request.capability[1]} is not Hopper's 9.0")
    if request.n % MULTIPLE or request.k % MULTIPLE:
        reasons.append(f"{request.n} x {request.k}: the kernel takes multiples of {MULTIPLE}")
    return reasons


def _fused_slower(request: Request) -> list[str]:
    if request.m < LEAST_ROWS:
        return [f"{request.m} rows are fewer than {LEAST_ROWS}, from which on it was timed"]
    if request.m > MOST_ROWS and request.n * request.k > LARGEST_WEIGHT:
        return [
            f"above {MOST_ROWS} rows PyTorch's FP8 matmul is as fast or faster with a weight of {request.n} x {request.k}"
        ]
    return []


def _fused(x_MK, codes, block_scales, tensor_scale, row_top, bias, activation, n, k) -> Tensor:  # type: ignore[no-untyped-def]
    x_MK, _ = fp4_cuda.aligned(x_MK)
    plan = w4a8_cuda.plan_w4a8(x_MK.shape[0], n, k, torch.cuda.get_device_properties(x_MK.device).multi_processor_count)
    bias = None if bias is None else bias.to(x_MK.dtype)
    return w4a8_cuda.run_w4a8(plan, x_MK, codes, block_scales, tensor_scale, row_top, bias, activation, n, k)


def multiply_whole(x_MK, codes, block_scales, tensor_scale, row_top, bias, activation, n, k) -> Tensor:  # type: ignore[no-untyped-def]
    """The op by PyTorch's matmul of whole operands."""
    z_MN = multiply_rows(*fp4_cuda.run_prepare_e4m3(x_MK, codes, block_scales, tensor_scale, row_top, n, k))
    if bias is not None:
        z_MN = z_MN + bias.to(z_MN.dtype)
    return reference.activate(z_MN, activation).to(x_MK.dtype)


def _reference(x_MK, codes, block_scales, tensor_scale, row_top, bias, activation, n, k) -> Tensor:  # type: ignore[no-untyped-def]
    q_MK, scale_M1 = quantize_rows(x_MK)
    rounded_MK = q_MK.to(torch.float32) * scale_M1
    return reference.linear(rounded_MK, codes, block_scales, tensor_scale, bias, FORMAT, activation, n, k).to(
        x_MK.dtype
    )


def _reference_reasons(request: Request) -> list[str]:
    if request.device.type != "cuda":
        return []
    return [f"the tensors are on {request.device}: FP8 is asked for to be fast, and this would be slow"]


W4A8: tuple[Backend, ...] = (
    Backend("fused", _fused_reasons, _fused, slower=_fused_slower),
    Backend("fp8", _fp8_reasons, multiply_whole),
    Backend("reference", _reference_reasons, _reference),
)


@torch.library.custom_op("vblackwell::fp4_linear_w4a8", mutates_args=())
def fp4_linear_w4a8(
    x_MK: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    row_top: Tensor,
    bias: Tensor | None,
    activation: str,
    n: int,
    k: int,
) -> Tensor:
    """``activation(x W^T + bias)`` with x rounded to E4M3 by rows and W from mxfp4 tiles, exactly.

    Args:
        x_MK: (..., K) bf16 or fp16 (fp32 on the CPU's reference path).
        codes: codes of an 'mxfp4-tiled' weight.
        block_scales: its scales.
        tensor_scale: its fp32 tensor scale.
        row_top: from ``row_tops_for_w4a8``.
        bias: (N,) or None.
        activation: 'none', 'relu', 'gelu' or 'silu'.
        n: out features.
        k: in features.

    Raises:
        ConfigurationError: an input with another number of features.
        Unsupported: a GPU without FP8 tensor cores, fp32 activations on a GPU, or the backend asked for by name refuses.
    """
    if x_MK.shape[-1] != k:
        raise ConfigurationError(f"the input has {x_MK.shape[-1]} features, the weight takes {k}")
    rows = x_MK.reshape(-1, k).contiguous()
    if rows.shape[0] == 0:
        return x_MK.new_empty((*x_MK.shape[:-1], n))
    backend = choose("fp4_linear_w4a8", W4A8, request_of(rows, FORMAT, n, k))
    y_MN = backend.run(rows, codes, block_scales, tensor_scale, row_top, bias, activation, n, k)
    return y_MN.view(*x_MK.shape[:-1], n)


@fp4_linear_w4a8.register_fake
def _(x_MK, codes, block_scales, tensor_scale, row_top, bias, activation, n, k):  # type: ignore[no-untyped-def]
    return x_MK.new_empty((*x_MK.shape[:-1], n))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x_MK, codes, block_scales, tensor_scale, row_top, bias, activation, n, k = inputs
    ctx.save_for_backward(None if activation == "none" else x_MK, codes, block_scales, tensor_scale, row_top, bias)
    ctx.static = (activation, n, k)


def _backward(ctx, dy_MN: Tensor):  # type: ignore[no-untyped-def]
    x_MK, codes, block_scales, tensor_scale, row_top, bias = ctx.saved_tensors
    activation, n, k = ctx.static
    if activation != "none":
        z_MN = fp4_linear_w4a8(x_MK, codes, block_scales, tensor_scale, row_top, bias, "none", n, k)
        dy_MN = reference.activation_backward(dy_MN, z_MN, activation)
    dx_MK = None
    if ctx.needs_input_grad[0]:
        dx_MK = fp4_linear_dx(dy_MN, codes, block_scales, tensor_scale, FORMAT, n, k)
    dbias = None
    if bias is not None and ctx.needs_input_grad[5]:
        dbias = dy_MN.reshape(-1, n).sum(0, dtype=torch.float32).to(bias.dtype)
    return dx_MK, None, None, None, None, dbias, None, None, None


fp4_linear_w4a8.register_autograd(_backward, setup_context=_save)
register_autocast(fp4_linear_w4a8)
