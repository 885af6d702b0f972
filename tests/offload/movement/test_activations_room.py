"""Checkpoints' inputs where RAM is short: what spare shadows give back, and what stays on level 0."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vblackwell.errors import InsufficientMemory
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.transfer import FutureTransfer
from vblackwell.nn.decoder.checkpoint import checkpoint
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.movement import activations
from vblackwell.offload.optimizer import VGPUAdamW

WIDTH, LAYERS = 64, 8


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        parts = ([nn.Linear(*shape) for shape in shapes] for _ in range(LAYERS))
        self.layers = nn.ModuleList(nn.Sequential(first, nn.GELU(), second) for first, second in parts)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for layer in self.layers:
            x = x + checkpoint(layer, x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def all_may_leave(monkeypatch) -> Iterator[None]:
    monkeypatch.setitem(activations.ActivationStore.__init__.__kwdefaults__, "smallest_bytes", 1)
    yield


def train(model: nn.Module, stack: VGPUStack, batches: tuple[int, ...], where: str, may_stay: bool = False) -> Tensor:
    """All weights after a step on each of ``batches``."""
    torch.manual_seed(1)
    enable_vgpu_stack_optimization(model, stack, placement="streamed", update="device", activations=where)
    engine = offload_of(model)
    if engine.activations is not None:
        engine.activations._may_stay = may_stay  # as a GPU's default has it
    optimizer = VGPUAdamW(model.parameters(), update_in_backward=True, max_grad_norm=1e9)
    for rows in batches:
        model(torch.randn(rows, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def levels(ram_shares: float, disk: Path | None = None) -> VGPUStack:
    """RAM for so many times the weights of `Layers`."""
    weights = sum(param.numel() for param in Layers().parameters()) * 4 / 2**20
    below = [{"capacity_mb": ram_shares * weights, "device": "cpu"}]
    below += [] if disk is None else [{"capacity_mb": 40, "device": "ssd", "path": str(disk)}]
    return VGPUStack({"levels": [{"capacity_mb": 1.5, "device": "arena"}, *below]})


def test_what_finds_no_room_in_ram_stays_where_that_is_nobodys_wish(tmp_path):
    """States have spilled to a disk, so that RAM is full of them."""
    torch.manual_seed(0)
    model = Layers()
    batches = (256, 256)
    with levels(2.6, tmp_path) as stack:
        expected = train(copy.deepcopy(model), stack, batches, "level0")
    with levels(2.6, tmp_path) as stack, pytest.raises(InsufficientMemory, match="activation_bytes="):
        train(copy.deepcopy(model), stack, batches, "host")
    with levels(2.6, tmp_path) as stack:
        assert torch.equal(train(copy.deepcopy(model), stack, batches, "host", may_stay=True), expected)


def test_spare_shadows_make_room_for_a_larger_batch():
    torch.manual_seed(0)
    model = Layers()
    with levels(6.2) as stack:
        before = copy.deepcopy(model)
        train(before, stack, (8, 8, 8), "host")
        free = stack.levels[1].free_bytes
    batches = (8, 8, 8, 128)
    assert free < LAYERS * 128 * WIDTH * 4  # shadows have taken what the larger batch needs
    with levels(6.2) as stack:
        found = train(copy.deepcopy(model), stack, batches, "host")
    with levels(20) as stack:
        assert torch.equal(found, train(copy.deepcopy(model), stack, batches, "host"))


def test_copies_of_dead_graphs_are_let_go_in_any_order_and_stop_nobody():
    with levels(2) as stack:
        store = activations.ActivationStore(stack)
        held, ends = [torch.ones(8) for _ in range(3)], [Future() for _ in range(3)]
        alive = [weakref.ref(tensor) for tensor in held]
        store._in_flight += [FutureTransfer([end], keep=(tensor,)) for end, tensor in zip(ends, held, strict=True)]
        held.clear()
        ends[1].set_result(None)
        ends[2].set_exception(OSError("the disk said no"))
        store.pack(torch.ones(4))
        assert [ref() is not None for ref in alive] == [True, False, False]
        ends[0].set_result(None)
        store.pack(torch.ones(4))
        assert alive[0]() is None
