"""Which of the levels below the first holds each range, and the host memory through which ranges on a disk pass: arithmetic.

What is needed most often takes the upper levels, so optimizer states are the first to spill to a disk. They spill evenly over the model
(`spread`): updates run in the order of backward, and if the states of neighbouring groups were on the disk, it would have more to do
in that part of the step than it can, and nothing in the rest. For the same reason one kind of all groups spills before a second kind of
any: the disk's share of every group is then the same to within one range, and as small as it can be, and so is the staging memory.
Groups that the CPU updates spill last, because its worker waits for their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vblackwell.errors import InsufficientMemory
from vblackwell.units import align_up, format_bytes

GRADIENTS = ("gradient", "accumulated")
PAGE = 4096  # direct I/O reads and writes at multiples of it
MOST_SETS = 3  # one that is read, one at work, one that is written
SETS_SHARE = 4  # all sets together take at most 1 / SETS_SHARE of the host level, where that leaves one
GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Request:
    """A range that is to be placed.

    Attributes:
        group: the group's number. num_bytes: as the levels account it. streamed: its updates run on level 0.
    """

    group: int
    kind: str
    num_bytes: int
    streamed: bool


@dataclass(frozen=True)
class Staging:
    """Host memory for ranges that are not addressable.

    Attributes:
        by_kind: bytes through which the worker works on ranges of a kind, one at a time.
        num_sets, set_bytes: sets through which groups that are updated on level 0 pass, each for a group's ranges together.
    """

    by_kind: Mapping[str, int] = field(default_factory=dict)
    num_sets: int = 0
    set_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(self.by_kind.values()) + self.num_sets * self.set_bytes


def place(sizes: Sequence[int], free: Sequence[int], what: str) -> list[int]:
    """A position in ``free`` for each of ``sizes``: the first with room, in order.

    Raises:
        InsufficientMemory: with the bytes needed and the bytes there are, before anything is reserved.
    """
    left = list(free)
    chosen = []
    for size in sizes:
        position = next((i for i, room in enumerate(left) if room >= size), None)
        if position is None:
            raise InsufficientMemory(
                f"{what} need {format_bytes(sum(sizes))} below level 0, and the lower levels have {format_bytes(sum(free))} free: "
                "raise host_memory or disk_memory (the capacities of the stack's lower levels)",
                needed_bytes=sum(sizes),
                available_bytes=sum(free),
            )
        left[position] -= size
        chosen.append(position)
    return chosen


def spread(requests: Sequence[Request]) -> list[int]:
    """Positions of ``requests`` in the order in which they are to be placed, the most wanted first (module's text).

    Multiples of the golden ratio, taken modulo 1, leave gaps of at most three lengths wherever the line is cut (the three-gap theorem,
    Sós 1958). So whatever share of a kind does not fit is spread evenly over the groups.
    """
    kinds = list(dict.fromkeys(request.kind for request in requests))

    def key(position: int) -> tuple[float, ...]:
        request = requests[position]
        if request.kind == "weight" or request.kind in GRADIENTS:
            return (0, position)
        return (1, request.streamed, kinds.index(request.kind), request.group * GOLDEN % 1)

    return sorted(range(len(requests)), key=key)


def plan_staging(
    requests: Sequence[Request], later: Sequence[Request], free: Sequence[int], in_ram: Sequence[bool], held: Staging,
    staged_already: Mapping[int, int], largest: Mapping[str, int], host_bytes: int,
) -> Staging:  # fmt: skip
    """What must be taken of the first level in RAM, before anything is placed, for what will not be in RAM.

    The more is taken, the more spills: this goes on until it takes no more.

    Args:
        requests: in the order of `spread`. later: what will be asked for next.
        free: bytes of each level. in_ram: which of them are.
        held: staging that has been taken already.
        staged_already: by group, bytes of its ranges on levels that are not in RAM.
        largest: by kind, bytes of the largest group's range; kinds that are not there get none.
        host_bytes: capacity of the first level in RAM.

    Raises:
        InsufficientMemory: the levels cannot hold ``requests``, or RAM has no room for one set.
    """
    sizes = [request.num_bytes for request in requests]
    alone = place(sizes, free, "the model's bytes")
    wanted = [*requests, *later]
    try:
        place([request.num_bytes for request in wanted], free, "")
    except InsufficientMemory:
        wanted = list(requests)  # what comes later will be refused then
    requests = list(requests)
    fits = wanted == requests and all(in_ram[position] for position in alone)
    if True not in in_ram or (fits and not staged_already):
        return held

    for placed in (wanted, requests):
        for most_sets in range(MOST_SETS, 0, -1):
            found = _settled(placed, free, in_ram, held, staged_already, largest, most_sets)
            if found is not None and (most_sets < 2 or found.num_sets * found.set_bytes * SETS_SHARE <= host_bytes):
                return found
    needed = _needed(requests, [len(free) - 1] * len(requests), in_ram, held, staged_already, largest, 1)
    room, more = free[in_ram.index(True)], needed.num_bytes - held.num_bytes
    raise InsufficientMemory(
        f"states on a disk pass through RAM, which takes {format_bytes(more)} of it for this model, and "
        f"{format_bytes(room)} are free: raise host_memory (the capacity of the 'cpu' level)",
        needed_bytes=more,
        available_bytes=room,
    )


def _settled(
    requests: Sequence[Request], free: Sequence[int], in_ram: Sequence[bool], held: Staging, staged_already: Mapping[int, int],
    largest: Mapping[str, int], most_sets: int,
) -> Staging | None:  # fmt: skip
    """Staging that is enough for what spills when it has been taken; None if there is no room for it."""
    host, staging = in_ram.index(True), held
    sizes = [request.num_bytes for request in requests]
    while True:
        room = list(free)
        room[host] -= staging.num_bytes - held.num_bytes
        if room[host] < 0:
            return None
        try:
            positions = place(sizes, room, "")
        except InsufficientMemory:
            return None
        needed = _needed(requests, positions, in_ram, staging, staged_already, largest, most_sets)
        if needed == staging:
            return staging
        staging = needed


def _needed(
    requests: Sequence[Request], positions: Sequence[int], in_ram: Sequence[bool], atleast: Staging,
    staged_already: Mapping[int, int], largest: Mapping[str, int], most_sets: int,
) -> Staging:  # fmt: skip
    """``atleast``, and what ``positions`` ask for beyond it."""
    by_kind = dict(atleast.by_kind)
    in_sets = dict(staged_already)
    for request, position in zip(requests, positions, strict=True):
        if in_ram[position]:
            continue
        if request.kind in largest:
            by_kind.setdefault(request.kind, align_up(largest[request.kind], PAGE))
        if request.streamed and request.kind not in GRADIENTS:
            in_sets[request.group] = in_sets.get(request.group, 0) + align_up(request.num_bytes, PAGE)
    set_bytes = max([atleast.set_bytes, *in_sets.values()])
    return Staging(by_kind, max(atleast.num_sets, most_sets) if set_bytes else 0, set_bytes)


def layout(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Where in a set each kind lies: ``sizes`` bytes from a page on, one behind the other."""
    found: dict[str, slice] = {}
    start = 0
    for kind, num_bytes in sizes.items():
        found[kind] = slice(start, start + num_bytes)
        start += align_up(num_bytes, PAGE)
    return found
