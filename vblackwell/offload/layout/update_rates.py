"""Which share of AdamW the CPU should do beside a GPU: from rates that are measured here.

A parameter that is updated on level 0 costs the link `STATE_BYTES` up; one that is updated at home costs the CPU its AdamW. Some bytes
of every parameter go up in any case for forward and backward, ``pass_bytes``: twice its weight, less what stays loaded from one
to the other. All is done together when

    (pass_bytes + (1 - share) * STATE_BYTES) / link = share / cpu

with ``link`` in bytes/s while copies go both ways, of which a step uses `LINK_USE` at best, and ``cpu`` in parameters/s. Both work in the
same host memory and slow each other down, by machine between a tenth and a third, so they are measured at the same time. The CPU cannot
begin before the first gradient is there, and must be done before the forward comes by: `OVERLAP` of a step is its. A share that is
too large costs more than one that is too small. Tokens do not enter: where compute takes longer than both, any share does.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from vblackwell.machine.facts import gpu_bytes_left, memory_facts
from vblackwell.memory.slab import map_slab
from vblackwell.offload.movement.update_loop import LEAST_PART, MasterLoop, SumLoop, update_threads
from vblackwell.units import MiB

STATE_BYTES, PASS_BYTES = 10, 4  # split bf16 masters, every weight loaded twice
LINK_USE, OVERLAP = 0.9, 0.95
# What copies leave of an update that was measured alone: 1.9 of 2.65 G parameters/s on the reference machine (docs/log-offload.md).
BESIDE_COPIES = 0.7
LEAST_SHARE = 0.02  # less is not worth a thread
CPU_ELEMENTS = 16 << 20  # at least, 224 MiB of states: more than most caches
MEASURED_BYTES = 22  # a parameter: of an update three fp32 and a bf16, of sums beside it one fp32 and two bf16
LINK_BYTES, COPIES = 64 * MiB, 4
MEMORY_SHARE = 10  # no buffer of a measurement takes more than this part of what the process may still take of the GPU
DUPLEX_LOOKS = 8  # 6 ms each on the reference machine, where two found 46 and 47 of the 50 GB/s that steps have
TOGETHER_SECONDS = 0.15  # a dozen updates on the reference machine
LOOKS = 3
ADD_TURNS = 5


def balanced_share(device: torch.device, pass_bytes: float = PASS_BYTES) -> float:
    """The share of a model's parameters that is best updated at home, for level 0 on ``device``, a GPU: 0 to 0.5. Measures once, 0.8 s."""
    link, cpu = rates_together(device)
    return share_for(link, cpu, pass_bytes)


def share_for(link: float, cpu: float, pass_bytes: float = PASS_BYTES) -> float:
    """The share for a ``link`` in bytes/s each way and a ``cpu`` in parameters/s (see the module's text)."""
    link *= LINK_USE
    share = OVERLAP * (pass_bytes + STATE_BYTES) / link / (STATE_BYTES / link + 1 / cpu)
    return 0.0 if share < LEAST_SHARE else min(round(share, 2), 0.5)


def cpu_rate() -> float:
    """Parameters a second that AdamW at home updates, with nothing beside it."""
    update = HomeUpdate()
    return update.count / min([_seconds(update) for _ in range(4)][1:])  # the first makes threads, and scratch


