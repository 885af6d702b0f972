"""When a group is updated: after `step()`, or already after its backward with a rollback.

Updates run on under the next forward; what needs a group's weights waits for that group alone. An early update
speculates that the step will come, will not clip and will use today's hyperparameters: any sign of the opposite (a new
forward, a late gradient, a read of the weights, a norm over the limit) rolls it back, and the step does it exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import StepAbandoned
from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.movement.gradients import GradientCollector, UpdateUse
from vblackwell.offload.movement.state import EarlyUpdate, GradientBuffer, Job, Mover, Phase, Shared, defer_sigint
from vblackwell.offload.movement.updates import DeviceUpdates, HostUpdates
from vblackwell.offload.movement.weights import WeightStreamer


def is_final(optimizer: Any) -> bool:
    """Whether updates after the backward have no rollback, so that gradients of groups on level 0 never leave it."""
    return optimizer.update_in_backward and not optimizer.undo and optimizer.accumulation_steps == 1


class Speculation(Mover):
    """Updates that were started before their step: committed with it, or rolled back, in both places alike. One that is
    final has consumed its gradient and stays: where it should be undone, `StepAbandoned` is raised.
    """

    def __init__(
        self, shared: Shared, places: dict[Group, DeviceUpdates | HostUpdates], gradients: GradientCollector
    ) -> None:
        super().__init__(shared)
        self._places, self._gradients = places, gradients
        self._early: dict[Group, EarlyUpdate] = {}

    def start(self, group: Group, jobs: list[Job], gradient: Tensor | None, *, final: bool) -> EarlyUpdate | None:
        """Update ``group`` now; None if there is no room for a rollback."""
        with defer_sigint():
            early = self._places[group].start_early(group, jobs, gradient, final=final)
            if early is not None:
                self._early[group] = early
                self._states[group].to(Phase.EARLY)
        return early

    def commit(self, group: Group, jobs: list[Job], factor: Tensor | None) -> bool:
        """The step has come: whether the group was updated early as it asks; any other update is rolled back."""
        early = self._early.get(group)
        if early is None:
            return False
        if factor is not None or early.jobs != jobs:
            self.roll_back(group)
            return False
        self._keep(group)
        self._places[group].commit(group, early)
        return True

    def _keep(self, group: Group) -> None:
        early = self._early.pop(group)
        self._states[group].update_is_queued()
        if early.is_final:
            self._gradients.clear(group.slots)

    def roll_back(self, group: Group) -> None:
        """Undo the group's early update, if there is one."""
        early = self._early.get(group)
        if early is None:
            return
        if early.is_final:
            self._keep(group)
            raise self._abandoned(group)
        place, state = self._places[group], self._states[group]
        with defer_sigint():
            place.roll_back(group, early)
            del self._early[group]
            state.to(Phase.STORED if state.loaded is None else Phase.LOADING)
        place.wait(group)

    def roll_back_all(self) -> None:
        """Undo all early updates that are not final."""
        final = [group for group, early in self._early.items() if early.is_final]
        for group in final:
            self._keep(group)
        for group in list(self._early):
            self.roll_back(group)
        if final:  # after everything else is in order: the error comes once
            raise self._abandoned(final[0])

    def _abandoned(self, group: Group) -> StepAbandoned:
        return StepAbandoned(
            f"{group.name!r} of {self._name!r} was updated after its backward, and with undo=False that is final, but "
            "the step did not come as announced (a second backward, another forward or a read of the weights before "
            "step(), changed hyperparameters, step(only=...), or zero_grad() before step()): reload the last "
            "checkpoint, and use undo=True"
        )


