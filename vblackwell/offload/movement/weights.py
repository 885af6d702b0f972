"""Compute weights on level 0: loaded before they are needed, dropped when something else needs the room.

Every load gets a buffer of its own from level 0; a buffer is never overwritten. Whoever still holds a view of a dropped
one (autograd, a caller) keeps its memory alive by torch's own reference counts, so "a slot is reused only when nobody
else holds its storage" holds by construction. On CUDA the buffers come from the stream that computes, and a load
starts after what that stream had queued: memory freed by one group is safe to load another into without an event.

Who is dropped: the loaded group whose next use is farthest, by the recorded trace (Belady); never one in use. So the last
groups of the forward stay for the turnaround without a rule of their own.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from vblackwell.errors import InsufficientMemory, StaleTensor, VBError
from vblackwell.memory.cache.entry import USE_COUNT
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import TRAINED, Group
from vblackwell.offload.layout.order import AccessTrace
from vblackwell.offload.movement.loaded import Loaded, PackedView
from vblackwell.offload.storage.storage import Storage
from vblackwell.units import format_bytes

# Groups that are loaded ahead: half of those that the budget holds, within these. Copies of states share the link, and a load may wait
# behind a ring of them.
FEWEST_AHEAD, MOST_AHEAD = 2, 5


def current_stream(device: torch.device) -> Any:
    """The CUDA stream that computes now, None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class WeightStreamer:
    """Loads, drops and re-reads the groups of one model.

    Args:
        budget_bytes: what loaded weights may take of level 0.
        settle: called with a group before it is loaded; returns when no update is pending on its home bytes.
        make_room: called when level 0 is full and no group can be dropped; frees leaving gradients, False if there are none.
    """

    def __init__(
        self, stack: VGPUStack, name: str, groups: list[Group], homes: Storage, budget_bytes: int,
        settle: Callable[[Group], None], make_room: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._stack = stack
        self._name = name
        self._groups = groups
        self._homes = homes
        self._budget_bytes = budget_bytes
        largest = max((group.num_bytes for group in groups), default=1) or 1
        self._prefetch_groups = max(FEWEST_AHEAD, min(MOST_AHEAD, budget_bytes // largest // 2))
        if any(group.name.endswith(TRAINED) for group in groups):  # a layer is two groups, one of them small
            self._prefetch_groups *= 2
        self._settle = settle
        self._make_room = make_room
        self._device = stack.level0_device
        self._loaded: dict[int, Loaded] = {}
        self._by_storage: dict[int, Loaded] = {}
        self._versions = [0] * len(groups)
        self._last_load: list[Transfer | None] = [None] * len(groups)
        self.busy: Callable[[Group], bool] = lambda group: False
        self.sweep: Callable[[], None] = lambda: None  # lets lent groups whose updates are over be `returned`
        self.trace = AccessTrace()
        self.asked: dict[Group, None] = {}  # groups that other threads want loaded ahead
        self._latest: Group | None = None
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    # -- use ---------------------------------------------------------------------------------------------------------

    def acquire(self, group: Group) -> torch.Tensor:
        """The group's bytes on level 0, arrived, not dropped until `release`; the groups after it start to load."""
        loaded = self._ensure(group)
        loaded.pins += 1
        try:
            asked, self.asked = self.asked, {}
            for wanted in list(asked):
                self.prefetch(wanted)
            self._prefetch_upcoming()
        except BaseException:
            loaded.pins -= 1
            raise
        return loaded.buffer

    def release(self, group: Group) -> None:
        """End of `acquire`. The bytes stay until room is needed."""
        self._loaded[group.index].pins -= 1

    def buffer(self, group: Group) -> torch.Tensor:
        """The loaded bytes of a group that is acquired."""
        return self._loaded[group.index].buffer

    def is_pinned(self, group: Group) -> bool:
        loaded = self._loaded.get(group.index)
        return loaded is not None and loaded.pins > int(loaded.lent)

    def _ensure(self, group: Group) -> Loaded:
        self.trace.use(group.index)
        again, self._latest = self._latest is group, group
        loaded = self._loaded.get(group.index)
        if loaded is not None and loaded.provisional:
            self._settle(group)
            loaded = self._loaded.get(group.index)
        if loaded is None:
            self._stack.count_miss(self._homes.range(group, "weight").level)
            loaded = self._load(group)
        elif not again:  # backward reads a group weight by weight: that is one use
            self._stack.count_hit(0)
        self._arrive(loaded)
        return loaded

    def _arrive(self, loaded: Loaded) -> None:
        if loaded.arrived:
            return
        try:
            self.wait_for(loaded.transfer)
        except BaseException:  # what is in the buffer is not the weights
            self._forget(loaded)
            raise
        loaded.arrived = True
        self._homes.in_flight.discard(loaded.transfer)
        # It is remembered until the home bytes change (`last_load`); the buffer's memory must not live as long. Its next
        # use is ordered behind the copy, because the stream that frees it has just waited.
        loaded.transfer.let_go()
        if loaded.own_count is None:
            loaded.own_count = USE_COUNT(loaded.storage_key)

    def wait_for(self, transfer: Transfer) -> None:
        """Let what computes next on level 0 see the transfer's bytes; what that costs is counted as stall."""
        stream = current_stream(self._device)
        started = time.perf_counter()
        if stream is None:
            transfer.wait()
            self._stack.add_stall(time.perf_counter() - started)
            return
        # The host does not wait, the stream may: how long is known when both events have passed.
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        transfer.wait_on(stream)
        after.record(stream)
        self._waits.append((before, after))
        while self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._stack.add_stall(before.elapsed_time(after) / 1e3)
            if not self._waits:
                break

    # -- loads -------------------------------------------------------------------------------------------------------

    def _load(self, group: Group) -> Loaded:
        self._settle(group)
        if group.index in self._loaded:  # by an update that was waiting, and was now queued
            return self._loaded[group.index]
        with torch.inference_mode(False):
            reservation = self._reserve(group)
            try:
                buffer = reservation.view()
                assert buffer is not None, "level 0 is addressable"
                transfer = self._stack.read(self._homes.range(group, "weight"), buffer)
            except Exception:
                self._homes.give(reservation)
                raise
        self.remember_load(group, transfer)
        loaded = Loaded(group, reservation, buffer, transfer, buffer.untyped_storage()._cdata)
        self._loaded[group.index] = loaded
        self._by_storage[loaded.storage_key] = loaded
        return loaded

    def _reserve(self, group: Group) -> Reservation:
        self.sweep()
        while True:
            if self.loaded_bytes + group.num_bytes <= self._budget_bytes:
                try:
                    return self._homes.take(f"{group.name}/loaded", group.num_bytes, 0)
                except InsufficientMemory:
                    if self._make_room():
                        continue
            victim = self._farthest()
            if victim is not None:
                self._drop(victim)
                continue
            if not self._make_room():
                level = self._stack.levels[0]
                raise InsufficientMemory(
                    f"group {group.name!r} of {self._name!r} needs {format_bytes(group.num_bytes)} on level 0 ({level.name}), which has "
                    f"{format_bytes(level.capacity_bytes)} and everything on it is in use: raise fast_memory (the capacity of level 0)",
                    needed_bytes=group.num_bytes,
                    available_bytes=level.capacity_bytes - level.used_bytes,
                )

    def _farthest(self, beyond: int = -1) -> Loaded | None:
        """The idle loaded group whose next use is farthest, if that is more than ``beyond`` uses away."""
        idle = [loaded for loaded in self._loaded.values() if loaded.pins == 0]
        best = max(idle, key=self._distance, default=None)
        return best if best is not None and self._distance(best) > beyond else None

    def _distance(self, loaded: Loaded) -> int:
        """Uses until this group's next one. The group used last is still in use: its backward reads it weight by weight."""
        return 0 if loaded.group is self._latest else self.trace.next_use(loaded.group.index)

    def _prefetch_upcoming(self) -> None:
        for index in self.trace.upcoming(self._prefetch_groups):
            if not self.prefetch(self._groups[index]):
                return

    def prefetch(self, group: Group) -> bool:
        """Start loading ``group`` if that costs nothing sooner needed; False if it was not possible. Never blocks."""
        if group.index in self._loaded:
            return True
        if self.busy(group):
            return False  # an update is on its way: loading now would wait for it, or be stale
        distance = self.trace.next_use(group.index)
        self.sweep()
        while self.loaded_bytes + group.num_bytes > self._budget_bytes or not self._fits(group):
            victim = self._farthest(beyond=distance)
            if victim is None:
                return False
            self._drop(victim)
        try:
            self._load(group)
        except InsufficientMemory:  # somebody else's keys took the room between the question and the load
            return False
        return True

    def _fits(self, group: Group) -> bool:
        return self._stack.levels[0].can_allocate(group.num_bytes)

    @property
    def loaded_bytes(self) -> int:
        """What the budget counts. Lent groups are outside it: how many there are is bounded by the gradients under way, and on a GPU the
        host, which counts, is so far ahead that it would see them for most of the next forward."""
        return sum(loaded.group.num_bytes for loaded in self._loaded.values() if not loaded.lent)

    def drop_one(self) -> bool:
        """Give level 0 the room of one idle group; False if none is idle."""
        victim = self._farthest()
        if victim is not None:
            self._drop(victim)
        return victim is not None

    def _drop(self, loaded: Loaded) -> None:
        assert loaded.pins == 0
        try:
            self._arrive(loaded)  # the copy must not outlive its destination
        except (VBError, OSError):
            return  # `_arrive` has forgotten it; whoever needs it will load it again, and hear
        self._forget(loaded)

    def _forget(self, loaded: Loaded) -> None:
        self._homes.in_flight.discard(loaded.transfer)
        del self._loaded[loaded.group.index]
        # Before the storage can die: its address may come back as somebody else's.
        del self._by_storage[loaded.storage_key]
        loaded.buffer = torch.empty(0)
        self._homes.give(loaded.reservation)

    # -- change ------------------------------------------------------------------------------------------------------

    def invalidate(self, group: Group) -> None:
        """The home bytes are about to change: what is loaded is dropped, what autograd packed becomes an error."""
        self._versions[group.index] += 1
        loaded = self._loaded.get(group.index)
        if loaded is not None:
            if loaded.pins:
                raise StaleTensor(f"group {group.name!r} would be updated while its forward runs")
            self._drop(loaded)

    def lend(self, group: Group) -> Loaded | None:
        """The group's loaded bytes, to be changed in place, kept until `returned`; None if they are not there or not ours alone."""
        loaded = self._loaded.get(group.index)
        if loaded is None or loaded.pins or not loaded.arrived or USE_COUNT(loaded.storage_key) != loaded.own_count:
            return None
        loaded.pins += 1
        loaded.lent = True
        return loaded

    def fetch(self, group: Group) -> Loaded | None:
        """Like `lend` for a group that need not be there: it is loaded; None if level 0 has no room that is free or needed later."""
        if group.index not in self._loaded and not self.prefetch(group):
            return None
        loaded = self._loaded[group.index]
        if loaded.pins or (loaded.arrived and USE_COUNT(loaded.storage_key) != loaded.own_count):
            return None
        loaded.pins += 1
        loaded.lent = True
        return loaded

    def renew(self, loaded: Loaded, end: Transfer) -> None:
        """Lent bytes are the group's next version when ``end`` is over, and if its step comes (`confirm`)."""
        self._versions[loaded.group.index] += 1
        # ``end`` is behind the load, and whoever reads them holds the bytes: what the load kept must not count as another holder.
        self._homes.in_flight.discard(loaded.transfer)
        loaded.transfer.let_go()
        loaded.transfer, loaded.arrived, loaded.provisional = end, False, True

    def distrust(self, group: Group) -> None:
        """What is loaded is not what a step that was promised makes of it: settle before use."""
        loaded = self._loaded.get(group.index)
        if loaded is not None:
            loaded.provisional = True

    def confirm(self, group: Group) -> None:
        """The step has come."""
        loaded = self._loaded.get(group.index)
        if loaded is not None:
            loaded.provisional = False

    def returned(self, loaded: Loaded) -> None:
        """End of `lend` and `fetch`: the bytes are at home too."""
        loaded.pins -= 1
        loaded.lent = False

    def discard(self, group: Group) -> None:
        """What is loaded is not what the group is: drop it."""
        loaded = self._loaded.get(group.index)
        if loaded is not None:
            self._drop(loaded)

    def version(self, group: Group) -> int:
        """Counts the changes of the group's home bytes."""
        return self._versions[group.index]

    def remember_load(self, group: Group, transfer: Transfer) -> None:
        """A copy out of the group's home bytes was started."""
        self._last_load[group.index] = transfer
        self._homes.in_flight.add(transfer)

    def arrived(self, transfer: Transfer) -> None:
        """What was remembered has been waited for."""
        transfer.let_go()
        self._homes.in_flight.discard(transfer)

    def last_load(self, group: Group) -> Transfer | None:
        """The newest copy out of the home bytes, to be waited for by the host before they are overwritten."""
        return self._last_load[group.index]

    def revert(self, group: Group) -> None:
        """The home bytes are what they were before the last `invalidate`."""
        self._versions[group.index] -= 1

    def touched(self, group: Group) -> None:
        """The loaded bytes were changed in place and will be carried home."""
        self._versions[group.index] += 1

    def drop_all(self) -> None:
        for loaded in list(self._loaded.values()):
            self._drop(loaded)

    # -- what backward reads ---------------------------------------------------------------------------------------

    def aliases(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in a loaded buffer."""
        return self._find(tensor) is not None

    def _find(self, tensor: torch.Tensor) -> Loaded | None:
        if tensor.layout != torch.strided or not torch._C._has_storage(tensor):
            return None
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def stamp(self, group: Group, start: int, stop: int) -> tuple[int, int]:
        """Changes of the home bytes, and in-place writes, as autograd counts them, to the parameters in bytes ``start`` to ``stop``."""
        found, slots = 0, group.slots
        with torch._C.DisableTorchFunctionSubclass():
            for index in range(bisect_right(slots, start, key=lambda slot: slot.offset) - 1, len(slots)):
                if slots[index].offset >= stop:
                    break
                found += slots[index].param._version
        return self._versions[group.index], found

    def pack(self, tensor: torch.Tensor) -> PackedView | None:
        """A reference to replace ``tensor`` by while autograd keeps it; None if it is not in a loaded buffer."""
        loaded = self._find(tensor)
        if loaded is None:
            return None
        offset = int(tensor.storage_offset()) * tensor.element_size() - int(loaded.buffer.storage_offset())
        size, stride = tensor.shape, tensor.stride()
        stop = offset + (1 + sum((n - 1) * by for n, by in zip(size, stride, strict=True))) * tensor.element_size()
        return PackedView(
            loaded.group, self.stamp(loaded.group, offset, stop), tensor.dtype, offset, stop, size, stride
        )  # fmt: skip

    def unpack(self, packed: PackedView) -> torch.Tensor:
        """The tensor again, loading its group if it was dropped.

        Raises:
            StaleTensor: the weights were updated since the forward.
        """
        self._settle(packed.group)
        if packed.version != self.stamp(packed.group, packed.offset, packed.stop):
            raise StaleTensor(
                f"backward needs the weights of {packed.group.name!r} as they were in the forward, but they have been changed since "
                "(an optimizer step or an in-place write between forward and backward)"
            )
        loaded = self._ensure(packed.group)
        base = loaded.buffer[packed.offset % packed.dtype.itemsize :]
        base = base[: base.numel() // packed.dtype.itemsize * packed.dtype.itemsize].view(packed.dtype)
        start = base.storage_offset() + packed.offset // packed.dtype.itemsize
        tensor = base.as_strided(packed.size, packed.stride, start)
        self._prefetch_upcoming()
        return tensor
