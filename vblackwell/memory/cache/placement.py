"""Entries on levels: admit, promote, shift, drop, and ranges that somebody else fills; each of them whole or not at all.

Every operation takes its turn (`turn`), plans under the lock (`plan`), carries the moves out without it, and commits them
one by one under it. Between the lock and the turn: tables are only read or written under `lock`, and the place of an
entry only changes in a turn. So who holds the turn may read an entry's bytes without the lock.

An entry whose own place is needed for the victims that make room for it (a stack that is full to the last byte) passes
through RAM: it is read out first, and its bytes are `stray` until they are written again. A disk that fails in between
leaves them stray: outside all levels, but not lost.
"""

from __future__ import annotations

import torch

from vblackwell.errors import DiskError, InsufficientMemory, StaleTensor
from vblackwell.memory.cache.carry import Mover, read_entry, settled
from vblackwell.memory.cache.entry import Entry
from vblackwell.memory.cache.plan import Plan
from vblackwell.memory.cache.policy import Policy
from vblackwell.memory.cache.turn import Turn
from vblackwell.memory.gpu import DeviceLevel
from vblackwell.memory.level import Extent, Level
from vblackwell.memory.statistics import Place
from vblackwell.units import format_bytes


class Placement(Mover):
    """The levels of one stack, and which entry is where. All methods but `sweep` are called in a turn, without the lock."""

    def __init__(self, levels: list[Level], policy: Policy) -> None:
        super().__init__(levels, policy)
        self.turn = Turn()
        self._limbo: list[Entry] = []  # dropped, but somebody still holds their bytes on level 0

    def admit(self, entry: Entry, bytes_in: torch.Tensor, source: Place, *, adopt: bool) -> None:
        """Find a level for a new entry, by priority, and copy ``bytes_in`` (flat uint8) there; or take them over.

        Raises:
            InsufficientMemory: no cascade makes room; nothing moved.
        """
        with self.lock:
            self.sweep()
            plan, level, extent = self._plan_admission(entry)
            adopted = self._adopt(plan, level, extent, bytes_in) if adopt else None
            extent = adopted or extent
            plan.goal = (level, extent)
            self.begin(plan)
        try:
            self.carry_out(plan)
            if adopted is None:
                self.fill(level, extent, bytes_in, source)
        except BaseException:
            with self.lock:
                plan.take_back(len(plan.moves))
            raise
        with self.lock:
            entry.level, entry.extent = level, extent
            self.seat(entry)

    def admit_empty(self, entry: Entry) -> None:
        """An entry without bytes: shapes only, always on level 0."""
        with self.lock:
            self.policy.add(entry)
            entry.settle(torch.empty(0, dtype=torch.uint8, device=self.levels[0].device))

    def _plan_admission(self, entry: Entry) -> tuple[Plan, int, Extent]:
        """First its own level and those below, at the cost of less important entries only; then free room above; then
        whatever cascade works."""
        last, size = len(self.levels) - 1, entry.num_bytes
        start = min(0 if entry.priority >= 7 else 1 if entry.priority >= 4 else max(0, last - 1), last)
        downwards, upwards = range(start, last + 1), reversed(range(start))
        plan = Plan(self.levels, self.policy)
        for level in downwards:
            extent = plan.room(level, size, max_priority=entry.priority - 1, than=None)
            if extent is not None:
                return plan, level, extent
        for level in upwards:
            extent = plan.place(level, size)
            if extent is not None:
                return plan, level, extent
        plan = Plan(self.levels, self.policy, exhaustive=True)
        for level in (*downwards, *reversed(range(start))):
            extent = plan.room(level, size, max_priority=10, than=None)
            if extent is not None:
                return plan, level, extent
        raise self.no_room(f"for {entry.key!r}", size, plan.refusal)

    def _adopt(self, plan: Plan, level: int, extent: Extent, bytes_in: torch.Tensor) -> Extent | None:
        """The caller's memory as the extent, in place of the one that was placed; None where it has to be copied."""
        target = self.levels[level]
        if not isinstance(target, DeviceLevel) or plan.moves:
            return None
        target.displace(extent)
        adopted = target.adopt(bytes_in)
        if adopted is None:
            target.restore(extent)
        return adopted

    def promote(self, entry: Entry, target: int, *, background: bool = False) -> bool:
        """Raise ``entry`` to ``target`` if it fits, or if something colder and no more important can sink; whether it did."""
        try:
            self._bring(entry, target, entry.priority, entry, spare_expected=background)
        except InsufficientMemory as error:
            if isinstance(error, DiskError):
                raise
            return False
        return True

    def shift(self, entry: Entry, target: int) -> None:
        """Put ``entry`` on ``target``, whoever has to make room.

        Raises:
            InsufficientMemory: nobody can; nothing moved.
            StaleTensor: it would leave level 0 while somebody holds a tensor of it.
        """
        self._bring(entry, target, 10, None, exhaustive=True)

    def _bring(
        self,
        entry: Entry,
        target: int,
        max_priority: int,
        than: Entry | None,
        *,
        spare_expected: bool = False,
        exhaustive: bool = False,
    ) -> None:
        plan = Plan(self.levels, self.policy, spare_expected=spare_expected, exhaustive=exhaustive)
        plan.exclude(entry)
        with self.lock:
            self.sweep()
            if entry.level == 0 and entry.held():
                raise StaleTensor(
                    f"{entry.key!r} cannot leave {self.levels[0].name}: a tensor of it is still held; delete it first"
                )
            source, old = self.levels[entry.level], entry.extent
            extent = plan.room(target, entry.num_bytes, max_priority=max_priority, than=than)
            through_ram = extent is None and old is not None
            if extent is None and old is not None:
                source.displace(old)
                extent = plan.room(target, entry.num_bytes, max_priority=max_priority, than=than)
                if extent is None:
                    source.restore(old)
            if extent is None:
                raise self.no_room(f"on {self.levels[target].name} for {entry.key!r}", entry.num_bytes, plan.refusal)
            if through_ram:
                plan.goal = (target, extent)
            else:
                plan.move(entry, target, extent)
            self.begin(plan)
            self.hide(entry)
        if through_ram:
            self._bring_through_ram(plan, entry, target, extent)
        else:
            self.carry_out(plan)

    def _bring_through_ram(self, plan: Plan, entry: Entry, target: int, extent: Extent) -> None:
        """`_bring` for an entry whose own extent was displaced to make room for others."""
        old = entry.extent
        assert old is not None
        source = entry.level
        stray = torch.empty(entry.num_bytes, dtype=torch.uint8, device="cpu")
        try:
            read_entry(self.levels, entry, stray)
        except BaseException:
            with self.lock:
                self.undo(plan, 0)
                self.levels[source].restore(old)
                self.show(entry)
            raise
        with self.lock:
            entry.stray, entry.extent = stray, None
            self.levels[source].release(old)
        try:
            self.carry_out(plan)
            self.fill(target, extent, stray, source)
        except BaseException:
            with self.lock:
                plan.take_back(len(plan.moves))
            self.put_back(entry)
            raise
        with self.lock:
            self.commit(entry, target, extent, evicted=False)

    def put_back(self, entry: Entry) -> None:
        """Give stray bytes their level back, as far as it still works."""
        level = self.levels[entry.level]
        try:
            extent = level.place(entry.num_bytes)
        except (InsufficientMemory, DiskError):
            extent = None  # they stay stray; the error that brought us here is on its way to the user
        if extent is not None and entry.stray is not None:
            try:
                settled(level.write(extent, entry.stray))
            except (InsufficientMemory, DiskError):
                level.free(extent)
            else:
                with self.lock:
                    entry.extent, entry.stray = extent, None
        with self.lock:
            self.show(entry)

    def overwrite(self, entry: Entry, bytes_in: torch.Tensor, source: Place) -> bool:
        """Replace the bytes of ``entry`` on its level, unless somebody holds the old ones; whether it did.

        A write that fails leaves the old bytes.
        """
        with self.lock:
            if entry.held():
                return False
            if entry.extent is None:
                entry.stray = bytes_in.to("cpu", copy=True) if entry.num_bytes else None
                return True
            self.hide(entry)
            for stream in entry.side_streams:  # whose kernels may still read
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            entry.side_streams.clear()
        level, old = self.levels[entry.level], entry.extent
        try:
            beside = level.device is None and level.can_allocate(entry.num_bytes)  # only a disk can fail halfway
            extent = level.allocate(entry.num_bytes) if beside else old
            try:
                self.fill(entry.level, extent, bytes_in, source)
            except BaseException:
                if beside:
                    level.free(extent)
                raise
            if beside:
                entry.extent = extent
                level.free(old)
        finally:
            with self.lock:
                self.show(entry)
        return True

    def vacate(self, entry: Entry) -> bool:
        """Take the bytes of ``entry`` into RAM, so that its place is free; whether it had one and nobody holds it.

        `put_back` is the opposite. For replacing an entry on a stack that is full.
        """
        with self.lock:
            if entry.extent is None or entry.held():
                return False
            self.hide(entry)
        stray = torch.empty(entry.num_bytes, dtype=torch.uint8, device="cpu")
        try:
            read_entry(self.levels, entry, stray)
        except BaseException:
            with self.lock:
                self.show(entry)
            raise
        with self.lock:
            self.levels[entry.level].free(entry.extent)
            entry.stray, entry.extent = stray, None
        return True

    def drop(self, entry: Entry) -> None:
        """Forget ``entry``; its bytes go at once, or when the last tensor that somebody holds of them does."""
        with self.lock:
            self.policy.discard(entry)
            if entry.held():
                self._limbo.append(entry)
            else:
                self._let_go(entry)

    def sweep(self) -> None:
        """Free what was dropped while held and is not held any more. Called under the lock."""
        if self._limbo:
            gone = [entry for entry in self._limbo if not entry.held()]
            self._limbo = [entry for entry in self._limbo if entry not in gone]
            for entry in gone:
                self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        entry.unsettle()
        if entry.extent is not None:
            self.levels[entry.level].free(entry.extent)
            entry.extent = None
        entry.stray = None

    def reserve(self, what: str, num_bytes: int, level: int) -> Extent:
        """An extent on exactly this level, at the cost of any entry there.

        Raises:
            InsufficientMemory: the entries there cannot make room; nothing moved.
        """
        with self.lock:
            self.sweep()
            plan = Plan(self.levels, self.policy, exhaustive=True)
            extent = plan.room(level, num_bytes, max_priority=10, than=None)
            if extent is None:
                raise self.no_room(f"on {self.levels[level].name} for {what}", num_bytes, plan.refusal)
            plan.goal = (level, extent)
            self.begin(plan)
        try:
            self.carry_out(plan)
            self.levels[level].materialise(extent)
        except BaseException:
            with self.lock:
                plan.take_back(len(plan.moves))
            raise
        return extent

    def no_room(self, where: str, num_bytes: int, refusal: Exception | None = None) -> InsufficientMemory:
        """The error for bytes that found no place."""
        free = [level.capacity_bytes - level.used_bytes for level in self.levels]
        rooms = ", ".join(f"{level.name} {format_bytes(room)}" for level, room in zip(self.levels, free, strict=True))
        said = f" ({refusal})" if isinstance(refusal, DiskError) else ""
        return InsufficientMemory(
            f"the stack has no room {where}: {format_bytes(num_bytes)} in one piece are needed, free are {rooms}, and "
            f"what could give way is held, borrowed, reserved or has nowhere to go{said}; remove or release keys, or "
            f"raise a level's capacity",
            needed_bytes=num_bytes,
            available_bytes=max(free),
        )
