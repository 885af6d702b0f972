"""When a group's update runs: after `step()`, or already behind its backward, with a way back.

`step()` promises; the updates it queues run on under the next forward, and whoever needs a group's weights waits for that
group alone (`settle`). With ``update_in_backward`` a group whose gradient is complete is updated at once, on the
speculation that the step will come, will not clip and will use today's hyperparameters. What it overwrote is kept until
`step()` confirms. Any sign of the opposite (a new forward, a late gradient, somebody reading the weights, a norm over
the limit) takes the group back to what it was, and the update is done exactly at the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from vblackwell.errors import InsufficientMemory
from vblackwell.memory.level import Transfer
from vblackwell.memory.stack import Reservation
from vblackwell.offload.groups import Group, Slot
from vblackwell.offload.update import Hyper, Job, Undo, Updater

if TYPE_CHECKING:
    from vblackwell.offload.engine import Offload


class UpdateSource(Protocol):
    """What the step control asks of the optimizer."""

    update_in_backward: bool
    accumulation_steps: int
    max_grad_norm: float | None

    def hyper_of(self, slot: Slot) -> Hyper | None:
        """Today's numbers for ``slot``; None if the optimizer does not hold it."""
        ...

    def let_go(self, engine: Offload, device: torch.device) -> None:
        """The model leaves the stack: keep its states as plain ones, on ``device``."""
        ...


@dataclass(eq=False)
class Speculation:
    """An update that ran, or is queued, before its step."""

    jobs: list[Job]
    undo: Undo
    memory: Reservation


