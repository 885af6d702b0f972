"""AdamW on one group at a time: by the worker on ranges in storage (`HostUpdates`), or on level 0 (`DeviceUpdates`).

On the host an update before its step first copies what it overwrites (`UndoLog`). On level 0, where weights and
gradient are still after a group's backward, it changes the loaded weights in place if nothing else holds them, and
writes into `Shadows` until the step commits it, or, if every backward is followed by its step (``undo=False``), into
the ranges themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial

from torch import Tensor

from vblackwell.errors import InsufficientMemory, StaleTensor
from vblackwell.kernels.optimizer.adamw import AdamWStep
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import AccessTrace, Group
from vblackwell.offload.layout.placement import MAX_LOCKED, deferred_groups
from vblackwell.offload.movement.gradients import GradientCollector
from vblackwell.offload.movement.lane import Lane, LaneEnd, LaneJob
from vblackwell.offload.movement.state import (
    EarlyUpdate,
    InFlightQueue,
    Job,
    LoadedWeights,
    Mover,
    Phase,
    Shared,
    current_stream,
    defer_sigint,
)
from vblackwell.offload.movement.update_loop import UndoLog, Updater, updated_kinds
from vblackwell.offload.movement.weights import WeightStreamer
from vblackwell.offload.storage.storage import Ranges, Shadows

ADVANCE_GROUPS = 3  # groups before an update's own in the forward at which it is queued, if the lane has more to do


class HostUpdates(Mover):
    """Updates of one model that its worker runs on the ranges in storage."""

    def __init__(self, shared: Shared, weights: WeightStreamer) -> None:
        super().__init__(shared)
        self._weights = weights
        self.updater = Updater(shared.storage)
        self._undo_bytes = 0
        self.undo_peak_bytes = 0  # what undo logs have taken at a time
        self._forgiven = Counter[int | None]()  # failures of the worker when all gradients were last given up
        self._broken = False  # an update of a step that came has failed, while others of it may have been made

    def start_early(self, group: Group, jobs: list[Job], gradient: Tensor | None, *, final: bool) -> EarlyUpdate | None:
        """Update ``group`` before its step, from the gradient in host memory; None if an undo log has no room."""
        undo = None
        if not final:
            size = sum(group.size_of(kind) for kind in updated_kinds(group, self._storage))
            try:
                undo = UndoLog(jobs, self._storage.take_host("undo", size))
            except InsufficientMemory:
                return None  # this group is updated at the step, which is always right
            self._undo_bytes += size
            self.undo_peak_bytes = max(self.undo_peak_bytes, self._undo_bytes)
        try:
            self.wait(group)
            self._queue(group, jobs, None, undo)
        except BaseException:
            self._free(undo)
            raise
        return EarlyUpdate(jobs, undo)

    def commit(self, group: Group, early: EarlyUpdate) -> None:
        self._worker.submit(self._free, early.rollback, group=group.index)

    def roll_back(self, group: Group, early: EarlyUpdate) -> None:
        """Queue what makes everything what it was before `start_early`; or raise what an earlier task did."""
        state = self._states[group]
        state.update_end = self._worker.submit(self._restore, group, early.rollback, group=group.index)
        state.version -= 1

    @defer_sigint()
    def update(self, group: Group, jobs: list[Job], factor: Tensor | None) -> None:
        self._queue(group, jobs, factor, None)
        self._states[group].update_is_queued()

    def wait(self, group: Group) -> None:
        """Return when the group's last update is in storage."""
        state = self._states[group]
        task = state.update_end
        if task is not None:
            task.exception()  # an interrupt leaves it to be waited for by the next caller
            state.update_end = None
        state.update_is_stored()
        if task is not None:
            task.settle()

    order_loads = wait  # a load reads what the host has written

    def is_busy(self, group: Group) -> bool:
        """Whether a load would wait for an update."""
        task = self._states[group].update_end
        return task is not None and (not task.done() or task.exception() is not None)

    def _queue(self, group: Group, jobs: list[Job], factor: Tensor | None, undo: UndoLog | None) -> None:
        self._weights.invalidate(group)
        state = self._states[group]
        state.update_end = self._worker.submit(
            self._update, group, jobs, factor, undo, state.last_load, self._forgiven[group.index], group=group.index,
            postponable=True,
        )  # fmt: skip
        state.gradient.task = state.update_end

    def _update(
        self, group: Group, jobs: list[Job], factor: Tensor | None, undo: UndoLog | None, load: Transfer | None,
        forgiven: int,
    ) -> None:  # fmt: skip
        """``forgiven``: failures of the group's tasks that concern no gradient of this update."""
        try:
            if self._worker.failures[group.index] != forgiven:
                if undo is not None:
                    return  # its step will be refused, and there is nothing to roll back
                raise StaleTensor(f"the gradient of {group.name!r} did not arrive: its update was not made")
            if load is not None:
                load.wait()  # a stream that waits is not enough: the host is about to write what the copy reads
            gradient = self._states[group].gradient
            self.updater.update(group, jobs, gradient.kind, factor, undo)
            if factor is not None:
                gradient.norms.clear()
        except BaseException:
            self._broken = self._broken or undo is None  # a rollback makes good what an early update left
            raise

    def _restore(self, group: Group, undo: UndoLog) -> None:
        try:
            undo.restore(group, self._storage)
        except BaseException:
            self._broken = True
            raise
        finally:
            self._free(undo)

    def _free(self, undo: UndoLog | None) -> None:
        if undo is not None:
            self._undo_bytes -= undo.memory.num_bytes
            self._storage.give(undo.memory)

    def check_whole(self) -> None:
        """Raise StaleTensor if an update failed: some groups are a step ahead of others."""
        if self._broken:
            raise StaleTensor(
                f"an update of model {self._name!r} failed in the background, so some of its groups are a step behind "
                "others: go on from a checkpoint (release(model) gives the weights as they are)"
            )

    def check_gradients(self) -> None:
        """`check_whole`; raise StaleTensor, too, if a task failed since gradients were last given up."""
        self.check_whole()
        if self._worker.failures != self._forgiven:
            raise StaleTensor(
                f"a background task of model {self._name!r} failed since the last zero_grad(), so its gradients may be "
                "incomplete: zero_grad(), and repeat forward and backward"
            )

    def forgive(self) -> None:
        """All gradients were given up: what failed until now concerns none that comes."""
        if self._worker.failures != self._forgiven:
            self._forgiven = self._worker.failures.copy()


