"""Keys and values of the tokens read so far, so that decoding computes one position a step.

Allocated once for the longest sequence, at the first keys and in their type: growing by concatenation copies the whole cache
at every token.

Legend: B batch, S sequence, K key-value heads, H head width.
"""

from __future__ import annotations

from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.nn.decoder_config import DecoderConfig


class KVCache:
    """Room for ``max_length`` positions of every layer of a ``Decoder``.

    Args:
        config: the decoder's shape.
        max_length: positions; at most ``config.max_position``.
    """

    def __init__(self, config: DecoderConfig, max_length: int) -> None:
        if not 1 <= max_length <= config.max_position:
            raise ConfigurationError(f"a cache of {max_length} positions: the model's limit is {config.max_position}")
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * config.num_layers
        self.max_length = max_length
        self.length = 0  # positions read so far, by all layers

    def extend(self, layer: int, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values behind the old; returns all of them so far, (B, K, length + S, H) each."""
        end = self.length + k_BKSH.shape[2]
        if end > self.max_length:
            raise ConfigurationError(f"position {end} is beyond the cache's {self.max_length}: make a longer KVCache")
        room = self._layers[layer]
        if room is None:
            shape = (*k_BKSH.shape[:2], self.max_length, k_BKSH.shape[3])
            room = self._layers[layer] = (k_BKSH.new_empty(shape), v_BKSH.new_empty(shape))
        keys, values = room[0][:, :, :end], room[1][:, :, :end]
        keys[:, :, self.length :] = k_BKSH
        values[:, :, self.length :] = v_BKSH
        return keys, values

    def advance(self, num_positions: int) -> None:
        """Every layer has stored ``num_positions`` more."""
        self.length += num_positions