def update_elements() -> int:
    """Parameters of a measured update: as many full parts for each of the runtime's threads, or `CPU_ELEMENTS` where RAM is short for that.

    The threads share out an update in parts. Where their number does not divide that of the parts, some wait at the end for others, as
    they hardly do in the large groups that a rate stands for (docs/log-estimate.md).
    """
    each_once = update_threads() * LEAST_PART
    wanted = each_once * -(-CPU_ELEMENTS // each_once)
    return wanted if wanted * MEASURED_BYTES <= memory_facts().available_bytes // 16 else CPU_ELEMENTS


class HomeUpdate:
    """AdamW at home, whose compute weights are bf16, in memory as a level's; calling it is one step.

    Args:
        count: its parameters; None: `update_elements`.

    Raises:
        InsufficientMemory: the system gave no memory for their states.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = update_elements() if count is None else count
        sizes = [4 * self.count] * 3 + [2 * self.count]
        *states, weight = map_slab(sum(sizes))[: sum(sizes)].split(sizes)
        self._master, self._exp_avg, self._exp_avg_sq = (each.view(torch.float32) for each in states)
        self._weight, self._step, self._loop = weight.view(torch.bfloat16), torch.zeros(()), MasterLoop()

    def __call__(self) -> None:
        self._step.add_(1)
        self._loop.add(
            self._master, self._weight, self._weight, self._exp_avg, self._exp_avg_sq, self._step, None,
            lr=0.0, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0,
        )  # fmt: skip
        self._loop.run()


def adds_per_update(update: HomeUpdate) -> float:
    """Gradients that are added up at home while ``update`` does one parameter: of the second of two micro-batches, whose first widen.

    Both by the same threads, in the same kind of memory, in turns, so that whatever slows one slows the other; the median of the turns.
    """
    sums, sizes = SumLoop(), [4 * update.count, 2 * update.count, 2 * update.count]
    total, first, addend = map_slab(sum(sizes))[: sum(sizes)].split(sizes)
    tensors = total.view(torch.float32), first.view(torch.bfloat16), addend.view(torch.bfloat16)

    def add_up() -> None:
        sums.add(*tensors)
        sums.run()

    ratios = [_seconds(update) / _seconds(add_up) for _ in range(1 + ADD_TURNS)]
    return statistics.median(ratios[1:])  # the first makes threads, and scratch


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def duplex_rate(device: torch.device) -> float:
    """Bytes a second that a GPU's link carries up while as many go down: in the best of some looks, since a disturbance only slows it."""
    copies = _BothWays(device)
    return max(copies.rate_after(copies.queue(COPIES)) for _ in range(DUPLEX_LOOKS))


@functools.cache
def rates_together(device: torch.device) -> tuple[float, float]:
    """Of a GPU's link, bytes/s each way, and of AdamW at home, parameters/s, while both work. Measures once a process."""
    looks = TogetherLooks(HomeUpdate(), device)
    for _ in range(LOOKS):
        looks.look()
    return looks.rates


class TogetherLooks:
    """AdamW at home and a GPU's link while both work, looked at again and again: of all looks the median by what the CPU updated.

    What disturbs one look (a machine that hands out memory as it is first touched, threads that have not found their cores, a
    process before that gives memory back) lasts for a part of a second: one alone found 0.2 G parameters/s.
    """

    def __init__(self, update: HomeUpdate, device: torch.device) -> None:
        self._update, self._copies = update, _BothWays(device)
        self._update()  # makes threads, and scratch
        alone = self._copies.rate_after(self._copies.queue(COPIES))
        self._count = max(COPIES, round(TOGETHER_SECONDS * alone / self._copies.num_bytes))
        self._looks: list[tuple[float, float]] = []

    def look(self) -> None:
        """Once more, `TOGETHER_SECONDS`."""
        done = self._copies.queue(self._count)
        began, updates = time.perf_counter(), 0
        while not all(each.query() for each in done):
            self._update()
            updates += 1
        cpu = updates * self._update.count / (time.perf_counter() - began)
        self._looks.append((self._copies.rate_after(done), cpu))

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes/s of the link each way, and parameters/s of AdamW."""
        return median_look(self._looks)


def median_look(looks: list[tuple[float, float]]) -> tuple[float, float]:
    """Of ``looks``, (bytes/s, parameters/s) each, the one with the median of the latter."""
    return sorted(looks, key=lambda look: look[1])[len(looks) // 2]


def measured_bytes(device: torch.device, wanted: int) -> int:
    """The size of a buffer on ``device`` that something is measured with: ``wanted``, or less where memory is short or capped."""
    return min(wanted, max(MiB, gpu_bytes_left(device) // MEMORY_SHARE // MiB * MiB))


class _BothWays:
    """Copies between a GPU and pinned memory, on a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = measured_bytes(device, LINK_BYTES)
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]
        there = [torch.empty(self.num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        here = [torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.pairs = [(there[0], here[0]), (here[1], there[1])]
        torch.cuda.synchronize(device)

    def queue(self, count: int) -> list[torch.cuda.Event]:
        """Starts ``count`` copies each way: the events after the last of each."""
        self.count, self.begun = count, [torch.cuda.Event(enable_timing=True) for _ in self.streams]
        done = [torch.cuda.Event(enable_timing=True) for _ in self.streams]
        for stream, event in zip(self.streams, self.begun, strict=True):
            event.record(stream)
        for _ in range(count):
            for stream, (target, source) in zip(self.streams, self.pairs, strict=True):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for stream, event in zip(self.streams, done, strict=True):
            event.record(stream)
        return done

    def rate_after(self, done: list[torch.cuda.Event]) -> float:
        """Waits for what `queue` started: bytes/s of the slower direction."""
        for event in done:
            event.synchronize()
        milliseconds = max(begun.elapsed_time(end) for begun, end in zip(self.begun, done, strict=True))
        return self.count * self.num_bytes / (milliseconds / 1e3)
