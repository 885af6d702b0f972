"""Gradients leave level 0 as soon as a group has all of them, as one flat range, and are summed at home.

autograd accumulates into ``p.grad`` as always; a hook then copies it into the group's flat buffer and clears it. When the
last trainable parameter of the group has arrived (or backward ends without it) the buffer travels home. The first arrival
since `zero_grad` lands there directly; later ones are added in fp32, in the order in which PyTorch would have added them.
Per-parameter norms are taken at home, as `torch.nn.utils.clip_grad_norm_` would take them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack

import torch

from vblackwell.errors import InsufficientMemory, Unsupported
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.copying import start_copy
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.movement.departure import Claim, Departure, GroupGradient, Leaving
from vblackwell.offload.movement.host_gradients import GradientsAtHome, gradient_norm
from vblackwell.offload.movement.weights import current_stream
from vblackwell.offload.movement.worker import Outcome, Worker
from vblackwell.offload.storage.storage import Storage
from vblackwell.units import format_bytes

# Buffers on their way home beside the one that fills: more would only wait for the link on level 0 instead of at home.
MOST_DEPARTURES = 3


class SliceLanding:
    """One gradient on its way home in slices of rows."""

    def __init__(self, collector: GradientCollector, slot: Slot, adding: bool) -> None:
        self._collector = collector
        self._slot = slot
        self._adding = adding

    def take(self, start: int, rows: torch.Tensor, reservation: Reservation, pool: ThreadPoolExecutor) -> None:
        """Rows from ``start`` on, through ``reservation`` on level 0, which this ends."""
        self._collector.send_slice(self._slot, start, rows, reservation, self._adding, pool)

    def finish(self) -> None:
        """That was the last slice."""
        self._collector.finish_slices(self._slot, self._adding)


class GradientCollector:
    """Gathers the gradients of one model.

    Args:
        drop_weights: called when level 0 is full; drops an idle group of weights, False if there is none.
        departing: called in the caller's thread with a buffer that is about to leave, and whether it will be added to what is at home;
            an update may claim it.
        arrived: called in the caller's thread with a group whose gradient of this backward is complete and under way.
    """

    def __init__(
        self, stack: VGPUStack, groups: list[Group], homes: Storage, worker: Worker,
        drop_weights: Callable[[], bool], departing: Callable[[Leaving, bool], Claim], arrived: Callable[[Group], None],
    ) -> None:  # fmt: skip
        self._stack = stack
        self._groups = groups
        self._homes = homes
        self._worker = worker
        self._drop_weights = drop_weights
        self._departing = departing
        self.free_spare: Callable[[], bool] = lambda: (
            False
        )  # gives up host memory that is kept for speed; False if there is none
        self._arrived = arrived
        self._filling: dict[int, Leaving] = {}
        self._departures: deque[Departure] = deque()
        self._summing: deque[Outcome] = deque()  # tasks of the worker that give host memory back, oldest first
        self._state = [GroupGradient() for _ in groups]
        self.home = GradientsAtHome(stack, homes, self._state)

    # -- in backward -------------------------------------------------------------------------------------------------

    def take(self, slot: Slot) -> None:
        """Copy ``slot``'s fresh gradient into its group's buffer and clear it."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient, slot.param.grad = slot.param.grad, None
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise Unsupported(
                f"{slot.name!r} has a sparse gradient: offloaded parameters need dense ones (sparse=False)"
            )
        leaving = self._filling.get(slot.group.index)
        if leaving is not None and slot in leaving.slots:  # a second part of the same backward (reentrant checkpoint)
            self._leave(leaving)
            leaving = None
        if leaving is None:
            leaving = self._filling[slot.group.index] = self._open(slot.group)
        with torch.no_grad():
            slot.view(leaving.buffer).copy_(gradient)
        leaving.slots[slot] = None
        if len(leaving.slots) == leaving.expected:  # not counted anew for each: groups of experts have hundreds
            self._leave(leaving)

    def finish_backward(self) -> None:
        """Backward is over: groups that got only part of their gradients leave too."""
        for leaving in list(self._filling.values()):
            self._leave(leaving)

    def _open(self, group: Group) -> Leaving:
        while len(self._departures) >= MOST_DEPARTURES:
            self.make_room()
        with torch.inference_mode(False):
            while True:
                try:
                    reservation = self._homes.take(f"{group.name}/leaving", group.num_bytes, 0)
                    break
                except InsufficientMemory as error:
                    if not (self.make_room() or self._drop_weights()):
                        level = self._stack.levels[0]
                        raise InsufficientMemory(
                            f"the gradient of group {group.name!r} needs {format_bytes(group.num_bytes)} on level 0 ({level.name}), which "
                            f"has {format_bytes(level.capacity_bytes)}, all in use: raise fast_memory (the capacity of level 0)",
                            needed_bytes=group.num_bytes,
                            available_bytes=level.capacity_bytes - level.used_bytes,
                        ) from error
            buffer = reservation.view()
        assert buffer is not None, "level 0 is addressable"
        return Leaving(group, reservation, buffer, len(group.trainable()))

    def _leave(self, leaving: Leaving, *, early: bool = False) -> None:
        """Send what fills on its way; ``early``: before it is known whether more comes, so that nothing is begun behind it."""
        group, leaving.goes = leaving.group, True
        state = self._state[group.index]
        adding = bool(state.slots)
        claim = self._departing(leaving, adding)
        claimed = () if claim.end is None else (claim.end,)
        if claim.final:
            del self._filling[group.index]
            self._departures.append(Departure(leaving.reservation, claimed))
        else:
            transfer: Transfer | None = None
            try:
                if claim.landing == "gradient":
                    self._reserve_home(group, adding)
                if adding:
                    self._send_to_sum(leaving, claim.end)
                else:
                    self.wait_idle(group)
                    transfer = self._stack.write(self._homes.range(group, claim.landing), leaving.buffer)
                    self._worker.submit(
                        self.home.land, group, list(leaving.slots), transfer, claim.landing, group=group.index,
                        arriving=transfer,
                    )  # fmt: skip
                    state.kind_queued = claim.landing
                    self._departures.append(Departure(leaving.reservation, (transfer, *claimed)))
            except BaseException:
                with ExitStack() as ends:  # the readers of the buffer end first, then it is given back
                    ends.callback(self._homes.give, leaving.reservation)
                    for end in (*claimed, *(() if transfer is None else (transfer,))):
                        ends.callback(end.wait)
                raise
            finally:
                del self._filling[group.index]
        leaving.buffer = torch.empty(0)
        state.slots.update(leaving.slots)
        if not early:
            self._arrived(group)

    def _send_to_sum(self, leaving: Leaving, reader: Transfer | None) -> None:
        """What leaves is added to the sum at home by the worker, after ``reader`` has read that."""
        group, slots, reservation = leaving.group, list(leaving.slots), leaving.reservation
        state = self._state[group.index]
        state.level0_norms.clear()
        claimed = () if reader is None else (reader,)
        if leaving.buffer.device.type == "cpu":  # the arena: the worker reads it where it is
            self._stack.count_link(0, self._homes.range(group, "gradient").level, leaving.buffer.nbytes)
            state.task = self._worker.submit(
                self.home.add, group, slots, reservation, claimed, False, group=group.index
            )
            self._departures.append(Departure(reservation, (state.task, *claimed)))
        else:
            incoming = self._reserve_incoming(group.num_bytes)
            transfer: Transfer | None = None
            try:
                transfer = self._stack.write(incoming, leaving.buffer)
                before = (transfer, *claimed)
                state.task = self._worker.submit(
                    self.home.add, group, slots, incoming, before, True, group=group.index, arriving=transfer
                )
            except Exception:
                with ExitStack() as ends:
                    ends.callback(self._homes.give, incoming)
                    if transfer is not None:
                        ends.callback(transfer.wait)
                raise
            self._summing.append(state.task)
            self._departures.append(Departure(reservation, before))
        state.kind_queued = _sum_kind(group)

    def begin_slices(self, slot: Slot) -> SliceLanding:
        """A gradient of ``slot`` is about to arrive in slices of rows (`SlicedLeaf`)."""
        adding = bool(self._state[slot.group.index].slots)
        self._reserve_home(slot.group, adding)
        if not adding:
            self.wait_idle(slot.group)
        return SliceLanding(self, slot, adding)

    def _reserve_home(self, group: Group, adding: bool) -> None:
        kinds = ["gradient", *(["accumulated"] if adding and not group.is_fp32 else [])]
        if all((group, kind) in self._homes for kind in kinds):
            return
        while self._end_summing():  # once: what is lent for a moment must not push it to a disk for good
            pass
        # The other sums will follow: where they spill, the host memory that they pass through is taken before they fill it.
        later = [(each, "accumulated") for each in self._groups if kinds[1:] and each.trainable() and not each.is_fp32]
        try:
            self._homes.reserve([(group, kind) for kind in kinds], later)
        except InsufficientMemory:
            if not self.free_spare():
                raise
            self._homes.reserve([(group, kind) for kind in kinds], later)

    def wait_idle(self, group: Group) -> None:
        """Return when the worker is done with the group's range at home: a copy into it goes past the worker's order."""
        task, state = self._state[group.index].task, self._state[group.index]
        if task is not None:
            task.exception()  # an interrupt leaves it to be waited for by the next copy
            state.task = None
            task.settle()

    def occupy(self, group: Group, task: Outcome) -> None:
        """``task`` of the worker reads or writes the group's range at home."""
        self._state[group.index].task = task

    def _reserve_incoming(self, num_bytes: int) -> Reservation:
        """Host memory for a gradient that will be added: the range at home holds the sum so far."""
        while self._summing and self._summing[0].done():
            self._summing.popleft()
        while True:
            try:
                return self._homes.take_host("incoming", num_bytes)
            except InsufficientMemory:
                if not (self._end_oldest(on_host=True) or self._end_summing() or self.free_spare()):
                    raise

    def _end_summing(self) -> bool:
        """Wait until the worker has given back host memory; False if it has none."""
        if not self._summing:
            return False
        wait([self._summing.popleft()])  # its failure is raised by the worker
        return True

    def make_room(self) -> bool:
        """Free the oldest departing bytes for what the current stream queues from now on; False if there are none.

        Where none are departing, the group that has waited longest for the rest of its gradients leaves without it: there may be
        no rest, as for experts that got no token, and what comes is added. On a GPU the stream waits and not the host: a host
        that does has nothing queued when it wakes, and link and GPU stand still.
        """
        if not self._departures:
            waiting = next((leaving for leaving in self._filling.values() if not leaving.goes), None)
            if waiting is not None:
                self._leave(waiting, early=True)
        return self._end_oldest(on_host=False)

    def _end_oldest(self, *, on_host: bool) -> bool:
        if not self._departures:
            return False
        oldest = self._departures.popleft()
        try:
            if on_host or not oldest.order(current_stream(self._stack.level0_device)):
                oldest.wait()
        finally:
            self._homes.give(oldest.reservation)
        return True

    def sweep(self) -> None:
        """Free what has departed, without waiting."""
        while self._departures and self._departures[0].over():
            self._end_oldest(on_host=True)

    def finish_slices(self, slot: Slot, adding: bool) -> None:
        """The last slice is under way."""
        state = self._state[slot.group.index]
        state.slots[slot] = None
        state.kind_queued = _sum_kind(slot.group) if adding else "gradient"
        self._worker.submit(self.home.note_landed, slot, adding, group=slot.group.index)
        self._arrived(slot.group)

    def send_slice(
        self,
        slot: Slot,
        start: int,
        rows: torch.Tensor,
        reservation: Reservation,
        adding: bool,
        pool: ThreadPoolExecutor,
    ) -> None:
        """Take ``rows`` into the level-0 ``reservation`` and send them home."""
        while len(self._departures) >= MOST_DEPARTURES:
            self.make_room()
        source, transfer = reservation, None
        try:
            buffer = reservation.view()
            assert buffer is not None
            with torch.no_grad():
                buffer.view(slot.dtype).view(rows.shape).copy_(rows)
            self._stack.count_link(0, self._homes.range(slot.group, "gradient").level, rows.nbytes)
            if buffer.device.type != "cpu":
                source = self._reserve_incoming(buffer.nbytes)
                landing = source.view()
                assert landing is not None
                transfer = start_copy(landing, buffer, pool)
            task = self._worker.submit(
                self.home.land_slice, slot, start, len(rows), adding, source, transfer, group=slot.group.index
            )
        except Exception:
            with ExitStack() as ends:
                for held in {reservation, source}:
                    ends.callback(self._homes.give, held)
                if transfer is not None:
                    ends.callback(transfer.wait)
            raise
        self.occupy(slot.group, task)
        if transfer is not None:
            self._summing.append(task)
        self._departures.append(Departure(reservation, (task if transfer is None else transfer,)))

    def measure_on_level0(self, leaving: Leaving) -> None:
        """Take the norms of a gradient that is on level 0, which is CUDA: no pass over it at home."""
        norms = self._state[leaving.group.index].level0_norms
        for slot in leaving.slots:
            norms[slot] = gradient_norm(slot.flat(leaving.buffer))

    def is_measured(self, group: Group) -> bool:
        """Whether the norms of all of the group's gradients were taken on level 0."""
        state = self._state[group.index]
        return all(slot in state.level0_norms for slot in state.slots)

    def has_at_home(self, group: Group) -> bool:
        """Whether all gradients of the group are at home, or on their way."""
        return all(slot in self._state[group.index].slots for slot in group.trainable())

    def settled_kind(self, group: Group) -> str:
        """`kind_at_home` for the thread that runs the model, once the worker is done with the sum."""
        if self._stack.level0_device.type != "cuda":
            self._worker.drain()
        self.wait_idle(group)
        return self._state[group.index].kind_queued

    def consume(self, group: Group) -> None:
        """A final update has used the group's gradients; they never went home, or are overwritten there."""
        self.clear(group.slots)

    # -- between backward and step ---------------------------------------------------------------------------------

    def has(self, slot: Slot) -> bool:
        """Whether ``slot`` has a gradient, at home or on its way."""
        leaving = self._filling.get(slot.group.index)
        return slot in self._state[slot.group.index].slots or (leaving is not None and slot in leaving.slots)

    def norm(self, slot: Slot) -> torch.Tensor:
        """The 2-norm of ``slot``'s gradient, an fp32 scalar; after `measure` has run and been waited for, or `is_measured`."""
        state = self._state[slot.group.index]
        found = state.level0_norms.get(slot)
        return state.norms[slot] if found is None else found

    def clear(self, slots: list[Slot]) -> None:
        """Forget the gradients of ``slots``."""
        for slot in slots:
            self._state[slot.group.index].slots.pop(slot, None)
            self._state[slot.group.index].level0_norms.pop(slot, None)
        for group, held in _by_group(slots).items():
            self._worker.submit(self.home.forget, group, held, group=group.index)

    def zero(self, slots: list[Slot]) -> None:
        """Make the gradients of ``slots`` zero but keep them (``zero_grad(set_to_none=False)``)."""
        for group, held in _by_group(slots).items():
            self.scale_later(group, held, None)

    def scale_later(self, group: Group, slots: list[Slot], factor: torch.Tensor | None) -> None:
        """Queue `scale`."""
        for slot in slots:
            self._state[group.index].level0_norms.pop(slot, None)
        if factor is not None:
            self._reserve_home(group, adding=True)
            self._state[group.index].kind_queued = _sum_kind(group)
        self.occupy(group, self._worker.submit(self.home.scale, group, slots, factor, group=group.index))


def _sum_kind(group: Group) -> str:
    """Which range holds a sum of gradients."""
    return "gradient" if group.is_fp32 else "accumulated"


def _by_group(slots: list[Slot]) -> dict[Group, list[Slot]]:
    found: dict[Group, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot.group, []).append(slot)
    return found
