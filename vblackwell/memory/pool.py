"""Levels as one pool that is counted: ranges for owners who place bytes by hand, and the statistics of everything.

An offload engine knows when it needs which bytes, so it reserves ranges on the levels it wants and moves them itself. They
are in the same levels as the stack's keys: a reservation makes keys give way, is counted with them, and is never evicted.
"""

from __future__ import annotations

from typing import Any

import torch

from vblackwell.errors import ConfigurationError, KeyClash
from vblackwell.memory.cache.entry import Entry
from vblackwell.memory.cache.placement import Placement
from vblackwell.memory.cache.policy import Policy
from vblackwell.memory.level import Level, Transfer
from vblackwell.memory.reservation import Reservation
from vblackwell.memory.statistics import Place
from vblackwell.units import format_bytes


class LevelPool:
    """What `VGPUStack` is besides keys.

    Attributes:
        levels: the `Level` objects, fastest first; level 0 is addressable. level0_device: its device.
    """

    def __init__(self, levels: list[Level], policy: Policy) -> None:
        assert levels[0].device is not None, "build_levels sees to it"
        self.levels = levels
        self.level0_device: torch.device = levels[0].device
        self._placement = Placement(levels, policy)
        self._lock = self._placement.lock
        self._statistics = self._placement.statistics
        self._entries: dict[str, Entry] = {}
        self._reservations: dict[str, Reservation] = {}
        self._closed = False

    def reserve(self, name: str, num_bytes: int, level: int) -> Reservation:
        """``num_bytes`` on exactly this level, counted as used and never evicted; cached keys there make room.

        Raises:
            KeyClash: the name is a key or a reservation already.
            InsufficientMemory: the keys there cannot make room; nothing moved.
        """
        self._check_level(level)
        if num_bytes <= 0:
            raise ConfigurationError(f"reservation {name!r} of {num_bytes} bytes: it must hold at least one byte")
        with self._placement.turn.take():
            self._check_open()
            if name in self._entries or name in self._reservations:
                raise KeyClash(
                    f"the name {name!r} is taken in this stack: give the models different names (name='...')"
                )
            extent = self._placement.reserve(f"reservation {name!r}", num_bytes, level)
            reservation = Reservation(name, level, extent, self.levels[level])
            with self._lock:
                self._reservations[name] = reservation
        return reservation

    def unreserve(self, reservation: Reservation) -> None:
        """Give a reservation back. Its transfers must be done. A closed stack has taken all of them back already."""
        with self._lock:
            if self._closed:
                return
            extent = reservation.end()
            del self._reservations[reservation.name]
        self.levels[reservation.level].free(extent)

    def read(self, reservation: Reservation, out: torch.Tensor) -> Transfer:
        """Start copying the first ``out.nbytes`` bytes of a reservation into the contiguous ``out``; counted on the link."""
        transfer = self.levels[reservation.level].read(reservation.extent, out)
        with self._lock:
            self._statistics.link_started(reservation.level, self._place_of(out), out.nbytes, transfer)
        return transfer

    def write(self, reservation: Reservation, src: torch.Tensor) -> Transfer:
        """Start copying the contiguous ``src`` to the start of a reservation; counted on the link."""
        transfer = self.levels[reservation.level].write(reservation.extent, src)
        with self._lock:
            self._statistics.link_started(self._place_of(src), reservation.level, src.nbytes, transfer)
        return transfer

    def count_hit(self, level: int = 0) -> None:
        """Something was found on ``level`` by whoever manages a reservation there."""
        with self._lock:
            self._statistics.hits[level] += 1

    def count_miss(self, level: int) -> None:
        """Something was looked for on level 0 and found on ``level`` only."""
        with self._lock:
            self._statistics.found(level)

    def count_link(self, source: int, destination: int, num_bytes: int, seconds: float | None = None) -> None:
        """Bytes that somebody else moved between two levels."""
        with self._lock:
            self._statistics.link(source, destination, num_bytes, seconds)

    def count_transfer(self, source: int, destination: int, num_bytes: int, transfer: Transfer) -> None:
        """Bytes that somebody else is moving between two levels; the time is taken from ``transfer`` when it is done."""
        with self._lock:
            self._statistics.link_started(source, destination, num_bytes, transfer)

    def add_stall(self, seconds: float) -> None:
        """Time that computation waited for bytes."""
        with self._lock:
            self._statistics.stall_seconds += seconds

    def get_stats(self) -> dict[str, Any]:
        """All counters.

        Returns:
            ``{'levels': [{'device', 'capacity_bytes', 'used_bytes', 'peak_bytes', 'hits', 'misses', 'evictions',
            'promotions', 'demotions'}], 'links': [{'source', 'destination', 'bytes', 'seconds'}], 'stall_seconds'}``.
            A key found on level 2 is a hit there and a miss on levels 0 and 1. ``promotions``: keys that rose to the
            level; ``demotions``: that sank from it, ``evictions`` of them to make room. ``seconds`` of an asynchronous
            copy count once it is done.
        """
        with self._lock:
            self._placement.sweep()
            return self._statistics.report()

    def _place_of(self, tensor: torch.Tensor) -> Place:
        """What a tensor outside the levels counts for: the first level on its device, else the device's name."""
        for number, level in enumerate(self.levels):
            if level.device == tensor.device:
                return number
        return str(tensor.device)

    def _check_level(self, level: int) -> None:
        if not isinstance(level, int) or not 0 <= level < len(self.levels):
            raise ConfigurationError(f"level {level!r} must be from 0 to {len(self.levels) - 1}")

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError("the stack is closed: make a new one")

    def _close_levels(self) -> None:
        self._reservations.clear()
        for level in self.levels:
            level.close()

    def __repr__(self) -> str:
        rooms = ", ".join(f"{level.name} {format_bytes(level.capacity_bytes)}" for level in self.levels)
        return f"{type(self).__name__}({rooms})"
