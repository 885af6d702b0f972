"""Levels as one pool that is counted: ranges for an offload engine, which places bytes by hand, and the statistics of
everything. The keyed stack is built on top: a reservation is in the same levels as its keys, makes them give way, and
is never evicted.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vblackwell.errors import ConfigurationError, DiskError, InsufficientMemory, StaleTensor
from vblackwell.memory.level import Extent, Level
from vblackwell.memory.transfer import Clock, Transfer
from vblackwell.units import format_bytes

MOST_UNDER_WAY = 64  # transfers whose time is asked for when somebody wants to know it
Place = int | str  # a level's number, or the name of a device that belongs to no level


def does_not_fit(
    levels: Sequence[Level], where: str, num_bytes: int, refusal: Exception | None = None
) -> InsufficientMemory:
    """The error for bytes that found no place; ``refusal`` is the last thing that a level said."""
    free = ", ".join(f"{level.name} {format_bytes(level.free_bytes)}" for level in levels)
    said = f" ({refusal})" if isinstance(refusal, DiskError) else ""
    return InsufficientMemory(
        f"the stack has no room {where}: {format_bytes(num_bytes)} in one piece are needed, free are {free}, and what "
        f"could give way is held, borrowed, reserved or has nowhere to go{said}; remove or release keys, or raise a "
        "level's capacity",
        needed_bytes=num_bytes,
        available_bytes=max(level.free_bytes for level in levels),
    )


class Reservation:
    """A range on one level that its owner fills and empties by hand: the pool counts it and never moves it. Made by
    `VGPUStack.reserve`, ended by `LevelPool.unreserve`; ``name`` is unique in its pool."""

    __slots__ = ("name", "level", "num_bytes", "_extent", "_place", "_parts", "_address", "_gone")

    def __init__(self, name: str, level: int, extent: Extent, place: Level) -> None:
        self.name, self.level, self.num_bytes, self._place = name, level, extent.num_bytes, place
        self._extent: Extent | None = extent
        self._parts: dict[tuple[int, int], torch.Tensor] = {}
        self._address: int | None = None
        self._gone = f"reservation {name!r} has been given back; reserve it again before use"

    @property
    def is_addressable(self) -> bool:
        """Whether `view` gives a tensor: everywhere but on a disk."""
        return self._place.device is not None

    @property
    def is_resident(self) -> bool:
        """Whether it can be used at once: the first use of new host memory waits for its pages."""
        return self._place.is_resident(self.extent)

    @property
    def extent(self) -> Extent:
        """On its level; raises StaleTensor once the reservation, or its pool, has ended."""
        if self._extent is None:
            raise StaleTensor(self._gone)
        return self._extent

    def view(self) -> torch.Tensor | None:
        """The bytes as a uint8 tensor that aliases them; None on a disk. Not to be used after `unreserve`."""
        return self._place.view(self.extent)

    @property
    def bytes(self) -> torch.Tensor:
        """`view`, of a range that has one."""
        view = self.view()
        assert view is not None, f"{self.name} is on a disk"
        return view

    @property
    def address(self) -> int:
        """Of the first byte, of a range that has a view; for a driver."""
        if self._address is None:
            self._address = self.bytes.data_ptr()
        return self._address

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Bytes ``start`` to ``stop`` of `view`. Kept: a range moves in the same pieces at every step, and making views
        is most of what that costs the host."""
        found = self._parts.get((start, stop))
        if found is None:
            found = self._parts[start, stop] = self.bytes[start:stop]
        return found

    def end(self) -> Extent:
        """Mark it as given back; its extent, for the pool to free."""
        self._parts.clear()
        extent, self._extent, self._address = self.extent, None, None
        return extent


