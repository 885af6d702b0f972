"""Gradients in host memory: summed, measured and scaled by the worker thread, in the order in which they came.

The first arrival since `zero_grad` lies in the ``gradient`` range in compute type; when more come, all are added in
fp32, in the order in which PyTorch would have added them. Per-parameter norms are taken as
`torch.nn.utils.clip_grad_norm_` would take them.
"""

from __future__ import annotations

import torch

from vblackwell.kernels.optimizer.adamw import BLOCK, norm_of, square_sums
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.movement.group_state import GroupStates
from vblackwell.offload.movement.update_loop import SumLoop
from vblackwell.offload.storage.storage import Storage

LONGEST_WIDENED = 1 << 24  # elements: 64 MiB


class HostGradients:
    """What the worker thread does to gradients; every method runs there.

    Args:
        states: shared with the collector.
    """

    def __init__(self, stack: VGPUStack, storage: Storage, states: GroupStates) -> None:
        self._stack = stack
        self._storage = storage
        self._states = states
        self._wide = torch.empty(0)
        self._sums = SumLoop()

    def land(self, group: Group, slots: list[Slot], transfer: Transfer, kind: str) -> None:
        """A group's first gradient arrives in its range of ``kind``."""
        transfer.wait()
        state = self._states[group].gradient
        state.landed = dict.fromkeys(slots)
        state.kind = kind
        state.norms.clear()

    def add(
        self, group: Group, slots: list[Slot], incoming: Reservation, before: tuple[Transfer, ...], owned: bool
    ) -> None:
        """Add what lies in ``incoming`` to the sum in host memory, when all of ``before`` is over: its arrival, and
        readers of the sum.

        ``incoming`` is given back if it is ``owned``: on the arena it is the buffer on level 0, which
        `GradientCollector` gives back.
        """
        for transfer in before:
            transfer.wait()
        state = self._states[group].gradient
        fresh = incoming.view()
        assert fresh is not None
        self._sum(group, {slot: slot.flat(fresh) for slot in slots})
        if owned:
            self._storage.give(incoming)
        state.landed.update(dict.fromkeys(slots))
        state.norms.clear()

    def land_slice(
        self, slot: Slot, start: int, num_rows: int, adding: bool, source: Reservation, transfer: Transfer | None
    ) -> None:
        """Copy or add rows that lie in ``source`` to the gradient in host memory (worker thread)."""
        if transfer is not None:
            transfer.wait()
        group = slot.group
        state = self._states[group].gradient
        if adding:
            self._widen(group)
        kind = state.kind if adding else "gradient"
        view = source.view()
        assert view is not None
        rows = view[: num_rows * slot.shape[1] * slot.dtype.itemsize].view(slot.dtype).view(num_rows, -1)
        total = self._storage.open(group, kind)
        target = (slot.view_fp32(total) if kind == "accumulated" else slot.view(total))[start : start + num_rows]
        target.add_(rows) if adding else target.copy_(rows)
        self._storage.close_range(group, kind, total, store=True)
        if transfer is not None:
            self._storage.give(source)

    def note_landed(self, slot: Slot, adding: bool) -> None:
        state = self._states[slot.group].gradient
        state.landed[slot] = None
        state.norms.clear()
        if not adding:
            state.kind = "gradient"

    def _widen(self, group: Group) -> None:
        """Move a narrow gradient to the fp32 range, where sums are kept."""
        if self._is_narrow(group):
            self._sum(group, {})

    def _is_narrow(self, group: Group) -> bool:
        """Whether what is in host memory has to move before it can be a sum."""
        return self._states[group].gradient.kind != "accumulated" and not group.is_fp32

    def _sum(self, group: Group, fresh: dict[Slot, torch.Tensor]) -> None:
        """Add ``fresh`` to what is in host memory, in one pass; a narrow gradient moves to the fp32 range with it."""
        state, moves = self._states[group].gradient, self._is_narrow(group)
        narrow = self._storage.open(group, "gradient") if moves else None
        kind = "accumulated" if moves else state.kind
        summed = self._storage.open(group, kind, load=narrow is None)
        for slot in state.landed | dict.fromkeys(fresh):
            target = slot.flat_fp32(summed) if kind == "accumulated" else slot.flat(summed)
            addend = fresh.get(slot)
            if slot not in state.landed:
                self._sums.add(target, addend, None)
            elif narrow is not None or addend is not None:
                self._sums.add(target, None if narrow is None else slot.flat(narrow), addend)
        self._sums.run()
        self._storage.close_range(group, kind, summed, store=True)
        if narrow is not None:
            self._storage.close_range(group, "gradient", narrow, store=False)
        state.kind = kind

    def measure(self, group: Group) -> None:
        """Take the norms that are missing (worker thread)."""
        state = self._states[group].gradient
        missing = [slot for slot in state.landed if slot not in state.norms]
        if missing:
            flat = self._storage.open(group, state.kind)
            for slot in missing:
                values = slot.flat_fp32(flat) if state.kind == "accumulated" else slot.flat(flat)
                state.norms[slot] = self._norm(values)
            self._storage.close_range(group, state.kind, flat, store=False)

    def read(self, slot: Slot) -> torch.Tensor:
        """A copy of ``slot``'s gradient in its compute type (worker thread)."""
        state = self._states[slot.group].gradient
        flat = self._storage.open(slot.group, state.kind)
        values = slot.view_fp32(flat) if state.kind == "accumulated" else slot.view(flat)
        values = values.to(slot.dtype, copy=True)
        self._storage.close_range(slot.group, state.kind, flat, store=False)
        return values

    def _norm(self, values: torch.Tensor) -> torch.Tensor:
        """The 2-norm of a flat gradient in host memory: as torch's clipping takes it, or, where level 0 is a GPU, as
        that takes it.
        """
        if self._stack.level0_device.type == "cuda":
            return gradient_norm(values)
        return torch.linalg.vector_norm(self._widened(values), dtype=torch.float32)

    def _widened(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` in fp32, in memory that is made once; torch reduces narrow types twenty times slower. As it is
        where too long.
        """
        if values.dtype == torch.float32 or values.numel() > LONGEST_WIDENED:
            return values
        if self._wide.numel() < values.numel():
            self._wide = torch.empty(values.numel())
        return self._wide[: values.numel()].copy_(values)

    def forget_norms(self, group: Group) -> None:
        """The gradients in host memory were changed (worker thread)."""
        self._states[group].gradient.norms.clear()

    def scale(self, group: Group, slots: list[Slot], factor: torch.Tensor | None) -> None:
        """Multiply gradients in host memory by the fp32 scalar ``factor``, or make them zero if it is None (worker
        thread).
        """
        if factor is not None:
            self._widen(group)  # zero is zero in any type
        state = self._states[group].gradient
        flat = self._storage.open(group, state.kind)
        for slot in slots:
            values = slot.flat_fp32(flat) if state.kind == "accumulated" else slot.flat(flat)
            values.zero_() if factor is None else values.mul_(factor)
            state.norms.pop(slot, None)
        self._storage.close_range(group, state.kind, flat, store=True)

    def kind_of(self, group: Group) -> str:
        """Which range holds the gradient: ``gradient`` (compute dtype) or ``accumulated`` (fp32). Worker thread."""
        return self._states[group].gradient.kind

    def forget(self, group: Group, slots: list[Slot]) -> None:
        state = self._states[group].gradient
        for slot in slots:
            state.landed.pop(slot, None)
            state.norms.pop(slot, None)
        if not state.landed:
            state.kind = "gradient"


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of a flat bf16, fp16 or fp32 ``gradient``, an fp32 scalar where it is; no synchronisation."""
    sums = torch.empty(-(-gradient.numel() // BLOCK), dtype=torch.float32, device=gradient.device)
    square_sums(gradient, sums)
    return norm_of([sums])


def norm_of_norms(norms: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The 2-norm of scalar ``norms`` in their order, summed on ``device``: CPU and GPU add in different orders."""
    return torch.linalg.vector_norm(
        torch.stack([norm.to(device, non_blocking=device.type == "cuda") for norm in norms])
    )
