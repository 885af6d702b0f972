"""When a group's update runs: after `step()`, or already behind its backward, with a way back.

`step()` promises; the updates it queues run on under the next forward, and whoever needs a group's weights waits for that
group alone (`settle`). With ``update_in_backward`` a group whose gradient is complete is updated at once, on the
speculation that the step will come, will not clip and will use today's hyperparameters. What it overwrote is kept until
`step()` confirms. Any sign of the opposite (a new forward, a late gradient, somebody reading the weights, a norm over
the limit) takes the group back to what it was, and the update is done exactly at the step.

Each group is updated in one of two places, decided when the model was offloaded: on level 0 (`Level0Updates`), or by the worker on
the ranges at home (`Updater`). The arithmetic is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from vblackwell.errors import InsufficientMemory, StaleTensor
from vblackwell.memory.cache.stack import Reservation
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.movement.departure import Claim, Leaving
from vblackwell.offload.movement.level0_updates import Level0Updates, abandoned, same_jobs
from vblackwell.offload.movement.update import Hyper, Job, Undo, Updater
from vblackwell.offload.movement.worker import Outcome, uninterrupted

if TYPE_CHECKING:
    from vblackwell.offload.engine import Offload


class UpdateSource(Protocol):
    """What the step control asks of the optimizer."""

    update_in_backward: bool
    undo: bool
    accumulation_steps: int
    loss_scale: float
    max_grad_norm: float | None

    def hyper_of(self, slot: Slot) -> Hyper | None:
        """Today's numbers for ``slot``; None if the optimizer does not hold it."""
        ...

    def let_go(self, engine: Offload, device: torch.device) -> None:
        """The model leaves the stack: keep its states as plain ones, on ``device``."""
        ...


def is_final(source: UpdateSource) -> bool:
    """Whether updates behind the backward have no way back, so that gradients of groups on level 0 never go home."""
    return source.update_in_backward and not source.undo and source.accumulation_steps == 1


@dataclass(eq=False)
class Speculation:
    """An update that ran, or is queued, before its step; without ``undo`` it is final."""

    jobs: list[Job]
    undo: Undo | None
    memory: Reservation | None


