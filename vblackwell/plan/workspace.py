"""Memory that CUDA kernels take and give back inside one call; no operator's output shows it.

Formulas from the shapes: of torch's operators after its sources (ATen/native/cuda and native/transformers/cuda), of this package's after
their own code (vblackwell/kernels; plan/ may not import it, so the operators are known here by name); operators that are not here are
taken to need none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

CUBLAS = {
    "mm", "addmm", "bmm", "baddbmm", "linear", "_addmm_activation", "shared_input_linears", "shared_input_linears_dx", "swiglu_linear",
    "gated_mlp", "gated_mlp_backward", "linear_cross_entropy",
}  # fmt: skip
"""Operators that call cuBLAS, whose workspace is allocated at the first one."""


def workspace_bytes(name: str, args: tuple[Any, ...]) -> int:
    """Bytes that operator ``name`` ('aten_op.overload') takes for the length of its call."""
    formula = _FORMULAS.get(name.partition(".")[0])
    return 0 if formula is None else formula(*args)


def _flash_backward(dy: Tensor, query: Tensor, *rest: Any) -> int:
    b, n, s, h = query.shape
    rows, width = -(-s // 128) * 128, -(-h // 32) * 32
    return 4 * b * n * rows * (width + 1)  # dQ accumulated in fp32, and one dot product a row


def _efficient_backward(dy: Tensor, query: Tensor, *rest: Any) -> int:
    b, n, s, h = query.shape
    accumulate = 4 * b * n * s * h if query.element_size() < 4 else 0
    return 4 * b * n * s + accumulate


def _embedding_backward(dy: Tensor, indices: Tensor, *rest: Any) -> int:
    return 5 * 8 * indices.numel() if indices.numel() > 3072 else 0


MOST_ROWS = 16384  # of kernels/gated_mlp.py: beyond it goes in chunks


def _rows(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def _chunk_rows(x: Tensor) -> int:
    rows = _rows(x)
    return -(-rows // max(1, -(-rows // MOST_ROWS)))


def _head_and_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Any,
    targets: Any,
    ignore: int,
    z_loss: float,
    chunk: int,
    wide: bool,
    *wanted: bool,
) -> int:
    """Logits of a chunk, rows padded to 64 words; a loss a token; the weight's gradient in fp32 where that is wider than the weight."""
    logits = min(chunk, hidden.shape[0]) * -(-weight.shape[0] // 64) * 64 * hidden.element_size()
    total = 4 * weight.numel() if wide and weight.element_size() < 4 else 0
    return logits + 4 * hidden.shape[0] + total


_FORMULAS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "embedding_dense_backward": _embedding_backward,
    "gated_mlp": lambda x, gate, up, down, wanted: 2 * _chunk_rows(x) * len(gate) * x.element_size() if wanted else 0,
    "gated_mlp_backward": lambda dy, x, gate, *rest: 3 * _chunk_rows(x) * len(gate) * x.element_size(),
    "swiglu_linear": lambda gate, up, weight, wanted: gate.numel() * gate.element_size() if wanted else 0,
    "linear_cross_entropy": _head_and_loss,
}
