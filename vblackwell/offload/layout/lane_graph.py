"""The tasks of a streamed training step and what each waits for, as the offload runtime has them (`vblackwell.offload.layout.lanes`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vblackwell.offload.layout.lane_work import LanePlan, LaneRates

PREFETCHED = 2  # inputs of checkpoints that come up before they are needed
UPDATES_PER_SECOND_PER_BYTE = 1 / 28  # an update on the GPU reads and writes 28 bytes a parameter of its memory
SUMMED_BYTES = 4.0  # a parameter, of gradients that have been added up
UPDATE_BYTES = 28.0  # a parameter that AdamW on the CPU reads and writes, with a gradient of 2


@dataclass(eq=False)
class Task:
    """Work of one lane ('' for none) that begins when ``waits_for`` others are over."""

    lane: str
    seconds: float = 0.0
    num_bytes: float = 0.0
    waits_for: int = 0
    ring: int = 0  # bytes of the ring that it takes
    frees: int = 0  # bytes of the ring that it gives back
    sets: int = 0  # sets of host memory that it takes (1) or gives back (-1)
    writes: bool = False  # to the disk
    index: int = 0  # of its group, where the CPU goes by that
    postponable: bool = False  # behind what the CPU could do for other groups
    step: int = 0
    then: list[Task] = field(default_factory=list)

    def after(self, *others: Task | None) -> Task:
        """Let it wait for ``others``; itself."""
        for other in others:
            if other is not None:
                other.then.append(self)
                self.waits_for += 1
        return self


class Graph:
    """Tasks of ``steps`` steps in the order of each lane.

    Attributes:
        gpu, loads, states, reads: tasks that go in this order. first: those that go when they can.
        done: what ends each step.
    """

    def __init__(self, plan: LanePlan, rates: LaneRates, steps: int) -> None:
        self.plan, self.rates = plan, rates
        self.gpu: deque[Task] = deque()
        self.loads: deque[Task] = deque()
        self.states: deque[Task] = deque()
        self.reads: deque[Task] = deque()
        self.done: list[Task] = []
        self.first: list[Task] = []
        count = len(plan.groups)
        self.fresh: list[Task | None] = [None] * count  # what the weights at home wait for
        self.loaded_fresh: list[Task | None] = [None] * count  # what those on level 0 wait for
        self.late: dict[int, Task] = {}
        self.written: list[Task | None] = [None] * count  # states of the last step, on the disk
        self.summed: list[Task | None] = [None] * count
        self.missing = loads_of(
            [group.weight_bytes for group in plan.groups], plan.weight_budget, steps, plan.micro_batches,
            stale=[group.at_home for group in plan.groups], there=[group.kept for group in plan.groups],
        )  # fmt: skip
        self.uses: list[Task] = []
        for step in range(steps):
            for number in range(plan.micro_batches):
                self._pass(step, number)

    def _pass(self, step: int, number: int) -> None:
        """One forward and its backward; behind the last of a step's the updates."""
        groups, is_last = self.plan.groups, number == self.plan.micro_batches - 1
        inputs: list[Task | None] = []
        last: Task | None = self.uses[-1] if self.uses else None
        for index, group in enumerate(groups):
            load = self._load(step, index)
            late = self._late_update(step, index, load)
            last = self._compute(step, group.forward).after(last, load, self.loaded_fresh[index], late)
            inputs.append(self._down(step, group.input_bytes).after(last) if group.input_bytes else None)
        first_gradient = last
        norm = self._free(Task("", step=step))
        computed: list[Task] = []
        for index in reversed(range(len(groups))):
            group = groups[index]
            load = self._load(step, index)
            back = None
            if group.input_bytes:
                ahead = computed[-PREFETCHED] if len(computed) >= PREFETCHED else None
                back = self._up(step, group.input_bytes).after(inputs[index], ahead)
            updates = is_last and not group.at_home
            update = group.parameters / (self.rates.gpu_bytes * UPDATES_PER_SECOND_PER_BYTE) if updates else 0.0
            last = self._compute(step, group.backward + update).after(last, load, back, self.loaded_fresh[index])
            computed.append(last)
            if group.parameters and is_last:
                self._update(step, index, last, first_gradient, norm)
            elif group.parameters:
                self._sum(step, index, last)
        assert last is not None
        norm.after(last)
        if is_last:
            self.done.append(last)

    def _sum(self, step: int, index: int, backward: Task) -> None:
        """A gradient goes home and is added to what is there."""
        group = self.plan.groups[index]
        gradient = self._down(step, group.parameters * self.plan.gradient).after(backward)
        self.summed[index] = self._added_up(step, index, gradient)

    def _added_up(self, step: int, index: int, gradient: Task) -> Task:
        """The CPU adds ``gradient`` to what is at home of earlier micro-batches, if there is anything."""
        earlier = self.summed[index]
        if earlier is None:
            return gradient
        seconds = self.plan.groups[index].parameters / (self.rates.cpu * self.rates.adds_per_update)
        return self._cpu(step, seconds, index).after(gradient, earlier)

    def _update(self, step: int, index: int, backward: Task, first_gradient: Task | None, norm: Task) -> None:
        plan, group = self.plan, self.plan.groups[index]
        self.loaded_fresh[index] = None
        earlier = self.summed[index]
        added = 0.0 if earlier is None else (plan.gradient if plan.micro_batches == 2 else SUMMED_BYTES)
        waits_for_norm = norm if plan.clips else None
        stays = group.kept and plan.gradients_home  # no way back from level 0: the update waits for its step
        if group.at_home or group.deferred or stays or plan.clips:
            gradient = self._added_up(step, index, self._down(step, group.parameters * plan.gradient).after(backward))
            self.summed[index] = None
            if group.at_home:
                read = self._read(step, index, gradient, None)
                wider = 0.0 if earlier is None else SUMMED_BYTES - plan.gradient
                seconds = group.parameters / self.rates.cpu * (1 + wider / UPDATE_BYTES)
                update = self._cpu(step, seconds, index, postponable=True)
                self.fresh[index] = update.after(gradient, read, waits_for_norm)
                self._write(step, index, update, sets=0)
            else:
                self.late[index] = self._free(Task("", step=step)).after(gradient, waits_for_norm)
            return
        if plan.gradients_home:  # a way back needs the sum at home as well
            self._added_up(step, index, self._down(step, group.parameters * plan.gradient).after(backward))
        self.summed[index] = None
        if group.kept:
            if earlier is not None:  # what earlier micro-batches left at home comes up for the update
                came = self._up(step, group.parameters * added, queue=self.states).after(first_gradient, earlier)
                self.loaded_fresh[index] = self._free(Task("", step=step)).after(came, backward)
            return
        before = (first_gradient, earlier)
        self.fresh[index], self.loaded_fresh[index] = self._pieces(step, index, added, before, (backward,))

    def _late_update(self, step: int, index: int, load: Task | None) -> Task | None:
        """Before the forward of a deferred group: states and gradient come up, the loaded weights are updated."""
        gradient = self.late.pop(index, None)
        if gradient is None:
            return None
        plan, group = self.plan, self.plan.groups[index]
        brought = plan.gradient if plan.micro_batches == 1 else SUMMED_BYTES
        if group.kept:
            return self._up(step, group.parameters * brought).after(gradient)
        home, here = self._pieces(step, index, brought, (gradient,), (load,))
        self.fresh[index] = home
        return here

    def _pieces(
        self, step: int, index: int, more_up: float, before: Sequence[Task | None], behind: Sequence[Task | None]
    ) -> tuple[Task, Task]:
        """States in pieces; (what ends when all are home, what ends when all are updated). An update itself is part of its backward."""
        plan, parameters = self.plan, self.plan.groups[index].parameters
        size = (plan.states_up + more_up) * parameters
        piece_bytes = min(plan.piece_bytes, plan.ring_bytes)
        count = max(1, round(size / piece_bytes))
        room = int(min(size / count, plan.ring_bytes))
        home, here = self._free(Task("", step=step)), self._free(Task("", step=step))
        read = self._read(step, index, None, 1)
        for _ in range(count):
            arrived = Task("up", num_bytes=size / count, ring=room, step=step).after(*before, read)
            self.states.append(arrived)
            left = self._down(step, plan.states_down * parameters / count).after(arrived, *behind)
            left.frees = room
            home.after(left)
            here.after(arrived, *behind)
        self._write(step, index, home, sets=-1)
        return home, here

    def _read(self, step: int, index: int, before: Task | None, sets: int | None) -> Task | None:
        """The group's states from the disk: ahead into a set of host memory, or (None) when the worker comes to it."""
        group = self.plan.groups[index]
        if not group.disk_read:
            return None
        task = Task("disk", group.disk_read / self.rates.disk_read, group.disk_read, sets=sets or 0, step=step)
        task.after(self.written[index], before)
        if sets:
            self.reads.append(task)
            return task
        return self._free(task)

    def _write(self, step: int, index: int, behind: Task, sets: int) -> None:
        group = self.plan.groups[index]
        if group.disk_read or group.disk_write:
            seconds = group.disk_write / self.rates.disk_write
            task = Task("disk", seconds, group.disk_write, sets=sets if group.disk_read else 0, writes=True, step=step)
            self.written[index] = self._free(task).after(behind)

    def _load(self, step: int, index: int) -> Task | None:
        """The load before the next use, if it is one; it displaces groups whose last uses must be over."""
        victims = self.missing[len(self.uses)]
        if victims is None:
            return None
        group = self.plan.groups[index]
        task = Task("up", num_bytes=group.weight_bytes, step=step)
        task.after(self.fresh[index], *(self.uses[use] for use in victims))
        if group.weights_on_disk:
            read = Task("disk", group.weight_bytes / self.rates.disk_read, group.weight_bytes, step=step)
            task.after(self._free(read).after(self.fresh[index], self.uses[-1] if self.uses else None))
        self.loaded_fresh[index] = None
        self.loads.append(task)
        return task

    def _compute(self, step: int, seconds: float) -> Task:
        task = Task("gpu", seconds, step=step)
        self.gpu.append(task)
        self.uses.append(task)
        return task

    def _up(self, step: int, num_bytes: float, queue: deque[Task] | None = None) -> Task:
        task = Task("up", num_bytes=num_bytes, step=step)
        (self.loads if queue is None else queue).append(task)
        return task

    def _down(self, step: int, num_bytes: float) -> Task:
        return self._free(Task("down", num_bytes=num_bytes, step=step))

    def _cpu(self, step: int, seconds: float, index: int, postponable: bool = False) -> Task:
        return self._free(Task("cpu", seconds, index=index, step=step, postponable=postponable))

    def _free(self, task: Task) -> Task:
        self.first.append(task)
        return task


