"""When a group is updated: after `step()`, or already after its backward with a rollback.

Updates run on under the next forward; what needs a group's weights waits for that group alone. An early update
speculates that the step will come, will not clip and will use today's hyperparameters: any sign of the opposite (a new
forward, a late gradient, a read of the weights, a norm over the limit) rolls it back, and the step does it exactly.

`HostUpdates` has the worker update ranges in storage, `DeviceUpdates` a `Lane` on level 0, where weights and gradient
are still after a group's backward: it changes the loaded weights in place if nothing else holds them. Both write into
`Shadows`, which the step makes the group's ranges, or, if every backward is followed by its step (``undo=False``), into
the ranges themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import StepAbandoned
from vblackwell.kernels.optimizer.adamw import AdamWStep
from vblackwell.offload.layout.groups import AccessTrace, Group, Slot, smallest_buffer
from vblackwell.offload.layout.placement import (
    MAX_LOCKED,
    StreamedPlacement,
    deferred_groups,
    num_buffers,
    shadowed_groups,
)
from vblackwell.offload.movement.gradients import GradientCollector, by_group
from vblackwell.offload.movement.lane import CudaLane, CudaQueues, Lane, LaneEnd, LaneJob, WorkerQueues
from vblackwell.offload.movement.state import (
    EarlyUpdate,
    GradientBuffer,
    InFlightQueue,
    Job,
    LoadedWeights,
    Mover,
    Phase,
    Shared,
    Task,
    current_stream,
    defer_sigint,
    free_until,
)
from vblackwell.offload.movement.update_loop import HostUpdates
from vblackwell.offload.movement.weights import PackedView, WeightStreamer
from vblackwell.offload.storage.storage import Ranges, Shadows, spaces_of

ADVANCE_GROUPS = 3  # groups before an update's own in the forward at which it is queued, if the lane has more to do


class DeviceUpdates(Mover):
    """Updates on level 0, as ``found`` places them there."""

    def __init__(
        self, shared: Shared, found: StreamedPlacement, weights: WeightStreamer, gradients: GradientCollector
    ) -> None:
        super().__init__(shared)
        self.groups = set(found.on_level0)
        self._sliced = found.slice_rows.keys()  # never whole on level 0
        self._weights = weights
        self._gradients = gradients
        self.shadows = Shadows(self._storage)
        memory = self._storage.take("update ring", found.ring_bytes, 0).bytes
        kind, queues = (CudaLane, CudaQueues(memory.device)) if memory.is_cuda else (Lane, WorkerQueues(self._worker))
        count = num_buffers(memory.numel(), max(map(smallest_buffer, found.on_level0), default=0))
        self._lane = kind(self._stack, self._storage, memory, count, queues, self._worker)
        self._device = self._stack.level0_device
        self._on_gpu = self._device.type == "cuda"
        # Updated under the next forward even where they could be right after their backward.
        self.deferred = set(deferred_groups(found.on_level0, self._storage.plan)) if self._on_gpu else set[Group]()
        self._locked = InFlightQueue()  # groups whose weights an update holds on level 0
        self._due: dict[Group, tuple[list[Job], Tensor | None]] = {}  # with the factor of gradients
        self._trace = AccessTrace()  # of early updates
        self._expecting = False
        self.at_once = not self._on_gpu  # due updates; on the arena nothing would run meanwhile. Tests switch it off
        self._newest: LaneEnd | None = None

    def expect_backward(self) -> None:
        """A gradient is on its way: bring up states in the order in which the last backward needed them."""
        if not self._expecting:
            self._expecting = True
            self.start_all_due()
            self._lane.expect([self._groups[index] for index in self._trace.last_pass])
            self._lane.pump()

    def start_early(self, group: Group, jobs: list[Job], gradient: Tensor | None, *, final: bool) -> EarlyUpdate | None:
        """Update ``group`` before its step, from ``gradient`` on level 0; None if there is no room for shadows."""
        self._unlock_group(group)
        self.sweep()
        own = self._storage.own_ranges(group)
        shadows = None if final else self.shadows.take(group, own)
        if shadows is None and not final:
            return None
        steps = [job.step.clone() for job in jobs]
        try:
            end = self._queue(group, jobs, shadows or own, gradient, None)
        except BaseException:
            self.shadows.give_back(shadows or {})
            raise
        self._trace.use(group.index)
        return EarlyUpdate(jobs, steps, shadows, end.computed)

    def commit(self, group: Group, shadows: Ranges) -> None:
        self.shadows.give_back(self.shadows.swap(group, shadows))  # in the lane's order

    def roll_back(self, group: Group, shadows: Ranges, earlier: Task | None) -> None:
        self._trace.forget_pass()
        self.wait(group)
        self._unlock_group(group)
        self._weights.drop(group)
        self.shadows.give_back(shadows)

    def _queue(
        self, group: Group, jobs: list[Job], targets: Ranges, gradient: Tensor | None, factor: Tensor | None
    ) -> LaneEnd:
        """``gradient``: on level 0, where the weights are too; None: everything is in storage."""
        weights, state, in_flight = self._weights, self._states[group], self._storage.in_flight
        kind, sources = None, self._storage.own_ranges(group)
        loaded = self._fetch(group) if gradient is None else weights.lock(group)
        if loaded is None:
            weights.invalidate(group)
        try:
            if gradient is None or self._gradients.has_all_on_host(group):
                kind = self._gradients.kind_when_idle(group)
                sources[kind] = self._storage.range(group, kind)
            numbers = {job.slot: AdamWStep(**vars(job.hyper), step=int(job.step) + 1) for job in jobs}
            weight = None if loaded is None else loaded.buffer
            factor = None if factor is None else factor.to(self._device)
            end = self._lane.submit(
                LaneJob(group, numbers, sources, targets, weight, gradient, kind, factor, state.last_load)
            )
        except BaseException:
            if loaded is None:
                state.version -= 1
            else:  # some of it may be updated
                weights.unlock(loaded)
                weights.drop(group)
            raise
        for job in jobs:
            job.step.add_(1)
        previous: LaneEnd | None = state.update_end
        if previous is not None and previous.stored.done():
            in_flight.discard(previous.stored)
        in_flight.add(end.stored)  # nobody gives the ranges back before
        state.update_end = self._newest = end
        if loaded is not None:
            weights.mark_updated(loaded, end.computed)
            self._locked.add((end.stored,), partial(weights.unlock, loaded))
            free_until(lambda: len(self._locked) <= MAX_LOCKED, self.end_oldest)
        return end

    def end_oldest(self) -> bool:
        """Let the weights go that the oldest update holds on level 0; False if there is none."""
        return self._locked.free_oldest(current_stream(self._device))

    def sweep(self) -> None:
        self._locked.sweep(current_stream(self._device))

    def _unlock_group(self, group: Group) -> None:
        """Wait for the update that still holds ``group``'s weights on level 0, of the step before at the latest."""
        state = self._states[group]
        free_until(lambda: state.loaded is None or not state.loaded.locked, self.end_oldest)

    # -- at the step ---------------------------------------------------------------------------------------------------

    def update(self, group: Group, jobs: list[Job], factor: Tensor | None) -> None:
        """The step's update of ``group``: everything comes from storage, at once or a little later (`advance`)."""
        self._start_due(group)  # of another step, whose turn is first
        self._due[group] = jobs, factor
        self._states[group].to(Phase.DUE)
        if self.at_once:
            self._start_due(group)

    def advance(self, group: Group) -> None:
        """The forward reaches ``group``: queue the updates that its successors will need, and one if the lane is idle.

        Not all at once at the step: whatever else has to pass the copies in the GPU's copy engine (tokens, a loss, the
        next group's weights) would wait for them.
        """
        if self._due:
            last = group.index + ADVANCE_GROUPS
            for due in [due for due in self._due if due.index <= last]:
                self._start_due(due)
            if self._due and (self._newest is None or self._newest.computed.done()):
                self._start_due(min(self._due, key=lambda due: due.index))

    def _start_due(self, group: Group) -> None:
        """Queue the group's due update."""
        if group not in self._due:
            return
        with defer_sigint():
            jobs, factor = self._due[group]
            self._unlock_group(group)
            self._queue(group, jobs, self._storage.own_ranges(group), None, factor)
            del self._due[group]
            self._states[group].update_is_queued()

    def _fetch(self, group: Group) -> LoadedWeights | None:
        """The weights that the next forward will use, locked, or on their way there; None where they have no room."""
        weights = self._weights
        if not weights.is_loaded(group):
            # What is stored of a sliced leaf may be written past level 0: no copy of it stays there.
            if group in self._sliced or self.is_busy(group) or not weights.free_for(group):
                return None
            self._order_loads(group)
            if not weights.load_ahead(group):
                return None
        return weights.lock(group, arriving=True)

    def start_all_due(self) -> None:
        for group in list(self._due):
            self._start_due(group)

    def end_step(self) -> None:
        """The step has been queued; the next backward is expected to go as this one did."""
        self._expecting = False
        self._trace.begin_pass()

    # -- for callers that need a group ---------------------------------------------------------------------------------

    def order_loads(self, group: Group) -> None:
        """Weights that are loaded from now on are those after the group's last update."""
        self._start_due(group)
        self._order_loads(group)

    def _order_loads(self, group: Group) -> None:
        state = self._states[group]
        if state.update_end is not None:
            self._lane.order_loads(state.update_end)
        state.update_is_stored()

    def wait(self, group: Group) -> None:
        """Return when the group's last update is in storage."""
        self._start_due(group)
        state = self._states[group]
        end: LaneEnd | None = state.update_end
        if end is not None:
            try:
                end.stored.wait()
            except Exception:
                state.update_end = None
                raise
            state.update_end = None  # not where an interrupt came: the next caller must wait as well
            self._storage.in_flight.discard(end.stored)
        state.update_is_stored()

    def is_busy(self, group: Group) -> bool:
        """Whether a load would wait for an update: the host does, where level 0 is RAM."""
        end: LaneEnd | None = self._states[group].update_end
        return not self._on_gpu and end is not None and not end.stored.done()

    def drain(self) -> None:
        self.start_all_due()
        self._lane.expect(())  # the caller is about to change what was brought up
        self._expecting = False
        self._lane.drain()
        for group in self.groups:
            self.wait(group)
        self.sweep()

    def free_shadows(self) -> bool:
        """Give up shadows that are not in use; False if there are none."""
        if not any(self.shadows.spare.values()):
            return False
        self._lane.drain()
        return self.shadows.free_spare()