class StepControl:
    """Pending and speculative updates of one model."""

    def __init__(self, engine: Offload, level0: Level0Updates | None) -> None:
        self._engine = engine
        self._level0 = level0
        self._waits_on_host = engine.device.type != "cuda"
        self._updater = Updater(engine.homes)
        self._updating: list[Outcome | None] = [None] * len(engine.groups)
        self._speculated: dict[int, Speculation] = {}
        self._forwards = 0
        self._open_window = False  # gradients have come since the last step
        self._undo_bytes = 0
        self.undo_peak_bytes = 0
        self.steps: dict[Slot, torch.Tensor] = {}
        self.source: UpdateSource | None = None
        # Clipping comes in runs: after a step that clipped, the next most likely does too, and a speculation would be
        # paid for in vain. Speed only; tests switch it off to force the way back.
        self.follow_clipping = True
        self._forgiven = Counter[int | None]()  # failures of the worker when all gradients were last given up
        self._broken = False  # an update of a step that came has failed, while others of it may have been made
        self._clipped = False

    # -- signals from the model ------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the whole model starts: a step that was anticipated has not come."""
        self._engine.gradients.sweep()
        self.rollback()
        if torch.is_grad_enabled():
            self._forwards += 1

    def reached(self, group: Group) -> None:
        """``group`` is about to be used."""
        if self._level0 is not None:
            self._level0.advance(group)

    def before_gradient(self, group: Group) -> None:
        """More gradient for ``group``: if it was thought complete, that was wrong."""
        self._undo(group)
        if self._level0 is not None:
            self._level0.look_ahead()

    def departing(self, leaving: Leaving, adding: bool) -> Claim:
        """A group's gradient is about to leave level 0: measure it there, and update from it if that was asked for and is possible.

        Args:
            adding: it will be added to a gradient at home.
        """
        source, group = self.source, leaving.group
        if source is None:
            return Claim()
        self._open_window = True
        if source.max_grad_norm is not None and leaving.buffer.is_cuda and not adding:
            self._engine.gradients.measure_on_level0(leaving)
        if not self._may_anticipate(group):
            return Claim()
        if adding and not (leaving.is_whole() and self._engine.gradients.has_at_home(group)):
            return Claim()  # some parameters have earlier gradients, others not: the worker sorts that out
        if self._level0 is None or group not in self._level0:
            if adding:
                return Claim()
            # The compute weight at home is dead once backward has loaded it: the update makes it anew, from the master. If that is sure to
            # come, the gradient needs no range of its own.
            certain = not source.undo and (group, "master") in self._engine.homes
            return Claim(landing="weight" if certain else "gradient")
        if self._level0.is_deferred(group):
            return Claim()
        end = self._level0.anticipate(group, self.jobs(group), leaving.buffer, source.undo)
        return Claim() if end is None else Claim(end.computed, final=not source.undo)

    def _may_anticipate(self, group: Group) -> bool:
        """Whether the group's gradient is whole and its step is expected to be as announced.

        Only where all of the group is updated: backward may read frozen parameters after the last gradient, and a range that is written
        anew would lose those of another optimizer. A scaled loss means a factor at the step.
        """
        source = self.source
        assert source is not None
        if not source.update_in_backward or self._forwards < source.accumulation_steps or source.loss_scale != 1.0:
            return False
        if self._clipped and self.follow_clipping:
            return False
        if not all(slot.param.requires_grad and source.hyper_of(slot) is not None for slot in group.slots):
            return False
        gradients = self._engine.gradients
        return all(gradients.has(slot) for slot in group.slots) and not self._engine.weights.is_pinned(group)

    def gradient_arrived(self, group: Group) -> None:
        """The group's gradient is under way; update behind it if that was asked for and is possible."""
        source = self.source
        if source is None:
            return
        gradients = self._engine.gradients
        if (
            source.max_grad_norm is not None
            and self._forwards >= source.accumulation_steps
            and not gradients.is_measured(group)
        ):
            self._engine.worker.submit(gradients.home.measure, group, group=group.index)
        if (self._level0 is None or group not in self._level0) and self._may_anticipate(group):
            self._speculate(group)

    def settle(self, group: Group) -> None:
        """Return when the group's home bytes are those of the last `step`, for the host and for loads."""
        self._undo(group)
        self._wait(group)
        if self._level0 is not None:
            self._level0.wait(group)

    def settle_loads(self, group: Group) -> None:
        """Return when weights that are loaded from now on will be those of the last `step`."""
        self._undo(group)
        self._wait(group)
        if self._level0 is not None:
            self._level0.order_loads(group)

    def _undo(self, group: Group) -> None:
        if group.index in self._speculated:
            self._roll_back(group)
        if self._level0 is not None and self._level0.is_anticipated(group):
            self._level0.roll_back(group)

    def _wait(self, group: Group) -> None:
        future = self._updating[group.index]
        if future is not None:
            future.exception()  # an interrupt leaves it to be waited for by whoever needs the group next
            self._updating[group.index] = None
            future.settle()

    def is_updating(self, group: Group) -> bool:
        """Whether `settle_loads` would wait, or undo something."""
        if self._level0 is not None and group in self._level0:
            return self._level0.is_anticipated(group) or (self._waits_on_host and self._level0.is_under_way(group))
        future = self._updating[group.index]
        return group.index in self._speculated or (
            future is not None and (not future.done() or future.exception() is not None)
        )

    # -- speculation -----------------------------------------------------------------------------------------------

    def _speculate(self, group: Group) -> None:
        jobs = self.jobs(group)
        if not jobs:
            return
        undo, memory = None, None
        assert self.source is not None
        if self.source.undo:
            memory = self._undo_memory(group)
            if memory is None:
                return  # the log is full: this group is updated at the step, which is always right
            kept = memory.view()
            assert kept is not None
            undo = Undo(jobs, kept)
        self._wait(group)
        speculation = Speculation(jobs, undo, memory)
        with uninterrupted():
            try:
                self._queue(group, jobs, None, undo)
            except BaseException:
                self._drop(speculation)
                raise
            self._speculated[group.index] = speculation

    def _undo_memory(self, group: Group) -> Reservation | None:
        homes = self._engine.homes
        try:
            memory = homes.take_host("undo", Undo.size_of(group, homes))
        except InsufficientMemory:
            return None
        self._undo_bytes += memory.num_bytes
        self.undo_peak_bytes = max(self.undo_peak_bytes, self._undo_bytes)
        return memory

    def rollback(self) -> None:
        """Undo every update whose step has not come."""
        final = [index for index, speculation in self._speculated.items() if speculation.undo is None]
        for index in final:
            del self._speculated[index]
        for index in list(self._speculated):
            self._roll_back(self._engine.groups[index])
        lost = [self._engine.groups[index] for index in final]
        if self._level0 is not None:
            lost += self._level0.roll_back_all()
        if lost:  # after everything else is in order: the error comes once
            raise abandoned(lost[0].name, self._engine.name)

    def _roll_back(self, group: Group) -> None:
        speculation = self._speculated[group.index]
        if speculation.undo is None:
            del self._speculated[group.index]
            raise abandoned(group.name, self._engine.name)
        with uninterrupted():
            self._updating[group.index] = self._engine.worker.submit(
                self._put_back, group, speculation, group=group.index
            )
            del self._speculated[group.index]
        self._wait(group)
        self._engine.weights.revert(group)

    def _put_back(self, group: Group, speculation: Speculation) -> None:
        """The worker's part of `_roll_back`."""
        assert speculation.undo is not None
        try:
            speculation.undo.put_back(group, self._engine.homes)
        except BaseException:
            self._broken = True
            raise
        finally:
            self._drop(speculation)

    def _drop(self, speculation: Speculation) -> None:
        if speculation.memory is None:
            return
        self._undo_bytes -= speculation.memory.num_bytes
        self._engine.homes.give(speculation.memory)

    # -- failures ----------------------------------------------------------------------------------------------------

    def check_whole(self) -> None:
        """
        Raises:
            StaleTensor: an update failed: some groups are a step ahead of others.
        """
        if self._broken:
            raise StaleTensor(
                f"an update of model {self._engine.name!r} failed in the background, so some of its groups are a step behind others: go on "
                "from a checkpoint (release(model) gives the weights as they are)"
            )

    def check_gradients(self) -> None:
        """
        Raises:
            StaleTensor: as `check_whole`; or a task failed since gradients were last given up: some may not be what backward made.
        """
        self.check_whole()
        if self._engine.worker.failures != self._forgiven:
            raise StaleTensor(
                f"a background task of model {self._engine.name!r} failed since the last zero_grad(), so its gradients may be "
                "incomplete: zero_grad(), and repeat forward and backward"
            )

    def forgive(self) -> None:
        """All gradients were given up: what failed until now concerns none that comes."""
        if self._engine.worker.failures != self._forgiven:
            self._forgiven = self._engine.worker.failures.copy()

    # -- the step ----------------------------------------------------------------------------------------------------

    def jobs(self, group: Group, wanted: Callable[[Slot], bool] = lambda slot: True) -> list[Job]:
        """What a step would do to ``group`` now: its parameters that have gradients and belong to the optimizer."""
        assert self.source is not None
        found = []
        for slot in group.slots:
            hyper = self.source.hyper_of(slot)
            if hyper is not None and wanted(slot) and self._engine.gradients.has(slot):
                if slot not in self.steps:
                    self.steps[slot] = torch.zeros((), dtype=torch.float32)
                found.append(Job(slot, self.steps[slot], hyper))
        return found

    def collect(self) -> None:
        """Let every gradient arrive and be measured."""
        self._engine.gradients.finish_backward()
        for group in self._engine.groups:
            if not self._engine.gradients.is_measured(group):
                self._engine.worker.submit(self._engine.gradients.home.measure, group, group=group.index)
        self._engine.worker.drain()

    def promise(self, wanted: Callable[[Slot], bool], factor: torch.Tensor | None) -> None:
        """The step has come: confirm what was anticipated rightly, queue the rest with gradients times ``factor``."""
        self._engine.gradients.finish_backward()
        for group in self._engine.groups:
            jobs = self.jobs(group, wanted)
            if self._level0 is not None and group in self._level0:
                confirmed = self._level0.is_anticipated(group) and self._level0.confirm(group, jobs, factor)
                if jobs and not confirmed:
                    self._level0.update(group, jobs, factor)
                elif confirmed and not self.source_keeps_gradients:
                    self._engine.gradients.consume(group)
                continue
            speculation = self._speculated.get(group.index)
            if speculation is not None:
                if factor is None and same_jobs(speculation.jobs, jobs):
                    del self._speculated[group.index]
                    self._engine.worker.submit(self._drop, speculation, group=group.index)
                    if speculation.undo is None:
                        self._engine.gradients.consume(group)
                    continue
                self._roll_back(group)
            if jobs:
                self._queue(group, jobs, factor, None)
        if self._level0 is not None:
            self._level0.end_step()
        self._forwards = 0
        self._open_window = False
        self._clipped = factor is not None

    @property
    def source_keeps_gradients(self) -> bool:
        """Whether gradients are at home after an update behind the backward."""
        return self.source is not None and self.source.undo

    def begin_window(self) -> None:
        """All gradients were given up: if there were any since the last step, micro-batches are counted anew."""
        if self._open_window:
            self._forwards, self._open_window = 0, False

    def refuse(self) -> None:
        """The step has come but must change nothing (gradients that are not finite)."""
        self.rollback()
        self._forwards = 0

    @uninterrupted()
    def _queue(self, group: Group, jobs: list[Job], factor: torch.Tensor | None, undo: Undo | None) -> None:
        self._engine.weights.invalidate(group)
        load = self._engine.weights.last_load(group)
        task = self._engine.worker.submit(
            self._update,
            group,
            jobs,
            factor,
            undo,
            load,
            self._forgiven[group.index],
            group=group.index,
            postponable=True,
        )
        self._updating[group.index] = task
        self._engine.gradients.occupy(group, task)

    def _update(
        self,
        group: Group,
        jobs: list[Job],
        factor: torch.Tensor | None,
        undo: Undo | None,
        load: Transfer | None,
        forgiven: int,
    ) -> None:
        """The worker's part of `_queue`. ``forgiven``: failures of the group's tasks that concern no gradient of this update."""
        try:
            if self._engine.worker.failures[group.index] != forgiven:
                if undo is not None:
                    return  # its step will be refused, and there is nothing to roll back
                raise StaleTensor(f"the gradient of {group.name!r} did not arrive: its update was not made")
            self._update_now(group, jobs, factor, undo, load)
        except BaseException:
            self._broken = self._broken or undo is None  # a rollback makes good what a speculation left
            raise

    def _update_now(
        self, group: Group, jobs: list[Job], factor: torch.Tensor | None, undo: Undo | None, load: Transfer | None
    ) -> None:
        if load is not None:
            load.wait()  # a stream that waits is not enough: the host is about to write what the copy reads
        gradients = self._engine.gradients
        self._updater.update(group, jobs, gradients.home.kind_at_home(group), factor, undo)
        if factor is not None:
            gradients.home.forget_norms(group)
