"""Where a group's bytes are when they are not in use: ranges below the first level, as `StoragePlan` decides."""

import itertools
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace

import torch
from torch import Tensor

from vblackwell.errors import InsufficientMemory, VBError
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.memory.pool import Reservation
from vblackwell.offload.layout.groups import PARAMETER_KINDS, STATE_KINDS, Group
from vblackwell.offload.layout.storage_plan import (
    INCOMING,
    PAGE,
    STATES,
    SUMS,
    LevelSpace,
    StoragePlan,
    staging_does_not_fit,
)
from vblackwell.units import align_up

Ranges = dict[str, Reservation]  # of one group, by kind
Stamp = tuple[Reservation, int]


def on_disk(ranges: Ranges) -> dict[str, Reservation]:
    """Those that copies to and from level 0 cannot reach."""
    return {kind: reservation for kind, reservation in ranges.items() if not reservation.is_addressable}


class Ledger:
    """How often the bytes of ranges changed, whether a write is under way, and whether one failed. Thread-safe. A range
    is read, or written again, only when its last write is over; one whose write failed is lost until the next.
    """

    def __init__(self) -> None:
        self._changes: dict[Reservation, int] = {}
        self._writes: dict[Reservation, Transfer] = {}
        self._lost: dict[Reservation, BaseException] = {}
        self._lock = threading.RLock()  # collecting garbage inside it may close the storage

    def stamp(self, reservation: Reservation) -> Stamp:
        """Tells the bytes that ``reservation`` has now, or has when what was queued is over, from all others."""
        return reservation, self._changes.get(reservation, 0)

    def changed(self, reservation: Reservation) -> None:
        """Its bytes have changed, or will have when what has just been queued is over."""
        with self._lock:
            self._changes[reservation] = self._changes.get(reservation, 0) + 1

    def begin(self, reservation: Reservation, write: Transfer) -> None:
        """``write`` fills it in the background."""
        with self._lock:
            self._writes[reservation] = write

    def is_written(self, reservation: Reservation) -> bool:
        """Whether no write to it is under way, and none has failed."""
        write = self._writes.get(reservation)
        return reservation not in self._lost and (write is None or write.done())

    def wait(self, reservation: Reservation) -> None:
        """Return when no write to it is under way, so that the caller may write there."""
        write = self._writes.get(reservation)
        if write is not None:
            with suppress(VBError, OSError):  # then it is lost
                write.wait()

    def wait_to_read(self, reservation: Reservation) -> None:
        """`wait`, for a caller that reads; raises what the last write failed with."""
        self.wait(reservation)
        lost = self._lost.get(reservation)
        if lost is not None:
            raise lost

    def end(self, reservation: Reservation, error: BaseException | None) -> None:
        """A write of the whole range is over; ``error``: it failed, and what the range held is lost."""
        with self._lock:
            self.changed(reservation)
            self._writes.pop(reservation, None)
            if error is None:
                self._lost.pop(reservation, None)
            else:
                self._lost[reservation] = error

    def forget(self, reservation: Reservation) -> None:
        """The range ends."""
        with self._lock:
            for table in (self._changes, self._writes, self._lost):
                table.pop(reservation, None)


def spaces_of(stack: VGPUStack) -> list[LevelSpace]:
    """What a plan must know of the levels of ``stack`` now."""
    found = []
    for level in stack.levels:
        kind = "disk" if level.device is None else "ram" if level.device.type == "cpu" else "gpu"
        found.append(LevelSpace(level.name, kind, level.capacity_bytes, level.used_bytes, level.alignment))
    return found


