"""What is refused: one line that says what, where and what to do; exit code 2; nothing written; no traceback."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import LEVELS, Workplace
from vblackwell.folders.commit import hash_file, verify_folder


def files_of(place: Workplace) -> dict[Path, int]:
    """Every file but locks, with its time of change."""
    return {
        path: path.stat().st_mtime_ns for path in place.folder.rglob("*") if path.is_file() and path.name != ".lock"
    }


def refused(place: Workplace, words: list[str], *parts: str, **extra: str) -> str:
    """Run ``vb``, check the manners of its refusal, and return the line."""
    before = files_of(place)
    result = place.vb(*words, code=2, **extra)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("vb: error: "), result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert files_of(place) == before, "a refused command wrote something"
    for part in parts:
        assert part in lines[0], lines[0]
    return lines[0]


def test_mistyped_words(place):
    (place.folder / "run.yaml").write_text("lerning_rate: 3\n")
    refused(place, ["trian"], "'trian'", "did you mean 'train'")
    refused(
        place, ["--help-all"], "'--help-all' is no command", "did you mean '--help'"
    )  # a command's have a longer one
    refused(place, ["--verison"], "did you mean '--version'")
    assert "mean" not in refused(place, ["--device", "cpu"])
    refused(place, ["train", "--lerning-rate", "3"], "--lerning-rate", "'--learning-rate'")
    refused(place, ["train", "--config", "tinny"], "'tinny'", "did you mean 'tiny'")
    refused(place, ["train", "--config", "run.yaml"], "run.yaml", "'lerning_rate'", "did you mean 'learning_rate'")
    refused(place, place.train_words("--architecture", "{num_layer: 3}"), "num_layer", "did you mean 'num_layers'")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--learning-rate", "1e38"], ["--learning-rate 1e+38", "outside 0 to 1e+30"]),
        (["--learning-rate", "nan"], ["--learning-rate nan", "finite", "3e-4"]),
        (["--learning-rate", "fast"], ["--learning-rate 'fast'", "number"]),
        (["--batch-size", "0"], ["--batch-size 0", ">= 1"]),
        (["--max-steps", "3", "--epochs", "1"], ["--max-steps", "--epochs", "choose one"]),
        (["--fast-memory", "much"], ["--fast-memory 'much'", "8GiB"]),
        (["--lora"], ["--lora", "expected one argument"]),
        (["--lora", "8"], ["--lora", "--model FOLDER"]),
        (["--lora", "x"], ["--lora 'x' cannot be read", "--lora 16"]),
        (["--update", "1.5"], ["--update '1.5'", "share between 0 and 1"]),
        (["--activations", "ram"], ["--activations 'ram'", "host"]),
        (["--optimizer-states", "4bit"], ["--optimizer-states '4bit'", "fp32, 8bit"]),
        (["--masters", "stochastic"], ["--masters stochastic", "--optimizer-states 8bit"]),
        (["--config", "gone.yaml"], ["gone.yaml", "No such file"]),
        (["--learning-rate"], ["--learning-rate", "expected one argument"]),
        (["--model", "gone"], ["gone", "no such folder"]),
    ],
)
def test_bad_values(place, words, parts):
    refused(place, ["train", *words], *parts)


def test_bad_files(place):
    (place.folder / "empty.txt").write_text("")
    (place.folder / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 100)
    (place.folder / "config.yaml").write_bytes(b"data: \xff\n")
    refused(place, ["train", "--data", "gone.txt"], "gone.txt")
    refused(place, ["train", "--data", "empty.txt"], "empty.txt", "no text")
    refused(place, ["train", "--data", "latin.txt"], "latin.txt", "UTF-8")
    refused(place, ["train", "--config", "config.yaml"], "config.yaml", "UTF-8")
    (place.folder / "half.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}\n')
    (place.folder / "deep.jsonl").write_text('{"text": ' + "[" * 100_000)
    refused(place, place.train_words("--data", "half.jsonl"), "half.jsonl: line 2", "half a character")
    refused(place, place.train_words("--data", "deep.jsonl"), "deep.jsonl: line 1", "nested too deep")
    refused(place, ["train", "--data", "x" * 300], "xxx", "too long")


def test_memory_that_is_not_there(place):
    line = refused(place, place.train_words("--fast-memory", "32KiB", "--host-memory", "8MiB"), "KiB", "raise")
    assert line.count("KiB") >= 2, "what is needed and what there is"
    refused(place, place.train_words("--disk-memory", "4000TiB"), "4000 TiB", "free", "--disk-path")
    words = [word for word in place.train_words(*LEVELS) if word not in ("--disk-path", str(place.folder))]
    refused(place, [*words, "--disk-path", "/dev/shm"], "/dev/shm", "tmpfs")
    refused(place, [*words, "--disk-path", "nowhere"], "nowhere", "No such file")


def test_generate_without_a_model(place):
    (place.folder / "empty").mkdir()
    generate = ["generate", "--device", "cpu", "--model"]
    refused(place, [*generate, "gone", "--prompt", "x"], "gone", "no such folder")
    for words in (["generate", "--prompt", "x", "--model"], ["train"], ["estimate"], ["chat"]):
        refused(place, [*words, "emtpy"], "emtpy", "did you mean 'empty'?")
    refused(place, [*generate, "empty", "--prompt", "x"], "empty", "config.json")
    refused(place, [*generate, "empty"], "prompt")
    refused(place, ["doctor", "--disk-path", "gone"], "gone", "No such file")


def test_launched_with_others(place):
    refused(place, ["train"], "WORLD_SIZE is 2", WORLD_SIZE="2")


def test_a_run_folder_that_is_taken(place, finished):
    _, run, _ = finished
    shutil.copytree(run, place.folder / "run")
    (place.folder / "file").write_text("")
    refused(place, place.train_words("--out", "run"), "holds a run", "--resume")
    refused(place, place.train_words("--out", "file"), "file", "another --out")
    refused(place, ["train", "--out", "ran", "--resume"], "--out ran holds no run", "did you mean 'run'?")
    refused(place, ["train", "--resume", "run"], "--resume takes no folder", "vb train --resume --out run")
    refused(place, ["train", "--resume", "ran"], "ran holds no run; did you mean 'run'?")
    refused(place, ["train", "--resume"], "no run in ./runs was started: drop --resume")
    assert not (place.folder / "ran").exists() and not (place.folder / "runs").exists()
    refused(place, ["train", "--out", "run", "--resume", "--batch-size", "5"], "--batch-size is 5", "started with 4")
    shutil.rmtree(place.folder / "run/final")
    refused(place, ["train", "--out", "run", "--resume", "--max-steps", "15"], "ends at step 15", "of step 20")


def test_a_plan_is_refused_where_its_run_is(place, finished):
    _, run, _ = finished
    shutil.copytree(run, place.folder / "run")
    (place.folder / "file").write_text("")
    refused(place, place.train_words("--plan", "--out", "run"), "--out run holds a run: add --resume")
    refused(place, place.train_words("--plan", "--out", "file/run"), "--out file/run: file is a file")
    refused(place, ["train", "--plan", "run/final", "--out", "./run/final"], "run/final is the folder of --model")
    shorter = ["train", "--plan", "--resume", "--out", "run", "--max-steps", "15"]
    refused(place, shorter, "ends at step 15", "of step 20")
    (place.folder / "link").symlink_to("gone")
    for each in ([], ["--plan"]):
        refused(place, place.train_words("--out", "link", *each), "--out link is a link to what is not there")
        with open(place.folder / "run/.lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused(place, ["train", "--resume", "--out", "run", *each], "run is in use by process")
    shutil.rmtree(place.folder / "run/checkpoints")
    refused(place, shorter, "run has finished its 24 steps, and kept no checkpoint")
    assert "plan: " in place.vb("train", "--plan", "--resume", "--out", "run").stdout


def damage(path: Path) -> None:
    """Flip a bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_plan_of_a_shorter_run_goes_by_intact_checkpoints(place, finished):
    """As the run: one that is damaged is passed over, and an end that has been exported leaves nothing to do."""
    shutil.copytree(finished[1], place.folder / "run")
    shorter = ["train", "--resume", "--out", "run", "--max-steps"]
    told = place.vb(*shorter, "11", "--plan", code=2)
    assert "ends at step 11, and its newest checkpoint is of step 20" in told.stderr and not told.stdout
    damage(place.folder / "run/checkpoints/step-00000020/model.safetensors")
    told = place.vb(*shorter, "11", "--plan").stdout
    assert "passed over a damaged checkpoint" in told and "plan: " in told
    assert "after step 10" in place.vb(*shorter, "11").stdout


