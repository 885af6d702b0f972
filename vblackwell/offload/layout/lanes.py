"""Seconds of a streamed training step: a discrete-event simulation of the lanes that the offload runtime keeps busy (`lane_work`).

Each lane does one thing at a time. What the runtime does is here as tasks with what they wait for (`lane_graph`):

- A group's weights come up before its forward and its backward, unless they are there still: loaded weights have a budget, and the group
  whose next use is farthest makes room (the runtime's next-use policy); a load waits for the last use of those that it displaces.
- Inputs of checkpointed groups go down behind forward and come up before backward, where they wait in host memory.
- A group updated on the GPU needs its states, which pass in pieces through a ring: up, update behind the group's backward, down again.
  They come in the order of backward, from the first gradient on, and give way to loads after every piece. Some updates are late: they wait
  for the next forward, with their gradients at home. While steps clip, all do, because no update may begin before the norm is known.
- A group updated at home sends its gradient down; the CPU updates it; its next load waits for that. Of the groups whose gradients are there
  the CPU takes the first of the forward.
- States on a disk are read ahead into a few sets of host memory, in the order of the updates, and written behind them; a set is free again
  when its write is over. The disk does one thing at a time, writes first.
- Before the last micro-batch of a step, gradients go home and are added up there by the CPU, sums before updates. The last one's is added
  on the GPU where an update follows it there and nothing has to be undone; elsewhere by the CPU too. Of several the CPU takes the first
  group of the forward, where the runtime takes the one that came first.

A piece that starts while the other direction works passes at the rate for both directions; while the CPU updates, links are slower.
Seconds and bytes; the last steps of a few are counted, when the lanes have settled.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import replace

from vblackwell.offload.layout.lane_graph import Graph, Task
from vblackwell.offload.layout.lane_work import LANES, GroupWork, LanePlan, LaneRates, LaneTimes

__all__ = ["LANES", "GroupWork", "LanePlan", "LaneRates", "LaneTimes", "disk_hidden_from", "simulate"]
HIDDEN = 1.02  # a disk that costs less than that of a step is hidden
MOST_DOUBLINGS = 24


class _Clock:
    """Runs a graph: every lane takes what is ready, in its order."""

    def __init__(self, graph: Graph, rates: LaneRates, plan: LanePlan) -> None:
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
        return task.num_bytes / (rate * (1 if working["cpu"] is None else rates.cpu_slows_link))


def simulate(plan: LanePlan, rates: LaneRates, steps: int = 5) -> LaneTimes:
    """Run ``steps`` steps and count all but the first two and the last.

    Raises:
        ValueError: fewer than four steps, no groups, or no micro-batch.
    """
    if steps < 4 or not plan.groups or plan.micro_batches < 1:
        raise ValueError(
            f"{steps} steps of {plan.micro_batches} micro-batches and {len(plan.groups)} groups: at least 4 steps, a micro-batch and a "
            "group are needed"
        )
    graph = Graph(plan, rates, steps)
    clock = _Clock(graph, rates, plan)
    clock.run()
    return _summed(clock.busy, clock.ends[graph.done[1]], clock.ends[graph.done[-2]], steps - 3)


def _summed(busy: list[tuple[str, float, float, float]], begin: float, end: float, steps: int) -> LaneTimes:
    shares, moved = dict.fromkeys(LANES, 0.0), dict.fromkeys(LANES, 0.0)
    for lane, start, stop, num_bytes in busy:
        inside = max(0.0, min(stop, end) - max(start, begin))
        if inside:
            shares[lane] += inside / (end - begin)
            moved[lane] += num_bytes * inside / (stop - start) / steps
    return LaneTimes((end - begin) / steps, moved["up"], moved["down"], shares, moved["disk"])


def disk_hidden_from(plan: LanePlan, rates: LaneRates, tokens: int) -> int | None:
    """The fewest tokens a step from which the disk costs a step next to nothing, to about 5 %; 0 without one, None if never.

    ``plan`` is of ``tokens`` a step; its seconds of compute grow with them, its bytes of states do not. (Accumulation brings tokens too:
    more passes of weights and gradients, no work for the disk unless weights are there.)
    """
    if not any(group.disk_read or group.disk_write or group.weights_on_disk for group in plan.groups):
        return 0
    free = replace(rates, disk_read=math.inf, disk_write=math.inf)

    def hidden(factor: float) -> bool:
        groups = tuple(
            replace(
                group, forward=group.forward * factor, backward=group.backward * factor,
                input_bytes=int(group.input_bytes * factor),
            )
            for group in plan.groups
        )  # fmt: skip
        scaled = replace(plan, groups=groups)
        return simulate(scaled, rates).step_seconds <= HIDDEN * simulate(scaled, free).step_seconds

    low, high = 0.0, 1.0
    for _ in range(MOST_DOUBLINGS):
        if hidden(high):
            break
        low, high = high, 2 * high
    else:
        return None
    while high - low > 0.05 * high and high * tokens > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return max(1, math.ceil(high * tokens))
