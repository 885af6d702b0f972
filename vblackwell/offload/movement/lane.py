"""Updates on level 0: a group's optimizer states come up, AdamW runs there, and everything goes back to storage.

Weights and gradient are on level 0 already when the update runs after the group's backward; then only what AdamW keeps
next to them passes through: for bf16 weights with split masters 10 bytes a parameter in and 12 out (an update on the
CPU is what makes offloaded training slow). An update that comes later brings weights and gradient the same way.

Groups with 8-bit moments (`Formats`) are updated here with and without a GPU: `adamw8_piece` gives both the same bits.

States pass in pieces through a ring of buffers that is taken once. The order is that of three queues (`lane_queues`),
joined by marks: a buffer is filled in ``states_in``, updated in ``update`` and emptied in ``states_out``; what fills it
next waits, on the device, for the mark after its emptying. So the host queues a whole group at once and goes on
launching the model's kernels, and the ring runs ahead of backward by as much as it holds. A piece is brought up before
its gradient exists (`pump`) if the last step tells which group comes next.

Ranges on a disk are copied from and to the host memory in which the group is staged (`Stage`). Where they are not there
in time the host waits for the disk, which then is what the step waits for anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from vblackwell.kernels.optimizer.adamw import AdamWStep, adamw_piece
from vblackwell.kernels.optimizer.adamw8 import SCALE_BLOCK, adamw8_piece
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import (
    GRADIENTS,
    MIN_BUFFER_BYTES,
    MOMENTS,
    PACKED_MOMENTS,
    SCALES,
    Group,
    Piece,
    Slot,
    bytes_of,
    element_type,
    first_element,
    num_elements,
    parts_of,
    pieces_of,
)
from vblackwell.offload.movement.lane_queues import Copied, Mark, Queues
from vblackwell.offload.movement.worker import Worker
from vblackwell.offload.storage.ledger import Stamp
from vblackwell.offload.storage.staging import Ranges, Stage, Staged, on_disk
from vblackwell.offload.storage.storage import Storage

ALIGNMENT = 512


@dataclass(eq=False)
class LaneJob:
    """One update of a group on level 0.

    Attributes:
        numbers: what to update, with AdamW's numbers; the group's other parameters go through unchanged.
        weight: the group's flat compute weights on level 0, there after ``last_load`` at the latest, changed in place;
            None: they come from storage.
        gradient: the group's flat gradient on level 0 in compute type; None: it comes from storage.
        gradient_kind: which range holds it then, or, next to a ``gradient`` on level 0, the sum of earlier
            micro-batches; None: no range does.
        factor: fp32 scalar that gradients are multiplied by; None for 1.
        sources, targets: ranges that are read and written, by kind; the targets are the group's own, or take their
            place at the step.
        last_load: the newest copy of the group's compute weights to level 0; what it reads is not written before it is
            over.
    """

    group: Group
    numbers: dict[Slot, AdamWStep]
    sources: dict[str, Reservation]
    targets: dict[str, Reservation]
    weight: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    gradient_kind: str | None = None
    factor: torch.Tensor | None = None
    last_load: Transfer | None = None


@dataclass(eq=False)
class LaneEnd:
    """When an update is over.

    Attributes:
        computed: on level 0. stored: in storage, too. weights: the compute weights are in storage, which loads of them
            wait for; states may be on their way to a disk for long.
    """

    computed: Transfer
    stored: Transfer
    weights: Transfer


@dataclass(eq=False)
class Buffer:
    """One place of the ring, and how what is in it is laid out."""

    memory: torch.Tensor
    places: Mapping[str, slice] = field(default_factory=dict)

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """What is in it, by kind."""
        return {kind: self.memory[place] for kind, place in self.places.items()}


def cut(flat: torch.Tensor, group: Group, kind: str, piece: Piece) -> torch.Tensor:
    """The bytes of ``piece`` in a group's flat range of ``kind``."""
    return flat[bytes_of(group, kind, piece.start) : bytes_of(group, kind, piece.stop)]


def typed(flat: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
    """Bytes of a range of ``kind`` as its elements."""
    return flat.view(element_type(kind, group.slots[0].dtype))


def stretch(values: torch.Tensor, kind: str, start: int, stop: int) -> torch.Tensor:
    """Elements ``start`` (a multiple of 256) to ``stop`` of `typed` bytes; of scales, those that they share."""
    return values[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)] if kind in SCALES else values[start:stop]


