"""Where a group's bytes live when they are not in use: ranges on the levels below the first.

Kinds of range: ``weight`` (compute weights); the fp32 truth where the compute weight is narrower, either whole (``master``) or as what
a bf16 weight leaves out of it (``remainder``, 16 bits, see `masters`); ``gradient``, ``accumulated`` (fp32 sum of narrower gradients),
``exp_avg``, ``exp_avg_sq``, or what takes their place (`formats`). What is needed most often takes the upper levels: placement
walks the kinds in that order and fills level 1, then 2, and so on.

The decision (`stage_plan`) is arithmetic; `Homes` carries it out and takes everything back if one reservation fails.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import nullcontext, suppress

import torch

from vblackwell.errors import InsufficientMemory, VBError
from vblackwell.memory.cache.stack import Reservation
from vblackwell.memory.level import Extent, Transfer
from vblackwell.memory.pool import LevelPool
from vblackwell.offload.layout.formats import MOMENTS, NARROW_KINDS, PACKED_MOMENTS, range_bytes
from vblackwell.offload.layout.groups import Group
from vblackwell.offload.layout.stage_plan import PAGE, Request, Staging, place, plan_staging, spread
from vblackwell.offload.storage.stage_ledger import Ledger
from vblackwell.units import align_up, format_bytes

KEPT_KINDS = ("weight", "master", "remainder", *MOMENTS, *PACKED_MOMENTS)
KINDS = (*KEPT_KINDS, "gradient", "accumulated")


class Homes:
    """The ranges of one model on the lower levels of one stack.

    Args:
        levels: indices of the stack's levels that may be used, nearest first.
        groups: all groups of the model.
        kept: groups whose weights and states live on level 0 (their gradients leave as all do).
        streamed: groups whose updates run on level 0.
        set_aside_bytes: of the first level in RAM that ranges leave to others.

    Attributes:
        ledger: which ranges are written, and which of them are lost.
        sets: host memory for groups whose updates run on level 0 and whose ranges are on a disk (`Stage`).
        in_flight: copies whose ends must not be given back before they are over.
    """

    def __init__(
        self, stack: LevelPool, name: str, levels: Sequence[int], groups: Sequence[Group], kept: Iterable[Group] = (),
        streamed: Iterable[Group] = (), set_aside_bytes: int = 0,
    ) -> None:  # fmt: skip
        # Sizes, not groups: this object outlives the model (`enable._close_parts`) and must not keep it alive.
        self._largest = {kind: max(self.size_of(group, kind) for group in groups) for kind in KINDS}
        self.stack = stack
        self._name = name
        self._levels = list(levels)
        self._set_aside_bytes = set_aside_bytes
        self._kept = {group.index for group in kept}
        self._streamed = {group.index for group in streamed} - self._kept
        self._ranges: dict[tuple[int, str], Reservation] = {}
        self._staging: dict[str, Reservation] = {}
        self.sets: list[Reservation] = []
        self.sets_in_use = False
        self._held = Staging()
        self._taken: set[Reservation] = set()
        self.ledger = Ledger()
        self.in_flight: set[Transfer] = set()
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    def take(self, what: str, num_bytes: int, level: int) -> Reservation:
        """Reserve bytes of ``level`` for a while; like everything here they go back at `close` at the latest."""
        reservation = self.stack.reserve(f"{self._name}/{what}#{next(self._serial)}", num_bytes, level)
        self._taken.add(reservation)
        return reservation

    def give(self, reservation: Reservation) -> None:
        """End of `take`."""
        self._taken.discard(reservation)
        self.ledger.forget(reservation)
        self.stack.unreserve(reservation)

    def take_host(self, what: str, num_bytes: int) -> Reservation:
        """`take` from the first CPU-addressable level (level 0 if no lower one is).

        Raises:
            InsufficientMemory: it has no room.
        """
        return self.take(what, num_bytes, self.staging_level)

    def reserve(self, wanted: Iterable[tuple[Group, str]], later: Iterable[tuple[Group, str]] = ()) -> None:
        """Reserve a range for each (group, kind) that has none, most wanted first (`spread`); all or nothing.

        Args:
            later: what will be reserved next: if that will spill, room to work on it is taken now.

        Raises:
            InsufficientMemory: nothing was reserved.
        """
        missing = [(group, kind) for group, kind in wanted if (group.index, kind) not in self._ranges]
        if not missing:
            return
        fresh = [pair for pair in missing if not self._lives_on_level0(*pair)]
        requests = [self._request(*pair) for pair in fresh]
        order = spread(requests)
        fresh, requests = [fresh[index] for index in order], [requests[index] for index in order]
        coming = [self._request(*pair) for pair in later if not self._lives_on_level0(*pair)]
        staged, set_sizes = set(self._staging), [each.num_bytes for each in self.sets]
        made: list[tuple[int, str]] = []
        try:
            self._reserve_staging(requests, [coming[index] for index in spread(coming)])
            positions = place([request.num_bytes for request in requests], self._free(), "the model's bytes")
            for group, kind in (pair for pair in missing if self._lives_on_level0(*pair)):
                what = f"{self._name}/{group.name}/{kind}"
                self._ranges[group.index, kind] = self.stack.reserve(what, self.size_of(group, kind), 0)
                made.append((group.index, kind))
            for (group, kind), position in zip(fresh, positions, strict=True):
                key = (group.index, kind)
                self._ranges[key] = self._reserve_from(position, f"{group.name}/{kind}", self.size_of(group, kind))
                made.append(key)
                if not self._addressable(self._ranges[key].level):  # unforeseen, where RAM had no room in one piece
                    self._reserve_stage(kind, align_up(self._largest[kind], PAGE))
        except BaseException:
            for key in made:
                self.stack.unreserve(self._ranges.pop(key))
            for kind in self._staging.keys() - staged:
                self.stack.unreserve(self._staging.pop(kind))
            if set_sizes != [each.num_bytes for each in self.sets]:
                self._replace_sets(set_sizes)
            self._held = Staging(
                {kind: each.num_bytes for kind, each in self._staging.items()}, len(self.sets), self._set_bytes()
            )
            raise

    def keeps(self, group: Group) -> bool:
        """Whether weights and states of ``group`` live on level 0."""
        return group.index in self._kept

    def _lives_on_level0(self, group: Group, kind: str) -> bool:
        return group.index in self._kept and kind in KEPT_KINDS

    def _request(self, group: Group, kind: str) -> Request:
        # Every level rounds up to its own alignment; the coarsest is right for all.
        alignment = max(self.stack.levels[level].alignment for level in self._levels)
        held_bytes = align_up(self.size_of(group, kind), alignment)
        return Request(group.index, kind, held_bytes, group.index in self._streamed)

    def _free(self) -> list[int]:
        """Bytes of each level that ranges may take."""
        levels = [self.stack.levels[level] for level in self._levels]
        found = [level.capacity_bytes - level.used_bytes for level in levels]
        if self._set_aside_bytes and self.staging_level in self._levels:
            position = self._levels.index(self.staging_level)
            found[position] = max(0, found[position] - self._set_aside_bytes)
        return found

    def _reserve_from(self, position: int, what: str, num_bytes: int) -> Reservation:
        """Reserve on the level at ``position``, or on a lower one where that is too fragmented to hold the range in one piece."""
        for level in self._levels[position:-1]:
            try:
                return self.stack.reserve(f"{self._name}/{what}", num_bytes, level)
            except InsufficientMemory:
                continue
        return self.stack.reserve(f"{self._name}/{what}", num_bytes, self._levels[-1])

    def _reserve_staging(self, requests: list[Request], later: list[Request]) -> None:
        """Take the host memory through which ranges that are not in RAM are worked on, as `plan_staging` wants it.

        It is taken first and only if something will spill, so that a stack that holds everything in RAM pays nothing.
        """
        in_ram = [self._addressable(level) for level in self._levels]
        staged_already: dict[int, int] = {}
        for (index, kind), reservation in self._ranges.items():
            if index in self._streamed and kind in KEPT_KINDS and not self._addressable(reservation.level):
                staged_already[index] = staged_already.get(index, 0) + align_up(reservation.num_bytes, PAGE)
        free, held, host = self._free(), self._held, self.staging_level
        if not self.sets_in_use and any(in_ram):  # then they may be others
            free[in_ram.index(True)] += held.num_sets * held.set_bytes
            held = Staging(held.by_kind)
        planned = plan_staging(
            requests, later, free, in_ram, held, staged_already, self._largest, self.stack.levels[host].capacity_bytes
        )
        self._held = planned
        if not self.sets_in_use and (planned.num_sets, planned.set_bytes) != (len(self.sets), self._set_bytes()):
            self._replace_sets([planned.set_bytes] * planned.num_sets)
        for kind, num_bytes in planned.by_kind.items():
            self._reserve_stage(kind, num_bytes)

    def _replace_sets(self, sizes: Sequence[int]) -> None:
        while self.sets:
            self.give(self.sets.pop())
        for number, num_bytes in enumerate(sizes):
            with suppress(InsufficientMemory) if number else nullcontext():  # not in one piece; one is enough
                self.sets.append(self.take_host("staging set", num_bytes))

    def _reserve_stage(self, kind: str, num_bytes: int) -> None:
        """Host memory through which ranges of ``kind`` are worked on; a stack without a level in RAM has none to count it to."""
        if kind in self._staging or not self.has_host_level:
            return
        what = f"{self._name}/staging/{kind}"
        try:
            self._staging[kind] = self.stack.reserve(what, num_bytes, self.staging_level)
        except InsufficientMemory as error:
            raise InsufficientMemory(
                f"states on a disk pass through RAM, which takes {format_bytes(num_bytes)} of it in one piece for {kind}, and "
                f"{format_bytes(error.available_bytes)} are free: raise host_memory (the capacity of the 'cpu' level)",
                needed_bytes=error.needed_bytes,
                available_bytes=error.available_bytes,
            ) from error

    @property
    def has_host_level(self) -> bool:
        """Whether a level below the first is in RAM."""
        return any(self._addressable(level) for level in self._levels)

    def _set_bytes(self) -> int:
        return self.sets[0].num_bytes if self.sets else 0

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
            self.ledger.settle_to_read(reservation)
            started = time.perf_counter()
            self.stack.levels[reservation.level].read(reservation.extent, staged).wait()
            self._count(reservation.level, self.staging_level, reservation.num_bytes, started)
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
            self.ledger.settle(reservation)
            self.ledger.changed(reservation)  # what is read from now on is neither old nor new
            started = time.perf_counter()
            try:
                self.stack.levels[reservation.level].write(reservation.extent, opened).wait()
            except BaseException as error:
                self.ledger.end(reservation, error)
                raise
            self._count(self.staging_level, reservation.level, reservation.num_bytes, started)
        self.ledger.end(reservation, None)

    def start_read(self, reservation: Reservation, out: torch.Tensor) -> Transfer | None:
        """Begin to read the range into host memory, whose last write is over; None if the homes are closed."""
        return self._start(
            self.stack.levels[reservation.level].read, reservation, out, reservation.level, self.staging_level
        )

    def start_write(self, reservation: Reservation, source: torch.Tensor) -> Transfer | None:
        """Begin to write the range from host memory; None if the homes are closed."""
        return self._start(
            self.stack.levels[reservation.level].write, reservation, source, self.staging_level, reservation.level
        )

    def _start(
        self, move: Callable[[Extent, torch.Tensor], Transfer], reservation: Reservation, memory: torch.Tensor,
        source: int, destination: int,
    ) -> Transfer | None:  # fmt: skip
        with self._lock:
            if self._closed:
                return None
            transfer = move(reservation.extent, memory)
            self.in_flight.add(transfer)
        self.stack.count_transfer(source, destination, reservation.num_bytes, transfer)
        return transfer

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
    def staging_level(self) -> int:
        """Where staged bytes are: the first CPU-addressable level below the first, level 0 if there is none."""
        return next((level for level in self._levels if self._addressable(level)), 0)

    def _count(self, source: int, destination: int, num_bytes: int, started: float) -> None:
        # Not `stack.read`: without a GPU it could not tell staging memory from level 0, both being RAM.
        self.stack.count_link(source, destination, num_bytes, time.perf_counter() - started)

    def _stage(self, kind: str, num_bytes: int) -> torch.Tensor:
        if kind not in self._staging:
            return torch.empty(num_bytes, dtype=torch.uint8)  # a stack without a host level: nothing to account it to
        view = self._staging[kind].view()
        assert view is not None and view.device.type == "cpu"
        return view[:num_bytes]

    def bytes_by_level(self) -> dict[str, list[int]]:
        """Reserved bytes of each kind, per level of the stack."""
        table: dict[str, list[int]] = {}
        for (_, kind), reservation in self._ranges.items():
            row = table.setdefault(kind, [0] * len(self.stack.levels))
            row[reservation.level] += reservation.num_bytes
        return table

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


def state_kinds(group: Group, homes: Homes) -> list[str]:
    """What AdamW of ``group`` keeps next to the compute weight, where its update runs on level 0."""
    return [kind for kind in ("remainder", *MOMENTS, *PACKED_MOMENTS) if (group, kind) in homes]
