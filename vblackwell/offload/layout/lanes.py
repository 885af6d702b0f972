"""Seconds of a streamed training step: a discrete-event simulation of the lanes that the offload runtime keeps busy.

Lanes are *up* and *down*, the two directions of the GPU's link, *gpu*, *cpu*, which updates groups on the host, and
*disk*. Each does one thing at a time. What the runtime does is here as tasks with what they wait for:

- A group's weights come up before its forward and its backward, unless they are there still: loaded weights have a
  budget, and the group whose next use is farthest is dropped; a load waits for the last use of what it displaces.
- Inputs of checkpointed groups go down after forward and come up before backward, where they wait in host memory.
- A group updated on the GPU needs its states, which pass in pieces through a ring: up, update after the group's
  backward, down again, in the order of backward, giving way to loads after every piece. Deferred updates wait for the
  next forward, with their gradients in host memory. While steps clip, all do: none may begin before the norm is known.
- A group updated on the host sends its gradient down; the CPU updates it; its next load waits for that. The CPU takes
  the first of the forward.
- States on a disk are read ahead into a few sets of host memory, in the order of the updates, and written after them; a
  set is free again when its write is over. The disk does one thing at a time, writes first.
- Before the last micro-batch of a step the CPU adds gradients up in host memory, sums before updates. The last one's is
  added on the GPU where an update follows it there and no rollback is kept; elsewhere by the CPU too.

A transfer that starts while the other direction works has the rate for both directions; while the CPU updates, links
are slower. The last steps of a few are counted, when the lanes repeat themselves.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vblackwell.machine.rates import Rates
from vblackwell.units import MiB

LANES: tuple[str, ...] = ("gpu", "up", "down", "cpu", "disk")
PREFETCHED = 2  # inputs of checkpoints that come up before they are needed
GPU_UPDATE_BYTES = 28.0  # a parameter that an update on the GPU reads and writes of its memory
CPU_UPDATE_BYTES = 28.0  # a parameter that AdamW on the CPU reads and writes, with a gradient of 2
SUMMED_BYTES = 4.0  # a parameter, of gradients that have been added up
CPU_SLOWS_LINK = 0.9  # copies during the CPU's update: 43 to 46 of 49.6 GB/s
HIDDEN = 1.02  # a disk that costs less than that of a step is hidden
MAX_DOUBLINGS = 24


@dataclass(frozen=True)
class GroupWork:
    """What a layer group asks of the lanes.

    Attributes:
        parameters: elements that are trained.
        forward, backward: seconds of compute; backward with what it computes again.
        input_bytes: of its checkpoint's input, if that waits in host memory.
        on_host: the CPU updates it. deferred: its update on the GPU waits for the next forward.
        resident: it lives on level 0 with its states, so that nothing of it but gradients moves.
        disk_read, disk_write: bytes on the disk, read before and written after its update.
        weights_on_disk: a load has to read them there first.
    """

    parameters: int
    weight_bytes: int
    forward: float
    backward: float
    input_bytes: int = 0
    on_host: bool = False
    deferred: bool = False
    resident: bool = False
    disk_read: int = 0
    disk_write: int = 0
    weights_on_disk: bool = False


@dataclass(frozen=True)
class LanePlan:
    """Groups in the order of the forward and what they may take of level 0.

    Attributes:
        weight_budget: bytes of loaded weights. ring_bytes: of states on their way, in pieces of about ``piece_bytes``.
        states_up, states_down: bytes a parameter that pass for an update on the GPU (bf16: remainder and moments up,
            and with them the new weight down). gradient: of its gradient.
        micro_batches: forwards and backwards of a step, each with the seconds of its groups.
        clips: no update may begin before the norm of all gradients is known.
        stores_gradients: gradients of groups that are updated after their backward are stored as well, for a rollback.
        disk_sets: groups whose states may be between disk and GPU at a time.
    """

    groups: tuple[GroupWork, ...]
    weight_budget: int
    ring_bytes: int
    states_up: float = 10
    states_down: float = 12
    gradient: float = 2
    piece_bytes: int = 144 * MiB
    micro_batches: int = 1
    clips: bool = False
    stores_gradients: bool = False
    disk_sets: int = 3

    @property
    def uses_disk(self) -> bool:
        return any(group.disk_read or group.disk_write or group.weights_on_disk for group in self.groups)


@dataclass(frozen=True)
class LaneTimes:
    """One step in the long run: seconds, bytes of both directions and the disk, and each lane's share of the time."""

    step_seconds: float
    up_bytes: float
    down_bytes: float
    busy: dict[str, float]
    disk_bytes: float = 0.0

    @property
    def bottleneck(self) -> str:
        """The lane that worked most."""
        return max(self.busy, key=lambda lane: self.busy[lane])


