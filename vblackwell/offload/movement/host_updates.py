"""AdamW on a group's ranges on the CPU, by a model's worker; before its step it writes into shadows of them.

The threads are `kernels.optimizer.cpu`'s, with the bits of `torch.optim.AdamW(fused=True)` on single tensors.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vblackwell.errors import StaleTensor
from vblackwell.kernels.optimizer import cpu
from vblackwell.kernels.optimizer.adamw import CHUNK, AdamWStep
from vblackwell.kernels.optimizer.cpu import States, Update
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import MOMENTS, Group, Slot
from vblackwell.offload.movement.state import Hyper, Job, Mover, Shared, Task, defer_sigint, flat_of
from vblackwell.offload.movement.weights import WeightStreamer
from vblackwell.offload.storage.masters import round_from_fp32
from vblackwell.offload.storage.storage import Ranges, Shadows


def update_master(
    master: Tensor, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, step: Tensor, hyper: Hyper
) -> None:
    """One AdamW step on a whole fp32 master on any device, all flat; the compute weight is then that, rounded."""
    fused: Any = torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]
    fused([master], [gradient], [exp_avg], [exp_avg_sq], [], [step], amsgrad=False, maximize=False, **vars(hyper))
    round_from_fp32(master, weight)


class _Update(NamedTuple):
    group: Group
    jobs: list[Job]
    own: Ranges  # the group's then, which a commit may have replaced
    shadows: Ranges | None  # written instead
    gradient_kind: str
    factor: Tensor | None  # fp32 scalar that gradients are multiplied by
    load: Transfer | None  # the newest out of the weights
    forgiven: int  # failures of the group's tasks that concern no gradient of this update


class HostUpdates(Mover):
    """Updates of one model that its worker runs on the ranges in storage."""

    def __init__(self, shared: Shared, weights: WeightStreamer) -> None:
        super().__init__(shared)
        self._weights = weights
        cpu.library()  # compiled before the first update, which the model waits for
        self.shadows = Shadows(self._storage)
        self._ends: dict[Group, Task] = {}  # of committed updates: the ranges are those to read from then on

    def commit(self, group: Group, shadows: Ranges) -> None:
        old = self.shadows.swap(group, shadows)
        try:
            update = self._states[group].update_end
            self._ends[group] = self._worker.submit(self._end_commit, group, update, old, group=group.index)
        except BaseException:  # another task has failed meanwhile: this group stays a step behind
            self.shadows.swap(group, old)
            self._worker.broken = True
            raise

    def roll_back(self, group: Group, shadows: Ranges, earlier: Task | None) -> None:
        """Make the ranges what they were before `StepControl._start_early`; or raise what an earlier task did."""
        self._worker.raise_failure()
        state = self._states[group]
        state.update_end.exception()
        self.shadows.give_up(shadows)
        state.update_end, state.gradient.task = None, earlier  # which may still add to the gradient

    @defer_sigint()
    def update(self, group: Group, jobs: list[Job], factor: Tensor | None) -> None:
        self.queue(group, jobs, None, factor, None)
        self._states[group].update_is_queued()

    def wait(self, group: Group) -> None:
        state = self._states[group]
        task = state.update_end
        if task is not None:
            task.exception()  # an interrupt leaves it to be waited for by the next caller
            if group in self._ends:
                self._ends[group].exception()
                del self._ends[group]
            state.update_end = None
        state.update_is_stored()
        if task is not None:
            task.wait()

    order_loads = wait  # a load reads what the host has written

    def is_busy(self, group: Group) -> bool:
        task = self._states[group].update_end
        return task is not None and (not task.done() or task.exception() is not None)

    def queue(
        self, group: Group, jobs: list[Job], gradient: Tensor | None, factor: Tensor | None, shadows: Ranges | None
    ) -> None:
        """Queue an update from the gradient in host memory (``gradient``: None), into ``shadows`` if there are any."""
        self._weights.invalidate(group)
        state, own, forgiven = self._states[group], self._storage.own_ranges(group), self._worker.forgiven[group.index]
        update = _Update(group, jobs, own, shadows, state.gradient.kind, factor, state.last_load, forgiven)
        try:
            task = self._worker.submit(self._update, update, group=group.index, postponable=True)
        except BaseException:
            state.version -= 1
            raise
        state.update_end = state.gradient.task = task

    def _update(self, update: _Update) -> bool:
        """Whether it was made."""
        try:
            if self._worker.failures[update.group.index] != update.forgiven:
                if update.shadows is not None:
                    return False  # its step will be refused, and there is nothing to roll back
                raise StaleTensor(f"the gradient of {update.group.name!r} did not arrive: its update was not made")
            if update.load is not None:
                update.load.wait()  # a stream that waits is not enough: the host writes what the copy reads
            self.apply(update)
        except BaseException:
            self._worker.broken |= update.shadows is None  # else the ranges are what they were
            raise
        return True

    def _end_commit(self, group: Group, update: Task, old: Ranges) -> None:
        """After an ``update`` whose step has come: give up what it replaced, or, where it was not made, take it back:
        the group is a step behind others then.
        """
        if update.exception() is not None or not update.result():
            self._worker.broken = True
            old = self.shadows.swap(group, old)
        self.shadows.give_up(old)

    def apply(self, update: _Update) -> None:
        storage, shadows = self._storage, update.shadows
        opened, old = {kind: storage.open_at(each, kind) for kind, each in update.own.items()}, dict[str, Tensor]()
        if shadows is not None:
            new = {kind: storage.open_at(each, kind, load=False) for kind, each in shadows.items()}
            # Bytes of a disk are staged, and changed where they are.
            old = {kind: flat for kind, flat in opened.items() if flat.data_ptr() != new[kind].data_ptr()}
            opened = new
        gradient = storage.open(update.group, update.gradient_kind)
        whole, made, narrow = "master" in opened, list[Update](), list[tuple[Tensor, Tensor]]()
        for slot, step, hyper in ((job.slot, job.step, job.hyper) for job in update.jobs):
            step.add_(1)
            new, was = (_states(slot, each, whole=whole) for each in (opened, opened | old))
            numbers = AdamWStep(**vars(hyper), step=int(step))
            made.append(Update(new, was, flat_of(slot, gradient, update.gradient_kind), update.factor, numbers))
            if whole:
                narrow.append((new.weight, slot.flat(opened["weight"])))
        began = time.perf_counter()
        with torch.no_grad(), torch.profiler.record_function("AdamW on the host"):
            cpu.update(made)
            for pair in narrow:
                for master, weight in zip(*(each.split(CHUNK) for each in pair), strict=True):
                    round_from_fp32(master, weight)
        count = sum(job.slot.num_elements for job in update.jobs)
        storage.stack.add_update(count, time.perf_counter() - began)
        for kind, flat in opened.items():
            storage.store_at((shadows or update.own)[kind], flat)


def _states(slot: Slot, opened: Mapping[str, Tensor], *, whole: bool) -> States:
    weight = slot.flat_fp32(opened["master"]) if whole else slot.flat(opened["weight"])
    remainder = slot.flat(opened["remainder"], torch.int16) if "remainder" in opened else None
    return States(weight, remainder, *(slot.flat_fp32(opened[kind]) for kind in MOMENTS))
