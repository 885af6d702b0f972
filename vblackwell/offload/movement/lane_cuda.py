"""`lane.py` on a GPU: its queues are streams, and AdamW is launched by address."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from vblackwell.kernels.optimizer.adamw import AdamWStep, Addresses, ThenAddresses, adamw_at, torch_order
from vblackwell.kernels.runtime.launch import copy_async
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import EventTransfer, copy_streams, current_stream, delayed, transfer_delay
from vblackwell.offload.layout.groups import OLD_GRADIENT, OLD_WEIGHT, Piece, bytes_of, element_type, parts_of
from vblackwell.offload.movement.lane import Copies, Filled, Lane, LaneEnd, LaneJob, Queues

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
        self.gradients_out, self.loading = streams.d2h, (streams.h2d, streams.d2d)  # from RAM, or from level 0 itself
        self._yields = {self.states_in: yield_in, self.states_out: yield_out}

    def computing(self) -> torch.cuda.Stream:
        return current_stream(self.device)

    def mark(self, queue: torch.cuda.Stream, *, long: bool = False) -> Transfer:
        """See `Queues.mark`. A thread that waits for long sleeps, and wakes up to 0.5 ms late."""
        return EventTransfer(_recorded(queue, blocking=long))

    def run(self, queue: torch.cuda.Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(queue):
            work()

    def copy(self, queue: torch.cuda.Stream, copies: Copies, *memory: Any) -> Transfer:
        """See `Queues.copy`; on the current device, after copies that other streams have ready.

        A copy engine prefers the stream that it served last, even one that waits for events: the weights of the next
        group waited 106 ms for the states of four. A copy by another stream between two of one stream's makes the
        engine serve all in turn, for 12 us (docs/journal/offload.md): so the first bytes go through a separate stream.
        The clock starts when the rest has its turn.
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


def runs_of(job: LaneJob, piece: Piece) -> list[tuple[AdamWStep, AdamWStep | None, int, int]]:
    """(numbers, those of the step that its states lack, start, stop) of what one launch of AdamW updates: parameters of
    ``piece`` next to each other with equal numbers, and the gaps between them.

    A gap is padding of fewer than 256 elements, of whatever was there before: copies and a disk's checksums take it
    along, all else goes by `Slot`, so that nobody minds what AdamW makes of it. A parameter whose last elements are
    torch's scalar loop is the last of its launch, where the kernel has that loop; it begins at the same element as in a
    launch of that parameter alone, because parameters and pieces start at multiples of torch's vectors.
    """
    found, tail_start, is_open = list[tuple[AdamWStep, AdamWStep | None, int, int]](), torch_order().tail_start, False
    for slot, start, stop in parts_of(job.group, piece):
        numbers = job.numbers.get(slot)
        if numbers is not None:
            both = numbers, None if job.behind is None else job.behind[slot]
            if is_open and both == found[-1][:2]:
                start = found.pop()[2]
            found.append((*both, start, stop))
        is_open = numbers is not None and tail_start(stop - start) == stop - start
    return found


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
        if group.formats.packed or self._is_resident(group):
            return super()._compute(job, piece, filled, held)
        gradients = list[tuple[int, torch.dtype]]()  # the fresh one, which never left, first
        if job.gradient is not None:
            gradients.append((job.gradient.data_ptr() + bytes_of(group, "gradient", piece.start), dtype))
        if job.gradient_kind is not None:
            gradients.append((held[job.gradient_kind], element_type(job.gradient_kind, dtype)))
        (gradient, gradient_dtype), (previous, previous_dtype) = [*gradients, (0, None)][:2]
        assert gradient_dtype is not None, "a gradient is on level 0 or in host memory"
        weight, fresh, ahead = held["weight"], gradient, 0
        if job.behind is not None:  # the weights that states belong to, and the gradient of the step that they lack
            weight, gradient, ahead = held[OLD_WEIGHT], held[OLD_GRADIENT], weight
        bases = (weight, held.get("remainder", 0), held["exp_avg"], held["exp_avg_sq"], gradient, previous)
        sizes = (dtype.itemsize, 2, 4, 4, gradient_dtype.itemsize, getattr(previous_dtype, "itemsize", 0))
        factor = 0 if job.factor is None else job.factor.data_ptr()
        for numbers, lacked, start, stop in runs_of(job, piece):
            offset = start - piece.start
            places = (base and base + offset * size for base, size in zip(bases, sizes, strict=True))
            at, then = Addresses._make((*places, factor, 0)), None
            if lacked is not None:
                narrow = offset * dtype.itemsize  # as both are
                then, numbers = ThenAddresses(ahead + narrow, fresh + narrow, numbers), lacked
            adamw_at(at, stop - start, numbers, gradient_dtype, previous_dtype, self._queues.update, then)
