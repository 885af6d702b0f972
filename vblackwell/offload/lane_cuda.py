"""`Lane` on a GPU: three CUDA streams, each in its own order, joined by events.

A buffer of the ring is filled on ``states_in``, updated on ``update`` and emptied on ``states_out``; whoever fills it next waits, on
the device, for the event behind its emptying. So the host queues a whole group at once and goes on launching the model's kernels, and
the ring runs ahead of backward by as much as it holds.

A piece is brought up before its gradient exists (`pump`) if the last step tells which group comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from vblackwell.memory.stack import Reservation, VGPUStack
from vblackwell.memory.streams import copy_streams
from vblackwell.memory.transfer import EventTransfer, transfer_delay
from vblackwell.offload.groups import Group
from vblackwell.offload.home import Homes
from vblackwell.offload.lane import Buffer, Lane, LaneEnd, LaneJob, WorkerLane, cut, state_kinds
from vblackwell.offload.pieces import Piece, num_elements, pieces_of
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


def mark(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    """An event behind everything that ``stream`` has now."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


@dataclass(frozen=True)
class Wanted:
    """A piece that comes up, and the kinds of it."""

    group: Group
    piece: Piece
    kinds: tuple[str, ...]


@dataclass(eq=False)
class Filled:
    """A buffer that is being filled; ``arrived`` is behind the copies."""

    wanted: Wanted
    buffer: Buffer
    arrived: torch.cuda.Event


def make_lane(stack: VGPUStack, homes: Homes, ring: Reservation, worker: Worker) -> Lane:
    """The lane of a model whose level 0 holds ``ring``."""
    memory = ring.view()
    assert memory is not None, "level 0 is addressable"
    count = num_buffers(memory.numel())
    return CudaLane(stack, homes, memory, count) if memory.is_cuda else WorkerLane(stack, homes, memory, count, worker)


