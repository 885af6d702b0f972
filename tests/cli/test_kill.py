"""``kill -9`` at any moment costs nothing but the work since the last checkpoint: the resumed run ends with the same bits."""

from __future__ import annotations

import random
import shutil
import signal
import time

from tests.cli.conftest import LEVELS, RECORDED
from vblackwell.train.runfolder import REPORT, SETTINGS, RunFolder

KILLS_AT_RANDOM, KILLS_IN_CHECKPOINTS = 6, 4


def words_of(place, out, steps=12):
    return place.train_words(
        *LEVELS, "--max-steps", str(steps), "--checkpoint-every", "2", "--eval-every", "0", "--eval-sequences", "4",
        "--sample-tokens", "0", "--resume", "--out", out,
    )  # fmt: skip


def wait_until(child, condition):
    """Return as soon as ``condition()`` holds, or the child has ended."""
    while child.alive and not condition():
        time.sleep(0.003)  # a checkpoint is written for some 50 ms


def weights_of(run):
    return (run / "final/model.safetensors").read_bytes()


def work_folders(run):
    """Checkpoints that are being written, or were when their writer died."""
    return {path.stat().st_ino for path in run.glob("checkpoints/*.tmp")}


def test_kills_at_any_moment_end_with_the_same_weights(place):
    """Some of them; tests/faults kills at every call that writes."""
    steps = 8  # four checkpoints: one kept, one before it, two that were pruned
    child = place.start(*words_of(place, "whole", steps))
    began = time.monotonic()  # not before: the first child of all waits for what it is forked from
    assert child.wait() == 0
    duration = time.monotonic() - began
    expected = weights_of(place.folder / "whole")

    draw = random.Random(20)
    kills = in_checkpoint = chain = 0
    said = ""
    while kills < KILLS_AT_RANDOM + KILLS_IN_CHECKPOINTS or in_checkpoint < KILLS_IN_CHECKPOINTS:
        run = place.folder / f"chain{chain}"
        chain += 1
        for _ in range(3):
            child = place.start(*words_of(place, run.name, steps))
            moment = time.monotonic() + draw.random() * duration
            wait_until(child, lambda moment=moment: time.monotonic() > moment)
            if in_checkpoint < KILLS_IN_CHECKPOINTS:  # from the drawn moment on, the next checkpoint that is begun
                before = work_folders(run)
                wait_until(child, lambda run=run, before=before: work_folders(run) - before)
            child.signal(signal.SIGKILL)
            if child.wait() == 0:
                break
            kills += 1
            in_checkpoint += bool(work_folders(run))
            said += child.stdout.read_text()
        assert place.start(*words_of(place, run.name, steps)).wait() == 0
        assert weights_of(run) == expected, f"chain {chain} after {kills} kills"
        assert not list(run.rglob("*.tmp"))
    assert "no checkpoint yet: starting over" in said and "resumed from" in said


def test_what_a_kill_left_of_a_file_goes_with_the_next_start(tmp_path):
    """Also of a run that has nothing left to do, and writes no report again."""
    for name in (REPORT, SETTINGS):
        (tmp_path / f"{name}.tmp").write_text("{")
    RunFolder(tmp_path, resume=True).release()
    assert not list(tmp_path.glob("*.tmp"))


def stop_after_first_step(place, words, number):
    """A signal between the first step and the first regular checkpoint; one must appear nevertheless."""
    run = place.folder / words[words.index("--out") + 1]
    child = place.start(*words, "--checkpoint-every", "1000", signal_after=(RECORDED, [number]))
    code = child.wait()
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000001" and (run / "metrics.jsonl").read_text().count("\n") == 1
    assert f"go on with --resume --out {run.name}" in child.stdout.read_text()
    return code


def test_sigterm_writes_a_checkpoint_and_exits_143(place):
    words = words_of(place, "term")
    assert stop_after_first_step(place, words, signal.SIGTERM) == 143
    assert place.start(*words_of(place, "term")).wait() == 0
    assert place.start(*words_of(place, "undisturbed")).wait() == 0
    assert weights_of(place.folder / "term") == weights_of(place.folder / "undisturbed")


def test_first_sigint_writes_a_checkpoint_and_exits_130(place):
    assert stop_after_first_step(place, words_of(place, "int"), signal.SIGINT) == 130


def test_second_sigint_leaves_at_once(place):
    """The first alone would end the run with a checkpoint."""
    child = place.start(*words_of(place, "twice"), signal_after=(RECORDED, [signal.SIGINT, signal.SIGINT]))
    assert child.wait() == 130
    assert not (place.folder / "twice/checkpoints").exists()


def test_a_run_folder_in_use_is_refused(place):
    """The second process is refused while the first runs, and the first does not notice."""
    words = place.train_words("--max-steps", "100000", "--checkpoint-every", "0", "--out", "run")
    first = place.start(*words)
    wait_until(first, (place.folder / "run/metrics.jsonl").exists)
    result = place.vb("train", "--out", "run", "--resume", code=2)
    assert f"in use by process {first.pid}" in result.stderr and len(result.stderr.splitlines()) == 1
    assert first.alive
    first.signal(signal.SIGTERM)
    assert first.wait() == 143 and first.stderr.read_text() == ""


def test_a_full_disk_costs_no_older_checkpoint(place):
    """RLIMIT_FSIZE stands in for the full disk: the kernel refuses to let a file grow beyond it."""
    place.vb(*place.train_words("--max-steps", "8", "--checkpoint-every", "4", "--out", "run"))
    run = place.folder / "run"
    kept = (run / "checkpoints/step-00000008/optimizer.safetensors").read_bytes()
    shutil.rmtree(run / "final")
    result = place.vb(
        "train", "--out", "run", "--resume", "--max-steps", "16", code=2, file_bytes=len(kept) - 1000
    )  # fmt: skip
    assert len(result.stderr.splitlines()) == 1
    assert "optimizer.safetensors" in result.stderr and "older checkpoints are untouched" in result.stderr
    assert (run / "checkpoints/step-00000008/optimizer.safetensors").read_bytes() == kept
    assert not list(run.rglob("*.tmp"))
    assert "after step 8" in place.vb("train", "--out", "run", "--resume").stdout
