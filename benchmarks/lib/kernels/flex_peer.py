"""FlexAttention (torch.nn.attention.flex_attention), compiled: a peer that the own masks are measured against.

Legend: B batch, N query heads, K key heads, S queries, T keys, H head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from vblackwell.kernels.attention.op import bounds
from vblackwell.nn.attention.backends import Variant


@functools.lru_cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache
def _compiled_blocks() -> Callable[..., Any]:
    return torch.compile(create_block_mask, dynamic=False)


def block_mask(q_BNSH: Tensor, k_BKTH: Tensor, variant: Variant) -> BlockMask | None:
    """What is visible, as FlexAttention wants it; None if everything is."""
    left, right = bounds(variant.causal, variant.window)
    mask, num_queries, num_keys = variant.mask, q_BNSH.shape[2], k_BKTH.shape[2]
    if left is None and right is None and mask is None:
        return None
    if mask is not None and mask.dtype != torch.bool:
        mask = mask > float("-inf")
    expanded = None if mask is None else mask.expand(q_BNSH.shape[0], q_BNSH.shape[1], num_queries, num_keys)
    offset = num_keys - num_queries if variant.bottom_right else 0

    def seen(b: Tensor, n: Tensor, row: Tensor, col: Tensor) -> Tensor:
        inside = row >= 0
        if right is not None:
            inside = inside & (col <= row + offset + right)
        if left is not None:
            inside = inside & (col >= row + offset - left)
        return inside if expanded is None else inside & expanded[b, n, row, col]

    batch, heads = (1, 1) if mask is None else mask[(None,) * (4 - mask.dim())].shape[:2]
    sizes = (None if batch == 1 else batch, None if heads == 1 else heads)
    return _compiled_blocks()(seen, *sizes, num_queries, num_keys, device=q_BNSH.device)


def flex(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, variant: Variant, blocks: BlockMask | None) -> Tensor:
    """The attention of a mask or of bounds; an additive mask changes the scores."""
    additive = variant.mask if variant.mask is not None and variant.mask.dtype != torch.bool else None
    change = None
    if additive is not None:
        expanded = additive.expand(q_BNSH.shape[0], q_BNSH.shape[1], q_BNSH.shape[2], k_BKTH.shape[2])

        def change(score: Tensor, b: Tensor, n: Tensor, row: Tensor, col: Tensor) -> Tensor:
            return score + expanded[b, n, row, col]

    return _compiled()(
        q_BNSH, k_BKTH, v_BKTH, score_mod=change, block_mask=blocks, scale=variant.scale,
        enable_gqa=q_BNSH.shape[1] != k_BKTH.shape[1],
    )  # fmt: skip
