"""Entries on levels: admit, promote, move, replace and drop them, each done whole or not at all.

Every operation is called in a turn (`pool.Turn`), plans under the lock, carries the moves out without it, and commits
them one by one under it. Moves come out bottom-up and each is finished before the next starts, because it may write
where the one before it read. While an entry moves it is not resident, and no victim. One whose own place is needed for
its victims (the stack is full to the last byte) is lifted into RAM first: its bytes are `stray` until they are written
again, and stay so, not lost, if a disk fails in between.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vblackwell.errors import DiskError, InsufficientMemory, StaleTensor
from vblackwell.memory.cache.entry import Entry
from vblackwell.memory.cache.policy import LRU
from vblackwell.memory.level import DeviceLevel, Extent, Level
from vblackwell.memory.pool import LevelPool, Place, does_not_fit

MAX_REFUSALS = 256  # victims that are tried in vain for an access before it is served in place


@dataclass(frozen=True, eq=False)
class Move:
    """``entry`` goes from its extent to another on level ``target``, or was ``evicted`` to it."""

    entry: Entry
    target: int
    target_extent: Extent
    evicted: bool


class Plan:
    """Moves, bottom-up, of a cascade that is known to fit before the first byte moves; made under the stack's lock, by
    the levels' own arithmetic. Victims on a full level sink, each to the first level below that takes it, where colder
    and no more important entries may sink in turn; the cascade is greedy.

    ``by_order``: not an access, so that it should not fail: every victim is tried, of any priority, and one that cannot
    sink may rise where bytes are free. ``spare_expected``: leave alone what a prefetch brought up and was not used yet.
    ``entry`` is what it makes room for, never a victim.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        policy: LRU,
        entry: Entry | None = None,
        *,
        by_order: bool = False,
        spare_expected: bool = False,
    ) -> None:
        self._levels, self._policy, self._by_order, self._spare_expected = levels, policy, by_order, spare_expected
        self.moves: list[Move] = []
        self.refusal: Exception | None = None  # the last thing a level said
        self._moved: set[Entry | None] = {entry}

    def make_room(
        self, level: int, num_bytes: int, max_priority: int = 10, than: Entry | None = None, *, may_rise: bool = True
    ) -> Extent | None:
        """Place ``num_bytes`` on ``level``, letting victims sink; None, and the plan as before, if that fails."""
        if (extent := self.place(level, num_bytes)) or num_bytes > self._levels[level].capacity_bytes:
            return extent
        # Victims of the size ``hopeless`` and more find no place.
        mark, refusals, hopeless = len(self.moves), 0, float("inf")
        for victim in self._policy.victims(level, max_priority, than):
            if victim.num_bytes < hopeless and self._may_go(victim):
                if self._make_go(victim, may_rise=may_rise and self._by_order):
                    if extent := self.place(level, num_bytes):
                        return extent
                    continue
                hopeless = victim.num_bytes
            refusals += 1
            if refusals == MAX_REFUSALS and not self._by_order:
                break
        self.roll_back(mark)
        return None

    def place(self, level: int, num_bytes: int) -> Extent | None:
        """An extent among the free bytes of ``level``; None where there is none."""
        try:
            return self._levels[level].place(num_bytes)
        except (InsufficientMemory, DiskError) as error:
            if not isinstance(self.refusal, DiskError):  # a failing disk explains more than a full level
                self.refusal = error.with_traceback(None)  # whose frames would keep alive what callers hand out
            return None

    def move(self, entry: Entry, target: int, extent: Extent, *, evicted: bool = False) -> None:
        """Add the move of ``entry``, whose old extent, if it has one still, was displaced."""
        self.moves.append(Move(entry, target, extent, evicted))
        self._moved.add(entry)

    def roll_back(self, mark: int = 0) -> None:
        """Undo the moves from number ``mark`` on, the last one first."""
        while len(self.moves) > mark:
            move = self.moves.pop()
            self._levels[move.target].free(move.target_extent)
            if move.entry.extent is not None:
                self._levels[move.entry.level].restore(move.entry.extent)
            self._moved.discard(move.entry)

    def _may_go(self, entry: Entry) -> bool:
        spared = entry in self._moved or (self._spare_expected and entry.expected)
        return not (entry.extent is None or spared or entry.held())

    def _make_go(self, victim: Entry, *, may_rise: bool) -> bool:
        """Plan the victim's move to the first level below, or where it ``may_rise`` above, that takes it."""
        assert victim.extent is not None
        source, size = self._levels[victim.level], victim.num_bytes
        source.displace(victim.extent)
        above = reversed(range(victim.level)) if may_rise else ()
        for level in (*range(victim.level + 1, len(self._levels)), *above):
            if level < victim.level:
                extent = self.place(level, size)
            else:
                extent = self.make_room(level, size, victim.priority, victim, may_rise=False)
            if extent is not None:
                self.move(victim, level, extent, evicted=level > victim.level)
                return True
        source.restore(victim.extent)
        return False


