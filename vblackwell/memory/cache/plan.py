"""A cascade of moves that is known to fit before the first byte moves.

To place bytes on a full level its victims sink: each to the first level below that has room, or where colder and no
more important entries can sink in turn. The cascade is greedy: the first place that works is taken, and none is tried
again. It uses the levels' own arithmetic (`place`, `displace`), so the offsets are decided and fragmentation is exact;
what cannot be completed is taken back. The moves come out bottom-up: every range is left before it is written again, so
carrying them out one after another never needs room that is not there.

`take_back` also serves a plan that was half carried out when a disk failed: moves that happened stay, the others are
undone from the last to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vblackwell.errors import DiskError, InsufficientMemory
from vblackwell.memory.cache.entry import Entry
from vblackwell.memory.cache.policy import LRU
from vblackwell.memory.level import Extent, Level

MAX_REFUSALS = 256  # victims that are tried in vain for an access before it is served in place


@dataclass(frozen=True, eq=False)
class Move:
    """``entry`` goes from its extent (None: from RAM) to ``target_extent``; without an entry, the caller fills that."""

    entry: Entry | None
    source: int
    source_extent: Extent | None
    target: int
    target_extent: Extent
    evicted: bool


class Plan:
    """Moves in the order in which they are to be carried out. Made and changed under the stack's lock.

    Args:
        by_order: asked for by the caller, not an access, so that it should not fail: every victim is tried, of any
            priority, and one that cannot sink may rise into free room.
        spare_expected: leave alone what a prefetch brought up and was not used yet.
    """

    def __init__(
        self, levels: Sequence[Level], policy: LRU, *, by_order: bool = False, spare_expected: bool = False
    ) -> None:
        self.moves: list[Move] = []
        self.refusal: Exception | None = None  # the last thing a level said
        self._levels = levels
        self._policy = policy
        self._by_order = by_order
        self._spare_expected = spare_expected
        self._moved: set[Entry] = set()

    def make_room(
        self, level: int, num_bytes: int, max_priority: int = 10, than: Entry | None = None, *, may_rise: bool = True
    ) -> Extent | None:
        """Place ``num_bytes`` on ``level``, letting victims up to a priority, and colder ``than`` an entry, sink.

        None where that is impossible; the plan is then as before.
        """
        extent = self.place(level, num_bytes)
        if extent is not None or num_bytes > self._levels[level].capacity_bytes:
            return extent
        mark, refusals = len(self.moves), 0
        hopeless = None  # victims of this size and more find no place
        for victim in self._policy.victims(level, max_priority, than):
            if self._may_go(victim) and (hopeless is None or victim.num_bytes < hopeless):
                if self._make_go(victim, may_rise=may_rise and self._by_order):
                    extent = self.place(level, num_bytes)
                    if extent is not None:
                        return extent
                    continue
                hopeless = victim.num_bytes
            refusals += 1
            if refusals == MAX_REFUSALS and not self._by_order:
                break
        self.take_back(mark)
        return None

    def place(self, level: int, num_bytes: int) -> Extent | None:
        """An extent in free room of ``level``; None where there is none (`refusal` says why)."""
        try:
            return self._levels[level].place(num_bytes)
        except (InsufficientMemory, DiskError) as error:
            if not isinstance(self.refusal, DiskError):  # a failing disk explains more than a full level
                self.refusal = error.with_traceback(None)  # whose frames would keep alive what callers hand out
            return None

    def move(self, entry: Entry, target: int, extent: Extent, *, evicted: bool = False, from_ram: bool = False) -> None:
        """Add the move of ``entry``, whose old extent was displaced, to an extent that was placed for it.

        ``from_ram``: its bytes are lifted out before the first move; taking the plan back does not restore its place.
        """
        self.moves.append(Move(entry, entry.level, None if from_ram else entry.extent, target, extent, evicted))
        self._moved.add(entry)

    def fill(self, target: int, extent: Extent) -> None:
        """Note the extent that the moves make room for and the caller fills: taking the plan back frees it."""
        self.moves.append(Move(None, target, None, target, extent, False))

    def exclude(self, entry: Entry) -> None:
        """Never make ``entry`` a victim: the plan is for it."""
        self._moved.add(entry)

    def take_back(self, mark: int = 0) -> None:
        """Undo the moves from number ``mark`` on, the last one first."""
        while len(self.moves) > mark:
            move = self.moves.pop()
            self._levels[move.target].free(move.target_extent)
            if move.source_extent is not None:
                self._levels[move.source].restore(move.source_extent)
            if move.entry is not None:
                self._moved.discard(move.entry)

    def _may_go(self, entry: Entry) -> bool:
        if entry.extent is None or entry in self._moved or (self._spare_expected and entry.expected):
            return False
        return not entry.held()

    def _make_go(self, victim: Entry, *, may_rise: bool) -> bool:
        """Plan the victim's move to the first level below, or where it ``may_rise`` above, that takes it."""
        assert victim.extent is not None
        source = self._levels[victim.level]
        source.displace(victim.extent)
        for level in range(victim.level + 1, len(self._levels)):
            extent = self.make_room(level, victim.num_bytes, victim.priority, victim, may_rise=False)
            if extent is not None:
                self.move(victim, level, extent, evicted=True)
                return True
        for level in reversed(range(victim.level)) if may_rise else ():
            extent = self.place(level, victim.num_bytes)
            if extent is not None:
                self.move(victim, level, extent)
                return True
        source.restore(victim.extent)
        return False
