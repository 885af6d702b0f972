"""Tokens to the device and losses from it, past everything else that is being copied.

A copy that the computing stream waits for holds up all after it, and where weights are streamed there is always a
queue at the copy engines: tokens that are sent when a step begins, and a loss that is read when it ends, were seen to
wait 15 ms each behind the states of a group (docs/journal/offload.md). On a separate stream they start as soon as
the host asks, and a host that need not wait asks early.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Sent:
    """A tensor on its way to ``device`` from now on; on a CPU it is there."""

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self._tensor = tensor
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            stream = _side_stream(device)
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            with torch.cuda.stream(stream):
                self._tensor = pinned.to(device, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()

    def arrived(self) -> torch.Tensor:
        """The tensor, for what the current stream queues from now on."""
        if self._event is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._event)
            self._tensor.record_stream(stream)
        return self._tensor


class LateScalar:
    """A one-element tensor on its way to the host from now on."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value.detach()
        self._event: torch.cuda.Event | None = None
        if value.is_cuda:
            stream = _side_stream(value.device)
            stream.wait_stream(torch.cuda.current_stream(value.device))
            with torch.cuda.stream(stream):
                self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                self._host.copy_(self._value, non_blocking=True)
                self._value.record_stream(stream)
                self._event = torch.cuda.Event()
                self._event.record()

    def read(self) -> float:
        """The number; waits for what computes it, and for nothing that was queued after that."""
        if self._event is None:
            return float(self._value)
        self._event.synchronize()
        return float(self._host)
