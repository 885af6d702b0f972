"""AdamW on one group's ranges at home: the arithmetic, and the way back.

Where the compute weight is fp32 it is its own master, and torch's fused AdamW runs on per-parameter views in one call a
group, with the same bits as `torch.optim.AdamW(fused=True)` on single tensors. A narrower compute weight has an fp32
master beside it: gradients are cast in chunks that stay in cache, and the compute weight is the master rounded to
nearest, ties away from zero (bits + 0x8000 for bf16), the rounding that a master split into weight and 16-bit remainder needs.

`Undo` keeps what an update overwrote, until the step that it anticipated is promised or given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.movement.update_loop import MasterLoop
from vblackwell.offload.storage.masters import round_from_fp32
from vblackwell.offload.storage.storage import Storage

# Elements. A multiple of 16, or torch's vectorised AdamW rounds differently; large enough that the calls do not show, small
# enough that what one operation wrote is in cache for the next.
CHUNK = 1 << 20


@dataclass(frozen=True)
class Hyper:
    """AdamW's numbers for one parameter at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, eq=False)
class Job:
    """One parameter's share of an update. ``step`` is torch's fp32 scalar, counted up by the update."""

    slot: Slot
    step: torch.Tensor
    hyper: Hyper


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


class Undo:
    """Copies of the ranges that an update is about to overwrite, in host memory that was reserved for them.

    Args:
        jobs: the parameters that the update changes.
        memory: CPU bytes, `Undo.size_of` of them.
    """

    def __init__(self, jobs: Sequence[Job], memory: torch.Tensor) -> None:
        self.jobs = list(jobs)
        self._memory = memory
        self._steps: list[torch.Tensor] = []
        self._ranges: dict[str, torch.Tensor] = {}

    @staticmethod
    def size_of(group: Group, homes: Storage) -> int:
        """Bytes to reserve for one update of ``group``."""
        return sum(group.size_of(kind) for kind in state_kinds(group, homes))

    def keep(self, opened: dict[str, torch.Tensor]) -> None:
        """Copy what is there now."""
        self._steps = [job.step.clone() for job in self.jobs]
        used = 0
        for kind, flat in opened.items():
            self._ranges[kind] = self._memory[used : used + flat.numel()].copy_(flat)
            used += flat.numel()

    def put_back(self, group: Group, homes: Storage) -> None:
        """Make the ranges and step counts what they were; nothing where the update failed before it kept them."""
        if not self._steps:
            return
        for kind, kept in self._ranges.items():
            flat = homes.open(group, kind, load=False)
            flat.copy_(kept)
            homes.close_range(group, kind, flat, store=True)
        for job, step in zip(self.jobs, self._steps, strict=True):
            job.step.copy_(step)


def state_kinds(group: Group, homes: Storage) -> list[str]:
    """The ranges that an update of ``group`` writes."""
    master = ["master"] if (group, "master") in homes else []
    return [*master, "weight", "exp_avg", "exp_avg_sq"]


class Updater:
    """Updates the groups of one model; every method runs in the worker thread."""

    def __init__(self, homes: Storage) -> None:
        self._homes = homes
        # Made once: memory that is new at every step costs a page fault every 4 KiB.
        self._wide = torch.empty(0)
        self._loop = MasterLoop()

    def update(
        self, group: Group, jobs: Sequence[Job], gradient_kind: str, factor: torch.Tensor | None, undo: Undo | None
    ) -> None:
        """One AdamW step for ``jobs`` of ``group``; gradients are multiplied by the fp32 scalar ``factor`` first, if given.

        fp32 gradients are multiplied where they are, as torch's clipping does.
        """
        kinds = state_kinds(group, self._homes)
        opened = {kind: self._homes.open(group, kind) for kind in kinds}
        gradient = self._homes.open(group, gradient_kind)
        if undo is not None:
            undo.keep(opened)
        for job in jobs:
            job.step.add_(1)
        if "master" not in opened and gradient_kind == "gradient":
            self._update_whole(jobs, opened, gradient, factor)
        else:
            for job in jobs:
                self._update_chunked(job, opened, gradient, gradient_kind, factor)
            with torch.profiler.record_function("AdamW at home"):  # its threads are not in the trace
                self._loop.run()
        for kind in kinds:
            self._homes.close_range(group, kind, opened[kind], store=True)
        self._homes.close_range(group, gradient_kind, gradient, store=factor is not None)

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
