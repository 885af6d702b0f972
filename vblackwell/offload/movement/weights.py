"""Compute weights on level 0: loaded before they are needed, dropped when something else needs the bytes.

A load gets a new buffer, which is never overwritten: what still holds a view of a dropped one (autograd, a caller)
keeps its memory alive. On CUDA buffers come from the stream that computes, and a load starts after what that had
queued: memory freed by one group takes another without an event. Dropped is the idle group whose next use is farthest
(Belady). A model that nothing trains runs the same order pass after pass: there the rule would keep what comes next,
and the link would rest meanwhile, so the groups that stay are spread evenly.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vblackwell.errors import InsufficientMemory, StaleTensor, VBError
from vblackwell.memory.cache.entry import USE_COUNT
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import no_inference_mode
from vblackwell.offload.layout.generation import WEIGHT_PLACES
from vblackwell.offload.layout.groups import TRAINED, AccessTrace, Group
from vblackwell.offload.movement.state import LoadedWeights, Mover, Phase, Shared, Stalls, defer_sigint, free_until

# Groups that are loaded ahead: half of those that the budget holds, within these. Copies of states share the link, and
# a load may wait for a ring of them.
MIN_AHEAD, MAX_AHEAD = 2, 5


class SavedTensor(NamedTuple):
    """What autograd keeps of a tensor that stays where it is, with its version: under hooks torch does not check it.

    Detached: the graph of an operator that saves its output would hold itself where no backward comes.
    """

    tensor: Tensor
    version: int

    def unchanged(self) -> Tensor:
        """The tensor again; raises RuntimeError, as torch says it, where it was written to since."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of {self.tensor.dtype} and shape {tuple(self.tensor.shape)} is at version "
                f"{self.tensor._version}; expected version {self.version}"
            )
        return self.tensor


@dataclass(frozen=True)
class PackedView:
    group: Group
    version: tuple[int, int]
    dtype: torch.dtype
    offset: int  # bytes from the group's start
    stop: int  # of the byte after the last
    size: torch.Size
    stride: tuple[int, ...]