class Storage:
    """The ranges of one model in one stack; they are reserved at once, or none is. It holds sizes and no groups: it may
    outlive the model and must not keep it alive.

    Attributes:
        sets: host memory for groups whose updates run on level 0 and whose ranges are on a disk (`Stage`).
        sets_in_use: they stay what they are. in_flight: copies whose ends must not be given back before they are over.
    """

    def __init__(self, stack: VGPUStack, name: str, plan: StoragePlan) -> None:
        self.stack = stack
        self.plan = replace(plan, ranges={})
        self._name = name
        self._ranges: dict[tuple[int, str], Reservation] = {}
        self._staging: dict[str, Reservation] = {}
        self.sets: list[Reservation] = []
        self.sets_in_use = False
        self._taken: set[Reservation] = set()
        self._added: set[Reservation] = set()  # of `_ranges`, what nothing has planned
        self.ledger = Ledger()
        self.in_flight: set[Transfer] = set()
        self._serial = itertools.count()
        self._lock = threading.RLock()  # collecting garbage inside it may close the storage
        self._closed = False
        self._carry_out(plan)

    # -- reserving -----------------------------------------------------------------------------------------------------

    def reserve(
        self, wanted: Iterable[tuple[Group, str]], later: Iterable[tuple[Group, str]] = (), incoming_bytes: int = 0
    ) -> None:
        """Reserve a range for each (group, kind) that has none, all or nothing, as `StoragePlan.with_ranges`;
        ``incoming_bytes`` as there.
        """
        missing = [pair for pair in wanted if pair not in self]
        if missing or incoming_bytes > self.plan.incoming_bytes:
            now = replace(self.plan, levels=tuple(spaces_of(self.stack)), sets_fixed=self.sets_in_use)
            now = replace(now, incoming_bytes=max(incoming_bytes, now.incoming_bytes))
            self._carry_out(now.with_ranges(missing, later))

    def _carry_out(self, planned: StoragePlan) -> None:
        """Reserve what ``planned`` has and this storage has not."""
        sizes = [planned.staging.set_bytes] * planned.staging.num_sets
        set_sizes, ranges = [each.num_bytes for each in self.sets], dict(planned.ranges)
        with ExitStack() as undone:
            # Host memory for what is not in RAM, before anything else is taken of it.
            for kind in self._staging.keys() - planned.staging.by_kind.keys():
                undone.callback(self._reserve_stage, self.plan, kind, self._staging[kind].num_bytes, ExitStack())
                self.stack.unreserve(self._staging.pop(kind))
            if not planned.sets_fixed and sizes != set_sizes:
                undone.callback(self._replace_sets, set_sizes)
                self._replace_sets(sizes)
            for kind, num_bytes in planned.staging.by_kind.items():
                self._reserve_stage(planned, kind, num_bytes, undone)
            for key, placed in planned.ranges.items():
                if key not in self._ranges:
                    found = self._ranges[key] = self._reserve(placed.name, placed.num_bytes, placed.level)
                    undone.callback(lambda key=key: self.stack.unreserve(self._ranges.pop(key)))
                    ranges[key] = replace(placed, level=found.level)
                    if found.level in planned.usable and planned.levels[found.level].kind != "ram":
                        # Unforeseen where RAM had no room in one piece.
                        self._reserve_stage(planned, key[1], align_up(planned.largest[key[1]], PAGE), undone)
            undone.pop_all()
        by_kind = {kind: each.num_bytes for kind, each in self._staging.items()}
        self.plan = replace(planned, ranges=ranges, staging=replace(planned.staging, by_kind=by_kind))

    def _reserve(self, what: str, num_bytes: int, level: int) -> Reservation:
        """On ``level``, or on a lower one where that is too fragmented to hold the range in one piece."""
        usable = self.plan.usable
        *others, last = [level, *(lower for lower in usable if lower > level)] if level in usable else [level]
        for number in others:
            with suppress(InsufficientMemory):
                return self.stack.reserve(f"{self._name}/{what}", num_bytes, number)
        return self.stack.reserve(f"{self._name}/{what}", num_bytes, last)

    def _reserve_stage(self, planned: StoragePlan, kind: str, num_bytes: int, undone: ExitStack) -> None:
        """Host memory through which ranges of ``kind`` are worked on, where a level in RAM can count it."""
        if kind in self._staging or not planned.has_host_level:
            return
        try:
            self._staging[kind] = self.stack.reserve(f"{self._name}/staging/{kind}", num_bytes, planned.staging_level)
        except InsufficientMemory as error:
            who = SUMS if kind == INCOMING else STATES
            raise staging_does_not_fit(num_bytes, f"in one piece for {kind}", error.available_bytes, who) from error
        undone.callback(lambda: self.stack.unreserve(self._staging.pop(kind)))

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
        """`take` from the first level in RAM below level 0 (level 0 if there is none)."""
        return self.take(what, num_bytes, self.plan.staging_level)

    @property
    def incoming(self) -> Reservation | None:
        """RAM that is kept for what is on its way to a sum, None where the plan has none."""
        return self._staging.get(INCOMING)

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

    def exchange(self, group: Group, kind: str, other: str) -> None:
        """Make the range of ``kind`` that of ``other``, of the same size, and the other way round."""
        keys = (group.index, kind), (group.index, other)
        self._ranges[keys[0]], self._ranges[keys[1]] = self._ranges[keys[1]], self._ranges[keys[0]]

    def add(self, group: Group, kind: str) -> None:
        """Reserve a range that nothing has planned, in RAM; InsufficientMemory where it has no room in one piece."""
        name = f"{self._name}/{group.name}/{kind}#{next(self._serial)}"
        self._ranges[group.index, kind] = self.stack.reserve(name, group.size_of(kind), self.plan.staging_level)
        self._added.add(self._ranges[group.index, kind])

    def drop(self, group: Group, kind: str, other: str) -> None:
        """End of `add`, of what nobody uses. Where it was exchanged with ``other``, which nobody uses either, that gets
        its place again: what was added together is free in one piece.
        """
        old, own = self._ranges.pop((group.index, kind)), self._ranges[group.index, other]
        if own in self._added:
            old.bytes.copy_(own.bytes)
            self._ranges[group.index, other] = old
            self.ledger.changed(old)
            old = own
        self._added.discard(old)
        self.ledger.forget(old)
        self.stack.unreserve(old)

    def __contains__(self, key: tuple[Group, str]) -> bool:
        return (key[0].index, key[1]) in self._ranges

    def range(self, group: Group, kind: str) -> Reservation:
        return self._ranges[group.index, kind]

    def states_of(self, group: Group) -> list[str]:
        """Kinds of what AdamW keeps of ``group`` next to the compute weight, where it is updated on level 0."""
        return [kind for kind in STATE_KINDS if (group.index, kind) in self._ranges]

    def own_ranges(self, group: Group) -> Ranges:
        """What an update of ``group`` reads and writes but for the gradient."""
        return {kind: self.range(group, kind) for kind in PARAMETER_KINDS if (group, kind) in self}

    # -- bytes, for the CPU --------------------------------------------------------------------------------------------

    def open(self, group: Group, kind: str, *, load: bool = True) -> Tensor:
        """The range as a CPU uint8 tensor: the bytes themselves where they are in RAM, else staged (read if ``load``).
        Valid until the next of its kind is opened, by the worker thread or a caller that has waited for it.
        """
        return self.open_at(self.range(group, kind), kind, load=load)

    def open_at(self, reservation: Reservation, kind: str, *, load: bool = True) -> Tensor:
        """`open` for any reservation that holds bytes of ``kind``."""
        view = reservation.view()
        if view is not None and view.device.type == "cpu":
            return view
        staged = self._stage(kind, reservation.num_bytes)
        if load:
            self.ledger.wait_to_read(reservation)
            self._move(reservation, staged, write=False)
        return staged

    def store(self, group: Group, kind: str, opened: Tensor) -> None:
        """The bytes that `open` gave were written to: staged ones are written back."""
        self.store_at(self.range(group, kind), opened)

    def store_at(self, reservation: Reservation, opened: Tensor) -> None:
        """`store`, after `open_at`."""
        view = reservation.view()
        if view is None or view.device.type != "cpu":
            self.ledger.wait(reservation)
            self.ledger.changed(reservation)  # what is read from now on is neither old nor new
            try:
                self._move(reservation, opened, write=True)
            except BaseException as error:
                self.ledger.end(reservation, error)
                raise
        self.ledger.end(reservation, None)

    def _move(self, reservation: Reservation, staged: Tensor, *, write: bool) -> None:
        transfer = self.start(reservation, staged, write=write)
        assert transfer is not None, "bytes are moved before the storage is closed"
        try:
            transfer.wait()
        finally:
            if transfer.done():  # not where it was interrupted: it goes on
                self.in_flight.discard(transfer)

    def zero(self, group: Group, kind: str) -> None:
        """Make a range zero (worker thread)."""
        view = self.range(group, kind).view()
        if view is not None and view.is_cuda:  # what lives on a GPU need not be zeroed through the host
            view.zero_()
            torch.cuda.current_stream(view.device).synchronize()
            return
        flat = self.open(group, kind, load=False)
        self.store(group, kind, flat.zero_())

    def _stage(self, kind: str, num_bytes: int) -> Tensor:
        if kind not in self._staging:  # a stack without a host level: nothing to count it to
            return torch.empty(num_bytes, dtype=torch.uint8)
        return self._staging[kind].bytes[:num_bytes]

    def start(self, reservation: Reservation, memory: Tensor, *, write: bool) -> Transfer | None:
        """Begin to read the range, whose last write is over, into host memory, or to write it; None once closed."""
        level, at, staging = self.stack.levels[reservation.level], reservation.level, self.plan.staging_level
        with self._lock:
            if self._closed:
                return None
            transfer = (level.write if write else level.read)(reservation.extent, memory)
            self.in_flight.add(transfer)
        # `stack.read` could not tell staging from a level 0 in RAM.
        link = (staging, at) if write else (at, staging)
        self.stack.count_transfer(*link, reservation.num_bytes, transfer)
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
        for held in (self._ranges, self._staging, self._taken, self.sets):
            held.clear()


