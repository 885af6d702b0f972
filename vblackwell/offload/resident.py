"""Everything fits level 0: the model stays plain, its bytes lie in level 0's extents, and nothing else happens.

Parameters become views of one reserved range (so that the stack's books and `peak_bytes` are true), AdamW's moments of
another. With a compute type narrower than fp32 a third holds the masters, and `VGPUAdamW` updates those.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vblackwell.memory.stack import VGPUStack
from vblackwell.offload.engine import needs_master
from vblackwell.offload.groups import Group, Slot, find_groups
from vblackwell.offload.home import Homes
from vblackwell.offload.moving import copy_in, move_buffers
from vblackwell.offload.parameter import attributes


def _rounding_to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda gradient: gradient.to(dtype).to(torch.float32)


class Resident:
    """A model that is wholly on level 0. Made by `enable_vgpu_stack_optimization`."""

    placement = "resident"
    finalizer: weakref.finalize[Any, Any]

    def __init__(self, model: nn.Module, stack: VGPUStack, name: str, compute_dtype: torch.dtype | None) -> None:
        self.stack = stack
        self.name = name
        self.groups, _ = find_groups(model, compute_dtype)
        self.homes = Homes(stack, name, [0], self.groups)
        trainable = [group for group in self.groups if group.trainable()]
        wide = [(group, "master") for group in trainable if needs_master(group)]
        self.homes.reserve([(group, "weight") for group in self.groups] + wide)
        self._hooks: list[Any] = []
        for group in self.groups:
            self._move_in(group)
        move_buffers(model, stack.level0_device)

    def _move_in(self, group: Group) -> None:
        weight = self._view(group, "weight")
        master = self._view(group, "master") if (group, "master") in self.homes else None
        for slot in group.slots:
            copy_in(slot, slot.param.detach(), weight, master)
            if master is not None and slot.dtype.is_floating_point:
                attributes(slot.param)["_vb_master"] = slot.view_fp32(master)
            slot.param.data = slot.view(weight)
            if master is not None and slot.dtype.is_floating_point:
                # Micro-batches add up in fp32, each rounded to the compute type first: the bits of gradients that leave level 0.
                slot.param.grad_dtype = torch.float32
                self._hooks.append(slot.param.register_hook(_rounding_to(slot.dtype)))
            attributes(slot.param)["_vb_resident"] = self

    def _view(self, group: Group, kind: str) -> torch.Tensor:
        view = self.homes.range(group, kind).view()
        assert view is not None, "level 0 is addressable"
        return view

    def adopt_optimizer(self, params: list[torch.Tensor]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Fresh AdamW states for ``params`` inside level 0, in the form that `torch.optim.AdamW` keeps them."""
        wanted = set(params)
        slots = [slot for group in self.groups for slot in group.slots if slot.param in wanted]
        groups = list(dict.fromkeys(slot.group for slot in slots))
        self.homes.reserve([(group, kind) for kind in ("exp_avg", "exp_avg_sq") for group in groups])
        return {slot.param: self._state(slot) for slot in slots}

    def _state(self, slot: Slot) -> dict[str, torch.Tensor]:
        moments = {kind: slot.view_fp32(self._view(slot.group, kind)).zero_() for kind in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32, device=self.stack.level0_device), **moments}

    def finish(self) -> None:
        """Nothing runs in the background here."""

    def summary(self) -> dict[str, Any]:
        """As `Offload.summary`."""
        return {
            "placement": self.placement,
            "groups": len(self.groups),
            "largest_group_bytes": max(group.num_bytes for group in self.groups),
            "sliced": [],
            "weights_budget_bytes": sum(group.num_bytes for group in self.groups),
            "bytes_by_level": self.homes.bytes_by_level(),
            "undo_bytes": 0,
        }

    @torch.no_grad()
    def release(self, device: torch.device) -> None:
        """Give every parameter memory of its own on ``device``: the fp32 master where there is one."""
        for hook in self._hooks:
            hook.remove()
        for group in self.groups:
            for slot in group.slots:
                param = slot.param
                master = attributes(param).pop("_vb_master", None)
                attributes(param).pop("_vb_resident", None)
                gradient, param.grad = param.grad, None
                param.data = (param.data if master is None else master).to(device, copy=True)
                param.grad_dtype = param.dtype
                param.grad = None if gradient is None else gradient.to(device, param.dtype)

    def close(self) -> None:
        """Give everything back to the stack. The optimizer's states, if any, stay valid while it holds them."""
        self.finalizer()


def resident_of(param: torch.Tensor) -> Resident | None:
    """The engine of a resident parameter; None for any other."""
    return param.__dict__.get("_vb_resident")


def master_of(param: torch.Tensor) -> torch.Tensor | None:
    """The fp32 master of a resident parameter with a narrower compute type."""
    return param.__dict__.get("_vb_master")
