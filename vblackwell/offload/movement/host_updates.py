"""AdamW on a group's ranges on the CPU, by a model's worker; before its step it writes into shadows of them, or makes
the weights alone, of states that are a step behind (`Behind`).

The threads are `kernels.optimizer.cpu`'s, with the bits of `torch.optim.AdamW(fused=True)` on single tensors.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vblackwell.errors import StaleTensor
from vblackwell.kernels.optimizer import cpu
from vblackwell.kernels.optimizer.adamw import CHUNK, AdamWStep, Then
from vblackwell.kernels.optimizer.cpu import New, States, Update
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import MOMENTS, OLD_GRADIENT, OLD_WEIGHT, Group, Slot
from vblackwell.offload.movement.state import (
    Behind,
    EarlyUpdate,
    Hyper,
    Job,
    Mover,
    Numbers,
    Shared,
    Task,
    defer_sigint,
    flat_of,
)
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
    early: EarlyUpdate | None  # before its step
    gradient_kind: str
    factor: Tensor | None  # fp32 scalar that gradients are multiplied by
    load: Transfer | None  # the newest out of the weights
    forgiven: int  # failures of the group's tasks that concern no gradient of this update

    @property
    def shadows(self) -> Ranges | None:
        """What is written instead."""
        return None if self.early is None else self.early.shadows


class HostUpdates(Mover):
    """Updates of one model that its worker runs on the ranges in storage."""

    def __init__(self, shared: Shared, weights: WeightStreamer) -> None:
        super().__init__(shared)
        self._weights = weights
        cpu.library()  # compiled before the first update, which the model waits for
        self.shadows = Shadows(self._storage)
        self._ends: dict[Group, Task] = {}  # of committed updates: the ranges are those to read from then on

    def commit(self, group: Group, early: EarlyUpdate) -> None:
        state, old = self._states[group], self._adopt(group, early)
        try:
            self._ends[group] = self._worker.submit(
                self._end_commit, group, state.update_end, early, old, group=group.index
            )
        except BaseException:  # another task has failed meanwhile: this group stays a step behind
            self._worker.broken = True
            if state.update_end.exception() is None and state.update_end.result():
                early.behind = None  # it has made the step that the states lacked
            self._take_back(group, early, old)
            raise

    def _adopt(self, group: Group, early: EarlyUpdate) -> Ranges | None:
        """Make what an update wrote the group's; what it had, None where that stays for the next one."""
        if early.ahead is None:
            assert early.shadows is not None
            return self.shadows.swap(group, early.shadows)
        self._storage.exchange(group, "weight", OLD_WEIGHT)
        self._states[group].behind = Behind(early.ahead, self._storage.range(group, "gradient"))
        return None

    def _take_back(self, group: Group, early: EarlyUpdate, old: Ranges | None) -> Ranges | None:
        """The reverse of `_adopt`, of an update that was not made."""
        if old is not None:
            return self.shadows.swap(group, old)
        self._storage.exchange(group, "weight", OLD_WEIGHT)
        self._states[group].behind = early.behind
        return None

    def roll_back(self, group: Group, early: EarlyUpdate) -> None:
        """Make the ranges what they were before `StepControl._start_early`; or raise what an earlier task did."""
        self._worker.raise_failure()
        state = self._states[group]
        update: Task = state.update_end
        failure = update.exception()
        if early.ahead is None:
            self.shadows.give_up(early.shadows or {})
        elif failure is None and update.result():  # else it is cancelled
            state.behind = None
        state.update_end, state.gradient.task = None, early.earlier  # which may still add to the gradient

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
        self, group: Group, jobs: list[Job], gradient: Tensor | None, factor: Tensor | None, early: EarlyUpdate | None
    ) -> None:
        """Queue an update from the gradient in host memory (``gradient``: None), which is ``early`` or is not."""
        self._weights.invalidate(group)
        state, own, forgiven = self._states[group], self._storage.own_ranges(group), self._worker.forgiven[group.index]
        if early is not None and early.ahead is not None:
            own |= {kind: self._storage.range(group, kind) for kind in (OLD_WEIGHT, "gradient")}
            own |= {} if early.behind is None else {OLD_GRADIENT: early.behind.gradient}
        update = _Update(group, jobs, own, early, state.gradient.kind, factor, state.last_load, forgiven)
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
            self._worker.broken |= update.shadows is None  # else the ranges are what they were, or `_look_ahead` knows
            raise
        return True

    def _end_commit(self, group: Group, update: Task, early: EarlyUpdate, old: Ranges | None) -> None:
        """After an ``update`` whose step has come: give up what it replaced, or, where it was not made, take it back:
        the group is a step behind others then.
        """
        if update.exception() is not None or not update.result():
            self._worker.broken = True
            old = self._take_back(group, early, old)
            if early.behind is not None:  # at once: what it needs may be written to next
                self._settle(self._ranges_to_settle(group, early.behind), early.behind)
                self._states[group].behind = None
        self.shadows.give_up(old or {})

    @defer_sigint()
    def begin_settling(self, group: Group, behind: Behind) -> None:
        """Queue the step that the states of ``group`` lack: its weights have had it."""
        if behind.task is None:
            ranges = self._ranges_to_settle(group, behind)
            behind.task = self._worker.submit(self._settle, ranges, behind, group=group.index)

    def _ranges_to_settle(self, group: Group, behind: Behind) -> Ranges:
        old = {OLD_WEIGHT: self._storage.range(group, OLD_WEIGHT), OLD_GRADIENT: behind.gradient}
        return self._storage.own_ranges(group) | old

    def _settle(self, ranges: Ranges, behind: Behind) -> None:
        try:
            opened = {kind: self._storage.open_at(each, kind) for kind, each in ranges.items()}
            made = list[Update]()
            for slot, numbers in behind.numbers.items():
                states = _states(slot, {**opened, "weight": opened[OLD_WEIGHT]}, whole=False)
                made.append(Update(states, states, slot.flat(opened[OLD_GRADIENT]), None, numbers))
            cpu.update(made)
            self._store(ranges, opened)
        except BaseException:
            self._worker.broken = True
            raise

    def _store(self, ranges: Ranges, opened: Mapping[str, Tensor]) -> None:
        for kind in ranges.keys() & {OLD_WEIGHT, "remainder", *MOMENTS}:
            self._storage.store_at(ranges[kind], opened[kind])

    def _look_ahead(self, update: _Update, early: EarlyUpdate, ahead: Numbers) -> None:
        """Make the step that the states lack, if there is one, and of the one that may come the weights."""
        behind = early.behind
        opened, made = {kind: self._storage.open_at(each, kind) for kind, each in update.own.items()}, list[Update]()
        for job in update.jobs:
            slot, numbers = job.slot, ahead[job.slot]
            job.steps[job.slot] += 1
            states, fresh = _states(slot, opened, whole=False), slot.flat(opened["gradient"])
            weight = slot.flat(opened[OLD_WEIGHT])
            if behind is None:
                made.append(Update(New(weight), states, fresh, None, numbers))
            else:
                states, earlier = states._replace(weight=weight), slot.flat(opened[OLD_GRADIENT])
                made.append(Update(states, states, earlier, None, behind.numbers[slot], Then(fresh, numbers)))
        began = time.perf_counter()
        try:
            with torch.profiler.record_function("AdamW on the host"):
                cpu.update(made)
        except BaseException:
            self._worker.broken |= behind is not None  # whose states are changed where they are
            early.behind = None  # some have had that step
            raise
        count = sum(job.slot.num_elements for job in update.jobs)
        self._storage.stack.add_update(count, time.perf_counter() - began)
        self._store(update.own, opened)

    def apply(self, update: _Update) -> None:
        if update.early is not None and update.early.ahead is not None:
            self._look_ahead(update, update.early, update.early.ahead)
            return
        storage, shadows = self._storage, update.shadows
        opened, old = {kind: storage.open_at(each, kind) for kind, each in update.own.items()}, dict[str, Tensor]()
        if shadows is not None:
            new = {kind: storage.open_at(each, kind, load=False) for kind, each in shadows.items()}
            # Bytes of a disk are staged, and changed where they are.
            old = {kind: flat for kind, flat in opened.items() if flat.data_ptr() != new[kind].data_ptr()}
            opened = new
        gradient = storage.open(update.group, update.gradient_kind)
        whole, made, narrow = "master" in opened, list[Update](), list[tuple[Tensor, Tensor]]()
        for job in update.jobs:
            job.steps[job.slot] += 1
            slot = job.slot
            new, was = (_states(slot, each, whole=whole) for each in (opened, opened | old))
            numbers = AdamWStep(**vars(job.hyper), step=job.step)
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
