"""Sizes of keys and values, and how many layers' fit level 0."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vblackwell.errors import InsufficientMemory
from vblackwell.units import format_bytes

PLACES = 2  # on level 0, through which the caches of other layers pass
_ODD = ("kv_lora_rank", "multi_query", "cross_attention_layers", "sliding_window", "attention_chunk_size")


class CacheShape(NamedTuple):
    """Sizes of a cache: layers, rows, key-value heads, positions, head width; and the type."""

    layers: int
    rows: int
    heads: int
    positions: int
    width: int
    dtype: torch.dtype

    @property
    def position_bytes(self) -> int:
        """Of one layer."""
        return 2 * self.rows * self.heads * self.width * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        return self.positions * self.position_bytes

    @property
    def num_bytes(self) -> int:
        return self.layers * self.layer_bytes


def layers_on_level0(shape: CacheShape, room_bytes: int) -> int:
    """How many layers' caches live in ``room_bytes`` of level 0 beside the places through which the others pass.

    Raises:
        InsufficientMemory: not even those places fit.
    """
    if shape.num_bytes <= room_bytes:
        return shape.layers
    if PLACES * shape.layer_bytes > room_bytes:
        raise InsufficientMemory(
            f"keys and values of {shape.rows} rows of {shape.positions} positions pass through "
            f"{format_bytes(PLACES * shape.layer_bytes)} of level 0, and {format_bytes(max(0, room_bytes))} "
            "are free beside weights: give fewer rows at once, or raise fast_memory",
            needed_bytes=PLACES * shape.layer_bytes,
            available_bytes=max(0, room_bytes),
        )
    return room_bytes // shape.layer_bytes - PLACES


def cache_shape(config: Any, rows: int, positions: int, dtype: torch.dtype) -> CacheShape | None:
    """Sizes of the keys and values of a model of transformers; None where its layers are not all alike, or not plain attention."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if any(getattr(text, name, None) for name in _ODD):
        return None
    heads, width = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int) or getattr(config, "is_encoder_decoder", False):
        return None
    kinds = get_layer_types_and_kwargs(text)[0]
    if any(kind != "full_attention" for kind in kinds):
        return None
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return CacheShape(len(kinds), rows, kv_heads, positions, getattr(text, "head_dim", None) or width // heads, dtype)
