"""Triton kernel of two_part_round.py: elementwise, reads a weight and its kept scales and writes it rounded."""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.runtime.fused import on_device

BLOCK = 2048
WARPS = 4


@triton.jit
def _round(w_ptr, scales_ptr, tensor_scale_ptr, out_ptr, K, blocks, row_stride, TOP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < K
    w = tl.load(w_ptr + row * row_stride + column, inside, other=0.0).to(tl.float32)
    code = tl.load(scales_ptr + row * blocks + column // 16, inside, other=0).to(tl.int32) & 0x7F
    # E4M3 without its sign: 2^-9 steps below exponent 1, NaN at 0x7F.
    normal = (((code >> 3) + 120) << 23 | (code & 7) << 20).to(tl.float32, bitcast=True)
    scale = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
    scale = tl.where(code == 0x7F, float("nan"), scale)
    tensor_scale = tl.load(tensor_scale_ptr)
    u = tl.div_rn(tl.abs(w), tl.where(scale == 0, float("inf"), scale * tensor_scale))
    position = tl.where(u < 2.0, u * 2, tl.where(u < 4.0, u + 2, u * 0.5 + 4)) * 16
    position = tl.where(position > TOP, TOP, position)
    position = (position + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
    low, high = position * 0.03125, position * 0.125 - 8
    value = tl.maximum(tl.maximum(low, position * 0.0625 - 2), high) * scale * tensor_scale
    value = tl.where(u != u, u, value)
    value = tl.where(w < 0, -value, value)
    tl.store(out_ptr + row * K + column, value.to(out_ptr.dtype.element_ty), inside)


def round_to_parts(w_NK: Tensor, block_scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`separation.round_to_parts`, bit for bit but for the sign of zeros; rows of adjacent elements."""
    if w_NK.stride(1) != 1:
        w_NK = w_NK.contiguous()
    (n, k), blocks = w_NK.shape, block_scales.shape[1]
    out = torch.empty(n, k, dtype=dtype, device=w_NK.device)
    if n:
        with on_device(w_NK):
            _round[(n, triton.cdiv(k, BLOCK))](
                w_NK, block_scales, tensor_scale, out, k, blocks, w_NK.stride(0), TOP=119, BLOCK=BLOCK, num_warps=WARPS
            )
    return out