def simulate(plan: LanePlan, rates: Rates, steps: int = 5) -> LaneTimes:
    """Run ``steps`` steps and count all but the first two and the last.

    Raises:
        ValueError: fewer than four steps, no groups, or no micro-batch.
    """
    if steps < 4 or not plan.groups or plan.micro_batches < 1:
        raise ValueError(
            f"{steps} steps of {plan.micro_batches} micro-batches and {len(plan.groups)} groups: at least 4 steps, a "
            "micro-batch and a group are needed"
        )
    graph = Graph(plan, rates, steps)
    clock = Clock(graph, rates, plan)
    clock.run()
    begin, end = clock.ends[graph.done[1]], clock.ends[graph.done[-2]]
    shares, moved = dict.fromkeys(LANES, 0.0), dict.fromkeys(LANES, 0.0)
    for lane, start, stop, num_bytes in clock.busy:
        inside = max(0.0, min(stop, end) - max(start, begin))
        if inside:
            shares[lane] += inside / (end - begin)
            moved[lane] += num_bytes * inside / (stop - start) / (steps - 3)
    return LaneTimes((end - begin) / (steps - 3), moved["up"], moved["down"], shares, moved["disk"])


def disk_hidden_from(plan: LanePlan, rates: Rates, tokens: int) -> int | None:
    """The fewest tokens a step from which the disk costs next to nothing, to about 5 %; 0 without one, None if never.

    ``plan`` is of ``tokens`` a step; its seconds of compute grow with them, its bytes of states do not.
    """
    if not plan.uses_disk:
        return 0
    free = replace(rates, disk_read=math.inf, disk_write=math.inf)

    def scaled(group: GroupWork, factor: float) -> GroupWork:
        forward, backward = group.forward * factor, group.backward * factor
        return replace(group, forward=forward, backward=backward, input_bytes=int(group.input_bytes * factor))

    def hidden(factor: float) -> bool:
        larger = replace(plan, groups=tuple(scaled(group, factor) for group in plan.groups))
        return simulate(larger, rates).step_seconds <= HIDDEN * simulate(larger, free).step_seconds

    low, high = 0.0, 1.0
    for _ in range(MAX_DOUBLINGS):
        if hidden(high):
            break
        low, high = high, 2 * high
    else:
        return None
    while high - low > 0.05 * high and high * tokens > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return max(1, math.ceil(high * tokens))