def loads_of(
    sizes: list[int], budget: int, steps: int, micro_batches: int, stale: list[bool], there: list[bool]
) -> list[tuple[int, ...] | None]:
    """For every use in order (forward, then backward, each pass): None where the weights are there, else the uses that must be over.

    Belady's choice among those that are there. ``stale``: weights that change at home, so that a new step needs them again. ``there``:
    weights that live on level 0.
    """
    order = [*range(len(sizes)), *reversed(range(len(sizes)))] * steps * micro_batches
    following: dict[int, list[int]] = {index: [] for index in range(len(sizes))}
    for use in reversed(range(len(order))):
        following[order[use]].append(use)
    held: dict[int, int] = {}  # group to its last use
    found: list[tuple[int, ...] | None] = []
    gone: list[int] = []
    for use, index in enumerate(order):
        following[index].pop()
        if use % (2 * len(sizes) * micro_batches) == 0:
            gone += [held.pop(each) for each in list(held) if stale[each]]
        if there[index]:
            found.append(None)
            continue
        if index in held:
            found.append(None)
        else:
            victims = []
            while held and sum(sizes[each] for each in held) + sizes[index] > budget:
                farthest = max(held, key=lambda each: following[each][-1] if following[each] else len(order))
                victims.append(held.pop(farthest))
            # What went because it was stale made room for somebody: for the loads that follow, one each.
            if not victims and gone:
                victims.append(gone.pop(0))
            found.append(tuple(victims))
        held[index] = use
    return found