class Placement:
    """Which entry is where. All methods but `sweep` are called in a turn, without the lock."""

    def __init__(self, levels: Sequence[Level], policy: LRU, pool: LevelPool, lock: threading.Lock) -> None:
        self._levels, self._policy, self._pool, self._lock = levels, policy, pool, lock
        self.dropped: list[Entry] = []  # whose bytes on level 0 somebody still holds

    def admit(self, entry: Entry, bytes_in: torch.Tensor, source: Place, *, take: bool) -> None:
        """Find a level for a new entry, its own first, and copy ``bytes_in`` (flat uint8) there, or ``take`` their
        memory. Raises InsufficientMemory where no cascade makes it fit; nothing moved."""
        with self._lock:
            self.sweep()
            plan, level, extent = next((plan, level, extent) for plan, level, extent in self._ways_in(entry) if extent)
            self._hide(plan)
        with self._carried_out(plan, level, extent):
            at = self._levels[level]
            if not (take and isinstance(at, DeviceLevel) and at.adopt(extent, bytes_in)):
                self._fill(level, extent, bytes_in, source)
        with self._lock:
            self._seat(entry, level, extent)

    def _ways_in(self, entry: Entry) -> Iterator[tuple[Plan, int, Extent | None]]:
        """Its own level and below, displacing less important entries; free bytes above; then at anybody's cost."""
        size, downwards, upwards = entry.num_bytes, range(entry.level, len(self._levels)), range(entry.level)[::-1]
        plan = Plan(self._levels, self._policy)
        for level in downwards:
            yield plan, level, plan.make_room(level, size, entry.priority - 1)
        for level in upwards:
            yield plan, level, plan.place(level, size)
        plan = Plan(self._levels, self._policy, by_order=True)
        for level in (*downwards, *upwards):
            yield plan, level, plan.make_room(level, size)
        raise does_not_fit(self._levels, f"for {entry.key!r}", size, plan.refusal)

    def reserve(self, what: str, num_bytes: int, level: int) -> Extent:
        """An extent on exactly this level, at the cost of any entry there. Raises InsufficientMemory; nothing moved."""
        at = self._levels[level]
        if at.device is not None and not self.dropped and at.can_allocate(num_bytes):
            return at.allocate(num_bytes)
        with self._lock:
            self.sweep()
            plan = Plan(self._levels, self._policy, by_order=True)
            if (extent := plan.make_room(level, num_bytes)) is None:
                raise does_not_fit(self._levels, f"on {self._levels[level].name} for {what}", num_bytes, plan.refusal)
            self._hide(plan)
        with self._carried_out(plan, level, extent):
            self._levels[level].materialise(extent)
        return extent

    def promote(self, entry: Entry, target: int, *, background: bool = False) -> bool:
        """Raise ``entry`` to ``target`` if it fits, or colder and no more important ones can sink; whether it did."""
        plan = Plan(self._levels, self._policy, entry, spare_expected=background)
        try:
            self._bring(entry, target, plan, entry.priority, entry)
        except InsufficientMemory as error:
            if isinstance(error, DiskError):
                raise
            return False
        return True

    def move(self, entry: Entry, target: int) -> None:
        """Put ``entry`` on ``target``, whatever has to sink. Raises InsufficientMemory, or StaleTensor where it would
        leave level 0 while held; nothing moved."""
        self._bring(entry, target, Plan(self._levels, self._policy, entry, by_order=True), 10, None)

    def _bring(self, entry: Entry, target: int, plan: Plan, max_priority: int, than: Entry | None) -> None:
        with self._lock:
            self.sweep()
            if entry.level == 0 and entry.held():
                held = "a tensor of it is still held; delete it first"
                raise StaleTensor(f"{entry.key!r} cannot leave {self._levels[0].name}: {held}")
            source, old = self._levels[entry.level], entry.extent
            extent = plan.make_room(target, entry.num_bytes, max_priority, than)
            passes_ram = extent is None and old is not None
            if old is not None:
                source.displace(old)
                extent = extent or plan.make_room(target, entry.num_bytes, max_priority, than)
            if extent is None:
                if old is not None:
                    source.restore(old)
                where = f"on {self._levels[target].name} for {entry.key!r}"
                raise does_not_fit(self._levels, where, entry.num_bytes, plan.refusal)
            if passes_ram:
                entry.extent = None
            plan.move(entry, target, extent)
            self._hide(plan)
        try:
            if passes_ram and old is not None:
                self._lift(entry, old, plan)
            with self._carried_out(plan):
                pass
        except BaseException:
            if entry.stray is not None:
                self.put_back(entry)
            raise

    def _lift(self, entry: Entry, old: Extent, plan: Plan) -> None:
        """Take the bytes of ``entry`` from ``old``, which was displaced, into RAM before ``plan`` writes there."""
        level = self._levels[entry.level]
        try:
            stray = torch.empty(entry.num_bytes, dtype=torch.uint8, device="cpu")
            level.read(old, stray).finish()
        except BaseException:
            with self._lock:
                self._undo(plan)
                level.restore(old)
                entry.extent = old
                self._show(entry)
            raise
        with self._lock:
            level.release(old)
            entry.stray = stray

    def overwrite(self, entry: Entry, bytes_in: torch.Tensor, source: Place) -> bool:
        """Replace the bytes of ``entry`` where it is, all or none, unless somebody holds them; whether it did."""
        with self._lock:
            if entry.held():
                return False
            if entry.extent is None:
                entry.stray = bytes_in.to("cpu", copy=True)
                return True
            entry.resident = None
            for stream in entry.side_streams:  # whose kernels may still read
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            entry.side_streams.clear()
        level = self._levels[entry.level]
        extent = spare = old = entry.extent
        try:
            if level.device is None and level.can_allocate(entry.num_bytes):  # only a disk can fail halfway
                extent = spare = level.allocate(entry.num_bytes)
            self._fill(entry.level, extent, bytes_in, source)
            entry.extent, spare = extent, old
        finally:
            with self._lock:
                self._show(entry)
            if extent is not old:
                level.free(spare)
        return True

    def vacate(self, entry: Entry) -> bool:
        """Take the bytes of ``entry`` into RAM until `put_back`, unless somebody holds them; whether it did."""
        with self._lock:
            if (old := entry.extent) is None or entry.held():
                return False
            self._levels[entry.level].displace(old)
            entry.resident = entry.extent = None
        self._lift(entry, old, Plan(self._levels, self._policy))
        return True

    def put_back(self, entry: Entry) -> None:
        """Give stray bytes their level back, as far as it still works."""
        assert entry.stray is not None
        level, extent = self._levels[entry.level], None
        try:
            extent = level.allocate(entry.num_bytes)
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
            if entry.extent is not None:
                self._levels[entry.level].free(entry.extent)
            entry.resident = None

    def _hide(self, plan: Plan) -> None:
        """What the plan moves is not resident. Under the lock, with the planning."""
        for move in plan.moves:
            move.entry.resident = None

    @contextmanager
    def _carried_out(self, plan: Plan, level: int = 0, extent: Extent | None = None) -> Iterator[None]:
        """Make the moves, then run the block, which fills ``extent``; what did not happen when one fails is undone."""
        try:
            while plan.moves:
                self._carry(plan.moves[0])
                with self._lock:
                    self._commit(plan.moves.pop(0))
            yield
        except BaseException:
            with self._lock:
                if extent is not None:
                    self._levels[level].free(extent)
                self._undo(plan)
            raise

    def _undo(self, plan: Plan) -> None:
        """Undo what has not happened of a plan. Under the lock."""
        entries = [move.entry for move in plan.moves]
        plan.roll_back()
        for entry in entries:
            self._show(entry)

    def _carry(self, move: Move) -> None:
        entry, target = move.entry, self._levels[move.target]
        source = self._levels[entry.level]
        with self._counted(entry.level, move.target, entry.num_bytes):
            target.materialise(move.target_extent)
            bytes_in = entry.stray if entry.extent is None else source.view(entry.extent)
            if bytes_in is None:
                assert entry.extent is not None
                if (straight := target.view(move.target_extent)) is not None:
                    return source.read(entry.extent, straight).finish()
                bytes_in = torch.empty(entry.num_bytes, dtype=torch.uint8, device="cpu")  # between two disks
                source.read(entry.extent, bytes_in).finish()
            target.write(move.target_extent, bytes_in).finish()

    def _commit(self, move: Move) -> None:
        """The entry's bytes have arrived. Under the lock."""
        entry = move.entry
        self._policy.discard(entry)
        if entry.extent is not None:
            self._levels[entry.level].release(entry.extent)
        entry.stray = None
        if move.target > 0:
            entry.expected = False
        self._pool.count_move(entry.level, move.target, evicted=move.evicted)
        self._seat(entry, move.target, move.target_extent)

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

    def read(self, entry: Entry, out: torch.Tensor) -> None:
        """Fill ``out`` (flat uint8) with the entry's bytes, and count them as moved to level 0."""
        with self._counted(entry.level, 0, entry.num_bytes):
            if entry.extent is None:
                assert entry.stray is not None
                out.copy_(entry.stray)
            else:
                self._levels[entry.level].read(entry.extent, out).finish()

    def _fill(self, level: int, extent: Extent, bytes_in: torch.Tensor, source: Place) -> None:
        with self._counted(source, level, bytes_in.nbytes):
            self._levels[level].materialise(extent)
            self._levels[level].write(extent, bytes_in).finish()

    @contextmanager
    def _counted(self, source: Place, target: Place, num_bytes: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._pool.count_link(source, target, num_bytes, time.perf_counter() - start)
