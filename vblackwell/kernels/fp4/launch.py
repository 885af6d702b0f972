"""Launches of the fused FP4 kernels (``cuda/``) on tiled weights. ``M`` rows, ``N`` out features, ``K`` in features."""

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4.mma_plan import MMA_FILES, Gpu, MmaPlan, ceil_div, launch_bytes
from vblackwell.kernels.fp4.reference import ACTIVATIONS
from vblackwell.kernels.fp4.wgmma_plan import WGMMA_FILES, WgmmaPlan, launches
from vblackwell.kernels.runtime import counters
from vblackwell.kernels.runtime.launch import check_driver, driver, kernel

DEQUANTIZE_FILES = ("ptx.cuh", "fp4/decode.cuh", "fp4/fp4_dequantize.cu")
Weight = Sequence[Tensor]  # codes, block scales and tensor scale; in two parts the fine codes come second
PARTS = 4  # tensors of a weight in two parts
_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS = 36, 37  # CU_DEVICE_ATTRIBUTE_*
OUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # as the macro OUT


def aligned(x_MK: Tensor) -> tuple[Tensor, int]:
    """x with rows of a multiple of 16 bytes, and their length: copies only where K is not a multiple of 8."""
    k = x_MK.shape[1]
    if k % 8 == 0 and x_MK.data_ptr() % 16 == 0:
        return x_MK, k
    return torch.nn.functional.pad(x_MK, (0, -k % 8)).contiguous(), k + -k % 8


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """What plans know of ``device``, a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = [ctypes.c_int(), ctypes.c_int()]
    for value, attribute in zip(found, (_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS), strict=True):
        result = driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
        check_driver(result, f"asking for attribute {attribute} of GPU {index}")
    khz, bits = (value.value for value in found)
    return Gpu(torch.cuda.get_device_capability(device), processors(device), 2 * khz / 1000 * bits / 8)


def run_mma(
    plan: MmaPlan,
    x_MK: Tensor,
    weight: Weight,
    bias: Tensor | None,
    activation: str,
    n: int,
    out_dtype: torch.dtype | None = None,
    *,
    gain_K: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """One launch of ``fp4_mma``; ``out_dtype`` may be fp32, else the type of x. With ``gain_K``, of the type of x, K a
    multiple of 8 and a weight in one part it takes the RMSNorm of the rows on the way; two parts take bf16 rows."""
    x_MK, k = aligned(x_MK)
    if k % 64:
        plan = replace(plan, chunk=0)
    norm = gain_K is not None
    if norm and not plan.chunk and plan.threads & (plan.threads - 1):
        raise ConfigurationError(f"{plan} does not go with this norm on the way: plan_mma(..., bulk=False) does")
    m, device = x_MK.shape[0], x_MK.device
    y_MN = torch.empty(m, n, dtype=out_dtype or x_MK.dtype, device=device)
    macros = plan.macros(x_MK.dtype == torch.float16, y_MN.dtype == torch.float32, norm)
    grid = (ceil_div(n, 32 * plan.row_warps), plan.splits * plan.k_blocks, ceil_div(m, plan.tokens))
    shared_bytes = plan.shared_bytes(k, norm)
    args = (x_MK, *weight, bias, y_MN, m, n, k, ACTIVATIONS.index(activation), *plan.chunks(k))
    if len(weight) == PARTS:
        args = (*args, 1, shared_bytes)
    elif plan.chunk:
        shared_bytes = launch_bytes(shared_bytes, math.prod(grid), processors(device))
    if norm:
        args = (*args, gain_K, float(eps))
    product = kernel(MMA_FILES, "fp4_mma", macros, device)
    if plan.k_blocks == 1:
        product.launch(grid, plan.threads, shared_bytes, args, weight)
        return y_MN
    sums = torch.empty(math.prod(grid) * plan.tokens * 32 * plan.row_warps, dtype=torch.float32, device=device)
    with counters.zeroed(grid[0] * grid[2], device) as now_and_stale:
        product.launch(grid, plan.threads, shared_bytes, (*args, sums, *now_and_stale), weight)
    return y_MN


def run_wgmma(
    plan: WgmmaPlan,
    x_MK: Tensor,
    weight: Weight,
    bias: Tensor | None,
    activation: str,
    n: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``fp4_wgmma``, and its tail if any, after ``swizzle_x``; ``out_dtype`` may be fp32, else the type of x."""
    x_MK, k = aligned(x_MK)
    (m, _), device, windows = x_MK.shape, x_MK.device, ceil_div(k, 64)
    y_MN = torch.empty(m, n, dtype=out_dtype or x_MK.dtype, device=device)
    fp16, out32 = x_MK.dtype == torch.float16, y_MN.dtype == torch.float32
    parts, swizzled = launches(plan, m, n, processors(device)), dict[int, Tensor]()
    for tokens, part in {rows.plan.tokens: rows.plan for rows in parts}.items():
        blocks = ceil_div(m, tokens)
        swizzled[tokens] = torch.empty(blocks * windows * tokens * 128, dtype=torch.uint8, device=device)
        swizzle = kernel(WGMMA_FILES, "swizzle_x", part.macros(fp16, out32), device)
        swizzle.launch((ceil_div(windows * tokens * 8, 256), blocks, 1), 128, 0, (x_MK, swizzled[tokens], m, k))
    for rows in parts:
        args = (swizzled[rows.plan.tokens], *weight, bias, y_MN, m, n, k, ACTIVATIONS.index(activation))
        grid = (rows.blocks, rows.plan.splits, ceil_div(m, rows.plan.tokens))
        shared_bytes = launch_bytes(rows.plan.shared_bytes(), math.prod(grid), processors(device))
        product = kernel(WGMMA_FILES, "fp4_wgmma", rows.plan.macros(fp16, out32), device)
        product.launch(grid, rows.plan.threads, shared_bytes, (*args, rows.first), weight)
    return y_MN


def run_dequantize(weight: Weight, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """The (n, k) weight, in one part or two, as bf16, fp16 or fp32, by one launch."""
    device = weight[0].device
    w_NK = torch.empty(n, k, dtype=dtype, device=device)
    warps = 4 if dtype == torch.float32 else 8
    grid = (ceil_div(ceil_div(k, 64), warps), ceil_div(n, 32), 1)
    macros = {"FP16": 0, "OUT": OUT_TYPES[dtype], "PARTS": int(len(weight) == PARTS)}
    write = kernel(DEQUANTIZE_FILES, "fp4_dequantize", macros, device)
    write.launch(grid, 32 * warps, warps * 32 * 64 * w_NK.element_size(), (*weight, w_NK, n, k), weight)
    return w_NK
