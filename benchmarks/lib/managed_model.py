"""A model that trains as ``vb train`` trains it, resident on level 0: with ``--mixed-precision`` bf16 weights and fp32 masters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.api import enable_vgpu_stack_optimization
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.units import MiB


def managed(
    model: nn.Module, device: str, learning_rate: float, compute_dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, Any, VGPUStack]:
    """(model, optimizer, stack); matrices decay by 0.1, gradients are clipped to norm 1."""
    need = (
        20 * sum(parameter.numel() for parameter in model.parameters()) / MiB + 64
    )  # weights, gradients, moments, masters
    levels = [
        {"device": "cuda:0" if device == "cuda" else "arena", "capacity_mb": need}, {"device": "cpu", "capacity_mb": 64},
    ]  # fmt: skip
    stack = VGPUStack({"levels": levels})
    enable_vgpu_stack_optimization(model, stack, placement="resident", compute_dtype=compute_dtype)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() == 1]}]
    return model, VGPUAdamW(groups, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0), stack
