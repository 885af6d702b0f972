"""Parameters while they are in use: plain tensors over loaded bytes, and placeholders before and after.

The model's parameters stay the same objects. Inside `UsedParameters.using` they are `nn.Parameter`s whose data are views of level 0;
outside they are `OffloadedParameter`s over a scalar that takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from vblackwell.offload.hooks import gradient_hook
from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.parameters import begin_use, end_use, written_through_data
from vblackwell.offload.storage.masters import write_masters

if TYPE_CHECKING:
    from vblackwell.offload.engine import Offload


@contextmanager
def _unseen() -> Iterator[None]:
    """Inside, the caller's modes and transforms see no operators: selective checkpointing counts those of both passes, and loads differ;
    torch.func would wrap every tensor that is made."""
    torch_c: Any = torch._C
    with torch_c._DisableTorchDispatch(), torch_c._DisableFuncTorch():
        yield


class UsedParameters:
    """Which parameters of one model are in use, and by how many."""

    def __init__(self, engine: Offload) -> None:
        self._engine = engine
        self._pins: dict[Slot, int] = {}
        self._seen_versions: dict[Slot, int] = {}
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}
        self._hooks: dict[Slot, Any] = {}

    @contextmanager
    def using(self, slots: Iterable[Slot]) -> Iterator[None]:
        """Inside, the slots' groups are loaded, their parameters plain, and saved tensors packed."""
        taken: list[Slot] = []
        groups: list[Group] = []
        autocast_cache = torch.is_autocast_cache_enabled()
        try:
            with self._engine.lock, _unseen():
                for slot in slots:
                    if not groups or slot.group is not groups[-1]:
                        self._engine.weights.acquire(slot.group)
                        groups.append(slot.group)
                    self._pin(slot)
                    taken.append(slot)
            # The cache is keyed by parameter and would hold the casts of every group until the context ends.
            torch.set_autocast_cache_enabled(False)
            with self._engine.packing():
                yield
        finally:
            torch.set_autocast_cache_enabled(autocast_cache)
            with self._engine.lock, _unseen():
                try:
                    self._write_back([slot for slot in taken if self._pins[slot] == 1 and self._was_written(slot)])
                finally:
                    for slot in taken:
                        self._unpin(slot)
                    for group in groups:
                        self._engine.weights.release(group)

    def _pin(self, slot: Slot) -> None:
        pins = self._pins.get(slot, 0)
        self._pins[slot] = pins + 1
        if pins == 0:
            self._point(slot, self._engine.weights.buffer(slot.group))
            self._seen_versions[slot] = slot.param._version

    def _was_written(self, slot: Slot) -> bool:
        """Whether the plain parameter was changed in place (by its module's forward, or by a call outside)."""
        return slot.param._version != self._seen_versions[slot] or written_through_data(slot.param)

    def _write_back(self, slots: list[Slot]) -> None:
        """The slots' loaded bytes were changed in place: write them to storage, and into their masters."""
        engine = self._engine
        for group in dict.fromkeys(slot.group for slot in slots):
            engine.step_control.settle(group)  # an update of the step before may still be written
            buffer = engine.weights.acquire(group)
            engine.stack.write(engine.homes.range(group, "weight"), buffer).wait()
            engine.weights.release(group)
            changed = [slot for slot in slots if slot.group is group]
            engine.worker.submit(write_masters, engine.homes, group, changed).result()

    def _unpin(self, slot: Slot) -> None:
        self._pins[slot] -= 1
        if self._pins[slot] == 0:
            self.unpoint(slot)

    def _point(self, slot: Slot, buffer: torch.Tensor) -> None:
        begin_use(slot.param, slot.plain_class, slot.view(buffer))
        if slot.param.requires_grad and slot not in self._hooks:
            hook = gradient_hook(self._engine, slot)
            self._hooks[slot] = slot.param.register_post_accumulate_grad_hook(hook)

    def unpoint(self, slot: Slot) -> None:
        placeholder = self._placeholders.get(slot.dtype)
        if placeholder is None:
            filling = float("nan") if slot.dtype.is_floating_point else 0
            with torch.inference_mode(False):
                placeholder = torch.full((), filling, dtype=slot.dtype, device=self._engine.device)
            self._placeholders[slot.dtype] = placeholder
        end_use(slot.param, placeholder.expand(slot.shape), self._engine, slot)

    def remove_hooks(self) -> None:
        """Nobody takes gradients any more."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
