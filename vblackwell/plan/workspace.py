"""Memory that CUDA kernels of torch take and give back inside one call; no operator's output shows it.

Formulas from the shapes, after torch's sources (ATen/native/cuda and native/transformers/cuda); operators that are not here are taken to
need none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

CUBLAS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_addmm_activation"}
"""Operators that call cuBLAS, whose workspace is allocated at the first one."""


def workspace_bytes(name: str, args: tuple[Any, ...]) -> int:
    """Bytes that operator ``name`` ('aten_op.overload') takes for the length of its call."""
    op = name.partition(".")[0]
    if op == "_scaled_dot_product_flash_attention_backward":
        query = args[1]
        b, n, s, h = query.shape
        rows, width = -(-s // 128) * 128, -(-h // 32) * 32
        return 4 * b * n * rows * (width + 1)  # dQ accumulated in fp32, and one dot product a row
    if op == "_scaled_dot_product_efficient_attention_backward":
        query = args[1]
        b, n, s, h = query.shape
        accumulate = 4 * b * n * s * h if query.element_size() < 4 else 0
        return 4 * b * n * s + accumulate
    if op == "embedding_dense_backward":
        indices = args[1]
        return 5 * 8 * indices.numel() if isinstance(indices, Tensor) and indices.numel() > 3072 else 0
    return 0
