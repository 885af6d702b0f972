"""Updates on a GPU: queues that are CUDA streams, joined by events, and a lane that fills them by address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from vblackwell.kernels.optimizer.adamw import Addresses, adamw_at
from vblackwell.kernels.runtime.launch import copy_async
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import EventTransfer, copy_streams, delayed, transfer_delay
from vblackwell.offload.layout.groups import element_type, parts_of
from vblackwell.offload.layout.placement import num_buffers
from vblackwell.offload.movement.lane import (
    Copied,
    Filled,
    Lane,
    LaneEnd,
    LaneJob,
    Mark,
    Pairs,
    Queues,
    Wanted,
    WorkerQueues,
    bytes_of,
)
from vblackwell.offload.movement.state import Worker
from vblackwell.offload.storage.staging import Stage
from vblackwell.offload.storage.storage import Ranges, Storage

TURN_BYTES = 256  # the first of a piece, copied by another stream


@cache
def lane_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Three queues and the two that yield, once a device: the allocator keeps a pool for every stream it has seen."""
    return tuple(torch.cuda.Stream(device) for _ in range(5))


def _recorded(stream: torch.cuda.Stream, **options: bool) -> torch.cuda.Event:
    event = torch.cuda.Event(**options)
    event.record(stream)
    return event


class CudaQueues(Queues):
    """Streams of ``device``. What is queued is launched at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states_in, self.update, self.states_out, yield_in, yield_out = lane_streams(device)
        self._yields = {self.states_in: yield_in, self.states_out: yield_out}

    def computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def leaving(self) -> torch.cuda.Stream:
        return copy_streams(self.device).d2h

    def loading(self) -> Sequence[torch.cuda.Stream]:
        streams = copy_streams(self.device)
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

    def copy_at(self, queue: torch.cuda.Stream, copies: Sequence[tuple[int, int, int]]) -> Copied:
        """`copy` on the current device by ``(target, source, bytes)``, after copies that other streams have ready.

        The transfer's clock starts when it has its turn.
        """
        if delayed():
            with torch.cuda.stream(queue):
                transfer_delay("stream")
        (target, source, num_bytes), *others = copies
        first = min(num_bytes, TURN_BYTES)
        self._copy_yielding(queue, target, source, first)
        start, handle = _recorded(queue, enable_timing=True), queue.cuda_stream
        if num_bytes > first:
            others.insert(0, (target + first, source + first, num_bytes - first))
        for copy in others:
            copy_async(*copy, handle)
        end = _recorded(queue, enable_timing=True)
        return Copied(end, EventTransfer(start, end, ()))

    def _copy_yielding(self, queue: torch.cuda.Stream, target: int, source: int, num_bytes: int) -> None:
        """Copy in a separate stream, before what ``queue`` gets next, so that copies of other streams get their turn.

        A copy engine stays with a stream that has a copy ready, and comes back to it where that waits for events alone,
        of however many streams: the weights of the next group were seen to wait 106 ms for the states of four. A copy
        of another stream between two of its own makes the engine go round; it costs 12 us (docs/journal/offload.md).
        """
        other = self._yields[queue]
        other.wait_event(_recorded(queue))
        if delayed():
            with torch.cuda.stream(other):
                transfer_delay("stream")
        copy_async(target, source, num_bytes, other.cuda_stream)
        queue.wait_event(_recorded(other))


class CudaLane(Lane):
    """`Lane` on streams, without a tensor for every piece: a group is dozens of copies and launches on the host."""

    _queues: CudaQueues

    def submit(self, job: LaneJob) -> LaneEnd:
        with torch.cuda.device(self._queues.device):
            return super().submit(job)

    def pump(self) -> None:
        with torch.cuda.device(self._queues.device):
            super().pump()

    def _fill(self, wanted: Wanted, buffer: torch.Tensor, sources: Ranges, far: Mapping[str, torch.Tensor]) -> Copied:
        address = buffer.data_ptr()
        copies = [
            (address + place.start, self._address(sources[kind], far, wanted, kind), place.stop - place.start)
            for kind, place in wanted.places.items()
        ]
        return self._queues.copy_at(self._queues.states_in, copies)

    def _pass(self, job: LaneJob, filled: Filled, targets: Ranges, far: Mapping[str, torch.Tensor]) -> Mark:
        wanted, group = filled.wanted, job.group
        if group.formats.packed or self._is_here(group):
            return super()._pass(job, filled, targets, far)
        queues = self._queues
        held = self._held(job, filled)
        self._launch(job, wanted, held)
        computed = queues.mark(queues.update)
        queues.states_out.wait_event(computed)
        copies = [
            (self._address(target, far, wanted, kind), held[kind], bytes_of(group, kind, len(wanted.piece)))
            for kind, target in targets.items()
        ]
        copied = queues.copy_at(queues.states_out, copies)
        self._count(
            copied,
            [(0, self._level_of(target), copy[2]) for target, copy in zip(targets.values(), copies, strict=True)],
        )
        return copied.end

    @staticmethod
    def _address(reservation: Reservation, far: Mapping[str, torch.Tensor], wanted: Wanted, kind: str) -> int:
        """Where the bytes of ``wanted`` are in a range, or in the ``far`` memory that stands for it."""
        base = far[kind].data_ptr() if kind in far else reservation.address
        return base + bytes_of(wanted.group, kind, wanted.piece.start)

    @staticmethod
    def _held(job: LaneJob, filled: Filled) -> dict[str, int]:
        """The addresses on level 0 of a piece's bytes, by kind; ``fresh`` is the gradient that never left."""
        group, start, base = job.group, filled.wanted.piece.start, filled.buffer.data_ptr()
        held = {kind: base + place.start for kind, place in filled.wanted.places.items()}
        if job.weight is not None:
            held["weight"] = job.weight.data_ptr() + bytes_of(group, "weight", start)
        if job.gradient is not None:
            held["fresh"] = job.gradient.data_ptr() + bytes_of(group, "gradient", start)
        return held

    def _launch(self, job: LaneJob, wanted: Wanted, held: Mapping[str, int]) -> None:
        """Queue AdamW on every parameter's share of the piece."""
        group, piece = wanted.group, wanted.piece
        compute_dtype, kind = group.slots[0].dtype, job.gradient_kind
        on_host = None if kind is None else (held[kind], element_type(kind, compute_dtype))
        fresh = None if job.gradient is None else (held["fresh"], compute_dtype)
        first, second = (on_host, None) if fresh is None else (fresh, on_host)
        assert first is not None, "a gradient is on level 0 or in host memory"
        factor = 0 if job.factor is None else job.factor.data_ptr()
        for slot, start, stop in parts_of(group, piece):
            if slot not in job.numbers:
                continue
            offset = start - piece.start
            at = Addresses(
                held["weight"] + offset * compute_dtype.itemsize,
                held["remainder"] + offset * 2 if "remainder" in held else 0,
                held["exp_avg"] + offset * 4,
                held["exp_avg_sq"] + offset * 4,
                first[0] + offset * first[1].itemsize,
                0 if second is None else second[0] + offset * second[1].itemsize,
                factor,
                0,
            )
            adamw_at(
                at,
                stop - start,
                job.numbers[slot],
                first[1],
                None if second is None else second[1],
                self._queues.update,
            )


def make_lane(stack: VGPUStack, storage: Storage, ring: Reservation, worker: Worker, least_bytes: int) -> Lane:
    """The lane of a model whose level 0 holds ``ring``, in buffers of at least ``least_bytes``."""
    memory = ring.view()
    assert memory is not None, "level 0 is addressable"
    count = num_buffers(memory.numel(), least_bytes)
    stage = Stage(storage) if any(level.device is None for level in stack.levels) else None
    if memory.is_cuda:
        return CudaLane(stack, storage, memory, count, CudaQueues(memory.device), stage, worker)
    return Lane(stack, storage, memory, count, WorkerQueues(worker), stage, worker)
