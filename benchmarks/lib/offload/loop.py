"""What a careful training loop does around its steps: tokens ahead, and a clock that stops nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from vblackwell.train.trainer import send


class Feed:
    """Batches on the device, each sent one step ahead of its use.

    Args:
        batches: (count, batch, seq) on the CPU.
    """

    def __init__(self, batches: torch.Tensor, device: torch.device) -> None:
        self._batches = batches.pin_memory() if device.type == "cuda" else batches
        self._device = device

    def __iter__(self) -> Iterator[torch.Tensor]:
        coming = send(self._batches[0], self._device)
        for number in range(len(self._batches)):
            sent = coming
            if number + 1 < len(self._batches):
                coming = send(self._batches[number + 1], self._device)
            yield sent()


class Clock:
    """Moments on the device's computing stream, or on the host where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        """Now, after what is queued."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def interval(self, index: int) -> float:
        """Seconds from mark ``index`` to the next, waiting until that has passed."""
        before, after = self._marks[index : index + 2]
        if isinstance(before, torch.cuda.Event):
            after.synchronize()  # pyright: ignore
            return before.elapsed_time(after) / 1e3  # pyright: ignore
        return after - before  # pyright: ignore

    def intervals(self) -> list[float]:
        """Seconds from each mark to the next."""
        return [self.interval(index) for index in range(len(self._marks) - 1)]
