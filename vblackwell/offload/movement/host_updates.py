"""AdamW on one group's ranges in host memory or on a disk: the arithmetic, its queue, and its rollback.

Where the compute weight is fp32 it is its own master, and torch's fused AdamW runs on per-parameter views in one call a
group, with the same bits as `torch.optim.AdamW(fused=True)` on single tensors. A narrower compute weight has an fp32
master next to it: gradients are cast in chunks that stay in cache, and the compute weight is the master rounded to
nearest, ties away from zero (bits + 0x8000 for bf16), the rounding that a master split into weight and 16-bit remainder
needs.

An update that runs before its step first copies what it overwrites into an `UndoLog`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from vblackwell.errors import InsufficientMemory, StaleTensor
from vblackwell.memory.cache.stack import Reservation
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import Group
from vblackwell.offload.movement.gradients import GradientCollector
from vblackwell.offload.movement.group_state import EarlyUpdate, GroupStates, Hyper, Job, Phase
from vblackwell.offload.movement.update_loop import MasterLoop
from vblackwell.offload.movement.weights import WeightStreamer
from vblackwell.offload.movement.worker import Worker, defer_sigint
from vblackwell.offload.storage.masters import round_from_fp32
from vblackwell.offload.storage.storage import Storage

# Elements. A multiple of 16, or torch's vectorised AdamW rounds differently; large enough that the calls do not show,
# small enough that what one operation wrote is in cache for the next.
CHUNK = 1 << 20


def fused_adamw(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    hyper: Hyper,
) -> None:
    """torch's fused AdamW, in place, on tensors of one device; ``steps`` are already counted up."""
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        list(weights), list(gradients), list(exp_avgs), list(exp_avg_sqs), [], list(steps),
        lr=hyper.lr, beta1=hyper.beta1, beta2=hyper.beta2, weight_decay=hyper.weight_decay, eps=hyper.eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def update_master(
    master: torch.Tensor, weight: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, gradient: torch.Tensor,
    step: torch.Tensor, hyper: Hyper,
) -> None:  # fmt: skip
    """One AdamW step on a whole fp32 master, all flat; the compute weight is then that, rounded."""
    fused_adamw([master], [gradient], [exp_avg], [exp_avg_sq], [step], hyper)
    round_from_fp32(master, weight)


class UndoLog:
    """Copies of the ranges that an update is about to overwrite, in host memory that was reserved for them."""

    def __init__(self, jobs: Sequence[Job], memory: Reservation) -> None:
        self.memory = memory
        self._jobs = list(jobs)
        self._steps: list[torch.Tensor] = []
        self._ranges: dict[str, torch.Tensor] = {}

    def keep(self, opened: dict[str, torch.Tensor]) -> None:
        """Copy what is there now."""
        kept = self.memory.view()
        assert kept is not None
        self._steps = [job.step.clone() for job in self._jobs]
        used = 0
        for kind, flat in opened.items():
            self._ranges[kind] = kept[used : used + flat.numel()].copy_(flat)
            used += flat.numel()

    def restore(self, group: Group, storage: Storage) -> None:
        """Make the ranges and step counts what they were; nothing where the update failed before it kept them."""
        if not self._steps:
            return
        for kind, kept in self._ranges.items():
            flat = storage.open(group, kind, load=False)
            flat.copy_(kept)
            storage.close_range(group, kind, flat, store=True)
        for job, step in zip(self._jobs, self._steps, strict=True):
            job.step.copy_(step)


def updated_kinds(group: Group, storage: Storage) -> list[str]:
    """The ranges that an update of ``group`` on the host writes."""
    master = ["master"] if (group, "master") in storage else []
    return [*master, "weight", "exp_avg", "exp_avg_sq"]


