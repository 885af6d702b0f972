"""AdamW on a group's ranges on the CPU, by a model's worker; before its step it writes into shadows of them.

Many threads update parts of it, each in its own cache (`kernels.optimizer.cpu`), with the bits of
`torch.optim.AdamW(fused=True)` on single tensors. torch's own threads would meet after every operation, and wait there
for whichever shares its core with a busy thread; here every thread takes the next part when it is done
(docs/journal/offload.md).
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vblackwell.errors import StaleTensor
from vblackwell.kernels.optimizer import cpu
from vblackwell.kernels.optimizer.adamw import AdamWStep
from vblackwell.kernels.optimizer.cpu import States, Sum, Update
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import MOMENTS, Group, Slot
from vblackwell.offload.movement.state import Hyper, Job, Mover, Shared, Task, defer_sigint, flat_of
from vblackwell.offload.movement.weights import WeightStreamer
from vblackwell.offload.storage.masters import round_from_fp32
from vblackwell.offload.storage.storage import Ranges, Shadows
from vblackwell.units import align_up

CHUNK = 1 << 16  # elements: a part ends at a multiple of it, or where its parameter ends (`adamw_piece`)
# A thread takes so many elements at once that taking, which needs the interpreter's lock, does not show; and each gets
# about so many turns, so that one whose core was wanted elsewhere does less.
MIN_PART, TURNS = 1 << 19, 6
OTHER_THREADS = 3  # that are busy while updates run: two that launch the model's kernels, one that hands out updates


_one_at_a_time = threading.Lock()


def _compute_alone() -> None:
    """Let this thread run torch's operations without torch's other threads, and unseen by a profiler."""
    with _one_at_a_time:  # two together would take each other's 1 for the number of the process, and leave it at that
        count = torch.get_num_threads()  # asked first: a thread's first question sets the number to that of the process
        torch.set_num_threads(1)
        # That was also the number for threads to come, which another thread can put right without touching this one's.
        other = threading.Thread(target=torch.set_num_threads, args=(count,))
        other.start()
        other.join()
    # It would note every operation on every chunk, which takes as long as the operation, and stops the other threads
    # meanwhile.
    torch.autograd._enable_record_function(False)  # pyright: ignore[reportPrivateImportUsage]


def update_threads() -> int:
    """How many threads update in this process, as torch's number was at the first update or question."""
    return _pool()[1]


@cache
def _pool() -> tuple[ThreadPoolExecutor, int]:
    """The threads of the process, made at the first update: torch's number, but some cores are left to busy ones."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, min(torch.get_num_threads(), max(2, cores - OTHER_THREADS)))
    return ThreadPoolExecutor(count, "vblackwell-update", initializer=_compute_alone), count


if hasattr(os, "register_at_fork"):  # a child has the pool's tasks and none of its threads: it would wait for ever
    os.register_at_fork(after_in_child=_pool.cache_clear)


class Stretch(NamedTuple):
    """An update of one parameter, or of a part of it, and its weight, if that is narrower than a whole master."""

    update: Update
    weight: Tensor | None = None  # (n,), becomes the new master, rounded

    def part(self, elements: slice) -> "Stretch":
        return Stretch(self.update.part(elements), None if self.weight is None else self.weight[elements])


def make_updates(stretches: Sequence[Stretch]) -> None:
    cpu.update([each.update for each in stretches])
    for (update, weight), start in ((each, at) for each in stretches for at in range(0, len(each.update), CHUNK)):
        if weight is not None:
            part = slice(start, start + CHUNK)
            round_from_fp32(update.new.weight[part], weight[part])


class Loop:
    """Work that is added first and then run by the threads of the process. For one thread."""

    def __init__(self, make: Callable[[list[Any]], None]) -> None:
        cpu.library()  # compiled before the first update, which threads wait for
        self._make = make
        self._added: list[Any] = []

    def add(self, stretch: Stretch | Sum) -> None:
        """What has a ``part`` of each slice, and ``make`` makes."""
        self._added.append(stretch)

    def run(self) -> None:
        """Do it in parts, of which each thread takes the next when it is done; on return no thread is at work any more.

        Nor is one where it raises; then some of what was added is done and the rest not.
        """
        pool, count = _pool()
        added, self._added = self._added, []
        total = sum(map(_elements, added))
        parts = deque(_share_out(added, max(MIN_PART, -(-total // (TURNS * count)))))

        def take_all() -> None:
            while True:
                try:
                    part = parts.popleft()
                except IndexError:
                    return
                with torch.no_grad():
                    self._make(part)

        tasks: list[Future[None]] = []
        try:
            with torch.profiler.record_function(f"{self._make.__name__} on the host"):  # not seen in threads
                for _ in range(min(count, len(parts))):
                    tasks.append(pool.submit(take_all))
                errors = [error for task in tasks if (error := task.exception()) is not None]
            if errors:
                raise errors[0]
        finally:
            parts.clear()
            wait(tasks)


def _elements(stretch: Stretch | Sum) -> int:
    return len(stretch.update if isinstance(stretch, Stretch) else stretch)


def _share_out(stretches: list[Any], wanted: int) -> list[list[Any]]:
    """``stretches`` in parts of about ``wanted`` elements, cut only where a whole chunk ends."""
    parts: list[list[Any]] = [[]]
    missing = wanted
    for each in stretches:
        total, start = _elements(each), 0
        while start < total:
            stop = min(start + align_up(missing, CHUNK), total)
            parts[-1].append(each if stop - start == total else each.part(slice(start, stop)))
            missing -= stop - start
            start = stop
            if missing <= 0:
                parts.append([])
                missing = wanted
    return [part for part in parts if part]


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
        self._loop = Loop(make_updates)
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
        whole = "master" in opened
        for slot, step, hyper in ((job.slot, job.step, job.hyper) for job in update.jobs):
            step.add_(1)
            new, was = (_states(slot, each, whole=whole) for each in (opened, opened | old))
            numbers = AdamWStep(**vars(hyper), step=int(step))
            values = flat_of(slot, gradient, update.gradient_kind)
            weight = slot.flat(opened["weight"]) if whole else None
            self._loop.add(Stretch(Update(new, was, values, update.factor, numbers), weight))
        began = time.perf_counter()
        self._loop.run()
        count = sum(job.slot.num_elements for job in update.jobs)
        storage.stack.add_update(count, time.perf_counter() - began)
        for kind, flat in opened.items():
            storage.store_at((shadows or update.own)[kind], flat)


def _states(slot: Slot, opened: Mapping[str, Tensor], *, whole: bool) -> States:
    weight = slot.flat_fp32(opened["master"]) if whole else slot.flat(opened["weight"])
    remainder = slot.flat(opened["remainder"], torch.int16) if "remainder" in opened else None
    return States(weight, remainder, *(slot.flat_fp32(opened[kind]) for kind in MOMENTS))
