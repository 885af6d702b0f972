"""AdamW on a group's ranges on the CPU, by a model's worker; before its step it writes into shadows of them.

A narrow compute weight has a whole fp32 master, an fp32 one is its own. Many threads update them chunk by chunk, each
in its own cache, with the bits of `torch.optim.AdamW(fused=True)` on single tensors. From Python each of a chunk's few
torch calls would take the interpreter's lock back from the thread that launches the model's kernels, 0.2 ms a time on a
busy machine, so TorchScript runs the loop with the lock released. torch's own threads would meet after every call, and
wait there for whichever shares its core with a busy thread; here every thread takes the next chunks when it is done
(docs/journal/offload.md).
"""

# ruff: noqa: UP006, UP035 (TorchScript reads the annotations)
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, List, NamedTuple

import torch
from torch import Tensor

from vblackwell.errors import StaleTensor
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import MOMENTS, Group
from vblackwell.offload.movement.state import Hyper, Job, Mover, Shared, Task, defer_sigint, flat_of
from vblackwell.offload.movement.weights import WeightStreamer
from vblackwell.offload.storage.masters import round_from_fp32
from vblackwell.offload.storage.storage import Ranges, Shadows
from vblackwell.units import align_up

# Elements. A multiple of 16, or torch's vectorised AdamW rounds differently; what one operation wrote is in cache for
# the next: 1.4 MiB.
CHUNK = 1 << 16
# A thread takes so many elements at once that taking, which needs the interpreter's lock, does not show; and each gets
# about so many turns, so that one whose core was wanted elsewhere does less.
MIN_PART, TURNS = 1 << 20, 2
OTHER_THREADS = 3  # that are busy while updates run: two that launch the model's kernels, one that hands out updates


# TorchScript reads the annotations below, so this is written in what it understands. The lists of one, ``held``, come
# from outside: of a list that is made in here it would not see that AdamW writes to what is in it, and drop the call as
# dead.
def _adamw(
    stretches: List[List[Tensor]], numbers: List[List[float]], scratch: List[Tensor], held: List[List[Tensor]]
) -> None:
    none: List[Tensor] = []
    wide, bits, half = scratch
    master, gradient, exp_avg, exp_avg_sq, step = held
    for index, stretch in enumerate(stretches):
        masters, master_bits, weights, gradients, exp_avgs, exp_avg_sqs = stretch[:6]
        old_masters, old_exp_avgs, old_exp_avg_sqs, factor, steps = stretch[6:]
        lr, beta1, beta2, eps, weight_decay = numbers[index]
        total, most, scaled = masters.numel(), wide.numel(), factor.numel() > 0
        if weights.numel() + factor.numel() + old_masters.numel() == 0 and gradients.dtype == torch.float32:
            most = total  # AdamW is all there is to do
        step[0] = steps
        for start in range(0, total, most):
            count = min(most, total - start)
            master[0] = masters.narrow(0, start, count)
            gradient[0] = gradients.narrow(0, start, count)
            if scaled or gradients.dtype != torch.float32:
                gradient[0] = wide.narrow(0, 0, count)
            if scaled and gradients.dtype == torch.float32:
                torch.mul(gradients.narrow(0, start, count), factor, out=gradient[0])
            elif scaled or gradients.dtype != torch.float32:
                gradient[0].copy_(gradients.narrow(0, start, count))
                if scaled:
                    gradient[0].mul_(factor)
            exp_avg[0] = exp_avgs.narrow(0, start, count)
            exp_avg_sq[0] = exp_avg_sqs.narrow(0, start, count)
            if old_masters.numel() > 0:  # the copy is in cache when AdamW changes it: old bytes are read once
                master[0].copy_(old_masters.narrow(0, start, count))
            if old_exp_avgs.numel() > 0:
                exp_avg[0].copy_(old_exp_avgs.narrow(0, start, count))
            if old_exp_avg_sqs.numel() > 0:
                exp_avg_sq[0].copy_(old_exp_avg_sqs.narrow(0, start, count))
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                master,
                gradient,
                exp_avg,
                exp_avg_sq,
                none,
                step,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )
            if weights.numel() == 0:
                continue
            weight = weights.narrow(0, start, count)
            if weights.dtype != torch.int16:
                weight.copy_(master[0])
                continue
            # The gradient has been read: memory that it was widened in takes the sum. A tensor is added, not a number,
            # because TorchScript's sum with a number is made in new memory, page fault by page fault, and then copied.
            # The high halves come down to be narrowed: a copy of every second int16 takes twice as long.
            rounded = bits.narrow(0, 0, count)
            torch.add(master_bits.narrow(0, start, count), half, out=rounded)
            weight.copy_(rounded.bitwise_right_shift_(16))
            # A full low half has wrapped to a zero; a payload there alone gives an infinity. The largest is NaN if any
            # is: an answer for each element, asked of every chunk, took as long as AdamW.
            if bool(master[0].amax().isnan()):
                weight.masked_fill_(master[0].isnan(), 0x7FC0)


