"""Measuring processes: each is a fork of a script that stands by, and none outlives its time."""

import os
import signal
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.lib.child_process import REPO, run_child

SCRIPT = f"""
import os, signal, subprocess, sys, time
sys.path.insert(0, {str(REPO)!r})
from benchmarks.lib.child_process import answer, say

def main(argument):
    print("chatter of", argument)
    say("who", pid=os.getpid(), parent=os.getppid(), argument=argument)
    if "bar" in argument:
        sys.stderr.write("Loading 50%")
    if argument == "fail":
        raise ValueError("no such thing")
    if argument == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if argument == "mark":
        print("@ home", "@ 5", "@ {{}}", sep=chr(10))
    if "hang" in argument:
        say("started", pid=subprocess.Popen(["sleep", "600"]).pid)
        time.sleep(600)

answer(main)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "work.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def run(script: Path, argument: str, seconds: float = 60.0) -> tuple[int | None, list[dict], list[str]]:
    events: list[dict] = []
    told: list[str] = []
    return run_child(script, argument, seconds, events.append, told.append), events, told


def test_each_argument_has_a_process_of_its_own_and_the_imports_of_one(script: Path) -> None:
    (code, [first], told), (_, [second], _) = run(script, "a"), run(script, "b")
    assert (code, told) == (0, [])
    assert (first["argument"], second["argument"]) == ("a", "b")
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"] != os.getpid()


def test_a_failure_is_told_and_the_next_one_runs(script: Path) -> None:
    code, events, told = run(script, "fail")
    assert code == 1
    assert events[-1] == {"kind": "failed", "error": "ValueError: no such thing"}
    assert "| chatter of fail" in told
    assert told[-1] == "| ValueError: no such thing"
    assert run(script, "die")[0] == -signal.SIGKILL
    assert run(script, "a")[0] == 0


def test_the_time_ends_a_process_and_what_it_started(script: Path) -> None:
    run(script, "a")  # which is when it stands by: a fork of it takes milliseconds
    code, events, told = run(script, "hang behind a bar", 1.5)
    assert code is None
    assert told == ["stopped, the time is over", "| chatter of hang behind a bar", "| Loading 50%"]
    deadline = time.monotonic() + 20
    for pid in (events[0]["pid"], events[-1]["pid"]):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.05)
    assert run(script, "a")[0] == 0


def test_other_people_s_chatter_is_no_answer(script: Path) -> None:
    for argument in ("bar", "mark"):
        code, events, _ = run(script, argument)
        assert (code, [each["kind"] for each in events]) == (0, ["who"])


def test_a_listener_that_fails_leaves_the_next_one_right(script: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_child(script, "a", 60.0, lambda event: 1 // 0, print)
    assert [each["argument"] for each in run(script, "b")[1]] == ["b"]


@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.004, 0.008])
def test_no_moment_is_too_early_for_the_end(script: Path, seconds: float) -> None:
    run(script, "a")
    began = time.monotonic()
    assert run(script, "hang", seconds)[0] is None
    assert time.monotonic() - began < 20
    assert run(script, "a")[0] == 0


def test_a_script_that_does_not_stand_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module\n")
    code, events, told = run(path, "a" * (1 << 20))  # more than a pipe holds
    assert (code, events) == (1, [])
    assert told[-1] == "| ModuleNotFoundError: No module named 'no_such_module'"
