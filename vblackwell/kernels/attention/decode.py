"""Attention of one new position over a cache whose length only the device knows: what a captured decoding step needs.

The position is read from a tensor, so that a replayed graph goes on where the last replay ended. Parts of the keys are
added up in a fixed order. No gradient. Legend: B rows, N query heads, K key heads, H head width, T cached positions.
"""

import torch
from torch import Tensor
from torch.nn import functional

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.runtime.registry import runs_triton

MAX_QUERIES = 16  # query heads that share a key head


def decode_attention(q_BNH: Tensor, keys_BKTH: Tensor, values_BKTH: Tensor, position_1: Tensor) -> Tensor:
    """What each query gathers from positions 0 to ``position_1``, (B, N, H). Raises ConfigurationError for heads that
    do not share key heads evenly, or more than 16 a key head."""
    heads, kv_heads = q_BNH.shape[1], keys_BKTH.shape[1]
    if heads % kv_heads or heads // kv_heads > MAX_QUERIES:
        raise ConfigurationError(f"{heads} query heads over {kv_heads} key heads: it takes 1 to {MAX_QUERIES} for each")
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
