"""Launches of the fused FP4 matmuls on tiled weights, by the plans of ``fp4_plan.py``.

The sources, with the reasoning about registers and memory, are ``cuda/fp4_mma.cu``, ``cuda/fp4_wgmma.cu``,
``cuda/fp4_dequantize.cu`` and ``cuda/fp4_e4m3.cu``.

``M`` rows, ``N`` out features, ``K`` in features. A window is 64 columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4.blocks import ceil_div, launch_bytes
from vblackwell.kernels.fp4.mma_plan import MMA_FILES, MmaPlan
from vblackwell.kernels.fp4.plan import WGMMA_FILES, WgmmaPlan, launches
from vblackwell.kernels.fp4.reference import ACTIVATIONS
from vblackwell.kernels.runtime.nvrtc import kernel

DEQUANTIZE_FILES = ("ptx.cuh", "decode.cuh", "fp4_dequantize.cu")
E4M3_FILES = ("ptx.cuh", "decode.cuh", "e4m3.cuh", "round_row.cuh", "fp4_e4m3.cu")
PREPARE_SHARED_BYTES = 64  # of a block that rounds rows: two fp32 from each of its 8 warps


@dataclass(frozen=True, eq=False)
class Norm:
    """What ``fp4_mma`` normalises the rows of x by, on the way: RMSNorm, or with ``gain_sums`` LayerNorm.

    Attributes:
        gain: (K,) of the type of x; K is a multiple of 8.
        eps: added to the mean square, or to the variance.
        gain_sums: (N,) fp32, W times the gain; LayerNorm's own bias times W belongs into the linear's bias.
    """

    gain: Tensor
    eps: float
    gain_sums: Tensor | None = None

    @property
    def kind(self) -> int:
        """As the kernel's macro NORM."""
        return 1 if self.gain_sums is None else 2


def _flags(x_MK: Tensor) -> bool:
    return x_MK.dtype == torch.float16


def aligned(x_MK: Tensor) -> tuple[Tensor, int]:
    """x with rows of a multiple of 16 bytes, and their length: copies only where K is not a multiple of 8."""
    k = x_MK.shape[1]
    if k % 8 == 0 and x_MK.data_ptr() % 16 == 0:
        return x_MK, k
    return torch.nn.functional.pad(x_MK, (0, -k % 8)).contiguous(), k + -k % 8


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _output(x_MK: Tensor, n: int, out_dtype: torch.dtype | None) -> Tensor:
    return torch.empty(x_MK.shape[0], n, dtype=out_dtype or x_MK.dtype, device=x_MK.device)


