"""Boundary activations in host memory, on a GPU: the bits, the memory, and buffers that are ordered by streams.

Run by `make test-gpu`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.delay import set_transfer_delay
from tests.offload.movement.test_activations import moved
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.decoder.checkpoint import checkpoint
from vblackwell.offload.layout.placement import NEWEST
from vblackwell.offload.movement.activations import ActivationStore

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gpu_stack() -> VGPUStack:
    return VGPUStack({"levels": [{"capacity_mb": 1000, "device": "cuda:0"}, {"capacity_mb": 1000, "device": "cpu"}]})


class WideChain(nn.Module):
    """Boundaries of 8 MiB in bf16."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 1024))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for layer in self.layers:
            x = x + checkpoint(layer, x)
        return x.float().square().mean()


def train(model: nn.Module, store: ActivationStore | None, steps: int) -> tuple[list[torch.Tensor], int]:
    """Losses, gradients and weights of some steps,
    and the largest peak of allocated memory over that at a step's start.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    seen: list[torch.Tensor] = []
    peak = 0
    for step in range(steps):
        x = torch.randn(
            4096, 1024, generator=torch.Generator("cuda").manual_seed(step), device="cuda", dtype=torch.bfloat16
        )
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        with contextlib.nullcontext() if store is None else store.forward_of(model):
            loss = model(x)
        loss.backward()
        if step:  # the first one makes the gradients, which stay
            peak = max(peak, torch.cuda.max_memory_allocated() - start)
        seen += [loss.detach(), *(param.grad.clone() for param in model.parameters())][: 1 if step % 5 else None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [*seen, *model.parameters()], peak


def differing(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[int]:
    """Which are not the same, bit for bit."""
    return [number for number, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.equal(x, y)]


def test_bits_and_memory():
    depth, boundary = 24, 8 << 20
    start = WideChain(depth).cuda().bfloat16()
    plain, model = copy.deepcopy(start), copy.deepcopy(start)
    expected, plain_peak = train(plain, None, 6)
    assert all(bool(seen.isfinite().all()) for seen in expected)
    again, _ = train(copy.deepcopy(start), None, 6)
    assert not differing(again, expected), "the plain run itself is not reproducible"
    chance = random.Random(0)
    with gpu_stack() as stack, contextlib.closing(ActivationStore(stack)) as store:
        seen, peak = train(model, store, 6)
        assert not differing(seen, expected)
        # What is left of 24 boundaries: the window, two that are being written back, and one that is in use.
        assert plain_peak - peak >= (depth - NEWEST - 4) * boundary
        assert moved(stack)[1] == 6 * (depth - NEWEST) * boundary

        set_transfer_delay(lambda kind: torch.cuda._sleep(chance.randrange(4_000_000)))
        try:
            first, _ = train(copy.deepcopy(start), None, 30)
            second, _ = train(copy.deepcopy(start), store, 30)
        finally:
            set_transfer_delay(None)
        assert not differing(first, second)
        assert stack.get_stats()["stall_seconds"] > 0
    torch.cuda.synchronize()


def test_host_far_ahead_reuses_buffers():
    """Nothing waits for the GPU between steps: buffers must be ordered by streams, not by what the host has seen."""
    model = WideChain(12).cuda().bfloat16()
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    with gpu_stack() as stack, contextlib.closing(ActivationStore(stack)) as store:
        used = []
        for _ in range(6):
            torch.cuda._sleep(200_000_000)
            with store.forward_of(model):
                loss = model(x)
            loss.backward()
            used.append(stack.levels[1].used_bytes)
        assert used == used[:1] * 6
        torch.cuda.synchronize()
