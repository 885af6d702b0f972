"""Stacks for the offload tests: small enough that every model must stream, with a real disk file at the bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from vblackwell.memory.cache.stack import VGPUStack

MakeStack = Callable[..., VGPUStack]
# Half as much again as any test here needs, so that no disk is touched unless it asks for less. Not more: a stack's
# host level faults its first slab in whole, up to 64 MiB, which takes 0.1 s of each of hundreds of tests.
ROOMY_BYTES = 16 << 20


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

    def make(fast_bytes: int, host_bytes: int = ROOMY_BYTES, disk_bytes: int = 64 << 20) -> VGPUStack:
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