class DeviceUpdates(Mover):
    """Updates on level 0, of the groups ``on_level0`` in the order of the forward; ``sliced`` are never whole there."""

    def __init__(
        self, shared: Shared, on_level0: Sequence[Group], sliced: Collection[Group], weights: WeightStreamer,
        gradients: GradientCollector, shadows: Shadows, lane: Lane,
    ) -> None:  # fmt: skip
        super().__init__(shared)
        self._on_level0 = set(on_level0)
        self._sliced = sliced
        self._weights = weights
        self._gradients = gradients
        self._lane = lane
        self._shadows = shadows
        self._device = shared.stack.level0_device
        self._on_gpu = self._device.type == "cuda"
        # Updated under the next forward even where they could be right after their backward.
        self.deferred = set(deferred_groups(on_level0, self._storage.plan)) if self._on_gpu else set[Group]()
        self._locked = InFlightQueue()  # groups whose weights an update holds on level 0
        self._due: dict[Group, tuple[list[Job], Tensor | None]] = {}  # with the factor of gradients
        self._trace = AccessTrace()  # of early updates
        self._expecting = False
        self.at_once = not self._on_gpu  # due updates; on the arena nothing would run meanwhile. Tests switch it off
        self._newest: LaneEnd | None = None

    def __contains__(self, group: Group) -> bool:
        return group in self._on_level0

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
        shadows = None if final else self._shadows.take(group, own)
        if shadows is None and not final:
            return None
        steps = [job.step.clone() for job in jobs]
        try:
            end = self._queue(group, jobs, shadows or own, self._weights.lock(group), gradient, None)
        except BaseException:
            self._shadows.give_back(shadows or {})
            raise
        self._trace.use(group.index)
        return EarlyUpdate(jobs, None if shadows is None else (steps, shadows), end.computed)

    def commit(self, group: Group, early: EarlyUpdate) -> None:
        if early.rollback is not None:
            _, shadows = early.rollback
            self._shadows.commit(group, shadows)

    def roll_back(self, group: Group, early: EarlyUpdate) -> None:
        self._trace.forget_pass()
        self.wait(group)
        self._unlock_group(group)
        self._weights.drop(group)
        self._states[group].version -= 1
        steps, shadows = early.rollback
        self._shadows.give_back(shadows)
        for job, step in zip(early.jobs, steps, strict=True):
            job.step.copy_(step)

    def _queue(
        self, group: Group, jobs: Sequence[Job], targets: Ranges, loaded: LoadedWeights | None,
        gradient: Tensor | None, factor: Tensor | None,
    ) -> LaneEnd:  # fmt: skip
        weights, state, in_flight = self._weights, self._states[group], self._storage.in_flight
        kind, sources = None, self._storage.own_ranges(group)
        if loaded is None:
            weights.invalidate(group)
        try:
            if gradient is None or self._gradients.has_all_on_host(group):
                kind = self._gradients.kind_when_idle(group)
                sources[kind] = self._storage.range(group, kind)
            end = self._lane.submit(
                LaneJob(
                    group=group,
                    numbers={job.slot: AdamWStep(**vars(job.hyper), step=int(job.step) + 1) for job in jobs},
                    sources=sources,
                    targets=targets,
                    weight=None if loaded is None else loaded.buffer,
                    gradient=gradient,
                    gradient_kind=kind,
                    factor=None if factor is None else factor.to(self._device),
                    last_load=state.last_load,
                )
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
            while len(self._locked) > MAX_LOCKED:
                self.end_oldest()
        return end

    def end_oldest(self) -> bool:
        """Let the weights go that the oldest update holds on level 0; False if there is none."""
        return self._locked.free_oldest(current_stream(self._device))

    def sweep(self) -> None:
        self._locked.sweep(current_stream(self._device))

    def _unlock_group(self, group: Group) -> None:
        """Wait for the update that still holds ``group``'s weights on level 0, of the step before at the latest."""
        state = self._states[group]
        while state.loaded is not None and state.loaded.locked and self.end_oldest():
            pass

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
        """Queue the group's due update, on the weights that the forward will use if level 0 has room for them."""
        if group not in self._due:
            return
        with defer_sigint():
            jobs, factor = due = self._due.pop(group)
            try:
                self._unlock_group(group)
                # What is stored of a sliced leaf may be written past level 0: no copy of it stays there.
                fetched = group not in self._sliced and self._weights.prefetch(group)
                loaded = self._weights.lock(group, arriving=True) if fetched else None
                self._queue(group, jobs, self._storage.own_ranges(group), loaded, None, factor)
            except BaseException:
                self._due[group] = due
                raise
            self._states[group].update_is_queued()

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
        for group in self._on_level0:
            self.wait(group)
        self.sweep()

    def free_shadows(self) -> bool:
        """Give up shadows that are not in use; False if there are none."""
        if not any(self._shadows.spare.values()):
            return False
        self._lane.drain()
        self._shadows.free_spare()
        return True
