"""Gradients leave level 0 as soon as a group has all of them, as one flat range, and are summed in host memory.

A hook copies what autograd accumulates into ``p.grad`` into the group's flat buffer and clears it. When the last has
arrived (or backward ends without it) the buffer is sent. The first arrival since `zero_grad` lies in the
``gradient`` range in compute type; when more come, all are added in fp32, in the order in which PyTorch would have
added them. Norms are taken as `torch.nn.utils.clip_grad_norm_` would take them.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vblackwell.errors import Unsupported
from vblackwell.kernels.optimizer import cpu
from vblackwell.kernels.optimizer.adamw import BLOCK, norm_of, norms_at, square_sums
from vblackwell.kernels.optimizer.cpu import Sum
from vblackwell.memory.cache.stack import Reservation
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import EventTransfer, current_stream, no_inference_mode
from vblackwell.offload.layout.groups import GRADIENTS, Group, Slot
from vblackwell.offload.layout.storage_plan import INCOMING
from vblackwell.offload.movement.state import (
    EarlyUpdate,
    GradientBuffer,
    GradientState,
    InFlightQueue,
    Mover,
    Phase,
    Shared,
    Task,
    defer_sigint,
    flat_of,
    free_after,
    free_until,
    reserve,
)

LONGEST_WIDENED = 1 << 24  # elements: 64 MiB
Receive = Callable[[Tensor], None]  # what the worker does with the bytes of a gradient


def _shaped(slot: Slot, flat: Tensor, kind: str) -> Tensor:
    return slot.view_fp32(flat) if kind == "accumulated" else slot.view(flat)


def gradient_norm(gradient: Tensor) -> Tensor:
    """The norm of a flat bf16, fp16 or fp32 ``gradient``, an fp32 scalar where it is; no synchronisation."""
    sums = torch.empty(-(-gradient.numel() // BLOCK), dtype=torch.float32, device=gradient.device)
    square_sums(gradient, sums)
    return norm_of([sums])


def norm_of_norms(norms: list[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of scalar ``norms`` in their order, summed on ``device``: CPU and GPU add in different orders."""
    on_gpu = device.type == "cuda"
    return torch.linalg.vector_norm(torch.stack([norm.to(device, non_blocking=on_gpu) for norm in norms]))


@cache
def _norm_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def after_norms(collectors: Iterable["GradientCollector"], device: torch.device) -> AbstractContextManager[Any]:
    """Inside, what is made of norms that are taken comes after these alone. The computing stream waits by then for
    copies of the last gradients and states; a host that waits for it queues nothing of the next forward meanwhile. To
    be waited for inside.
    """
    taken = [event for each in collectors for event in each.norms_taken.values()]
    if not taken:
        return nullcontext()
    stream = _norm_stream(device)
    for event in taken:
        stream.wait_event(event)
    return torch.cuda.stream(stream)


def sum_kind(group: Group) -> str:
    return "gradient" if group.is_fp32 else "accumulated"


class Staying(NamedTuple):
    """A group's gradient, which is still on level 0 when it has ``landed`` in storage too."""

    bytes: Tensor
    reservation: Reservation
    landed: Transfer


