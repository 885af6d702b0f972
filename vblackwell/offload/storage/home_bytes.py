"""A model's bytes at home, read and written past level 0: for in-place writes, state dicts, and leaves that level 0 cannot hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.storage.masters import close_weights, open_weights, write_truth
from vblackwell.offload.storage.ranges import Homes

if TYPE_CHECKING:
    from vblackwell.offload.engine import Offload


def carry_home(engine: Offload, slots: list[Slot]) -> None:
    """The slots' loaded bytes were changed in place: write them where they live, and into their masters."""
    for group in dict.fromkeys(slot.group for slot in slots):
        changed = [slot for slot in slots if slot.group is group]
        engine.step_control.settle(group)  # an update of the step before may still be on its way home
        buffer = engine.weights.acquire(group)
        engine.stack.write(engine.homes.range(group, "weight"), buffer).wait()
        engine.weights.release(group)
        engine.worker.submit(_write_masters, engine.homes, group, changed).result()


def _write_masters(homes: Homes, group: Group, changed: list[Slot]) -> None:
    opened = open_weights(homes, group)
    for slot in changed:
        write_truth(slot, slot.view(opened["weight"]).clone(memory_format=torch.preserve_format), opened)
    close_weights(homes, group, opened, store=len(opened) > 1)


def overwrite_home(engine: Offload, slot: Slot, source: torch.Tensor) -> None:
    """Replace a slot's weight, and its master, by the CPU tensor ``source`` (worker thread)."""
    homes, group = engine.homes, slot.group
    load = engine.weights.last_load(group)
    if load is not None:
        load.wait()
    opened = open_weights(homes, group)
    write_truth(slot, source, opened)
    close_weights(homes, group, opened, store=True)


def read_home(engine: Offload, slot: Slot) -> torch.Tensor:
    """A slot's compute weight as a CPU tensor of its own, after every update that was promised."""
    engine.step_control.settle(slot.group)
    engine.worker.drain()  # ranges may be staged, and staging is the worker's
    weight = engine.homes.open(slot.group, "weight")
    copied = slot.view(weight).clone(memory_format=torch.preserve_format)
    engine.homes.close_range(slot.group, "weight", weight, store=False)
    return copied


def zero_home(homes: Homes, group: Group, kind: str) -> None:
    """Make a range zero (worker thread)."""
    view = homes.range(group, kind).view()
    if view is not None and view.is_cuda:  # what lives on a GPU need not be zeroed through the host
        view.zero_()
        torch.cuda.current_stream(view.device).synchronize()
        return
    flat = homes.open(group, kind, load=False)
    flat.zero_()
    homes.close_range(group, kind, flat, store=True)