def run_mma(
    plan: MmaPlan,
    x_MK: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    n: int,
    out_dtype: torch.dtype | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """One launch of ``fp4_mma``; ``out_dtype`` may be fp32, else the type of x. ``norm`` comes before the product.

    Raises:
        ConfigurationError: a LayerNorm, and a plan by which x comes in bulk copies; a norm, and a plan without them that gives a row no
            power of two of threads.
    """
    x_MK, k = aligned(x_MK)
    if k % 64:
        plan = plan.without_bulk()
    if norm is not None and (norm.kind == 2 if plan.chunk else plan.threads & (plan.threads - 1)):
        raise ConfigurationError(f"{plan} does not go with this norm on the way: plan_mma(..., bulk=False) does")
    y_MN = _output(x_MK, n, out_dtype)
    m, kind = x_MK.shape[0], 0 if norm is None else norm.kind
    windows, count = plan.chunks(k)
    macros = plan.macros(_flags(x_MK), y_MN.dtype == torch.float32, kind)
    grid = (ceil_div(n, 32 * plan.row_warps), plan.splits, ceil_div(m, plan.tokens))
    args = (x_MK, codes, block_scales, tensor_scale, bias, y_MN, m, n, k, ACTIVATIONS.index(activation), windows, count)
    more = () if norm is None else (norm.gain, norm.gain_sums, float(norm.eps))
    shared_bytes = plan.shared_bytes(k, kind)
    if plan.chunk:
        shared_bytes = launch_bytes(shared_bytes, math.prod(grid), _processors(x_MK.device))
    weight = (codes, block_scales, tensor_scale)
    kernel(MMA_FILES, "fp4_mma", macros, x_MK.device).launch(grid, plan.threads, shared_bytes, (*args, *more), weight)
    return y_MN


def run_wgmma(
    plan: WgmmaPlan,
    x_MK: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    n: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``fp4_wgmma``, once or twice, after ``arrange``; ``out_dtype`` may be fp32, else the type of x."""
    x_MK, k = aligned(x_MK)
    y_MN = _output(x_MK, n, out_dtype)
    m, windows, blocks = x_MK.shape[0], ceil_div(k, 64), ceil_div(x_MK.shape[0], plan.tokens)
    macros = plan.macros(_flags(x_MK), y_MN.dtype == torch.float32)
    image = torch.empty(blocks * windows * plan.tokens * 128, dtype=torch.uint8, device=x_MK.device)
    passed, counters = passed_sums(plan, m, n, x_MK.device)
    arrange = kernel(WGMMA_FILES, "arrange", macros, x_MK.device)
    more = () if counters is None else (counters, ceil_div(n, 64))
    arrange.launch((ceil_div(windows * plan.tokens * 8, 256), blocks, 1), 128, 0, (x_MK, image, m, k, *more))
    args = (image, codes, block_scales, tensor_scale, bias, y_MN, m, n, k, ACTIVATIONS.index(activation))
    for rows in launches(plan, m, n):
        flags = rows.plan.macros(_flags(x_MK), y_MN.dtype == torch.float32)
        grid = (rows.plan.helpers(n) + rows.blocks, plan.splits, blocks)
        more = () if passed is None else (passed, counters)
        shared_bytes = launch_bytes(rows.plan.shared_bytes(), math.prod(grid), _processors(x_MK.device))
        product = kernel(WGMMA_FILES, "fp4_wgmma", flags, x_MK.device)
        weight = (codes, block_scales, tensor_scale)
        product.launch(grid, rows.plan.threads, shared_bytes, (*args, rows.first, *more), weight)
    return y_MN


def passed_sums(plan: WgmmaPlan, m: int, n: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """What a plan's helpers write for each block: fp32 sums of its tile, and how many warps have written theirs; none without helpers."""
    if not plan.helped:
        return None, None
    tiles = ceil_div(m, plan.tokens) * ceil_div(n, 64)
    return torch.empty(tiles, plan.tokens, 64, device=device), torch.empty(tiles, dtype=torch.int32, device=device)


def run_dequantize(
    codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    """One launch of ``fp4_dequantize``: the (n, k) weight as bf16, fp16 or fp32."""
    w_NK = torch.empty(n, k, dtype=dtype, device=codes.device)
    macros = {"FP16": 0, "OUT": {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype]}
    warps = 4 if dtype == torch.float32 else 8
    grid = (ceil_div(ceil_div(k, 64), warps), ceil_div(n, 32), 1)
    shared_bytes = warps * 32 * 64 * w_NK.element_size()
    args = (codes, block_scales, tensor_scale, w_NK, n, k)
    weight = (codes, block_scales, tensor_scale)
    kernel(DEQUANTIZE_FILES, "fp4_dequantize", macros, codes.device).launch(
        grid, 32 * warps, shared_bytes, args, weight
    )
    return w_NK


def prepare_macros(fp16: bool, k: int) -> dict[str, int]:
    """Of ``prepare_e4m3`` for rows of ``k`` columns, ``fp16`` or bf16."""
    return {"FP16": 0, "X_FP16": int(fp16), "KEPT": min(8, ceil_div(k, 2048))}


def run_prepare_e4m3(
    x_MK: Tensor, codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, row_top: Tensor, n: int, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch that makes both operands of an FP8 matmul; K is a multiple of 16.

    Returns:
        x as E4M3 rows (M, K) and their (M, 1) fp32 scales, as of `w4a8.quantize_rows`; the weight (N, K) as E4M3, each row relative to
        its largest scale ``row_top`` (E5M3 bytes), which becomes 2^6, and its (1, N) fp32 scales.
    """
    x_MK, _ = aligned(x_MK)
    m, device = x_MK.shape[0], x_MK.device
    q_MK = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=device)
    w_NK = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device)
    scale_M1 = torch.empty(m, 1, dtype=torch.float32, device=device)
    scale_1N = torch.empty(1, n, dtype=torch.float32, device=device)
    columns = ceil_div(ceil_div(k, 64), 8)  # of blocks
    row_blocks = min(1024, ceil_div(m, columns))
    args = (codes, block_scales, tensor_scale, row_top, w_NK, n, k, scale_1N, x_MK, q_MK, scale_M1, m, row_blocks)
    prepare = kernel(E4M3_FILES, "prepare_e4m3", prepare_macros(_flags(x_MK), k), device)
    weight = (codes, block_scales, tensor_scale, row_top)
    prepare.launch((columns, ceil_div(n, 32) + row_blocks, 1), 256, PREPARE_SHARED_BYTES, args, weight)
    return q_MK, scale_M1, w_NK, scale_1N


def row_tops(block_scales: Tensor, n: int, k: int) -> Tensor:
    """(N,) E5M3 bytes: the largest scale of each row of a tiled weight."""
    bands, windows = ceil_div(n, 32), ceil_div(k, 64)
    return block_scales.view(bands, windows, 8, 4, 4).amax((1, 3)).transpose(1, 2).reshape(-1)[:n].contiguous()
