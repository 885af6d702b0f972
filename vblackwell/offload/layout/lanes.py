"""Seconds of a streamed training step: a discrete-event simulation of the lanes that the offload runtime keeps busy:
*up* and *down*, the two directions of the GPU's link, *gpu*, *cpu*, which updates groups on the host, and *disk*.

- A group's weights come up before its forward and its backward unless they are there; loaded weights have a budget, the
  group whose next use is farthest is dropped, and a load waits for the last use of what it displaces.
- Inputs of checkpointed groups that wait in host memory go down after forward and come up before backward.
- States of a group updated on the GPU pass in pieces through a ring: up, update after the group's backward, down again,
  giving way to loads after every piece. Deferred updates wait for the next forward with their gradients in host memory;
  while steps clip, all do, as none may begin before the norm is known. Gradients of the first groups stay on level 0
  then, and their states come up during the backward.
- A group updated on the host sends its gradient down; its next load waits for the CPU, which takes the first groups of
  the forward first.
- States on a disk are read ahead into a few sets of host memory and written after their updates, writes first. For a
  group updated on the host the worker reads and writes, and updates nothing else meanwhile.
- Before a step's last micro-batch the CPU adds gradients up, sums before updates. The last one's is added on the GPU
  where an update follows it there and no rollback is kept.

A transfer that starts while the other direction works has the rate for both; while the CPU updates, links are slower.
"""

import functools
import gc
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vblackwell.machine.rates import Rates
from vblackwell.units import MiB

LANES: tuple[str, ...] = ("gpu", "up", "down", "cpu", "disk")
STEPS = 4  # of a simulation, of which the last two count
PREFETCHED = 2  # inputs of checkpoints that come up before they are needed
GPU_UPDATE_BYTES = 28.0  # a parameter that an update on the GPU reads and writes of its memory
CPU_UPDATE_BYTES = 26.0  # a parameter that AdamW on the CPU reads and writes, in place or not, with a gradient of 2
SUMMED_BYTES = 4.0  # a parameter, of gradients that have been added up
CPU_SLOWS_LINK = 0.9  # copies during the CPU's update: 43 to 46 of 49.6 GB/s
HIDDEN = 1.02  # a disk that costs less than that of a step is hidden
MAX_DOUBLINGS = 24
AFTER_WRITES = 1  # of a read's order


@dataclass(frozen=True)
class GroupWork:
    """What a layer group asks of the lanes."""

    parameters: int  # elements that are trained
    weight_bytes: int
    forward: float  # seconds of compute
    backward: float  # with what it computes again
    input_bytes: int = 0  # of its checkpoint's input, if that waits in host memory
    on_host: bool = False  # the CPU updates it
    deferred: bool = False  # its update waits for the step, and on the GPU for the next forward
    behind: bool = False  # its states lack a step: what was a gradient and a weight then comes up with them
    resident: bool = False  # it lives on level 0 with its states, so that nothing of it but gradients moves
    disk_read: int = 0  # bytes, before its update
    disk_write: int = 0  # bytes, after it
    weights_on_disk: bool = False  # a load has to read them there first


@dataclass(frozen=True)
class LanePlan:
    """Groups in the order of the forward and what they may take of level 0."""

    groups: tuple[GroupWork, ...]
    weight_budget: int  # bytes of loaded weights
    ring_bytes: int  # of states on their way, in pieces of about `piece_bytes`
    states_up: float = 10  # bytes a parameter that pass for an update on the GPU: in bf16 remainder and moments
    states_down: float = 12  # and with them the new weight
    gradient: float = 2  # bytes a parameter
    piece_bytes: int = 144 * MiB
    micro_batches: int = 1  # forwards and backwards of a step, each with the seconds of its groups
    clips: bool = False  # no update may begin before the norm of all gradients is known
    stores_gradients: bool = False  # of groups updated after their backward, too: for a rollback
    max_staying: int = 0  # gradients that stay on level 0 where the step clips
    disk_sets: int = 3  # groups whose states may be between disk and GPU at a time

    @property
    def uses_disk(self) -> bool:
        return any(group.disk_read or group.disk_write or group.weights_on_disk for group in self.groups)


Span = tuple[str, float, float, float]  # a lane, from and to in seconds, and bytes