def _sum(
    stretches: List[List[Tensor]], numbers: List[List[float]], scratch: List[Tensor], held: List[List[Tensor]]
) -> None:
    wide = scratch[0]
    for stretch in stretches:
        total, first, addend = stretch
        for start in range(0, total.numel(), wide.numel()):
            count = min(wide.numel(), total.numel() - start)
            target = total.narrow(0, start, count)
            if first.numel() > 0:
                target.copy_(first.narrow(0, start, count))
            if addend.numel() > 0:
                part = addend.narrow(0, start, count)
                if part.element_size() < target.element_size():
                    own = wide.narrow(0, 0, count)
                    own.copy_(part)
                    target.add_(own)
                else:
                    target.add_(part)


@cache
def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """``loop`` as TorchScript, or as it is, with a warning, where there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # known: see above
            warnings.simplefilter("ignore", FutureWarning)
            return torch.jit.script(loop)
    except Exception as error:  # whatever a later torch has against it: the function itself does the same
        said = " ".join(str(error).split())[:200]
        warnings.warn(
            f"this torch does not compile the CPU's {loop.__name__[1:]} ({type(error).__name__}: {said}): its threads "
            "will wait for each other",
            RuntimeWarning,
            stacklevel=3,
        )
        return loop


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


class Scratch(threading.local):
    """What a thread works in. Made once: memory that is new at every step costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        wide = torch.empty(CHUNK)
        self.tensors = [wide, wide.view(torch.int32), torch.tensor(0x8000, dtype=torch.int32)]
        self.held = [[wide] for _ in range(5)]


class Stretch(NamedTuple):
    """Of one parameter: tensors that are cut alike, others, and numbers."""

    cut: list[Tensor]
    whole: Sequence[Tensor] = ()
    numbers: Sequence[float] = ()


_NONE = torch.empty(0)


