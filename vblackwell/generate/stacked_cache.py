"""Keys and values in levels: those of some layers live on level 0, the others' in RAM, and come up ahead of their
layer. It is a ``Cache`` of transformers, for one batch, a greatest length, and layers that attend to all positions.

A layer's cache is one range, position after position, (T, 2, B, K, H): what has been read is a prefix, which crosses
the link as one copy, and new positions are appended with another. The layout is the same on level 0: attention gets the
same strides and writes the same bits. B rows, K key-value heads, S new positions, T positions, H head width.
"""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from vblackwell.errors import ConfigurationError
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.pool import Reservation
from vblackwell.memory.transfer import Transfer, copy_streams
from vblackwell.offload.layout.generation import CACHE_PLACES, CacheShape

_serial = itertools.count()


class StackedCache(Cache):
    """A cache of ``shape`` in ``stack``; call `close` when the text is written. ``on_level0`` layers live there, spread
    evenly, the others in the first level that is RAM; InsufficientMemory where one cannot hold them; nothing is kept.
    """

    def __init__(self, stack: VGPUStack, shape: CacheShape, on_level0: int) -> None:
        self.shape, self._stack = shape, stack
        self.at_close = ExitStack()  # what `close` does, the latest first, when the device has nothing to do for it
        count = shape.layers - on_level0
        streamed = {(2 * place + 1) * shape.layers // (2 * count): place for place in range(count)}  # evenly spread
        try:
            devices = [level.device and level.device.type for level in stack.levels]
            if streamed and "cpu" not in devices[1:]:
                raise ConfigurationError(
                    "keys and values outgrow level 0, and the stack has no level in RAM: add one (host_memory)"
                )
            ram = devices.index("cpu", 1) if streamed else 0
            held = [self._reserve(f"layer {layer}", ram if layer in streamed else 0) for layer in range(shape.layers)]
            places = [self._reserve(f"place {number}", 0)[1] for number in range(min(CACHE_PLACES, count))]
        except BaseException:
            self.close()
            raise
        passing = _Passing(stack, places, [held[layer] for layer in streamed])
        self._made = [_Layer(shape, view, passing, streamed.get(layer)) for layer, (_, view) in enumerate(held)]
        passing.lengths = [self._made[layer].get_seq_length for layer in streamed]
        super().__init__(layers=[*self._made])

    def close(self) -> None:
        """Give all ranges back; the cache is not to be used any more. Idempotent."""
        if self._stack.level0_device.type == "cuda":
            torch.cuda.synchronize(self._stack.level0_device)  # copies under way end before their ranges do
        self.at_close.close()

    def rewind(self, length: int) -> None:
        """Forget what was read after the first ``length`` positions, by those layers that have read it."""
        for layer in self._made:
            layer.length = min(layer.length, length)

    def tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that lives on level 0, all positions, (B, K, T, H) each."""
        made = self._made[layer]
        assert made.order is None, "it passes through"
        return made.seen(made.held_TPBKH)

    @property
    def passes(self) -> bool:
        """Whether some layers live in RAM."""
        return any(layer.order is not None for layer in self._made)

    def _reserve(self, what: str, level: int) -> tuple[Reservation, Tensor]:
        """A range for a layer's cache, and its view (T, 2, B, K, H)."""
        shape = self.shape
        reservation = self._stack.reserve(f"keys and values#{next(_serial)} {what}", shape.layer_bytes, level)
        self.at_close.callback(self._stack.unreserve, reservation)
        view = reservation.bytes.view(shape.dtype)
        return reservation, view.view(shape.positions, 2, shape.rows, shape.heads, shape.width)


class _Layer(DynamicLayer):
    """The cache of a layer, where it is read; or, with an ``order``, in RAM, from where it passes through level 0."""

    def __init__(self, shape: CacheShape, held_TPBKH: Tensor, passing: "_Passing", order: int | None) -> None:
        super().__init__()
        self.held_TPBKH, self.order = held_TPBKH, order
        self._shape, self._passing, self.length = shape, passing, 0
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """New keys and values (B, K, S, H); all so far, (B, K, T, H) each."""
        begin, end = self.length, self.length + key_states.shape[2]
        if end > self._shape.positions:
            raise ConfigurationError(f"position {end} is beyond the cache's {self._shape.positions}")
        here_TPBKH = self.held_TPBKH if self.order is None else self._passing.enter(self.order)
        for part, new in enumerate((key_states, value_states)):
            here_TPBKH[begin:end, part].copy_(new.permute(2, 0, 1, 3))
        if self.order is not None:
            self._passing.append(self.order, here_TPBKH, begin, end)
        self.length = end
        return self.seen(here_TPBKH[:end])

    @staticmethod
    def seen(held_TPBKH: Tensor) -> tuple[Tensor, Tensor]:
        keys_BKTH, values_BKTH = held_TPBKH.permute(1, 2, 3, 0, 4)
        return keys_BKTH, values_BKTH

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        self.length = 0


class _Passing:
    """Brings the caches in ``storage``, ranges and their views, to ``places`` in turn, always in the same order.

    On CUDA everything is queued: a copy up starts after what the computing stream and the stream of all copies down
    have to do, so the place that it takes is not read any more, and its new positions are written back.
    """

    def __init__(self, stack: VGPUStack, places: list[Tensor], storage: list[tuple[Reservation, Tensor]]) -> None:
        self._stack, self._places, self._storage = stack, places, storage
        self.lengths: list[Callable[[], int]] = []  # of what the layers have seen
        self._held: dict[int, int] = {}  # layer: the place where its cache is or will be; the latest used last
        self._loads: dict[int, Transfer] = {}  # by place
        self._device = stack.level0_device
        self._cuda = self._device.type == "cuda"

    def enter(self, order: int) -> Tensor:
        """The place with the cache of layer ``order``; the next one's sets out."""
        self._bring(order)
        place = self._held[order]
        self._loads[place].wait_on(torch.cuda.current_stream(self._device) if self._cuda else None)
        if len(self._places) > 1:
            self._bring((order + 1) % len(self._storage))
        return self._places[place]

    def _bring(self, order: int) -> None:
        """Let the layer's cache be the latest of those that are on level 0 or on their way."""
        place = self._held.pop(order, None)
        if place is None:
            free = [number for number in range(len(self._places)) if number not in self._held.values()]
            place = free[0] if free else self._held.pop(next(iter(self._held)))
            if self._cuda:
                streams = copy_streams(self._device)
                streams.h2d.wait_stream(streams.d2h)
            known = self._places[place][: self.lengths[order]()]
            self._loads[place] = self._stack.read(self._storage[order][0], known)
            if not self._cuda:
                self._loads[place].wait()
        self._held[order] = place

    def append(self, order: int, held_TPBKH: Tensor, begin: int, end: int) -> None:
        reservation, stored_TPBKH = self._storage[order]
        source, target = held_TPBKH[begin:end], stored_TPBKH[begin:end]
        self._stack.count_link(0, reservation.level, source.nbytes, None if self._cuda else 0.0)
        if not self._cuda:
            target.copy_(source)
            return
        stream = copy_streams(self._device).d2h
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