# -- tasks and what they wait for --------------------------------------------------------------------------------------


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
    postponable: bool = False  # after what the CPU could do for other groups
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

    def __init__(self, plan: LanePlan, rates: Rates, steps: int) -> None:
        self.plan, self.rates = plan, rates
        self.gpu, self.loads = deque[Task](), deque[Task]()
        self.states, self.reads = deque[Task](), deque[Task]()
        self.done: list[Task] = []
        self.first: list[Task] = []
        count = len(plan.groups)
        self.stored: list[Task | None] = [None] * count  # what new weights in storage wait for
        self.updated: list[Task | None] = [None] * count  # what new weights on level 0 wait for
        self.late: dict[int, Task] = {}
        self.written: list[Task | None] = [None] * count  # states of the last step, on the disk
        self.summed: list[Task | None] = [None] * count
        self.missing = loads_of(plan, steps)
        self.uses: list[Task] = []
        for step in range(steps):
            for number in range(plan.micro_batches):
                self._pass(step, number)

    def _pass(self, step: int, number: int) -> None:
        """One forward and its backward; after the last of a step's the updates."""
        groups, is_last = self.plan.groups, number == self.plan.micro_batches - 1
        inputs: list[Task | None] = []
        last: Task | None = self.uses[-1] if self.uses else None
        for index, group in enumerate(groups):
            load = self._load(step, index)
            late = self._late_update(step, index, load)
            last = self._compute(step, group.forward).after(last, load, self.updated[index], late)
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
                back = self._up(step, group.input_bytes, self.loads).after(inputs[index], ahead)
            updates = is_last and not group.on_host
            update = group.parameters * GPU_UPDATE_BYTES / self.rates.memory if updates else 0.0
            last = self._compute(step, group.backward + update).after(last, load, back, self.updated[index])
            computed.append(last)
            if group.parameters and is_last:
                self._update(step, index, last, first_gradient, norm)
            elif group.parameters:
                self.summed[index] = self._added_up(step, index, last)
        assert last is not None
        norm.after(last)
        if is_last:
            self.done.append(last)

    def _added_up(self, step: int, index: int, backward: Task) -> Task:
        """A gradient is stored, and the CPU adds it to that of earlier micro-batches, if there is one."""
        group, earlier = self.plan.groups[index], self.summed[index]
        gradient = self._down(step, group.parameters * self.plan.gradient).after(backward)
        if earlier is None:
            return gradient
        seconds = group.parameters / (self.rates.cpu_adamw * self.rates.adds_per_update)
        return self._cpu(step, seconds, index).after(gradient, earlier)

    def _update(self, step: int, index: int, backward: Task, first_gradient: Task | None, norm: Task) -> None:
        plan, group = self.plan, self.plan.groups[index]
        self.updated[index] = None
        earlier = self.summed[index]
        added = 0.0 if earlier is None else (plan.gradient if plan.micro_batches == 2 else SUMMED_BYTES)
        waits_for_norm = norm if plan.clips else None
        stays = group.resident and plan.stores_gradients  # no rollback on level 0: the update waits for its step
        waits = group.on_host or group.deferred or stays or plan.clips
        # A rollback needs the sum in storage as well.
        gradient = self._added_up(step, index, backward) if waits or plan.stores_gradients else None
        self.summed[index] = None
        if waits and group.on_host:
            read = self._read(step, index, gradient, None)
            wider = 0.0 if earlier is None else SUMMED_BYTES - plan.gradient
            seconds = group.parameters / self.rates.cpu_adamw * (1 + wider / CPU_UPDATE_BYTES)
            update = self._cpu(step, seconds, index, postponable=True)
            self.stored[index] = update.after(gradient, read, waits_for_norm)
            self._write(step, index, update, sets=0)
        elif waits:
            self.late[index] = self._free(Task("", step=step)).after(gradient, waits_for_norm)
        elif not group.resident:
            before = (first_gradient, earlier)
            self.stored[index], self.updated[index] = self._pieces(step, index, added, before, (backward,))
        elif earlier is not None:  # what earlier micro-batches left in storage comes up for the update
            came = self._up(step, group.parameters * added, self.states).after(first_gradient, earlier)
            self.updated[index] = self._free(Task("", step=step)).after(came, backward)

    def _late_update(self, step: int, index: int, load: Task | None) -> Task | None:
        """Before the forward of a deferred group: states and gradient come up, the loaded weights are updated."""
        gradient = self.late.pop(index, None)
        if gradient is None:
            return None
        plan, group = self.plan, self.plan.groups[index]
        brought = plan.gradient if plan.micro_batches == 1 else SUMMED_BYTES
        if group.resident:
            return self._up(step, group.parameters * brought, self.loads).after(gradient)
        self.stored[index], here = self._pieces(step, index, brought, (gradient,), (load,))
        return here

    def _pieces(
        self, step: int, index: int, more_up: float, before: Sequence[Task | None], after: Sequence[Task | None]
    ) -> tuple[Task, Task]:
        """States in pieces; tasks that end when all are (stored, updated). An update is part of its backward."""
        plan, parameters = self.plan, self.plan.groups[index].parameters
        size = (plan.states_up + more_up) * parameters
        count = max(1, round(size / min(plan.piece_bytes, plan.ring_bytes)))
        taken = int(min(size / count, plan.ring_bytes))
        stored, updated = self._free(Task("", step=step)), self._free(Task("", step=step))
        read = self._read(step, index, None, 1)
        for _ in range(count):
            arrived = self._up(step, size / count, self.states).after(*before, read)
            arrived.ring = taken
            left = self._down(step, plan.states_down * parameters / count).after(arrived, *after)
            left.frees = taken
            stored.after(left)
            updated.after(arrived, *after)
        self._write(step, index, stored, sets=-1)
        return stored, updated

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

    def _write(self, step: int, index: int, update: Task, sets: int) -> None:
        group = self.plan.groups[index]
        if group.disk_read or group.disk_write:
            seconds = group.disk_write / self.rates.disk_write
            task = Task("disk", seconds, group.disk_write, sets=sets if group.disk_read else 0, writes=True, step=step)
            self.written[index] = self._free(task).after(update)

    def _load(self, step: int, index: int) -> Task | None:
        """The load before the next use, if it is one; it displaces groups whose last uses must be over."""
        victims = self.missing[len(self.uses)]
        if victims is None:
            return None
        group = self.plan.groups[index]
        task = self._up(step, group.weight_bytes, self.loads)
        task.after(self.stored[index], *(self.uses[use] for use in victims))
        if group.weights_on_disk:
            read = Task("disk", group.weight_bytes / self.rates.disk_read, group.weight_bytes, step=step)
            task.after(self._free(read).after(self.stored[index], self.uses[-1] if self.uses else None))
        self.updated[index] = None
        return task

    def _compute(self, step: int, seconds: float) -> Task:
        task = Task("gpu", seconds, step=step)
        self.gpu.append(task)
        self.uses.append(task)
        return task

    def _up(self, step: int, num_bytes: float, queue: deque[Task]) -> Task:
        task = Task("up", num_bytes=num_bytes, step=step)
        queue.append(task)
        return task

    def _down(self, step: int, num_bytes: float) -> Task:
        return self._free(Task("down", num_bytes=num_bytes, step=step))

    def _cpu(self, step: int, seconds: float, index: int, postponable: bool = False) -> Task:
        return self._free(Task("cpu", seconds, index=index, step=step, postponable=postponable))

    def _free(self, task: Task) -> Task:
        self.first.append(task)
        return task