class StepControl(Mover):
    """Decides when the groups of one model are updated, and ties together what moves their bytes.

    Attributes:
        steps: torch's count of each parameter's steps. source: the `VGPUAdamW`.
        follow_clipping: a step that clipped is likely followed by another, whose early updates are in vain. Speed only.
    """

    def __init__(self, shared: Shared, found: StreamedPlacement) -> None:
        super().__init__(shared)
        self.weights = WeightStreamer(shared, found.budget_bytes)
        self.gradients = GradientCollector(shared)
        self.host_updates = host = HostUpdates(shared, self.weights)
        level0 = DeviceUpdates(shared, found, self.weights, self.gradients) if found.ring_bytes else None
        self.level0 = level0
        self._places = {
            group: level0 if level0 is not None and group in level0.groups else host for group in self._groups
        }
        budget = shared.budget
        budget.drop_weights, budget.end_gradient = self.weights.drop_one, self.gradients.end_oldest
        if level0 is not None:
            budget.end_update, budget.sweep_updates = level0.end_oldest, level0.sweep
            budget.free_spare = level0.free_shadows
        self._forwards = 0
        self._open_window = False  # gradients have come since the last step
        self.steps = defaultdict[Slot, Tensor](lambda: torch.zeros((), dtype=torch.float32))
        self.source: Any = None
        self.follow_clipping = True
        self._clipped = False
        # Gradients in storage that a step multiplied only as it read them, and by what.
        self._unscaled: dict[Group, tuple[list[Slot], Tensor]] = {}

    # -- signals from the model ----------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the whole model starts: a step that was speculated upon has not come."""
        self.gradients.in_flight.sweep()
        self.roll_back()
        if torch.is_grad_enabled():
            self._forwards += 1

    def before_gradient(self, group: Group) -> None:
        """More gradient for ``group``: if it was thought complete, that was wrong."""
        if self.source is not None:
            self._open_window = True
            self.gradients.measuring = self.source.max_grad_norm is not None
        self.roll_back(group)
        self.scale_stored(group)
        if self.level0 is not None:
            self.level0.expect_backward()

    def take_gradient(self, slot: Slot) -> None:
        """Autograd has made ``slot``'s gradient."""
        self.before_gradient(slot.group)
        whole = self.gradients.take(slot)
        if whole is not None:
            self._send_gradient(whole)

    def finish_backward(self) -> None:
        """Backward is over: groups that got only part of their gradients send these too."""
        for buffer in self.gradients.unsent:
            self._send_gradient(buffer)

    @defer_sigint()
    def _send_gradient(self, buffer: GradientBuffer) -> None:
        adding = self.gradients.close(buffer)
        self.gradients.send(buffer, self._update_from(buffer, adding))
        self.gradient_sent(buffer.group)

    def _update_from(self, buffer: GradientBuffer, adding: bool) -> EarlyUpdate | None:
        """Update from a gradient on level 0, if that is possible; ``adding``: there is more of it in host memory."""
        source, group = self.source, buffer.group
        if source is None or not self._may_start_early(group):
            return None
        if adding and not (buffer.is_whole() and self.gradients.has_all_on_host(group)):
            return None  # some parameters have earlier gradients, others not: the worker sorts that out
        if self._places[group] is self.host_updates:
            # The compute weight in storage is dead once backward has loaded it: the update makes it anew, from the
            # master. If that is sure to come, the gradient needs no range of its own.
            if not adding and not source.undo and (group, "master") in self._storage:
                buffer.landing = "weight"
            return None
        return None if self.level0 and group in self.level0.deferred else self._start_early(group, buffer.bytes)

    def _may_start_early(self, group: Group) -> bool:
        """Whether the group's gradient is whole and its step is expected to be as announced.

        Only where all of the group is updated: backward may read frozen parameters after the last gradient, and a range
        that is written anew would lose those of another optimizer. A scaled loss means a factor at the step.
        """
        source = self.source
        if not source.update_in_backward or self._forwards < source.accumulation_steps or source.loss_scale != 1.0:
            return False
        if self._clipped and self.follow_clipping:
            return False
        if not all(slot.param.requires_grad and source.hyper_of(slot) is not None for slot in group.slots):
            return False
        return all(self.gradients.has(slot) for slot in group.slots) and not self.weights.is_pinned(group)

    def gradient_sent(self, group: Group) -> None:
        """The group's gradient is on its way; update after it if that was asked for and is possible."""
        source = self.source
        if source is None:
            return
        if source.max_grad_norm is not None and self._forwards >= source.accumulation_steps:
            self.gradients.measure_later(group)
        if self._places[group] is self.host_updates and self._may_start_early(group):
            self._start_early(group, None)

    # -- updates before their step -------------------------------------------------------------------------------------

    def _start_early(self, group: Group, gradient: Tensor | None) -> EarlyUpdate | None:
        """Update ``group`` now; None if there is no room for a rollback."""
        if self.source.undo and group not in self._shadowed:
            return None
        jobs = self.jobs(group)
        with defer_sigint():
            early = self._places[group].start_early(group, jobs, gradient, final=not self.source.undo)
            if early is not None:
                self._states[group].early = early
                self._states[group].to(Phase.EARLY)
        return early

    @cached_property
    def _shadowed(self) -> set[Group]:
        """Groups whose shadows have room. Asked when gradients and states are placed and a forward has run."""
        level0, plan = self.level0, replace(self._storage.plan, levels=tuple(spaces_of(self._stack)))
        early = [group for group in self._groups if level0 is None or group not in level0.deferred]
        return set(shadowed_groups(filter(Group.all_trainable, early), plan))

    def _keep(self, group: Group) -> None:
        state = self._states[group]
        early, state.early = state.early, None
        assert early is not None
        state.update_is_queued()
        if early.shadows is None:
            self.gradients.clear(group.slots)

    def roll_back(self, *groups: Group) -> None:
        """Undo the early updates of ``groups``, or all; `StepAbandoned` where one is final, which stays."""
        early = {group: found for group in groups or self._groups if (found := self._states[group].early) is not None}
        final = [group for group, update in early.items() if update.shadows is None]
        for group in final:
            self._keep(group)
            del early[group]
        with defer_sigint() if early else nullcontext():  # of all: what is cancelled must not be committed
            for group in early:
                self._worker.cancel(self._states[group].update_end)
            for group, update in early.items():
                place, state = self._places[group], self._states[group]
                assert update.shadows is not None
                place.roll_back(group, update.shadows, update.earlier)
                for job, step in zip(update.jobs, update.steps, strict=True):
                    job.step.copy_(step)
                state.early = None
                state.version -= 1
                state.to(Phase.STORED if state.loaded is None else Phase.LOADING)
                place.wait(group)
        if final:  # after everything else is in order: the error comes once
            raise StepAbandoned(
                f"{final[0].name!r} of {self._name!r} was updated after its backward, and with undo=False that is "
                "final, but the step did not come as announced (a second backward, another forward or a read of the "
                "weights before step(), changed hyperparameters, step(only=...), or zero_grad() before step()): reload "
                "the last checkpoint, and use undo=True"
            )

    # -- for callers that need a group ---------------------------------------------------------------------------------

    def wait_for_updates(self, group: Group) -> None:
        """Return when the group's bytes in storage are those of the last `step`, for the host and for loads."""
        self.roll_back(group)
        self._places[group].wait(group)

    def order_loads(self, group: Group) -> None:
        """Return when weights that are loaded from now on will be those of the last `step`."""
        self.roll_back(group)
        self._places[group].order_loads(group)

    def acquire(self, group: Group) -> Tensor:
        """The group's bytes on level 0, arrived, kept until they are unpinned; the groups after it start to load."""
        self._use(group)
        buffer = self.weights.pin(group)
        try:
            self._prefetch_upcoming()
        except BaseException:
            self.weights.unpin(group)
            raise
        return buffer

    def unpack(self, packed: PackedView) -> Tensor:
        """The tensor that `WeightStreamer.pack` was given; StaleTensor if its group was updated since."""
        self.order_loads(packed.group)
        self.weights.check_unchanged(packed)
        self._use(packed.group)
        tensor = self.weights.unpack(packed)
        self._prefetch_upcoming()
        return tensor

    def prefetch(self, group: Group) -> bool:
        """Start loading ``group`` if that costs nothing that is needed sooner; False if not. Never blocks."""
        weights, state = self.weights, self._states[group]
        if weights.is_loaded(group):
            return True
        # Where an update is on its way, a load would wait for it, or undo it.
        if state.phase is Phase.EARLY or self._places[group].is_busy(group) or not weights.free_for(group):
            return False
        self.order_loads(group)
        return weights.is_loaded(group) or weights.load_ahead(group)  # by an update that was due, or here

    def _use(self, group: Group) -> None:
        """Have ``group`` on level 0, arrived."""
        self.weights.use(group)
        state = self._states[group]
        if state.loaded is None or state.phase in (Phase.EARLY, Phase.DUE):  # not the last step's, or not for long
            self.order_loads(group)
        self.weights.arrive(group)

    def _prefetch_upcoming(self) -> None:
        for group in self.weights.take_asked():
            self.prefetch(group)
        for group in self.weights.upcoming():
            if not self.prefetch(group):
                return

    def drain(self) -> None:
        """Return when every update whose step came has read its gradient."""
        if self.level0 is not None:
            self.level0.drain()

    @property
    def shadow_bytes(self) -> int:
        """What shadows have taken at a time."""
        return self.host_updates.shadows.peak_bytes + (0 if self.level0 is None else self.level0.shadows.peak_bytes)

    # -- gradients between backward and step ---------------------------------------------------------------------------

    def collect(self) -> None:
        """Let every gradient arrive and be measured."""
        self._arrive()
        self.gradients.measure(self._groups)

    def _arrive(self) -> None:
        """Let gradients be in host memory, or on their way. Early updates stay, unless they consumed them."""
        if self.source is not None and not self.source.undo:
            self.roll_back()
        self.finish_backward()
        self.scale_stored()

    def gradient_norm(self, slot: Slot) -> Tensor:
        """The 2-norm of a gradient, an fp32 scalar."""
        self._arrive()
        self.gradients.measure([slot.group])
        return self.gradients.norm(slot)

    def read_gradient(self, slot: Slot) -> Tensor:
        """A copy of a gradient on the CPU."""
        self._arrive()
        return self._worker.submit(self.gradients.read, slot, group=slot.group.index).result()

    def scale_gradients(self, slots: Iterable[Slot], factor: Tensor) -> None:
        """Multiply gradients by a scalar; updates that were made with the gradients as they were are rolled back."""
        if factor != 1:
            self.roll_back()
            self.scale_stored()
            for group, held in by_group(slots).items():
                self._scale(group, held, factor.cpu())

    def _scale(self, group: Group, slots: list[Slot], factor: Tensor) -> None:
        self._places[group].wait(group)  # an update whose step came may still read what is about to change
        self.gradients.scale_later(group, slots, factor)

    def scale_stored(self, *groups: Group) -> None:
        """Multiply gradients in storage, of ``groups`` or all, by the factor of the last step, as torch's clipping does
        at once: rarely needed, as nearly every step is followed by `zero_grad`.
        """
        for group in groups or list(self._unscaled):
            if group in self._unscaled:
                held, factor = self._unscaled.pop(group)
                slots = [slot for slot in held if self.gradients.has(slot)]
                if slots:  # else a sum would be reserved for nothing
                    self._scale(group, slots, factor)

    def zero_gradients(self, slots: list[Slot]) -> None:
        """Make gradients zero."""
        self.roll_back()
        self.finish_backward()
        self.drain()  # updates may still read what is about to be zero
        for group, held in by_group(slots).items():
            self.gradients.scale_later(group, held, None)

    def clear_gradients(self, slots: list[Slot]) -> None:
        """Forget gradients."""
        self.roll_back()
        self.finish_backward()
        self.gradients.clear(slots)

    # -- the step ------------------------------------------------------------------------------------------------------

    def jobs(self, group: Group, wanted: Callable[[Slot], bool] = lambda slot: True) -> list[Job]:
        """What a step would do to ``group`` now: its parameters that have gradients and belong to the optimizer."""
        return [
            Job(slot, self.steps[slot], hyper)
            for slot in group.slots
            if (hyper := self.source.hyper_of(slot)) is not None and wanted(slot) and self.gradients.has(slot)
        ]

    def commit_step(self, wanted: Callable[[Slot], bool], factor: Tensor | None) -> None:
        """The step has come: commit early updates that are as it asks, queue others with gradients times ``factor``."""
        self.finish_backward()
        self.scale_stored()
        if factor is not None:
            self.roll_back()
        for group in self._groups:
            jobs, early = self.jobs(group, wanted), self._states[group].early
            if early is not None and early.jobs == jobs:
                with defer_sigint():
                    self._keep(group)
                    if early.shadows is not None:
                        self._places[group].commit(group, early.shadows)
                continue
            self.roll_back(group)
            if jobs:
                self._places[group].update(group, jobs, factor)
                if factor is not None and (self._places[group] is self.level0 or not group.is_fp32):
                    self._unscaled[group] = [job.slot for job in jobs], factor
        if self.level0 is not None:
            self.level0.end_step()
        self._forwards = 0
        self._open_window = False
        self._clipped = factor is not None

    def skip_step(self) -> None:
        """The step has come but must change nothing (gradients that are not finite)."""
        self.roll_back()
        self._forwards = 0

    def begin_window(self) -> None:
        """All gradients are given up: if there were any since the last step, micro-batches are counted anew."""
        self.roll_back()
        if self._open_window:
            self._forwards, self._open_window = 0, False
