"""How benchmarks of kernels take times: CUDA graphs between events, and the median."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


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


def graph_us(calls: Sequence[Callable[[], object]], replays: int) -> float:
    """Median time of one of ``calls``, in us, from replays of a CUDA graph of all of them; the first and the last run before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return median_us(graph.replay, replays) / len(calls)
