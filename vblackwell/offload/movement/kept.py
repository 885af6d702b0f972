"""Groups that come to live on level 0 when whole steps have shown what they leave of it.

Between two steps a GPU stands still until the states of the forward's first groups are down and their weights up again.
Nobody waits for groups that live on level 0, but what activations leave there is not known when a model is put into its
stack. So `STEPS` steps are watched; then the first groups move up, as far as what torch has reserved by then and a
margin leave room under the cap. Their ranges below stay theirs, so that nothing can be missing when they move back:
before a forward of which those steps said nothing (larger inputs, another mode), when half of the margin is gone, for
another model in the stack, and for a step that ran out of memory. Each time twice as many steps are watched before the
next try.

A group moves when its updates are stored and its loads are over, and the host waits for the copies: nothing else of it
is under way meanwhile. Bits, versions and what is loaded of it do not change.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vblackwell.errors import InsufficientMemory
from vblackwell.machine.device import reserved_bytes
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import Group
from vblackwell.offload.layout.placement import MAX_RESIDENT, StreamedPlacement, groups_kept, state_bytes
from vblackwell.offload.movement.device_updates import DeviceUpdates
from vblackwell.offload.movement.state import Mover, Shared, defer_sigint, free_after
from vblackwell.offload.storage.storage import Ranges, on_disk
from vblackwell.units import MiB, format_bytes

STEPS = 3
MARGIN_SHARE, MAX_MARGIN = 0.2, 1792 * MiB  # of level 0, at most so many bytes
Mode = tuple[bool, bool]  # whether the model trains, and whether a graph is recorded


def extent_of(inputs: Any) -> tuple[int, int]:
    """Elements of all tensors in ``inputs``, and their longest dimension: attention may grow with its square."""
    sizes = [leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return sum(map(math.prod, sizes)), max((max(size, default=0) for size in sizes), default=0)


class KeptGroups(Mover):
    """Moves the first groups of one model to level 0 and back.

    Attributes:
        below: of the groups that are kept, the ranges that they will go back to.
        after_step: how many had come when it was decided what is kept; 0: it is not.
    """

    def __init__(self, shared: Shared, found: StreamedPlacement, level0: DeviceUpdates) -> None:
        super().__init__(shared)
        self._level0 = level0
        self._able = [group for group in found.on_level0 if group not in found.slice_rows]
        self.below: dict[Group, Ranges] = {}
        self.after_step = 0
        self._seen: dict[Mode, tuple[int, int]] = {}
        self._num_steps = self._since = 0  # steps that have come, and that had at the last surprise
        self._watched = STEPS  # that are watched after it
        self._peak = 0  # bytes that torch had reserved before a forward since then
        self._retries: int | None = None  # how often it had given its cache up then

    def summary(self) -> str | None:
        """What is kept, and since when, in words; None where nothing ever is."""
        if reserved_bytes(self._stack.level0_device) is None:
            return None
        if not self.after_step:
            return f"nothing yet: {self._watched} whole steps will show what they leave"
        num_bytes = sum(map(state_bytes, self.below))
        return f"after step {self.after_step}: {len(self.below)} groups, {format_bytes(num_bytes)}"

    def before_forward(self, mode: Mode, inputs: Any, num_steps: int, *, between_steps: bool) -> None:
        """A forward of the whole model is about to start, after ``num_steps``."""
        self._num_steps = num_steps
        known, found = self._seen.get(mode, (-1, -1)), extent_of(inputs)
        if found[0] > known[0] or found[1] > known[1]:
            self._seen[mode] = max(found[0], known[0]), max(found[1], known[1])
            self._budget.give_back_kept(self._stack)  # of all models: this forward may need what theirs have taken
            self._watch()
        if self.after_step and not self.below:
            return
        free_bytes, margin = self._free_bytes(), min(int(MARGIN_SHARE * self._capacity), MAX_MARGIN)
        if self.below and free_bytes < margin // 2:
            self.give_back()
        elif between_steps and not self.after_step and num_steps - self._since >= self._watched:
            self._keep(free_bytes - margin)
            self.after_step = num_steps

    def _watch(self) -> None:
        """What was seen of torch's memory until now tells nothing of the steps to come."""
        self._since, self.after_step, self._peak, self._retries = self._num_steps, 0, 0, None

    @property
    def _capacity(self) -> int:
        return self._stack.levels[0].capacity_bytes

    def _free_bytes(self) -> int:
        """What torch has left of level 0, on a GPU the cap of all that it reserves; none where it gave its cache up, as
        that hides what it needed, and of an arena, which activations are outside of.
        """
        found = reserved_bytes(self._stack.level0_device)
        if found is None:
            return 0
        reserved, retries = found
        self._peak = max(self._peak, reserved)
        self._retries = retries if self._retries is None else self._retries
        return self._capacity - self._peak if retries == self._retries else 0

    @defer_sigint()
    def _keep(self, num_bytes: int) -> None:
        """Move the first groups up, as far as ``num_bytes`` go and level 0 has them free."""
        chosen = groups_kept(self._able, min(num_bytes, int(MAX_RESIDENT * self._capacity)))
        if chosen:
            self._empty_cache()  # so that they do not come to lie between blocks that activations want whole
        for group in chosen:
            own, targets = self._storage.own_ranges(group), Ranges()
            if on_disk(own) or state_bytes(group) > self._stack.levels[0].free_bytes:
                break
            try:
                for kind, reservation in own.items():
                    targets[kind] = self._storage.take(f"{group.name}/kept", reservation.num_bytes, 0)
            except InsufficientMemory:  # the device has less than it said
                self._give(targets)
                break
            try:
                self.below[group] = self._move(group, targets)
            except BaseException:
                self._give(targets)
                raise

    @defer_sigint()
    def give_back(self) -> bool:
        """Move all back to their ranges below, at any moment between two uses of level 0; False if there are none."""
        kept = list(self.below.items())
        for group, below in kept:
            self._give(self._move(group, below))
            del self.below[group]
        if kept:
            self._empty_cache()
            self._watched *= 2
            self._watch()
        return bool(kept)

    def _empty_cache(self) -> None:
        if self._stack.level0_device.type == "cuda":
            torch.cuda.empty_cache()

    def _move(self, group: Group, targets: Ranges) -> Ranges:
        """Copy the group's bytes to ``targets``, which are its ranges from then on; returns the old ones."""
        self._level0.wait(group)
        last_load = self._states[group].last_load
        if last_load is not None:
            last_load.wait()
        own = self._storage.own_ranges(group)
        under_way = list[Transfer]()
        try:
            for kind, reservation in own.items():
                under_way.append(self._stack.write(targets[kind], reservation.bytes))
        finally:
            free_after(under_way, lambda: None)
        return self._storage.relocate(group, targets)

    def _give(self, ranges: Ranges) -> None:
        for reservation in ranges.values():
            self._storage.give(reservation)
