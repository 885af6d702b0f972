"""Activation checkpointing that leaves no trace: a block is computed again in backward exactly as it was the first time.

``torch.utils.checkpoint`` (non-reentrant) restores the random generators but not buffers, so a BatchNorm under it counts
every batch twice. Here the second pass runs on copies of the buffers as they were before the first, and what it writes is
thrown away. The module's own buffers are swapped out, not written back: writing them would invalidate what autograd saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

Slot = tuple[nn.Module, str]


def checkpoint(function: Callable[..., Any], *args: Any, modules: tuple[nn.Module, ...] | None = None) -> Any:
    """``function(*args)``, keeping only ``args`` for backward, where the rest is computed again.

    Args:
        function: a module, or a function.
        args: what it is called with.
        modules: whose buffers ``function`` may write; by default ``function`` itself if it is a module.
    """
    if modules is None:
        modules = (function,) if isinstance(function, nn.Module) else ()
    before = _snapshot(modules)
    return torch_checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=lambda: (nullcontext(), _BuffersReplaced(before)),
    )


def _snapshot(modules: tuple[nn.Module, ...]) -> dict[Slot, tuple[Tensor, Tensor]]:
    """For each place that holds a buffer: the buffer, and a copy of it as it is now (one copy where places share it)."""
    copies: dict[int, Tensor] = {}
    found: dict[Slot, tuple[Tensor, Tensor]] = {}
    for root in modules:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    copy = copies.setdefault(id(buffer), buffer.detach().clone())
                    found[module, name] = (buffer, copy)
    return found


class _BuffersReplaced:
    """Inside, fresh copies of the snapshot are in the buffers' places. Entered anew by every backward of a retained graph."""

    def __init__(self, before: dict[Slot, tuple[Tensor, Tensor]]) -> None:
        self._before = before
        self._current: dict[Slot, Tensor | None] = {}

    def __enter__(self) -> None:
        fresh: dict[int, Tensor] = {}
        self._current = {(module, name): module._buffers[name] for module, name in self._before}
        for (module, name), (_, copy) in self._before.items():
            module._buffers[name] = fresh.setdefault(id(copy), copy.clone())

    def __exit__(self, *error: object) -> None:
        for (module, name), buffer in self._current.items():
            module._buffers[name] = buffer
        self._current.clear()
