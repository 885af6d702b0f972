"""Ranges on a disk on their way to updates and back, through a few sets of host memory, in the order of the last step.

A range is read only when its last write is over, and ahead only if it holds the group's truth; what was read ahead is
used only if the range has not changed since. A set is filled again only when everything that uses it is over. When all
are busy the caller waits for the oldest write; when all hold groups that it did not ask for, it takes one: something
can always go on. A failed read raises where its bytes are asked for; a failed write at the next update of any group, at
every wait for the group's own, and whenever its range is read (`Ledger`).
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vblackwell.errors import VBError
from vblackwell.memory.host import map_slab
from vblackwell.memory.level import Transfer
from vblackwell.memory.pool import Reservation
from vblackwell.memory.transfer import FutureTransfer
from vblackwell.offload.layout.groups import AccessTrace, Group
from vblackwell.offload.layout.storage_plan import MAX_SETS, PAGE
from vblackwell.offload.storage.storage import Ranges, Stamp, Storage, on_disk
from vblackwell.units import align_up

MAX_SKIPPED = 4 * MAX_SETS  # updates of other groups, after which what was read ahead is given up


def failure_of(transfer: Transfer) -> BaseException | None:
    """Wait for ``transfer``; why it failed, if it did."""
    try:
        transfer.wait()
    except Exception as error:
        return error
    return None


class Continuations:
    """``threads`` that wait for transfers and go on from there; they start when they are needed."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="vblackwell-stage")

    def chain(
        self, first: Transfer, start_next: Callable[[], list[Transfer]], finish: Callable[[BaseException | None], None]
    ) -> Transfer:
        """A transfer: ``first``, then what ``start_next`` gives, then ``finish``, which gets the failure."""

        def run() -> None:
            error = failure_of(first)
            try:
                for transfer in start_next() if error is None else []:
                    error = failure_of(transfer) or error  # all: the memory is in use while one still runs
            except BaseException as other:
                error = other
            finish(error)
            if error is not None:
                raise error

        return FutureTransfer([self._pool.submit(run)])


@dataclass(eq=False)
class Staged:
    """One group's ranges in host memory, by kind."""

    group: Group
    memory: Tensor
    views: dict[str, Tensor]
    taken: Reservation | None = None  # of the level in RAM, for this update alone; None: `memory` is a set
    stamps: dict[str, Stamp] = field(default_factory=dict)  # of the ranges that were read, or are being read
    reads: list[Transfer] = field(default_factory=list)
    skipped: int = 0  # updates of other groups since it was read ahead


