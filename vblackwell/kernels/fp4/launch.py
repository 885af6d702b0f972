"""Launches of the fused FP4 kernels (``cuda/``) on tiled weights. All that a shape decides is prepared once and kept:
what is left of a call are allocations, addresses and the driver. ``M`` rows, ``N`` out features, ``K`` in features.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4.mma_plan import H200, MMA_FILES, Gpu, MmaPlan, ceil_div, launch_bytes
from vblackwell.kernels.fp4.reference import ACTIVATIONS
from vblackwell.kernels.fp4.wgmma_plan import WGMMA_FILES, WgmmaPlan, launches
from vblackwell.kernels.runtime import counters
from vblackwell.kernels.runtime.launch import Chain, Prepared, check_driver, driver, float_bits, kernel

DEQUANTIZE_FILES = ("ptx.cuh", "fp4/decode.cuh", "fp4/fp4_dequantize.cu")
Weight = Sequence[Tensor]  # codes, block scales and tensor scale; in two parts the fine codes come second
Product = Callable[..., Tensor]  # of x_MK, a weight, and a bias or None, for the one shape that it was made for
PARTS = 4  # tensors of a weight in two parts
_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS = 36, 37  # CU_DEVICE_ATTRIBUTE_*
OUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # as the macro OUT


class Given(NamedTuple):
    """What a product is prepared for."""

    shape: tuple[int, ...]  # (.., N, K)
    dtype: torch.dtype  # of x and, but for tests, the output
    activation: str
    weight_tensors: int
    device: torch.device

    @classmethod
    def of(cls, x: Tensor, weight: Weight, activation: str, n: int) -> "Given":
        return cls((*x.shape[:-1], n, x.shape[-1]), x.dtype, activation, len(weight), x.device)


def aligned(x: Tensor) -> Tensor:
    """Contiguous ``x`` from a multiple of 16 bytes on: a copy of a view that begins elsewhere."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def like(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype).contiguous()


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
    count = processors(device)
    # Some drivers report 0 of memory that a CPU shares.
    bandwidth = 2 * khz / 1000 * bits / 8 or H200.memory_bytes_a_us * count / H200.processors
    return Gpu(torch.cuda.get_device_capability(device), count, bandwidth)


@functools.lru_cache(4096)
def prepare_mma(plan: MmaPlan, given: Given, out_dtype: torch.dtype | None = None, norm: bool = False) -> Product:
    """One launch of ``fp4_mma``; ``out_dtype`` may be fp32, else the type of x. With ``norm`` it is given the gain, of
    the type of x, and epsilon as well, and takes the RMSNorm of the rows on the way, of K a multiple of 8 and a weight
    in one part; two parts take bf16 rows."""
    shape, dtype, activation, weight_tensors, device = given
    *rows, n, k = shape
    m, y_shape, unaligned = math.prod(rows), (*rows, n), k % 8 > 0
    if k % 64:
        plan = replace(plan, chunk=0)
    if norm and not plan.chunk and plan.threads & (plan.threads - 1):
        raise ConfigurationError(f"{plan} does not go with this norm on the way: plan_mma(..., bulk=False) does")
    macros = plan.macros(dtype == torch.float16, (out_dtype or dtype) == torch.float32, norm, unaligned)
    columns, blocks, meeting = ceil_div(n, 32 * plan.row_warps), ceil_div(m, plan.tokens), plan.k_blocks > 1
    grid = (columns, plan.splits * plan.k_blocks, blocks)
    shared_bytes = plan.shared_bytes(k, norm)
    numbers = (m, n, k, ACTIVATIONS.index(activation), *plan.chunks(k))
    if weight_tensors == PARTS:
        numbers = (*numbers, 1, shared_bytes)
    else:
        shared_bytes = launch_bytes(shared_bytes, math.prod(grid), gpu_of(device))
    compiled = kernel(MMA_FILES, "fp4_mma", macros, device)
    operands = range(3 + weight_tensors)
    more = range(len(operands), len(operands) + 2 * norm + 4 * meeting)  # addresses
    parameters = (*operands, *range(more.stop, more.stop + len(numbers)), *more)
    queue = Chain([Prepared(compiled, grid, plan.threads, shared_bytes, parameters)], more.stop, numbers).queue
    left_sums = plan.left_sums(m, n)

    def run(x_MK: Tensor, weight: Weight, bias: Tensor | None, *gain_and_eps: Any) -> Tensor:
        y_MN = x_MK.new_empty(*y_shape) if out_dtype is None else x_MK.new_empty(*y_shape, dtype=out_dtype)
        if not unaligned:
            x_MK = aligned(x_MK)
        if bias is not None:
            bias = like(bias, x_MK)
        after = (0 if bias is None else bias.data_ptr(), y_MN.data_ptr())
        if norm:
            gain_K, eps = gain_and_eps
            after = (*after, gain_K.data_ptr(), float_bits(eps))
        if not meeting:
            queue((x_MK.data_ptr(),), weight, after)
            return y_MN
        sums = x_MK.new_empty(left_sums, dtype=torch.float32)
        with counters.zeroed(columns * blocks, device) as (now, stale, stale_count):
            queue((x_MK.data_ptr(),), weight, (*after, sums.data_ptr(), now.data_ptr(), stale.data_ptr(), stale_count))
        return y_MN

    return run


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
    """What `prepare_mma` makes of ``plan``, at once."""
    prepared = prepare_mma(plan, Given.of(x_MK, weight, activation, n), out_dtype, gain_K is not None)
    return prepared(x_MK, weight, bias, gain_K, eps)


