"""Buffers to the device that computes."""

from __future__ import annotations

import torch
from torch import nn


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put every buffer on ``device``; one that several modules share stays shared."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[key] = moved[buffer]
