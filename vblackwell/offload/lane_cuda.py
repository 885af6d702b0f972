"""The queues of updates on a GPU: three CUDA streams, each in its own order, joined by events; and the choice of a lane's queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from vblackwell.memory.level import Transfer
from vblackwell.memory.stack import Reservation, VGPUStack
from vblackwell.memory.streams import copy_streams
from vblackwell.memory.transfer import EventTransfer, transfer_delay
from vblackwell.offload.home import Homes
from vblackwell.offload.lane import Lane
from vblackwell.offload.lane_queued import QueuedLane
from vblackwell.offload.lane_queues import Copied, Pairs, Queues, WorkerQueues
from vblackwell.offload.stage import Stage
from vblackwell.offload.update_place import num_buffers
from vblackwell.offload.worker import Worker


class LaneStreams(NamedTuple):
    """The queues of one device's updates."""

    states_in: torch.cuda.Stream
    update: torch.cuda.Stream
    states_out: torch.cuda.Stream


@cache
def lane_streams(device: torch.device) -> LaneStreams:
    """Made once a device: the allocator keeps a pool for every stream that it has seen."""
    return LaneStreams(*(torch.cuda.Stream(device) for _ in range(3)))


def _recorded(stream: torch.cuda.Stream, **options: bool) -> torch.cuda.Event:
    event = torch.cuda.Event(**options)
    event.record(stream)
    return event


class CudaQueues(Queues):
    """Streams of ``device``. What is queued is launched at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.states_in, self.update, self.states_out = lane_streams(device)

    def computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def leaving(self) -> torch.cuda.Stream:
        return copy_streams(self._device).d2h

    def loading(self) -> Sequence[torch.cuda.Stream]:
        streams = copy_streams(self._device)
        return streams.h2d, streams.d2d  # from RAM, or from level 0 itself

    def mark(self, queue: torch.cuda.Stream) -> torch.cuda.Event:
        return _recorded(queue)

    def waiting_mark(self, queue: torch.cuda.Stream) -> torch.cuda.Event:
        return _recorded(queue, blocking=True)  # its waiter sleeps, and wakes up to 0.5 ms late

    def transfer(self, end: Any) -> Transfer:
        return EventTransfer.at(end)

    def run(self, queue: torch.cuda.Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(queue):
            work()

    def copy(self, queue: torch.cuda.Stream, pairs: Callable[[], Pairs]) -> Copied:
        with torch.cuda.stream(queue):
            transfer_delay("stream")
            start = _recorded(queue, enable_timing=True)
            for target, source in pairs():
                target.copy_(source, non_blocking=True)
            end = _recorded(queue, enable_timing=True)
        return Copied(end, EventTransfer(start, end, ()))


def make_lane(stack: VGPUStack, homes: Homes, ring: Reservation, worker: Worker, least_bytes: int) -> Lane:
    """The lane of a model whose level 0 holds ``ring``, in buffers of at least ``least_bytes``."""
    memory = ring.view()
    assert memory is not None, "level 0 is addressable"
    queues = CudaQueues(memory.device) if memory.is_cuda else WorkerQueues(worker)
    return QueuedLane(stack, homes, memory, num_buffers(memory.numel(), least_bytes), queues, Stage(homes), worker)
