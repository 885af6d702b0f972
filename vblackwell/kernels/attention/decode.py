"""Attention of one new position over a cache whose length only the device knows: what a captured decoding step needs.

``store_rotated`` turns queries and keys to their position and puts keys and values into the cache; ``decode_attention`` attends to the
positions up to that one. Both read the position from a tensor, so that a replayed graph goes on where the last replay ended. On CUDA they
are Triton kernels: keys are read once, in parts that run side by side and are added up in a fixed order. Elsewhere they are torch's
expressions. Neither has gradients.

Legend: B rows, N query heads, K key-value heads, H head width, T positions of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise.rotary import rotary
from vblackwell.kernels.runtime.registry import runs_triton

MOST_QUERIES = 16  # query heads that share a key head


def store_rotated(
    q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor, keys_BKTH: Tensor, values_BKTH: Tensor, cos_TH: Tensor, sin_TH: Tensor,
    position_1: Tensor,
) -> Tensor:  # fmt: skip
    """Put the rotated keys and the values at ``position_1``; returns the rotated queries (B, N, H).

    Args:
        cos_TH, sin_TH: tables of all positions in fp32, as of `rotary_tables`.
        position_1: int64 on the same device.

    Raises:
        ConfigurationError: sizes do not fit each other.
    """
    if q_BNH.shape[-1] % 2 or k_BKH.shape != v_BKH.shape or keys_BKTH.shape[:2] != k_BKH.shape[:2]:
        raise ConfigurationError(
            f"queries {tuple(q_BNH.shape)}, keys {tuple(k_BKH.shape)} and values {tuple(v_BKH.shape)} "
            f"for a cache of {tuple(keys_BKTH.shape)}"
        )
    if runs_triton("store_rotated", q_BNH, q_BNH.shape[-1]):
        from vblackwell.kernels.attention.decode_triton import store

        return store(q_BNH, k_BKH, v_BKH, keys_BKTH, values_BKTH, cos_TH, sin_TH, position_1)
    tables = (cos_TH.index_select(0, position_1), sin_TH.index_select(0, position_1))
    q_BN1H, k_BK1H = rotary(q_BNH.unsqueeze(2), k_BKH.unsqueeze(2), *tables)
    keys_BKTH.index_copy_(2, position_1, k_BK1H)
    values_BKTH.index_copy_(2, position_1, v_BKH.unsqueeze(2))
    return q_BN1H.squeeze(2)


def decode_attention(q_BNH: Tensor, keys_BKTH: Tensor, values_BKTH: Tensor, position_1: Tensor) -> Tensor:
    """What each query gathers from positions 0 to ``position_1``, (B, N, H).

    Raises:
        ConfigurationError: heads that do not share key heads evenly, or more than 16 a key head.
    """
    heads, kv_heads = q_BNH.shape[1], keys_BKTH.shape[1]
    if heads % kv_heads or heads // kv_heads > MOST_QUERIES:
        raise ConfigurationError(
            f"{heads} query heads over {kv_heads} key heads: it takes 1 to {MOST_QUERIES} for each"
        )
    if runs_triton("decode_attention", q_BNH, q_BNH.shape[-1]):
        from vblackwell.kernels.attention.decode_triton import attend

        return attend(q_BNH, keys_BKTH, values_BKTH, position_1)
    seen_11T = (torch.arange(keys_BKTH.shape[2], device=q_BNH.device) <= position_1)[None, None]
    # Where nothing was stored yet may be anything, NaN for example, and a weight of 0 does not help against that.
    keys_BKTH, values_BKTH = (x.masked_fill(~seen_11T[..., None], 0.0) for x in (keys_BKTH, values_BKTH))
    y_BN1H = functional.scaled_dot_product_attention(
        q_BNH.unsqueeze(2), keys_BKTH, values_BKTH, attn_mask=seen_11T, enable_gqa=heads != kv_heads
    )
    return y_BN1H.squeeze(2)