def update_part(
    slot: Slot, part: Mapping[str, torch.Tensor], gradient: torch.Tensor, numbers: AdamWStep, *,
    previous: torch.Tensor | None = None, factor: torch.Tensor | None = None, offset: int = 0,
) -> None:  # fmt: skip
    """AdamW in place on a part of a parameter, in the formats of its group.

    Args:
        part: ``weight``, ``remainder`` if there is one, and the moments, each (n,) in its range's type; scales (ceil(n
            / 256),).
        gradient: (n,) in compute type or fp32.
        previous: (n,), the sum of gradients of earlier micro-batches; None for 0.
        factor: fp32 scalar that the sum is multiplied by; None for 1.
        offset: the part's first element within the parameter.
    """
    formats = slot.group.formats
    weight, remainder = part["weight"], part.get("remainder")
    if formats.packed:
        codes1, scales1, codes2, scales2 = (part[kind] for kind in PACKED_MOMENTS)
        adamw8_piece(
            weight, remainder, codes1, scales1, codes2, scales2, gradient, numbers, previous=previous, factor=factor,
            seed=formats.seed_of(slot.name), offset=offset,
        )  # fmt: skip
    else:
        exp_avg, exp_avg_sq = (part[kind] for kind in MOMENTS)
        adamw_piece(weight, remainder, exp_avg, exp_avg_sq, gradient, numbers, previous=previous, factor=factor)


@dataclass(frozen=True)
class Wanted:
    """A piece that comes up, and the kinds of it."""

    group: Group
    piece: Piece
    kinds: tuple[str, ...]
    places: dict[str, slice] = field(compare=False, repr=False)  # in a buffer


@dataclass(eq=False)
class Filled:
    """A buffer that is being filled from ranges as ``stamps`` tell; ``arrived`` is after the copies."""

    wanted: Wanted
    buffer: Buffer
    stamps: tuple[Stamp, ...]
    arrived: Mark


