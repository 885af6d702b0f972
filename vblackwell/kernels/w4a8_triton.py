"""Rounding rows of activations to E4M3 as a Triton kernel: one program a row, which it reads once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _quantize_rows_kernel(x, q, scale, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(values), axis=0)
    unit = tl.where(amax > 0, amax / 448.0, 1.0)
    tl.store(q + row * K + columns, (values / unit).to(q.dtype.element_ty), mask=columns < K)
    tl.store(scale + row, unit)


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 rows, (M, 1) fp32 scales), as in w4a8.py."""
    m, k = x_MK.shape
    q_MK = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scale_M1 = torch.empty(m, 1, dtype=torch.float32, device=x_MK.device)
    block = triton.next_power_of_2(k)
    warps = min(16, max(1, block // 1024))
    with torch.cuda.device(x_MK.device):
        _quantize_rows_kernel[(m,)](x_MK, q_MK, scale_M1, k, BLOCK=block, num_warps=warps)  # pyright: ignore[reportCallIssue]
    return q_MK, scale_M1