class StepControl(Mover):
    """Decides when the groups of one model are updated.

    Attributes:
        steps: torch's count of each parameter's steps. source: the `VGPUAdamW`.
        follow_clipping: a step that clipped is likely followed by another, whose early updates are in vain. Speed only.
    """

    def __init__(
        self, shared: Shared, weights: WeightStreamer, gradients: GradientCollector,
        places: dict[Group, DeviceUpdates | HostUpdates], device: DeviceUpdates | None,
    ) -> None:  # fmt: skip
        super().__init__(shared)
        self._weights, self._gradients, self._places, self._device = weights, gradients, places, device
        self._speculation = Speculation(shared, places, gradients)
        self._forwards = 0
        self._open_window = False  # gradients have come since the last step
        self.steps: dict[Slot, Tensor] = {}
        self.source: Any = None
        self.follow_clipping = True
        self._clipped = False
        # Gradients in storage that a step multiplied only as it read them, and by what.
        self._unscaled: dict[Group, tuple[list[Slot], Tensor]] = {}

    # -- signals from the model ----------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the whole model starts: a step that was speculated upon has not come."""
        self._gradients.sweep()
        self.roll_back()
        if torch.is_grad_enabled():
            self._forwards += 1

    def before_gradient(self, group: Group) -> None:
        """More gradient for ``group``: if it was thought complete, that was wrong."""
        self._speculation.roll_back(group)
        self._scale_stored(group)
        if self._device is not None:
            self._device.expect_backward()

    def use_of(self, buffer: GradientBuffer, adding: bool) -> UpdateUse:
        """A group's gradient is about to leave level 0 (``adding``: to be added in host memory): measure it there, and
        update from it if that was asked for and is possible.
        """
        source, group = self.source, buffer.group
        if source is None:
            return UpdateUse()
        self._open_window = True
        if source.max_grad_norm is not None and buffer.bytes.is_cuda and not adding:
            self._gradients.measure_on_level0(buffer)
        if not self._may_start_early(group):
            return UpdateUse()
        if adding and not (buffer.is_whole() and self._gradients.has_all_on_host(group)):
            return UpdateUse()  # some parameters have earlier gradients, others not: the worker sorts that out
        if self._device is None or self._places[group] is not self._device:
            # The compute weight in storage is dead once backward has loaded it: the update makes it anew, from the
            # master. If that is sure to come, the gradient needs no range of its own.
            certain = not adding and not source.undo and (group, "master") in self._storage
            return UpdateUse(landing="weight" if certain else "gradient")
        if group in self._device.deferred:
            return UpdateUse()
        early = self._speculation.start(group, self.jobs(group), buffer.bytes, final=not source.undo)
        return UpdateUse() if early is None else UpdateUse(early.reads_until, final=early.is_final)

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
        return all(self._gradients.has(slot) for slot in group.slots) and not self._weights.is_pinned(group)

    def gradient_arrived(self, group: Group) -> None:
        """The group's gradient is under way; update after it if that was asked for and is possible."""
        source = self.source
        if source is None:
            return
        if source.max_grad_norm is not None and self._forwards >= source.accumulation_steps:
            self._gradients.measure_later(group)
        if self._places[group] is not self._device and self._may_start_early(group) and (jobs := self.jobs(group)):
            self._speculation.start(group, jobs, None, final=not source.undo)

    # -- for callers that need a group ---------------------------------------------------------------------------------

    def wait_for_updates(self, group: Group) -> None:
        """Return when the group's bytes in storage are those of the last `step`, for the host and for loads."""
        self._speculation.roll_back(group)
        self._places[group].wait(group)

    def order_loads(self, group: Group) -> None:
        """Return when weights that are loaded from now on will be those of the last `step`."""
        self._speculation.roll_back(group)
        self._places[group].order_loads(group)

    def is_busy(self, group: Group) -> bool:
        """Whether `order_loads` would wait, or roll something back."""
        return self._states[group].phase is Phase.EARLY or self._places[group].is_busy(group)

    def roll_back(self) -> None:
        """Undo every update whose step has not come."""
        self._speculation.roll_back_all()

    def drain(self) -> None:
        """Return when every update whose step came has read its gradient."""
        if self._device is not None:
            self._device.drain()

    # -- gradients between backward and step ---------------------------------------------------------------------------

    def collect(self) -> None:
        """Let every gradient arrive and be measured."""
        self._gradients.finish_backward()
        self.scale_stored()
        for group in self._groups:
            self._gradients.measure_later(group)
        self._worker.drain()

    def _arrive(self) -> None:
        """Let gradients be in host memory, or on their way. Early updates stay, unless they consumed them."""
        if self.source is not None and not self.source.undo:
            self.roll_back()
        self._gradients.finish_backward()
        self.scale_stored()

    def gradient_norm(self, slot: Slot) -> Tensor:
        """The 2-norm of a gradient, an fp32 scalar."""
        self._arrive()
        if not self._gradients.is_measured(slot.group):
            self._gradients.measure_later(slot.group)
            self._worker.drain()
        return self._gradients.norm(slot)

    def read_gradient(self, slot: Slot) -> Tensor:
        """A copy of a gradient on the CPU."""
        self._arrive()
        return self._worker.submit(self._gradients.host.read, slot, group=slot.group.index).result()

    def scale_gradients(self, slots: Iterable[Slot], factor: Tensor) -> None:
        """Multiply gradients by a scalar; updates that were made with the gradients as they were are rolled back."""
        if factor != 1:
            self.roll_back()
            self.scale_stored()
            by_group: dict[Group, list[Slot]] = {}
            for slot in slots:
                by_group.setdefault(slot.group, []).append(slot)
            for group, held in by_group.items():
                self._scale(group, held, factor.cpu())

    def _scale(self, group: Group, slots: list[Slot], factor: Tensor) -> None:
        self._places[group].wait(group)  # an update whose step came may still read what is about to change
        self._gradients.scale_later(group, slots, factor)

    def _scale_stored(self, group: Group) -> None:
        """Multiply the gradient that a step with a factor left behind by it, as torch's clipping does at once: rarely
        needed, as nearly every step is followed by `zero_grad`.
        """
        held = self._unscaled.pop(group, None)
        if held is not None:
            slots = [slot for slot in held[0] if self._gradients.has(slot)]
            if slots:  # else a sum would be reserved for nothing
                self._scale(group, slots, held[1])

    def scale_stored(self) -> None:
        """Make all gradients in storage what `torch.nn.utils.clip_grad_norm_` would have left there."""
        for group in list(self._unscaled):
            self._scale_stored(group)

    def zero_gradients(self, slots: list[Slot]) -> None:
        """Make gradients zero."""
        self.roll_back()
        self._gradients.finish_backward()
        self.drain()  # updates may still read what is about to be zero
        self._gradients.zero(slots)

    def clear_gradients(self, slots: list[Slot]) -> None:
        """Forget gradients."""
        self.roll_back()
        self._gradients.finish_backward()
        self._gradients.clear(slots)

    # -- the step ------------------------------------------------------------------------------------------------------

    def jobs(self, group: Group, wanted: Callable[[Slot], bool] = lambda slot: True) -> list[Job]:
        """What a step would do to ``group`` now: its parameters that have gradients and belong to the optimizer."""
        found = []
        for slot in group.slots:
            hyper = self.source.hyper_of(slot)
            if hyper is not None and wanted(slot) and self._gradients.has(slot):
                if slot not in self.steps:
                    self.steps[slot] = torch.zeros((), dtype=torch.float32)
                found.append(Job(slot, self.steps[slot], hyper))
        return found

    def commit_step(self, wanted: Callable[[Slot], bool], factor: Tensor | None) -> None:
        """The step has come: commit early updates that are as it asks, queue others with gradients times ``factor``."""
        self._gradients.finish_backward()
        self.scale_stored()
        for group in self._groups:
            jobs = self.jobs(group, wanted)
            if not self._speculation.commit(group, jobs, factor) and jobs:
                self._places[group].update(group, jobs, factor)
                if factor is not None and (self._places[group] is self._device or not group.is_fp32):
                    self._unscaled[group] = [job.slot for job in jobs], factor
        if self._device is not None:
            self._device.end_step()
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