def test_a_plan_of_a_shorter_run_needs_an_intact_checkpoint(place, finished):
    shutil.copytree(finished[1], place.folder / "run")
    for path in (place.folder / "run/checkpoints").iterdir():
        damage(path / "model.safetensors")
    for each in ([], ["--plan"]):
        refused(place, ["train", "--resume", "--out", "run", "--max-steps", "1", *each], "no checkpoint is intact")


def test_a_plan_of_what_has_been_exported_is_told(place, finished):
    """Its run has nothing to do: where the end was moved, and then moved back."""
    shutil.copytree(finished[1], place.folder / "run")
    newest = place.folder / "run/checkpoints/step-00000020"
    newest.rename(newest.with_name("step-00000030"))
    words = ["train", "--resume", "--out", "run", "--max-steps", "24"]
    assert "finished its 24 steps already" in place.vb(*words).stdout
    assert "plan: " in place.vb(*words, "--plan").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host-memory", "4000TiB"], "--host-memory 4000 TiB are RAM on a CPU"),
        pytest.param(
            *(["--fast-memory", "4000TiB"], "--fast-memory 4000 TiB are RAM on a CPU"), marks=pytest.mark.slow
        ),
        (["--disk-memory", "4000TiB"], "--disk-memory 4000 TiB: "),
        (["--disk-memory", "8MiB", "--disk-path", "/dev/shm"], "disk path /dev/shm is on tmpfs"),
    ],
)
def test_a_plan_is_refused_what_the_machine_does_not_have(place, words, said):
    for each in ([], ["--plan"]):
        refused(place, place.train_words(*words, *each, "--out", "run", "--max-steps", "1"), said)


