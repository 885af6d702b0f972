"""Updates on level 0: a group's optimizer states come up, AdamW runs there, and everything goes back to storage.

After the group's backward, weights and gradient are on level 0 already, and only what AdamW keeps next to them passes
through: for bf16 weights with split masters 10 bytes a parameter in and 12 out. A later update brings weights and
gradient the same way. Groups with 8-bit moments are always updated here: `adamw8_piece` has the same bits on a CPU.

States pass in pieces through a ring of buffers that is taken once, in the order of three queues joined by marks: a
buffer is filled in ``states_in``, updated in ``update`` and emptied in ``states_out``; what fills it next waits, on the
device, for the mark after its emptying. So the host queues a whole group at once, and the ring runs ahead of backward
by as much as it holds: a piece is brought up before its gradient exists (`pump`) if the last step tells what comes
next. Ranges on a disk are copied from and to the host memory in which the group is staged (`Stage`).

On a GPU queues are CUDA streams (`lane_cuda`). Without one they are the model's worker thread, whose order is stricter
than any that is asked for. Tests have a third kind, whose work runs as late, as early and as interleaved as the
declared order allows: on a GPU such orders are rare, and silent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vblackwell.kernels.optimizer.adamw import AdamWStep, adamw_piece
from vblackwell.kernels.optimizer.adamw8 import SCALE_BLOCK, adamw8_piece
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import DoneTransfer, FutureTransfer, transfer_delay
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
from vblackwell.offload.movement.state import Worker
from vblackwell.offload.storage.staging import Stage, Staged
from vblackwell.offload.storage.storage import Ranges, Stamp, Storage, on_disk

ALIGNMENT = 512
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (target, source)
Queue = Any  # work in order, as `torch.cuda.Stream`: `wait_event`, `synchronize`
Mark = Any  # a point in a queue, as a recorded `torch.cuda.Event`: `query`, `synchronize`


# -- queues ------------------------------------------------------------------------------------------------------------


class Copied(NamedTuple):
    """Copies that were queued: a mark after them, and a transfer without memory whose clock tells their time."""

    end: Mark
    transfer: Transfer


class Queues(ABC):
    """The queues of one device's updates: copies to level 0, arithmetic there, copies back."""

    states_in: Queue
    update: Queue
    states_out: Queue

    @property
    def all(self) -> tuple[Queue, Queue, Queue]:
        return self.states_in, self.update, self.states_out

    @abstractmethod
    def computing(self) -> Queue:
        """Where the model is computed now, in the caller's thread."""

    @abstractmethod
    def leaving(self) -> Queue:
        """Where gradients leave level 0."""

    @abstractmethod
    def loading(self) -> Sequence[Queue]:
        """Where compute weights are loaded."""

    @abstractmethod
    def mark(self, queue: Queue) -> Mark:
        """A point after everything that ``queue`` has now."""

    def waiting_mark(self, queue: Queue) -> Mark:
        """`mark` for a thread that will wait for long."""
        return self.mark(queue)

    @abstractmethod
    def transfer(self, end: Mark) -> Transfer:
        """Everything before ``end`` as a transfer, which holds no memory."""

    @abstractmethod
    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        """Queue what ``work`` launches. It may be called at once, or when its turn has come."""

    @abstractmethod
    def copy(self, queue: Queue, pairs: Callable[[], Pairs]) -> Copied:
        """Queue copies; what is to be copied is asked for as `run` calls its work."""

    def follow(self, queue: Queue, other: Queue) -> None:
        """Let what ``queue`` gets from now on start after everything that ``other`` has now."""
        queue.wait_event(self.mark(other))


class HostQueue:
    """What the calling thread does itself, or has waited for: over when it is queued."""

    def wait_event(self, event: Mark) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        return


class _WorkerMark:
    """After a task of the worker, and so after all before it; None: passed."""

    def __init__(self, task: Future[Any] | None) -> None:
        self.task = task

    def query(self) -> bool:
        return self.task is None or self.task.done()

    def synchronize(self) -> None:
        if self.task is not None:
            self.task.result()


class WorkerQueue:
    """One of the names for the worker's order. Whatever it is to wait for has been queued there before, or is over."""

    last: Future[Any] | None = None

    def wait_event(self, event: Mark) -> None:
        assert isinstance(event, _WorkerMark), "all queues are the worker's"

    def synchronize(self) -> None:
        if self.last is not None:
            self.last.result()


class WorkerQueues(Queues):
    """Level 0 is RAM: everything runs in the model's worker thread, in the order of its other tasks."""

    def __init__(self, worker: Worker) -> None:
        self.states_in, self.update, self.states_out = WorkerQueue(), WorkerQueue(), WorkerQueue()
        self._worker, self._host = worker, HostQueue()

    def computing(self) -> HostQueue:
        return self._host

    def leaving(self) -> HostQueue:
        return self._host  # gradients in host memory are landed by earlier tasks of the worker

    def loading(self) -> Sequence[HostQueue]:
        return (self._host,)

    def mark(self, queue: Queue) -> _WorkerMark:
        return _WorkerMark(None if queue is self._host else queue.last)

    def transfer(self, end: _WorkerMark) -> Transfer:
        return DoneTransfer() if end.task is None else FutureTransfer([end.task])

    def run(self, queue: WorkerQueue, work: Callable[[], None]) -> None:
        queue.last = self._worker.submit(work)

    def copy(self, queue: WorkerQueue, pairs: Callable[[], Pairs]) -> Copied:
        def work() -> None:
            transfer_delay("thread")
            for target, source in pairs():
                target.copy_(source)

        self.run(queue, work)
        end = self.mark(queue)
        return Copied(end, self.transfer(end))