@dataclass(frozen=True)
class LaneTimes:
    """One step in the long run: seconds, bytes of both directions and the disk, and each lane's share of the time."""

    step_seconds: float
    up_bytes: float
    down_bytes: float
    busy: dict[str, float]
    disk_bytes: float = 0.0


def _run(plan: LanePlan, rates: Rates) -> tuple[list[float], list[Span]]:
    """When each of `STEPS` steps ends, and what each lane did; ValueError for an empty one."""
    if not plan.groups or plan.micro_batches < 1:
        raise ValueError(f"a step of {plan.micro_batches} micro-batches and {len(plan.groups)} groups is empty")
    collects = gc.isenabled()
    gc.disable()  # thousands of tasks, and no circle: a collection would go through all that the process has
    try:
        return Clock(Graph(plan, rates, STEPS)).run()
    finally:
        if collects:
            gc.enable()


def spans(plan: LanePlan, rates: Rates) -> dict[str, list[tuple[float, float]]]:
    """When each lane works, (from, to) in seconds, between the ends of two steps in the long run; raises as `simulate`.
    A step ends with its backward: updates that are due are the next one's first work.
    """
    (*_, begin, end), busy = _run(plan, rates)
    found: dict[str, list[tuple[float, float]]] = {lane: [] for lane in LANES}
    for lane, start, stop, _ in busy:
        if start < end and stop > begin:
            found[lane].append((max(start, begin) - begin, min(stop, end) - begin))
    return found


@functools.lru_cache(maxsize=64)  # choices of a forecast may differ in nothing that a lane does
def simulate(plan: LanePlan, rates: Rates) -> LaneTimes:
    """Run `STEPS` steps and count all but the first two; ValueError for an empty one."""
    ends, busy = _run(plan, rates)
    begin, end, counted = ends[1], ends[-1], STEPS - 2
    shares, moved = dict.fromkeys(LANES, 0.0), dict.fromkeys(LANES, 0.0)
    for lane, start, stop, num_bytes in busy:
        if start < end and stop > begin and (inside := min(stop, end) - max(start, begin)) > 0:
            shares[lane] += inside / (end - begin)
            moved[lane] += num_bytes * inside / (stop - start) / counted
    return LaneTimes((end - begin) / counted, moved["up"], moved["down"], shares, moved["disk"])


def least_seconds(plan: LanePlan, rates: Rates) -> float:
    """What a step takes at least, without a disk: as long as its busiest lane has work, if nothing waits for another.
    Simulated ones take a seventh longer in the mean, and twice as long at most; less where they put off what nothing
    waits for.
    """
    several, summed = plan.micro_batches > 1, plan.gradient if plan.micro_batches == 2 else SUMMED_BYTES
    seconds = up = down = cpu = 0.0
    weights = sum(group.weight_bytes for group in plan.groups if not group.resident)
    for group in plan.groups:
        seconds += group.forward + group.backward
        sent = plan.micro_batches - 1
        if group.on_host or group.deferred or plan.stores_gradients:
            sent += 1
        down += sent * group.parameters * plan.gradient
        cpu += max(0, sent - 1) * group.parameters / rates.adds_per_update
        if group.on_host:
            cpu += group.parameters * (1 + several * (SUMMED_BYTES - plan.gradient) / CPU_UPDATE_BYTES)
        elif not group.resident:
            more = several * summed + 2 * plan.gradient * (group.behind and not plan.clips)
            up += (plan.states_up + more) * group.parameters
            down += plan.states_down * group.parameters
    up += 2 * plan.micro_batches * max(0, weights - plan.weight_budget)
    cpu /= rates.cpu_adamw
    up, down = up / max(rates.up, rates.up_both), down / max(rates.down, rates.down_both)
    slowed = 1 - CPU_SLOWS_LINK
    return max(plan.micro_batches * seconds, cpu, *(link + slowed * min(cpu, link) for link in (up, down)))


