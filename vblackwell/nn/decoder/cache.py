"""Keys and values of the tokens read so far, so that decoding computes one position a step.

`SteadyCache` is the same memory for steps that are captured once and replayed: the position is a number on the device.

Legend: B batch, S sequence, N query heads, K key-value heads, T positions, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.attention.decode import decode_attention
from vblackwell.kernels.pointwise.rows import store_rotated
from vblackwell.nn.attention.layer import AttentionCache
from vblackwell.nn.attention.rotary import rotary_tables
from vblackwell.nn.decoder.config import DecoderConfig


class KVCache:
    """An `AttentionCache` for every layer of a ``Decoder``.

    Args:
        config: the decoder's shape.
        max_length: positions; at most ``config.max_position``.
    """

    def __init__(self, config: DecoderConfig, max_length: int) -> None:
        if not 1 <= max_length <= config.max_position:
            raise ConfigurationError(f"a cache of {max_length} positions: the model's limit is {config.max_position}")
        self._layers = [AttentionCache(max_length) for _ in range(config.num_layers)]
        self.max_length = max_length
        self.length = 0  # positions read so far, by all layers

    def extend(self, layer: int, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values of a layer; returns all of them so far, (B, K, length + S, H) each."""
        cache = self._layers[layer]
        cache.length = self.length
        return cache.extend(k_BKSH, v_BKSH)

    def advance(self, num_positions: int) -> None:
        """Every layer has stored ``num_positions`` more."""
        self.length += num_positions

    def room(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that has stored some, all positions (B, K, T, H) each."""
        found = self._layers[layer].tensors
        assert found is not None, "a prompt was read"
        return found


class SteadyCache:
    """A filled ``cache`` for one more position a call, wherever that is: nothing that a call launches depends on the length.

    Attributes:
        position_1: where the next position goes, int64 on the device; `advance` adds one, on the device.
    """

    def __init__(self, cache: KVCache, config: DecoderConfig) -> None:
        self._cache = cache
        device = cache.room(0)[0].device
        self.position_1 = torch.tensor([cache.length], device=device)
        self._tables = rotary_tables(0, cache.max_length, config.head_size, config.rope_theta, device)

    def restart(self) -> None:
        """The next position is the one after what the cache holds."""
        self.position_1.fill_(self._cache.length)

    def attend(self, layer: int, q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor) -> Tensor:
        """Stores a position's keys and values; returns what its queries gather, (B, N, H)."""
        room = self._cache.room(layer)
        q_BNH = store_rotated(q_BNH, k_BKH, v_BKH, *room, *self._tables, self.position_1)
        return decode_attention(q_BNH, *room, self.position_1)

    def advance(self) -> None:
        """Every layer has stored the position."""
        self.position_1.add_(1)
