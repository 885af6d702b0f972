"""The first step does not wait for memory that is not needed yet, and zeroes none that is zero."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.offload.conftest import ROOMY_BYTES, MakeStack
from tests.offload.models import CASES, build, equal
from tests.waiting import wait_until
from vblackwell.machine.facts import MemoryFacts
from vblackwell.memory import host as host_module
from vblackwell.memory.cache import stack as stack_module
from vblackwell.memory.cache.stack import VGPUStack, create_vgpu_stack
from vblackwell.memory.host import HostLevel
from vblackwell.memory.level import DeviceLevel
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.movement.lane import Lane
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.storage.storage import Storage

DECODER = CASES[1]
LEVEL0 = 1 << 20


class Gate:
    """Every range has a pinned slab to itself, whose pages come in the background while ``open`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        monkeypatch.setattr(host_module, "BACKGROUND_BYTES", 0)
        monkeypatch.setattr(host_module, "FIRST_SLAB_BYTES", 4096)
        monkeypatch.setattr(host_module, "_register", lambda mapping, address, size: self.open.wait())
        self.level = HostLevel(ROOMY_BYTES, pin=True)
        self.stack = VGPUStack([DeviceLevel("cpu", LEVEL0), self.level])

    def all_have_come(self) -> bool:
        return self.level.resident_bytes == sum(slab.size for slab in self.level._slabs)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open.set()
    found.stack.close()


@pytest.mark.parametrize("update", ["host", "device"])
def test_no_update_waits_for_the_pages_of_shadows(gate: Gate, update: str):
    plain, model = build(DECODER), build(DECODER)
    enable_vgpu_stack_optimization(model, gate.stack, placement="streamed", update=update)
    ours = VGPUAdamW(model.parameters(), max_grad_norm=1e9, update_in_backward=True)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    engine = offload_of(model)
    wait_until(gate.all_have_come)
    gate.open.clear()
    early = list[int]()
    for step in range(3):
        for module, optimizer in ((plain, theirs), (model, ours)):
            DECODER.loss(module, step).backward()
            if module is model:
                early.append(sum(state.early is not None for state in engine.states.values()))
            optimizer.step()
            optimizer.zero_grad()
        engine.finish()  # not even in the background
        if step == 0:
            assert not gate.all_have_come()
            gate.open.set()
            wait_until(gate.all_have_come)
    assert early == [0, len(engine.groups), len(engine.groups)]
    assert equal(model, plain)


def test_moments_in_memory_that_nobody_has_used_are_not_zeroed(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch):
    zeroed, zero = list[str](), Storage.zero
    monkeypatch.setattr(Storage, "zero", lambda self, group, kind: (zeroed.append(kind), zero(self, group, kind)))
    stack, models = make_stack(LEVEL0), [build(DECODER), build(DECODER)]
    counts = list[int]()
    for model in models:  # the second gets what the first has written to
        enable_vgpu_stack_optimization(model, stack, placement="streamed")
        optimizer = VGPUAdamW(model.parameters())
        counts.append(len(zeroed))
        states = optimizer.state_dict()["state"]
        assert not any(state[kind].any() for state in states.values() for kind in ("exp_avg", "exp_avg_sq"))
        for step in range(2):
            DECODER.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        release(model)
    assert counts[0] == 0 and counts[1] > 0
    assert equal(*models)


@pytest.mark.parametrize("chosen", [False, True])
def test_moments_get_the_ram_that_the_model_gives_up(chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights, gradients and moments need four times the model's bytes of RAM, and 7/8 of 4.8 is there when it is gone,
    of 3.8 while it is there. A size that was chosen stays what it is."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    size, plain = 1 << 20, [StorageWeakRef(param.untyped_storage()) for param in model.parameters()]
    stacks = list[VGPUStack]()

    def facts() -> MemoryFacts:
        own = sum(cast("HostLevel", stack.levels[1]).resident_bytes for stack in stacks)
        in_use = own + sum(not each.expired() for each in plain) * size // 4
        return MemoryFacts(1 << 30, int(4.8 * size) + LEVEL0 - in_use, "machine")

    monkeypatch.setattr(stack_module, "memory_facts", facts)
    fast, host = LEVEL0, int(3.8 * size * 7 / 8) if chosen else None
    with create_vgpu_stack(fast, host, 16 * size, str(tmp_path), device="cpu") as stack:
        stacks.append(stack)
        before = stack.levels[1].capacity_bytes
        enable_vgpu_stack_optimization(model, stack, placement="streamed", groups=("0", "1", "2", "3"))
        optimizer = VGPUAdamW(model.parameters())
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        on_disk = sum(row[2] for row in offload_of(model).summary()["bytes_by_level"].values())
        assert (on_disk > 0, stack.levels[1].capacity_bytes > before) == (chosen, not chosen)
        del optimizer
        release(model)
        assert all(torch.isfinite(param).all() for param in model.parameters())


def test_the_ring_of_updates_is_written_before_it_is_read(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch):
    """What it holds at first is NaN in any type, in the spaces between parameters, too."""
    begin = Lane.__init__

    def begin_with_nan(self: Lane, stack: VGPUStack, storage: Storage, memory: torch.Tensor, *rest: Any) -> None:
        begin(self, stack, storage, memory.fill_(0xFF), *rest)

    monkeypatch.setattr(Lane, "__init__", begin_with_nan)
    plain, model = build(DECODER), build(DECODER)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed", update="device")
    ours, theirs = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(3):
        for module, optimizer in ((plain, theirs), (model, ours)):
            DECODER.loss(module, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(model, plain)