class Turn:
    """The right to decide and move: one thread at a time, background work only while nothing else waits."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._foreground = 0  # threads that wait

    @contextmanager
    def take(self, *, background: bool = False) -> Iterator[None]:
        """Hold the turn; ``background`` waits until no foreground thread wants it."""
        me = threading.get_ident()
        with self._condition:
            assert self._owner != me, "a turn inside a turn"
            self._foreground += not background
            try:
                self._condition.wait_for(lambda: self._owner is None and not (background and self._foreground))
            finally:
                self._foreground -= not background
            self._owner = me
        try:
            yield
        finally:
            with self._condition:
                self._owner = None
                self._condition.notify_all()


class LevelPool:
    """Levels, fastest first, the ranges reserved on them, and counters of both and of the links between levels. What
    is placed where changes in a turn."""

    def __init__(self, levels: list[Level]) -> None:
        assert levels[0].device is not None, "build_levels sees to it"
        self.levels = levels
        self.level0_device: torch.device = levels[0].device
        self._lock = threading.Lock()
        counted = ("hits", "misses", "evictions", "promotions", "demotions")
        self._counts = [dict.fromkeys(counted, 0) for _ in levels]
        self._stall_seconds = 0.0
        self._updated, self._update_seconds = 0, 0.0  # parameters, by the CPU
        self._bytes: defaultdict[tuple[Place, Place], int] = defaultdict(int)
        self._seconds: defaultdict[tuple[Place, Place], float] = defaultdict(float)
        self._busy_until: dict[tuple[Place, Place], float] = {}
        self._under_way: deque[tuple[tuple[Place, Place], Clock]] = deque()  # whose seconds are known later
        self._turn = Turn()
        self._reservations: dict[str, Reservation] = {}
        self._closed = False

    def unreserve(self, reservation: Reservation) -> None:
        """Give a reservation, whose transfers are done, back; a closed pool has done so. Without a lock, because
        finalizers call this at any moment: one thread ends a reservation, once."""
        if self._closed:
            return
        extent = reservation.end()
        del self._reservations[reservation.name]
        self.levels[reservation.level].free(extent)

    def read(self, reservation: Reservation, out: torch.Tensor) -> Transfer:
        """Start copying a reservation's first ``out.nbytes`` bytes into the contiguous ``out``; counted on the link."""
        transfer = self.levels[reservation.level].read(reservation.extent, out)
        self.count_transfer(reservation.level, self._place_of(out), out.nbytes, transfer)
        return transfer

    def write(self, reservation: Reservation, src: torch.Tensor) -> Transfer:
        """Start copying the contiguous ``src`` to the start of a reservation; counted on the link."""
        transfer = self.levels[reservation.level].write(reservation.extent, src)
        self.count_transfer(self._place_of(src), reservation.level, src.nbytes, transfer)
        return transfer

    def _place_of(self, tensor: torch.Tensor) -> Place:
        """What a tensor outside the levels counts for: the first level on its device, else the device's name."""
        for number, level in enumerate(self.levels):
            if level.device == tensor.device:
                return number
        return str(tensor.device)

    def count_found(self, level: int) -> None:
        """Something was found on ``level``: a hit there, a miss on every level above."""
        with self._lock:
            for above in range(level):
                self._counts[above]["misses"] += 1
            self._counts[level]["hits"] += 1

    def count_move(self, source: int, target: int, *, evicted: bool) -> None:
        """A key went from a level to another. Called under the lock."""
        if target < source:
            self._counts[target]["promotions"] += 1
        elif target > source:
            self._counts[source]["demotions"] += 1
            self._counts[source]["evictions"] += evicted

    def count_link(self, source: Place, destination: Place, num_bytes: int, seconds: float | None = None) -> None:
        """Bytes that the caller moved between two levels."""
        with self._lock:
            self._bytes[source, destination] += num_bytes
            self._seconds[source, destination] += seconds or 0.0

    def count_transfer(self, source: Place, destination: Place, num_bytes: int, transfer: Transfer) -> None:
        """Bytes that are moving between two levels; the time is taken from ``transfer`` when it is done."""
        with self._lock:
            self._bytes[source, destination] += num_bytes
            if transfer.clock is not None:
                self._under_way.append(((source, destination), transfer.clock))
            if len(self._under_way) > MOST_UNDER_WAY:  # not each time: to ask costs the host as much as to launch
                self._collect()

    def _collect(self) -> None:
        while self._under_way and (took := self._under_way[0][1]()) is not None:
            pair, _ = self._under_way.popleft()
            begin, seconds = took
            if begin is not None:
                # Several at a time keep a link busy once; they are collected in the order in which they were asked for.
                end, busy_until = begin + seconds, self._busy_until.get(pair, begin)
                seconds = max(0.0, end - max(begin, busy_until))
                self._busy_until[pair] = max(busy_until, end)
            self._seconds[pair] += seconds

    def add_stall(self, seconds: float) -> None:
        """Time that computation waited for bytes."""
        with self._lock:
            self._stall_seconds += seconds

    def add_update(self, parameters: int, seconds: float) -> None:
        """An optimizer's update of so many parameters on the CPU, and what it took there."""
        with self._lock:
            self._updated += parameters
            self._update_seconds += seconds

    def host_updates(self) -> tuple[int, float]:
        """Parameters that the CPU has updated, and the seconds in which it did."""
        with self._lock:
            return self._updated, self._update_seconds

    def get_stats(self) -> dict[str, Any]:
        """``{'levels': [{'device', 'capacity_bytes', 'used_bytes', 'peak_bytes', 'hits', 'misses', 'evictions',
        'promotions', 'demotions'}], 'links': [{'source', 'destination', 'bytes', 'seconds'}], 'stall_seconds',
        'host_updates': {'parameters', 'seconds'}}``.

        A key found on level 2 is a hit there and a miss on levels 0 and 1. ``promotions``: keys that rose to the level;
        ``demotions``: that sank from it, ``evictions`` of them for other bytes. A copy's ``seconds`` count once it is
        done.
        """
        with self._lock:
            self._collect()
            levels, links = [], []
            for level, counts in zip(self.levels, self._counts, strict=True):
                sizes = {name: getattr(level, name) for name in ("capacity_bytes", "used_bytes", "peak_bytes")}
                levels.append({"device": level.name, **sizes, **counts})
            for pair, num_bytes in self._bytes.items():
                source, target = (place if isinstance(place, str) else self.levels[place].name for place in pair)
                seconds = self._seconds[pair]
                links.append({"source": source, "destination": target, "bytes": num_bytes, "seconds": seconds})
            updates = {"parameters": self._updated, "seconds": self._update_seconds}
            return {"levels": levels, "links": links, "stall_seconds": self._stall_seconds, "host_updates": updates}

    def close(self) -> None:
        """Release memory, file and threads. Idempotent. Tensors that are held stay valid."""
        with self._turn.take():
            self._closed = True
            for reservation in self._reservations.values():
                reservation._extent = None
                reservation._gone = (
                    f"the stack is closed, and {reservation.name!r} went with it: release(model) before stack.close()"
                )
            self._reservations.clear()
            for level in self.levels:
                level.close()

    def _check_level(self, level: int) -> None:
        if not isinstance(level, int) or not 0 <= level < len(self.levels):
            raise ConfigurationError(f"level {level!r} must be from 0 to {len(self.levels) - 1}")

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError("the stack is closed: make a new one")

    def __repr__(self) -> str:
        capacities = ", ".join(f"{level.name} {format_bytes(level.capacity_bytes)}" for level in self.levels)
        return f"{type(self).__name__}({capacities})"