def disk_hidden_from(plan: LanePlan, rates: Rates, tokens: int) -> int | None:
    """The fewest tokens a step from which the disk costs next to nothing, to about 5 %; 0 without one, None if never.
    ``plan`` is of ``tokens`` a step; its seconds of compute grow with them, its bytes of states do not.
    """
    if not plan.uses_disk:
        return 0
    free = replace(rates, disk_read=math.inf, disk_write=math.inf)

    def hidden(factor: float) -> bool:
        groups = []
        for group in plan.groups:
            forward, backward = group.forward * factor, group.backward * factor
            inputs = int(group.input_bytes * factor)
            groups.append(replace(group, forward=forward, backward=backward, input_bytes=inputs))
        larger = replace(plan, groups=tuple(groups))
        return simulate(larger, rates).step_seconds <= HIDDEN * simulate(larger, free).step_seconds

    low, high = 0.0, 1.0
    while not hidden(high):
        low, high = high, 2 * high
        if high == 2**MAX_DOUBLINGS:
            return None
    while high - low > 0.05 * high and high * tokens > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return max(1, math.ceil(high * tokens))


# -- tasks and what they wait for --------------------------------------------------------------------------------------


class Task:
    """Work of one lane ('' for none) in one step that begins when ``waits_for`` others are over.

    Attributes:
        held: seconds of it in which the lane waits for another.
        postponable: after what the CPU could do for other groups.
        ring: bytes of the ring that it takes, or gives back (below 0).
        sets: sets of host memory that it takes (1) or gives back (-1).
        order: of the free tasks of a lane that could go, the one with the least goes.
        queued: it waits for those before it; else it is free, and goes when it can.
    """

    __slots__ = (
        "held", "lane", "num_bytes", "order", "postponable", "queued", "ring", "seconds", "sets", "step", "then",
        "waits_for",
    )  # fmt: skip

    def __init__(self, lane: str, step: int, seconds: float, num_bytes: float, order: int, queued: bool) -> None:
        self.lane, self.step, self.seconds, self.num_bytes = lane, step, seconds, num_bytes
        self.order, self.queued = order, queued
        self.held, self.postponable = 0.0, False
        self.waits_for = self.ring = self.sets = 0
        self.then: list[Task] = []

    def after(self, *others: "Task | None") -> "Task":
        """Let it wait for ``others``; itself."""
        for other in others:
            if other is not None:
                other.then.append(self)
                self.waits_for += 1
        return self


