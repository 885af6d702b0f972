"""Updates on level 0: a group's optimizer states come up, AdamW runs there, and everything goes back to storage.

After the group's backward, weights and gradient are on level 0 already: for bf16 weights with split masters 10 bytes a
parameter come up and 12 go. They pass in pieces through a ring of buffers, in three queues joined by marks: a buffer is
filled in ``states_in``, updated in ``update`` and emptied in ``states_out``; what fills it next waits, on the device,
for the end of that. So the host queues a whole group at once, and brings a piece up before its gradient exists
(`Lane.pump`) if the last step tells what comes next.

On a GPU queues are CUDA streams, and AdamW is launched by address; without one they are the model's worker thread.
Tests have a third kind, whose work runs in any order that the declared one allows: on a GPU such orders are rare, and
silent.
"""

import ctypes
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from vblackwell.kernels.optimizer.adamw import (
    MAX_ELEMENTS,
    AdamWStep,
    Then,
    adamw_piece,
)
from vblackwell.kernels.optimizer.adamw8 import SCALE_BLOCK, adamw8_piece
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import (
    DoneTransfer,
    FutureTransfer,
    transfer_delay,
)
from vblackwell.offload.layout.groups import (
    GRADIENTS,
    MIN_BUFFER_BYTES,
    OLD_GRADIENT,
    OLD_KINDS,
    OLD_WEIGHT,
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
from vblackwell.units import align_up

ALIGNMENT = 512
Copies = Sequence[tuple[int, int, int]]  # (target, source, bytes), by address
Queue = Any  # work in order, as `torch.cuda.Stream`: `wait_event`, `synchronize`; None: what the host does or waits for


class Queues(Transfer):
    """The queues of one device's updates. As a transfer, which is only waited for: all
    that they have been given by then."""

    states_in: Queue  # copies to level 0
    update: Queue  # arithmetic there
    states_out: Queue  # copies back
    gradients_out: Queue  # where gradients leave level 0
    loading: Sequence[Queue]  # where compute weights are loaded

    @property
    def all(self) -> tuple[Queue, Queue, Queue]:
        return self.states_in, self.update, self.states_out

    def computing(self) -> Queue:
        """Where the model is computed now, in the caller's thread: by the host."""
        return None

    @abstractmethod
    def mark(self, queue: Queue, *, long: bool = False) -> Transfer:
        """Everything that ``queue`` has now; holds no memory. ``long``: a thread will wait for long."""

    @abstractmethod
    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        """Queue what ``work`` launches. It may be called at once, or when its turn has come."""

    @abstractmethod
    def copy(self, queue: Queue, copies: Copies, *memory: Any) -> Transfer:
        """Queue copies; their transfer holds no memory and has a clock.

        ``memory``: what the addresses belong to, ranges and others; kept where a stack may be closed before.
        """

    def synchronize(self) -> None:
        for queue in self.all:
            queue.synchronize()

    def wait(self) -> None:
        for queue in self.all:
            with suppress(Exception):  # of what was queued: its owner has heard of it
                queue.synchronize()

    def follow(self, queue: Queue, other: Queue) -> None:
        """Let what ``queue`` gets from now on start after everything that ``other`` has now."""
        self.mark(other).wait_on(queue)


class WorkerQueue:
    """The worker's order; ``last`` is the newest task that was queued here."""

    last: Future[Any] | None = None

    def synchronize(self) -> None:
        if self.last is not None:
            self.last.result()


class _WorkerMark(FutureTransfer):
    def wait_on(self, stream: Any) -> None:
        if not isinstance(stream, WorkerQueue):  # what that gets from now on comes after it anyway
            super().wait_on(stream)


class WorkerQueues(Queues):
    """Level 0 is RAM: everything runs in the model's worker thread, in the order of its other tasks."""

    def __init__(self, worker: Worker) -> None:
        self.states_in = self.update = self.states_out = WorkerQueue()
        self.gradients_out = None  # the host: gradients in its memory are landed by earlier tasks of the worker
        self.loading = (None,)
        self._worker = worker

    def mark(self, queue: Queue, *, long: bool = False) -> Transfer:
        task = None if queue is None else queue.last
        return DoneTransfer() if task is None else _WorkerMark([task])

    def run(self, queue: WorkerQueue, work: Callable[[], None]) -> None:
        queue.last = self._worker.submit(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            self._worker.broken = True  # what was queued behind it goes on
            raise

    def copy(self, queue: WorkerQueue, copies: Copies, *memory: Any) -> Transfer:
        def work(kept: list[Any]) -> None:
            transfer_delay("thread")
            for copy in copies:
                ctypes.memmove(*copy)

        self.run(queue, partial(work, [each.view() if isinstance(each, Reservation) else each for each in memory]))
        return self.mark(queue)


@dataclass(eq=False)
class LaneJob:
    """One update of a group on level 0; parameters without ``numbers`` go through unchanged.

    Attributes:
        sources, targets: ranges that are read and written; targets are the group's, or take their place at the step.
        weight: flat on level 0, there after ``last_load`` at the latest, changed in place; None: it comes from storage.
        gradient: flat on level 0 in compute type; None: it comes from storage.
        gradient_kind: which range holds it then, or, next to a ``gradient``, the sum of earlier micro-batches.
        factor: fp32 scalar that gradients are multiplied by; None for 1.
        last_load: the newest copy of stored weights to level 0; what it reads is not written before it is over.
        behind: of the step that states lack, and whose gradient and weights are among ``sources``: that step is made,
            and of the job's own the weights alone. A ``gradient`` among ``targets`` goes there as well.
    """

    group: Group
    numbers: dict[Slot, AdamWStep]
    sources: Ranges
    targets: Ranges
    weight: Tensor | None = None
    gradient: Tensor | None = None
    gradient_kind: str | None = None
    factor: Tensor | None = None
    last_load: Transfer | None = None
    behind: Mapping[Slot, AdamWStep] | None = None


class LaneEnd(NamedTuple):
    """When an update is ``computed`` on level 0, ``stored``, and when its ``weights`` are in storage for loads."""

    computed: Transfer
    stored: Transfer
    weights: Transfer


class Wanted(NamedTuple):
    """A piece that comes up, and the places of its kinds in a buffer. Made once, compared by identity."""

    group: Group
    piece: Piece
    places: dict[str, slice]

    def addresses(self, buffer: Tensor) -> dict[str, int]:
        base = buffer.data_ptr()
        return {kind: base + place.start for kind, place in self.places.items()}


class Filled(NamedTuple):
    """A buffer of the ring that is being filled from ranges as ``stamps`` tell, until it has ``arrived``."""

    wanted: Wanted
    buffer: Tensor
    stamps: tuple[Stamp, ...]
    arrived: Transfer


def update_part(
    slot: Slot, part: Mapping[str, Tensor], numbers: AdamWStep, factor: Tensor | None = None, offset: int = 0
) -> None:
    """AdamW in place on a part of a parameter, which begins at element ``offset``, in the formats of its group.

    ``part``: ``weight``, ``remainder`` if there is one, and the moments, each (n,) in its range's type; scales (ceil(n
    / 256),); ``gradient`` and, if there is more of it, ``previous``, (n,) in compute type or fp32. ``factor``: an fp32
    scalar that gradients are multiplied by.
    """
    formats = slot.group.formats
    tensors: dict[str, Any] = {"remainder": None, "previous": None, **part, "factor": factor}
    if formats.packed:
        adamw8_piece(**tensors, numbers=numbers, seed=formats.seed_of(slot.name), offset=offset)
    else:
        adamw_piece(**tensors, numbers=numbers)


def update_piece(job: LaneJob, piece: Piece, held: Mapping[str, Tensor]) -> None:
    """AdamW in place on a piece, of which level 0 holds ``held``, bytes by kind, and what the job itself has there."""
    group, dtype = job.group, job.group.slots[0].dtype
    values = {kind: flat.view(element_type(kind, dtype)) for kind, flat in held.items()}
    if job.gradient_kind is not None:
        values["gradient" if job.gradient is None else "previous"] = values.pop(job.gradient_kind)
    for kind, flat in (("weight", job.weight), ("gradient", job.gradient)):
        if flat is not None:
            start, stop = (bytes_of(group, kind, end) for end in (piece.start, piece.stop))
            values[kind] = flat[start:stop].view(element_type(kind, dtype))
    ahead = values.pop("weight", values.get(OLD_WEIGHT)) if job.behind else None
    for slot, start, stop in parts_of(group, piece):
        if slot in job.numbers:
            own = slice(start - piece.start, stop - piece.start)
            scales = slice(own.start // SCALE_BLOCK, -(-own.stop // SCALE_BLOCK))
            part = {kind: each[scales if kind in SCALES else own] for kind, each in values.items()}
            if job.behind and ahead is not None:
                then = Then(part["gradient"], job.numbers[slot])
                states = {"remainder": None, **{kind: each for kind, each in part.items() if kind not in OLD_KINDS}}
                states |= {"weight": part[OLD_WEIGHT], "gradient": part[OLD_GRADIENT]}
                adamw_piece(**states, numbers=job.behind[slot], then=then, ahead=ahead[own])
                continue
            update_part(slot, part, job.numbers[slot], job.factor, start - first_element(slot))


class Lane:
    """Runs `LaneJob`s in order, through a ring of ``num_buffers``, each `smallest_buffer` or more, in ``memory``."""

    def __init__(
        self, stack: VGPUStack, storage: Storage, memory: Tensor, num_buffers: int, queues: Queues, worker: Worker
    ) -> None:
        self._buffer_bytes = size = memory.numel() // num_buffers // ALIGNMENT * ALIGNMENT
        assert size >= MIN_BUFFER_BYTES, (memory.numel(), num_buffers)
        self._stack = stack
        self._storage = storage
        self._ring = memory.split(size)[:num_buffers]
        self._queues = queues
        self._stage = Stage(storage) if any(level.device is None for level in stack.levels) else None  # with a disk
        self._worker = worker
        self._free: deque[tuple[Tensor, Transfer]] = deque((buffer, DoneTransfer()) for buffer in self._ring)
        self._ahead: deque[Filled] = deque()
        self._expected: deque[Wanted] = deque()
        self._behind: Mapping[Group, Reservation] = {}
        self._stored: dict[int, Transfer] = {}
        self._cut: dict[tuple[int, tuple[str, ...]], list[Wanted]] = {}
        # A model that dies between two steps leaves copies into the ring under way, of pieces that nobody takes.
        storage.in_flight.add(queues)
        for queue in queues.all:
            queues.follow(queue, queues.computing())

    def expect(self, groups: Iterable[Group], behind: Mapping[Group, Reservation] | None = None) -> None:
        """The groups whose updates come next, in order. Only a prediction: what changes meanwhile is brought up again.
        ``behind``: the gradients of steps that states lack.
        """
        self._behind = behind or {}
        self._free.extend((filled.buffer, filled.arrived) for filled in self._ahead)
        self._ahead.clear()
        self._expected.clear()
        for group in groups:
            olds = OLD_KINDS if group in self._behind else ()
            self._expected.extend(self._pieces(group, [*self._moved_states(group), *olds]))

    def _source(self, group: Group, kind: str) -> Reservation:
        """The range that is brought up for ``kind``."""
        return self._behind[group] if kind == OLD_GRADIENT else self._storage.range(group, kind)

    def _is_resident(self, group: Group) -> bool:
        """Whether the group lives on level 0, with its states: they are changed where they are."""
        return self._storage.range(group, "weight").level == 0

    def _moved_states(self, group: Group) -> list[str]:
        return [] if self._is_resident(group) else self._storage.states_of(group)

    def _pieces(self, group: Group, kinds: Iterable[str]) -> list[Wanted]:
        kinds = tuple(kinds)
        key = group.index, kinds
        if key not in self._cut:
            found = self._cut[key] = []
            fit = self._buffer_bytes - ALIGNMENT * len(kinds)
            block_bytes = sum(bytes_of(group, kind, SCALE_BLOCK) for kind in kinds)
            most = min(fit // block_bytes * SCALE_BLOCK, MAX_ELEMENTS) if block_bytes else 0
            assert most or not kinds, f"no piece of {group.name} fits a buffer of {self._buffer_bytes} bytes"
            for piece in pieces_of(group, most - most % group.formats.cut) if most else []:
                start, places = 0, {}
                for kind in kinds:
                    num_bytes = bytes_of(group, kind, len(piece))
                    places[kind] = slice(start, start + num_bytes)
                    start += align_up(num_bytes, ALIGNMENT)
                found.append(Wanted(group, piece, places))
        return self._cut[key]

    def pump(self) -> None:
        """Bring up what the next updates will need, as far as the ring has room. Never blocks."""
        while self._free and self._expected:
            wanted = self._expected[0]
            sources = {kind: self._source(wanted.group, kind) for kind in wanted.places}
            far: dict[str, Tensor] = {}
            if self._stage is not None and on_disk(sources):
                staged = self._stage.ready(wanted.group, sources)
                if staged is None:
                    return
                far = staged.views
            self._expected.popleft()
            self._ahead.append(self._bring(wanted, sources, far))

    def is_ahead(self, group: Group) -> bool:
        """Whether states of ``group`` were brought up for the update that comes."""
        return any(filled.wanted.group is group for filled in self._ahead)

    def submit(self, job: LaneJob) -> LaneEnd:
        """Queue ``job`` after the current stream. The gradient is kept until ``computed``, weights until ``stored``."""
        kinds = [*self._moved_states(job.group), *(["weight"] if job.weight is None else [])]
        if job.behind is not None:
            kinds = [*self._moved_states(job.group), *OLD_KINDS]
        sources = {kind: job.sources[kind] for kind in kinds}
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
        own = self._storage.states_of(group) if self._is_resident(group) else []
        targets = {kind: target for kind, target in job.targets.items() if kind not in own}
        far = self._far_memory(targets, staged)
        queues.follow(queues.update, queues.computing())  # weights, gradient and factor
        if job.gradient_kind is not None:
            queues.follow(queues.states_in, queues.gradients_out)  # it is on its way out there
        if "gradient" in targets:
            queues.follow(queues.states_out, queues.gradients_out)  # where the last one left by
        if job.last_load is not None:
            job.last_load.wait_on(queues.states_out)
            job.last_load.wait_on(queues.update)  # it may be what brings ``job.weight``
        if not sources:  # everything is on level 0: one piece, nothing moves but the weights, to storage
            self._update(job, Piece(0, num_elements(group)), None, targets, far)
        for wanted in self._pieces(group, sources):
            filled = self._take(wanted, sources, memory)
            filled.arrived.wait_on(queues.update)
            self._free.append((filled.buffer, self._update(job, wanted.piece, filled, targets, far)))
            self.pump()
        if job.gradient_kind in memory:
            queues.states_in.synchronize()  # the worker's staging memory, which it gets back now
        for target in job.targets.values():
            self._storage.ledger.changed(target)
        computed, weights = queues.mark(queues.update), queues.mark(queues.states_out)
        self._stored[group.index] = weights
        if self._stage is None or staged is None:
            return LaneEnd(computed, weights, weights)
        stored = self._stage.store(staged, job.targets, queues.mark(queues.states_out, long=True))
        return LaneEnd(computed, stored, stored if "weight" in on_disk(job.targets) else weights)

    def _far_memory(self, ranges: Ranges, staged: Staged | None) -> dict[str, Tensor]:
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

    def _take(self, wanted: Wanted, sources: Ranges, memory: dict[str, Tensor]) -> Filled:
        """``wanted`` in a buffer: the one that was filled ahead, if that is still right."""
        if self._ahead:
            filled = self._ahead.popleft()
            if filled.wanted is wanted and filled.stamps == self._stamps(wanted, sources):
                return filled
            self._free.append((filled.buffer, filled.arrived))
            self.expect(())  # the prediction was wrong
        elif self._expected and self._expected.popleft() is not wanted:
            self.expect(())
        return self._bring(wanted, sources, memory)

    def _stamps(self, wanted: Wanted, sources: Ranges) -> tuple[Stamp, ...]:
        return tuple(self._storage.ledger.stamp(sources[kind]) for kind in wanted.places)

    def _bring(self, wanted: Wanted, sources: Ranges, far: Mapping[str, Tensor]) -> Filled:
        """Start copying ``wanted`` up into the next buffer; ``far`` is the host memory of sources on a disk."""
        stamps = self._stamps(wanted, sources)
        buffer, emptied = self._free.popleft()
        emptied.wait_on(self._queues.states_in)
        if (stored := self._stored.get(wanted.group.index)) is not None:
            stored.wait_on(self._queues.states_in)
        held = wanted.addresses(buffer)
        try:
            arrived = self._move(wanted.group, wanted.piece, held, sources, far, buffer, up=True)
        except BaseException:
            self._start_over()
            raise
        return Filled(wanted, buffer, stamps, arrived)

    def _update(
        self, job: LaneJob, piece: Piece, filled: Filled | None, targets: Ranges, far: Mapping[str, Tensor]
    ) -> Transfer:
        """Queue a piece's update, for which ``filled`` has what came up, and its copies to ``targets``; their end."""
        queues, held = self._queues, {} if filled is None else filled.wanted.addresses(filled.buffer)
        if job.weight is not None:
            held["weight"] = job.weight.data_ptr() + bytes_of(job.group, "weight", piece.start)
        elif job.behind is not None:
            held["weight"] = held[OLD_WEIGHT]  # and no longer those
        if job.gradient is not None and "gradient" in targets:
            held["gradient"] = job.gradient.data_ptr() + bytes_of(job.group, "gradient", piece.start)
        self._compute(job, piece, filled, held)
        queues.follow(queues.states_out, queues.update)
        return self._move(job.group, piece, held, targets, far, (job, filled), up=False)

    def _compute(self, job: LaneJob, piece: Piece, filled: Filled | None, held: Mapping[str, int]) -> None:
        """Queue AdamW on a piece; ``held``: where it is on level 0, by kind."""
        parts = {} if filled is None else {kind: filled.buffer[at] for kind, at in filled.wanted.places.items()}
        if self._is_resident(job.group):
            for kind in self._storage.states_of(job.group):
                start, stop = (bytes_of(job.group, kind, end) for end in (piece.start, piece.stop))
                parts[kind] = job.sources[kind].part(start, stop)
        self._queues.run(self._queues.update, lambda: update_piece(job, piece, parts))

    def _move(
        self,
        group: Group,
        piece: Piece,
        held: Mapping[str, int],
        ranges: Ranges,
        far: Mapping[str, Tensor],
        memory: Any,
        *,
        up: bool,
    ) -> Transfer:
        """Queue a piece's copies between level 0 (``held``, in ``memory``) and ``ranges``, or what stands for them."""
        copies, links = list[tuple[int, int, int]](), Counter[tuple[int, int]]()
        for kind, reservation in ranges.items():
            num_bytes = bytes_of(group, kind, len(piece))
            below = far[kind].data_ptr() if kind in far else reservation.address
            below += bytes_of(group, kind, piece.start)
            level = reservation.level if reservation.is_addressable else self._storage.plan.staging_level
            copies.append((held[kind], below, num_bytes) if up else (below, held[kind], num_bytes))
            links[(level, 0) if up else (0, level)] += num_bytes
        queue = self._queues.states_in if up else self._queues.states_out
        copied = self._queues.copy(queue, copies, *ranges.values(), far, memory)
        (first, num_bytes), *others = links.items()
        self._stack.count_transfer(*first, num_bytes, copied)  # this link carries the time of all
        for link, num_bytes in others:
            self._stack.count_link(*link, num_bytes)
        return copied

    def _start_over(self) -> None:
        """Something could not be queued: let the rest end, whose memory callers will give away, and empty the ring."""
        self._ahead.clear()
        self._expected.clear()
        try:
            self._queues.synchronize()
        finally:
            self._free = deque((buffer, DoneTransfer()) for buffer in self._ring)

    def order_loads(self, end: LaneEnd) -> None:
        """Let weights that are loaded from now on be those that ``end`` stores."""
        for queue in self._queues.loading:
            end.weights.wait_on(queue)
        if self._stage is not None:
            self._stage.read_ahead()  # forward has begun: what waited for its step is committed now

    def drain(self) -> None:
        self._queues.synchronize()
        if self._stage is not None:
            self._stage.drain()
