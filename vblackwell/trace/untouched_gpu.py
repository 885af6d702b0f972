"""Keeps torch from asking a real GPU while a trace runs: what it would ask has one answer on every machine.

A trace believes in a GPU, and some of torch's own code then goes to the driver: optimizers look whether a CUDA graph is being captured,
checkpointing keeps the states of the devices' random numbers, autocast asks whether bf16 is supported. Where a GPU is there that starts
CUDA, which takes half a second and memory of the GPU, and raises in a fork of a process that has used it ("Cannot re-initialize CUDA").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import checkpoint

# A method of Optimizer under both names: torch 2.11 has the first, 2.13 both.
_CAPTURE_CHECKS = ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check")


def _answers(capability: tuple[int, int]) -> dict[str, Any]:
    """By the name of a function of `torch.cuda`."""
    return {
        "get_device_capability": lambda device=None: capability,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
    }


@contextlib.contextmanager
def untouched_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, what torch asks of a GPU by itself is answered for ``capability``, and no GPU is asked."""
    optimizer = torch.optim.Optimizer
    with contextlib.ExitStack() as stack:
        for name, answer in _answers(capability).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for name in _CAPTURE_CHECKS:
            if hasattr(optimizer, name):
                stack.enter_context(mock.patch.object(optimizer, name, lambda self: None))
        # Tensors without bytes draw no random numbers, so there is no state to come back to.
        stack.enter_context(mock.patch.object(checkpoint, "get_device_states", lambda *args: ([], [])))
        yield
