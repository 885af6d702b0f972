"""Level 0 while a text is written: weights that stay, keys and values, and bytes to compute in. What does not stay
crosses the link once a token: so keys and values live there if they fit next to the weights that pass through.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vblackwell.errors import InsufficientMemory
from vblackwell.units import MiB, format_bytes

WEIGHT_PLACES = 3  # for groups that pass through: one computes, one arrives, one is next
CACHE_PLACES = 2  # through which the caches of layers pass that do not stay
MIN_WORKSPACE = 512 * MiB  # of a GPU: what a pass takes in addition to weights, keys and values
_NOT_PLAIN = ("kv_lora_rank", "multi_query", "cross_attention_layers", "attention_chunk_size")
_WINDOWS = ("full_attention", "sliding_attention")


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


def cache_shape(
    config: Any, rows: int, positions: int, dtype: torch.dtype, *, windows: bool = False
) -> CacheShape | None:
    """Sizes of a transformers model's keys and values; None where layers are not all alike, or not plain attention.
    ``windows``: of one with sliding windows what it takes at the most, all positions of each layer."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if any(getattr(text, name, None) for name in _NOT_PLAIN):
        return None
    if not windows and getattr(text, "sliding_window", None):
        return None
    heads, width = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int) or getattr(config, "is_encoder_decoder", False):
        return None
    kinds = get_layer_types_and_kwargs(text)[0]
    if any(kind not in _WINDOWS[: 1 + windows] for kind in kinds):
        return None
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return CacheShape(len(kinds), rows, kv_heads, positions, getattr(text, "head_dim", None) or width // heads, dtype)


def layers_on_level0(shape: CacheShape, free_bytes: int) -> int:
    """How many layers' caches fit ``free_bytes`` next to the places for the others; InsufficientMemory for no place."""
    if shape.num_bytes <= free_bytes:
        return shape.layers
    if CACHE_PLACES * shape.layer_bytes > free_bytes:
        raise InsufficientMemory(
            f"keys and values of {shape.rows} rows of {shape.positions} positions pass through "
            f"{format_bytes(CACHE_PLACES * shape.layer_bytes)} of level 0, and {format_bytes(max(0, free_bytes))} "
            "are free next to weights: give fewer rows at once, or raise fast_memory",
            needed_bytes=CACHE_PLACES * shape.layer_bytes,
            available_bytes=max(0, free_bytes),
        )
    return free_bytes // shape.layer_bytes - CACHE_PLACES


@dataclass(frozen=True)
class GenerationBudget:
    """What level 0's bytes are for."""

    weight_bytes: int  # loaded weights
    cached_layers: int  # whose keys and values live on level 0; of the others, two at a time
    chunk: int  # positions a row that one pass reads


def divide_level0(
    free_bytes: int, weights: list[int], shape: CacheShape, token_bytes: int, workspace: int, once: int = 0
) -> GenerationBudget:
    """How one request divides level 0, of which ``free_bytes`` are free without the ``workspace`` for activations;
    ``weights``: bytes of the groups that can be loaded. InsufficientMemory: as `layers_on_level0`.

    Args:
        token_bytes: of activations, a position of a row.
        once: bytes that a pass takes whatever it reads: a weight that is unpacked before it is multiplied by.
    """
    chunk = max(1, (workspace * 3 // 4 - once) // max(1, token_bytes * shape.rows))
    total, largest = sum(weights), max(weights, default=0)
    if shape.num_bytes <= free_bytes - min(total, WEIGHT_PLACES * largest):
        return GenerationBudget(free_bytes - shape.num_bytes, shape.layers, chunk)
    # Weights first: what a cache holds is not full at once.
    kept = min(total, max(free_bytes - CACHE_PLACES * shape.layer_bytes, largest))
    return GenerationBudget(kept, layers_on_level0(shape, free_bytes - kept), chunk)


def workspace_bytes(capacity_bytes: int) -> int:
    """What is kept free of a GPU's cap."""
    return max(MIN_WORKSPACE, capacity_bytes // 8)


def token_bytes(config: Any, itemsize: int) -> int:
    """About what a position takes of a pass: the feed-forward's four, and eight of the width."""
    width = getattr(config, "hidden_size", 0) or 0
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * width
    return (4 * inner + 8 * width) * itemsize
