"""How benchmarks of kernels take times: CUDA graphs between events, and the median; or calls one after another."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Replay:
    """A captured graph, with what it was captured from.

    A graph knows addresses only. An input that nobody else holds would be freed, and with expandable segments the next
    capture's `empty_cache` unmaps its page: a replay then reads what is not there, or another system's data.
    """

    graph: torch.cuda.CUDAGraph
    calls: tuple[Callable[[], object], ...]

    def replay(self) -> None:
        self.graph.replay()


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Median time of ``call`` between two events of its stream, in us."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def graph_of(calls: Sequence[Callable[[], object]], on: torch.cuda.Stream | None = None) -> Replay:
    """A CUDA graph of all ``calls``, replayed once to its end; all of them run before, as in a model that is warmed up.
    Both on a stream of its own, or ``on`` the current one, which keeps a green context's multiprocessors.

    A call that fails on the GPU therefore raises here, and nothing before it is still under way. And a captured launch
    overlaps the kernel ahead of it only where another one has read its weight before (kernels/runtime/launch.py).
    """
    stream = on or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=on):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return Replay(graph, tuple(calls))


def graph_us(calls: Sequence[Callable[[], object]], replays: int) -> float:
    """Median time of one of ``calls``, in us, from replays of a CUDA graph of all of them."""
    return median_us(graph_of(calls).replay, replays) / len(calls)


def alternating_us(systems: Sequence[Sequence[Callable[[], object]]], rounds: int) -> list[float]:
    """Median time of one call of each of ``systems``, in us, from graphs replayed in turns."""
    times = turns_us([graph_of(calls) for calls in systems], rounds)
    return [us / len(calls) for us, calls in zip(times, systems, strict=True)]


def turns_us(graphs: Sequence[Replay], rounds: int) -> list[float]:
    """Median time of a replay of each graph, in us.

    In turns, because a GPU lowers its clocks under load: the one that is timed first, by itself, seems faster. One
    round goes before. Every other round goes backwards: who follows a lighter system finds a higher clock, and nobody
    shall always follow the same one. So an odd number of rounds is rounded up.
    """
    rounds += rounds % 2
    times: list[list[float]] = [[] for _ in graphs]
    for number in range(rounds + 1):
        for graph, found in list(zip(graphs, times, strict=True))[:: 1 if number % 2 else -1]:
            us = median_us(graph.replay, 1)
            if number:
                found.append(us)
    return [statistics.median(found) for found in times]


def eager_us(calls: Sequence[Callable[[], object]], seconds: float = 3e-3) -> list[float]:
    """Least time of each of ``calls``, in us, the host's launches included: of rounds in which each is called for about
    so many ``seconds`` and waited for, in turns. The least, because what other programs do to the host only adds.
    """

    def timed(call: Callable[[], object], repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / repeats

    once = [min(timed(call, 1) for _ in range(3)) for call in calls]
    repeats = max(1, min(100, int(seconds / min(once))))
    gc.collect()
    gc.disable()
    try:
        rounds = [[timed(call, repeats) for call in calls] for _ in range(12 if max(once) < 0.01 else 5)]
    finally:
        gc.enable()
    return [1e6 * min(times) for times in zip(*rounds, strict=True)]


def host_us(call: Callable[[], object]) -> str:
    """Microseconds of the host a call, least and median: few calls at a time, so that none waits for the GPU."""
    taken: list[float] = []
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(10):
            call()
        taken.append((time.perf_counter() - began) * 1e5)
        torch.cuda.synchronize()
    return f"{min(taken):6.1f} {statistics.median(taken):6.1f}"
