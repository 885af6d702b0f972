"""What level 0 holds while a text is written: weights that stay, keys and values, and room to compute in.

Decided anew for every request by arithmetic on sizes, because a batch of many rows needs its room for keys and values, and a single row
has it for weights. Every byte that does not stay crosses the link once a token, whichever it is: so keys and values live on level 0 if they
fit beside the weights that pass through, and otherwise pass through as well.

Legend: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vblackwell.generate.cache_shape import PLACES as CACHE_PLACES
from vblackwell.generate.cache_shape import CacheShape, cache_shape, layers_on_level0
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear
from vblackwell.offload.api import offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.movement.weights import PLACES
from vblackwell.units import MiB

if TYPE_CHECKING:
    from vblackwell.generate.stacked_cache import StackedCache

LEAST_WORKSPACE = 512 * MiB  # of a GPU: what a pass takes beside weights, keys and values


@dataclass(frozen=True)
class Room:
    """What level 0's bytes are for.

    Attributes:
        weight_bytes: loaded weights.
        cached_layers: layers whose keys and values live on level 0; of the others, two at a time.
        chunk: positions a row that one pass reads.
    """

    weight_bytes: int
    cached_layers: int
    chunk: int


def workspace_bytes(capacity_bytes: int) -> int:
    """What is kept free of a GPU's cap."""
    return max(LEAST_WORKSPACE, capacity_bytes // 8)


def divide(
    free_bytes: int, weights: list[int], shape: CacheShape, token_bytes: int, workspace: int, once: int = 0
) -> Room:
    """The room of one request.

    Args:
        free_bytes: of level 0, without the workspace.
        weights: bytes of the groups that can be loaded.
        shape: of keys and values.
        token_bytes: of activations, a position of a row.
        workspace: bytes for activations.
        once: of these, what a pass takes whatever it reads: a weight that is unpacked before it is multiplied by.

    Raises:
        InsufficientMemory: as `layers_on_level0`.
    """
    chunk = max(1, (workspace * 3 // 4 - once) // max(1, token_bytes * shape.rows))
    total = sum(weights)
    if shape.num_bytes <= free_bytes - min(total, PLACES * max(weights, default=0)):
        return Room(free_bytes - shape.num_bytes, shape.layers, chunk)
    through = CACHE_PLACES * shape.layer_bytes
    kept = min(
        total, max(free_bytes - through, max(weights, default=0))
    )  # weights first: what a cache holds is not full at once
    return Room(kept, layers_on_level0(shape, free_bytes - kept), chunk)


def token_bytes(config: Any, itemsize: int) -> int:
    """About what a position takes of a pass: the feed-forward's four, and eight of the width."""
    width = getattr(config, "hidden_size", 0) or 0
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * width
    return (4 * inner + 8 * width) * itemsize


def unpacked_bytes(model: nn.Module) -> int:
    """The largest packed linear's weight while many rows are multiplied by it."""
    packed = [module for module in model.modules() if isinstance(module, StoredFP4Linear)]
    return max((linear.in_features * linear.out_features * linear.dtype.itemsize for linear in packed), default=0)


def read_in_chunks(read: Callable[[int, int], Tensor], length: int, size: int, cache: Any = None) -> Tensor:
    """``read(begin, end)`` of ``length`` positions, at most ``size`` at a time: what the last one gave.

    The pieces are about as long as one another: a short rest would cost a pass over the weights, and other kernels, for little.
    How much a pass takes is an estimate: where the GPU has no room for one, and ``cache`` (of ours) can forget what was read of it, it
    is read again in halves.

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


def step_behind(model: nn.Module, cache: Any, rows: int, steps: int) -> Callable[[Tensor], Tensor] | None:
    """As `streamed_step`; None without a cache of ours."""
    if cache is None:
        return None
    from vblackwell.generate.streamed_step import streamed_step  # behind transformers, which a cache of it has imported

    return streamed_step(model, cache, rows, steps)


@contextmanager
def room_for(model: nn.Module, rows: int, positions: int) -> Iterator[tuple[StackedCache | None, int | None]]:
    """Inside, level 0 is divided for a text of ``rows`` of at most ``positions``.

    Yields:
        The cache to write with, and positions that one pass may read; None each: nothing is known, and transformers' own, and all.

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
            room = divide(
                free, sizes, shape, token_bytes(model.config, dtype.itemsize), workspace, unpacked_bytes(model)
            )
            engine.weights.rebudget(room.weight_bytes)
            cache, chunk = StackedCache(engine.stack, shape, room.cached_layers), room.chunk
    try:
        yield cache, chunk
    finally:
        if cache is not None:
            cache.close()