class GradientCollector(Mover):
    """Gathers the gradients of one model, at most ``max_in_flight`` on level 0 at a time, and up to ``max_staying`` of
    the last ones that may stay there until the step; ``measuring``: their norms are wanted.
    """

    def __init__(self, shared: Shared, max_in_flight: int, max_staying: int = 0) -> None:
        super().__init__(shared)
        self._max_in_flight, self._max_staying = max_in_flight, max_staying
        self.measuring = False
        # `StepControl` sets it: the range of a group's gradient is about to change, or, if so it says, to be anew.
        self.before_change: Callable[[Group, bool], None] = lambda group, anew: None
        self.norms_taken: dict[torch.cuda.Stream, torch.cuda.Event] = {}  # the last ones that were, on level 0
        self.filling: dict[Group, GradientBuffer] = {}  # by the order in which they were opened
        self.in_flight = InFlightQueue()  # level-0 buffers
        self._staying: dict[Group, Staying] = {}  # oldest first
        self._summing = InFlightQueue()  # tasks of the worker that give host memory back
        self._uses_incoming = False  # what is kept for gradients on their way to a sum
        self._wide = torch.empty(0, dtype=torch.float32, device="cpu")  # the worker's

    def _state(self, group: Group) -> GradientState:
        return self._states[group].gradient

    def _held(self, group: Group) -> GradientState:
        """What the worker will find in host memory when it has done what is queued, and where."""
        state, kinds = self._state(group), [kind for kind in GRADIENTS if (group, kind) in self._storage]
        ranges = {kind: self._storage.range(group, kind) for kind in kinds}
        return replace(state, slots=state.slots.copy(), ranges=ranges, task=None)

    def _later(self, work: Callable[..., None], group: Group, *args: Any, arriving: Transfer | None = None) -> Task:
        self._state(group).measured = None
        return self._worker.submit(work, group, *args, group=group.index, arriving=arriving)

    # -- in backward ---------------------------------------------------------------------------------------------------

    def take(self, slot: Slot) -> GradientBuffer | None:
        """Copy ``slot``'s fresh gradient into its group's buffer and clear it; the buffer if that makes it whole."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient, slot.param.grad = slot.param.grad, None
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise Unsupported(
                f"{slot.name!r} has a sparse gradient: offloaded parameters need dense ones (sparse=False)"
            )
        buffer = self.filling.get(slot.group)
        if buffer is not None and slot in buffer.slots:  # a second part of the same backward (reentrant checkpoint)
            self._send_unfinished(buffer)
            buffer = None
        buffer = buffer or self._open(slot.group)
        if gradient.data_ptr() != buffer.reservation.address + slot.offset:  # else `places` had told
            with torch.no_grad():
                slot.view(buffer.bytes).copy_(gradient)
        buffer.slots[slot] = None
        return buffer if buffer.is_whole() else None

    def _open(self, group: Group) -> GradientBuffer:
        self._wait_for_place()
        with no_inference_mode():
            reservation = self._budget.reserve(
                f"{group.name}/gradient",
                group.num_bytes,
                self.end_oldest,
                self._budget.drop_weights,
                self._budget.free_any,
            )
            buffer = GradientBuffer(group, reservation, reservation.bytes, len(group.trainable()))
        self.filling[group] = buffer
        return buffer

    def places(self, slots: Sequence[Slot]) -> list[Tensor]:
        """Where the gradients of ``slots`` of one group, which are about to be made, will lie; `take` finds them there.
        Empty where some of them came already, or are being made: a layer that is used twice has two, added later.
        """
        buffer = self.filling.get(slots[0].group)
        if buffer is not None and (buffer.closed or not buffer.promised.isdisjoint(slots)):
            return []
        if buffer is not None and not buffer.slots.keys().isdisjoint(slots):
            return []
        buffer = buffer or self._open(slots[0].group)
        buffer.promised.update(slots)
        return buffer.group.views(buffer.bytes, slots)

    def _wait_for_place(self) -> None:
        free_until(lambda: len(self.in_flight) < self._max_in_flight, self.end_oldest)

    def close(self, buffer: GradientBuffer) -> bool:
        """No gradient more comes into ``buffer``; whether it will be added to those in host memory."""
        buffer.closed = True
        adding = bool(self._state(buffer.group).slots)
        if self.measuring and buffer.bytes.is_cuda and not adding:  # no pass over it on the host
            base = buffer.bytes.data_ptr()
            pieces = [(base + slot.offset, slot.num_elements, slot.dtype) for slot in buffer.slots]
            norms = norms_at(pieces, buffer.bytes.device).unbind()
            self._state(buffer.group).level0_norms.update(zip(buffer.slots, norms, strict=True))
            stream = current_stream(buffer.bytes.device)
            self.norms_taken.setdefault(stream, torch.cuda.Event()).record(stream)
        return adding

    def _send_unfinished(self, buffer: GradientBuffer) -> None:
        """Send what there is so far; what comes later is added to it."""
        self.close(buffer)
        self.send(buffer, None)

    @defer_sigint()  # between a copy's start and its being known nothing could wait for it
    def send(self, buffer: GradientBuffer, update: EarlyUpdate | None, *, stays: bool = False) -> None:
        """Send what was closed on its way to host memory; ``update`` reads it on level 0, or it ``stays`` there."""
        group = buffer.group
        self._end_stay(group)
        state = self._state(group)
        adding = bool(state.slots)
        readers = () if update is None or update.reads_until is None else (update.reads_until,)
        final = update is not None and update.shadows is None  # nobody needs the gradient in host memory
        lands = None if update is None else update.lands
        under_way = list[Transfer](readers)
        try:
            if not final and lands is None:
                self.before_change(group, not adding)
            if not final:
                self.reserve_range(group, adding)
            if final:
                self._free_after(readers, buffer.reservation)
            elif adding:
                self._send_to_sum(buffer, readers)
            else:
                self.wait_idle(group)
                transfer = lands or self._stack.write(self._storage.range(group, "gradient"), buffer.bytes)
                under_way.append(transfer)
                landing = self._later(self._land, group, transfer, arriving=transfer)
                # The next copy may overtake it, as none does on its stream; what an update brings waits for that one.
                if not isinstance(transfer, EventTransfer):
                    state.task = landing
                state.kind = "gradient"
                if stays:
                    self._staying[group] = Staying(buffer.bytes, buffer.reservation, transfer)
                    free_until(lambda: len(self._staying) <= self._max_staying, self._end_oldest_stay)
                else:
                    self._free_after((transfer, *readers), buffer.reservation)
        except Exception:
            free_after(under_way, partial(self._storage.give, buffer.reservation))
            raise
        finally:
            del self.filling[group]
        buffer.bytes = torch.empty(0)
        state.slots.update(buffer.slots)

    def _free_after(self, ends: Iterable[Transfer | Task], reservation: Reservation) -> None:
        self.in_flight.add(tuple(ends), lambda: self._storage.give(reservation))

    def stays(self, group: Group) -> bool:
        """Whether the group's gradient is still on level 0."""
        return group in self._staying

    def take_staying(self, group: Group) -> Staying | None:
        """The group's gradient on level 0, if it stayed there: for one update, which ends it by `end_staying`."""
        return self._staying.pop(group, None)

    def end_staying(self, staying: Staying, *readers: Transfer) -> None:
        """Free what was taken when ``readers`` have read it."""
        self._free_after((staying.landed, *readers), staying.reservation)
        free_until(lambda: len(self.in_flight) <= self._max_in_flight, self.end_oldest)

    def _end_stay(self, group: Group) -> None:
        staying = self.take_staying(group)
        if staying is not None:
            self._free_after((staying.landed,), staying.reservation)

    def _end_oldest_stay(self) -> bool:
        for group in self._staying:
            self._end_stay(group)
            return True
        return False

    def _send_to_sum(self, buffer: GradientBuffer, readers: tuple[Transfer, ...]) -> None:
        """The worker adds it to the sum in host memory, after ``readers`` have read that sum."""
        group, state, slots = buffer.group, self._state(buffer.group), list(buffer.slots)

        def add() -> Receive:
            return partial(self._add, group, self._held(group), slots)

        state.level0_norms.clear()
        self._hand_over(group, buffer.reservation, buffer.bytes, readers, add)
        state.kind = sum_kind(group)

    def _hand_over(
        self,
        group: Group,
        reservation: Reservation,
        fresh: Tensor,
        readers: Sequence[Transfer],
        receiver: Callable[[], Receive],
    ) -> None:
        """The worker will receive the ``fresh`` bytes, after ``readers`` have read what that changes. ``receiver``: of
        the ranges that are the group's when there is memory for them.
        """
        state = self._state(group)
        if fresh.device.type == "cpu":  # the arena: the worker reads it where it is
            self._stack.count_link(0, self._storage.range(group, "gradient").level, fresh.nbytes)
            state.task = self._later(self._receive, group, receiver(), fresh, readers, lambda: None)
            self._free_after((state.task, *readers), reservation)
            return
        under_way = list[Transfer]()
        # Next to the group's range, which holds the sum so far.
        self._summing.sweep()
        num_bytes = reservation.num_bytes
        free_some = self.in_flight.free_oldest, self._summing.free_oldest, self._budget.free_host
        incoming = reserve(partial(self._take_incoming, num_bytes), *free_some)
        try:
            transfer = self._stack.write(incoming, fresh)
            under_way.append(transfer)
            before, came, end = (transfer, *readers), incoming.bytes[:num_bytes], partial(self._end, incoming)
            state.task = self._later(self._receive, group, receiver(), came, before, end, arriving=transfer)
        except Exception:
            free_after(under_way, partial(self._end, incoming))
            raise
        self._summing.add((state.task,))
        self._free_after(before, reservation)

    def _take_incoming(self, num_bytes: int) -> Reservation:
        """RAM for a gradient on its way to a sum: what is kept for that, or, where it is in use, any that is free."""
        kept = self._storage.incoming
        if kept is None or self._uses_incoming or kept.num_bytes < num_bytes:
            return self._storage.take_host(INCOMING, num_bytes)
        self._uses_incoming = True
        return kept

    def _end(self, incoming: Reservation) -> None:
        """End of `_take_incoming`."""
        if incoming is self._storage.incoming:
            self._uses_incoming = False
        else:
            self._storage.give(incoming)

    def end_oldest(self) -> bool:
        """Free the oldest bytes in flight for what the current stream queues from now on; False if there are none."""
        if not self.in_flight and not self._end_oldest_stay():
            # What has waited longest for the rest of its gradients is sent without it: there may be none, as for
            # experts that got no token.
            waiting = next((buffer for buffer in self.filling.values() if buffer.may_be_sent()), None)
            if waiting is not None:
                self._send_unfinished(waiting)
        return self.in_flight.free_oldest(current_stream(self._stack.level0_device))

    def reserve_range(self, group: Group, adding: bool) -> None:
        """Reserve what the group's gradient needs below level 0, or, if it is ``adding`` to one, their sum."""
        kinds = ["gradient", *(["accumulated"] if adding and not group.is_fp32 else [])]
        if all((group, kind) in self._storage for kind in kinds):
            return
        # What is taken for a moment must not push it to a disk for good.
        free_until(lambda: not self._summing, self._summing.free_oldest)
        # The other sums will follow: where they spill, the host memory that they pass through is taken first.
        later = [(each, "accumulated") for each in self._groups if kinds[1:] and each.trainable() and not each.is_fp32]
        reserve(lambda: self._storage.reserve([(group, kind) for kind in kinds], later), self._budget.free_host)

    def wait_idle(self, group: Group) -> None:
        """Return when the worker is done with the group's range: a copy into it goes past the worker's order."""
        state = self._state(group)
        task = state.task
        if task is not None:
            task.exception()  # an interrupt leaves it to be waited for by the next copy
            state.task = None
            task.wait()

    # -- in slices of rows (`SlicedLeaf`) ------------------------------------------------------------------------------

    def begin_slices(self, slot: Slot) -> None:
        """A gradient of ``slot`` is about to arrive in slices, to be added to an earlier one if there is one."""
        group, state = slot.group, self._state(slot.group)
        adding = bool(state.slots)
        self.reserve_range(group, adding)
        if not adding:
            self.wait_idle(group)
        elif state.kind != sum_kind(group):
            state.task = self._later(self._sum, group, self._held(group), {})
        state.kind = sum_kind(group) if adding else "gradient"

    @defer_sigint()
    def send_slice(self, slot: Slot, start: int, rows: Tensor, reservation: Reservation) -> None:
        """Send ``rows``, from row ``start`` on, through the level-0 ``reservation``, which this ends."""
        self._wait_for_place()
        try:
            fresh, adding = reservation.bytes, bool(self._state(slot.group).slots)
            with torch.no_grad():
                fresh.view(slot.dtype).view(rows.shape).copy_(rows)
            self._hand_over(slot.group, reservation, fresh, (), lambda: partial(self._take_rows, slot, start, adding))
        except Exception:
            self._storage.give(reservation)
            raise

    def finish_slices(self, slot: Slot) -> None:
        self._state(slot.group).slots[slot] = None

    # -- between backward and step -------------------------------------------------------------------------------------

    def has(self, slot: Slot) -> bool:
        """Whether ``slot`` has a gradient, in host memory, on its way, or on level 0."""
        filling = self.filling.get(slot.group)
        return slot in self._state(slot.group).slots or (filling is not None and slot in filling.slots)

    def has_all_on_host(self, group: Group) -> bool:
        return all(slot in self._state(group).slots for slot in group.trainable())

    def kind_when_idle(self, group: Group) -> str:
        """Which range holds the gradient, once the worker is done with the sum."""
        if self._stack.level0_device.type != "cuda":
            self._worker.drain()
        self.wait_idle(group)
        return self._state(group).kind

    def measure_later(self, group: Group) -> None:
        """Queue the norms of the group's gradients for the worker, unless they were taken on level 0 or are queued."""
        state = self._state(group)
        if state.measured is None and not all(slot in state.level0_norms for slot in state.slots):
            state.measured = state.task = self._later(self._measure, group, self._held(group))

    def measure(self, groups: Iterable[Group]) -> None:
        """Return when the norms of all gradients of ``groups`` are taken; updates that read them may go on."""
        for group in groups:
            self.measure_later(group)
        for group in groups:
            state = self._state(group)
            if state.measured is not None and state.measured.exception() is not None:
                state.measured = None
        self._worker.raise_failure()

    def norm(self, slot: Slot) -> Tensor:
        """The 2-norm of ``slot``'s gradient, an fp32 scalar; after `measure`."""
        state = self._state(slot.group)
        found = state.level0_norms.get(slot)
        return state.norms[slot] if found is None else found

    def clear(self, slots: list[Slot]) -> None:
        for slot in slots:
            self._state(slot.group).slots.pop(slot, None)
            self._state(slot.group).level0_norms.pop(slot, None)
            if self._states[slot.group].phase is not Phase.DUE:  # whose update is still to read it
                self._end_stay(slot.group)
        self._worker.raise_failure()

    def scale_later(self, group: Group, slots: list[Slot], factor: Tensor | None) -> None:
        """Queue a product of gradients with ``factor``, or zeros where it is None."""
        self.before_change(group, factor is None and self._state(group).slots.keys() <= set(slots))
        state = self._state(group)
        self._end_stay(group)
        for slot in slots:
            state.level0_norms.pop(slot, None)
        if factor is not None:
            self.reserve_range(group, adding=True)
        held = self._held(group)
        state.task = self._later(self._scale, group, held, slots, factor)
        if factor is not None:
            state.kind = sum_kind(group)

    # -- in the worker's thread ---------------------------------------------------------------------------------------

    def _land(self, group: Group, transfer: Transfer) -> None:
        transfer.wait()
        self._state(group).norms.clear()

    def _receive(
        self, group: Group, receive: Receive, fresh: Tensor, before: Sequence[Transfer], end: Callable[[], None]
    ) -> None:
        """After ``before``, ``receive`` the ``fresh`` bytes, and ``end`` them."""
        try:
            for transfer in before:
                transfer.wait()
            receive(fresh)
        finally:
            end()
        self._state(group).norms.clear()

    def _add(self, group: Group, held: GradientState, slots: list[Slot], fresh: Tensor) -> None:
        self._sum(group, held, {slot: slot.flat(fresh) for slot in slots})

    def _take_rows(self, slot: Slot, start: int, adding: bool, fresh: Tensor) -> None:
        kind = sum_kind(slot.group) if adding else "gradient"
        rows = fresh.view(slot.dtype).view(-1, slot.shape[1])
        total = self._storage.open(slot.group, kind)
        target = _shaped(slot, total, kind)[start : start + len(rows)]
        target.add_(rows) if adding else target.copy_(rows)
        self._storage.store(slot.group, kind, total)

    def _sum(self, group: Group, held: GradientState, fresh: dict[Slot, Tensor]) -> None:
        """Add ``fresh`` to what is ``held``, in one pass; a narrow gradient moves to the fp32 range with it."""
        kind = sum_kind(group)
        narrow = None if held.kind == kind else self._storage.open_at(held.ranges["gradient"], "gradient")
        summed, sums = self._storage.open_at(held.ranges[kind], kind, load=narrow is None), list[Sum]()
        for slot in held.slots | dict.fromkeys(fresh):
            target, addend = flat_of(slot, summed, kind), fresh.get(slot)
            if slot not in held.slots:
                sums.append(Sum(target, addend, None))
            elif narrow is not None or addend is not None:
                sums.append(Sum(target, None if narrow is None else slot.flat(narrow), addend))
        with torch.no_grad(), torch.profiler.record_function("sums of gradients on the host"):
            cpu.add_up(sums)
        self._storage.store_at(held.ranges[kind], summed)

    def _measure(self, group: Group, held: GradientState) -> None:
        missing = [slot for slot in held.slots if slot not in held.norms]
        if missing:
            flat = self._storage.open_at(held.ranges[held.kind], held.kind)
            for slot in missing:
                held.norms[slot] = self._norm(flat_of(slot, flat, held.kind))

    def read(self, slot: Slot, dtype: torch.dtype) -> Tensor:
        """A copy of ``slot``'s gradient in ``dtype``; a sum of several is fp32."""
        kind = self._state(slot.group).kind
        return _shaped(slot, self._storage.open(slot.group, kind), kind).to(dtype, copy=True)

    def _norm(self, values: Tensor) -> Tensor:
        """The 2-norm of a flat gradient: as torch's clipping takes it, or, where level 0 is a GPU, as that takes it."""
        if self._stack.level0_device.type == "cuda":
            return gradient_norm(values)
        if values.dtype != torch.float32 and values.numel() <= LONGEST_WIDENED:
            # In memory that is made once; torch reduces narrow types twenty times slower.
            if self._wide.numel() < values.numel():
                self._wide = torch.empty(values.numel(), dtype=torch.float32, device="cpu")
            values = self._wide[: values.numel()].copy_(values)
        return torch.linalg.vector_norm(values, dtype=torch.float32)

    def _scale(self, group: Group, held: GradientState, slots: list[Slot], factor: Tensor | None) -> None:
        kind = held.kind
        if factor is not None and kind != sum_kind(group):  # zero is zero in any type
            self._sum(group, held, {})
            kind = sum_kind(group)
        flat = self._storage.open_at(held.ranges[kind], kind)
        for slot in slots:
            values = flat_of(slot, flat, kind)
            values.zero_() if factor is None else values.mul_(factor)
            held.norms.pop(slot, None)
        self._storage.store_at(held.ranges[kind], flat)
