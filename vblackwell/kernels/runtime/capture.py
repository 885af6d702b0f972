"""CUDA graphs, captured beside threads that go on: a stack's copies and other requests may ask CUDA for memory
meanwhile, which would end a capture of all threads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeVar

import torch

_Result = TypeVar("_Result")
_ONE = threading.Lock()  # what another thread launched on the same stream meanwhile would be captured with it

# A GPU's stream on which work is tried and captured: one, because torch's allocator keeps a pool for each it sees.
_stream = cache(torch.cuda.Stream)


@contextmanager
def capturing(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Inside, a stream of the GPU's is current for this thread alone, after what was current before, and before what
    that gets later. What is captured runs there once first: kernels are compiled and chosen, and libraries set up."""
    before = torch.cuda.current_stream(device)
    with _ONE:
        side = _stream(torch.cuda.current_device() if device.index is None else device.index)
        side.wait_stream(before)
        try:
            with torch.cuda.stream(side):
                yield side
        finally:
            before.wait_stream(side)


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture; where CUDA says that it had ended before its time, torch's allocator goes on giving ``pool``."""
    try:
        graph.capture_end()
    except Exception:
        index = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(index, pool)  # pyright: ignore[reportAttributeAccessIssue]
        torch._C._cuda_releasePool(index, pool)  # pyright: ignore[reportAttributeAccessIssue]
        raise


class Captured(Generic[_Result]):
    """What ``compute`` launches on the current stream, one of `capturing`'s, as a graph with memory of ``pool``; a call
    replays it, and gives what it gave at first, overwritten. ``pool`` None, without a GPU: calls ``compute``."""

    def __init__(self, compute: Callable[[], _Result], pool: Any) -> None:
        self._compute, self._graph = compute if pool is None else None, None  # a graph keeps nothing else alive
        if pool is not None:
            # Not `torch.cuda.graph`, which waits for the device and empties torch's cache each time.
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._result = compute()
            finally:
                _end(self._graph, pool)

    def __call__(self) -> _Result:
        if self._compute is not None:
            return self._compute()
        assert self._graph is not None
        self._graph.replay()
        return self._result