class Graph:
    """Tasks of ``steps`` steps, which ``done`` end, and of the forward after them, which begins before: ``ordered`` by
    lane in queues, ``free`` when they can.
    """

    def __init__(self, plan: LanePlan, rates: Rates, steps: int) -> None:
        self.plan, self.rates = plan, rates
        self._gpu, self._loads, self._states, self._reads = (deque[Task]() for _ in range(4))
        self.ordered = {"gpu": [self._gpu], "up": [self._loads, self._states], "disk": [self._reads]}
        self.free: list[Task] = []
        self.done: list[Task] = []
        none: list[Task | None] = [None] * len(plan.groups)
        self._stored = none.copy()  # what new weights in storage wait for
        self._updated = none.copy()  # what new weights on level 0 wait for
        self._late = none.copy()  # what starts a deferred update
        self._ahead = none.copy()  # what lets its states come up before, where its gradient stays
        able = [index for index, group in enumerate(plan.groups) if group.parameters and not group.on_host]
        self._staying = set(able[: plan.max_staying] if plan.clips and plan.micro_batches == 1 else ())
        self._written = none.copy()  # states of the last step, on the disk
        self._summed = none.copy()
        self._missing = loads_of(plan, steps + 1)
        self._uses: list[Task] = []
        self.num_steps = steps
        whole = steps + plan.uses_disk  # states are read ahead
        for self._step in range(whole):
            for number in range(plan.micro_batches):
                self._backward(*self._forward(), is_last=number == plan.micro_batches - 1)
        self._step = whole
        if not plan.uses_disk:
            self._forward()

    def _forward(self) -> tuple[Task | None, list[Task | None]]:
        """Its last compute, and what stores the groups' inputs."""
        groups = self.plan.groups
        inputs: list[Task | None] = []
        last: Task | None = self._uses[-1] if self._uses else None
        for index, group in enumerate(groups):
            load = self._load(index)
            late = self._late_update(index, load)
            last = self._compute(group.forward).after(last, load, self._updated[index], late)
            inputs.append(self._task("down", 0.0, group.input_bytes).after(last) if group.input_bytes else None)
        return last, inputs

    def _backward(self, last: Task | None, inputs: Sequence[Task | None], *, is_last: bool) -> None:
        """After the last of a step's micro-batches the updates follow."""
        groups, first_gradient, norm = self.plan.groups, last, self._task("")
        computed: list[Task] = []
        for index in reversed(range(len(groups))):
            group, load, back = groups[index], self._load(index), None
            if group.input_bytes:
                ahead = computed[-PREFETCHED] if len(computed) >= PREFETCHED else None
                back = self._queued("up", self._loads, group.input_bytes).after(inputs[index], ahead)
            updates = is_last and not group.on_host
            update = group.parameters * GPU_UPDATE_BYTES / self.rates.memory if updates else 0.0
            last = self._compute(group.backward + update).after(last, load, back, self._updated[index])
            computed.append(last)
            if group.parameters and is_last:
                self._update(index, last, first_gradient, norm)
            elif group.parameters:
                self._summed[index] = self._added_up(index, last)
        assert last is not None
        norm.after(last)
        if is_last:
            self.done.append(last)

    def _added_up(self, index: int, backward: Task) -> Task:
        """A gradient is stored, and the CPU adds it to that of earlier micro-batches, if there is one."""
        group, earlier = self.plan.groups[index], self._summed[index]
        gradient = self._task("down", 0.0, group.parameters * self.plan.gradient).after(backward)
        if earlier is None:
            return gradient
        seconds = group.parameters / (self.rates.cpu_adamw * self.rates.adds_per_update)
        return self._task("cpu", seconds, 0.0, self._order(index)).after(gradient, earlier)

    def _update(self, index: int, backward: Task, first_gradient: Task | None, norm: Task) -> None:
        plan, group, earlier = self.plan, self.plan.groups[index], self._summed[index]
        self._updated[index] = None
        added = 0.0 if earlier is None else (plan.gradient if plan.micro_batches == 2 else SUMMED_BYTES)
        waits_for_norm = norm if plan.clips or group.deferred else None
        stays = group.resident and plan.stores_gradients  # no rollback on level 0: the update waits for its step
        waits = group.on_host or group.deferred or stays or plan.clips
        # A rollback needs the sum in storage as well.
        gradient = self._added_up(index, backward) if waits or plan.stores_gradients else None
        self._summed[index] = None
        if waits and group.on_host:
            read = self._read(index, gradient, sets=0)
            wider = 0.0 if earlier is None else SUMMED_BYTES - plan.gradient
            seconds = group.parameters / self.rates.cpu_adamw * (1 + wider / CPU_UPDATE_BYTES)
            held = group.disk_read / self.rates.disk_read + group.disk_write / self.rates.disk_write
            update = self._task("cpu", seconds + held, 0.0, self._order(index, postponable=True))
            update.held, update.postponable = held, True
            self._stored[index] = update.after(gradient, read, waits_for_norm)
            self._write(index, update, sets=0)
        elif waits:
            self._late[index] = self._task("").after(backward if index in self._staying else gradient, waits_for_norm)
            self._ahead[index] = first_gradient
        elif not group.resident:
            self._stored[index], self._updated[index] = self._pieces(index, added, (first_gradient, earlier), backward)
        elif earlier is not None:  # what earlier micro-batches left in storage comes up for the update
            came = self._queued("up", self._states, group.parameters * added).after(first_gradient, earlier)
            self._updated[index] = self._task("").after(came, backward)

    def _late_update(self, index: int, load: Task | None) -> Task | None:
        """Before the forward of a deferred group: states and gradient come up, the loaded weights are updated."""
        gradient, self._late[index] = self._late[index], None
        if gradient is None:
            return None
        plan, group = self.plan, self.plan.groups[index]
        if index in self._staying:
            if group.resident:
                return gradient
            at_step = self._task("").after(gradient, load)
            self._stored[index], updated = self._pieces(index, 0.0, (self._ahead[index],), at_step)
            return updated
        brought = plan.gradient if plan.micro_batches == 1 else SUMMED_BYTES
        if group.resident:
            return self._queued("up", self._loads, group.parameters * brought).after(gradient)
        self._stored[index], updated = self._pieces(index, brought, (gradient,), load)
        return updated

    def _pieces(
        self, index: int, more_up: float, before: Sequence[Task | None], after: Task | None
    ) -> tuple[Task, Task]:
        """States in pieces; tasks that end when all are (stored, updated). An update is part of its backward."""
        plan, parameters = self.plan, self.plan.groups[index].parameters
        if self.plan.groups[index].behind and not plan.clips:
            more_up += 2 * plan.gradient
        size = (plan.states_up + more_up) * parameters
        count = max(1, round(size / min(plan.piece_bytes, plan.ring_bytes)))
        taken = int(min(size / count, plan.ring_bytes))
        stored, updated, read = self._task(""), self._task(""), self._read(index, None, sets=1)
        arrived = left = may_come = self._task("").after(*before, read)
        for _ in range(count):
            arrived = self._queued("up", self._states, size / count).after(may_come)
            left = self._task("down", 0.0, plan.states_down * parameters / count).after(arrived, after)
            arrived.ring, left.ring = taken, -taken
        stored.after(left)  # pieces come and leave one after the other
        updated.after(arrived, after)
        self._write(index, stored, sets=-1)
        return stored, updated

    def _read(self, index: int, before: Task | None, sets: int) -> Task | None:
        """The group's states from the disk: ahead into a set of host memory, or (0) when the worker comes to it."""
        num_bytes = self.plan.groups[index].disk_read
        if not num_bytes:
            return None
        seconds = num_bytes / self.rates.disk_read
        if sets:
            task = self._queued("disk", self._reads, num_bytes, seconds)
            task.sets = sets
        else:
            task = self._task("disk", seconds, num_bytes, AFTER_WRITES)
        return task.after(self._written[index], before)

    def _write(self, index: int, update: Task, sets: int) -> None:
        group = self.plan.groups[index]
        if group.disk_read or group.disk_write:
            seconds, freed = group.disk_write / self.rates.disk_write, sets if group.disk_read else 0
            task = self._task("disk", seconds, group.disk_write)
            task.sets = freed
            self._written[index] = task.after(update)

    def _load(self, index: int) -> Task | None:
        """The load before the next use, if it is one; it displaces groups whose last uses must be over."""
        victims = self._missing[len(self._uses)]
        if victims is None:
            return None
        group, stored = self.plan.groups[index], self._stored[index]
        task = self._queued("up", self._loads, group.weight_bytes)
        task.after(stored, self._uses[max(victims)] if victims else None)  # uses end one after the other
        if group.weights_on_disk:
            read = self._task("disk", group.weight_bytes / self.rates.disk_read, group.weight_bytes, AFTER_WRITES)
            task.after(read.after(stored, self._uses[-1] if self._uses else None))
        self._updated[index] = None
        return task

    def _compute(self, seconds: float) -> Task:
        task = self._queued("gpu", self._gpu, 0.0, seconds)
        self._uses.append(task)
        return task

    def _order(self, index: int, *, postponable: bool = False) -> int:
        """Of the CPU's work: what could be postponed last, earlier steps first, and then the forward's first groups."""
        return (postponable * (self.num_steps + 1) + self._step) * len(self.plan.groups) + index

    def _task(self, lane: str, seconds: float = 0.0, num_bytes: float = 0.0, order: int = 0) -> Task:
        """A new task of this step that goes when it can."""
        task = Task(lane, self._step, seconds, num_bytes, order, False)
        self.free.append(task)
        return task

    def _queued(self, lane: str, queue: deque[Task], num_bytes: float, seconds: float = 0.0) -> Task:
        """A new task of this step, the next of ``queue``."""
        task = Task(lane, self._step, seconds, num_bytes, 0, True)
        queue.append(task)
        return task