class StepControl:
    """Pending and speculative updates of one model."""

    def __init__(self, engine: Offload) -> None:
        self._engine = engine
        self._updater = Updater(engine.homes)
        self._updating: list[Future[None] | None] = [None] * len(engine.groups)
        self._speculated: dict[int, Speculation] = {}
        self._forwards = 0
        self._undo_bytes = 0
        self.undo_peak_bytes = 0
        self.steps: dict[Slot, torch.Tensor] = {}
        self.source: UpdateSource | None = None
        # Clipping comes in runs: after a step that clipped, the next most likely does too, and a speculation would be
        # paid for in vain. Speed only; tests switch it off to force the way back.
        self.follow_clipping = True
        self._clipped = False

    # -- signals from the model ------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the whole model starts: a step that was anticipated has not come."""
        self._engine.gradients.sweep()
        self.rollback()
        if torch.is_grad_enabled():
            self._forwards += 1

    def before_gradient(self, group: Group) -> None:
        """More gradient for ``group``: if it was thought complete, that was wrong."""
        if group.index in self._speculated:
            self._roll_back(group)

    def gradient_arrived(self, group: Group) -> None:
        """The group's gradient is under way; update behind it if that was asked for and is possible."""
        source = self.source
        if source is None:
            return
        if source.max_grad_norm is not None and self._forwards >= source.accumulation_steps:
            self._engine.worker.submit(self._engine.gradients.measure, group)
        if not source.update_in_backward or self._forwards < source.accumulation_steps:
            return
        gradients = self._engine.gradients
        if self._clipped and self.follow_clipping:
            return
        if all(gradients.has(slot) for slot in group.trainable()) and not self._engine.weights.is_pinned(group):
            self._speculate(group)

    def settle(self, group: Group) -> None:
        """Return when the group's home bytes are those of the last `step`."""
        if group.index in self._speculated:
            self._roll_back(group)
        self._wait(group)

    def _wait(self, group: Group) -> None:
        future = self._updating[group.index]
        if future is not None:
            self._updating[group.index] = None
            future.result()

    def is_updating(self, group: Group) -> bool:
        """Whether `settle` would wait, or undo something."""
        future = self._updating[group.index]
        return group.index in self._speculated or (
            future is not None and (not future.done() or future.exception() is not None)
        )

    # -- speculation -----------------------------------------------------------------------------------------------

    def _speculate(self, group: Group) -> None:
        jobs = self.jobs(group)
        if not jobs:
            return
        homes = self._engine.homes
        try:
            memory = homes.take_host("undo", Undo.size_of(group, homes))
        except InsufficientMemory:
            return  # the log is full: this group is updated at the step, which is always right
        kept = memory.view()
        assert kept is not None
        self._wait(group)
        undo = Undo(jobs, kept)
        self._undo_bytes += memory.num_bytes
        self.undo_peak_bytes = max(self.undo_peak_bytes, self._undo_bytes)
        self._speculated[group.index] = Speculation(jobs, undo, memory)
        self._queue(group, jobs, None, undo)

    def rollback(self) -> None:
        """Undo every update whose step has not come."""
        for index in list(self._speculated):
            self._roll_back(self._engine.groups[index])

    def _roll_back(self, group: Group) -> None:
        speculation = self._speculated.pop(group.index)
        self._updating[group.index] = None
        self._engine.worker.submit(speculation.undo.put_back, group, self._engine.homes).result()
        self._engine.weights.revert(group)
        self._drop(speculation)

    def _drop(self, speculation: Speculation) -> None:
        self._undo_bytes -= speculation.memory.num_bytes
        self._engine.homes.give(speculation.memory)

    # -- the step ----------------------------------------------------------------------------------------------------

    def jobs(self, group: Group, wanted: Callable[[Slot], bool] = lambda slot: True) -> list[Job]:
        """What a step would do to ``group`` now: its parameters that have gradients and belong to the optimizer."""
        assert self.source is not None
        found = []
        for slot in group.slots:
            hyper = self.source.hyper_of(slot)
            if hyper is not None and wanted(slot) and self._engine.gradients.has(slot):
                found.append(Job(slot, self.steps.setdefault(slot, torch.zeros((), dtype=torch.float32)), hyper))
        return found

    def collect(self) -> None:
        """Let every gradient arrive and be measured."""
        self._engine.gradients.finish_backward()
        for group in self._engine.groups:
            self._engine.worker.submit(self._engine.gradients.measure, group)
        self._engine.worker.drain()

    def promise(self, wanted: Callable[[Slot], bool], factor: torch.Tensor | None) -> None:
        """The step has come: confirm what was anticipated rightly, queue the rest with gradients times ``factor``."""
        self._engine.gradients.finish_backward()
        for group in self._engine.groups:
            jobs = self.jobs(group, wanted)
            speculation = self._speculated.get(group.index)
            if speculation is not None:
                if factor is None and _same(speculation.jobs, jobs):
                    del self._speculated[group.index]
                    self._engine.worker.submit(self._drop, speculation)
                    continue
                self._roll_back(group)
            if jobs:
                self._queue(group, jobs, factor, None)
        self._forwards = 0
        self._clipped = factor is not None

    def refuse(self) -> None:
        """The step has come but must change nothing (gradients that are not finite)."""
        self.rollback()
        self._forwards = 0

    def _queue(self, group: Group, jobs: list[Job], factor: torch.Tensor | None, undo: Undo | None) -> None:
        self._engine.weights.invalidate(group)
        load = self._engine.weights.last_load(group)
        task = self._engine.worker.submit(self._update, group, jobs, factor, undo, load)
        self._updating[group.index] = task
        self._engine.gradients.occupy(group, task)

    def _update(
        self, group: Group, jobs: list[Job], factor: torch.Tensor | None, undo: Undo | None, load: Transfer | None
    ) -> None:
        if load is not None:
            load.wait()  # a stream that waits is not enough: the host is about to write what the copy reads
        gradients = self._engine.gradients
        self._updater.update(group, jobs, gradients.kind_at_home(group), factor, undo)
        if factor is not None:
            gradients.forget_norms(group)


def _same(left: Sequence[Job], right: Sequence[Job]) -> bool:
    """Whether two lists update the same parameters with the same numbers."""
    return [(job.slot, job.hyper) for job in left] == [(job.slot, job.hyper) for job in right]
