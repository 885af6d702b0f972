"""Parameters into their ranges, and buffers to the device that computes."""

from __future__ import annotations

import torch
from torch import nn

from vblackwell.offload.groups import Slot
from vblackwell.offload.update import round_from_fp32


@torch.no_grad()
def copy_in(slot: Slot, source: torch.Tensor, weight: torch.Tensor, master: torch.Tensor | None) -> None:
    """Write ``source`` (the parameter's shape, any float type) into the group's flat ``weight`` and, if given, ``master`` ranges."""
    if master is not None and slot.dtype.is_floating_point:
        slot.view_fp32(master).copy_(source)
    if source.dtype == slot.dtype:
        slot.view(weight).copy_(source)
        return
    wide = torch.empty_strided(slot.shape, slot.stride, dtype=torch.float32, device=weight.device)
    wide.copy_(source)
    round_from_fp32(wide.as_strided((slot.num_elements,), (1,)), slot.flat(weight))


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put every buffer on ``device``; one that several modules share stays shared."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[key] = moved[buffer]
