"""A text's share of level 0 while it is written: the weights' budget and a cache for keys and values, decided anew for
every request.

Legend: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear
from vblackwell.offload.api import offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.layout.generation import cache_shape, level0_budget, token_bytes, workspace_bytes

if TYPE_CHECKING:
    from vblackwell.generate.stacked_cache import StackedCache


def unpacked_bytes(model: nn.Module) -> int:
    """The largest packed linear's weight while many rows are multiplied by it."""
    packed = [module for module in model.modules() if isinstance(module, StoredFP4Linear)]
    return max((linear.in_features * linear.out_features * linear.dtype.itemsize for linear in packed), default=0)


def read_in_chunks(read: Callable[[int, int], Tensor], length: int, size: int, cache: Any = None) -> Tensor:
    """``read(begin, end)`` of ``length`` positions, at most ``size`` at a time: what the last one gave.

    The pieces are about as long as one another: a short rest would cost a pass over the weights, and other kernels, for
    little. How much a pass takes is an estimate: where the GPU has no room for one, and ``cache`` (of ours) can forget
    what was read of it, it is read again in halves.

    Raises:
        OutOfMemoryError: not even one position, or another cache.
    """
    begin, found = 0, None
    size = -(-length // -(-length // size))
    while begin < length:
        end, found = min(length, begin + size), None
        try:
            found = read(begin, end)
        except torch.OutOfMemoryError:
            if size == 1 or not hasattr(cache, "rewind"):
                raise
        if found is None:  # the error, and what its frames held, is gone
            cache.rewind(begin)
            torch.cuda.empty_cache()
            size = (end - begin + 1) // 2
            continue
        begin = end
    assert found is not None, "a prompt has a token"
    return found


def step_after(model: nn.Module, cache: Any, rows: int, steps: int) -> Callable[[Tensor], Tensor] | None:
    """As `streamed_step`; None without a cache of ours."""
    if cache is None:
        return None
    from vblackwell.generate.streamed_step import streamed_step  # after transformers, which a cache of it has imported

    return streamed_step(model, cache, rows, steps)


@contextmanager
def room_for(model: nn.Module, rows: int, positions: int) -> Iterator[tuple[StackedCache | None, int | None]]:
    """Inside, level 0 is divided for a text of ``rows`` of at most ``positions``.

    Yields:
        The cache to write with, and positions that one pass may read; None each: nothing is known, and transformers'
        own, and all.

    Raises:
        InsufficientMemory: level 0, or RAM, has no room for so many rows.
    """
    engine = offload_of(model)
    cache, chunk = None, None
    if isinstance(engine, Offload) and engine.weights.frozen and engine.device.type == "cuda":
        dtype = next(param.dtype for param in model.parameters() if param.is_floating_point())
        shape = cache_shape(model.config, rows, positions, dtype)
        level = engine.stack.levels[0]
        workspace = workspace_bytes(level.capacity_bytes)
        free = level.capacity_bytes - (level.used_bytes - engine.weights.loaded_bytes) - workspace
        if shape is not None:
            from vblackwell.generate.stacked_cache import StackedCache

            if torch.cuda.memory_reserved(engine.device) - torch.cuda.memory_allocated(engine.device) > workspace // 2:
                torch.cuda.empty_cache()  # in pieces as large as another request's keys and values were
            sizes = [group.num_bytes for group in engine.groups if not engine.is_sliced(group)]
            budget = level0_budget(
                free, sizes, shape, token_bytes(model.config, dtype.itemsize), workspace, unpacked_bytes(model)
            )
            engine.weights.rebudget(budget.weight_bytes)
            cache, chunk = StackedCache(engine.stack, shape, budget.cached_layers), budget.chunk
    try:
        yield cache, chunk
    finally:
        if cache is not None:
            cache.close()