def test_a_plan_is_refused_where_there_is_no_room(place):
    """Which only root is told of /proc; others may not write there."""
    words, said = place.train_words("--out", "/proc/run", "--max-steps", "4"), "0 B are free"
    for each in (words, [*words, "--plan"]):
        refused(place, each, "--out /proc/run", "/proc may not be written to" if os.geteuid() else said)


def test_damaged_checkpoints(place, finished):
    """A damaged newest checkpoint costs the work since the one before; with none intact nothing is touched."""
    _, run, _ = finished
    here = place.folder / "run"
    shutil.copytree(run, here)
    final = (here / "final/model.safetensors").read_bytes()
    shutil.rmtree(here / "final")
    newest = here / "checkpoints/step-00000020/model.safetensors"
    damage(newest)
    output = place.vb("train", "--out", "run", "--resume").stdout
    assert "damaged checkpoint" in output and "after step 10" in output
    assert (here / "final/model.safetensors").read_bytes() == final
    steps = [json.loads(line)["step"] for line in (here / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 25)), "a step was lost or told twice"

    shutil.rmtree(here / "final")
    for path in (here / "checkpoints").iterdir():
        os.unlink(path / "optimizer.safetensors")
    refused(place, ["train", "--out", "run", "--resume"], "no checkpoint is intact", "optimizer.safetensors is missing")


def test_a_checkpoint_without_its_manifest_is_written_again(place, finished):
    _, run, _ = finished
    here = place.folder / "run"
    shutil.copytree(run, here)
    final = (here / "final/model.safetensors").read_bytes()
    shutil.rmtree(here / "final")
    (here / "checkpoints/step-00000020/manifest.json").unlink()
    output = place.vb("train", "--out", "run", "--resume").stdout
    assert "damaged checkpoint" in output and "after step 10" in output
    assert (here / "final/model.safetensors").read_bytes() == final
    verify_folder(here / "checkpoints/step-00000020")


