"""A cascade of moves that is known to fit before the first byte moves.

To place bytes on a full level its victims sink: each to the first level below that has room, or where colder and no more
important entries can sink in turn. The planner does this with the levels' own arithmetic (`place`, `displace`), so the
offsets are decided and fragmentation is exact; what cannot be completed is taken back. The moves come out bottom-up: every
range is left before it is written again, so carrying them out one after another never needs room that is not there.

`take_back` also serves a plan that was half carried out when a disk failed: moves that happened stay, the others are
undone from the last to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vblackwell.errors import DiskError, InsufficientMemory
from vblackwell.memory.cache.entry import Entry
from vblackwell.memory.cache.policy import Policy
from vblackwell.memory.level import Extent, Level

LOOK_AT = 256  # victims that are tried for an access before it is served in place


@dataclass(frozen=True, eq=False)
class Move:
    """``entry`` goes from its extent (None: from its stray bytes) to ``extent`` on level ``target``."""

    entry: Entry
    source: int
    source_extent: Extent | None
    target: int
    target_extent: Extent
    evicted: bool


class Plan:
    """Moves in the order in which they are to be carried out. Made and changed under the stack's lock.

    Args:
        spare_expected: leave alone what a prefetch brought up and nobody has used yet.
        exhaustive: try every victim, of any priority, and let them rise where they cannot sink, rather than give up early.
    """

    def __init__(
        self, levels: Sequence[Level], policy: Policy, *, spare_expected: bool = False, exhaustive: bool = False
    ) -> None:
        self.moves: list[Move] = []
        self.refusal: Exception | None = None  # the last thing a level said
        self.goal: tuple[int, Extent] | None = None  # (level, extent) that the moves make room for, if no move fills it
        self._levels = levels
        self._policy = policy
        self._spare_expected = spare_expected
        self._exhaustive = exhaustive
        self._moved: set[Entry] = set()
        self._leaving: list[int] = []  # levels with a victim that was displaced and whose move is not decided yet

    def room(self, level: int, num_bytes: int, *, max_priority: int, than: Entry | None) -> Extent | None:
        """Place ``num_bytes`` on ``level``, letting victims up to a priority, and colder ``than`` an entry, sink.

        None where that is impossible; the plan is then as before.
        """
        extent = self.place(level, num_bytes)
        if extent is not None or num_bytes > self._levels[level].capacity_bytes:
            return extent
        mark = len(self.moves)
        hopeless = None  # victims of this size and more find no place below
        looked_at = 0
        for victim in self._policy.victims(level, max_priority, than):
            looked_at += 1
            if looked_at > LOOK_AT and not self._exhaustive:
                break
            if not self._may_go(victim) or (hopeless is not None and victim.num_bytes >= hopeless):
                continue
            if not self._sink(victim):
                hopeless = victim.num_bytes
                continue
            extent = self.place(level, num_bytes)
            if extent is not None:
                return extent
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

    def move(
        self, entry: Entry, target: int, extent: Extent, *, evicted: bool = False, displaced: bool = False
    ) -> None:
        """Add the move of ``entry`` to an extent that was placed for it. ``displaced``: its old one has been already."""
        if entry.extent is not None and not displaced:
            self._levels[entry.level].displace(entry.extent)
        self.moves.append(Move(entry, entry.level, entry.extent, target, extent, evicted))
        self._moved.add(entry)

    def exclude(self, entry: Entry) -> None:
        """Never make ``entry`` a victim: the plan is for it."""
        self._moved.add(entry)

    def take_back(self, mark: int = 0) -> None:
        """Undo the goal, and the moves from number ``mark`` on, the last one first."""
        if self.goal is not None:
            self._levels[self.goal[0]].free(self.goal[1])
            self.goal = None
        while len(self.moves) > mark:
            move = self.moves.pop()
            self._levels[move.target].displace(move.target_extent)
            self._levels[move.target].release(move.target_extent)
            if move.source_extent is not None:
                self._levels[move.source].restore(move.source_extent)
            self._moved.discard(move.entry)

    def _may_go(self, entry: Entry) -> bool:
        if entry.extent is None or entry in self._moved or (self._spare_expected and entry.expected):
            return False
        return not entry.held()

    def _sink(self, victim: Entry) -> bool:
        assert victim.extent is not None
        source = self._levels[victim.level]
        source.displace(victim.extent)
        self._leaving.append(victim.level)
        sunk = self._go_below(victim, victim.priority, victim) or (self._exhaustive and self._go_anywhere(victim))
        self._leaving.pop()
        if not sunk:
            source.restore(victim.extent)
        return sunk

    def _go_below(self, victim: Entry, max_priority: int, than: Entry | None) -> bool:
        for level in range(victim.level + 1, len(self._levels)):
            extent = self.room(level, victim.num_bytes, max_priority=max_priority, than=than)
            if extent is not None:
                self.move(victim, level, extent, evicted=True, displaced=True)
                return True
        return False

    def _go_anywhere(self, victim: Entry) -> bool:
        """Below at the cost of more important ones, or up into free room; but not where somebody has yet to leave."""
        if self._go_below(victim, 10, None):
            return True
        for level in reversed(range(victim.level)):
            extent = self.place(level, victim.num_bytes) if level not in self._leaving else None
            if extent is not None:
                self.move(victim, level, extent, displaced=True)
                return True
        return False
