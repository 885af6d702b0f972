"""Rates of what the host does during a streamed step: AdamW, sums of gradients, copies over the link, operators.

The CPU's updates and copies work in the same host memory and slow each other down, by machine between a tenth and a
third, so they are measured at the same time. While AdamW on the host keeps nearly every core busy, the threads that
launch the model's kernels share cores, caches and memory with it, and each operator takes longer. An optimizer that
goes through its parameters one by one issues operators without autograd and modules around them, which take less than a
model's.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from vblackwell.machine.facts import gpu_bytes_left, memory_facts
from vblackwell.memory.host import map_slab
from vblackwell.offload.movement.update_loop import MIN_PART, MasterLoop, SumLoop, update_threads
from vblackwell.units import MiB

CPU_ELEMENTS = 16 << 20  # at least, 224 MiB of states: more than most caches
# A parameter: of an update three fp32 and a bf16, of sums at the same time one fp32 and two bf16.
MEASURED_BYTES = 22
LINK_BYTES, COPIES = 64 * MiB, 4
MEMORY_SHARE = 10  # no buffer of a measurement takes more than this part of what the process may still take of the GPU
DUPLEX_SAMPLES = 8  # 6 ms each on the reference machine, where two found 46 and 47 of the 50 GB/s that steps have
TOGETHER_SECONDS = 0.15  # a dozen updates on the reference machine
SAMPLES = 3
ADD_TURNS = 5
LOOP_PARAMETERS, LOOP_WIDTH = 64, 64


def cpu_rate() -> float:
    """Parameters a second that AdamW on the host updates, with nothing else at work."""
    update = HostUpdate()
    return update.count / min([_seconds(update) for _ in range(4)][1:])  # the first makes threads, and scratch


def update_elements() -> int:
    """Parameters of a measured update: as many full parts for each thread, `CPU_ELEMENTS` where RAM is short.

    The threads share an update in parts. Where their number does not divide that of the parts, some wait at the end for
    others, as they hardly do in the large groups that a rate stands for.
    """
    each_once = update_threads() * MIN_PART
    wanted = each_once * -(-CPU_ELEMENTS // each_once)
    return wanted if wanted * MEASURED_BYTES <= memory_facts().available_bytes // 16 else CPU_ELEMENTS


class HostUpdate:
    """AdamW on the host with bf16 compute weights, in memory as a level's; calling it is one step.

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


def adds_per_update(update: HostUpdate) -> float:
    """Gradients that the host adds up while ``update`` does one parameter: of the second of two micro-batches.

    Both by the same threads, in the same kind of memory, in turns, so that what slows one slows the other; the median
    of the turns.
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
    """Bytes a second that a GPU's link carries up while as many go down: the best sample."""
    copies = _BothWays(device)
    return max(copies.rate_after(copies.queue(COPIES)) for _ in range(DUPLEX_SAMPLES))


@functools.cache
def rates_together(device: torch.device) -> tuple[float, float]:
    """A GPU's link, bytes/s each way, and AdamW on the host, parameters/s, while both work. Measured once, 0.8 s."""
    samples = TogetherSamples(HostUpdate(), device)
    for _ in range(SAMPLES):
        samples.take()
    return samples.rates


class TogetherSamples:
    """Samples of AdamW on the host and a GPU's link while both work; the median by what the CPU updated counts.

    What disturbs a sample (a machine that hands out memory as it is first touched, threads that have not found their
    cores, an earlier process that gives memory back) lasts for a part of a second: one alone found 0.2 G parameters/s.
    """

    def __init__(self, update: HostUpdate, device: torch.device) -> None:
        self._update, self._copies = update, _BothWays(device)
        self._update()  # makes threads, and scratch
        alone = self._copies.rate_after(self._copies.queue(COPIES))
        self._count = max(COPIES, round(TOGETHER_SECONDS * alone / self._copies.num_bytes))
        self._samples: list[tuple[float, float]] = []

    def take(self) -> None:
        """One more sample, `TOGETHER_SECONDS`."""
        done = self._copies.queue(self._count)
        began, updates = time.perf_counter(), 0
        while not all(each.query() for each in done):
            self._update()
            updates += 1
        cpu = updates * self._update.count / (time.perf_counter() - began)
        self._samples.append((self._copies.rate_after(done), cpu))

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes/s of the link each way, and parameters/s of AdamW."""
        return median_sample(self._samples)


def median_sample(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """Of ``samples``, (bytes/s, parameters/s) each, the one with the median of the latter."""
    return sorted(samples, key=lambda sample: sample[1])[len(samples) // 2]


def measured_bytes(device: torch.device, wanted: int) -> int:
    """The size of a buffer on ``device`` to measure with: ``wanted``, or less where memory is short or capped."""
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


@contextmanager
def updating(update: HostUpdate) -> Any:
    """``update``, AdamW on the host, runs with the runtime's own threads, again and again, until the block ends.

    Raises:
        RuntimeError: an update failed, and what was measured did not run during one.
    """
    enough, first = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not enough.is_set():
                update()
                first.set()
        except BaseException as error:
            errors.append(error)
            first.set()

    thread = threading.Thread(target=run, name="measured-updates", daemon=True)
    thread.start()
    first.wait()  # the first makes threads, and touches the memory
    try:
        yield
    finally:
        enough.set()
        thread.join()
        if errors:
            raise RuntimeError("an update during the measurement failed") from errors[0]


def looping_optimizer(device: torch.device) -> Callable[[], Any]:
    """A step of torch's AdamW that goes through `LOOP_PARAMETERS` small parameters one by one."""
    params = [torch.nn.Parameter(torch.zeros(LOOP_WIDTH, LOOP_WIDTH, device=device)) for _ in range(LOOP_PARAMETERS)]
    for param in params:
        param.grad = torch.zeros_like(param)
    return torch.optim.AdamW(params, foreach=False).step
