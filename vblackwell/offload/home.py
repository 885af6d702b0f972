"""Where a group's bytes live when they are not in use: ranges on the levels below the first.

Kinds of range: ``weight`` (compute weights); the fp32 truth where the compute weight is narrower, either whole (``master``) or as what
a bf16 weight leaves out of it (``remainder``, 16 bits, see `masters`); ``gradient``, ``accumulated`` (fp32 sum of narrower gradients),
``exp_avg``, ``exp_avg_sq``, or what takes their place (`formats`). What is needed most often takes the upper levels: placement
walks the kinds in that order and fills level 1, then 2, and so on.

The decision (`place`) is arithmetic; `Homes` carries it out and takes everything back if one reservation fails.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from vblackwell.errors import InsufficientMemory, VBError
from vblackwell.memory.level import Transfer
from vblackwell.memory.stack import Reservation, VGPUStack
from vblackwell.offload.formats import MOMENTS, NARROW_KINDS, PACKED_MOMENTS, range_bytes
from vblackwell.offload.groups import Group
from vblackwell.units import align_up, format_bytes

KEPT_KINDS = ("weight", "master", "remainder", *MOMENTS, *PACKED_MOMENTS)
KINDS = (*KEPT_KINDS, "gradient", "accumulated")


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


class Homes:
    """The ranges of one model on the lower levels of one stack.

    Args:
        levels: indices of the stack's levels that may be used, nearest first.
        groups: all groups of the model.
        kept: groups whose weights and states live on level 0 (their gradients leave as all do).
    """

    def __init__(
        self, stack: VGPUStack, name: str, levels: Sequence[int], groups: Sequence[Group], kept: Iterable[Group] = ()
    ) -> None:
        # Sizes, not groups: this object outlives the model (`enable._close_parts`) and must not keep it alive.
        self._largest = {kind: max(self.size_of(group, kind) for group in groups) for kind in KINDS}
        self.stack = stack
        self._name = name
        self._levels = list(levels)
        self._kept = {group.index for group in kept}
        self._ranges: dict[tuple[int, str], Reservation] = {}
        self._staging: dict[str, Reservation] = {}
        self._taken: set[Reservation] = set()
        self.in_flight: set[Transfer] = set()  # copies whose ends must not be given back before they are over
        self._serial = itertools.count()

    def take(self, what: str, num_bytes: int, level: int) -> Reservation:
        """Reserve bytes of ``level`` for a while; like everything here they go back at `close` at the latest."""
        reservation = self.stack.reserve(f"{self._name}/{what}#{next(self._serial)}", num_bytes, level)
        self._taken.add(reservation)
        return reservation

    def give(self, reservation: Reservation) -> None:
        """End of `take`."""
        self._taken.discard(reservation)
        self.stack.unreserve(reservation)

    def take_host(self, what: str, num_bytes: int) -> Reservation:
        """`take` from the first CPU-addressable level (level 0 if no lower one is).

        Raises:
            InsufficientMemory: it has no room.
        """
        return self.take(what, num_bytes, self._staging_level)

    def reserve(self, wanted: Iterable[tuple[Group, str]]) -> None:
        """Reserve a range for each (group, kind) that has none, most wanted first; all or nothing.

        Raises:
            InsufficientMemory: nothing was reserved.
        """
        missing = [(group, kind) for group, kind in wanted if (group.index, kind) not in self._ranges]
        fresh = [(group, kind) for group, kind in missing if group.index not in self._kept or kind not in KEPT_KINDS]
        self._reserve_staging(fresh)
        positions = self._place(fresh)
        made: list[tuple[int, str]] = []
        try:
            for group, kind in (pair for pair in missing if pair not in fresh):
                what = f"{self._name}/{group.name}/{kind}"
                self._ranges[group.index, kind] = self.stack.reserve(what, self.size_of(group, kind), 0)
                made.append((group.index, kind))
            for (group, kind), position in zip(fresh, positions, strict=True):
                key = (group.index, kind)
                self._ranges[key] = self._reserve_from(position, f"{group.name}/{kind}", self.size_of(group, kind))
                made.append(key)
        except BaseException:
            for key in made:
                self.stack.unreserve(self._ranges.pop(key))
            raise

    def _place(self, fresh: list[tuple[Group, str]]) -> list[int]:
        """Positions in ``self._levels`` for ``fresh``, by arithmetic on what is free now."""
        levels = [self.stack.levels[index] for index in self._levels]
        # Every level rounds up to its own alignment; the coarsest is right for all.
        alignment = max(level.alignment for level in levels)
        sizes = [align_up(self.size_of(group, kind), alignment) for group, kind in fresh]
        return place(sizes, [level.capacity_bytes - level.used_bytes for level in levels], "the model's bytes")

    def _reserve_from(self, position: int, what: str, num_bytes: int) -> Reservation:
        """Reserve on the level at ``position``, or on a lower one where that is too fragmented to hold the range in one piece."""
        for level in self._levels[position:-1]:
            try:
                return self.stack.reserve(f"{self._name}/{what}", num_bytes, level)
            except InsufficientMemory:
                continue
        return self.stack.reserve(f"{self._name}/{what}", num_bytes, self._levels[-1])

    def _reserve_staging(self, fresh: list[tuple[Group, str]]) -> None:
        """Host memory through which ranges of not addressable levels are worked on: the largest range of each kind.

        It is taken first and only if something will spill, so that a stack that holds everything in RAM pays nothing.
        """
        on_host = [position for position, level in enumerate(self._levels) if self._addressable(level)]
        if not on_host or all(position in on_host for position in self._place(fresh)):
            return
        for kind in dict.fromkeys(kind for _, kind in fresh):
            if (
                kind not in self._staging
            ):  # once for all groups: the worker may be using it when the next range is reserved
                self._staging[kind] = self._reserve_from(on_host[0], f"staging/{kind}", self._largest[kind])

    def _addressable(self, level: int) -> bool:
        device = self.stack.levels[level].device
        return device is not None and device.type == "cpu"

    @staticmethod
    def size_of(group: Group, kind: str) -> int:
        """Bytes of a range: ``weight``, ``gradient`` and ``remainder`` are as wide as the compute dtype, moments as `formats` has them."""
        if kind in PACKED_MOMENTS:
            itemsize = group.slots[0].dtype.itemsize
            return range_bytes(kind, group.num_bytes // itemsize, itemsize)
        return group.num_bytes if kind in NARROW_KINDS else group.num_bytes_fp32

    def __contains__(self, key: tuple[Group, str]) -> bool:
        return (key[0].index, key[1]) in self._ranges

    def range(self, group: Group, kind: str) -> Reservation:
        return self._ranges[group.index, kind]

    def open(self, group: Group, kind: str, *, load: bool = True) -> torch.Tensor:
        """The range as a CPU uint8 tensor: the bytes themselves where addressable, else staged (read if ``load``).

        One (kind) at a time may be open per model: staging is shared between groups. Only the worker thread calls this,
        or a caller that has waited for it.
        """
        return self.open_at(self.range(group, kind), kind, load=load)

    def open_at(self, reservation: Reservation, kind: str, *, load: bool = True) -> torch.Tensor:
        """`open` for any reservation that holds bytes of ``kind``."""
        view = reservation.view()
        if view is not None and view.device.type == "cpu":
            return view
        staged = self._stage(kind, reservation.num_bytes)
        if load:
            started = time.perf_counter()
            self.stack.levels[reservation.level].read(reservation.extent, staged).wait()
            self._count(reservation.level, self._staging_level, reservation.num_bytes, started)
        return staged

    def close_range(self, group: Group, kind: str, opened: torch.Tensor, *, store: bool) -> None:
        """End of `open`; ``store`` writes staged bytes back."""
        self.close_at(self.range(group, kind), opened, store=store)

    def close_at(self, reservation: Reservation, opened: torch.Tensor, *, store: bool) -> None:
        """End of `open_at`."""
        view = reservation.view()
        if store and (view is None or view.device.type != "cpu"):
            started = time.perf_counter()
            self.stack.levels[reservation.level].write(reservation.extent, opened).wait()
            self._count(self._staging_level, reservation.level, reservation.num_bytes, started)

    def swap(self, group: Group, kind: str, reservation: Reservation) -> Reservation:
        """Make ``reservation`` (taken with `take`, of the same size) the range of (group, kind); what it was goes to the caller."""
        key = (group.index, kind)
        old = self._ranges[key]
        assert old.num_bytes == reservation.num_bytes and reservation in self._taken
        self._taken.discard(reservation)
        self._taken.add(old)
        self._ranges[key] = reservation
        return old

    @property
    def _staging_level(self) -> int:
        """Where staged bytes are: the first CPU-addressable level below the first, level 0 if there is none."""
        return next((level for level in self._levels if self._addressable(level)), 0)

    def _count(self, source: int, destination: int, num_bytes: int, started: float) -> None:
        # Not `stack.read`: without a GPU it could not tell staging memory from level 0, both being RAM.
        self.stack.count_link(source, destination, num_bytes, time.perf_counter() - started)

    def _stage(self, kind: str, num_bytes: int) -> torch.Tensor:
        view = self._staging[kind].view() if kind in self._staging else None
        if view is not None and view.device.type == "cpu":
            return view[:num_bytes]
        return torch.empty(num_bytes, dtype=torch.uint8)  # a stack without a host level: nothing to account it to

    def bytes_by_level(self) -> dict[str, list[int]]:
        """Reserved bytes of each kind, per level of the stack."""
        table: dict[str, list[int]] = {}
        for (_, kind), reservation in self._ranges.items():
            row = table.setdefault(kind, [0] * len(self.stack.levels))
            row[reservation.level] += reservation.num_bytes
        return table

    def close(self) -> None:
        """Give every range back. Idempotent."""
        for transfer in self.in_flight:
            with suppress(VBError, OSError):  # nobody is left who would want to know
                transfer.wait()
        self.in_flight.clear()
        for reservation in [*self._ranges.values(), *self._staging.values(), *self._taken]:
            self.stack.unreserve(reservation)
        self._ranges.clear()
        self._staging.clear()
        self._taken.clear()
