"""`Lane` as work in three queues, joined by marks.

A buffer of the ring is filled in ``states_in``, updated in ``update`` and emptied in ``states_out``; whoever fills it next waits, on
the device, for the mark behind its emptying. So the host queues a whole group at once and goes on launching the model's kernels, and
the ring runs ahead of backward by as much as it holds.

A piece is brought up before its gradient exists (`pump`) if the last step tells which group comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vblackwell.memory.stack import Reservation, VGPUStack
from vblackwell.offload.groups import Group
from vblackwell.offload.home import Homes
from vblackwell.offload.lane import Buffer, Lane, LaneEnd, LaneJob, cut, state_kinds
from vblackwell.offload.lane_queues import Copied, Mark, Queues
from vblackwell.offload.pieces import Piece, num_elements, pieces_of


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
    arrived: Mark


class QueuedLane(Lane):
    """See the module's text."""

    def __init__(self, stack: VGPUStack, homes: Homes, memory: torch.Tensor, num_buffers: int, queues: Queues) -> None:
        super().__init__(stack, homes, memory, num_buffers)
        self._queues = queues
        self._free: deque[tuple[Buffer, Mark | None]] = deque((buffer, None) for buffer in self._ring)
        self._ahead: deque[Filled] = deque()
        self._expected: deque[Wanted] = deque()
        self._stored: dict[int, Mark] = {}
        # What jobs read and write on level 0: nobody may get its memory before the device is done with it.
        self._in_use: deque[tuple[Mark, Any]] = deque()
        memory.zero_()
        for queue in queues.all:
            queues.follow(queue, queues.computing())

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
        group, queues = job.group, self._queues
        self._sweep()
        pieces = self._pieces(group, tuple(self.loads_of(job)))
        next_up = self._ahead[0].wanted if self._ahead else self._expected[0] if self._expected else None
        if pieces and next_up is not None and next_up != pieces[0]:
            self.expect(())  # the prediction was wrong
        queues.follow(queues.update, queues.computing())  # weights, gradient and factor
        if job.gradient_kind is not None:
            queues.follow(queues.states_in, queues.leaving())  # it is on its way home there
        if job.last_load is not None:
            job.last_load.wait_on(queues.states_out)
            job.last_load.wait_on(queues.update)  # it may be what brings ``job.weight``
        if not pieces:  # everything is on level 0: one piece, nothing moves but the weights, home
            everything = Piece(0, num_elements(group))
            self._send(job, everything, *self._compute(job, everything, self._views_here(job, everything)))
        for wanted in pieces:
            filled = self._take(wanted, job)
            queues.update.wait_event(filled.arrived)
            arrived = dict(filled.buffer.views)
            if self._is_here(group):
                arrived |= self._views_here(job, wanted.piece)
            emptied = self._send(job, wanted.piece, *self._compute(job, wanted.piece, arrived))
            self._free.append((filled.buffer, emptied))
            self.pump()
        stored = queues.mark(queues.states_out)
        self._stored[group.index] = stored
        self._in_use.append((stored, (job.weight, job.gradient, job.factor)))
        return LaneEnd(queues.transfer(queues.mark(queues.update)), queues.transfer(stored))

    def _compute(
        self, job: LaneJob, piece: Piece, arrived: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], Mark]:
        """Queue the arithmetic on one piece; what it gives when it has run, and the mark behind it."""
        queues = self._queues
        found: dict[str, torch.Tensor] = {}
        queues.run(queues.update, lambda: found.update(self.arithmetic(job, piece, arrived)))
        return found, queues.mark(queues.update)

    def _views_here(self, job: LaneJob, piece: Piece) -> dict[str, torch.Tensor]:
        """The states of a group that lives on level 0, where they are."""
        return {
            kind: cut(self._bytes(job.sources[kind]), job.group, kind, piece)
            for kind in state_kinds(job.group, self._homes)
        }

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
        queue = self._queues.states_in
        if emptied is not None:
            queue.wait_event(emptied)
        if (last := self._stored.get(group.index)) is not None:
            queue.wait_event(last)
        pairs = [(buffer.views[kind], cut(self._bytes(sources[kind]), group, kind, piece)) for kind in wanted.kinds]
        copied = self._queues.copy(queue, lambda: pairs)
        self._count(
            copied,
            [(sources[kind].level, 0, source.numel()) for kind, (_, source) in zip(wanted.kinds, pairs, strict=True)],
        )
        return Filled(wanted, buffer, copied.end)

    def _send(self, job: LaneJob, piece: Piece, found: dict[str, torch.Tensor], computed: Mark) -> Mark:
        """Start copying what was computed home; the mark behind the copies."""
        queue = self._queues.states_out
        queue.wait_event(computed)
        own = state_kinds(job.group, self._homes) if self._is_here(job.group) else []  # changed where they are
        targets = {
            kind: cut(self._bytes(target), job.group, kind, piece)
            for kind, target in job.targets.items()
            if kind not in own
        }
        copied = self._queues.copy(queue, lambda: [(target, found[kind]) for kind, target in targets.items()])
        self._count(copied, [(0, job.targets[kind].level, target.numel()) for kind, target in targets.items()])
        return copied.end

    def _count(self, copied: Copied, moved: list[tuple[int, int, int]]) -> None:
        """Count copies of ``(from level, to level, bytes)`` on their links; the first carries the time of all."""
        for index, (from_level, to_level, num_bytes) in enumerate(moved):
            if index == 0:
                self._stack.count_transfer(from_level, to_level, num_bytes, copied.transfer)
            else:
                self._stack.count_link(from_level, to_level, num_bytes)

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
        for queue in self._queues.loading():
            end.stored.wait_on(queue)

    def drain(self) -> None:
        for queue in self._queues.all:
            queue.synchronize()
        self._sweep()
