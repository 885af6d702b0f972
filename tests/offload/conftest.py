"""Stacks for the offload tests: small enough that every model must stream, with a real disk file at the bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from vblackwell.memory.stack import VGPUStack

MakeStack = Callable[..., VGPUStack]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for two threads to help; where the count matters a test sets it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[MakeStack]:
    """``make_stack(fast_bytes, host_bytes)``: arena over host over disk; closed after the test."""
    stacks = []

    def make(fast_bytes: int, host_bytes: int = 64 << 20, disk_bytes: int = 64 << 20) -> VGPUStack:
        mib = 1 << 20
        stack = VGPUStack(
            {
                "levels": [
                    {"capacity_mb": fast_bytes / mib, "device": "cpu"},
                    {"capacity_mb": host_bytes / mib, "device": "cpu"},
                    {"capacity_mb": disk_bytes / mib, "device": "ssd", "path": str(tmp_path)},
                ]
            }
        )
        stacks.append(stack)
        return stack

    yield make
    for stack in stacks:
        stack.close()
