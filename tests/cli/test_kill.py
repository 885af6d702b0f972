"""Signals, kills and full disks, as a user meets them; tests/faults tries many more of each."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.cli.conftest import LEVELS, RECORDED
from vblackwell.train.runfolder import REPORT, SETTINGS, RunFolder, holds_run


def words_of(place, out, steps=6):
    """Of a run, resumed where it has begun."""
    resumed = ["--resume"] if holds_run(place.folder / out) else []
    return place.train_words(
        *(*LEVELS, "--max-steps", str(steps), "--out", out),
        *("--checkpoint-every", "2", "--eval-every", "0", "--eval-sequences", "4", "--sample-tokens", "0", *resumed),
    )


def wait_until(child, condition):
    """Return as soon as ``condition()`` holds, or the child has ended."""
    while child.alive and not condition():
        time.sleep(0.003)  # a checkpoint is written for some 50 ms


def weights_of(run):
    return (run / "final/model.safetensors").read_bytes()


def test_what_a_kill_left_of_a_file_goes_with_the_next_start(tmp_path):
    """Also of a run that has nothing left to do, and writes no report again."""
    for name in (REPORT, SETTINGS):
        (tmp_path / f"{name}.tmp").write_text("{")
    (tmp_path / "checkpoints/step-00000002.tmp").mkdir(parents=True)
    RunFolder(tmp_path, resume=True).lock()
    assert not list(tmp_path.rglob("*.tmp"))


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


def test_a_longer_run_that_was_stopped_goes_on_to_its_new_end(place):
    """By the command that it printed; and when it has finished it says so, of the new end."""
    words = words_of(place, "longer")
    place.vb(*words)
    steps = int(words[words.index("--max-steps") + 1])
    again = ["train", "--resume", "--out", "longer"]
    child = place.start(*again, "--max-steps", str(steps + 3), signal_after=(RECORDED, [signal.SIGINT]))
    assert child.wait() == 130 and "go on with --resume --out longer" in child.stdout.read_text()
    assert f"step {steps + 3}/{steps + 3}" in place.vb(*again).stdout
    place.vb(*words_of(place, "undisturbed"))
    place.vb("train", "--resume", "--out", "undisturbed", "--max-steps", str(steps + 3))
    assert weights_of(place.folder / "longer") == weights_of(place.folder / "undisturbed")
    assert f"longer has finished its {steps + 3} steps already: nothing to do" in place.vb(*again).stdout


def test_second_sigint_leaves_at_once(place):
    """The first alone would end the run with a checkpoint."""
    child = place.start(*words_of(place, "twice"), signal_after=(RECORDED, [signal.SIGINT, signal.SIGINT]))
    assert child.wait() == 130
    assert not (place.folder / "twice/checkpoints").exists()


HELD = """
import os, signal, subprocess
from vblackwell.cli import main
from vblackwell.data import tokenizer

class Held(subprocess.Popen):
    def __init__(self, command, **how):
        super().__init__(command, **how)
        if tokenizer.__name__ in command:
            os.kill(self.pid, signal.SIGSTOP)
            print("held", self.pid, flush=True)

subprocess.Popen = Held
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_a_tokenizer_is_trained_does_not_wait_for_it(number, place):
    """Its process is stopped here and never done: a process that waited for it would hang."""
    path = place.folder / "held.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{HELD}", encoding="utf-8")
    words = place.train_words("--out", "run")
    child = place.server.start(
        [str(path), *words], place.folder, {"XDG_CACHE_HOME": str(place.folder / "cache"), "TMPDIR": str(place.folder)}
    )
    wait_until(child, lambda: "held" in child.stdout.read_text())
    (line,) = [line for line in child.stdout.read_text().splitlines() if line.startswith("held")]
    child.signal(number)
    assert child.wait() == 128 + number
    assert not Path("/proc", line.split()[1]).exists() and child.stderr.read_text() == ""
    assert not list((place.folder / "cache/vblackwell/tokenizers").iterdir())


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
    place.vb(*place.train_words("--max-steps", "4", "--checkpoint-every", "2", "--out", "run"))
    run = place.folder / "run"
    kept = (run / "checkpoints/step-00000004/optimizer.safetensors").read_bytes()
    shutil.rmtree(run / "final")
    result = place.vb("train", "--out", "run", "--resume", "--max-steps", "8", code=2, file_bytes=len(kept) - 1000)
    assert len(result.stderr.splitlines()) == 1
    assert "optimizer.safetensors" in result.stderr and "older checkpoints are untouched" in result.stderr
    assert (run / "checkpoints/step-00000004/optimizer.safetensors").read_bytes() == kept
    assert not list(run.rglob("*.tmp"))
    assert "after step 4" in place.vb("train", "--out", "run", "--resume").stdout