class _Idle(Transfer):
    """Everything that queues have been given, whenever it is asked about."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def wait(self) -> None:
        for queue in self._queues.all:
            with suppress(Exception):  # of what was queued: its owner has heard of it
                queue.synchronize()

    def wait_on(self, stream: Any) -> None:
        self.wait()

    def done(self) -> bool:
        return False


class Lane:
    """Runs `LaneJob`s in the order of submission.

    Args:
        memory: level-0 bytes that the ring is cut from, at least `smallest_buffer` of every group.
        num_buffers: places of the ring.
    """

    def __init__(
        self, stack: VGPUStack, storage: Storage, memory: torch.Tensor, num_buffers: int, queues: Queues, stage: Stage,
        worker: Worker,
    ) -> None:  # fmt: skip
        size = memory.numel() // num_buffers // ALIGNMENT * ALIGNMENT
        assert size >= MIN_BUFFER_BYTES, (memory.numel(), num_buffers)
        self._stack = stack
        self._storage = storage
        self._ring = [Buffer(memory[index * size : (index + 1) * size]) for index in range(num_buffers)]
        self._queues = queues
        self._stage = stage
        self._worker = worker
        self._free: deque[tuple[Buffer, Mark | None]] = deque((buffer, None) for buffer in self._ring)
        self._ahead: deque[Filled] = deque()
        self._expected: deque[Wanted] = deque()
        self._stored: dict[int, Mark] = {}
        self._cut: dict[tuple[int, tuple[str, ...]], list[Wanted]] = {}
        # The factors that jobs read: nobody may get their memory before the device is done with it.
        self._in_use: deque[tuple[Mark, Any]] = deque()
        # A model that dies between two steps leaves copies into the ring under way, of pieces that nobody takes.
        storage.in_flight.add(_Idle(queues))
        memory.zero_()
        for queue in queues.all:
            queues.follow(queue, queues.computing())

    def expect(self, groups: Iterable[Group]) -> None:
        """The groups whose updates come next, in order; their stored states do not change before. Only a prediction."""
        self._drop_ahead()
        self._expected.clear()
        for group in groups:
            self._expected.extend(self._pieces(group, tuple(self.states_of(group))))

    def states_of(self, group: Group) -> list[str]:
        """What AdamW keeps of ``group`` next to the compute weight, and not on level 0."""
        return [] if self._is_here(group) else self._storage.states_of(group)

    def _is_here(self, group: Group) -> bool:
        return self._storage.range(group, "weight").level == 0

    def loads_of(self, job: LaneJob) -> list[str]:
        """The kinds that come from storage."""
        found = self.states_of(job.group)
        if job.weight is None:
            found.append("weight")
        if job.gradient_kind is not None:
            found.append(job.gradient_kind)
        return found

    def most_elements(self, group: Group, kinds: Sequence[str]) -> int:
        """Elements of which all ``kinds`` fit one buffer."""
        room = self._ring[0].memory.numel() - ALIGNMENT * len(kinds)
        elements = room // sum(bytes_of(group, kind, SCALE_BLOCK) for kind in kinds) * SCALE_BLOCK
        return elements - elements % group.formats.cut

    @staticmethod
    def layout(group: Group, kinds: Sequence[str], piece: Piece) -> dict[str, slice]:
        """The part of a buffer that each kind gets, in bytes."""
        start, found = 0, {}
        for kind in kinds:
            num_bytes = bytes_of(group, kind, len(piece))
            found[kind] = slice(start, start + num_bytes)
            start += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return found

    @staticmethod
    def arithmetic(job: LaneJob, piece: Piece, arrived: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """AdamW on one piece that has ``arrived``, by kind; returns what is to be stored."""
        group = job.group
        found = dict(arrived)
        if job.weight is not None:
            found["weight"] = cut(job.weight, group, "weight", piece)
        on_host = None if job.gradient_kind is None else typed(found.pop(job.gradient_kind), group, job.gradient_kind)
        fresh = None if job.gradient is None else typed(cut(job.gradient, group, "gradient", piece), group, "gradient")
        gradient, previous = (on_host, None) if fresh is None else (fresh, on_host)
        assert gradient is not None, "a gradient is on level 0 or in host memory"
        elements = {kind: typed(flat, group, kind) for kind, flat in found.items()}
        for slot, start, stop in parts_of(group, piece):
            if slot not in job.numbers:
                continue
            own = slice(start - piece.start, stop - piece.start)
            part = {kind: stretch(values, kind, own.start, own.stop) for kind, values in elements.items()}
            update_part(
                slot, part, gradient[own], job.numbers[slot], previous=None if previous is None else previous[own],
                factor=job.factor, offset=start - first_element(slot),
            )  # fmt: skip
        return found

    def _pieces(self, group: Group, kinds: tuple[str, ...]) -> list[Wanted]:
        found = self._cut.get((group.index, kinds))
        if found is None:
            pieces = pieces_of(group, self.most_elements(group, kinds)) if kinds else []
            found = [Wanted(group, piece, kinds, self.layout(group, kinds, piece)) for piece in pieces]
            self._cut[group.index, kinds] = found
        return found

    def pump(self) -> None:
        """Bring up what the next updates will need, as far as the ring has room. Never blocks."""
        while self._free and self._expected:
            wanted = self._expected[0]
            sources = {kind: self._storage.range(wanted.group, kind) for kind in wanted.kinds}
            far = on_disk(sources)
            staged = self._stage.ready(wanted.group, sources) if far else None
            if staged is None and far:
                return
            self._expected.popleft()
            self._ahead.append(self._bring(wanted, sources, {} if staged is None else staged.views))

    def submit(self, job: LaneJob) -> LaneEnd:
        """Queue ``job``. What it reads on level 0 must be ordered after the current stream.

        The caller keeps the gradient until the update is ``computed``, the weights until it is ``stored``.
        """
        self._sweep()
        sources = {kind: job.sources[kind] for kind in self.loads_of(job)}
        staged = self._stage.take(
            job.group, {kind: source for kind, source in sources.items() if kind not in GRADIENTS}, job.targets
        )
        try:
            return self._submit(job, sources, staged)
        except BaseException:
            self._start_over()
            if staged is not None:
                self._stage.drop(staged)
            raise

    def _submit(self, job: LaneJob, sources: Ranges, staged: Staged | None) -> LaneEnd:
        group, queues = job.group, self._queues
        memory = self._far_memory(sources, staged)
        pieces = self._pieces(group, tuple(sources))
        own = self._storage.states_of(group) if self._is_here(group) else []  # changed where they are
        targets = {kind: target for kind, target in job.targets.items() if kind not in own}
        far = self._far_memory(targets, staged)
        queues.follow(queues.update, queues.computing())  # weights, gradient and factor
        if job.gradient_kind is not None:
            queues.follow(queues.states_in, queues.leaving())  # it is on its way out there
        if job.last_load is not None:
            job.last_load.wait_on(queues.states_out)
            job.last_load.wait_on(queues.update)  # it may be what brings ``job.weight``
        if not pieces:  # everything is on level 0: one piece, nothing moves but the weights, to storage
            everything = Piece(0, num_elements(group))
            self._send(
                group, everything, targets, far, *self._compute(job, everything, self._views_here(job, everything))
            )
        for wanted in pieces:
            filled = self._take(wanted, sources, memory)
            queues.update.wait_event(filled.arrived)
            self._free.append((filled.buffer, self._pass(job, filled, targets, far)))
            self.pump()
        if on_disk({kind: source for kind, source in sources.items() if kind in GRADIENTS}):
            queues.states_in.synchronize()  # the worker's staging memory, which it gets back now
        return self._end(job, staged)

    def _end(self, job: LaneJob, staged: Staged | None) -> LaneEnd:
        """All of ``job`` is queued."""
        queues = self._queues
        for target in job.targets.values():
            self._storage.ledger.changed(target)
        copied = queues.mark(queues.states_out)
        self._stored[job.group.index] = copied
        self._in_use.append((copied, job.factor))
        computed, weights = queues.transfer(queues.mark(queues.update)), queues.transfer(copied)
        if staged is None:
            return LaneEnd(computed, weights, weights)
        stored = self._stage.store(staged, job.targets, queues.transfer(queues.waiting_mark(queues.states_out)))
        return LaneEnd(computed, stored, stored if "weight" in on_disk(job.targets) else weights)

    def _far_memory(self, ranges: Ranges, staged: Staged | None) -> dict[str, torch.Tensor]:
        """The host memory of those ``ranges`` that copies cannot reach."""
        found = {}
        for kind, reservation in on_disk(ranges).items():
            if kind in GRADIENTS:  # only where not even gradients have room in RAM
                self._worker.drain()  # it lands them, and has the memory for them
                found[kind] = self._storage.open_at(reservation, kind)
            else:
                assert staged is not None
                found[kind] = staged.views[kind]
        return found

    @staticmethod
    def _part(
        reservation: Reservation, far: Mapping[str, torch.Tensor], group: Group, kind: str, piece: Piece
    ) -> torch.Tensor:
        """The bytes of ``piece`` in a range, or in the ``far`` memory that stands for it."""
        start, stop = bytes_of(group, kind, piece.start), bytes_of(group, kind, piece.stop)
        return far[kind][start:stop] if kind in far else reservation.part(start, stop)

    def _compute(
        self, job: LaneJob, piece: Piece, arrived: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], Mark]:
        """Queue the arithmetic on one piece; what it gives when it has run, and the mark after it."""
        queues = self._queues
        found: dict[str, torch.Tensor] = {}
        queues.run(queues.update, lambda: found.update(self.arithmetic(job, piece, arrived)))
        return found, queues.mark(queues.update)

    def _views_here(self, job: LaneJob, piece: Piece) -> dict[str, torch.Tensor]:
        """The states of a group that lives on level 0, where they are."""
        return {
            kind: self._part(job.sources[kind], {}, job.group, kind, piece)
            for kind in self._storage.states_of(job.group)
        }

    def _sweep(self) -> None:
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()

    def _take(self, wanted: Wanted, sources: Ranges, memory: dict[str, torch.Tensor]) -> Filled:
        """``wanted`` in a buffer: the one that was filled ahead, if that is still right."""
        if self._ahead:
            filled = self._ahead.popleft()
            if filled.wanted == wanted and filled.stamps == self._stamps(wanted, sources):
                return filled
            self._free.append((filled.buffer, filled.arrived))
            self.expect(())  # the prediction was wrong
        elif self._expected and self._expected.popleft() != wanted:
            self.expect(())
        return self._bring(wanted, sources, memory)

    def _stamps(self, wanted: Wanted, sources: Ranges) -> tuple[Stamp, ...]:
        return tuple(self._storage.ledger.stamp(sources[kind]) for kind in wanted.kinds)

    def _pass(self, job: LaneJob, filled: Filled, targets: Ranges, far: Mapping[str, torch.Tensor]) -> Mark:
        """Queue the update of what a buffer was filled with, and its way to storage; the mark after that."""
        piece = filled.wanted.piece
        arrived = filled.buffer.views
        if self._is_here(job.group):
            arrived |= self._views_here(job, piece)
        return self._send(job.group, piece, targets, far, *self._compute(job, piece, arrived))

    def _bring(self, wanted: Wanted, sources: Ranges, far: Mapping[str, torch.Tensor]) -> Filled:
        """Start copying ``wanted`` up into the next buffer of the ring; ``far`` is the memory of sources on a disk."""
        stamps = self._stamps(wanted, sources)
        buffer, emptied = self._free.popleft()
        buffer.places = wanted.places
        queue = self._queues.states_in
        if emptied is not None:
            queue.wait_event(emptied)
        if (last := self._stored.get(wanted.group.index)) is not None:
            queue.wait_event(last)
        try:
            copied = self._fill(wanted, buffer, sources, far)
        except BaseException:
            self._start_over()
            raise
        self._count(
            copied,
            [(self._level_of(sources[kind]), 0, place.stop - place.start) for kind, place in wanted.places.items()],
        )
        return Filled(wanted, buffer, stamps, copied.end)

    def _fill(self, wanted: Wanted, buffer: Buffer, sources: Ranges, far: Mapping[str, torch.Tensor]) -> Copied:
        """The copies of `_bring`."""
        views, group, piece = buffer.views, wanted.group, wanted.piece
        pairs = [(views[kind], self._part(sources[kind], far, group, kind, piece)) for kind in wanted.kinds]
        return self._queues.copy(self._queues.states_in, lambda: pairs)

    def _send(
        self, group: Group, piece: Piece, targets: Ranges, far: Mapping[str, torch.Tensor],
        found: Mapping[str, torch.Tensor], computed: Mark,
    ) -> Mark:  # fmt: skip
        """Start copying what was computed to storage; the mark after the copies. ``far`` is the memory of targets on a
        disk.
        """
        queue = self._queues.states_out
        queue.wait_event(computed)
        parts = {kind: self._part(target, far, group, kind, piece) for kind, target in targets.items()}
        copied = self._queues.copy(queue, lambda: [(part, found[kind]) for kind, part in parts.items()])
        self._count(copied, [(0, self._level_of(targets[kind]), part.numel()) for kind, part in parts.items()])
        return copied.end

    def _level_of(self, reservation: Reservation) -> int:
        """Where the bytes of a range are copied from and to."""
        return reservation.level if reservation.is_addressable else self._storage.plan.staging_level

    def _count(self, copied: Copied, moved: list[tuple[int, int, int]]) -> None:
        """Count copies of ``(from level, to level, bytes)`` on their links; the first link carries the time of all."""
        links: dict[tuple[int, int], int] = {}
        for from_level, to_level, num_bytes in moved:
            links[from_level, to_level] = links.get((from_level, to_level), 0) + num_bytes
        for index, (link, num_bytes) in enumerate(links.items()):
            if index == 0:
                self._stack.count_transfer(*link, num_bytes, copied.transfer)
            else:
                self._stack.count_link(*link, num_bytes)

    def _start_over(self) -> None:
        """Something could not be queued: let the rest of it end, whose memory callers are about to give away, and empty
        the ring.
        """
        self._ahead.clear()
        self._expected.clear()
        try:
            self.synchronize()
        finally:
            self._free = deque((buffer, None) for buffer in self._ring)

    def _drop_ahead(self) -> None:
        for ahead in self._ahead:
            self._free.append((ahead.buffer, ahead.arrived))
        self._ahead.clear()

    def order_loads(self, end: LaneEnd) -> None:
        """Let weights that are loaded from now on be those that ``end`` stores."""
        for queue in self._queues.loading():
            end.weights.wait_on(queue)
        self._stage.read_ahead()  # forward has begun: what waited for its step is confirmed now

    def synchronize(self) -> None:
        """Return when the queues are empty."""
        for queue in self._queues.all:
            queue.synchronize()

    def drain(self) -> None:
        """Return when everything submitted is stored."""
        self.synchronize()
        self._stage.drain()
        self._sweep()
