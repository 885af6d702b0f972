"""Weights that nothing trains, of one model or of several over one base: asleep in RAM, loading, or awake on level 0.

They are immutable: going to sleep is dropping, waking is streaming the layer groups in the order of use, while the
first forward already runs after those that it needs.
"""

import time
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from vblackwell.offload.engine import Offload
from vblackwell.units import align_up

State = Literal["asleep", "loading", "awake"]


class Weights:
    """What ``engine`` holds, under the ``names`` of the models that use it. ``pinned``: nobody else gets their bytes of
    level 0."""

    def __init__(self, engine: Offload, names: tuple[str, ...], *, pinned: bool) -> None:
        self.engine, self.names = engine, names
        self.pinned = engine.budget.pinned = pinned
        self._alignment = engine.stack.levels[0].alignment
        self._slots = {id(slot.param): slot for slot in engine.slots()}
        self._is_wanted = False  # since they last slept, or gave something up
        self._kept_at = 0.0
        engine.bound.want()

    @property
    def num_bytes(self) -> int:
        """In host memory."""
        return sum(group.num_bytes for group in self.engine.groups)

    @property
    def held_bytes(self) -> int:
        """What level 0 counts for all groups, each in whole multiples of the level's alignment."""
        return sum(align_up(group.num_bytes, self._alignment) for group in self.engine.groups)

    @property
    def least_bytes(self) -> int:
        """What level 0 holds of them at the least in a forward: the largest group that is not cut."""
        sizes = (group.num_bytes for group in self.engine.groups if not self.engine.is_sliced(group))
        return align_up(max(sizes, default=0), self._alignment)

    @property
    def loaded_bytes(self) -> int:
        """What is on level 0, or on its way there."""
        return self.engine.weights.loaded_bytes

    @property
    def missing_bytes(self) -> int:
        """Of level 0, what loading those that may stay would take more."""
        weights = self.engine.weights
        return min(self.num_bytes, weights.budget_bytes) - weights.loaded_bytes + self.held_bytes - self.num_bytes

    @property
    def progress(self) -> float:
        """How much has arrived of what stays on level 0 while they are awake: 0 to 1."""
        return self.engine.weights.arrived()

    @property
    def state(self) -> State:
        """'asleep': they have to be woken; what others had no need of may still be on level 0 (`loaded_bytes`), after
        `drop` nothing is. 'loading': groups are coming (`progress`). 'awake': those that stay are there."""
        if self.engine.bound or self.progress == 1.0:
            return "awake"
        return "loading" if self._is_wanted and self.loaded_bytes else "asleep"

    @property
    def idle_s(self) -> float:
        """Seconds since a forward began, or `keep` was called."""
        return time.monotonic() - max(self.engine.budget.last_used, self._kept_at)

    def lie_together(self, params: Sequence[Tensor]) -> bool:
        """Whether these lie one after the other wherever they are on level 0."""
        slots = [slot for param in params if (slot := self._slots.get(id(param))) is not None]
        if len(slots) < len(params) or self.engine.is_sliced(slots[0].group):
            return False
        ends = [slot.offset + slot.num_elements * slot.dtype.itemsize for slot in slots]
        neighbours = zip(ends, slots[1:], strict=False)
        return all(slot.group is slots[0].group and slot.offset == end for end, slot in neighbours)

    def keep(self) -> None:
        """They are not idle, although no forward begins: nobody else's turn to give way changes."""
        self._kept_at = time.monotonic()

    def use(self) -> None:
        """They are used now: the last that give way to others."""
        self.engine.budget.last_used = time.monotonic()

    def begin_pass(self) -> None:
        """A forward of one of several models begins."""
        self.use()
        with self.engine.lock:
            if not self.engine.bound:
                self.engine.weights.trace.begin_pass()

    def load(self) -> None:
        """Start to load what has room; returns at once. Raises what reading them raises."""
        with self.engine.lock:
            self._is_wanted = True
            self.engine.weights.load_what_fits()

    def give_way(self) -> bool:
        """Give one group up for others; False if there is none that nobody uses."""
        gave = self.engine.bound.drop_one()
        self._is_wanted &= not gave
        return gave

    def drop(self) -> bool:
        """Give up all that is on level 0; False, and it stays, where a forward is inside."""
        dropped = self.engine.bound.drop_all()
        self._is_wanted &= not dropped
        return dropped

    def allow(self, held_bytes: int) -> None:
        """Let them take so much of level 0."""
        weights, allowed = self.engine.weights, held_bytes - (self.held_bytes - self.num_bytes)
        with self.engine.lock:
            while weights.loaded_bytes > allowed and self.give_way():
                pass
            weights.rebudget(allowed)
