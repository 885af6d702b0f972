"""`VGPUStackLinear`: one linear layer whose weight lives in a stack."""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import nn

from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.api import enable_vgpu_stack_optimization

_counters: weakref.WeakKeyDictionary[VGPUStack, itertools.count[int]] = weakref.WeakKeyDictionary()


class VGPUStackLinear(nn.Linear):
    """``y = x W^T + b`` with ``W`` (out_features, in_features) and ``b`` on the stack's lower levels, on level 0 while in use.

    Trains with `VGPUAdamW`. Input and output are on level 0's device.

    Args:
        vgpu_stack: where the parameters live.
        name: the layer's name in the stack; 'linear-0', 'linear-1', ... by default.
    """

    def __init__(
        self, in_features: int, out_features: int, *, vgpu_stack: VGPUStack, bias: bool = True,
        dtype: torch.dtype | None = None, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias=bias, dtype=dtype)
        if name is None:
            name = f"linear-{next(_counters.setdefault(vgpu_stack, itertools.count()))}"
        enable_vgpu_stack_optimization(self, vgpu_stack, name, placement="streamed")
