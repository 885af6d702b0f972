"""Which level holds each range of a model, and the host memory through which ranges on a disk pass: arithmetic.

What is needed most often takes the upper levels, so optimizer states are the first to spill to a disk. They spill
evenly over the model (`spread`): updates run in the order of backward, and with the states of neighbouring groups on
the disk, it would have more to do in that part of the step than it can, and nothing in the rest. For the same reason
one kind of all groups spills before a second kind of any: the disk's share of every group is then the same to within
one range, and as small as it can be, and so is the staging memory. Groups that the CPU updates spill last, because its
worker waits for their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from vblackwell.errors import InsufficientMemory
from vblackwell.offload.layout.groups import GRADIENTS, KINDS, PARAMETER_KINDS, Group
from vblackwell.units import align_up, format_bytes

PAGE = 4096  # direct I/O reads and writes at multiples of it
MAX_SETS = 3  # one that is read, one at work, one that is written
SETS_SHARE = 4  # all sets together take at most 1 / SETS_SHARE of the host level, where that leaves one
GOLDEN = 0.6180339887498949


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

    def holding(self, num_bytes: int) -> LevelSpace:
        """With a range of that size more."""
        return replace(self, used_bytes=self.used_bytes + align_up(num_bytes, self.alignment))


@dataclass(frozen=True)
class PlacedRange:
    """A range of a model: its name, the number of its level, and its size."""

    name: str
    level: int
    num_bytes: int


@dataclass(frozen=True)
class Request:
    """A range that is to be placed: of the group with that number, which is updated ``on_level0`` or not.

    ``held_bytes``: as the levels below level 0 count it.
    """

    name: str
    group: int
    kind: str
    num_bytes: int
    held_bytes: int
    on_level0: bool


@dataclass(frozen=True)
class Staging:
    """Host memory for ranges that are not addressable.

    Attributes:
        by_kind: bytes through which the worker works on ranges of a kind, one at a time.
        num_sets, set_bytes: sets through which groups that are updated on level 0 pass, one each.
    """

    by_kind: Mapping[str, int] = field(default_factory=dict)
    num_sets: int = 0
    set_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(self.by_kind.values()) + self.num_sets * self.set_bytes


@dataclass(frozen=True)
class StoragePlan:
    """Where the ranges of one model are, on the levels of one stack; `with_ranges` gives the next plan.

    Attributes:
        levels: of the stack, level 0 first, with what they hold already.
        usable: numbers of the levels that ranges may take, nearest first.
        resident: groups whose weights and states live on level 0 (their gradients leave as all do).
        on_level0: the other groups that are updated there.
        set_aside_bytes: of the first usable level in RAM that ranges leave to others.
        largest: by kind, bytes of the largest group's range.
        ranges: by group number and kind, in the order in which they were placed.
        sets_fixed: the staging sets are in use and stay what they are.
    """

    levels: tuple[LevelSpace, ...]
    usable: tuple[int, ...]
    resident: frozenset[int]
    on_level0: frozenset[int]
    largest: Mapping[str, int]
    set_aside_bytes: int = 0
    ranges: Mapping[tuple[int, str], PlacedRange] = field(default_factory=dict)
    staging: Staging = field(default_factory=Staging)
    sets_fixed: bool = False

    @classmethod
    def empty(
        cls,
        levels: Sequence[LevelSpace],
        usable: Iterable[int],
        groups: Sequence[Group],
        resident: Iterable[Group] = (),
        on_level0: Iterable[Group] = (),
        set_aside_bytes: int = 0,
    ) -> StoragePlan:
        """A plan without ranges for a model of ``groups``."""
        kept = frozenset(group.index for group in resident)
        updated = frozenset(group.index for group in on_level0) - kept
        largest = {kind: max(group.size_of(kind) for group in groups) for kind in KINDS}
        return cls(tuple(levels), tuple(usable), kept, updated, largest, set_aside_bytes)

    def __contains__(self, key: tuple[Group, str]) -> bool:
        return (key[0].index, key[1]) in self.ranges

    def range(self, group: Group, kind: str) -> PlacedRange:
        return self.ranges[group.index, kind]

    def level_of(self, group: Group, kind: str) -> LevelSpace:
        return self.levels[self.range(group, kind).level]

    def is_resident(self, group: Group) -> bool:
        """Whether weights and states of ``group`` live on level 0."""
        return group.index in self.resident

    @cached_property
    def has_host_level(self) -> bool:
        """Whether a usable level is in RAM."""
        return any(self.levels[level].kind == "ram" for level in self.usable)

    @cached_property
    def staging_level(self) -> int:
        """Where staged bytes are: the first usable level in RAM, level 0 if there is none."""
        return next((level for level in self.usable if self.levels[level].kind == "ram"), 0)

    def bytes_by_level(self) -> dict[str, list[int]]:
        """Bytes of each kind of range, by level of the stack."""
        table: dict[str, list[int]] = {}
        for (_, kind), placed in self.ranges.items():
            table.setdefault(kind, [0] * len(self.levels))[placed.level] += placed.num_bytes
        return table

    def with_ranges(
        self, wanted: Iterable[tuple[Group, str]], later: Iterable[tuple[Group, str]] = ()
    ) -> StoragePlan:  # fmt: skip
        """This plan with a range for each (group, kind) that has none, the most wanted first (`spread`).

        Args:
            later: what will be placed next: if that will spill, host memory to work on it is taken now.

        Raises:
            InsufficientMemory: the levels have no room.
        """
        missing = [(group, kind) for group, kind in wanted if (group, kind) not in self]
        if not missing:
            return self
        here = [pair for pair in missing if self._lives_on_level0(*pair)]
        requests = self._requests(pair for pair in missing if not self._lives_on_level0(*pair))
        coming = self._requests(pair for pair in later if not self._lives_on_level0(*pair))
        staging, levels = self._staging_for(requests, coming)
        positions = place([request.held_bytes for request in requests], self._free(levels))
        ranges = dict(self.ranges)
        for group, kind in here:
            ranges[group.index, kind] = PlacedRange(f"{group.name}/{kind}", 0, group.size_of(kind))
            levels[0] = levels[0].holding(group.size_of(kind))
        for request, position in zip(requests, positions, strict=True):
            level = self.usable[position]
            ranges[request.group, request.kind] = PlacedRange(request.name, level, request.num_bytes)
            levels[level] = levels[level].holding(request.num_bytes)
        return replace(self, levels=tuple(levels), ranges=ranges, staging=staging)

    def _lives_on_level0(self, group: Group, kind: str) -> bool:
        return group.index in self.resident and kind in PARAMETER_KINDS

    def _requests(self, pairs: Iterable[tuple[Group, str]]) -> list[Request]:
        """In the order of `spread`."""
        # Every level rounds up to its own alignment; the coarsest is right for all.
        alignment = max(self.levels[level].alignment for level in self.usable)
        found = []
        for group, kind in pairs:
            size, on_level0 = group.size_of(kind), group.index in self.on_level0
            found.append(Request(f"{group.name}/{kind}", group.index, kind, size, align_up(size, alignment), on_level0))
        return [found[index] for index in spread(found)]

    def _free(self, levels: Sequence[LevelSpace]) -> list[int]:
        """Bytes of each usable level that ranges may take."""
        found = [levels[level].free_bytes for level in self.usable]
        if self.set_aside_bytes and self.staging_level in self.usable:
            position = self.usable.index(self.staging_level)
            found[position] = max(0, found[position] - self.set_aside_bytes)
        return found

    def _staging_for(self, requests: list[Request], later: list[Request]) -> tuple[Staging, list[LevelSpace]]:
        """Host memory through which ranges that are not in RAM are worked on, and the levels with it.

        It is taken first and only if something will spill: a stack that holds everything in RAM pays nothing.
        """
        levels, held, host = list(self.levels), self.staging, self.staging_level
        in_ram = [levels[level].kind == "ram" for level in self.usable]
        staged_already: dict[int, int] = {}
        for (index, kind), placed in self.ranges.items():
            if index in self.on_level0 and kind in PARAMETER_KINDS and levels[placed.level].kind != "ram":
                staged_already[index] = staged_already.get(index, 0) + align_up(placed.num_bytes, PAGE)
        if not self.sets_fixed:  # then they may be others
            levels[host] = replace(levels[host], used_bytes=levels[host].used_bytes - held.num_sets * held.set_bytes)
            held = Staging(held.by_kind)
        free, capacity = self._free(levels), levels[host].capacity_bytes
        planned = plan_staging(requests, later, free, in_ram, held, staged_already, self.largest, capacity)
        if self.has_host_level:
            more = planned.num_bytes - held.num_bytes
            levels[host] = replace(levels[host], used_bytes=levels[host].used_bytes + more)
        return planned, levels


def place(sizes: Sequence[int], free: Sequence[int]) -> list[int]:
    """A position in ``free`` for each of ``sizes``: the first with enough bytes, in order.

    Raises:
        InsufficientMemory: with the bytes needed and the bytes there are, before anything is reserved.
    """
    left = list(free)
    chosen = []
    for size in sizes:
        position = next((index for index, free_bytes in enumerate(left) if free_bytes >= size), None)
        if position is None:
            raise InsufficientMemory(
                f"the model's bytes need {format_bytes(sum(sizes))} below level 0, and the lower levels have "
                f"{format_bytes(sum(free))} free: raise host_memory or disk_memory (the capacities of the stack's "
                "lower levels)",
                needed_bytes=sum(sizes),
                available_bytes=sum(free),
            )
        left[position] -= size
        chosen.append(position)
    return chosen


def spread(requests: Sequence[Request]) -> list[int]:
    """Positions of ``requests`` in the order in which they are to be placed, the most wanted first (see above).

    Multiples of the golden ratio, taken modulo 1, leave gaps of at most three lengths wherever the line is cut (the
    three-gap theorem, Sós 1958). So whatever share of a kind does not fit is spread evenly over the groups.
    """
    kinds = list(dict.fromkeys(request.kind for request in requests))

    def key(position: int) -> tuple[float, ...]:
        request = requests[position]
        if request.kind == "weight" or request.kind in GRADIENTS:
            return (0, position)
        return (1, request.on_level0, kinds.index(request.kind), request.group * GOLDEN % 1)

    return sorted(range(len(requests)), key=key)


def plan_staging(
    requests: Sequence[Request],
    later: Sequence[Request],
    free: Sequence[int],
    in_ram: Sequence[bool],
    held: Staging,
    staged_already: Mapping[int, int],
    largest: Mapping[str, int],
    host_bytes: int,
) -> Staging:
    """What must be taken of the first level in RAM, before anything is placed, for what will not be in RAM.

    The more is taken, the more spills: this is repeated until it takes no more.

    Args:
        requests: in the order of `spread`. later: what will be asked for next.
        free: bytes of each level; in_ram: which of them are. held: staging that has been taken already.
        staged_already: by group, bytes of its ranges on levels that are not in RAM.
        largest: by kind, bytes of the largest group's range. host_bytes: capacity of the first level in RAM.

    Raises:
        InsufficientMemory: the levels cannot hold ``requests``, or RAM has no room for one set.
    """
    alone = place([request.held_bytes for request in requests], free)
    requests, wanted = list(requests), [*requests, *later]
    if _placed(wanted, free) is None:
        wanted = requests  # what comes later will be refused then
    fits = wanted == requests and all(in_ram[position] for position in alone)
    if True not in in_ram or (fits and not staged_already):
        return held

    host = in_ram.index(True)

    def needed(placed: Sequence[Request], positions: Sequence[int], atleast: Staging, max_sets: int) -> Staging:
        """``atleast``, and what ``positions`` ask for beyond it."""
        by_kind, in_sets = dict(atleast.by_kind), dict(staged_already)
        for request, position in zip(placed, positions, strict=True):
            if in_ram[position]:
                continue
            if request.kind in largest:
                by_kind.setdefault(request.kind, align_up(largest[request.kind], PAGE))
            if request.on_level0 and request.kind not in GRADIENTS:
                in_sets[request.group] = in_sets.get(request.group, 0) + align_up(request.held_bytes, PAGE)
        set_bytes = max([atleast.set_bytes, *in_sets.values()])
        return Staging(by_kind, max(atleast.num_sets, max_sets) if set_bytes else 0, set_bytes)

    def enough(placed: Sequence[Request], max_sets: int) -> Staging | None:
        """Staging that suffices for what spills when it has been taken; None if there is no room for it."""
        staging = held
        while True:
            left = list(free)
            left[host] -= staging.num_bytes - held.num_bytes
            positions = _placed(placed, left) if left[host] >= 0 else None
            if positions is None:
                return None
            more = needed(placed, positions, staging, max_sets)
            if more == staging:
                return staging
            staging = more

    for placed in (wanted, requests):
        for max_sets in range(MAX_SETS, 0, -1):
            found = enough(placed, max_sets)
            if found is not None and (max_sets < 2 or found.num_sets * found.set_bytes * SETS_SHARE <= host_bytes):
                return found
    more = needed(requests, [len(free) - 1] * len(requests), held, 1).num_bytes - held.num_bytes
    raise InsufficientMemory(
        f"states on a disk pass through RAM, which takes {format_bytes(more)} of it for this model, and "
        f"{format_bytes(free[host])} are free: raise host_memory (the capacity of the 'cpu' level)",
        needed_bytes=more,
        available_bytes=free[host],
    )


def _placed(requests: Sequence[Request], free: Sequence[int]) -> list[int] | None:
    """As `place`; None where they do not fit."""
    try:
        return place([request.held_bytes for request in requests], free)
    except InsufficientMemory:
        return None