# -- one update --------------------------------------------------------------------------------------------------------


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
        sources, targets: ranges that are read and written, by kind; the targets are the group's, or take their place
            at the step.
        last_load: the newest copy of the group's compute weights to level 0; what it reads is not written before it is
            over.
    """

    group: Group
    numbers: dict[Slot, AdamWStep]
    sources: Ranges
    targets: Ranges
    weight: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    gradient_kind: str | None = None
    factor: torch.Tensor | None = None
    last_load: Transfer | None = None


@dataclass(eq=False)
class LaneEnd:
    """When an update is ``computed`` on level 0, ``stored``, and when its ``weights`` are in storage for loads."""

    computed: Transfer
    stored: Transfer
    weights: Transfer


@dataclass(frozen=True)
class Wanted:
    """A piece that comes up, the kinds of it, and their places in a buffer."""

    group: Group
    piece: Piece
    kinds: tuple[str, ...]
    places: dict[str, slice] = field(compare=False, repr=False)


@dataclass(eq=False)
class Filled:
    """A buffer of the ring that is being filled from ranges as ``stamps`` tell; ``arrived`` is after the copies."""

    wanted: Wanted
    buffer: torch.Tensor
    stamps: tuple[Stamp, ...]
    arrived: Mark


def cut(flat: torch.Tensor, group: Group, kind: str, piece: Piece) -> torch.Tensor:
    """The bytes of ``piece`` in a group's flat range of ``kind``."""
    return flat[bytes_of(group, kind, piece.start) : bytes_of(group, kind, piece.stop)]


def typed(flat: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
    """Bytes of a range of ``kind`` as its elements."""
    return flat.view(element_type(kind, group.slots[0].dtype))


def stretch(values: torch.Tensor, kind: str, start: int, stop: int) -> torch.Tensor:
    """Elements ``start`` (a multiple of 256) to ``stop`` of `typed` bytes; of scales, those that they share."""
    return values[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)] if kind in SCALES else values[start:stop]


