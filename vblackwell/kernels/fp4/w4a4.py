"""FP4 weights on Blackwell's FP4 tensor cores: a stated choice with its own accuracy, never a silent default.

Both operands must be FP4, so activations are rounded to nvfp4, too: `max` scales, and the least power of two as tensor
scale that lets them fit, so that what a row becomes does not depend on the other rows, but for blocks below 2^-13 of
the largest element. About 20 dB on Gaussian rows. Fewer than ``MIN_ROWS`` rows are multiplied as they are, by
`fp4_linear`, as for FP8 (w4a8.py). The product is PyTorch's `scaled_mm` in its nvfp4 recipe (cuBLAS), which takes no
tiles: each call turns them into row-major codes and swizzled scales in one launch. mxfp4 goes the same way, exactly: a
tiled weight's scales are powers of two from 2^-9 to 2^8, each an E4M3 value, and PyTorch's own mxfp4 recipe rounds
inputs more coarsely and is for 10.x alone. Backward is straight through the rounding: dX = dY W. ``M`` rows, ``N`` out
features, ``K`` in features.
"""

import torch
from torch import Tensor
from torch.nn import functional

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.fp4 import layout, linear, reference
from vblackwell.kernels.fp4.launch import Weight
from vblackwell.kernels.fp4.reference import activate
from vblackwell.kernels.fp4.w4a8 import MIN_ROWS, cpu_reasons
from vblackwell.kernels.runtime import registry
from vblackwell.kernels.runtime.registry import Backend, Request, capability
from vblackwell.numerics import fp4
from vblackwell.numerics.formats import E4M3_MAX
from vblackwell.numerics.packed import PackedTensor

FP4_CAPABILITY = (10, 0)
N_MULTIPLE, K_MULTIPLE = 16, 32  # of PyTorch's FP4 matmul
MULTIPLES = f"multiples of {N_MULTIPLE} and {K_MULTIPLE}"
FLAG = "--fp4-activations"
_WITHOUT = f"go without {FLAG} (w4a4=True)"
SUMMARY = f"inputs of {MIN_ROWS} rows and more are rounded to FP4 (nvfp4), fewer are not"


def power_scale(x: Tensor) -> Tensor:
    """nvfp4's tensor scale, fp32: the least power of two, 2^-126 at least, at which no block scale of ``x`` exceeds
    448; NaN where ``x`` has inf or NaN."""
    amax = x.abs().amax().to(torch.float32)
    most = torch.full_like(amax, 6 * E4M3_MAX)  # a tensor: by a number CUDA would multiply with the reciprocal
    bits = (amax / most).clamp_min(2.0**-126).view(torch.int32)
    power = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(torch.isfinite(amax), power, torch.nan)


def quantize_rows(x_MK: Tensor) -> PackedTensor:
    """Finite rows as nvfp4 with `max` scales and `power_scale`."""
    return fp4.quantize(x_MK.to(torch.float32), "nvfp4", "max", tensor_scale=power_scale(x_MK))


def check_shape(format: str, n: int, k: int, name: str = "the weight") -> None:
    """Raises ConfigurationError where a weight of this format and shape (N, K) cannot compute by w4a4."""
    if format not in ("nvfp4", "mxfp4"):
        said = f"FP4 activations go with nvfp4 and mxfp4: pack to one of them, or {_WITHOUT}"
        raise ConfigurationError(f"{name} is {format}: {said}")
    if n % N_MULTIPLE or k % K_MULTIPLE:
        remedy = f"keep it from being packed (--keep), or {_WITHOUT}"
        raise ConfigurationError(f"{name} is {n} x {k}: FP4 activations take {MULTIPLES}: {remedy}")


def check_device(device: torch.device, name: str = "the weight", dtype: torch.dtype | None = None) -> None:
    """Raises Unsupported where ``device`` is a GPU without FP4 tensor cores, before compute capability 10.0, or one to
    which activations come in a ``dtype`` that is not encoded there."""
    found = capability(device)
    if (0, 0) < found < FP4_CAPABILITY:
        said = f"{device} has compute capability {found[0]}.{found[1]}, FP4 tensor cores begin with 10.0 (Blackwell)"
        raise Unsupported(f"{name}: {said}: {_WITHOUT}")
    if found > (0, 0) and dtype not in (None, *linear.HALVES):
        said = f"activations are {dtype}, and become FP4 from bf16 or fp16 on a GPU: use these, or {_WITHOUT}"
        raise Unsupported(f"{name}: {said}")


