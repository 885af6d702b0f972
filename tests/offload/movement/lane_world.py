"""One lane over an arena, RAM and a disk, driven by a random program; and what every range must hold when it is over.

With the lane runs the plainest reference: whole groups, one after the other, in separate memory. Memory that a
job gives back is filled with garbage as soon as its transfers say that it may be. What lies between parameters is
nobody's, and not compared.

Groups that are in RAM may be a step behind (`movement.state.Behind`): an update before its step makes the step that
their states lack, and of its own the weights alone. The reference has whole states all the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from tests.offload.movement.adversary import PAGE, Adversary, LateContinuations, LateDisk, LateQueues
from vblackwell.errors import InsufficientMemory, KeyClash
from vblackwell.kernels.optimizer.adamw import AdamWStep
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.host import HostLevel
from vblackwell.memory.level import DeviceLevel, Transfer
from vblackwell.memory.transfer import EventTransfer
from vblackwell.offload.layout.groups import (
    EXACT,
    OLD_GRADIENT,
    OLD_WEIGHT,
    Formats,
    Group,
    Piece,
    bytes_of,
    first_element,
    moment_ranges,
    num_elements,
    smallest_buffer,
)
from vblackwell.offload.layout.storage_plan import StoragePlan
from vblackwell.offload.movement.lane import Lane, LaneEnd, LaneJob, update_piece
from vblackwell.offload.movement.state import Worker
from vblackwell.offload.storage.staging import Stage
from vblackwell.offload.storage.storage import Ranges, Shadows, Storage, spaces_of
from vblackwell.units import align_up

GARBAGE = 0x7F
Bytes = dict[str, torch.Tensor]


@dataclass
class Setting:
    """What a world is made of.

    ``in_ram``: the share of the bytes below level 0 that the host level holds. ``host_writes``: chance that the host
    changes a range. ``behind``: chance that an update is one before its step whose states stay a step behind.
    """

    dtype: torch.dtype = torch.float32
    formats: Formats = EXACT
    num_groups: int = 4
    in_ram: float = 0.6
    buffers: int = 2
    eagerness: float = 0.5
    host_writes: float = 0.1
    lane: type[Lane] = Lane
    behind: float = 0.0


@dataclass(eq=False)
class Load:
    """Weights on their way to level 0, and what they must be."""

    group: Group
    buffer: torch.Tensor
    transfer: Transfer
    expected: torch.Tensor


@dataclass(eq=False)
class Open:
    """An update whose step has not come; ``ahead``: its numbers, where it made weights alone and has no shadows."""

    group: Group
    shadows: Ranges
    after: Bytes
    ahead: AdamWStep | None = None


def same_parameters(group: Group, kind: str, flat: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two ranges of ``kind`` hold the same bytes, but for the gaps between parameters."""
    ends = [(first_element(slot), first_element(slot) + slot.num_elements) for slot in group.slots]
    own = [slice(*(bytes_of(group, kind, end) for end in pair)) for pair in ends]
    return flat.shape == other.shape and all(torch.equal(flat[each], other[each]) for each in own)