def loads_of(plan: LanePlan, steps: int) -> list[tuple[int, ...] | None]:
    """For every use in order of time: None where the weights are there, else the uses that the load must wait for.

    Belady's choice among those that are there. Weights that change on the host are needed again in a new step.
    """
    groups, budget = plan.groups, plan.weight_budget
    order = [*range(len(groups)), *reversed(range(len(groups)))] * steps * plan.micro_batches
    following: dict[int, list[int]] = {index: [] for index in range(len(groups))}
    for use in reversed(range(len(order))):
        following[order[use]].append(use)
    held: dict[int, int] = {}  # group to its last use
    found: list[tuple[int, ...] | None] = []
    gone: list[int] = []
    for use, index in enumerate(order):
        following[index].pop()
        if use % (2 * len(groups) * plan.micro_batches) == 0:
            gone += [held.pop(each) for each in list(held) if groups[each].on_host]
        if groups[index].resident:
            found.append(None)
            continue
        if index in held:
            found.append(None)
        else:
            victims = []
            size = groups[index].weight_bytes
            while held and sum(groups[each].weight_bytes for each in held) + size > budget:
                farthest = max(held, key=lambda each: following[each][-1] if following[each] else len(order))
                victims.append(held.pop(farthest))
            # What went because it was stale left its bytes for others: for the loads that follow, one each.
            if not victims and gone:
                victims.append(gone.pop(0))
            found.append(tuple(victims))
        held[index] = use
    return found


