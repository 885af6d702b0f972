"""The step of a streamed model as CUDA graphs: one for each stretch of layers that stay, and for each layer that
passes. Through its hooks a packed 6.7B took 80 ms of the host a token on an H200.

The layers are those of a `Decoder` over the bytes that the stack holds: groups that stay keep their place while the
text is written, the others take turns in a few places at fixed addresses, loaded again when what reads them has been
queued (the copy waits for that on the device). What is captured once holds for every token. Legend: B rows, V
vocabulary.
"""

import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import InsufficientMemory, VBError
from vblackwell.generate.stacked_cache import StackedCache
from vblackwell.generate.steps import MIN_STEPS, CapturedStep, Stretch
from vblackwell.memory.level import Transfer
from vblackwell.memory.pool import Reservation
from vblackwell.nn.decoder.config import DecoderConfig, not_supported_reasons
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear.stored_fp4 import stored_part
from vblackwell.offload.api import offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.layout.generation import WEIGHT_PLACES
from vblackwell.offload.layout.groups import Group

LAYER = "model.layers."


def reasons_against(model: Any, cache: Any) -> list[str]:
    """Why the steps after ``cache`` run module by module; empty if `StreamedStep` takes them."""
    engine = offload_of(model)
    if not isinstance(engine, Offload) or not engine.weights.frozen:
        return ["the model's weights do not stream frozen"]
    reasons = not_supported_reasons(model.config.to_dict())
    if not isinstance(cache, StackedCache) or cache.passes:
        reasons.append("keys and values are not on level 0")
    if any(engine.is_sliced(group) for group in engine.groups):
        reasons.append("a group is never on level 0 as a whole")
    if reasons:
        return reasons
    twin = Decoder(DecoderConfig.from_hf(model.config.to_dict()), device="meta")
    names = {slot.name for slot in engine.slots()}
    packed = {name for name in names if stored_part(model, name) is not None}
    whole = (names - packed) | {name.rpartition(".")[0] + ".weight" for name in packed}
    known = {name for name, _ in twin.named_parameters()}
    return [] if whole == known else ["its parameters are not those of a decoder alone"]


def streamed_step(model: nn.Module, cache: Any, rows: int, steps: int) -> Callable[[Tensor], Tensor] | None:
    """What computes the logits (B, V) after one more token a row (B, 1); None where the model has to be called.

    That is so too where the places or the graphs do not fit, with a warning: the model's own passes do with less.
    ``cache`` is what the model has read, given back with the places; ``steps`` how many there will be, at most.
    """
    if not isinstance(cache, StackedCache) or steps < MIN_STEPS:
        return None
    if next(model.parameters()).device.type != "cuda" or reasons_against(model, cache):
        return None
    try:
        return StreamedStep(model, cache, rows).step
    except (InsufficientMemory, torch.OutOfMemoryError) as error:
        slower = "no room for a step in CUDA graphs: each token goes through the model's modules, which is slower"
        warnings.warn(f"{slower}: {error}"[:400], stacklevel=2)
        return None


