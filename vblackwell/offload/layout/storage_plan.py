"""Which level holds each range of a model, and the host memory through which ranges on a disk pass: arithmetic.

What is needed most often takes the upper levels: optimizer states spill first, evenly over the model, because updates
run in the order of backward and the disk should have work in all of it, and one kind of all groups before a second of
any, which keeps the disk's share of every group, and so the staging, small. Groups that the CPU updates spill last: its
worker waits for their bytes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from vblackwell.errors import InsufficientMemory
from vblackwell.offload.layout.groups import GRADIENTS, KINDS, PARAMETER_KINDS, Group
from vblackwell.units import align_up, format_bytes

PAGE = 4096  # direct I/O reads and writes at multiples of it
INCOMING = "incoming"  # of staging: what a GPU's gradients pass that are added to earlier ones
MAX_SETS = 3  # one that is read, one at work, one that is written
SETS_SHARE = 4  # all sets together take at most 1 / SETS_SHARE of the host level, where that leaves one
GOLDEN = 0.6180339887498949
Pair = tuple[Group, str]  # a group and a kind of range


def ranges_do_not_fit(num_bytes: int, staging_bytes: int, free_bytes: int) -> InsufficientMemory:
    asked = num_bytes + staging_bytes
    passing = f", {format_bytes(staging_bytes)} of it RAM that states on a disk pass through" if staging_bytes else ""
    said = f"the model's bytes need {format_bytes(asked)} below level 0{passing}, and the lower levels have "
    said += f"{format_bytes(free_bytes)} free" + (", which whole groups do not fill" if asked <= free_bytes else "")
    said += ": raise host_memory or disk_memory (the capacities of the stack's lower levels)"
    return InsufficientMemory(said, needed_bytes=asked, available_bytes=free_bytes)


STATES, SUMS = "states on a disk", "sums of gradients"


def staging_does_not_fit(num_bytes: int, what: str, free_bytes: int, who: str = STATES) -> InsufficientMemory:
    said = f"{who} pass through RAM, which takes {format_bytes(num_bytes)} of it {what}, and "
    said += f"{format_bytes(free_bytes)} are free: raise host_memory (the capacity of the 'cpu' level)"
    return InsufficientMemory(said, needed_bytes=num_bytes, available_bytes=free_bytes)


@dataclass(frozen=True)
class LevelSpace:
    """What is known of a level: its kind is 'gpu', 'ram' or 'disk'; it counts ranges in multiples of ``alignment``."""

    name: str
    kind: str
    capacity_bytes: int
    used_bytes: int
    alignment: int

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def held_bytes(self, num_bytes: int) -> int:
        """What it counts a range of ``num_bytes`` as."""
        return align_up(num_bytes, self.alignment)


@dataclass(frozen=True)
class PlacedRange:
    name: str
    level: int
    num_bytes: int


@dataclass(frozen=True)
class Staging:
    """Host memory for ranges that are not addressable, and for what is on its way to a sum."""

    by_kind: Mapping[str, int] = field(default_factory=dict)  # through which the worker works on one range at a time
    num_sets: int = 0  # through which groups that are updated on level 0 pass, one each
    set_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(self.by_kind.values()) + self.num_sets * self.set_bytes


@dataclass(frozen=True)
class StoragePlan:
    """Where the ranges of one model are, on the levels of one stack; `with_ranges` gives the next plan."""

    levels: tuple[LevelSpace, ...]  # of the stack, level 0 first, with what they hold already
    usable: tuple[int, ...]  # numbers of the levels that ranges may take, nearest first
    resident: frozenset[int]  # groups whose weights and states live on level 0 (their gradients leave as all do)
    on_level0: frozenset[int]  # the other groups that are updated there
    largest: Mapping[str, int]  # by kind, bytes of the largest group's range
    set_aside_bytes: int = 0  # of the first usable level in RAM that ranges leave to others
    # By group number and kind, in the order in which they were placed.
    ranges: Mapping[tuple[int, str], PlacedRange] = field(default_factory=dict)
    staging: Staging = field(default_factory=Staging)
    sets_fixed: bool = False  # the staging sets are in use and stay what they are
    incoming_bytes: int = 0  # of the staging `INCOMING`, which the next ranges come with

    @classmethod
    def empty(
        cls,
        levels: Sequence[LevelSpace],
        usable: Iterable[int],
        groups: Sequence[Group],
        resident: Iterable[Group] = (),
        on_level0: Iterable[Group] = (),
        set_aside_bytes: int = 0,
    ) -> "StoragePlan":
        kept = frozenset(group.index for group in resident)
        updated = frozenset(group.index for group in on_level0) - kept
        largest = {kind: max(group.size_of(kind) for group in groups) for kind in KINDS}
        return cls(tuple(levels), tuple(usable), kept, updated, largest, set_aside_bytes)

    def __contains__(self, key: Pair) -> bool:
        return (key[0].index, key[1]) in self.ranges

    def range(self, group: Group, kind: str) -> PlacedRange:
        return self.ranges[group.index, kind]

    def level_of(self, group: Group, kind: str) -> LevelSpace:
        return self.levels[self.range(group, kind).level]

    @cached_property
    def has_host_level(self) -> bool:
        """Whether a usable level is in RAM."""
        return any(self.levels[level].kind == "ram" for level in self.usable)

    @cached_property
    def staging_level(self) -> int:
        """Where staged bytes are: the first usable level in RAM, level 0 if there is none."""
        return next((level for level in self.usable if self.levels[level].kind == "ram"), 0)

    @cached_property
    def uses_disk(self) -> bool:
        """Whether a range is on a disk."""
        return any(self.levels[placed.level].kind == "disk" for placed in self.ranges.values())

    def bytes_by_level(self) -> dict[str, list[int]]:
        """Bytes of each kind of range, by level of the stack."""
        table: dict[str, list[int]] = {}
        for (_, kind), placed in self.ranges.items():
            table.setdefault(kind, [0] * len(self.levels))[placed.level] += placed.num_bytes
        return table

    def with_ranges(self, wanted: Iterable[Pair], later: Iterable[Pair] = ()) -> "StoragePlan":
        """This plan with a range for each (group, kind) that has none, the most wanted first; InsufficientMemory if the
        levels have no room. ``later``: what will be placed next; host memory to work on it, if it spills, is taken now.
        """
        missing = [pair for pair in wanted if pair not in self]
        if not missing and (INCOMING in self.staging.by_kind or not self.incoming_bytes):
            return self
        below = self._spread(missing)
        staging = self._staging_for(below, self._spread(later))
        levels, ranges = self._levels_with(staging), dict(self.ranges)
        positions = _place(self._held_bytes(below), self._free(levels))
        assert positions is not None, "the staging was chosen so that they fit"
        placed = [(pair, 0) for pair in missing if self._lives_on_level0(pair)]
        placed += [(pair, self.usable[position]) for pair, position in zip(below, positions, strict=True)]
        used = [level.used_bytes for level in levels]
        for (group, kind), level in placed:
            size = group.size_of(kind)
            ranges[group.index, kind] = PlacedRange(f"{group.name}/{kind}", level, size)
            used[level] += levels[level].held_bytes(size)
        filled = (replace(level, used_bytes=num_bytes) for level, num_bytes in zip(levels, used, strict=True))
        return replace(self, levels=tuple(filled), ranges=ranges, staging=staging)

    def _lives_on_level0(self, pair: Pair) -> bool:
        return pair[0].index in self.resident and pair[1] in PARAMETER_KINDS

    def _spread(self, pairs: Iterable[Pair]) -> list[Pair]:
        """What goes below level 0 in the order in which it is placed, the most wanted first (see above).

        Multiples of the golden ratio modulo 1 leave gaps of at most three lengths wherever the line is cut (three-gap
        theorem, Sós 1958): whatever share of a kind does not fit is spread evenly over the groups.
        """
        below = [pair for pair in pairs if not self._lives_on_level0(pair)]
        kinds = list(dict.fromkeys(kind for _, kind in below))

        def key(pair: Pair) -> tuple[float, ...]:
            group, kind = pair
            if kind == "weight" or kind in GRADIENTS:
                return (0,)
            return (1, group.index in self.on_level0, kinds.index(kind), group.index * GOLDEN % 1)

        return sorted(below, key=key)

    def _held_bytes(self, pairs: Iterable[Pair]) -> list[int]:
        """Bytes of ranges as levels count them: each rounds up to its own alignment; the coarsest is right for all."""
        alignment = max(self.levels[level].alignment for level in self.usable)
        return [align_up(group.size_of(kind), alignment) for group, kind in pairs]

    def _levels_with(self, staging: Staging) -> list[LevelSpace]:
        levels, host = list(self.levels), self.staging_level
        if self.has_host_level:
            used_bytes = levels[host].used_bytes + staging.num_bytes - self.staging.num_bytes
            levels[host] = replace(levels[host], used_bytes=used_bytes)
        return levels

    def _free(self, levels: Sequence[LevelSpace]) -> list[int]:
        """Bytes of each usable level that ranges may take."""
        found = [levels[level].free_bytes for level in self.usable]
        if self.set_aside_bytes and self.has_host_level:
            position = self.usable.index(self.staging_level)
            found[position] = max(0, found[position] - self.set_aside_bytes)
        return found

    def _staging_for(self, wanted: list[Pair], later: list[Pair]) -> Staging:
        """Host memory to work on ranges that are not in RAM, for ``wanted`` and, if it fits, ``later``.

        It is taken first and only if something will spill. The more is taken, the more spills: this is repeated until
        it takes no more. InsufficientMemory: the levels cannot hold ``wanted``, or RAM has no room for one set.
        """
        held = self.staging
        if not self.sets_fixed:  # unused sets may become others, and what a larger level has no use for is given back
            below = {kind for (_, kind), placed in self.ranges.items() if self.levels[placed.level].kind != "ram"}
            kept = below | {INCOMING}
            held = Staging({kind: size for kind, size in held.by_kind.items() if kind in kept})
        if self.incoming_bytes and self.has_host_level and INCOMING not in held.by_kind:
            free_bytes = self._free(self._levels_with(held))[self.usable.index(self.staging_level)]
            if self.incoming_bytes > free_bytes:
                raise staging_does_not_fit(self.incoming_bytes, "for this model", free_bytes, SUMS)
            held = replace(held, by_kind={INCOMING: align_up(self.incoming_bytes, PAGE), **held.by_kind})
        free = self._free(self._levels_with(held))
        in_ram = [self.levels[level].kind == "ram" for level in self.usable]
        sizes = self._held_bytes(wanted)
        alone = _place(sizes, free)
        if alone is None:
            raise ranges_do_not_fit(sum(sizes), 0, sum(free))
        both, both_sizes = [*wanted, *later], [*sizes, *self._held_bytes(later)]
        if _place(both_sizes, free) is None:
            both, both_sizes = wanted, sizes  # what comes later will be refused then
        staged_already = Counter[int]()
        for (index, kind), placed in self.ranges.items():
            if index in self.on_level0 and kind in PARAMETER_KINDS and self.levels[placed.level].kind != "ram":
                staged_already[index] += align_up(placed.num_bytes, PAGE)
        fits = both == wanted and all(in_ram[position] for position in alone)
        if not self.has_host_level or (fits and not staged_already):
            return held
        host = self.usable.index(self.staging_level)

        def needed(
            pairs: list[Pair], sizes: list[int], positions: Sequence[int], least: Staging, max_sets: int
        ) -> Staging:
            """``least``, and what ``positions`` ask for beyond it."""
            by_kind, in_sets = dict(least.by_kind), staged_already.copy()
            for (group, kind), position, size in zip(pairs, positions, sizes, strict=True):
                if not in_ram[position]:
                    by_kind.setdefault(kind, align_up(self.largest[kind], PAGE))
                    if group.index in self.on_level0 and kind not in GRADIENTS:
                        in_sets[group.index] += align_up(size, PAGE)
            set_bytes = max([least.set_bytes, *in_sets.values()])
            return Staging(by_kind, max(least.num_sets, max_sets) if set_bytes else 0, set_bytes)

        def enough(pairs: list[Pair], sizes: list[int], max_sets: int) -> Staging | None:
            """Staging that suffices for what spills when it has been taken; None if there is no room for it."""
            staging, more = None, held
            while more != staging:
                staging, left = more, list(free)
                left[host] -= staging.num_bytes - held.num_bytes
                positions = _place(sizes, left) if left[host] >= 0 else None
                if positions is None:
                    return None
                more = needed(pairs, sizes, positions, staging, max_sets)
            return staging

        host_bytes = self.levels[self.staging_level].capacity_bytes
        for pairs, held_bytes in ((both, both_sizes), (wanted, sizes)):
            for max_sets in range(MAX_SETS, 0, -1):
                found = enough(pairs, held_bytes, max_sets)
                if found is not None and (max_sets < 2 or found.num_sets * found.set_bytes * SETS_SHARE <= host_bytes):
                    return found
        more = needed(wanted, sizes, [len(free) - 1] * len(wanted), held, 1).num_bytes - held.num_bytes
        if more <= free[host]:  # but not next to what has to stay in RAM then
            raise ranges_do_not_fit(sum(sizes), more, sum(free))
        raise staging_does_not_fit(more, "for this model", free[host])


def _place(sizes: Sequence[int], free: Sequence[int]) -> list[int] | None:
    """A position in ``free`` for each of ``sizes``, the first with enough bytes; None where one finds none."""
    left, chosen = list(free), list[int]()
    if sum(sizes) > sum(max(0, each) for each in left):
        return None
    for size in sizes:
        for position, free_bytes in enumerate(left):
            if free_bytes >= size:
                left[position] -= size
                chosen.append(position)
                break
        else:
            return None
    return chosen