# -- running them ------------------------------------------------------------------------------------------------------


class Clock:
    """Runs a graph: every lane takes what is ready, in its order."""

    def __init__(self, graph: Graph, rates: Rates, plan: LanePlan) -> None:
        self.graph, self.rates, self.now = graph, rates, 0.0
        self.ring, self.sets = plan.ring_bytes, plan.disk_sets
        self.working: dict[str, Task | None] = dict.fromkeys(LANES)
        self.ends: dict[Task, float] = {}
        self.busy: list[tuple[str, float, float, float]] = []  # lane, from, to, bytes
        self._queues: dict[str, deque[Task]] = {"down": deque(), "cpu": deque(), "disk": deque()}

    def run(self) -> None:
        """Until nothing is left."""
        for task in self.graph.first:
            if not task.waits_for:
                self._ready(task)
        events: list[tuple[float, int, Task]] = []
        while True:
            for lane in LANES:
                if self.working[lane] is None and (task := self._choose(lane)) is not None:
                    end = self._begin(task)
                    heapq.heappush(events, (end, len(self.busy), task))
            if not events:
                break
            self.now, _, task = heapq.heappop(events)
            self.working[task.lane] = None
            self._finish(task)
        graph = self.graph
        assert not graph.gpu and not graph.loads and not graph.states and not graph.reads, "tasks wait for each other"

    def _begin(self, task: Task) -> float:
        end = self.now + self._seconds(task)
        self.ring -= task.ring
        self.sets -= max(0, task.sets)
        self.working[task.lane] = task
        self.busy.append((task.lane, self.now, end, task.num_bytes))
        return end

    def _finish(self, task: Task) -> None:
        self.ends[task] = self.now
        self.ring += task.frees
        self.sets += max(0, -task.sets)
        for other in task.then:
            other.waits_for -= 1
            if other.waits_for == 0:
                self._ready(other)

    def _ready(self, task: Task) -> None:
        if task.lane == "":
            self._finish(task)
        elif task.lane in self._queues and task.sets <= 0:
            self._queues[task.lane].append(task)

    def _choose(self, lane: str) -> Task | None:
        if lane in self._queues:
            return self._choose_free(lane)
        ordered = (self.graph.gpu,) if lane == "gpu" else (self.graph.loads, self.graph.states)
        for queue in ordered:
            if queue and not queue[0].waits_for and queue[0].ring <= self.ring:
                return queue.popleft()
        return None

    def _choose_free(self, lane: str) -> Task | None:
        waiting, reads = self._queues[lane], self.graph.reads
        if lane == "disk" and not waiting and reads and not reads[0].waits_for and self.sets > 0:
            return reads.popleft()
        if not waiting:
            return None
        if lane == "cpu":
            first = min(waiting, key=lambda task: (task.postponable, task.step, task.index))
        elif lane == "disk":
            first = min(waiting, key=lambda task: not task.writes)
        else:
            return waiting.popleft()
        waiting.remove(first)
        return first

    def _seconds(self, task: Task) -> float:
        rates, working = self.rates, self.working
        if task.lane == "up":
            rate = rates.up if working["down"] is None else rates.up_both
        elif task.lane == "down":
            rate = rates.down if working["up"] is None else rates.down_both
        else:
            return task.seconds
        return task.num_bytes / (rate * (1 if working["cpu"] is None else CPU_SLOWS_LINK))
