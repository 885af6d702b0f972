"""Triton kernels of swiglu.py: elementwise, 3 elements moved a value forward, 5 backward (6 with the product)."""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.runtime.registry import on_device

BLOCK = 2048
WARPS = 4
MAX_ROWS = 65535  # of one launch: CUDA's limit for the second dimension of a grid


@triton.jit
def _forward(gate_ptr, up_ptr, y_ptr, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _backward(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, width, dy_stride, gate_stride, up_stride,
    WITH_PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dy = tl.load(dy_ptr + row * dy_stride + column, inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    # d silu / d gate = sigmoid + silu (1 - sigmoid)
    dgate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
    at = row * width + column
    tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), inside)
    tl.store(dup_ptr + at, (dy * silu).to(dup_ptr.dtype.element_ty), inside)
    if WITH_PRODUCT:
        tl.store(y_ptr + at, (silu * up).to(y_ptr.dtype.element_ty), inside)


def _rows(*tensors: Tensor) -> tuple[list[Tensor], list[int], int, int]:
    """The tensors as rows of adjacent elements, their row strides, and (rows, width): one row if all are contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        count = tensors[0].numel()
        return list(tensors), [count] * len(tensors), 1 if count else 0, count
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    flat = [tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in flat]
    return flat, [tensor.stride(0) for tensor in flat], flat[0].shape[0], flat[0].shape[1]


def _part(start: int, rows: int, *tensors: Tensor) -> tuple[list[Tensor], int]:
    """At most `MAX_ROWS` rows of each from ``start`` on, and how many."""
    count = min(MAX_ROWS, rows - start)
    return list(tensors) if count == rows else [tensor[start : start + count] for tensor in tensors], count


def forward(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, contiguous: new, or ``out``, which may be a contiguous ``gate`` or ``up`` itself."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if out is None else out
    (gate, up), strides, rows, width = _rows(gate, up)
    if rows and width:
        y_RI = y.view(rows, width)
        with on_device(y):
            for start in range(0, rows, MAX_ROWS):
                (gate_RI, up_RI, out_RI), count = _part(start, rows, gate, up, y_RI)
                _forward[(triton.cdiv(width, BLOCK), count)](
                    gate_RI, up_RI, out_RI, width, *strides, BLOCK=BLOCK, num_warps=WARPS
                )
    return y


def backward(dy: Tensor, gate: Tensor, up: Tensor, with_product: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``(dgate, dup, product)``, contiguous; the product is empty unless asked for."""
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    y = torch.empty(gate.shape if with_product else (0,), dtype=gate.dtype, device=gate.device)
    (dy, gate, up), strides, rows, width = _rows(dy, gate, up)
    if rows and width:
        written = [out.view(rows, width) for out in ((dgate, dup, y) if with_product else (dgate, dup, dgate))]
        with on_device(y):
            for start in range(0, rows, MAX_ROWS):
                parts, count = _part(start, rows, dy, gate, up, *written)
                _backward[(triton.cdiv(width, BLOCK), count)](
                    *parts, width, *strides, WITH_PRODUCT=with_product, BLOCK=BLOCK, num_warps=WARPS
                )
    return dgate, dup, y


def backward_in_place(dy: Tensor, gate: Tensor, up: Tensor) -> None:
    """Turns the three, contiguous, into the product, dgate and dup: each element is read before it is written."""
    count = dy.numel()
    if count:
        grid = (triton.cdiv(count, BLOCK), 1)
        with on_device(dy):
            _backward[grid](
                dy, gate, up, gate, up, dy, count, count, count, count, WITH_PRODUCT=True, BLOCK=BLOCK, num_warps=WARPS
            )
