"""Updates on a GPU: queues that are CUDA streams, joined by events, and a lane that launches AdamW by address."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from vblackwell.kernels.optimizer.adamw import Addresses, adamw_at
from vblackwell.kernels.runtime.launch import copy_async
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import EventTransfer, copy_streams, delayed, transfer_delay
from vblackwell.offload.layout.groups import Piece, bytes_of, element_type, parts_of
from vblackwell.offload.layout.placement import num_buffers
from vblackwell.offload.movement.lane import Copies, Filled, Lane, LaneEnd, LaneJob, Queues, WorkerQueues
from vblackwell.offload.movement.state import Worker
from vblackwell.offload.storage.storage import Storage

TURN_BYTES = 256  # the first of a piece, copied by another stream


@cache
def lane_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Three queues and the two that yield, once a device: the allocator keeps a pool for every stream it has seen."""
    return tuple(torch.cuda.Stream(device) for _ in range(5))


def _recorded(stream: torch.cuda.Stream, **options: bool) -> torch.cuda.Event:
    event = torch.cuda.Event(**options)
    event.record(stream)
    return event


def _hold_back(stream: torch.cuda.Stream) -> None:
    if delayed():
        with torch.cuda.stream(stream):
            transfer_delay("stream")


class CudaQueues(Queues):
    """Streams of ``device``. What is queued is launched at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states_in, self.update, self.states_out, yield_in, yield_out = lane_streams(device)
        streams = copy_streams(device)
        self.leaving, self.loading = streams.d2h, (streams.h2d, streams.d2d)  # from RAM, or from level 0 itself
        self._yields = {self.states_in: yield_in, self.states_out: yield_out}

    def computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def mark(self, queue: torch.cuda.Stream, *, long: bool = False) -> Transfer:
        """See `Queues.mark`. A thread that waits for long sleeps, and wakes up to 0.5 ms late."""
        return EventTransfer(_recorded(queue, blocking=long))

    def run(self, queue: torch.cuda.Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(queue):
            work()

    def copy(self, queue: torch.cuda.Stream, copies: Copies, *memory: Any) -> Transfer:
        """See `Queues.copy`; on the current device, after copies that other streams have ready.

        A copy engine stays with a stream that has a copy ready, and comes back to it where that waits for events alone,
        of however many streams: the weights of the next group were seen to wait 106 ms for the states of four. A copy
        of another stream between two of its own makes the engine go round; it costs 12 us (docs/journal/offload.md). So
        the first bytes go through a separate stream. The clock starts when the rest has its turn.
        """
        _hold_back(queue)
        (target, source, num_bytes), *others = copies
        first, other = min(num_bytes, TURN_BYTES), self._yields[queue]
        other.wait_event(_recorded(queue))
        _hold_back(other)
        copy_async(target, source, first, other.cuda_stream)
        queue.wait_event(_recorded(other))
        if num_bytes > first:
            others.insert(0, (target + first, source + first, num_bytes - first))
        start, handle = _recorded(queue, enable_timing=True), queue.cuda_stream
        for copy in others:
            copy_async(*copy, handle)
        return EventTransfer(_recorded(queue, enable_timing=True), start)


class CudaLane(Lane):
    """`Lane` on streams, without a tensor for every piece: a group is dozens of copies and launches on the host."""

    _queues: CudaQueues

    def submit(self, job: LaneJob) -> LaneEnd:
        with torch.cuda.device(self._queues.device):
            if job.factor is not None:
                job.factor.record_stream(self._queues.update)
            return super().submit(job)

    def pump(self) -> None:
        with torch.cuda.device(self._queues.device):
            super().pump()

    def _compute(self, job: LaneJob, piece: Piece, filled: Filled | None, held: Mapping[str, int]) -> None:
        group, dtype = job.group, job.group.slots[0].dtype
        if group.formats.packed or self._is_here(group):
            return super()._compute(job, piece, filled, held)
        gradients = list[tuple[int, torch.dtype]]()  # the fresh one, which never left, first
        if job.gradient is not None:
            gradients.append((job.gradient.data_ptr() + bytes_of(group, "gradient", piece.start), dtype))
        if job.gradient_kind is not None:
            gradients.append((held[job.gradient_kind], element_type(job.gradient_kind, dtype)))
        (gradient, gradient_dtype), (previous, previous_dtype) = [*gradients, (0, None)][:2]
        assert gradient_dtype is not None, "a gradient is on level 0 or in host memory"
        for slot, start, stop in parts_of(group, piece):
            if slot not in job.numbers:
                continue
            offset = start - piece.start
            at = Addresses(
                held["weight"] + offset * dtype.itemsize,
                held["remainder"] + offset * 2 if "remainder" in held else 0,
                held["exp_avg"] + offset * 4,
                held["exp_avg_sq"] + offset * 4,
                gradient + offset * gradient_dtype.itemsize,
                0 if previous_dtype is None else previous + offset * previous_dtype.itemsize,
                0 if job.factor is None else job.factor.data_ptr(),
                0,
            )
            adamw_at(at, stop - start, job.numbers[slot], gradient_dtype, previous_dtype, self._queues.update)


def make_lane(stack: VGPUStack, storage: Storage, ring: Reservation, worker: Worker, least_bytes: int) -> Lane:
    """The lane of a model whose level 0 holds ``ring``, in buffers of at least ``least_bytes``."""
    memory = ring.bytes
    count = num_buffers(memory.numel(), least_bytes)
    if memory.is_cuda:
        return CudaLane(stack, storage, memory, count, CudaQueues(memory.device), worker)
    return Lane(stack, storage, memory, count, WorkerQueues(worker), worker)