class CudaLane(Lane):
    """See the module's text."""

    def __init__(self, stack: VGPUStack, homes: Homes, memory: torch.Tensor, num_buffers: int) -> None:
        super().__init__(stack, homes, memory, num_buffers)
        self._device = memory.device
        self._streams = lane_streams(memory.device)
        self._free: deque[tuple[Buffer, torch.cuda.Event | None]] = deque((buffer, None) for buffer in self._ring)
        self._ahead: deque[Filled] = deque()
        self._expected: deque[Wanted] = deque()
        self._stored: dict[int, torch.cuda.Event] = {}
        self._last_sent: torch.cuda.Event | None = None
        # What jobs read and write on level 0: nobody may get its memory before the device is done with it.
        self._in_use: deque[tuple[torch.cuda.Event, Any]] = deque()
        memory.zero_()
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def expect(self, groups: Iterable[Group]) -> None:
        self._drop_ahead()
        self._expected.clear()
        for group in groups:
            self._expected.extend(self._pieces(group, tuple(self.states_of(group))))

    def states_of(self, group: Group) -> list[str]:
        return [] if self._is_here(group) else state_kinds(group, self._homes)

    def _is_here(self, group: Group) -> bool:
        return self._homes.range(group, "weight").level == 0

    def _pieces(self, group: Group, kinds: tuple[str, ...]) -> list[Wanted]:
        if not kinds:
            return []
        return [Wanted(group, piece, kinds) for piece in pieces_of(group, self.most_elements(group, kinds))]

    def pump(self) -> None:
        while self._free and self._expected:
            wanted = self._expected.popleft()
            sources = {kind: self._homes.range(wanted.group, kind) for kind in wanted.kinds}
            self._ahead.append(self._bring(wanted, sources))

    def submit(self, job: LaneJob) -> LaneEnd:
        group, streams = job.group, self._streams
        self._sweep()
        pieces = self._pieces(group, tuple(self.loads_of(job)))
        next_up = self._ahead[0].wanted if self._ahead else self._expected[0] if self._expected else None
        if pieces and next_up is not None and next_up != pieces[0]:
            self.expect(())  # the prediction was wrong
        streams.update.wait_stream(torch.cuda.current_stream(self._device))  # weights, gradient and factor
        if job.gradient is None:  # it is on its way home over this stream
            streams.states_in.wait_stream(copy_streams(self._device).d2h)
        if job.last_load is not None:
            job.last_load.wait_on(streams.states_out)
            job.last_load.wait_on(streams.update)  # it may be what brings ``job.weight``
        if not pieces:
            self._update_here(job)
        for wanted in pieces:
            filled = self._take(wanted, job)
            streams.update.wait_event(filled.arrived)
            arrived = dict(filled.buffer.views)
            if self._is_here(group):
                arrived |= self._views_here(job, wanted.piece)
            with torch.cuda.stream(streams.update):
                found = self.arithmetic(job, wanted.piece, arrived)
                computed = mark(streams.update)
            self._send(job, wanted.piece, found, computed)
            self._free.append((filled.buffer, self._last_sent or computed))
            self.pump()
        stored = mark(streams.states_out)
        self._stored[group.index] = stored
        self._in_use.append((stored, (job.weight, job.gradient, job.factor)))
        return LaneEnd(EventTransfer.at(mark(streams.update)), EventTransfer.at(stored))

    def _views_here(self, job: LaneJob, piece: Piece) -> dict[str, torch.Tensor]:
        """The states of a group that lives on level 0, where they are."""
        return {
            kind: cut(self._bytes(job.sources[kind]), job.group, kind, piece)
            for kind in state_kinds(job.group, self._homes)
        }

    def _update_here(self, job: LaneJob) -> None:
        """Everything is on level 0: one piece, nothing moves but the weights, home."""
        streams, piece = self._streams, Piece(0, num_elements(job.group))
        with torch.cuda.stream(streams.update):
            found = self.arithmetic(job, piece, self._views_here(job, piece))
            computed = mark(streams.update)
        self._send(job, piece, found, computed)

    def _sweep(self) -> None:
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()

    def _take(self, wanted: Wanted, job: LaneJob) -> Filled:
        if self._ahead:
            filled = self._ahead.popleft()
            assert filled.wanted == wanted, "the ring is filled in order"
            return filled
        if self._expected and self._expected[0] == wanted:
            self._expected.popleft()
        return self._bring(wanted, job.sources)

    def _bring(self, wanted: Wanted, sources: dict[str, Reservation]) -> Filled:
        """Start copying ``wanted`` up into the next buffer of the ring."""
        group, piece = wanted.group, wanted.piece
        buffer, emptied = self._free.popleft()
        self.lay_out(buffer, group, wanted.kinds, piece)
        stream = self._streams.states_in
        if emptied is not None:
            stream.wait_event(emptied)
        if (last := self._stored.get(group.index)) is not None:
            stream.wait_event(last)
        pairs = [
            (buffer.views[kind], cut(self._bytes(sources[kind]), group, kind, piece), sources[kind].level, 0)
            for kind in wanted.kinds
        ]
        return Filled(wanted, buffer, self._copy(stream, pairs))

    def _send(self, job: LaneJob, piece: Piece, found: dict[str, torch.Tensor], computed: torch.cuda.Event) -> None:
        """Start copying what was computed home."""
        stream = self._streams.states_out
        stream.wait_event(computed)
        targets = {kind: cut(self._bytes(job.targets[kind]), job.group, kind, piece) for kind in found}
        pairs = [
            (targets[kind], values, 0, job.targets[kind].level)
            for kind, values in found.items()
            if targets[kind].data_ptr() != values.data_ptr()
        ]
        self._last_sent = self._copy(stream, pairs) if pairs else None

    def _copy(
        self, stream: torch.cuda.Stream, pairs: list[tuple[torch.Tensor, torch.Tensor, int, int]]
    ) -> torch.cuda.Event:
        """Queue copies of ``(target, source, from level, to level)`` and count them; the event is behind the last."""
        with torch.cuda.stream(stream):
            transfer_delay("stream")
            start = mark(stream, timed=True)
            for target, source, _, _ in pairs:
                target.copy_(source, non_blocking=True)
            end = mark(stream, timed=True)
        for index, (target, _, from_level, to_level) in enumerate(pairs):
            if index == 0:
                self._stack.count_transfer(from_level, to_level, target.numel(), EventTransfer(start, end, ()))
            else:
                self._stack.count_link(from_level, to_level, target.numel())
        return end

    @staticmethod
    def _bytes(reservation: Reservation) -> torch.Tensor:
        view = reservation.view()
        assert view is not None, "groups with a range that is not addressable are updated at home"
        return view

    def _drop_ahead(self) -> None:
        for ahead in self._ahead:
            self._free.append((ahead.buffer, ahead.arrived))
        self._ahead.clear()

    def order_loads(self, end: LaneEnd) -> None:
        streams = copy_streams(self._device)
        for stream in (streams.h2d, streams.d2d):  # groups are loaded from RAM, or from level 0 itself
            end.stored.wait_on(stream)

    def drain(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self._sweep()