class StreamedStep(CapturedStep):
    """Steps of B ``rows`` after what ``cache`` holds; see `reasons_against`. Raises InsufficientMemory or
    OutOfMemoryError where the places or graphs do not fit; nothing is kept."""

    @torch.no_grad()
    def __init__(self, model: Any, cache: StackedCache, rows: int) -> None:
        engine = offload_of(model)
        assert isinstance(engine, Offload) and engine.weights.frozen
        config = DecoderConfig.from_hf(model.config.to_dict())
        sizes = {"length": cache.get_seq_length(), "max_length": cache.shape.positions}
        filled: Any = SimpleNamespace(**sizes, tensors=cache.tensors)
        super().__init__(config, filled, rows)
        self._engine, self._cuda = engine, engine.device.type == "cuda"
        self._taken, self._next = list[Reservation](), 0
        self._loaded: deque[tuple[Group, Transfer]] = deque()  # from a load's begin until what reads it is queued
        self._held = held = engine.weights.hold()
        try:
            ends = {"model.embed_tokens": -1, "model.norm": 1 << 40, "lm_head": 1 << 41}
            self._cycle = [group for group in engine.groups if group not in held]
            self._cycle.sort(key=lambda group: ends.get(_owner(group)) or int(_owner(group).removeprefix(LAYER)))
            self._slot_of = _places(self._cycle)
            largest = max((group.num_bytes for group in self._cycle), default=0)
            for number in range(min(WEIGHT_PLACES, len(self._cycle))):
                self._taken.append(engine.storage.take(f"place {number}", largest, 0))
            self._places = [reservation.bytes for reservation in self._taken]
            twin = Decoder(config, device="meta")
            for group in engine.groups:
                _fill(twin, model, group, engine.weights.buffer(group) if group in held else self._place_of(group))
            self._stretches = self._cut(twin)
            self._bring()
            if self._cuda:
                self._capture()
        except BaseException:
            if self._cuda:
                torch.cuda.synchronize(self._device)  # what was tried may still read the places
            self._close()
            raise
        cache.at_close.callback(self._close)

    def _cut(self, twin: Decoder) -> list[Stretch]:
        trunk, steady = twin.model, self._steady
        stages: list[tuple[str, Callable[[Any], Any]]] = [
            ("model.embed_tokens", lambda ids_B1: (None, trunk.embed_tokens(ids_B1)))
        ]
        layers: Any = twin.layers
        for number, layer in enumerate(layers):
            stages.append((f"{LAYER}{number}", lambda pair, layer=layer: layer.step(*pair, steady)))
        stages.append(("model.norm lm_head", lambda pair: twin.last_logits(pair[0], pair[1], steady)))
        cut = [Stretch()]
        for names, call in stages:
            passing = [group for group in self._cycle if _owner(group) in names.split()]
            if (passing or cut[-1].passing) and cut[-1].calls:
                cut.append(Stretch())
            cut[-1].calls.append(call)
            cut[-1].passing += passing
        return cut

    def _before(self, stretch: Stretch) -> None:
        stream = torch.cuda.current_stream(self._device) if self._cuda else None
        for number, group in enumerate(stretch.passing):
            loaded, transfer = self._loaded[number]
            assert loaded is group, "groups are loaded in the order of use"
            transfer.wait_on(stream)
            transfer.let_go()  # the places are ours, and are loaded again after what reads them

    def _after(self, stretch: Stretch) -> None:
        for _ in stretch.passing:
            self._loaded.popleft()
        self._bring()

    def _place_of(self, group: Group) -> Tensor:
        return self._places[self._slot_of[group.index]][: group.num_bytes]

    def _bring(self) -> None:
        """Begin the copies whose places are no longer read."""
        while self._cycle:
            group = self._cycle[self._next]
            if any(self._slot_of[group.index] == self._slot_of[other.index] for other, _ in self._loaded):
                return
            storage = self._engine.storage.range(group, "weight")
            self._loaded.append((group, self._engine.stack.read(storage, self._place_of(group))))
            self._next = (self._next + 1) % len(self._cycle)

    def _close(self) -> None:
        """Give back what was held and taken, when the device has nothing to do for it any more."""
        try:
            while self._loaded:
                with suppress(VBError, OSError):  # who needed it was told
                    self._loaded.popleft()[1].wait()
        finally:
            self._stretches.clear()
            self._engine.weights.let_go(self._held)
            for reservation in self._taken:
                self._engine.storage.give(reservation)


def _owner(group: Group) -> str:
    """The stage that needs the group: a layer's name, or that of the module whose parameter is its first."""
    name = group.slots[0].name
    if name.startswith(LAYER):
        return LAYER + name.removeprefix(LAYER).partition(".")[0]
    return name.rpartition(".")[0]


def _places(cycle: list[Group]) -> dict[int, int]:
    """Each group's place, by index: in turn, so that neighbours (the last and the first too) have different ones."""
    slots = {group.index: number % WEIGHT_PLACES for number, group in enumerate(cycle)}
    if len(cycle) > WEIGHT_PLACES and len(cycle) % WEIGHT_PLACES == 1:
        slots[cycle[-1].index] = 1
    return slots


def _fill(twin: Decoder, model: nn.Module, group: Group, buffer: Tensor) -> None:
    parts: dict[str, Tensor] = {}
    for slot in group.slots:
        stored = stored_part(model, slot.name)
        if stored is None:
            owner, _, leaf = slot.name.rpartition(".")
            twin.get_submodule(owner)._parameters[leaf] = nn.Parameter(slot.view(buffer), requires_grad=False)
            continue
        linear, owner, part = stored
        parts[part] = slot.view(buffer)
        if len(parts) == len(linear.parts):
            parent, _, leaf = owner.rpartition(".")
            setattr(twin.get_submodule(parent), leaf, linear.over(parts))
            parts = {}
