"""A run's folder: who may use it, and settings that are what was written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from dataclasses import asdict

import pytest

from vblackwell.errors import ConfigurationError, CorruptData, DiskError
from vblackwell.folders.commit import CommitFolder
from vblackwell.train.config import TrainConfig, resolve
from vblackwell.train.runfolder import SETTINGS, RunFolder, default_out, read_stored_config


@pytest.mark.parametrize("resume", [False, True])
def test_of_two_runs_on_one_new_folder_one_is_refused(resume, tmp_path):
    """Both find no folder. The second begins when the first has finished: it must not write over what is there."""
    first, second = (RunFolder(tmp_path / "run", resume) for _ in range(2))
    first.create()
    with pytest.raises(ConfigurationError, match="in use by process"):
        second.create()
    first.write_settings({"seed": 1})
    first.release()
    with pytest.raises(ConfigurationError, match="has come to hold a run"):
        second.create()
    second.release()
    assert read_stored_config(tmp_path / "run") == {"seed": 1}
    second = RunFolder(tmp_path / "run", resume=True)
    second.lock()
    second.release()


def test_every_flipped_digit_of_the_settings_is_found(tmp_path):
    folder = RunFolder(tmp_path, resume=False)
    stored = {
        "learning_rate": 0.01,
        "seed": 7,
        "weight_decay": 0.1,
        "beta2": 0.95,
        "max_steps": 200,
        "data": "naïve.txt",
    }
    folder.write_settings(stored)
    folder.release()
    path = tmp_path / SETTINGS
    text = path.read_text(encoding="utf-8")
    assert read_stored_config(tmp_path) == stored
    for digit in re.finditer(r"(?<!xxh)\d", text):
        changed = "1" if digit[0] == "0" else "0"
        path.write_text(text[: digit.start()] + changed + text[digit.end() :], encoding="utf-8")
        with pytest.raises(CorruptData, match=r"settings\.json is "):
            read_stored_config(tmp_path)
    path.write_text(json.dumps(stored), encoding="utf-8")  # of an older version: without a hash
    assert read_stored_config(tmp_path) == stored


@pytest.mark.parametrize("name", ["final", "adapter", "checkpoints", "tensorboard"])
def test_a_file_in_the_place_of_a_folder_is_named(name, tmp_path):
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigurationError, match=f"{name} is not a folder, .*move it away"):
        RunFolder(tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["metrics.jsonl", "settings.json", "report.json", "trace.json", ".lock"])
def test_a_folder_in_the_place_of_a_file_is_named(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigurationError, match=f"{name} is not a file, .*move it away"):
        RunFolder(tmp_path, resume=True)


@pytest.mark.parametrize("out", ["run", "run/deep/er"])
def test_where_nothing_may_be_written_is_refused_at_once(out, monkeypatch, tmp_path):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "run" or not mode & os.W_OK)
    with pytest.raises(DiskError, match=f"{tmp_path / out}: {tmp_path / 'run'} may not be written to: .*another --out"):
        RunFolder(tmp_path / out, resume=False)


def test_who_asks_whether_a_folder_is_in_use_locks_and_writes_nothing(tmp_path):
    run = tmp_path / "run"
    RunFolder(run, resume=False).refuse_in_use()
    assert not run.exists()
    run.mkdir()
    RunFolder(run, resume=False).refuse_in_use()
    assert not list(run.iterdir())
    first, second = (RunFolder(run, resume=False) for _ in range(2))
    first.lock()
    before = (run / ".lock").stat()
    with pytest.raises(ConfigurationError, match=f"in use by process {os.getpid()}: wait for it"):
        second.refuse_in_use()
    first.release()
    second.refuse_in_use()
    assert (run / ".lock").stat().st_mtime_ns == before.st_mtime_ns
    first.lock()  # which the one that asked does not hold
    first.release()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("out", ["link", "link/run"])
def test_a_link_to_nothing_is_no_place_for_a_run(out, resume, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigurationError, match=r"link is a link to what is not there: choose another --out"):
        RunFolder(tmp_path / out, resume)


def test_a_default_folder_is_no_link_to_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/tiny").symlink_to("gone")
    assert str(default_out("tiny")) == "runs/tiny-2"


@pytest.mark.parametrize("content", ["[1, 2]", "1", "null", "{", "\udcff"])
def test_settings_that_are_no_settings_are_refused(content, tmp_path):
    (tmp_path / SETTINGS).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CorruptData, match="remove it to resume with the flags alone"):
        read_stored_config(tmp_path)


@pytest.mark.parametrize(("call", "number"), [("flock", "ENOLCK"), ("flock", "EIO"), ("pwrite", "ENOSPC")])
def test_a_lock_that_fails_is_one_line(call, number, monkeypatch, tmp_path):
    """And nothing is held: the next start may succeed."""

    def fail(*given):
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    with monkeypatch.context() as broken:
        broken.setattr(fcntl if call == "flock" else os, call, fail)
        with pytest.raises(DiskError, match=rf"\.lock: {os.strerror(getattr(errno, number))}; .*another --out"):
            RunFolder(tmp_path, resume=False).lock()
    folder = RunFolder(tmp_path, resume=False)
    folder.lock()
    folder.release()


def test_a_work_folder_whose_lock_fails_is_one_line(monkeypatch, tmp_path):
    def fail(*given):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with (
        pytest.raises(DiskError, match="locking .*step-1.tmp failed: No locks available"),
        CommitFolder(tmp_path, "step-1"),
    ):
        pass


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """./runs/tiny, started last, ./runs/small and ./runs/notes, which holds no run."""
    monkeypatch.chdir(tmp_path)
    for seconds, config in ((100, TrainConfig(preset="small")), (200, TrainConfig(preset="tiny", seed=7))):
        folder = RunFolder(tmp_path / "runs" / config.preset, resume=False)
        folder.create()
        folder.write_settings(asdict(config))
        folder.release()
        os.utime(folder.path / SETTINGS, (seconds, seconds))
    (tmp_path / "runs/notes").mkdir()
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"out": "runs/tinny"}, r"--out runs/tinny holds no run to go on with; did you mean 'runs/tiny'\?"),
        ({"out": "tiny"}, r"--out tiny holds no run to go on with; did you mean 'runs/tiny'\?"),
        ({"out": "runs/TINY"}, r"--out runs/TINY holds no run to go on with; did you mean 'runs/tiny'\?"),
        ({"out": "runs/tiny/checkpoints/step-000010"}, r"holds no run to go on with; did you mean 'runs/tiny'\?"),
        ({"out": "runs/notes"}, r"holds no run to go on with; there is runs/tiny, runs/small"),
        ({"config": "xl"}, r"no run in ./runs was started with --config xl: drop --resume"),
        ({"model": "llama"}, r"no run in ./runs was started with --model llama: drop --resume"),
    ],
)
def test_a_run_that_is_not_there_is_not_resumed(flags, said, runs):
    """It would be begun anew, with the default preset where the settings were those of the folder."""
    before = sorted(runs.rglob("*"))
    with pytest.raises(ConfigurationError, match=said):
        resolve(flags | {"resume": True})
    assert sorted(runs.rglob("*")) == before


def test_resume_alone_goes_on_with_the_newest_run(runs):
    found = resolve({"resume": True})
    assert (found.out, found.preset, found.seed) == ("runs/tiny", "tiny", 7)
    assert resolve({"resume": True, "config": "small"}).out == "runs/small"
    os.utime(runs / "small" / SETTINGS, (300, 300))
    assert resolve({"resume": True}).out == "runs/small"
    (runs / "small" / SETTINGS).write_text("{")  # the newest is damaged: no older one goes on in its place
    with pytest.raises(CorruptData, match="settings.json is damaged"):
        resolve({"resume": True, "config": "tiny"})
