"""Waiting for bytes on their way to or from level 0, and counting what the wait costs.

On a GPU the computing stream waits and the host does not, so how long it took is known only later: two timed events are kept
and read when both have passed.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.level import Transfer


class Stalls:
    """The waits of one owner, counted as stall of its stack. Not thread-safe: the owner has a lock."""

    def __init__(self, stack: VGPUStack) -> None:
        self._stack = stack
        self._device = stack.level0_device
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def stream(self) -> Any:
        """The CUDA stream that computes now, None on the CPU."""
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def wait_for(self, transfer: Transfer) -> None:
        """Order what computes next on level 0 behind ``transfer``."""
        stream = self.stream()
        if stream is None or transfer.done():
            started = time.perf_counter()
            transfer.wait_on(stream)
            self._stack.add_stall(time.perf_counter() - started)
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        transfer.wait_on(stream)
        after.record(stream)
        self._waits.append((before, after))
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._stack.add_stall(before.elapsed_time(after) / 1e3)
