"""Ranges that take the place of others when the step has come: a rollback without a copy.

An update that runs before its step writes into shadows; the ranges that it read stay what they were. `commit` exchanges
the two, `give_back` forgets what was written. Shadows are memory of the same size on the same level, taken when first
needed, kept for the next step, and limited by what the levels have: where there is none, the update waits for its step.
"""

from __future__ import annotations

from collections.abc import Iterable

from vblackwell.errors import InsufficientMemory
from vblackwell.memory.pool import Reservation
from vblackwell.offload.layout.groups import Group
from vblackwell.offload.storage.storage import Ranges, Storage


class Shadows:
    """The shadows of one model."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._spare: dict[tuple[int, int], list[Reservation]] = {}
        self.num_bytes = 0

    def take(self, group: Group, kinds: Iterable[str]) -> Ranges | None:
        """A shadow of each kind of ``group``; None if there is no room for all of them, or if it lives on level 0.

        (There an update at the step moves no states, and the room is better used otherwise.)
        """
        found: Ranges = {}
        if self._storage.range(group, "weight").level == 0:
            return None
        for kind in kinds:
            original = self._storage.range(group, kind)
            spare = self._spare.get((original.level, original.num_bytes))
            try:
                found[kind] = spare.pop() if spare else self._reserve(original)
            except InsufficientMemory:
                self.give_back(found)
                return None
        return found

    def _reserve(self, original: Reservation) -> Reservation:
        reservation = self._storage.take("shadow", original.num_bytes, original.level)
        self.num_bytes += reservation.num_bytes
        return reservation

    def commit(self, group: Group, shadows: Ranges) -> None:
        """What was written to ``shadows`` is what the group's ranges hold from now on."""
        self.give_back({kind: self._storage.swap(group, kind, shadow) for kind, shadow in shadows.items()})

    @property
    def has_spare(self) -> bool:
        return any(self._spare.values())

    def free_spare(self) -> None:
        """Give unused shadows, which nothing reads or writes any more, back to their levels."""
        for spare in self._spare.values():
            while spare:
                shadow = spare.pop()
                self.num_bytes -= shadow.num_bytes
                self._storage.give(shadow)

    def give_back(self, shadows: Ranges) -> None:
        """Keep ranges for the next `take`. What is queued on them comes before its writes, in the lane's order."""
        for shadow in shadows.values():
            self._spare.setdefault((shadow.level, shadow.num_bytes), []).append(shadow)