def views_in(buffer: torch.Tensor, wanted: Wanted) -> dict[str, torch.Tensor]:
    """What ``wanted`` is in a buffer, by kind."""
    return {kind: buffer[place] for kind, place in wanted.places.items()}


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
        stage: for ranges on a disk; None where the stack has none.
    """

    def __init__(
        self, stack: VGPUStack, storage: Storage, memory: torch.Tensor, num_buffers: int, queues: Queues,
        stage: Stage | None, worker: Worker,
    ) -> None:  # fmt: skip
        self._buffer_bytes = size = memory.numel() // num_buffers // ALIGNMENT * ALIGNMENT
        assert size >= MIN_BUFFER_BYTES, (memory.numel(), num_buffers)
        self._stack = stack
        self._storage = storage
        self._ring = [memory[index * size : (index + 1) * size] for index in range(num_buffers)]
        self._queues = queues
        self._stage = stage
        self._worker = worker
        self._free: deque[tuple[torch.Tensor, Mark | None]] = deque((buffer, None) for buffer in self._ring)
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
        self._free.extend((filled.buffer, filled.arrived) for filled in self._ahead)
        self._ahead.clear()
        self._expected.clear()
        for group in groups:
            self._expected.extend(self._pieces(group, tuple(self._states_below(group))))

    def _states_below(self, group: Group) -> list[str]:
        """What AdamW keeps of ``group`` next to the compute weight, and not on level 0."""
        return [] if self._is_here(group) else self._storage.states_of(group)

    def _is_here(self, group: Group) -> bool:
        return self._storage.range(group, "weight").level == 0

    def _pieces(self, group: Group, kinds: tuple[str, ...]) -> list[Wanted]:
        """The pieces in which all ``kinds`` of the group fit one buffer."""
        found = self._cut.get((group.index, kinds))
        if found is None:
            found = []
            if kinds:
                fit = self._buffer_bytes - ALIGNMENT * len(kinds)
                most = fit // sum(bytes_of(group, kind, SCALE_BLOCK) for kind in kinds) * SCALE_BLOCK
                for piece in pieces_of(group, most - most % group.formats.cut):
                    start, places = 0, {}
                    for kind in kinds:
                        num_bytes = bytes_of(group, kind, len(piece))
                        places[kind] = slice(start, start + num_bytes)
                        start += -(-num_bytes // ALIGNMENT) * ALIGNMENT
                    found.append(Wanted(group, piece, kinds, places))
            self._cut[group.index, kinds] = found
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

    def pump(self) -> None:
        """Bring up what the next updates will need, as far as the ring has room. Never blocks."""
        while self._free and self._expected:
            wanted = self._expected[0]
            sources = {kind: self._storage.range(wanted.group, kind) for kind in wanted.kinds}
            far = on_disk(sources)
            staged = self._stage.ready(wanted.group, sources) if far and self._stage is not None else None
            if staged is None and far:
                return
            self._expected.popleft()
            self._ahead.append(self._bring(wanted, sources, {} if staged is None else staged.views))

    def submit(self, job: LaneJob) -> LaneEnd:
        """Queue ``job``. What it reads on level 0 must be ordered after the current stream.

        The caller keeps the gradient until the update is ``computed``, the weights until it is ``stored``.
        """
        self._sweep()
        states = self._states_below(job.group) + (["weight"] if job.weight is None else [])
        sources = {kind: job.sources[kind] for kind in states}
        staged = None if self._stage is None else self._stage.take(job.group, sources, job.targets)
        if job.gradient_kind is not None:
            sources[job.gradient_kind] = job.sources[job.gradient_kind]
        try:
            return self._submit(job, sources, staged)
        except BaseException:
            self._start_over()
            if self._stage is not None and staged is not None:
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
            self._update(job, Piece(0, num_elements(group)), {}, targets, far)
        for wanted in pieces:
            filled = self._take(wanted, sources, memory)
            queues.update.wait_event(filled.arrived)
            self._free.append((filled.buffer, self._pass(job, filled, targets, far)))
            self.pump()
        if job.gradient_kind is not None and job.gradient_kind in memory:
            queues.states_in.synchronize()  # the worker's staging memory, which it gets back now
        for target in job.targets.values():
            self._storage.ledger.changed(target)
        copied = queues.mark(queues.states_out)
        self._stored[group.index] = copied
        self._in_use.append((copied, job.factor))
        computed, weights = queues.transfer(queues.mark(queues.update)), queues.transfer(copied)
        if self._stage is None or staged is None:
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

    def _bring(self, wanted: Wanted, sources: Ranges, far: Mapping[str, torch.Tensor]) -> Filled:
        """Start copying ``wanted`` up into the next buffer of the ring; ``far`` is the memory of sources on a disk."""
        stamps = self._stamps(wanted, sources)
        buffer, emptied = self._free.popleft()
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
        moved = [(self._level_of(sources[kind]), 0, place.stop - place.start) for kind, place in wanted.places.items()]
        self._count(copied, moved)
        return Filled(wanted, buffer, stamps, copied.end)

    def _fill(self, wanted: Wanted, buffer: torch.Tensor, sources: Ranges, far: Mapping[str, torch.Tensor]) -> Copied:
        """The copies of `_bring`."""
        views, group, piece = views_in(buffer, wanted), wanted.group, wanted.piece
        pairs = [(views[kind], self._part(sources[kind], far, group, kind, piece)) for kind in wanted.kinds]
        return self._queues.copy(self._queues.states_in, lambda: pairs)

    def _pass(self, job: LaneJob, filled: Filled, targets: Ranges, far: Mapping[str, torch.Tensor]) -> Mark:
        """`_update` of what a buffer was filled with."""
        return self._update(job, filled.wanted.piece, views_in(filled.buffer, filled.wanted), targets, far)

    def _update(
        self, job: LaneJob, piece: Piece, arrived: dict[str, torch.Tensor], targets: Ranges,
        far: Mapping[str, torch.Tensor],
    ) -> Mark:  # fmt: skip
        """Queue the update of a piece and its copies to storage; the mark after them.

        ``arrived`` has its bytes but for what lives on level 0; ``far`` is the memory of targets on a disk.
        """
        group, queues = job.group, self._queues
        if self._is_here(group):
            for kind in self._storage.states_of(group):
                arrived[kind] = self._part(job.sources[kind], {}, group, kind, piece)
        found: dict[str, torch.Tensor] = {}
        queues.run(queues.update, lambda: found.update(self.arithmetic(job, piece, arrived)))
        queues.states_out.wait_event(queues.mark(queues.update))
        parts = {kind: self._part(target, far, group, kind, piece) for kind, target in targets.items()}
        copied = queues.copy(queues.states_out, lambda: [(part, found[kind]) for kind, part in parts.items()])
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
        """Something could not be queued: let the rest end, whose memory callers will give away, and empty the ring."""
        self._ahead.clear()
        self._expected.clear()
        try:
            self.synchronize()
        finally:
            self._free = deque((buffer, None) for buffer in self._ring)

    def order_loads(self, end: LaneEnd) -> None:
        """Let weights that are loaded from now on be those that ``end`` stores."""
        for queue in self._queues.loading():
            end.weights.wait_on(queue)
        if self._stage is not None:
            self._stage.read_ahead()  # forward has begun: what waited for its step is confirmed now

    def synchronize(self) -> None:
        """Return when the queues are empty."""
        for queue in self._queues.all:
            queue.synchronize()

    def drain(self) -> None:
        """Return when everything submitted is stored."""
        self.synchronize()
        if self._stage is not None:
            self._stage.drain()
        self._sweep()