class Shadows:
    """Ranges, of the same sizes on the same levels, that an update before its step writes instead of a group's own: a
    rollback without a copy. If they do not fit, or the pages of new ones have not come, the update waits for its step.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.spare: dict[tuple[int, int], list[Reservation]] = {}  # by level and bytes
        self._lock = threading.Lock()
        self._num_bytes = self.peak_bytes = 0

    def bring_pages(self, groups: Iterable[Group]) -> None:
        """Let host memory for shadows of all ``groups``, as far as there is room, have its pages: what their first use
        would wait for comes in the background.
        """
        taken = list[Reservation]()
        try:
            with suppress(InsufficientMemory):
                for original in (each for group in groups for each in self._storage.own_ranges(group).values()):
                    if original.is_addressable:
                        taken.append(self._storage.take("shadow", original.num_bytes, original.level))
        finally:
            for each in taken:
                self._storage.give(each)

    def take(self, group: Group, kinds: Iterable[str]) -> Ranges | None:
        """A shadow of each kind of ``group``; None if not all fit, if one is not resident yet, or if the group lives on
        level 0, where nothing moves.
        """
        found: Ranges = {}
        if self._storage.range(group, "weight").level == 0:
            return None
        for kind in kinds:
            original = self._storage.range(group, kind)
            spare = self.spare.get((original.level, original.num_bytes))
            try:
                if not spare:
                    spare = [self._storage.take("shadow", original.num_bytes, original.level)]
                    self._count(spare[0].extent.held_bytes)
            except InsufficientMemory:
                self.give_back(found)
                return None
            found[kind] = spare.pop()
        if not all(shadow.is_resident for shadow in found.values()):
            self.give_back(found)
            return None
        return found

    def swap(self, group: Group, shadows: Ranges) -> Ranges:
        """What was written to ``shadows`` is the group's from now on; returns what it had, for `give_back`."""
        return {kind: self._storage.swap(group, kind, shadow) for kind, shadow in shadows.items()}

    def free_spare(self) -> bool:
        """`give_up` unused shadows; False if there are none."""
        spare = [{"": shadow} for each in self.spare.values() for shadow in each]
        self.spare.clear()
        for shadow in spare:
            self.give_up(shadow)
        return bool(spare)

    def give_up(self, shadows: Ranges) -> None:
        """Give ranges, which nothing reads or writes any more, back to their levels."""
        for shadow in shadows.values():
            self._count(-shadow.extent.held_bytes)
            self._storage.give(shadow)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._num_bytes)

    def give_back(self, shadows: Ranges) -> None:
        """Keep ranges for the next `take`; what is queued on them has to come before its writes."""
        for shadow in shadows.values():
            self.spare.setdefault((shadow.level, shadow.num_bytes), []).append(shadow)