class Updater:
    """Updates the groups of one model; every method runs in the worker thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        # Made once: memory that is new at every step costs a page fault every 4 KiB.
        self._wide = torch.empty(0)
        self._loop = MasterLoop()

    def update(
        self, group: Group, jobs: Sequence[Job], gradient_kind: str, factor: torch.Tensor | None, undo: UndoLog | None
    ) -> None:
        """One AdamW step for ``jobs`` of ``group``; gradients are multiplied by the fp32 scalar ``factor`` first, if
        given.

        fp32 gradients are multiplied where they are, as torch's clipping does.
        """
        kinds = updated_kinds(group, self._storage)
        opened = {kind: self._storage.open(group, kind) for kind in kinds}
        gradient = self._storage.open(group, gradient_kind)
        if undo is not None:
            undo.keep(opened)
        for job in jobs:
            job.step.add_(1)
        if "master" not in opened and gradient_kind == "gradient":
            self._update_whole(jobs, opened, gradient, factor)
        else:
            for job in jobs:
                self._update_chunked(job, opened, gradient, gradient_kind, factor)
            with torch.profiler.record_function("AdamW on the host"):  # its threads are not in the trace
                self._loop.run()
        for kind in kinds:
            self._storage.close_range(group, kind, opened[kind], store=True)
        self._storage.close_range(group, gradient_kind, gradient, store=factor is not None)

    def _update_whole(
        self, jobs: Sequence[Job], opened: dict[str, torch.Tensor], gradient: torch.Tensor, factor: torch.Tensor | None
    ) -> None:
        """All fp32: one call for all parameters that share their numbers."""
        for hyper in dict.fromkeys(job.hyper for job in jobs):
            same = [job for job in jobs if job.hyper == hyper]
            gradients = [job.slot.flat(gradient) for job in same]
            if factor is not None:
                torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
            fused_adamw(
                [job.slot.flat(opened["weight"]) for job in same],
                gradients,
                [job.slot.flat_fp32(opened["exp_avg"]) for job in same],
                [job.slot.flat_fp32(opened["exp_avg_sq"]) for job in same],
                [job.step for job in same],
                hyper,
            )

    def _update_chunked(
        self,
        job: Job,
        opened: dict[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_kind: str,
        factor: torch.Tensor | None,
    ) -> None:
        """A narrow compute weight, or a sum of gradients: fp32 arithmetic, chunk by chunk."""
        slot, hyper = job.slot, job.hyper
        weight = slot.flat(opened["weight"])
        states = slot.flat_fp32(opened["exp_avg"]), slot.flat_fp32(opened["exp_avg_sq"])
        source = slot.flat_fp32(gradient) if gradient_kind == "accumulated" else slot.flat(gradient)
        if "master" in opened and weight.dtype == torch.bfloat16:
            self._loop.add(slot.flat_fp32(opened["master"]), weight, source, *states, job.step, factor, **vars(hyper))
            return
        master = slot.flat_fp32(opened["master"]) if "master" in opened else weight
        if not self._wide.numel():
            self._wide = torch.empty(CHUNK)
        for start in range(0, slot.num_elements, CHUNK):
            part = slice(start, start + CHUNK)
            values = self._wide[: len(source[part])].copy_(source[part])
            if factor is not None:
                values.mul_(factor)
            fused_adamw([master[part]], [values], [states[0][part]], [states[1][part]], [job.step], hyper)
            if master is not weight:
                weight[part].copy_(master[part])


class HostUpdates:
    """Updates of one model that its worker runs on the ranges in storage.

    Attributes:
        undo_peak_bytes: the most host memory that undo logs have taken at a time.
    """

    def __init__(
        self, name: str, states: GroupStates, storage: Storage, weights: WeightStreamer, gradients: GradientCollector,
        worker: Worker,
    ) -> None:  # fmt: skip
        self._name = name
        self._states = states
        self._storage = storage
        self._weights = weights
        self._gradients = gradients
        self._worker = worker
        self.updater = Updater(storage)
        self._undo_bytes = 0
        self.undo_peak_bytes = 0
        self._forgiven = Counter[int | None]()  # failures of the worker when all gradients were last given up
        self._broken = False  # an update of a step that came has failed, while others of it may have been made

    # -- one group ---------------------------------------------------------------------------------------------------

    def start_early(
        self, group: Group, jobs: list[Job], gradient: torch.Tensor | None, *, final: bool
    ) -> EarlyUpdate | None:
        """Update ``group`` before its step, from the gradient in host memory; None if an undo log has no room."""
        undo = None
        if not final:
            undo = self._undo_log(group, jobs)
            if undo is None:
                return None  # this group is updated at the step, which is always right
        try:
            self.wait(group)
            self._queue(group, jobs, None, undo)
        except BaseException:
            self._free(undo)
            raise
        return EarlyUpdate(jobs, undo)

    def commit(self, group: Group, early: EarlyUpdate) -> None:
        """The step of an early update has come."""
        self._worker.submit(self._free, early.rollback, group=group.index)

    def roll_back(self, group: Group, early: EarlyUpdate) -> None:
        """Queue what makes everything what it was before `start_early`.

        Raises:
            What an earlier task raised; then nothing is queued, and it may be asked again.
        """
        self._states[group].update_end = self._worker.submit(self._restore, group, early.rollback, group=group.index)
        self._weights.revert(group)

    @defer_sigint()
    def update(self, group: Group, jobs: list[Job], factor: torch.Tensor | None) -> None:
        """Queue the step's update of ``group``."""
        self._queue(group, jobs, factor, None)
        self._states[group].update_is_queued()

    def wait(self, group: Group) -> None:
        """Return when the group's last update is in storage."""
        state = self._states[group]
        task = state.update_end
        if task is not None:
            task.exception()  # an interrupt leaves it to be waited for by the next caller
            state.update_end = None
        if state.phase is Phase.UPDATING:
            state.to(Phase.STORED)
        if task is not None:
            task.settle()

    order_loads = wait  # a load reads what the host has written

    def is_busy(self, group: Group) -> bool:
        """Whether a load would wait for an update."""
        task = self._states[group].update_end
        return task is not None and (not task.done() or task.exception() is not None)

    # -- the worker's part -------------------------------------------------------------------------------------------

    def _queue(self, group: Group, jobs: list[Job], factor: torch.Tensor | None, undo: UndoLog | None) -> None:
        self._weights.invalidate(group)
        state = self._states[group]
        state.update_end = self._worker.submit(
            self._update, group, jobs, factor, undo, state.last_load, self._forgiven[group.index], group=group.index,
            postponable=True,
        )  # fmt: skip
        self._gradients.occupy(group, state.update_end)

    def _update(
        self, group: Group, jobs: list[Job], factor: torch.Tensor | None, undo: UndoLog | None, load: Transfer | None,
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
            self.updater.update(group, jobs, self._gradients.host.kind_of(group), factor, undo)
            if factor is not None:
                self._gradients.host.forget_norms(group)
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

    # -- undo logs ---------------------------------------------------------------------------------------------------

    def _undo_log(self, group: Group, jobs: list[Job]) -> UndoLog | None:
        size = sum(group.size_of(kind) for kind in updated_kinds(group, self._storage))
        try:
            memory = self._storage.take_host("undo", size)
        except InsufficientMemory:
            return None
        self._undo_bytes += memory.num_bytes
        self.undo_peak_bytes = max(self.undo_peak_bytes, self._undo_bytes)
        return UndoLog(jobs, memory)

    def _free(self, undo: UndoLog | None) -> None:
        if undo is not None:
            self._undo_bytes -= undo.memory.num_bytes
            self._storage.give(undo.memory)

    # -- failures ----------------------------------------------------------------------------------------------------

    def check_whole(self) -> None:
        """
        Raises:
            StaleTensor: an update failed: some groups are a step ahead of others.
        """
        if self._broken:
            raise StaleTensor(
                f"an update of model {self._name!r} failed in the background, so some of its groups are a step behind "
                "others: go on "
                "from a checkpoint (release(model) gives the weights as they are)"
            )

    def check_gradients(self) -> None:
        """
        Raises:
            StaleTensor: as `check_whole`; or a task failed since gradients were last given up: some may not be what
                backward made.
        """
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
