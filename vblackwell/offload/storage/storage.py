"""Where a group's bytes are when they are not in use: ranges on the levels below the first.

`StoragePlan` decides (arithmetic); `Storage` reserves what it says, takes everything back if one reservation fails, and
lends the CPU the bytes of a range: directly where they are in RAM, through staging memory where they are on a disk.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import nullcontext, suppress
from dataclasses import replace

import torch

from vblackwell.errors import InsufficientMemory, VBError
from vblackwell.memory.level import Extent, Level, Transfer
from vblackwell.memory.pool import LevelPool, Reservation
from vblackwell.offload.layout.groups import STATE_KINDS, Group
from vblackwell.offload.layout.storage_plan import PAGE, LevelSpace, StoragePlan
from vblackwell.offload.storage.ledger import Ledger
from vblackwell.units import align_up, format_bytes

Ranges = dict[str, Reservation]  # of one group, by kind


def spaces_of(stack: LevelPool) -> list[LevelSpace]:
    """What a plan must know of the levels of ``stack`` now."""
    return [
        LevelSpace(level.name, _kind_of(level), level.capacity_bytes, level.used_bytes, level.alignment)
        for level in stack.levels
    ]


def _kind_of(level: Level) -> str:
    if level.device is None:
        return "disk"
    return "ram" if level.device.type == "cpu" else "gpu"


class Storage:
    """The ranges of one model in one stack.

    Args:
        plan: its ranges are reserved at once.

    Attributes:
        plan: where the ranges are. It holds sizes and no groups: this object may outlive the model and must not keep it
            alive.
        ledger: which ranges are written, and which of them are lost.
        sets: host memory for groups whose updates run on level 0 and whose ranges are on a disk (`Stage`).
        sets_in_use: they stay what they are.
        in_flight: copies whose ends must not be given back before they are over.

    Raises:
        InsufficientMemory: a level has no room; nothing was reserved.
    """

    def __init__(self, stack: LevelPool, name: str, plan: StoragePlan) -> None:
        self.stack = stack
        self.plan = replace(plan, ranges={})
        self._name = name
        self._ranges: dict[tuple[int, str], Reservation] = {}
        self._staging: dict[str, Reservation] = {}
        self.sets: list[Reservation] = []
        self.sets_in_use = False
        self._taken: set[Reservation] = set()
        self.ledger = Ledger()
        self.in_flight: set[Transfer] = set()
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._closed = False
        self._carry_out(plan)

    # -- reserving -----------------------------------------------------------------------------------------------------

    def reserve(self, wanted: Iterable[tuple[Group, str]], later: Iterable[tuple[Group, str]] = ()) -> None:
        """Reserve a range for each (group, kind) that has none; all or nothing. Arguments as `StoragePlan.with_ranges`.

        Raises:
            InsufficientMemory: nothing was reserved.
        """
        missing = [pair for pair in wanted if pair not in self]
        if missing:
            now = replace(self.plan, levels=tuple(spaces_of(self.stack)), sets_fixed=self.sets_in_use)
            self._carry_out(now.with_ranges(missing, later))

    def _carry_out(self, planned: StoragePlan) -> None:
        """Reserve what ``planned`` has and this storage has not."""
        staged, set_sizes = set(self._staging), [each.num_bytes for each in self.sets]
        ranges = dict(planned.ranges)
        made: list[tuple[int, str]] = []
        try:
            self._reserve_staging(planned)
            for key, placed in planned.ranges.items():
                if key not in self._ranges:
                    found = self._ranges[key] = self._reserve(placed.name, placed.num_bytes, placed.level)
                    made.append(key)
                    ranges[key] = replace(placed, level=found.level)
                    if found.level in planned.usable and planned.levels[found.level].kind != "ram":
                        # Unforeseen where RAM had no room in one piece.
                        self._reserve_stage(planned, key[1], align_up(planned.largest[key[1]], PAGE))
        except BaseException:
            for key in made:
                self.stack.unreserve(self._ranges.pop(key))
            for kind in self._staging.keys() - staged:
                self.stack.unreserve(self._staging.pop(kind))
            if set_sizes != [each.num_bytes for each in self.sets]:
                self._replace_sets(set_sizes)
            raise
        by_kind = {kind: each.num_bytes for kind, each in self._staging.items()}
        self.plan = replace(planned, ranges=ranges, staging=replace(planned.staging, by_kind=by_kind))

    def _reserve(self, what: str, num_bytes: int, level: int) -> Reservation:
        """On ``level``, or on a lower one where that is too fragmented to hold the range in one piece."""
        numbers = (
            [level, *(each for each in self.plan.usable if each > level)] if level in self.plan.usable else [level]
        )
        for number in numbers[:-1]:
            with suppress(InsufficientMemory):
                return self.stack.reserve(f"{self._name}/{what}", num_bytes, number)
        return self.stack.reserve(f"{self._name}/{what}", num_bytes, numbers[-1])

    def _reserve_staging(self, planned: StoragePlan) -> None:
        """Host memory for what is not in RAM, before anything else is taken of it."""
        wanted = planned.staging
        sizes = [wanted.set_bytes] * wanted.num_sets
        if not planned.sets_fixed and sizes != [each.num_bytes for each in self.sets]:
            self._replace_sets(sizes)
        for kind, num_bytes in wanted.by_kind.items():
            self._reserve_stage(planned, kind, num_bytes)

    def _reserve_stage(self, planned: StoragePlan, kind: str, num_bytes: int) -> None:
        """Host memory through which ranges of ``kind`` are worked on, where a level in RAM can count it."""
        if kind in self._staging or not planned.has_host_level:
            return
        try:
            self._staging[kind] = self.stack.reserve(f"{self._name}/staging/{kind}", num_bytes, planned.staging_level)
        except InsufficientMemory as error:
            raise InsufficientMemory(
                f"states on a disk pass through RAM, which takes {format_bytes(num_bytes)} of it in one piece for "
                f"{kind}, and {format_bytes(error.available_bytes)} are free: raise host_memory (the capacity of the "
                "'cpu' level)",
                needed_bytes=error.needed_bytes,
                available_bytes=error.available_bytes,
            ) from error

    def _replace_sets(self, sizes: Sequence[int]) -> None:
        while self.sets:
            self.give(self.sets.pop())
        for number, num_bytes in enumerate(sizes):
            with suppress(InsufficientMemory) if number else nullcontext():  # not in one piece; one is enough
                self.sets.append(self.take_host("staging set", num_bytes))

    def take(self, what: str, num_bytes: int, level: int) -> Reservation:
        """Reserve bytes of ``level`` for a while; like everything here they go back at `close` at the latest."""
        reservation = self.stack.reserve(f"{self._name}/{what}#{next(self._serial)}", num_bytes, level)
        self._taken.add(reservation)
        return reservation

    def take_host(self, what: str, num_bytes: int) -> Reservation:
        """`take` from the first level in RAM below level 0 (level 0 if there is none).

        Raises:
            InsufficientMemory: it has no room.
        """
        return self.take(what, num_bytes, self.plan.staging_level)

    def give(self, reservation: Reservation) -> None:
        """End of `take`."""
        self._taken.discard(reservation)
        self.ledger.forget(reservation)
        self.stack.unreserve(reservation)

    def swap(self, group: Group, kind: str, reservation: Reservation) -> Reservation:
        """Make ``reservation`` (from `take`, of that size and level) the range of (group, kind); returns the old."""
        key = (group.index, kind)
        old = self._ranges[key]
        assert old.num_bytes == reservation.num_bytes and reservation in self._taken
        self._taken.discard(reservation)
        self._taken.add(old)
        self._ranges[key] = reservation
        return old

    # -- asking --------------------------------------------------------------------------------------------------------

    def __contains__(self, key: tuple[Group, str]) -> bool:
        return (key[0].index, key[1]) in self._ranges

    def range(self, group: Group, kind: str) -> Reservation:
        return self._ranges[group.index, kind]

    def states_of(self, group: Group) -> list[str]:
        """Kinds of what AdamW keeps of ``group`` next to the compute weight, where it is updated on level 0."""
        return [kind for kind in STATE_KINDS if (group.index, kind) in self._ranges]

    def bytes_by_level(self) -> dict[str, list[int]]:
        """Reserved bytes of each kind, by level of the stack."""
        return self.plan.bytes_by_level()

    # -- bytes, for the CPU --------------------------------------------------------------------------------------------

    def open(self, group: Group, kind: str, *, load: bool = True) -> torch.Tensor:
        """The range as a CPU uint8 tensor: the bytes themselves where they are in RAM, else staged (read if ``load``).

        One of a kind at a time may be open: staging is shared between groups. Only the worker thread calls this, or a
        caller that has waited for it.
        """
        return self.open_at(self.range(group, kind), kind, load=load)

    def open_at(self, reservation: Reservation, kind: str, *, load: bool = True) -> torch.Tensor:
        """`open` for any reservation that holds bytes of ``kind``."""
        view = reservation.view()
        if view is not None and view.device.type == "cpu":
            return view
        staged = self._stage(kind, reservation.num_bytes)
        if load:
            self.ledger.wait_to_read(reservation)
            started = time.perf_counter()
            self.stack.levels[reservation.level].read(reservation.extent, staged).wait()
            self._count(reservation.level, self.plan.staging_level, reservation.num_bytes, started)
        return staged

    def close_range(self, group: Group, kind: str, opened: torch.Tensor, *, store: bool) -> None:
        """End of `open`; ``store``: they were written to. Staged bytes are written back then."""
        self.close_at(self.range(group, kind), opened, store=store)

    def close_at(self, reservation: Reservation, opened: torch.Tensor, *, store: bool) -> None:
        """End of `open_at`."""
        if not store:
            return
        view = reservation.view()
        if view is None or view.device.type != "cpu":
            self.ledger.wait(reservation)
            self.ledger.changed(reservation)  # what is read from now on is neither old nor new
            started = time.perf_counter()
            try:
                self.stack.levels[reservation.level].write(reservation.extent, opened).wait()
            except BaseException as error:
                self.ledger.end(reservation, error)
                raise
            self._count(self.plan.staging_level, reservation.level, reservation.num_bytes, started)
        self.ledger.end(reservation, None)

    def zero(self, group: Group, kind: str) -> None:
        """Make a range zero (worker thread)."""
        view = self.range(group, kind).view()
        if view is not None and view.is_cuda:  # what lives on a GPU need not be zeroed through the host
            view.zero_()
            torch.cuda.current_stream(view.device).synchronize()
            return
        flat = self.open(group, kind, load=False)
        flat.zero_()
        self.close_range(group, kind, flat, store=True)

    def _stage(self, kind: str, num_bytes: int) -> torch.Tensor:
        if kind not in self._staging:  # a stack without a host level: nothing to count it to
            return torch.empty(num_bytes, dtype=torch.uint8)
        view = self._staging[kind].view()
        assert view is not None and view.device.type == "cpu"
        return view[:num_bytes]

    def _count(self, source: int, destination: int, num_bytes: int, started: float) -> None:
        # Not `stack.read`: without a GPU it could not tell staging memory from level 0, both being RAM.
        self.stack.count_link(source, destination, num_bytes, time.perf_counter() - started)

    # -- bytes, in the background --------------------------------------------------------------------------------------

    def start_read(self, reservation: Reservation, out: torch.Tensor) -> Transfer | None:
        """Begin to read the range, whose last write is over, into host memory; None if the storage is closed."""
        level = reservation.level
        return self._start(self.stack.levels[level].read, reservation, out, level, self.plan.staging_level)

    def start_write(self, reservation: Reservation, source: torch.Tensor) -> Transfer | None:
        """Begin to write the range from host memory; None if the storage is closed."""
        level = reservation.level
        return self._start(self.stack.levels[level].write, reservation, source, self.plan.staging_level, level)

    def _start(
        self,
        move: Callable[[Extent, torch.Tensor], Transfer],
        reservation: Reservation,
        memory: torch.Tensor,
        source: int,
        destination: int,
    ) -> Transfer | None:
        with self._lock:
            if self._closed:
                return None
            transfer = move(reservation.extent, memory)
            self.in_flight.add(transfer)
        self.stack.count_transfer(source, destination, reservation.num_bytes, transfer)
        return transfer

    def close(self) -> None:
        """Give every range back. Idempotent."""
        with self._lock:
            self._closed = True
        while self.in_flight:
            with suppress(VBError, OSError, CancelledError):  # nobody is left who would want to know
                self.in_flight.pop().wait()
        for reservation in [*self._ranges.values(), *self._staging.values(), *self._taken]:
            self.stack.unreserve(reservation)
        self._ranges.clear()
        self._staging.clear()
        self._taken.clear()
        self.sets.clear()