def loads_of(plan: LanePlan, steps: int) -> list[list[int] | None]:
    """For every use in order of time: None where the weights are there, else the uses that the load must wait for, by
    Belady's choice. Weights that change on the host are needed again in a new step.
    """
    groups, budget = plan.groups, plan.weight_budget
    order = [*range(len(groups)), *reversed(range(len(groups)))] * steps * plan.micro_batches
    a_pass, next_use = 2 * len(groups), [0] * len(groups)
    held: dict[int, int] = {}  # group to its last use
    held_bytes = 0
    found: list[list[int] | None] = []
    gone: list[int] = []
    for use, index in enumerate(order):
        soonest = a_pass - 1 - index if use % a_pass < len(groups) else a_pass + index
        next_use[index] = min(use // a_pass * a_pass + soonest, len(order))
        victims: list[int] | None = None
        if use % (a_pass * plan.micro_batches) == 0:
            stale = [each for each in held if groups[each].on_host]
            held_bytes -= sum(groups[each].weight_bytes for each in stale)
            gone += [held.pop(each) for each in stale]
        if not groups[index].resident:
            if index not in held:
                victims = []
                held_bytes += groups[index].weight_bytes
                while held and held_bytes > budget:
                    farthest = max(held, key=next_use.__getitem__)
                    victims.append(held.pop(farthest))
                    held_bytes -= groups[farthest].weight_bytes
                # What went because it was stale left its bytes for others: for the loads that follow, one each.
                if not victims and gone:
                    victims.append(gone.pop(0))
            held[index] = use
        found.append(victims)
    return found


# -- running them ------------------------------------------------------------------------------------------------------


class Lane:
    """What one lane does, and what it may do next: tasks that are ``ready``, by their order, or else the first of the
    ``queues`` whose turn has come. A direction of the link has the ``other``, and its rates without that and with it.
    """

    __slots__ = ("name", "other", "queues", "rates", "ready", "task")

    def __init__(self, name: str, queues: Sequence[deque[Task]]) -> None:
        self.name, self.queues = name, queues
        self.other: Lane | None = None
        self.rates = 0.0, 0.0
        self.ready: list[tuple[int, int, Task]] = []
        self.task: Task | None = None


class Clock:
    """Runs a graph: every lane takes what is ready, in its order."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._now = graph, 0.0
        self._ring, self._sets = graph.plan.ring_bytes, graph.plan.disk_sets
        self._lanes = {lane: Lane(lane, graph.ordered.get(lane, ())) for lane in LANES}
        up, down, rates = self._lanes["up"], self._lanes["down"], graph.rates
        up.other, up.rates = down, (rates.up, rates.up_both)
        down.other, down.rates = up, (rates.down, rates.down_both)
        self.ends: dict[Task, float] = {}
        self._count = 0

    def run(self) -> tuple[list[float], list[Span]]:
        """Until the last step has ended: when each has, and what the lanes did."""
        graph, busy, push, pop = self._graph, list[Span](), heapq.heappush, heapq.heappop
        last, task, lanes, cpu = graph.done[graph.num_steps - 1], None, list(self._lanes.values()), self._lanes["cpu"]
        for first in [each for each in graph.free if not each.waits_for]:
            self._go(first)
        events: list[tuple[float, int, Task, Lane]] = []
        while task is not last:
            for lane in lanes:
                if lane.task is not None:
                    continue
                if lane.ready:
                    task = pop(lane.ready)[2]
                else:
                    for queue in lane.queues:
                        if not queue or (task := queue[0]).waits_for:
                            continue
                        if task.ring <= self._ring and task.sets <= self._sets:
                            queue.popleft()
                            break
                    else:
                        continue
                if lane.other is None:
                    seconds = task.seconds
                else:
                    rate = lane.rates[lane.other.task is not None]
                    if cpu.task is not None and not cpu.task.held:  # held: it waits for a disk
                        rate *= CPU_SLOWS_LINK
                    seconds = task.num_bytes / rate
                end = self._now + seconds
                if task.ring > 0:
                    self._ring -= task.ring
                if task.sets > 0:
                    self._sets -= task.sets
                lane.task = task
                busy.append((lane.name, self._now, end - task.held, task.num_bytes))
                push(events, (end, len(busy), task, lane))
            assert events, "tasks wait for each other"
            self._now, _, task, lane = pop(events)
            lane.task = None
            self._finish(task)
        return [self.ends[task] for task in graph.done[: graph.num_steps]], busy

    def _finish(self, task: Task) -> None:
        self.ends[task] = self._now
        if task.ring < 0:
            self._ring -= task.ring
        if task.sets < 0:
            self._sets -= task.sets
        for other in task.then:
            other.waits_for -= 1
            if not other.waits_for and not other.queued:
                self._go(other)

    def _go(self, task: Task) -> None:
        """A free one that waits for nothing any more."""
        if task.lane:
            self._count += 1
            heapq.heappush(self._lanes[task.lane].ready, (task.order, self._count, task))
        else:
            self._finish(task)