class Stage:
    """The sets of one model. Tests have ``continuations`` that are late in every possible way."""

    def __init__(self, storage: Storage, continuations: Continuations | None = None) -> None:
        self._storage = storage
        self._continuations = continuations or Continuations(MAX_SETS)
        self._lock = threading.RLock()
        self._set_bytes: int | None = None  # None: sets have not been needed yet
        self._free: list[Tensor] = []
        self._ahead: dict[int, Staged] = {}  # in the order in which they will be needed
        self._writing: list[Transfer] = []  # oldest first; replaced, not changed
        self._taken: Group | None = None  # since `take`, until its write is known to the ledger
        self._written: dict[int, Ranges] = {}  # by group, what its last update wrote
        self._order = AccessTrace()
        self._groups: dict[int, Group] = {}  # that have states on a disk
        self._caller_waits = False
        self._failure: BaseException | None = None

    # -- updates, in one thread ----------------------------------------------------------------------------------------

    def take(self, group: Group, reads: Ranges, writes: Ranges) -> Staged | None:
        """Host memory for an update of ``group``, with what ``reads`` hold; None if no range of both is on a disk.
        Blocks until the bytes are there; the memory is the caller's until `store` or `drop`. Raises DiskError or
        CorruptData, and takes nothing, if they cannot be read or an earlier write failed.
        """
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        reads, writes = on_disk(reads), on_disk(writes)
        if not reads and not writes:
            return None
        staged = self._take_ahead(group, reads)
        try:
            staged = staged or self._memory_for(group)
            for reservation in writes.values():
                self._storage.ledger.wait(reservation)
            fresh = {kind: reservation for kind, reservation in reads.items() if kind not in staged.stamps}
            for reservation in fresh.values():
                self._storage.ledger.wait_to_read(reservation)
            self._read(staged, fresh)
            for read in staged.reads:
                read.wait()
                self._storage.in_flight.discard(read)
        except BaseException:
            self._taken = None
            if staged is not None:
                self._give_up(staged)
            raise
        return staged

    def ready(self, group: Group, reads: Ranges) -> Staged | None:
        """What was read ahead for ``group``, if it is there and true. Never blocks."""
        with self._lock:
            staged = self._ahead.get(group.index)
            if staged is None or not self._is_true(staged, on_disk(reads)):
                return None
        if not all(read.done() for read in staged.reads) or any(failure_of(read) for read in staged.reads):
            return None  # a failure is `take`'s to raise
        return staged

    def store(self, staged: Staged, writes: Ranges, copied: Transfer) -> Transfer:
        """End of `take`: write what is in ``staged`` after ``copied`` to its ranges; the transfer of all of that."""
        storage, writes, started = self._storage, on_disk(writes), list[Transfer]()

        def start() -> list[Transfer]:
            for kind, reservation in writes.items():
                transfer = storage.start(reservation, staged.views[kind], write=True)
                started.extend([] if transfer is None else [transfer])
            return started

        def finish(error: BaseException | None) -> None:
            for transfer in started:  # where one could not start, those before it may still use the memory
                failure_of(transfer)
            storage.in_flight.difference_update(started)
            for reservation in writes.values():
                storage.ledger.end(reservation, error)
            with self._lock:
                self._failure = self._failure or error
                self._release(staged)
            self.read_ahead()

        self._written[staged.group.index] = writes
        transfer = self._continuations.chain(copied, start, finish)
        for reservation in writes.values():
            storage.ledger.begin(reservation, transfer)
        with self._lock:
            self._writing = [*(each for each in self._writing if not each.done()), transfer]
            self._taken = None
        self.read_ahead()
        return transfer

    def drop(self, staged: Staged) -> None:
        """End of `take` without a write; nothing that was queued uses the memory. Waits for what fills it."""
        self._give_up(staged)
        self._taken = None

    def drain(self) -> None:
        """Return when all writes are over. Those that failed raise elsewhere (module's text)."""
        for transfer in self._writing:
            failure_of(transfer)

    def _take_ahead(self, group: Group, reads: Ranges) -> Staged | None:
        """What was read ahead for ``group``, if it is still true. What is not asked for is given up."""
        with self._lock:
            if self._states_on_disk(group):
                self._groups[group.index] = group
                self._order.use(group.index, once=True)
            self._taken = group
            found = self._ahead.pop(group.index, None)
            for other in self._ahead.values():
                other.skipped += 1
            useless = [other for other in self._ahead.values() if other.skipped > MAX_SKIPPED]
            for other in useless:
                del self._ahead[other.group.index]
            if found is not None and not self._is_true(found, reads):
                useless.append(found)
                found = None
        for other in useless:
            self._give_up(other)
        return found

    # -- memory --------------------------------------------------------------------------------------------------------

    def _memory_for(self, group: Group) -> Staged:
        """Memory for ``group``: a set, if need be one that was read ahead for another."""
        needed = self._needed(group)
        with self._lock:
            if self._set_bytes is None:
                self._storage.sets_in_use = True
                self._free += [reservation.bytes for reservation in self._storage.sets]
                self._set_bytes = self._free[0].numel() if self._free else 0
            fits = needed <= self._set_bytes
        if fits:
            return self._staged(group, self._wait_for_set())
        if self._storage.plan.has_host_level:  # larger than when sets were planned: a second optimizer's states
            taken = self._storage.take_host(f"staging/{group.name}", needed)
            return self._staged(group, taken.bytes, taken)
        return self._staged(group, map_slab(needed, pin=torch.cuda.is_available()))

    def _needed(self, group: Group) -> int:
        """Bytes of the group's ranges, each from a page on."""
        return sum(align_up(each.num_bytes, PAGE) for each in on_disk(self._storage.own_ranges(group)).values())

    def _staged(self, group: Group, memory: Tensor, taken: Reservation | None = None) -> Staged:
        """The group's ranges in ``memory``, one after the other."""
        views, start = {}, 0
        for kind, reservation in on_disk(self._storage.own_ranges(group)).items():
            views[kind] = memory[start : start + reservation.num_bytes]
            start += align_up(reservation.num_bytes, PAGE)
        return Staged(group, memory, views, taken)

    def _wait_for_set(self) -> Tensor:
        while True:
            with self._lock:
                self._caller_waits = not self._free  # what falls free now is the caller's
                if self._free:
                    return self._free.pop()
                farthest = self._ahead.popitem()[1] if self._ahead else None
                oldest = next((each for each in self._writing if not each.done()), None)
            if farthest is not None:
                self._give_up(farthest)
            else:
                assert oldest is not None, "a set is free, ahead, or on its way to the disk"
                failure_of(oldest)

    def _give_up(self, staged: Staged) -> None:
        """Free the memory when nothing fills it any more; the lane drops pieces that are copied up from it."""
        for read in staged.reads:
            failure_of(read)
            self._storage.in_flight.discard(read)
        with self._lock:
            self._release(staged)

    def _release(self, staged: Staged) -> None:
        if staged.taken is not None:
            self._storage.give(staged.taken)
        elif self._storage.plan.has_host_level:  # without one there are no sets
            self._free.append(staged.memory)

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """Begin to read what comes next, as far as sets are free. Blocks only where a read cannot start; any thread."""
        with self._lock:
            for index in self._order.upcoming(MAX_SETS, wrap=True):
                group = self._groups[index]
                if index in self._ahead:
                    continue
                if not self._free or self._caller_waits or not self._may_read(group):
                    return
                staged = self._staged(group, self._free.pop())
                try:
                    self._read(staged, self._states_on_disk(group))
                except (VBError, OSError):  # `take` will meet it too
                    self._give_up(staged)
                    return
                self._ahead[group.index] = staged

    def _may_read(self, group: Group) -> bool:
        """Whether the group's states on the disk are what its next update will find, and fit a set."""
        states, ledger = self._states_on_disk(group), self._storage.ledger
        written = self._written.get(group.index, states)
        is_true = all(written.get(kind) is each and ledger.is_written(each) for kind, each in states.items())
        return bool(states) and is_true and group is not self._taken and self._needed(group) <= (self._set_bytes or 0)

    def _states_on_disk(self, group: Group) -> Ranges:
        states = on_disk(self._storage.own_ranges(group))
        states.pop("weight", None)
        return states

    def _read(self, staged: Staged, reads: Ranges) -> None:
        for kind, reservation in reads.items():
            stamp = self._storage.ledger.stamp(reservation)
            read = self._storage.start(reservation, staged.views[kind], write=False)
            if read is not None:
                staged.stamps[kind] = stamp
                staged.reads.append(read)

    def _is_true(self, staged: Staged, reads: Ranges) -> bool:
        """Whether all that was read is what ``reads`` hold now."""
        ledger = self._storage.ledger
        return all(kind in reads and ledger.stamp(reads[kind]) == stamp for kind, stamp in staged.stamps.items())
