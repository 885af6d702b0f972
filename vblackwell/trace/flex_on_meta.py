"""FlexAttention on tensors without bytes, as its compiled form on CUDA keeps and takes them.

`torch.compile` does not run on meta, and uncompiled FlexAttention keeps squares of the sequence that the compiled kernel never has. Forward
keeps queries, keys, values, the output and a log-sum-exp in fp32 a row; backward takes one dot product a row more. A block mask holds
counts and indices of blocks of 128, seen by queries and by keys, partial and full: eight small tensors.

Where a kernel was not compiled before, Triton's autotuner times it and clears the GPU's L2 cache in between, with a buffer of its size that
is free again at once but stays a segment of the allocator: once for the mask, once forward, once backward.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from vblackwell.units import MiB

BLOCK = 128
L2_BYTES = {(8, 0): 40 * MiB, (8, 6): 6 * MiB, (8, 9): 72 * MiB, (9, 0): 60 * MiB, (12, 0): 96 * MiB}
"""Of the largest cards of a compute capability; an H200's was seen."""
_tuned: set[str] = set()
_tuning = [False]


def is_tuning() -> bool:
    """Whether what is allocated now is an autotuner's, which takes it only in the first run on a machine."""
    return _tuning[0]


def forget_tuning() -> None:
    """From here on it is a first run."""
    _tuned.clear()


def _tune(kernel: str) -> None:
    if kernel in _tuned:
        return
    _tuned.add(kernel)
    size = L2_BYTES.get(torch.cuda.get_device_capability(), 40 * MiB)
    _tuning[0] = True
    try:
        with torch._C.DisableTorchFunction():
            torch.empty(size, dtype=torch.uint8, device="meta")
    finally:
        _tuning[0] = False


class FlexOnMeta(torch.autograd.Function):
    """The bytes of compiled FlexAttention: (B, N, S, H) queries, (B, K, T, H) keys and values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Output (B, N, S, Hv) and log-sum-exp (B, N, S)."""
        same = query.shape[-1] == value.shape[-1]  # compiled, the output has the strides of the queries
        _tune("forward")
        out = torch.empty_like(query) if same else query.new_empty(*query.shape[:-1], value.shape[-1])
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, rows)
        ctx.mark_non_differentiable(rows)
        return out, rows

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the three."""
        query, key, value, _, rows = ctx.saved_tensors
        dots = torch.empty_like(rows)
        _tune("backward")
        del dots
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    return_aux: Any = None,
    return_lse: bool = False,
    **named: Any,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention`, compiled."""
    from torch.nn.attention import flex_attention as module

    with torch._C.DisableTorchFunction():  # checkpointing compares devices of what is saved: meta, as within operators
        out, rows = FlexOnMeta.apply(query, key, value)  # pyright: ignore[reportGeneralTypeIssues]
    if return_aux is not None:
        return out, module.AuxOutput(lse=rows, max_scores=None)
    return (out, rows) if return_lse else out


def block_mask(
    mask_mod: Any, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = "cuda", **rest: Any
) -> Any:  # noqa: N803
    """`create_block_mask`, compiled: what it returns, and no squares on the way."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, columns = -(-Q_LEN // BLOCK), -(-KV_LEN // BLOCK)
    _tune("mask")

    def pair(of: int, others: int) -> tuple[Tensor, Tensor]:
        counts = torch.empty(B or 1, H or 1, of, dtype=torch.int32, device=device)
        return counts, torch.empty(B or 1, H or 1, of, others, dtype=torch.int32, device=device)

    kv, full_kv, q, full_q = pair(rows, columns), pair(rows, columns), pair(columns, rows), pair(columns, rows)
    return BlockMask((Q_LEN, KV_LEN), *kv, *full_kv, *q, *full_q, (BLOCK, BLOCK), mask_mod)


def flex_patches() -> list[Any]:
    """Patches of transformers' modules that use FlexAttention, where they are loaded."""
    found: list[Any] = []
    masks, attention = (
        sys.modules.get(f"transformers.{name}") for name in ("masking_utils", "integrations.flex_attention")
    )
    if masks is not None and hasattr(masks, "create_block_mask"):
        found.append(mock.patch.object(masks, "create_block_mask", block_mask))
    if attention is not None and hasattr(attention, "compile_friendly_flex_attention"):

        def compiled(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **named: Any) -> Any:
            return flex(query, key, value, **named)

        found.append(mock.patch.object(attention, "compile_friendly_flex_attention", compiled))
    return found
