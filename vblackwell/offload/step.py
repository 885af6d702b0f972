"""When a group is updated: after `step()`, or already after its backward with a rollback.

Updates run on under the next forward; what needs a group's weights waits for that group alone. An early update
speculates that the step will come, will not clip and will use today's hyperparameters: any sign of the opposite (a new
forward, a late gradient, a read of the weights, a norm over the limit) rolls it back, and the step does it exactly.

`HostUpdates` has the worker update ranges in storage, `DeviceUpdates` a `Lane` on level 0. Before the step both make
the weights alone, of states that stay a step behind (`Behind`), or write into `Shadows`, which the step makes the
group's ranges, or, if every backward is followed by its step (``undo=False``), into the ranges themselves.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import InsufficientMemory, StepAbandoned
from vblackwell.kernels.optimizer.adamw import AdamWStep
from vblackwell.offload.clipping import Clipping
from vblackwell.offload.layout.groups import OLD_GRADIENT, OLD_KINDS, OLD_WEIGHT, Group, Slot
from vblackwell.offload.layout.placement import StreamedPlacement, old_kinds
from vblackwell.offload.movement.device_updates import DeviceUpdates
from vblackwell.offload.movement.gradients import GradientCollector
from vblackwell.offload.movement.host_updates import HostUpdates
from vblackwell.offload.movement.spare import SpareMemory
from vblackwell.offload.movement.state import EarlyUpdate, GradientBuffer, Job, Mover, Phase, Shared, defer_sigint
from vblackwell.offload.movement.weights import PackedView, WeightStreamer
from vblackwell.offload.storage.storage import Ranges, spaces_of


class StepControl(Mover):
    """Decides when the groups of one model are updated, and ties together what moves their bytes.

    Attributes:
        steps: of each parameter that a step, or an update before it, has asked for. source: the `VGPUAdamW`.
        num_steps, num_rolled_back: steps that came, and those in which updates that had begun before were rolled back.
        follow_clipping: no update begins before a step that is expected to clip (``clipping``). Speed only.
    """

    def __init__(self, shared: Shared, found: StreamedPlacement) -> None:
        super().__init__(shared)
        self.weights = WeightStreamer(shared, found.budget_bytes)
        most = found.spare_bytes
        self._spare = None if most is None else SpareMemory(self.weights, shared.stack, most)
        self.graphs = None if self._spare is None else self._spare.graphs
        # Where no update begins before the step, no weights are locked any more when the last gradients come: these
        # have their places.
        self.gradients = GradientCollector(shared, found.max_in_flight, found.max_locked if found.on_level0 else 0)
        self.host_updates = HostUpdates(shared, self.weights)
        level0 = DeviceUpdates(shared, found, self.weights, self.gradients) if found.ring_bytes else None
        self.level0 = level0
        self.divide(found)
        budget = shared.budget
        budget.drop_weights, budget.end_gradient = self.weights.drop_one, self.gradients.end_oldest
        if level0 is not None:
            budget.end_update, budget.sweep_updates = level0.end_oldest, level0.sweep
        budget.free_spare = self.free_spare
        self.gradients.before_change = self._keep_last_gradient
        self._forwards = 0
        self._open_window = False  # gradients have come since the last step
        self._rolled_back = False  # updates that began before the step that is awaited
        self.num_steps = self.num_rolled_back = 0
        self.steps: dict[Slot, int] = {}
        self.source: Any = None
        self.follow_clipping = True
        self.clipping = Clipping()
        # Gradients in storage that a step multiplied only as it read them, and by what.
        self._unscaled: dict[Group, tuple[list[Slot], Tensor]] = {}
        self._may_undo = set[Group]()  # groups that have room for a rollback
        self._has_asked = False  # for it
        self._old_bytes = 0  # for states that are a step behind

    def divide(self, found: StreamedPlacement) -> None:
        """Run AdamW where ``found`` says; no update may be under way, and none have a rollback."""
        self._storage.plan = replace(self._storage.plan, on_level0=found.storage.on_level0)
        self.found, level0, on_level0 = found, self.level0, set(found.on_level0)
        if level0 is not None:
            level0.groups = on_level0
        self._places = {
            group: self.host_updates if level0 is None or group not in on_level0 else level0 for group in self._groups
        }

    def divide_anew(self, found: StreamedPlacement) -> None:
        """Run AdamW where ``found`` says from now on, between two steps: waits for updates, and room for rollbacks is
        made anew.
        """
        self.roll_back()
        for group in self._groups:
            self._places[group].wait(group)
        if self.level0 is not None:
            self.level0.drain()  # and it holds no weights any more, which the host would find in use
        self.settle(self._groups)
        with defer_sigint():
            for group in self._groups:
                self._drop_old_ranges(group)
            for place in filter(None, (self.host_updates, self.level0)):
                place.shadows.free_spare()
            self._may_undo, self._has_asked, self._old_bytes = set(), False, 0
            self.divide(found)
            if self.level0 is not None:
                self.level0.compile_ahead()
        if self._spare is not None:
            self._spare.held_up()

    @property
    def between_steps(self) -> bool:
        """Whether no gradient has come since the last step, and all of them have a place wherever updates run."""
        source = self.source
        if source is None or self._open_window or self._forwards > 1:
            return False
        plan = self._storage.plan
        return source.undo and not plan.resident and not plan.uses_disk

    # -- signals from the model ----------------------------------------------------------------------------------------

    def begin_forward(self, inputs: Any, *, training: bool) -> None:
        """A forward of the whole model starts: a step that was speculated upon has not come."""
        self.gradients.in_flight.sweep()
        self.roll_back()
        if self._spare is not None:
            self._spare.begin_forward(inputs, training=training)
        if torch.is_grad_enabled():
            self._forwards += 1

    def before_gradient(self, group: Group) -> None:
        """More gradient for ``group``: if it was thought complete, that was wrong."""
        if self.source is not None:
            self._open_window = True
            self.gradients.measuring = self.source.max_grad_norm is not None
        if self._states[group].early is not None:  # asked for every parameter
            self.roll_back(group)
        if self._unscaled:
            self.scale_stored(group)
        if self.level0 is not None:
            self.level0.expect_backward(after_step=self._clips_again)

    def places_of_gradients(self, slots: Sequence[Slot]) -> Sequence[Tensor]:
        """See `GradientCollector.places`; empty where ``slots`` are of several groups, or are cut."""
        if len({slot.group for slot in slots}) != 1 or slots[0].group in self.found.slice_rows:
            return ()
        self.before_gradient(slots[0].group)
        return self.gradients.places(slots)

    def take_gradient(self, slot: Slot) -> None:
        if slot.group not in self.gradients.filling:
            self.before_gradient(slot.group)
        whole = self.gradients.take(slot)
        if whole is not None:
            self._send_gradient(whole)

    def finish_backward(self) -> None:
        """Backward is over: groups that got only part of their gradients send these too."""
        if self._spare is not None:
            self._spare.look()
        for buffer in list(self.gradients.filling.values()):
            self._send_gradient(buffer)

    @defer_sigint()
    def _send_gradient(self, buffer: GradientBuffer) -> None:
        adding = self.gradients.close(buffer)
        update = self._update_from(buffer, adding)
        stays = update is None and self.level0 is not None and buffer.group in self.level0.staying
        self.gradients.send(buffer, update, stays=stays)
        self.gradient_sent(buffer.group)

    def _update_from(self, buffer: GradientBuffer, adding: bool) -> EarlyUpdate | None:
        """Update from a gradient on level 0, if that is possible; ``adding``: there is more of it in host memory."""
        source, group = self.source, buffer.group
        if source is None or not self._may_start_early(group):
            return None
        if adding and not (buffer.is_whole() and self.gradients.has_all_on_host(group)):
            return None  # some parameters have earlier gradients, others not: the worker sorts that out
        return None if self._places[group] is self.host_updates else self._start_early(group, buffer.bytes)

    def _may_start_early(self, group: Group) -> bool:
        """Whether the group's gradient is whole and its step is expected to be as announced.

        Only where all of the group is updated: backward may read frozen parameters after the last gradient, and a range
        that is written anew would lose those of another optimizer. A scaled loss means a factor at the step.
        """
        source = self.source
        if not source.update_in_backward or self._forwards < source.accumulation_steps or source.loss_scale != 1.0:
            return False
        if self._clips_again or group in self.found.sent_twice:
            return False
        if not group.all_trainable() or any(source.hyper_of(slot) is None for slot in group.slots):
            return False
        return all(self.gradients.has(slot) for slot in group.slots) and not self.weights.is_pinned(group)

    @property
    def _clips_again(self) -> bool:
        """Whether the coming step is expected to clip: its updates begin when the norm is known."""
        return self.follow_clipping and self.clipping.expected

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
        """Update ``group`` now, on level 0 from the ``gradient`` there; None if there is no memory for a rollback."""
        undo, place, state = self.source.undo, self._places[group], self._states[group]
        if undo:
            self._make_room()
        ahead = undo and self._looks_ahead(group, gradient)
        if undo and not ahead and not (group in self._may_undo and self._sums_are_placed()):
            return None
        with defer_sigint():
            if place is self.host_updates:
                place.wait(group)  # the worker counts its steps
            if state.behind is not None and state.behind.task is not None:  # somebody stopped waiting for it
                self.settle([group])
            if ahead:
                shadows: Ranges | None = {"weight": self._storage.range(group, OLD_WEIGHT)}
            else:
                self.settle([group])
                shadows = place.shadows.take(group, self._storage.own_ranges(group)) if undo else None
            if undo and shadows is None:
                if place is self.host_updates:
                    place.shadows.free_spare()  # of some kinds, there was room for, or their pages have not come
                return None  # this group is updated at the step, which is always right
            jobs = self.jobs(group)
            early = EarlyUpdate(jobs, [job.step for job in jobs], shadows, earlier=state.gradient.task)
            if ahead:
                steps = zip(jobs, early.steps, strict=True)
                early.ahead = {job.slot: AdamWStep(**vars(job.hyper), step=step + 1) for job, step in steps}
                early.behind = state.behind
            try:
                early.reads_until = place.queue(group, jobs, gradient, None, early)
            except BaseException:
                if not ahead:
                    (place.shadows.give_up if place is self.host_updates else place.shadows.give_back)(shadows or {})
                raise
            state.early = early
            state.to(Phase.EARLY)
        return early

    def _sums_are_placed(self) -> bool:
        """Whether shadows take no memory that sums of gradients will need: all groups have theirs, or none has."""
        have = {group for group in self._groups if (group, "accumulated") in self._storage}
        return not have or have.issuperset(group for group in self.found.trainable if not group.is_fp32)

    def _make_room(self) -> None:
        """For rollbacks, when gradients and states are placed and a forward has run; once, or when all was given up."""
        if self._has_asked:
            return
        # What is set aside for checkpoints' inputs is taken by them at this time.
        plan = replace(self._storage.plan, levels=tuple(spaces_of(self._stack)), set_aside_bytes=0)
        behind, shadowed = self.found.early(plan, self.source.accumulation_steps)
        if self.level0 is not None and not self.level0.groups.isdisjoint(behind):
            self.level0.compile_ahead(behind=True)
        self._has_asked = True
        for group in reversed(behind):  # in the order of backward
            self._add_old_ranges(group)
        self._may_undo = {*behind, *shadowed}
        self.host_updates.shadows.bring_pages(reversed(shadowed))

    @property
    def early_groups(self) -> list[Group] | None:
        """Those that are updated before their step, or will be, as there is room for their way back; None where the
        optimizer asks for no such updates, or for no way back.
        """
        source = self.source
        if source is None or not (source.update_in_backward and source.undo) or source.loss_scale != 1.0:
            return None
        found = self._may_undo
        if not self._has_asked:
            plan = replace(self._storage.plan, levels=tuple(spaces_of(self._stack)))
            behind, shadowed = self.found.early(plan, source.accumulation_steps)
            found = {*behind, *shadowed}
        updated = [group for group in self._groups if all(source.hyper_of(slot) is not None for slot in group.slots)]
        return [group for group in updated if group in found]

    # -- states that are a step behind ---------------------------------------------------------------------------------

    def _looks_ahead(self, group: Group, gradient: Tensor | None) -> bool:
        """Whether an update of ``group`` before its step makes the weights alone: from one whole gradient, on level 0
        (``gradient``) or in storage.
        """
        ranges = [self._storage.range(group, kind) for kind in OLD_KINDS if (group, kind) in self._storage]
        if not ranges or not all(each.is_resident for each in ranges):
            return False
        if self._places[group] is self.host_updates:
            return self._states[group].gradient.kind == "gradient"
        return gradient is not None and not self.gradients.has_all_on_host(group)

    def _add_old_ranges(self, group: Group) -> None:
        """What states of ``group`` need to be a step behind: all or, where there is no room in one piece, nothing."""
        added = list[str]()
        try:
            for kind in old_kinds(group, on_host=self._places[group] is self.host_updates):
                self._storage.add(group, kind)
                added.append(kind)
        except InsufficientMemory:
            for kind, own in zip(added, ("weight", "gradient"), strict=False):
                self._storage.drop(group, kind, own)
            added.clear()
        self._old_bytes += sum(self._storage.range(group, kind).extent.held_bytes for kind in added)

    @defer_sigint()
    def _keep_last_gradient(self, group: Group, anew: bool) -> None:
        """The range of a gradient, which may be that of the step that states lack, will change, or be ``anew``."""
        behind = self._states[group].behind
        if behind is None or behind.gradient is not self._storage.range(group, "gradient"):
            return
        if (group, OLD_GRADIENT) in self._storage and anew:
            self._storage.exchange(group, "gradient", OLD_GRADIENT)
        else:
            self.settle([group])

    def settle(self, groups: Iterable[Group]) -> None:
        """Return when the states of ``groups``, of which none is updated early, lack no step that came."""
        found = [(group, behind) for group in groups if (behind := self._states[group].behind) is not None]
        for group, behind in found:
            self._places[group].wait(group)
            self.host_updates.begin_settling(group, behind)
        for group, behind in found:  # lacking it until it is made, whatever ends this wait
            assert behind.task is not None
            behind.task.wait()
            self._states[group].behind = None

    def free_spare(self) -> bool:
        """Give up some host memory that updates before their step have for a rollback, of one that is under way only
        where there is no other; False if there is none.
        """
        if self.level0 is not None and self.level0.free_shadows():
            return True
        queueing = None if self.level0 is None else self.level0.queueing
        held = [each for each in reversed(self._groups) if (each, OLD_WEIGHT) in self._storage and each is not queueing]
        last = min(held, key=lambda group: self._states[group].early is not None, default=None)
        if last is None:
            return False
        self.roll_back(last)
        self.settle([last])
        if self.level0 is not None:
            self.level0.forget_ahead()
        self._drop_old_ranges(last)
        self._may_undo.discard(last)
        if not self._may_undo and not self._open_window:  # for another model, and not as this one has too little
            self._has_asked = False
        return True

    def _drop_old_ranges(self, group: Group) -> None:
        """End of `_add_old_ranges`, of a group whose states lack nothing."""
        self._worker.drain()
        if (load := self._states[group].last_load) is not None:
            load.wait()
        for kind, own in zip(OLD_KINDS, ("weight", "gradient"), strict=True):
            if (group, kind) in self._storage:
                self._storage.drop(group, kind, own)

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
        self._rolled_back |= bool(early)
        with defer_sigint() if early else nullcontext():  # of all: what is cancelled must not be committed
            for group in early:
                self._worker.cancel(self._states[group].update_end)
            for group, update in early.items():
                place, state = self._places[group], self._states[group]
                place.roll_back(group, update)
                for job, step in zip(update.jobs, update.steps, strict=True):
                    self.steps[job.slot] = step
                state.early = None
                state.version -= 1
                state.to(Phase.STORED)
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
        self.settle([group])

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
        """The tensor that `WeightStreamer.pack` was given; StaleTensor if its group was changed since."""
        self.order_loads(packed.group)
        self.weights.check(packed)  # before anything is loaded for it
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
        if state.phase is Phase.EARLY or self._places[group].is_busy(group):
            return False
        return weights.load_ahead(group, self.order_loads)

    def _use(self, group: Group) -> None:
        self.weights.use(group)
        state = self._states[group]
        if state.loaded is None or state.phase in (Phase.EARLY, Phase.DUE):  # not the last step's, or not for long
            self.order_loads(group)
        self.weights.arrive(group)

    def _prefetch_upcoming(self) -> None:
        asked, self.weights.asked = self.weights.asked, {}
        for group in list(asked):  # another thread may still hold it
            self.prefetch(group)
        for group in self.weights.upcoming():
            if not self.prefetch(group):
                return

    @property
    def shadow_bytes(self) -> int:
        """What rollbacks have taken at a time."""
        shadows = self.host_updates.shadows.peak_bytes
        return self._old_bytes + shadows + (0 if self.level0 is None else self.level0.shadows.peak_bytes)

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
        self._arrive()
        self.gradients.measure([slot.group])
        return self.gradients.norm(slot)

    def read_gradient(self, slot: Slot) -> Tensor:
        """A copy in the compute type, which is that of ``p.grad`` while offloaded."""
        self._arrive()
        return self._worker.submit(self.gradients.read, slot, slot.dtype, group=slot.group.index).result()

    def scale_gradients(self, slots: Iterable[Slot], factor: Tensor) -> None:
        """Multiply gradients by a scalar; updates that were made with the gradients as they were are rolled back."""
        if factor != 1:
            self.roll_back()
            self.scale_stored()
            self._scale(slots, factor.cpu())

    def _scale(self, slots: Iterable[Slot], factor: Tensor | None) -> None:
        by_group = defaultdict[Group, list[Slot]](list)
        for slot in slots:
            by_group[slot.group].append(slot)
        for group, held in by_group.items():
            if factor is not None or self._places[group] is self.level0:  # else the worker's order is enough
                self._places[group].wait(group)  # an update whose step came may still read what is about to change
            self.gradients.scale_later(group, held, factor)

    def scale_stored(self, *groups: Group) -> None:
        """Multiply gradients in storage, of ``groups`` or all, by the factor of the last step, as torch's clipping does
        at once: rarely needed, as nearly every step is followed by `zero_grad`.
        """
        for group in groups or list(self._unscaled):
            if group in self._unscaled:
                held, factor = self._unscaled.pop(group)
                self._scale(filter(self.gradients.has, held), factor)

    def clear_gradients(self, slots: list[Slot], *, to_zero: bool = False) -> None:
        self.roll_back()
        self.finish_backward()
        if to_zero:
            self._scale(slots, None)
        else:
            self.gradients.clear(slots)

    # -- the step ------------------------------------------------------------------------------------------------------

    def jobs(self, group: Group, wanted: Callable[[Slot], bool] = lambda slot: True) -> list[Job]:
        """What a step would do to ``group`` now: its parameters that have gradients and belong to the optimizer."""
        found = list[Job]()
        for slot in group.slots:
            hyper = self.source.hyper_of(slot)
            if hyper is not None and wanted(slot) and self.gradients.has(slot):
                self.steps.setdefault(slot, 0)
                found.append(Job(slot, self.steps, hyper))
        return found

    def prepare(self, wanted: Callable[[Slot], bool], factor: Tensor | None) -> list[list[Job]]:
        """The step has come: what it does to each group, gradients times ``factor``. StaleTensor where it cannot."""
        self.finish_backward()
        self.scale_stored()
        if factor is not None:
            self.roll_back()
        asked = [self.jobs(group, wanted) for group in self._groups]
        pairs = list(zip(self._groups, asked, strict=True))
        other = [group for group, jobs in pairs if (early := self._states[group].early) and early.jobs != jobs]
        if other:  # none would be all of them
            self.roll_back(*other)
        self.settle(group for group, jobs in pairs if jobs and self._states[group].early is None)
        at_once = self.level0 is None or self.level0.at_once
        for group, jobs in pairs:
            late = jobs and self._states[group].early is None
            if late and (at_once or self._places[group] is self.host_updates) and self.weights.is_pinned(group):
                self.weights.refuse_in_use(group)
        return asked

    def commit(self, asked: list[list[Job]], factor: Tensor | None) -> None:
        """Make the step: commit early updates that are as it asks, queue the others. If that fails, so will the next:
        some groups are a step ahead of others.
        """
        try:
            self._commit(asked, factor)
        except BaseException:
            self._worker.broken = True
            raise

    def _commit(self, asked: list[list[Job]], factor: Tensor | None) -> None:
        for group, jobs in zip(self._groups, asked, strict=True):
            early = self._states[group].early
            if early is not None:
                self._keep(group)
                if early.shadows is not None:
                    self._places[group].commit(group, early)
            elif jobs:
                self._places[group].update(group, jobs, factor)
                if factor is not None:
                    self._unscaled[group] = [job.slot for job in jobs], factor
        if self.level0 is not None:
            self.level0.end_step()
        self._end_step()
        self._open_window = False
        self.clipping.end_step(clipped=factor is not None)

    def skip_step(self) -> None:
        """The step has come but must change nothing (gradients that are not finite)."""
        self.roll_back()
        self._end_step()

    def _end_step(self) -> None:
        self._forwards = 0
        self.num_steps += 1
        self.num_rolled_back += self._rolled_back
        self._rolled_back = False
        if self._spare is not None:
            self._spare.end_step()

    def begin_window(self) -> None:
        """All gradients are given up: if there were any since the last step, micro-batches are counted anew."""
        self.roll_back()
        if self._open_window:
            self._forwards, self._open_window = 0, False
