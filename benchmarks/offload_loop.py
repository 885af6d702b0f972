"""What a careful training loop does around its steps: tokens ahead, losses behind, and a clock that stops nobody.

A copy that the computing stream waits for holds up everything behind it, and where weights are streamed there is always a queue at the
copy engines: a loss read with ``.item()`` at the end of a step waits for the states of the last group, tokens for those of the next.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import torch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Feed:
    """Batches on the device, each sent one step ahead of its use.

    Args:
        batches: (count, batch, seq) on the CPU.
    """

    def __init__(self, batches: torch.Tensor, device: torch.device) -> None:
        self._batches = batches.pin_memory() if device.type == "cuda" else batches
        self._device = device

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self._device.type != "cuda":
            yield from self._batches
            return
        coming = self._send(0)
        for number in range(len(self._batches)):
            ids_BS, sent = coming
            if number + 1 < len(self._batches):
                coming = self._send(number + 1)
            sent.wait()
            ids_BS.record_stream(torch.cuda.current_stream(self._device))
            yield ids_BS

    def _send(self, number: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        stream = _side_stream(self._device)
        with torch.cuda.stream(stream):
            ids_BS = self._batches[number].to(self._device, non_blocking=True)
            return ids_BS, stream.record_event()


class LateLoss:
    """A loss on its way to the host."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._loss = loss.detach()
        self._event: torch.cuda.Event | None = None
        if loss.is_cuda:
            stream = _side_stream(loss.device)
            stream.wait_stream(torch.cuda.current_stream(loss.device))
            with torch.cuda.stream(stream):
                self._host = torch.empty(self._loss.shape, dtype=self._loss.dtype, pin_memory=True)
                self._host.copy_(self._loss, non_blocking=True)
                self._loss.record_stream(stream)
                self._event = stream.record_event()

    def read(self) -> float:
        """The loss; waits for its step."""
        if self._event is None:
            return float(self._loss)
        self._event.synchronize()
        return float(self._host)


class Clock:
    """Moments on the device's computing stream, or on the host where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        """Now, behind what is queued."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def intervals(self) -> list[float]:
        """Seconds from each mark to the next; all must have passed."""
        return [
            before.elapsed_time(after) / 1e3 if isinstance(before, torch.cuda.Event) else after - before  # pyright: ignore
            for before, after in zip(self._marks, self._marks[1:], strict=False)
        ]
