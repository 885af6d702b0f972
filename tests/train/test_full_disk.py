"""Disks without room: a run asks for the bytes that it will take, and for no more."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vblackwell.errors import CorruptData, DiskError, InsufficientMemory
from vblackwell.folders.commit import CommitFolder
from vblackwell.train import checkpoint, metrics, prepare
from vblackwell.train.checkpoint import METADATA_BYTES, bytes_to_come, refuse_full_disk
from vblackwell.train.config import TrainConfig
from vblackwell.train.prepare import build_stack
from vblackwell.train.runfolder import RunFolder
from vblackwell.train.trainer import TrainerState
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
    RunFolder(tmp_path, resume=True).lock()
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
    config, device, found = TrainConfig(**options), torch.device("cpu"), prepare.disk_facts(tmp_path)
    monkeypatch.setattr(prepare, "disk_facts", lambda path: SimpleNamespace(path=found.path, free_bytes=8 * MiB))
    build_stack(config, device, state_bytes=8 * MiB).close()
    with pytest.raises(InsufficientMemory, match="8.00 MiB of .* are free .* up to 8.01 MiB are"):
        build_stack(config, device, state_bytes=8 * MiB + 8192)
    with pytest.raises(InsufficientMemory, match="up to 1.00 GiB are needed"):
        build_stack(config, device)


# -- a disk that fills up while a run writes ---------------------------------------------------------------------------


@pytest.fixture
def fail_after(monkeypatch):
    """Lets files of the log take so many bytes more, as a full disk does:
    the last write is short, the next is refused.
    """

    def limit(path, room):
        left = {path.name: room}
        whole = metrics.write_whole

        def write(raw, data):
            if path.name not in (Path(raw.name).name, Path(raw.name).parent.name):
                return whole(raw, data)
            fits = min(len(data), left[path.name])
            whole(raw, data[:fits])
            left[path.name] -= fits
            if fits < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(metrics, "write_whole", write)

    return limit


@pytest.mark.parametrize(("name", "room"), [("metrics.jsonl", 50), ("tensorboard", 50)])
def test_a_disk_without_room_for_the_numbers_is_named(name, room, fail_after, monkeypatch, tmp_path):
    log = metrics.MetricsLog(tmp_path, 0, tensorboard=True)
    fail_after(tmp_path / name, room)
    line = metrics.StepRecord(1, 0.5, 0.1, 1.0, 10.0, {"arena": 5}, {"arena>cpu": 7}, 0.0)
    with pytest.raises(DiskError, match=rf"{name}.* failed: No space left on device; .* free on its disk: make room"):
        log.write(line)
    log.close()
    monkeypatch.undo()
    metrics.MetricsLog(tmp_path, 0, tensorboard=True).close()
    assert metrics.read_metrics(tmp_path / "metrics.jsonl") == []


def test_tensorboard_reads_the_events_and_forgets_repeated_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for kept, losses in ((0, [1.0, 2.0, 3.0]), (1, [4.0])):
        log = metrics.MetricsLog(tmp_path, kept, tensorboard=True)
        for step, loss in enumerate(losses, kept + 1):
            log.write(metrics.StepRecord(step, loss, 0.1, None, 10.0, {"arena": 5}, {"arena>cpu": 7}, 0.0))
        log.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 1.0), (2, 4.0)]
    assert found.Scalars("level_bytes/arena")[0].value == 5 and "grad_norm" not in found.Tags()["scalars"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe{}\n", "line 1 is not that of a step"),
        (b'{"step": 1}\nstep 2\n', "line 2 is not that of a step"),
        (b'{"step": 1}\n[2]\n', "line 2 is not that of a step"),
        (b'{"step": "1"}\n', "line 1 is not that of a step"),
        (b'{"stop": 1}\n', "line 1 is not that of a step"),
        (b"[" * 100_000 + b"\n", "line 1 is not that of a step"),
        (None, "Is a directory"),
    ],
)
def test_metrics_that_no_run_wrote_are_refused(content, said, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(CorruptData, match=f"{said}.*move the file away"):
        metrics.MetricsLog(tmp_path, 5, tensorboard=False)
    if content is not None:
        assert path.read_bytes() == content


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(monkeypatch, tmp_path):
    """The new one is committed by then."""
    monkeypatch.setattr(checkpoint, "_write_checkpoint", lambda folder, prepared: folder.add("weights", b"1"))
    monkeypatch.setattr(checkpoint, "_trainer_json", lambda prepared, state: {})
    said = []
    run = SimpleNamespace(model=nn.Linear(2, 2), config=TrainConfig(keep_checkpoints=1))
    checkpoint.write_checkpoint(tmp_path, run, said.append, TrainerState(step=1))

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", fail)
        checkpoint.write_checkpoint(tmp_path, run, said.append, TrainerState(step=2))
    assert len(said) == 1 and "could not be removed" in said[0] and "Input/output error" in said[0]
    checkpoint.write_checkpoint(tmp_path, run, said.append, TrainerState(step=3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003"] and len(said) == 1
