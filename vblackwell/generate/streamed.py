"""A causal model opened for writing alone, whose weights may be more than level 0 holds: frozen, in a stack, packed to FP4 on request.

Nothing is kept but weights. They are read from the folder into the lower levels, and each layer is loaded before it is needed. What of
level 0 is not kept free for keys, values and workspace holds layers that stay (offload/movement/frozen.py); on a GPU
room.py divides it for each
text. A model that fits is loaded once, in its first pass. On a GPU what a `Decoder` can compute is written token by token from CUDA graphs
over the stack's bytes (streamed_step.py), as fast as if it were all resident where nothing passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from vblackwell.folders.folder import read_config, stored_dtype
from vblackwell.generate.causal_lm import load_causal_lm
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm
from vblackwell.offload.layout.generation import workspace_bytes


def open_streamed(
    folder: Path, stack: VGPUStack, *, rows: int = 1, tokens: int = 0, fp4: str | None = None, fp4_layers: str = "all",
    keep: str | None = None, adapter: Path | None = None,
) -> nn.Module:  # fmt: skip
    """The model in ``folder``, in eval mode, its weights in ``stack``; packed linears of a folder stay packed.

    Args:
        rows, tokens: sequences at once and the longest, prompt and new tokens: what room for keys and values is kept for on a GPU.
        adapter: folder of an adapter for it.
        fp4: format that its linears are packed to; fp4_layers, keep: which, as for `convert`.

    Raises:
        ConfigurationError, FolderMismatch, CorruptData, Unsupported, InsufficientMemory: as `load_causal_lm`.
    """
    config = read_config(folder)
    placement: dict[str, Any] = {"placement": "streamed"}
    level = stack.levels[0]
    if stack.level0_device.type == "cuda":
        reserved = workspace_bytes(level.capacity_bytes) + cache_bytes(config, rows, tokens)
        placement["weight_bytes"] = max(0, level.capacity_bytes - reserved)  # `room_for` divides anew for each text
    model = load_causal_lm(
        folder, stack, dtype=stored_dtype(config), trainable=False, adapter=adapter, fp4=fp4, fp4_layers=fp4_layers, keep=keep,
        **placement,
    )  # fmt: skip
    accelerate_causal_lm(model, loss=False)  # on a GPU: fewer launches, by which the host must stay ahead of the copies
    return model.eval()


def cache_bytes(config: dict[str, Any], rows: int, tokens: int) -> int:
    """Keys and values of ``rows`` sequences of ``tokens``, by the usual names of sizes; 0 where they are not among them."""
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
    heads = config.get("num_attention_heads") or config.get("n_head")
    if not heads:
        return 0
    width = config.get("hidden_size") or config.get("n_embd") or 0
    head = config.get("head_dim") or width // heads
    return (
        2 * layers * (config.get("num_key_value_heads") or heads) * head * stored_dtype(config).itemsize * rows * tokens
    )