class WeightStreamer(Mover):
    """Loads the groups of one model, and drops them, within ``budget_bytes`` of level 0.

    A load copies what is in storage when its turn comes: `StepControl` orders it after the group's update first.
    """

    def __init__(self, shared: Shared, budget_bytes: int) -> None:
        super().__init__(shared)
        self.budget_bytes = budget_bytes
        self._by_storage: dict[int, LoadedWeights] = {}  # all that are loaded
        # What the budget counts of them: not those that an update has locked, as gradients under way bound those. The
        # host, which counts, is so far ahead of a GPU that it would see them for most of the next forward.
        self.loaded_bytes = 0
        self.trace = AccessTrace()
        self.wait_for = Stalls(shared.stack).wait_for
        self._latest: Group | None = None
        self.asked: dict[Group, None] = {}  # groups that other threads want loaded ahead
        self._largest_bytes = max((group.num_bytes for group in self._groups), default=0)
        self._ahead = max(MIN_AHEAD, min(MAX_AHEAD, budget_bytes // max(1, self._largest_bytes) // 2))
        if any(group.name.endswith(TRAINED) for group in self._groups):  # a layer is two groups, one of them small
            self._ahead *= 2
        self.frozen = not any(group.trainable() for group in self._groups)  # nothing trains the model
        self.num_released = 0  # how often all parameters' versions were counted up without a write (`BoundWeights`)
        self.staying: frozenset[int] = frozenset()  # groups of a frozen model that are not dropped once they are loaded
        if self.frozen:
            self.trace.expect([group.index for group in self._groups])  # until a pass has shown another order
            self.rebudget(budget_bytes)

    # -- what a caller needs now, and will need ------------------------------------------------------------------------

    def use(self, group: Group) -> None:
        self.trace.use(group.index)
        again, self._latest = self._latest is group, group
        if not self.is_loaded(group):
            self._stack.count_found(self._storage.range(group, "weight").level)
        elif not again:  # backward reads a group weight by weight: that is one use
            self._stack.count_found(0)

    def end_pass(self) -> None:
        """A forward of a frozen model is over: what the next one needs last is dropped first."""
        self.trace.begin_pass()
        self._latest = None

    def upcoming(self) -> Iterator[Group]:
        """The groups to load ahead, soonest first."""
        if not self.frozen:
            return map(self._groups.__getitem__, self.trace.upcoming(self._ahead))
        if self.has_all():
            return iter(())
        # The next copies begin whatever pass they belong to: no update is between, the link always works.
        groups = map(self._groups.__getitem__, self.trace.upcoming(len(self._groups), wrap=True))
        absent = (group for group in groups if not self.is_loaded(group) and group.num_bytes <= self.budget_bytes)
        return itertools.islice(absent, WEIGHT_PLACES)

    def load_ahead(self, group: Group, order_loads: Callable[[Group], None]) -> bool:
        """`load`, after ``order_loads``, if level 0 has, or gets by dropping what is needed later, the bytes of
        ``group``; else, and where other keys take them meanwhile, False. Never blocks.
        """
        distance, level0 = self.trace.next_use(group.index), self._stack.levels[0]
        self._budget.sweep_updates()
        if not free_until(
            lambda: self._fits(group) and level0.can_allocate(group.num_bytes), lambda: self.drop_one(beyond=distance)
        ):
            return False
        try:
            order_loads(group)
            if not self.is_loaded(group):  # by an update that was due
                self.load(group)
        except InsufficientMemory:
            return False
        return True

    def load_what_fits(self) -> None:
        """Start to load, in the order of use, groups of a frozen model that stay and the first of those that pass,
        until one does not fit; drops nothing."""
        level0, places = self._stack.levels[0], WEIGHT_PLACES
        order = dict.fromkeys((*self.trace.last_pass, *range(len(self._groups))))
        for group in map(self._groups.__getitem__, order):
            places -= group.index not in self.staying
            if self.is_loaded(group) or group.num_bytes > self.budget_bytes or places < 0:
                continue
            if not self._fits(group) or not level0.can_allocate(group.num_bytes):
                return
            self.load(group)

    def have_arrived(self) -> bool:
        """Whether all groups are there."""
        return self.has_all() and all(map(_is_over, self._by_storage.values()))

    def arrived(self) -> float:
        """How much has arrived of a frozen model's groups that stay, from 0 to 1; of one of which none stays, whether
        any is there."""
        wanted = [self._states[self._groups[index]].loaded for index in self.staying]
        total = sum(self._groups[index].num_bytes for index in self.staying)
        if not total:
            return float(bool(self._by_storage))
        return sum(each.group.num_bytes for each in wanted if each and _is_over(each)) / total

    # -- loading and dropping ------------------------------------------------------------------------------------------

    def pin(self, group: Group) -> Tensor:
        """The bytes of a loaded group, not dropped until `unpin`."""
        loaded = self._of(group)
        loaded.pins += 1
        return loaded.buffer

    def unpin(self, group: Group) -> None:
        """End of `pin`. They stay until their bytes are needed."""
        self._of(group).pins -= 1

    def buffer(self, group: Group) -> Tensor:
        return self._of(group).buffer

    def _of(self, group: Group) -> LoadedWeights:
        loaded = self._states[group].loaded
        assert loaded is not None, f"{group.name!r} is not on level 0"
        return loaded

    def is_loaded(self, group: Group) -> bool:
        return self._states[group].loaded is not None

    def has_all(self) -> bool:
        """Whether every group is loaded, or on its way."""
        return len(self._by_storage) == len(self._groups)

    def is_pinned(self, group: Group) -> bool:
        """Whether somebody but an update uses the group's bytes on level 0."""
        loaded = self._states[group].loaded
        return loaded is not None and loaded.pins > int(loaded.locked)

    def arrive(self, group: Group) -> None:
        """Order what computes next after the group's load, which is started if it was not."""
        if not self.is_loaded(group):
            self.load(group)
        loaded, state = self._of(group), self._states[group]
        if loaded.transfer is None:
            return
        try:
            self.wait_for(loaded.transfer)
        except BaseException:  # what is in the buffer is not the weights
            self._forget(loaded)
            raise
        # It is remembered until the stored bytes change (`GroupState.last_load`); the buffer's memory must not live as
        # long. Its next use is ordered after the copy, because the stream that frees it has just waited.
        self.has_arrived(loaded.transfer)
        loaded.transfer = None
        if state.phase is Phase.LOADING:
            state.to(Phase.LOADED)
        if loaded.own_count is None:
            loaded.own_count = USE_COUNT(loaded.storage_key)

    @defer_sigint()  # what has been reserved is known, or given back, when it comes
    def load(self, group: Group) -> None:
        """Start to load ``group``, which is not on level 0, as it is in storage by then; raises InsufficientMemory."""
        budget, name, fits = self._budget, f"{group.name}/loaded", partial(self._fits, group)
        budget.sweep_updates()
        with no_inference_mode():
            reservation = budget.reserve(name, group.num_bytes, budget.free_any, self.drop_one, fits=fits)
            try:
                buffer = reservation.bytes
                transfer = self._stack.read(self._storage.range(group, "weight"), buffer)
            except Exception:
                self._storage.give(reservation)
                raise
        self.remember_load(group, transfer)
        loaded = LoadedWeights(group, reservation, buffer, transfer, buffer.untyped_storage()._cdata)
        state = self._states[group]
        state.loaded = self._by_storage[loaded.storage_key] = loaded
        self.loaded_bytes += group.num_bytes
        if state.phase is Phase.STORED:
            state.to(Phase.LOADING)

    def _fits(self, group: Group) -> bool:
        return self.loaded_bytes + group.num_bytes <= self.budget_bytes

    def drop_one(self, beyond: int = -1) -> bool:
        """Drop the idle group whose next use is farthest; False if none is idle and more than ``beyond`` uses away.

        Those that stay give way to a group in use or to somebody else's bytes, never to one that comes later.
        """
        idle = [loaded for loaded in self._by_storage.values() if loaded.pins == 0]
        passing = [loaded for loaded in idle if loaded.group.index not in self.staying]

        def distance(loaded: LoadedWeights) -> int:
            """Uses until this group's next one; 0 for the latest, which its backward reads weight by weight."""
            return 0 if loaded.group is self._latest else self.trace.next_use(loaded.group.index)

        best = max(passing or (idle if beyond < 0 else ()), key=distance, default=None)
        if best is None or distance(best) <= beyond:
            return False
        self.drop(best.group)
        return True

    def drop_all(self) -> None:
        for loaded in list(self._by_storage.values()):
            self.drop(loaded.group)

    def drop(self, group: Group) -> None:
        """Give up what is loaded of ``group``, if anything."""
        loaded = self._states[group].loaded
        if loaded is not None:
            assert loaded.pins == 0
            try:
                self.arrive(group)  # the copy must not outlive its destination
            except (VBError, OSError):
                return  # `arrive` has forgotten it; the next use loads it again, and raises
            self._forget(loaded)

    def _forget(self, loaded: LoadedWeights) -> None:
        if loaded.transfer is not None:
            self._storage.in_flight.discard(loaded.transfer)
        state = self._states[loaded.group]
        state.loaded = None
        if state.phase in (Phase.LOADING, Phase.LOADED):
            state.to(Phase.STORED)
        # Before the storage can die: its address may come back as somebody else's.
        del self._by_storage[loaded.storage_key]
        self.loaded_bytes -= 0 if loaded.locked else loaded.group.num_bytes
        if not self._by_storage:  # whatever an interrupt between two lines has left of it
            self.loaded_bytes = 0
        loaded.buffer = torch.empty(0)
        self._storage.give(loaded.reservation)

    def rebudget(self, budget_bytes: int) -> None:
        """Let weights take so much of level 0, at least the largest group's; of a frozen model, choose which stay."""
        self.budget_bytes = max(budget_bytes, min(self._largest_bytes, self.budget_bytes))
        if self.frozen:
            able = [group for group in self._groups if group.num_bytes <= self.budget_bytes]
            self.staying = frozenset(group.index for group in groups_that_stay(able, self.budget_bytes))
        free_until(lambda: self.loaded_bytes <= self.budget_bytes, self.drop_one)

    # -- models that nothing trains ------------------------------------------------------------------------------------

    def hold(self) -> list[Group]:
        """Load a frozen model's groups that stay, which it returns, hold them until `let_go`, and drop idle others.

        Holds none where one does not fit (InsufficientMemory).
        """
        for loaded in list(self._by_storage.values()):
            if loaded.pins == 0 and loaded.group.index not in self.staying:
                self.drop(loaded.group)
        held = list[Group]()
        try:
            for group in [self._groups[index] for index in sorted(self.staying)]:
                self.arrive(group)
                self.pin(group)
                held.append(group)
        except BaseException:
            self.let_go(held)
            raise
        return held

    def let_go(self, held: list[Group]) -> None:
        for group in held:
            self.unpin(group)

    def invalidate(self, group: Group) -> None:
        """The stored bytes are about to change: what is loaded is dropped, what autograd packed becomes an error."""
        self.refuse_in_use(group)
        self._states[group].version += 1
        self.drop(group)

    def refuse_in_use(self, group: Group) -> None:
        """Raise StaleTensor where somebody holds what is loaded of ``group``."""
        loaded = self._states[group].loaded
        if loaded is not None and loaded.pins:
            raise StaleTensor(f"group {group.name!r} would be updated while its forward runs")

    def lock(self, group: Group, *, arriving: bool = False) -> LoadedWeights | None:
        """The group's loaded (or ``arriving``) bytes, for an update in place; None: not there, or others hold them."""
        loaded = self._states[group].loaded
        if loaded is None or loaded.pins or (loaded.transfer is not None and not arriving):
            return None
        if loaded.transfer is None and USE_COUNT(loaded.storage_key) != loaded.own_count:
            return None
        loaded.pins += 1
        loaded.locked = True
        self.loaded_bytes -= group.num_bytes
        return loaded

    def mark_updated(self, loaded: LoadedWeights, end: Transfer) -> None:
        """Locked bytes are the group's next version when ``end`` is over."""
        self._states[loaded.group].version += 1
        # ``end`` is after the load, which must not count as another holder of the bytes.
        if loaded.transfer is not None:
            self.has_arrived(loaded.transfer)
        loaded.transfer = end

    def unlock(self, loaded: LoadedWeights) -> None:
        """End of `lock`: the bytes are in storage too."""
        loaded.pins -= 1
        loaded.locked = False
        if self._states[loaded.group].loaded is loaded:  # not where its copy failed
            self.loaded_bytes += loaded.group.num_bytes

    def remember_load(self, group: Group, transfer: Transfer) -> None:
        self._states[group].last_load = transfer
        self._storage.in_flight.add(transfer)

    def has_arrived(self, transfer: Transfer) -> None:
        transfer.let_go()
        self._storage.in_flight.discard(transfer)

    # -- what backward reads -------------------------------------------------------------------------------------------

    def find(self, tensor: Tensor) -> LoadedWeights | None:
        """In whose buffer ``tensor`` lies, if in any."""
        if tensor.layout != torch.strided or not torch._C._has_storage(tensor):
            return None
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def stamp(self, group: Group, start: int, stop: int) -> tuple[int, int]:
        """Changes of the weights, and in-place writes that autograd counts to parameters in bytes start to stop."""
        found, slots = 0, group.slots
        with torch._C.DisableTorchFunctionSubclass():
            for index in range(bisect_right(slots, start, key=lambda slot: slot.offset) - 1, len(slots)):
                if slots[index].offset >= stop:
                    break
                found += slots[index].param._version - self.num_released
        return self._states[group].version, found

    def pack(self, tensor: Tensor) -> PackedView | None:
        """A reference to replace ``tensor`` by while autograd keeps it; None if it is not in a loaded buffer."""
        loaded = self.find(tensor)
        if loaded is None:
            return None
        group, size, stride = loaded.group, tensor.shape, tensor.stride()
        offset = int(tensor.storage_offset()) * tensor.element_size() - int(loaded.buffer.storage_offset())
        stop = offset + (1 + sum((n - 1) * by for n, by in zip(size, stride, strict=True))) * tensor.element_size()
        return PackedView(group, self.stamp(group, offset, stop), tensor.dtype, offset, stop, size, stride)

    def check(self, packed: PackedView) -> None:
        """Raise StaleTensor if its group was changed since `pack`."""
        if packed.version != self.stamp(packed.group, packed.offset, packed.stop):
            raise changed_since_forward(packed.group)

    def unpack(self, packed: PackedView) -> Tensor:
        """The tensor that `pack` was given, whose group is loaded."""
        base = self._of(packed.group).buffer[packed.offset % packed.dtype.itemsize :]
        base = base[: base.numel() // packed.dtype.itemsize * packed.dtype.itemsize].view(packed.dtype)
        start = base.storage_offset() + packed.offset // packed.dtype.itemsize
        return base.as_strided(packed.size, packed.stride, start)


def _is_over(loaded: LoadedWeights) -> bool:
    """Whether the copy that brings it is; any thread may ask."""
    transfer = loaded.transfer
    return transfer is None or transfer.done()


def changed_since_forward(group: Group) -> StaleTensor:
    return StaleTensor(
        f"backward needs the weights of {group.name!r} as they were in the forward, but they have been changed since "
        "(an optimizer step or an in-place write between forward and backward)"
    )


def groups_that_stay(groups: Sequence[Group], budget_bytes: int) -> list[Group]:
    """Which of ``groups``, in the order of use, stay in ``budget_bytes`` so that the others come evenly between them.

    If not all fit, `WEIGHT_PLACES` of the largest are left free; smaller ones, whose copies are slow, stay first.
    """
    if sum(group.num_bytes for group in groups) <= budget_bytes:
        return list(groups)
    largest = max(group.num_bytes for group in groups)
    free_bytes, chosen = budget_bytes - WEIGHT_PLACES * largest, list[Group]()
    for group in sorted((group for group in groups if group.num_bytes < largest), key=lambda group: group.num_bytes):
        if group.num_bytes <= free_bytes:
            chosen.append(group)
            free_bytes -= group.num_bytes
    rest = [group for group in groups if group not in chosen]
    for count in range(len(rest), 0, -1):
        spread = [rest[(2 * place + 1) * len(rest) // (2 * count)] for place in range(count)]
        if sum(group.num_bytes for group in spread) <= free_bytes:
            return chosen + spread
    return chosen