def check_packed(packed: PackedTensor, name: str = "the weight") -> None:
    """Raises as `check_shape`, for a weight in two parts as well, and as `check_device`."""
    check_shape(packed.precision, packed.n, packed.k, name)
    check_device(packed.device, name)


def _scaled_mm_reasons(request: Request) -> list[str]:
    reasons = registry.cuda_reasons(request)
    if not reasons and request.capability < FP4_CAPABILITY:
        reasons.append(f"compute capability {request.capability[0]}.{request.capability[1]} has no FP4 tensor cores")
    if not layout.is_tiled(request.format):
        reasons.append(f"format {request.format!r} is not tiled: convert it with kernels.fp4.layout.to_tiled")
    if request.n % N_MULTIPLE or request.k % K_MULTIPLE:
        reasons.append(f"{request.n} x {request.k}: PyTorch's FP4 matmul takes {MULTIPLES}")
    return reasons + registry.dtype_reasons(request.dtype, linear.HALVES, "activations are")


def _scaled_mm(x_MK: Tensor, weight: Weight, bias: Tensor | None, request: Request, activation: str) -> Tensor:
    from vblackwell.kernels.fp4.encode_triton import encode_rows
    from vblackwell.kernels.fp4.tile_triton import untile

    codes, block_scales, tensor_scale = weight
    x, x_scales, x_scale = encode_rows(x_MK)
    w, w_scales = untile(codes, block_scales, request.n, request.k)
    x_operand, w_operand = (each.view(torch.float4_e2m1fn_x2) for each in (x, w))
    scales = [[x_scales.view(torch.float8_e4m3fn), x_scale], [w_scales.view(torch.float8_e4m3fn), tensor_scale]]
    recipe = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
    swizzles = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]
    how = {"swizzle_a": swizzles, "swizzle_b": swizzles, "output_dtype": torch.bfloat16}
    z_MN = functional.scaled_mm(x_operand, w_operand.t(), scales[0], recipe, scales[1], recipe, **how)
    if bias is not None:
        z_MN = z_MN + bias.to(z_MN.dtype)
    return activate(z_MN, activation).to(x_MK.dtype)


def _reference(x_MK: Tensor, weight: Weight, bias: Tensor | None, request: Request, activation: str) -> Tensor:
    if not torch.isfinite(x_MK).all():  # as on a GPU, where the tensor scale is NaN
        return x_MK.new_full((request.m, request.n), torch.nan)
    w_NK = reference.weight_of(weight, request.format, request.n, request.k)
    return reference.linear(quantize_rows(x_MK).dequantize(), w_NK, bias, activation).to(x_MK.dtype)


W4A4 = (
    Backend("scaled_mm", _scaled_mm_reasons, linear.each_time(_scaled_mm)),
    Backend("reference", cpu_reasons, linear.each_time(_reference)),
)


@linear.packed_linear(3, linear.fp4_linear_dx)
def fp4_linear_w4a4(
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
    """As ``fp4_linear``, with x, bf16 or fp16 (fp32 on the CPU), rounded to nvfp4 if it has ``MIN_ROWS`` rows; then a
    GPU's product is rounded to bf16 before the bias is added, and is NaN throughout where x has inf or NaN.

    Raises:
        ConfigurationError: tensors that do not belong together, or an unknown format or activation.
        Unsupported: a GPU without FP4 tensor cores, fp32 activations on a GPU, or the backend asked for refuses.
    """
    weight = (codes, block_scales, tensor_scale)
    op, table = ("fp4_linear", linear.LINEAR) if x_MK.numel() < MIN_ROWS * k else ("fp4_linear_w4a4", W4A4)
    return linear.run_rows(op, table, x_MK, format, n, k, weight, bias, activation)