class Loop:
    """Work that is added first and then run by the threads of the process. For one thread."""

    _function: Callable[..., None]

    def __init__(self) -> None:
        compiled(self._function)  # in the caller's thread: it changes the process's filters of warnings for a while
        self._added: list[Stretch] = []
        self._scratch = Scratch()

    def run(self) -> None:
        """Do it in parts, of which each thread takes the next when it is done; on return no thread is at work any more.

        Nor is one where it raises; then some of what was added is done and the rest not.
        """
        pool, count = _pool()
        added, self._added = self._added, []
        total = sum(len(each.cut[0]) for each in added)
        parts = deque(_share_out(added, max(MIN_PART, -(-total // (TURNS * count)))))

        def take_all() -> None:
            while True:
                try:
                    part = parts.popleft()
                except IndexError:
                    return
                self._work(part)

        tasks: list[Future[None]] = []
        try:
            with torch.profiler.record_function(f"{self._function.__name__[1:]} on the host"):  # not seen in threads
                for _ in range(min(count, len(parts))):
                    tasks.append(pool.submit(take_all))
                errors = [error for task in tasks if (error := task.exception()) is not None]
            if errors:
                raise errors[0]
        finally:
            parts.clear()
            wait(tasks)

    @torch.no_grad()
    def _work(self, part: list[Stretch]) -> None:
        stretches, numbers = [[*each.cut, *each.whole] for each in part], [[*each.numbers] for each in part]
        compiled(self._function)(stretches, numbers, self._scratch.tensors, self._scratch.held)


def _share_out(stretches: list[Stretch], wanted: int) -> list[list[Stretch]]:
    """``stretches`` in parts of about ``wanted`` elements, cut only where a whole chunk ends."""
    parts: list[list[Stretch]] = [[]]
    missing = wanted
    for each in stretches:
        total, start = len(each.cut[0]), 0
        while start < total:
            stop = min(start + align_up(missing, CHUNK), total)
            is_whole = stop - start == total
            parts[-1].append(each if is_whole else each._replace(cut=[tensor[start:stop] for tensor in each.cut]))
            missing -= stop - start
            start = stop
            if missing <= 0:
                parts.append([])
                missing = wanted
    return [part for part in parts if part]


class MasterLoop(Loop):
    """Updates parameters with whole masters, or that are their own."""

    _function = staticmethod(_adamw)

    def add(
        self,
        master: Tensor,
        weight: Tensor | None,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        step: Tensor,
        factor: Tensor | None,
        hyper: Hyper,
        old: Sequence[Tensor | None] = (None, None, None),
    ) -> None:
        """One AdamW step; ``weight`` becomes the master, rounded, a bf16 with ties away; a NaN stays one.

        ``old``: what master and moments were, where that is other memory; None: they are changed in place.

        A bf16 is the high half of its fp32: rounding is a sum of integers, a shift and a copy as 16-bit integers. All
        are on the CPU: ``weight`` (n,), None: the master is the weight; ``gradient``, (n,) of its type or fp32, may be
        the same memory; the others (n,) fp32; ``step``, counted up, and ``factor``, which the update multiplies
        gradients by, fp32 scalars.
        """
        if weight is not None and weight.dtype == torch.bfloat16:
            weight = weight.view(torch.int16)
        cut = (master, master.view(torch.int32), weight, gradient, exp_avg, exp_avg_sq, *old)
        whole = [_NONE if factor is None else factor, step]
        self._added.append(Stretch([_NONE if each is None else each for each in cut], whole, [*vars(hyper).values()]))


class SumLoop(Loop):
    _function = staticmethod(_sum)

    def add(self, total: Tensor, first: Tensor | None, addend: Tensor | None) -> None:
        """``total``, (n,) fp32 or of their type, becomes ``first`` (None: what it was) plus ``addend`` (None: 0)."""
        self._added.append(Stretch([total, *(_NONE if each is None else each for each in (first, addend))]))


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
        self._loop = MasterLoop()
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
        kinds = ("master" if "master" in opened else "weight", *MOMENTS)
        for slot, step, hyper in ((job.slot, job.step, job.hyper) for job in update.jobs):
            step.add_(1)
            cut = {kind: slot.flat if kind == "weight" else slot.flat_fp32 for kind in kinds}
            master, exp_avg, exp_avg_sq = (cut[kind](opened[kind]) for kind in kinds)
            was = [cut[kind](old[kind]) if kind in old else None for kind in kinds]
            weight = slot.flat(opened["weight"]) if "master" in opened else None
            values = flat_of(slot, gradient, update.gradient_kind)
            self._loop.add(master, weight, values, exp_avg, exp_avg_sq, step, update.factor, hyper, was)
        self._loop.run()
        for kind, flat in opened.items():
            storage.store_at((shadows or update.own)[kind], flat)
