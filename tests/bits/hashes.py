"""XXH3 of tensors, numbers, texts, files, and containers of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xxhash


def digest(value: Any) -> str:
    """XXH3 of tensors (type, shape, bytes), numbers, texts and containers of them."""
    state = xxhash.xxh3_128()
    _feed(state, value)
    return state.hexdigest()


def _feed(state: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        state.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value):
            state.update(f"{key}:".encode())
            _feed(state, value[key])
    elif isinstance(value, list | tuple):
        state.update(f"[{len(value)}]".encode())
        for item in value:
            _feed(state, item)
    elif isinstance(value, Path):
        state.update(value.read_bytes())
    elif isinstance(value, float):
        state.update(value.hex().encode())
    elif value is None or isinstance(value, str | int):
        state.update(f"{type(value).__name__} {value}".encode())
    else:
        raise TypeError(f"no hash for {type(value).__name__}")


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of all safetensors files under ``path``."""
    from safetensors.torch import load_file

    return {
        f"{file.relative_to(path)}/{name}": tensor
        for file in sorted(path.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def numbers_in(value: Any) -> Any:
    """``value`` without texts, nulls and speeds of this machine: what a change of words may not touch."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in ("tokens_per_second", "saved_time")}
        return {key: numbers_in(item) for key, item in kept.items() if item is not None and not isinstance(item, str)}
    if isinstance(value, list | tuple):
        return [numbers_in(item) for item in value if not isinstance(item, str)]
    return value
