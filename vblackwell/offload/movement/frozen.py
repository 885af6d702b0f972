"""Weights that nothing trains, used in the same order pass after pass: some stay on level 0, all others pass through a few places.

Belady's rule, which training follows, keeps the groups that a cyclic order needs next. Then the copies of a pass come one behind the
other, and the link rests while the groups that stayed are computed. Here the groups that stay are spread evenly, so that between any two
of them something arrives; and the next copies are begun whatever pass they belong to, because no update lies between passes. The link
works all the time, and a pass moves the bytes that do not stay, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vblackwell.offload.layout.groups import Group
from vblackwell.offload.movement.loaded import Loaded
from vblackwell.offload.movement.weights import WeightStreamer

PLACES = 3  # for groups that pass through: one computes, one arrives, one is next


class FrozenStreamer(WeightStreamer):
    """`WeightStreamer` of a model without trainable groups; arguments as there.

    Attributes:
        staying: indices of the groups that are not dropped once they are loaded.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.staying: frozenset[int] = frozenset()
        self.trace.expect([group.index for group in self._groups])  # until a pass has shown another order
        self.rebudget(self._budget_bytes)

    def rebudget(self, budget_bytes: int) -> None:
        """Let loaded weights take this much of level 0 from now on, and choose anew which stay; at least the largest group's."""
        largest = max((group.num_bytes for group in self._groups), default=0)
        self._budget_bytes = max(budget_bytes, min(largest, self._budget_bytes))
        able = [group for group in self._groups if group.num_bytes <= self._budget_bytes]
        self.staying = frozenset(group.index for group in groups_that_stay(able, self._budget_bytes))
        while self.loaded_bytes > self._budget_bytes and self.drop_one():
            pass

    def hold(self) -> list[Group]:
        """Load the groups that stay and keep their bytes where they are until `let_go`; idle others are dropped.

        Returns:
            Those that are held; `buffer` has their bytes.

        Raises:
            InsufficientMemory: one finds no room; none is held.
        """
        wanted = [group for group in self._groups if group.index in self.staying]
        for loaded in list(self._loaded.values()):
            if loaded.pins == 0 and loaded.group.index not in self.staying:
                self._drop(loaded)
        held = list[Group]()
        try:
            for group in wanted:
                loaded = self._loaded.get(group.index) or self._load(group)
                self._arrive(loaded)
                loaded.pins += 1
                held.append(group)
        except BaseException:
            self.let_go(held)
            raise
        return held

    def let_go(self, held: list[Group]) -> None:
        """End of `hold`."""
        for group in held:
            self.release(group)

    def _farthest(self, beyond: int = -1) -> Loaded | None:
        passing = [
            loaded for loaded in self._loaded.values() if loaded.pins == 0 and loaded.group.index not in self.staying
        ]
        best = max(passing, key=self._distance, default=None)
        if best is not None:
            return best if self._distance(best) > beyond else None
        # Those that stay give way to a group in use or to somebody else's bytes, never to one that comes later.
        return super()._farthest() if beyond < 0 else None

    def _prefetch_upcoming(self) -> None:
        if len(self._loaded) == len(self._groups):
            return
        begun = 0
        for index in self.trace.upcoming(len(self._groups), wrap=True):
            group = self._groups[index]
            if index in self._loaded or group.num_bytes > self._budget_bytes:
                continue
            if not self.prefetch(group):
                return
            begun += 1
            if begun == PLACES:
                return


def groups_that_stay(groups: Sequence[Group], budget_bytes: int) -> list[Group]:
    """Which of ``groups``, in the order of use, stay in ``budget_bytes`` so that the others come evenly between them.

    Everything, if it fits. Otherwise room for `PLACES` of the largest is left; groups smaller than the largest, whose copies are the least
    efficient, stay first.
    """
    if sum(group.num_bytes for group in groups) <= budget_bytes:
        return list(groups)
    largest = max(group.num_bytes for group in groups)
    room, chosen = budget_bytes - PLACES * largest, list[Group]()
    for group in sorted((group for group in groups if group.num_bytes < largest), key=lambda group: group.num_bytes):
        if group.num_bytes <= room:
            chosen.append(group)
            room -= group.num_bytes
    rest = [group for group in groups if group not in chosen]
    for count in range(len(rest), 0, -1):
        spread = [rest[(2 * place + 1) * len(rest) // (2 * count)] for place in range(count)]
        if sum(group.num_bytes for group in spread) <= room:
            return chosen + spread
    return chosen
