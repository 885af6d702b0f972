"""Disks without room: a run asks for the bytes that it will take, and for no more."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vblackwell.artifacts.commit import CommitFolder
from vblackwell.errors import DiskError, InsufficientMemory
from vblackwell.train import levels
from vblackwell.train.checkpoint import METADATA_BYTES, bytes_to_come, refuse_full_disk
from vblackwell.train.config import TrainConfig
from vblackwell.train.levels import build_stack
from vblackwell.units import MiB

PARAMETERS = 1000
WEIGHTS, CHECKPOINT = 4 * PARAMETERS, 12 * PARAMETERS


@pytest.fixture
def free(monkeypatch):
    """Says how many bytes are free on every disk."""

    def say(num_bytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes, total=1 << 40))

    return say


@pytest.mark.parametrize(
    ("held", "needed"), [(0, 3 * CHECKPOINT), (1, 2 * CHECKPOINT), (2, CHECKPOINT), (5, CHECKPOINT)]
)
def test_a_resumed_run_needs_no_room_for_what_it_has_written(held, needed, free, tmp_path):
    for step in range(1, held + 1):
        with CommitFolder(tmp_path / "checkpoints", f"step-{step:08d}") as folder:
            folder.add("weights", bytes(10))
    model, config = nn.Linear(PARAMETERS, 1, bias=False), TrainConfig(max_steps=100, checkpoint_every=1)
    free(needed + METADATA_BYTES)
    refuse_full_disk(tmp_path, model, config)
    free(needed + METADATA_BYTES - 1)
    with pytest.raises(DiskError, match=rf"{held} are there.* make room for 1 B, "):
        refuse_full_disk(tmp_path, model, config)


def test_a_run_at_its_last_step_needs_room_for_the_final_model_alone(free, tmp_path):
    with CommitFolder(tmp_path / "checkpoints", "step-00000100") as folder:
        folder.add("weights", bytes(10))
    leftover = tmp_path / "checkpoints/step-00000200.tmp"
    leftover.mkdir()
    free(WEIGHTS + METADATA_BYTES)
    refuse_full_disk(tmp_path, nn.Linear(PARAMETERS, 1, bias=False), TrainConfig(max_steps=100))
    assert not leftover.exists(), "what a killed run left there takes room, too"


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("final", [4, 12, 40])
def test_bytes_to_come_are_those_of_the_run(keep, final):
    for held in range(5):
        for due in range(6):
            there, most = held, 0
            for _ in range(due):
                most = max(most, there + 1)
                there = min(there + 1, keep)
            most = max(12 * most, 12 * there + final) - 12 * held
            assert bytes_to_come(held, due, keep, checkpoint=12, final=final) == most


def test_a_spill_disk_needs_room_for_the_state_and_not_for_the_cap(monkeypatch, tmp_path):
    options = {"fast_memory": "64KiB", "host_memory": "64KiB", "disk_memory": "1GiB", "disk_path": str(tmp_path)}
    config, device, found = TrainConfig(**options), torch.device("cpu"), levels.disk_facts(tmp_path)
    monkeypatch.setattr(levels, "disk_facts", lambda path: SimpleNamespace(path=found.path, free_bytes=8 * MiB))
    build_stack(config, device, state_bytes=8 * MiB).close()
    with pytest.raises(InsufficientMemory, match="8.00 MiB of .* are free .* up to 8.01 MiB are"):
        build_stack(config, device, state_bytes=8 * MiB + 8192)
    with pytest.raises(InsufficientMemory, match="up to 1.00 GiB are needed"):
        build_stack(config, device)
