"""Entries on levels: admit, promote, move, replace, drop, and ranges that others fill; each done whole or not at all.

Every operation is called in a turn (`pool.Turn`), plans under the lock (`plan`), carries the moves out without it, and
commits them one by one under it. Moves run in the plan's order and each is finished before the next starts, because it
may write where the one before it read. While an entry moves it is hidden: not resident, no victim. Tables are only read
or written under the lock, and the place of an entry only changes in a turn; so in a turn an entry's bytes are read
without the lock.

An entry whose own place is needed for the victims that make room for it (a stack that is full to the last byte) passes
through RAM: it is lifted out first, and its bytes are `stray` until they are written again. A disk that fails in
between leaves them stray: outside all levels, but not lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from vblackwell.errors import DiskError, InsufficientMemory, StaleTensor
from vblackwell.memory.cache.entry import Entry
from vblackwell.memory.cache.plan import Move, Plan
from vblackwell.memory.cache.policy import LRU
from vblackwell.memory.gpu import DeviceLevel
from vblackwell.memory.level import Extent, Level
from vblackwell.memory.pool import does_not_fit
from vblackwell.memory.statistics import Place, Statistics


class Placement:
    """Which entry is where. All methods but `sweep` are called in a turn, without the lock."""

    def __init__(self, levels: Sequence[Level], policy: LRU, statistics: Statistics, lock: threading.Lock) -> None:
        self.dropped: list[Entry] = []  # whose bytes on level 0 somebody still holds
        self._levels = levels
        self._policy = policy
        self._statistics = statistics
        self._lock = lock

    # -- new bytes -----------------------------------------------------------------------------------------------------

    def admit(self, entry: Entry, bytes_in: torch.Tensor, source: Place, *, adopt: bool) -> None:
        """Find a level for a new entry, by priority; copy ``bytes_in`` (flat uint8) there, or ``adopt`` their memory.

        Raises:
            InsufficientMemory: no cascade makes room; nothing moved.
        """
        with self._lock:
            self.sweep()
            plan, level, extent = self._plan_admission(entry)
            adopted = self._adopt(level, extent, bytes_in) if adopt and not plan.moves else None
            if adopted is not None:
                self._seat(entry, level, adopted)
                return
            plan.fill(level, extent)
            self._begin(plan)
        with self._carried_out(plan):
            self._fill(level, extent, bytes_in, source)
        with self._lock:
            self._seat(entry, level, extent)

    def admit_empty(self, entry: Entry) -> None:
        """An entry without bytes: shapes only, always on level 0."""
        with self._lock:
            self._policy.add(entry)
            entry.show(torch.empty(0, dtype=torch.uint8, device=self._levels[0].device))

    def _plan_admission(self, entry: Entry) -> tuple[Plan, int, Extent]:
        """First its own level and those below, at the cost of less important entries only; then free room above; then
        anywhere, at anybody's cost."""
        last, size = len(self._levels) - 1, entry.num_bytes
        start = min(0 if entry.priority >= 7 else 1 if entry.priority >= 4 else max(0, last - 1), last)
        downwards, upwards = range(start, last + 1), tuple(reversed(range(start)))
        plan = Plan(self._levels, self._policy)
        for level in downwards:
            extent = plan.make_room(level, size, entry.priority - 1)
            if extent is not None:
                return plan, level, extent
        for level in upwards:
            extent = plan.place(level, size)
            if extent is not None:
                return plan, level, extent
        plan = Plan(self._levels, self._policy, by_order=True)
        for level in (*downwards, *upwards):
            extent = plan.make_room(level, size)
            if extent is not None:
                return plan, level, extent
        raise does_not_fit(self._levels, f"for {entry.key!r}", size, plan.refusal)

    def _adopt(self, level: int, extent: Extent, bytes_in: torch.Tensor) -> Extent | None:
        """The caller's memory as the extent, in place of the one that was placed; None where it has to be copied."""
        target = self._levels[level]
        if not isinstance(target, DeviceLevel):
            return None
        target.displace(extent)
        adopted = target.adopt(bytes_in)
        if adopted is None:
            target.restore(extent)
        return adopted

    def reserve(self, what: str, num_bytes: int, level: int) -> Extent:
        """An extent on exactly this level, at the cost of any entry there.

        Raises:
            InsufficientMemory: the entries there cannot make room; nothing moved.
        """
        with self._lock:
            self.sweep()
            plan = Plan(self._levels, self._policy, by_order=True)
            extent = plan.make_room(level, num_bytes)
            if extent is None:
                raise does_not_fit(self._levels, f"on {self._levels[level].name} for {what}", num_bytes, plan.refusal)
            plan.fill(level, extent)
            self._begin(plan)
        with self._carried_out(plan):
            self._levels[level].materialise(extent)
        return extent

    # -- another level -------------------------------------------------------------------------------------------------

    def promote(self, entry: Entry, target: int, *, background: bool = False) -> bool:
        """Raise ``entry`` to ``target`` if it fits, or colder and no more important ones can sink; whether it did."""
        plan = Plan(self._levels, self._policy, spare_expected=background)
        try:
            self._bring(entry, target, plan, entry.priority, entry)
        except InsufficientMemory as error:
            if isinstance(error, DiskError):
                raise
            return False
        return True

    def move(self, entry: Entry, target: int) -> None:
        """Put ``entry`` on ``target``, whatever has to make room.

        Raises:
            InsufficientMemory: nothing can; nothing moved.
            StaleTensor: it would leave level 0 while somebody holds a tensor of it.
        """
        self._bring(entry, target, Plan(self._levels, self._policy, by_order=True), 10, None)

    def _bring(self, entry: Entry, target: int, plan: Plan, max_priority: int, than: Entry | None) -> None:
        with self._lock:
            self.sweep()
            if entry.level == 0 and entry.held():
                raise StaleTensor(
                    f"{entry.key!r} cannot leave {self._levels[0].name}: a tensor of it is still held; delete it first"
                )
            source, old = self._levels[entry.level], entry.extent
            plan.exclude(entry)
            extent = plan.make_room(target, entry.num_bytes, max_priority, than)
            passes_ram = extent is None and old is not None
            if old is not None:
                source.displace(old)
            if passes_ram:
                extent = plan.make_room(target, entry.num_bytes, max_priority, than)
            if extent is None:
                if old is not None:
                    source.restore(old)
                where = f"on {self._levels[target].name} for {entry.key!r}"
                raise does_not_fit(self._levels, where, entry.num_bytes, plan.refusal)
            plan.move(entry, target, extent, from_ram=passes_ram)
            self._begin(plan)
        try:
            if passes_ram:
                self._lift(entry, plan)
            with self._carried_out(plan):
                pass
        except BaseException:
            if entry.stray is not None:
                self.put_back(entry)
            raise

    def _lift(self, entry: Entry, plan: Plan | None = None) -> None:
        """Take the bytes of ``entry``, whose extent was displaced, into RAM before ``plan`` writes there."""
        level, old = self._levels[entry.level], entry.extent
        assert old is not None
        stray = torch.empty(entry.num_bytes, dtype=torch.uint8, device="cpu")
        try:
            level.read(old, stray).finish()
        except BaseException:
            with self._lock:
                if plan is not None:
                    self._undo(plan)
                level.restore(old)
                self._show(entry)
            raise
        with self._lock:
            level.release(old)
            entry.stray, entry.extent = stray, None

    # -- replacing and dropping ----------------------------------------------------------------------------------------

    def overwrite(self, entry: Entry, bytes_in: torch.Tensor, source: Place) -> bool:
        """Replace the bytes of ``entry`` on its level, unless somebody holds the old ones; whether it did.

        A write that fails leaves the old bytes.
        """
        with self._lock:
            if entry.held():
                return False
            if entry.extent is None:
                entry.stray = bytes_in.to("cpu", copy=True) if entry.num_bytes else None
                return True
            entry.hide()
            for stream in entry.side_streams:  # whose kernels may still read
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            entry.side_streams.clear()
        level, old = self._levels[entry.level], entry.extent
        try:
            is_new = level.device is None and level.can_allocate(entry.num_bytes)  # only a disk can fail halfway
            extent = level.allocate(entry.num_bytes) if is_new else old
            try:
                self._fill(entry.level, extent, bytes_in, source)
            except BaseException:
                if is_new:
                    level.free(extent)
                raise
            if is_new:
                entry.extent = extent
                level.free(old)
        finally:
            with self._lock:
                self._show(entry)
        return True

    def vacate(self, entry: Entry) -> bool:
        """Take the bytes of ``entry`` into RAM, so that its place is free; whether it had one and nobody holds it.

        `put_back` is the opposite. For replacing an entry on a stack that is full.
        """
        with self._lock:
            if entry.extent is None or entry.held():
                return False
            entry.hide()
            self._levels[entry.level].displace(entry.extent)
        self._lift(entry)
        return True

    def put_back(self, entry: Entry) -> None:
        """Give stray bytes their level back, as far as it still works; the error goes on to the user."""
        level, extent = self._levels[entry.level], None
        try:
            extent = level.place(entry.num_bytes)
            assert entry.stray is not None
            level.write(extent, entry.stray).finish()
        except (InsufficientMemory, DiskError):
            if extent is not None:
                level.free(extent)
            return
        with self._lock:
            entry.extent, entry.stray = extent, None
            self._show(entry)

    def drop(self, entry: Entry) -> None:
        """Forget ``entry``; its bytes go at once, or when the last tensor that somebody holds of them does."""
        with self._lock:
            self._policy.discard(entry)
            self.dropped.append(entry)
            self.sweep()

    def sweep(self) -> None:
        """Free what was dropped and is not held any more. Called under the lock."""
        for entry in [entry for entry in self.dropped if not entry.held()]:
            self.dropped.remove(entry)
            entry.hide()
            if entry.extent is not None:
                self._levels[entry.level].free(entry.extent)
            entry.extent = entry.stray = None

    # -- carrying plans out --------------------------------------------------------------------------------------------

    def _begin(self, plan: Plan) -> None:
        """Hide what the plan moves. Under the lock, with the planning."""
        for move in plan.moves:
            if move.entry is not None:
                move.entry.hide()

    @contextmanager
    def _carried_out(self, plan: Plan) -> Iterator[None]:
        """Make the moves, then run the block; if either fails, moves that happened stay and the rest is undone."""
        try:
            while plan.moves and plan.moves[0].entry is not None:
                self._carry(plan.moves[0], plan.moves[0].entry)
                with self._lock:
                    self._commit(plan.moves.pop(0))
            yield
        except BaseException:
            with self._lock:
                self._undo(plan)
            raise

    def _carry(self, move: Move, entry: Entry) -> None:
        start = time.perf_counter()
        target = self._levels[move.target]
        target.materialise(move.target_extent)
        if entry.extent is not None:
            self._copy(self._levels[entry.level], entry.extent, target, move.target_extent)
        else:
            assert entry.stray is not None
            target.write(move.target_extent, entry.stray).finish()
        self._count(move.source, move.target, entry.num_bytes, time.perf_counter() - start)

    @staticmethod
    def _copy(source: Level, extent: Extent, target: Level, target_extent: Extent) -> None:
        """Between two levels; through RAM where both are disks."""
        bytes_there = source.view(extent)
        if bytes_there is not None:
            target.write(target_extent, bytes_there).finish()
            return
        bytes_here = target.view(target_extent)
        if bytes_here is not None:
            source.read(extent, bytes_here).finish()
            return
        in_ram = torch.empty(extent.num_bytes, dtype=torch.uint8, device="cpu")
        source.read(extent, in_ram).finish()
        target.write(target_extent, in_ram).finish()

    def _commit(self, move: Move) -> None:
        """The bytes of the entry have arrived. Under the lock."""
        entry = move.entry
        assert entry is not None
        self._policy.discard(entry)
        if entry.extent is not None:
            self._levels[move.source].release(entry.extent)
        entry.stray = None
        if move.target > 0:
            entry.expected = False
        self._statistics.moved(move.source, move.target, evicted=move.evicted)
        self._seat(entry, move.target, move.target_extent)

    def _undo(self, plan: Plan) -> None:
        """Take back what has not happened of a plan. Under the lock."""
        entries = [move.entry for move in plan.moves if move.entry is not None]
        plan.take_back()
        for entry in entries:
            self._show(entry)

    def _seat(self, entry: Entry, level: int, extent: Extent) -> None:
        """``entry`` is on ``level`` from now on. Under the lock."""
        entry.level, entry.extent = level, extent
        self._policy.add(entry)
        self._show(entry)

    def _show(self, entry: Entry) -> None:
        """It has a place again; on level 0 it gets ready-made tensors. Under the lock."""
        if entry.level == 0 and entry.extent is not None:
            buffer = self._levels[0].view(entry.extent)
            assert buffer is not None, "level 0 is addressable"
            entry.show(buffer)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def read(self, entry: Entry, out: torch.Tensor) -> None:
        """Fill ``out`` (flat uint8) with the entry's bytes, and count them as moved to level 0."""
        start = time.perf_counter()
        if entry.extent is None:
            assert entry.stray is not None
            out.copy_(entry.stray)
        else:
            self._levels[entry.level].read(entry.extent, out).finish()
        self._count(entry.level, 0, entry.num_bytes, time.perf_counter() - start)

    def _fill(self, level: int, extent: Extent, bytes_in: torch.Tensor, source: Place) -> None:
        """Copy bytes from outside into an extent, and count them."""
        start = time.perf_counter()
        self._levels[level].materialise(extent)
        self._levels[level].write(extent, bytes_in).finish()
        self._count(source, level, bytes_in.nbytes, time.perf_counter() - start)

    def _count(self, source: Place, target: Place, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._statistics.link(source, target, num_bytes, seconds)