@pytest.mark.parametrize(
    ("changed", "said"), [({"format": 1}, "trainer.json is of format 1"), ({"state": {"step": 20}}, "has no")]
)
def test_a_checkpoint_of_another_version_is_refused(changed, said, place, finished):
    _, run, _ = finished
    here = place.folder / "run"
    shutil.copytree(run, here)
    shutil.rmtree(here / "final")
    path, manifest = (here / "checkpoints/step-00000020" / name for name in ("trainer.json", "manifest.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    entries = json.loads(manifest.read_text())
    entries["files"]["trainer.json"] = hash_file(path)
    manifest.write_text(json.dumps(entries))
    refused(place, ["train", "--out", "run", "--resume"], said, "another version")


def test_a_model_that_is_not_what_we_wrote_is_not_trained(place, finished):
    _, run, _ = finished
    shutil.copytree(run / "final", place.folder / "model")
    path = place.folder / "model/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    words = ["train", "--model", "model", "--data", str(place.corpus), "--device", "cpu"]
    refused(place, words, "model/model.safetensors differs from what was written")


def test_a_digit_of_the_settings_that_changed_is_refused(place, finished):
    _, run, _ = finished
    here = place.folder / "run"
    shutil.copytree(run, here)
    shutil.rmtree(here / "final")
    settings = here / "settings.json"
    written = settings.read_text()
    settings.write_text(written.replace('"learning_rate": 0.01', '"learning_rate": 0.02'))
    refused(place, ["train", "--out", "run", "--resume"], "settings.json is not what the run wrote", "trainer.json")
    stored = {name: value for name, value in json.loads(written).items() if name != "xxh3"}
    settings.write_text(json.dumps(stored | {"seed": 1}))  # as of a version that kept no hash
    refused(place, ["train", "--out", "run", "--resume"], "--seed is 1, the run was started with 0", "trainer.json")


def test_divergence_never_reaches_the_weights(place):
    """A learning rate that throws the weights to 1e30: the next losses are not finite, and the run stops by itself."""
    words = place.train_words(
        *("--learning-rate", "1e30", "--warmup-steps", "0", "--max-steps", "50", "--checkpoint-every", "1"),
        *("--keep-checkpoints", "50", "--max-skipped-steps", "3", "--eval-every", "0", "--out", "run"),
    )
    result = place.vb(*words, code=2)
    assert "3 steps in a row" in result.stderr and "--learning-rate" in result.stderr
    assert "SKIPPED: weights untouched" in result.stdout
    assert len(result.stderr.splitlines()) == 1
    lines = [json.loads(line) for line in (place.folder / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["loss"] is None or line["grad_norm"] is None for line in lines[-3:])
    from safetensors.torch import load_file

    good = len(lines) - 3
    final = load_file(place.folder / f"run/checkpoints/step-{len(lines) - 1:08d}/model.safetensors")
    before = load_file(place.folder / f"run/checkpoints/step-{good:08d}/model.safetensors")
    assert all(weight.isfinite().all() and weight.equal(before[name]) for name, weight in final.items())


def shell(words: str) -> subprocess.CompletedProcess[bytes]:
    """`vb words`, which may close streams."""
    return subprocess.run(["sh", "-c", f'"$0" -m vblackwell {words}', sys.executable], capture_output=True)


@pytest.mark.parametrize(("how", "said"), [(">&-", b"closed,"), ("1</dev/null", b"open for reading alone,")])
@pytest.mark.parametrize("words", ["doctor", "estimate tiny", "train --out run", "train --help", "--version"])
def test_a_closed_output_is_refused_at_once(words, how, said, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    done = shell(f"{words} {how}")
    assert done.returncode == 2 and done.stderr.startswith(b"vb: error: standard output is " + said)
    assert done.stderr.count(b"\n") == 1 and b"/dev/null" in done.stderr and not list(tmp_path.iterdir())


def test_other_closed_streams_take_nothing_and_no_file_gets_their_numbers(tmp_path):
    """Also of the error's own line; and in a process that is started from here the streams are open."""
    assert [shell(f"nonsense {how}").returncode for how in ("2>&-", ">&- 2>&-", "2>/dev/full")] == [2] * 3
    assert shell("docs <&- 2>&-").stdout == shell("docs").stdout != b""
    code = "from vblackwell import cli; import os, subprocess, sys; cli.main(['--help'])\n"
    code += f"print(os.open({str(tmp_path / 'file')!r}, os.O_CREAT) > 2, flush=True)\n"
    code += "subprocess.run([sys.executable, '-c', 'import sys; print(None in (sys.stdin, sys.stderr))'])"
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" <&- 2>&-', sys.executable, code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == ["True", "False"]


@pytest.mark.parametrize("words", ["--help", "estimate --list", "train --help-all", "docs guide"])
def test_a_reader_that_left_is_no_internal_error(words):
    """`vb ... | head`: no words, and the exit code of a program that SIGPIPE ends; also where it read errors too.
    In a separate process, as it drops stdout.
    """
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "vblackwell", *words.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")
    if words == "--help":
        assert subprocess.run(command, stdout=write, stderr=write).returncode == 141
        assert subprocess.run([*command[:-1], "nonsense"], stdout=write, stderr=write).returncode == 2
    os.close(write)


def test_a_full_disk_under_the_output_is_no_internal_error():
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "vblackwell", "--help"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and b"cannot be written: No space left" in done.stderr and done.stderr.count(b"\n") == 1