@functools.lru_cache(4096)
def prepare_wgmma(plan: WgmmaPlan, given: Given, out_dtype: torch.dtype | None = None) -> Product:
    """``fp4_wgmma``, and its tail if any, after ``swizzle_x`` for the tokens of either; ``out_dtype`` may be fp32, else
    the type of x."""
    shape, dtype, activation, weight_tensors, device = given
    *rows, n, k = shape
    m, y_shape = math.prod(rows), (*rows, n)
    windows, fp16, out32 = ceil_div(k, 64), dtype == torch.float16, (out_dtype or dtype) == torch.float32
    gpu = gpu_of(device)
    parts = launches(plan, m, n, gpu.processors)
    swizzled = {tokens: ceil_div(m, tokens) * windows * tokens * 128 for tokens in {rows.plan.tokens for rows in parts}}
    places = {tokens: place for place, tokens in enumerate(swizzled)}  # of swizzled rows; after them x, the weight, ..
    x_place, end = len(swizzled), len(swizzled) + 3 + weight_tensors  # .. bias and y, then numbers
    swizzles, products, numbers = list[Prepared](), list[Prepared](), [m, n, k, ACTIVATIONS.index(activation)]
    for tokens, place in places.items():
        macros = next(rows.plan for rows in parts if rows.plan.tokens == tokens).macros(fp16, out32)
        grid = (ceil_div(windows * tokens * 8, 256), ceil_div(m, tokens), 1)
        swizzle = kernel(WGMMA_FILES, "swizzle_x", macros, device)
        swizzles.append(Prepared(swizzle, grid, 128, 0, (x_place, place, end, end + 2)))
    for part, first, rows_of_blocks in parts:
        grid = (rows_of_blocks, part.splits, ceil_div(m, part.tokens))
        shared_bytes = launch_bytes(part.shared_bytes(), math.prod(grid), gpu)
        product = kernel(WGMMA_FILES, "fp4_wgmma", part.macros(fp16, out32), device)
        parameters = (places[part.tokens], *range(x_place + 1, end + 4), end + len(numbers))
        products.append(Prepared(product, grid, part.threads, shared_bytes, parameters))
        numbers.append(first)
    queue = Chain([*swizzles, *products], end, numbers, list(swizzled.values())).queue

    def run(x_MK: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        y_MN = x_MK.new_empty(*y_shape) if out_dtype is None else x_MK.new_empty(*y_shape, dtype=out_dtype)
        if bias is not None:
            bias = like(bias, x_MK)
        queue((x_MK.data_ptr(),), weight, (0 if bias is None else bias.data_ptr(), y_MN.data_ptr()))
        return y_MN

    return run


def run_wgmma(
    plan: WgmmaPlan,
    x_MK: Tensor,
    weight: Weight,
    bias: Tensor | None,
    activation: str,
    n: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What `prepare_wgmma` makes of ``plan``, at once."""
    return prepare_wgmma(plan, Given.of(x_MK, weight, activation, n), out_dtype)(x_MK, weight, bias)


@functools.lru_cache(4096)
def _dequantize(n: int, k: int, dtype: torch.dtype, weight_tensors: int, device: torch.device) -> Chain:
    warps = 4 if dtype == torch.float32 else 8
    grid = (ceil_div(ceil_div(k, 64), warps), ceil_div(n, 32), 1)
    macros = {"FP16": 0, "OUT": OUT_TYPES[dtype], "PARTS": int(weight_tensors == PARTS)}
    write = kernel(DEQUANTIZE_FILES, "fp4_dequantize", macros, device)
    shared_bytes, parameters = warps * 32 * 64 * dtype.itemsize, range(weight_tensors + 3)
    return Chain([Prepared(write, grid, 32 * warps, shared_bytes, parameters)], weight_tensors + 1, (n, k))


def run_dequantize(weight: Weight, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """The (n, k) weight, in one part or two, as bf16, fp16 or fp32, by one launch."""
    device = weight[0].device
    w_NK = weight[0].new_empty(n, k, dtype=dtype)
    _dequantize(n, k, dtype, len(weight), device).queue((), weight, (w_NK.data_ptr(),))
    return w_NK
