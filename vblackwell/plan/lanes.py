"""Seconds of a streamed training step: a discrete-event simulation of the lanes that the offload runtime keeps busy.

Lanes: *up* and *down*, the two directions of the GPU's link, *gpu*, and *cpu*, which updates the groups that stay at home. Each does one
thing at a time. What the runtime does is here as tasks with what they wait for:

- A group's weights come up before its forward and its backward, unless they are there still: loaded weights have a budget, and the group
  whose next use is farthest makes room (the runtime's next-use policy); a load waits for the last use of those that it displaces.
- Inputs of checkpointed groups go down behind forward and come up before backward, where they wait in host memory.
- A group updated on the GPU needs its states, which pass in pieces through a ring: up, update behind the group's backward, down again.
  They come in the order of backward, from the first gradient on, and give way to loads after every piece. Some updates are late: they wait
  for the next forward, with their gradients at home.
- A group updated at home sends its gradient down; the CPU updates it; its next load waits for that. Of the groups whose gradients are there
  the CPU takes the first of the forward.

A piece that starts while the other direction works passes at the rate for both directions; while the CPU updates, links are slower.
Seconds and bytes; the last steps of a few are counted, when the lanes have settled.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vblackwell.units import MiB

LANES: tuple[str, ...] = ("gpu", "up", "down", "cpu")
PREFETCHED = 2  # inputs of checkpoints that come up before they are needed
UPDATES_PER_SECOND_PER_BYTE = 1 / 28  # an update on the GPU reads and writes 28 bytes a parameter of its memory


@dataclass(frozen=True)
class LaneRates:
    """Bytes a second of each direction alone and while both work; parameters a second of the CPU's AdamW beside copies.

    Attributes:
        gpu_bytes: of the GPU's memory. cpu_slows_link: share of the link's rates that is left while the CPU updates.
    """

    up: float
    down: float
    up_both: float
    down_both: float
    cpu: float
    gpu_bytes: float
    cpu_slows_link: float = 0.9


@dataclass(frozen=True)
class GroupWork:
    """What a layer group asks of the lanes.

    Attributes:
        parameters: elements that are trained. weight_bytes: of its compute weights.
        forward, backward: seconds of compute; backward with what it computes again.
        input_bytes: of its checkpoint's input, if that waits in host memory.
        at_home: the CPU updates it. deferred: its update on the GPU waits for the next forward.
    """

    parameters: int
    weight_bytes: int
    forward: float
    backward: float
    input_bytes: int = 0
    at_home: bool = False
    deferred: bool = False


@dataclass(frozen=True)
class LanePlan:
    """Groups in the order of the forward and the room on level 0.

    Attributes:
        weight_budget: bytes of loaded weights. ring_bytes: of states on their way.
        states_up, states_down: bytes a parameter that pass for an update on the GPU (bf16: remainder and moments up, and the new weight
            beside them down).
        gradient: bytes a parameter of a gradient.
    """

    groups: tuple[GroupWork, ...]
    weight_budget: int
    ring_bytes: int
    states_up: float = 10
    states_down: float = 12
    gradient: float = 2
    piece_bytes: int = 144 * MiB


@dataclass(frozen=True)
class LaneTimes:
    """One step in the long run: seconds, bytes of both directions, and the share of the time in which each lane worked."""

    step_seconds: float
    up_bytes: float
    down_bytes: float
    busy: dict[str, float]

    @property
    def bottleneck(self) -> str:
        """The lane that worked most."""
        return max(self.busy, key=lambda lane: self.busy[lane])


@dataclass(eq=False)
class _Task:
    lane: str
    seconds: float = 0.0
    num_bytes: float = 0.0
    waits_for: int = 0
    ring: int = 0  # bytes of the ring that it takes
    frees: int = 0  # bytes of the ring that it gives back
    index: int = 0  # of its group, where the CPU goes by that
    step: int = 0
    then: list[_Task] = field(default_factory=list)

    def after(self, *others: _Task | None) -> _Task:
        for other in others:
            if other is not None:
                other.then.append(self)
                self.waits_for += 1
        return self


class _Graph:
    """Tasks of ``steps`` steps in the order of each lane."""

    def __init__(self, plan: LanePlan, rates: LaneRates, steps: int) -> None:
        self.plan, self.rates = plan, rates
        self.gpu: deque[_Task] = deque()
        self.loads: deque[_Task] = deque()
        self.states: deque[_Task] = deque()
        self.done: list[_Task] = []
        self.first: list[_Task] = []  # tasks of 'down' and 'cpu' go when they can, in the order of their readiness
        count = len(plan.groups)
        self.fresh: list[_Task | None] = [None] * count  # what the weights at home wait for
        self.loaded_fresh: list[_Task | None] = [None] * count  # what those on level 0 wait for
        self.late: dict[int, _Task] = {}
        self.missing = _loads([group.weight_bytes for group in plan.groups], plan.weight_budget, steps,
                              stale=[group.at_home for group in plan.groups])  # fmt: skip
        self.uses: list[_Task] = []
        for step in range(steps):
            self._step(step)

    def _step(self, step: int) -> None:
        groups = self.plan.groups
        inputs: list[_Task | None] = []
        last: _Task | None = self.uses[-1] if self.uses else None
        for index, group in enumerate(groups):
            load = self._load(step, index)
            late = self._late_update(step, index, load)
            last = self._compute(step, group.forward).after(last, load, self.loaded_fresh[index], late)
            inputs.append(self._down(step, group.input_bytes).after(last) if group.input_bytes else None)
        first_gradient = last
        computed: list[_Task] = []
        for index in reversed(range(len(groups))):
            group = groups[index]
            load = self._load(step, index)
            back = None
            if group.input_bytes:
                ahead = computed[-PREFETCHED] if len(computed) >= PREFETCHED else None
                back = self._up(step, group.input_bytes).after(inputs[index], ahead)
            update = 0.0 if group.at_home else group.parameters / (self.rates.gpu_bytes * UPDATES_PER_SECOND_PER_BYTE)
            last = self._compute(step, group.backward + update).after(last, load, back, self.loaded_fresh[index])
            computed.append(last)
            self._update(step, index, last, first_gradient)
        assert last is not None
        self.done.append(last)

    def _update(self, step: int, index: int, backward: _Task, first_gradient: _Task | None) -> None:
        group = self.plan.groups[index]
        self.loaded_fresh[index] = None
        if group.at_home or group.deferred:
            gradient = self._down(step, group.parameters * self.plan.gradient).after(backward)
            if group.at_home:
                update = self._cpu(step, group.parameters / self.rates.cpu).after(gradient)
                self.fresh[index], update.index = update, index
            else:
                self.late[index] = gradient
            return
        ends = self._pieces(step, group.parameters, 0.0, (first_gradient,), (backward,))
        self.fresh[index], self.loaded_fresh[index] = ends

    def _late_update(self, step: int, index: int, load: _Task | None) -> _Task | None:
        """Before the forward of a deferred group: states and gradient come up, the loaded weights are updated."""
        gradient = self.late.pop(index, None)
        if gradient is None:
            return None
        parameters = self.plan.groups[index].parameters
        home, here = self._pieces(step, parameters, self.plan.gradient, (gradient,), (load,))
        self.fresh[index] = home
        return here

    def _pieces(
        self, step: int, parameters: int, more_up: float, before: Sequence[_Task | None], behind: Sequence[_Task | None]
    ) -> tuple[_Task, _Task]:
        """States in pieces; (what ends when all are home, what ends when all are updated). An update itself is part of its backward."""
        size = (self.plan.states_up + more_up) * parameters
        piece_bytes = min(self.plan.piece_bytes, self.plan.ring_bytes)
        count = max(1, round(size / piece_bytes))
        room = int(min(size / count, self.plan.ring_bytes))
        home, here = self._join(step), self._join(step)
        for _ in range(count):
            arrived = _Task("up", num_bytes=size / count, ring=room, step=step).after(*before)
            self.states.append(arrived)
            left = self._down(step, self.plan.states_down * parameters / count).after(arrived, *behind)
            left.frees = room
            home.after(left)
            here.after(arrived, *behind)
        return home, here

    def _load(self, step: int, index: int) -> _Task | None:
        """The load before the next use, if it is one; it displaces groups whose last uses must be over."""
        victims = self.missing[len(self.uses)]
        if victims is None:
            return None
        task = _Task("up", num_bytes=self.plan.groups[index].weight_bytes, step=step)
        task.after(self.fresh[index], *(self.uses[use] for use in victims))
        self.loaded_fresh[index] = None
        self.loads.append(task)
        return task

    def _compute(self, step: int, seconds: float) -> _Task:
        task = _Task("gpu", seconds, step=step)
        self.gpu.append(task)
        self.uses.append(task)
        return task

    def _up(self, step: int, num_bytes: float) -> _Task:
        task = _Task("up", num_bytes=num_bytes, step=step)
        self.loads.append(task)
        return task

    def _down(self, step: int, num_bytes: float) -> _Task:
        return self._free(_Task("down", num_bytes=num_bytes, step=step))

    def _cpu(self, step: int, seconds: float) -> _Task:
        return self._free(_Task("cpu", seconds, step=step))

    def _join(self, step: int) -> _Task:
        return self._free(_Task("", step=step))

    def _free(self, task: _Task) -> _Task:
        self.first.append(task)
        return task


def _loads(sizes: list[int], budget: int, steps: int, stale: list[bool]) -> list[tuple[int, ...] | None]:
    """For every use in order (forward, then backward, each step): None where the weights are there, else the uses that must be over.

    Belady's choice among those that are there. ``stale``: weights that change at home, so that a new step needs them again.
    """
    order = [*range(len(sizes)), *reversed(range(len(sizes)))] * steps
    following: dict[int, list[int]] = {index: [] for index in range(len(sizes))}
    for use in reversed(range(len(order))):
        following[order[use]].append(use)
    held: dict[int, int] = {}  # group to its last use
    found: list[tuple[int, ...] | None] = []
    gone: list[int] = []
    for use, index in enumerate(order):
        following[index].pop()
        if use % (2 * len(sizes)) == 0:
            gone += [held.pop(each) for each in list(held) if stale[each]]
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


class _Clock:
    """Runs a graph: every lane takes what is ready, in its order."""

    def __init__(self, graph: _Graph, rates: LaneRates, ring_bytes: int) -> None:
        self.graph, self.rates, self.ring, self.now = graph, rates, ring_bytes, 0.0
        self.working: dict[str, _Task | None] = dict.fromkeys(LANES)
        self.ends: dict[_Task, float] = {}
        self.busy: list[tuple[str, float, float, float]] = []  # lane, from, to, bytes
        self._queues: dict[str, deque[_Task]] = {"down": deque(), "cpu": deque()}

    def run(self) -> None:
        """Until nothing is left."""
        for task in self.graph.first:
            if not task.waits_for:
                self._ready(task)
        events: list[tuple[float, int, _Task]] = []
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
        assert not graph.gpu and not graph.loads and not graph.states, "tasks that wait for each other"

    def _begin(self, task: _Task) -> float:
        end = self.now + self._seconds(task)
        self.ring -= task.ring
        self.working[task.lane] = task
        self.busy.append((task.lane, self.now, end, task.num_bytes))
        return end

    def _finish(self, task: _Task) -> None:
        self.ends[task] = self.now
        self.ring += task.frees
        for other in task.then:
            other.waits_for -= 1
            if other.waits_for == 0:
                self._ready(other)

    def _ready(self, task: _Task) -> None:
        if task.lane == "":
            self._finish(task)
        elif task.lane in self._queues:
            self._queues[task.lane].append(task)

    def _choose(self, lane: str) -> _Task | None:
        if lane in self._queues:
            waiting = self._queues[lane]
            if lane == "cpu" and waiting:
                first = min(waiting, key=lambda task: (task.step, task.index))
                waiting.remove(first)
                return first
            return waiting.popleft() if waiting else None
        ordered = (self.graph.gpu,) if lane == "gpu" else (self.graph.loads, self.graph.states)
        for queue in ordered:
            if queue and not queue[0].waits_for and queue[0].ring <= self.ring:
                return queue.popleft()
        return None

    def _seconds(self, task: _Task) -> float:
        rates, working = self.rates, self.working
        if task.lane == "up":
            rate = rates.up if working["down"] is None else rates.up_both
        elif task.lane == "down":
            rate = rates.down if working["up"] is None else rates.down_both
        else:
            return task.seconds
        return task.num_bytes / (rate * (1 if working["cpu"] is None else rates.cpu_slows_link))


def simulate(plan: LanePlan, rates: LaneRates, steps: int = 5) -> LaneTimes:
    """Run ``steps`` steps and count all but the first two and the last.

    Raises:
        ValueError: fewer than four steps, or no groups.
    """
    if steps < 4 or not plan.groups:
        raise ValueError(f"{steps} steps of {len(plan.groups)} groups: at least 4 steps and a group are needed")
    graph = _Graph(plan, rates, steps)
    clock = _Clock(graph, rates, plan.ring_bytes)
    clock.run()
    return _summed(clock.busy, clock.ends[graph.done[1]], clock.ends[graph.done[-2]], steps - 3)


def _summed(busy: list[tuple[str, float, float, float]], begin: float, end: float, steps: int) -> LaneTimes:
    shares, moved = dict.fromkeys(LANES, 0.0), dict.fromkeys(LANES, 0.0)
    for lane, start, stop, num_bytes in busy:
        inside = max(0.0, min(stop, end) - max(start, begin))
        if inside:
            shares[lane] += inside / (end - begin)
            moved[lane] += num_bytes * inside / (stop - start) / steps
    return LaneTimes((end - begin) / steps, moved["up"], moved["down"], shares)