class World:
    """See the module's text."""

    def __init__(self, seed: int, setting: Setting, worker: Worker) -> None:
        self.chance = random.Random(seed)
        self.adversary = Adversary(seed + 1, setting.eagerness)
        self.setting = setting
        self.groups = [self._group(index) for index in range(setting.num_groups)]
        self.queues = LateQueues(self.adversary)
        self.disk = LateDisk(self.adversary, 4 << 20)
        total = sum(self._bytes_below(group) for group in self.groups)
        largest = max(self._bytes_below(group) for group in self.groups)
        host = max(int(total * setting.in_ram), 2 * largest + 8 * PAGE)
        self.stack = VGPUStack([DeviceLevel("cpu", 4 << 20), HostLevel(host, pin=False), self.disk])
        plan = StoragePlan.empty(spaces_of(self.stack), [1, 2], self.groups, on_level0=self.groups)
        self.storage = Storage(self.stack, "m", plan)
        narrow = setting.dtype == torch.bfloat16 and not setting.formats.stochastic
        first = [(group, "weight") for group in self.groups]
        first += [(group, "remainder") for group in self.groups] if narrow else []
        self.storage.reserve(first, later=moment_ranges(self.groups))
        self.storage.reserve([(group, "gradient") for group in self.groups] + moment_ranges(self.groups))
        self.truth = {group: self._first_bytes(group) for group in self.groups}
        size = max(smallest_buffer(group) for group in self.groups)
        ring = self.storage.take("ring", setting.buffers * size, 0).view()
        assert ring is not None
        self.stage = Stage(self.storage, LateContinuations(self.adversary))
        self.lane = setting.lane(self.stack, self.storage, ring, setting.buffers, self.queues, worker)
        self.lane._stage = self.stage
        self.shadows = Shadows(self.storage)
        self.ends: dict[Group, LaneEnd] = {}
        self.loads: list[Load] = []
        self.last_load: dict[Group, Transfer] = {}
        self.open: dict[Group, Open] = {}
        self.behind: dict[Group, AdamWStep] = {}  # the numbers of the step that states lack
        self.gradients: dict[Group, torch.Tensor] = {}  # what is stored of that step, or of one that may come
        self.step = 0
        self.made = {"first": 0, "both": 0, "settled": 0, "dropped": 0}  # updates by kind, of states that stay behind
        if setting.behind:
            self._add_old_weights()

    # -- bytes -------------------------------------------------------------------------------------------------------

    def _group(self, index: int) -> Group:
        group = Group(index, f"g{index}", formats=self.setting.formats)
        for number in range(self.chance.randint(1, 3)):
            param = nn.Parameter(torch.empty(self.chance.choice([7, 256, 1500, 2600, 6000])))
            group.append(f"g{index}.p{number}", param, self.setting.dtype)
        return group

    def _bytes_below(self, group: Group) -> int:
        kinds = ["weight", "gradient", *group.formats.moments]
        unit = PAGE if self.setting.in_ram >= 1 else 1  # as a level counts, where everything is to fit
        return sum(align_up(num_bytes, unit) for num_bytes in [group.num_bytes, *map(group.size_of, kinds)])

    def _first_bytes(self, group: Group) -> Bytes:
        return {kind: self._write(group, kind) for kind in ("weight", *self.storage.states_of(group))}

    def _values(self, num_bytes: int, kind: str) -> torch.Tensor:
        """Bytes that are small numbers in whatever type ``kind`` has."""
        generator = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        if kind in ("weight", "gradient"):
            dtype = self.setting.dtype
        elif kind == "remainder" or kind.endswith("_codes"):
            return torch.randint(0, 100, (num_bytes,), generator=generator, dtype=torch.uint8)
        else:
            dtype = torch.float32
        return torch.rand(num_bytes // dtype.itemsize, generator=generator).to(dtype).view(torch.uint8)

    def _write(self, group: Group, kind: str) -> torch.Tensor:
        """The host writes fresh bytes to a range of the storage, as loading a checkpoint does."""
        values = self._values(self.storage.range(group, kind).num_bytes, kind)
        opened = self.storage.open(group, kind, load=False)
        opened.copy_(values)
        self.storage.store(group, kind, opened)
        return values

    def _after(self, group: Group, before: Bytes, gradient: torch.Tensor, numbers: AdamWStep) -> Bytes:
        """What an update makes of ``before``: the whole group at once."""
        arrived = {kind: flat.clone() for kind, flat in before.items()}
        job = LaneJob(group, dict.fromkeys(group.slots, numbers), {}, {}, gradient=gradient)
        update_piece(job, Piece(0, num_elements(group)), arrived)
        return arrived

    # -- states that are a step behind -------------------------------------------------------------------------------

    def _add_old_weights(self) -> None:
        """Room for a rollback, of those groups that are in RAM."""
        for group in self.groups:
            kinds = ("weight", "gradient", *self.storage.states_of(group))
            in_ram = all(self.storage.range(group, kind).view() is not None for kind in kinds)
            if in_ram and not group.formats.packed and (group, OLD_WEIGHT) not in self.storage:
                with suppress(InsufficientMemory, KeyClash):  # its name is that of what was exchanged for it
                    self.storage.add(group, OLD_WEIGHT)

    def _looks_ahead(self, group: Group) -> bool:
        can = (group, OLD_WEIGHT) in self.storage and self.storage.range(group, OLD_WEIGHT).view() is not None
        return can and self.chance.random() < self.setting.behind

    def settle(self, group: Group) -> None:
        """The host makes the step that states lack: their weights have had it."""
        numbers = self.behind.pop(group, None)
        if numbers is None:
            return
        self.made["settled"] += 1
        self.ends[group].stored.wait()
        kinds = [OLD_WEIGHT, *self.storage.states_of(group)]
        opened = {kind: self.storage.open(group, kind) for kind in kinds}
        held = {"weight": opened[OLD_WEIGHT], **{kind: opened[kind] for kind in kinds[1:]}}
        gradient = self.storage.open(group, "gradient")
        job = LaneJob(group, dict.fromkeys(group.slots, numbers), {}, {}, gradient=gradient)
        update_piece(job, Piece(0, num_elements(group)), held)
        for kind, flat in opened.items():
            self.storage.store(group, kind, flat)
        del self.gradients[group]

    def drop_old_weights(self) -> None:
        """The memory for rollbacks is wanted for something else, for a while."""
        idle = [each for each in self.groups if (each, OLD_WEIGHT) in self.storage and each not in self.open]
        for group in idle:
            self.settle(group)
        self.lane.expect(())
        self.lane.drain()
        for load in self.loads:
            load.transfer.wait()
        for group in idle:
            view = self.storage.range(group, OLD_WEIGHT).view()
            if view is not None:
                view.fill_(GARBAGE)
            self.storage.drop(group, OLD_WEIGHT, "weight")
            self.made["dropped"] += 1

    # -- what a model does -------------------------------------------------------------------------------------------

    def load(self, group: Group) -> Load:
        """Start to load the weights as they are after everything that was submitted."""
        if group in self.last_load and self.storage.range(group, "weight").view() is None:
            self.last_load[group].wait()  # the engine has dropped what it loads again
        if group in self.ends:
            self.lane.order_loads(self.ends[group])
        source = self.storage.range(group, "weight")
        buffer = torch.full((source.num_bytes,), GARBAGE, dtype=torch.uint8)
        view = source.view()
        if view is None:
            transfer = self.stack.levels[source.level].read(source.extent, buffer)
        else:
            transfer = self.queues.copy(self.queues.loads, [(buffer.data_ptr(), view.data_ptr(), buffer.numel())])
        load = Load(group, buffer, transfer, self.truth[group]["weight"].clone())
        self.loads.append(load)
        self.last_load[group] = transfer
        return load

    def update(self, group: Group, *, final: bool, late: bool, ahead: bool = False) -> None:
        """An update after the group's backward, or ``late``: from the gradient on the host. ``ahead``: it makes the
        step that states lack, and of its own the weights alone.
        """
        if not ahead:
            self.settle(group)
        self.step += 1
        numbers = AdamWStep(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=self.step)
        values = self._values(group.num_bytes, "gradient")
        kinds = ("weight", *self.storage.states_of(group))
        sources = {kind: self.storage.range(group, kind) for kind in kinds}
        shadows = None if final or ahead else self.shadows.take(group, kinds)
        targets = shadows or dict(sources)
        lacked = self.behind.get(group)
        if ahead:
            old, stored = (self.storage.range(group, kind) for kind in (OLD_WEIGHT, "gradient"))
            targets = {**({} if lacked is None else sources), "weight": old, "gradient": stored}
            if lacked is not None:
                sources |= {OLD_WEIGHT: old, OLD_GRADIENT: stored}
            self.made["first" if lacked is None else "both"] += 1
        load = self.load(group) if self.chance.random() < 0.6 else None
        job = LaneJob(group, dict.fromkeys(group.slots, numbers), sources, targets, last_load=self.last_load.get(group))
        if lacked is not None:
            job.behind = dict.fromkeys(group.slots, lacked)
        if load is not None:
            job.weight = load.buffer
            self.loads.remove(load)
            if self.chance.random() < 0.5:
                load.transfer.wait()
        if late:
            job.gradient_kind = "gradient"
            sources["gradient"] = self.storage.range(group, "gradient")
            self._write_back(group, values)
        else:
            gradient = torch.full((group.num_bytes,), GARBAGE, dtype=torch.uint8)
            self.queues.run(self.queues.model, lambda: gradient.copy_(values))
            job.gradient = gradient
        try:
            end = self.lane.submit(job)
        except BaseException:
            self.shadows.give_back(shadows or {})
            raise
        if job.gradient is not None:
            self._spoil_after(end.weights if ahead else end.computed, job.gradient)  # it goes to storage, too
        if job.weight is not None:
            self._spoil_after(end.stored, job.weight)
        after = self._after(group, self.truth[group], values, numbers)
        self.ends[group] = end
        if ahead:
            self.gradients[group] = values
            self.open[group] = Open(group, {}, after, numbers)
        elif shadows is None:
            self.truth[group] = after
        else:
            self.open[group] = Open(group, shadows, after)

    def _write_back(self, group: Group, values: torch.Tensor) -> None:
        """A gradient is written back; it was computed with the weights of the last update."""
        stored = self.storage.range(group, "gradient").view()
        if stored is None:
            if group in self.ends:
                self.ends[group].computed.wait()
            opened = self.storage.open(group, "gradient", load=False)
            opened.copy_(values)
            self.storage.store(group, "gradient", opened)
            return
        if group in self.ends:
            self.ends[group].computed.wait_on(self.queues.gradients_out)
        self.queues.run(self.queues.gradients_out, lambda: stored.fill_(GARBAGE))
        self.queues.run(self.queues.gradients_out, lambda: stored.copy_(values))

    def _spoil_after(self, transfer: Transfer, memory: torch.Tensor) -> None:
        """As soon as ``transfer`` is over the memory is somebody else's."""
        end = transfer._end if isinstance(transfer, EventTransfer) else transfer  # type: ignore[attr-defined]

        def over() -> bool:
            return getattr(end, "passed", False) or getattr(end, "_over", False)

        def actor() -> Callable[[], None] | None:
            return spoil if over() else None

        def spoil() -> None:
            memory.fill_(GARBAGE)
            self.adversary.leave(actor)

        self.adversary.enter(actor)

    def confirm(self, group: Group) -> None:
        waiting = self.open.pop(group)
        if waiting.ahead is None:
            self.shadows.give_back(self.shadows.swap(group, waiting.shadows))
        else:
            self.storage.exchange(group, "weight", OLD_WEIGHT)
            self.behind[group] = waiting.ahead
        self.truth[group] = waiting.after

    def roll_back(self, group: Group) -> None:
        self.ends[group].stored.wait()
        waiting = self.open.pop(group)
        if waiting.ahead is None:
            self.shadows.give_back(waiting.shadows)
        else:  # the step that states lacked is made
            self.behind.pop(group, None)
            self.gradient_is_stored(group)
            del self.gradients[group]

    def gradient_is_stored(self, group: Group) -> None:
        """That of an update before its step is in storage when its weights are."""
        if group in self.gradients:
            self.ends[group].weights.wait()
            stored = self.storage.open(group, "gradient")
            assert same_parameters(group, "gradient", stored, self.gradients[group]), (group.name, self.step)

    def host_writes(self, group: Group) -> None:
        self.settle(group)
        kind = self.chance.choice(["weight", *self.storage.states_of(group)])
        if group in self.ends:
            self.ends[group].stored.wait()
        for load in self.loads:
            load.transfer.wait()
        self.truth[group][kind] = self._write(group, kind)

    def host_reads(self, group: Group) -> None:
        """What is stored is what the reference has."""
        self.gradient_is_stored(group)
        self.settle(group)
        if group in self.ends:
            self.ends[group].stored.wait()
        for kind, expected in self.truth[group].items():
            opened = self.storage.open(group, kind)
            assert same_parameters(group, kind, opened, expected), (group.name, kind, self.step)

    # -- programs ----------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """A training run with everything that may happen in it."""
        order = self.groups[::-1]
        for _ in range(steps):
            if self.chance.random() < 0.2:
                self.chance.shuffle(order)
            if self.chance.random() < 0.7:
                expected = list(order) if self.chance.random() < 0.8 else self.chance.sample(order, len(order))
                self.lane.expect(expected, {group: self.storage.range(group, "gradient") for group in self.behind})
                self.lane.pump()
            final, skipped = self.chance.random() < 0.5, self.chance.random() < 0.3
            for group in order:
                if self.setting.behind and self._looks_ahead(group):
                    self.update(group, final=False, late=False, ahead=True)
                elif self.chance.random() < 0.9:
                    self.update(group, final=final, late=skipped and self.chance.random() < 0.5)
                self.something()
            for group in list(self.open):
                self.confirm(group) if self.chance.random() < 0.7 else self.roll_back(group)
            self.adversary.wander()
            for group in self.groups:
                if self.chance.random() < (0.05 if group in self.behind else 0.3):
                    self.update(group, final=True, late=True)
                if self.chance.random() < 0.3:
                    self.load(group)
                self.something()
        self.finish()

    def something(self) -> None:
        """Now and then: a pump, a look at what is stored, a change of it, time."""
        if self.chance.random() < 0.3:
            self.lane.pump()
        closed = [group for group in self.groups if group not in self.open]
        if closed and self.chance.random() < 0.1:
            self.host_reads(self.chance.choice(closed))
        if closed and self.chance.random() < self.setting.host_writes:
            self.host_writes(self.chance.choice(closed))
        if self.setting.behind:
            if self.open and self.chance.random() < 0.1:
                self.gradient_is_stored(self.chance.choice(list(self.open)))
            chance = self.chance.random()
            if chance < 0.01:
                self.drop_old_weights()
            elif chance < 0.1:
                self._add_old_weights()
        self.adversary.wander()

    def finish(self) -> None:
        self.lane.drain()
        for load in self.loads:
            load.transfer.wait()
            same = same_parameters(load.group, "weight", load.buffer, load.expected)
            assert same, "weights that were loaded are not those of their time"
        for group in self.groups:
            self.host_reads(group)

    def close(self) -> None:
        self.storage.close()
        self.stack.close()
