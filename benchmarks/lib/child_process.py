"""Runs each measurement in a separate process and hands on what it says, whatever becomes of it.

A script that measures is started once and stands by: it has imported everything and touched no GPU, and each
measurement is a fork of it. So nothing imports beside a measurement, and nothing is imported twice.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

MARK = "@ "  # begins the lines in which a process answers
ANSWER = "answer"  # a script's argument: it stands by
KEPT_LINES = 30  # of what a process prints, to be shown if it fails
REPO = Path(__file__).resolve().parents[2]


class Stopped(BaseException):
    """Somebody ended the run: what there is will be told."""


def _stop(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice, and the tables are still to come
    raise Stopped


@contextmanager
def until_stopped() -> Iterator[None]:
    """Inside, SIGTERM or an interrupt ends the measuring; no later one ends the report."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    except (Stopped, KeyboardInterrupt):
        print("stopped: what follows is what there is", flush=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def say(kind: str, **values: Any) -> None:
    """One line from a system's process to the one that started it."""
    print(MARK + json.dumps({"kind": kind, **values}), flush=True)


def run_child(
    script: Path,
    argument: str,
    limit_seconds: float,
    hear: Callable[[dict[str, Any]], None],
    tell: Callable[[str], None],
) -> int | None:
    """Let ``script``, which calls `answer`, work on ``argument`` in a new process; its lines that begin with the mark
    go to ``hear``, and if it fails the last of the others to ``tell``.

    The process, and whatever it started, ends after ``limit_seconds``. One at a time.

    Returns:
        Its exit code; None if the time was over first.
    """
    standing = _standing_by(script)
    tail: deque[str] = deque(maxlen=KEPT_LINES)
    group, code = standing.pid, None  # whom to end, and how it ended

    def read(stream: Any) -> None:
        nonlocal group, code
        for line in stream:
            if not line.startswith(MARK):
                tail.append(line.rstrip()[:300])
                continue
            event = json.loads(line[len(MARK) :])
            if event["kind"] == "began":
                group = event["pid"]
            elif event["kind"] == "ended":
                code = event["code"]
                return
            else:
                hear(event)
        code = standing.wait()  # not even its imports ended well

    assert standing.stdin is not None
    reader = threading.Thread(target=read, args=(standing.stdout,), name=f"listen-{script.stem}")
    reader.start()
    late = False
    try:
        standing.stdin.write(argument + "\n")
        standing.stdin.flush()
        reader.join(limit_seconds)
        late = reader.is_alive()
    except BrokenPipeError:
        reader.join()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        reader.join()
    if late:
        tell("stopped, the time is over")
    if late or code:
        for line in tail:
            tell(f"| {line}")
    return None if late else code


_standing: dict[Path, subprocess.Popen[str]] = {}


def _standing_by(script: Path) -> subprocess.Popen[str]:
    """The process of ``script`` that forks for each argument."""
    process = _standing.get(script)
    if process is None or process.poll() is not None:
        process = _standing[script] = subprocess.Popen(
            [sys.executable, str(script), ANSWER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=REPO,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    return process


@atexit.register
def _end_standing() -> None:
    for process in _standing.values():
        process.kill()
        process.communicate()


def answer(work: Callable[[str], None]) -> None:
    """In a script: ``work`` on each line of standard input, in a fork; a failure is told in one line, and raised."""
    for line in sys.stdin:
        if child := os.fork():
            say("ended", code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            continue
        os.setsid()
        say("began", pid=os.getpid())
        try:
            work(line.rstrip("\n"))
        except Exception as error:
            say("failed", error=" ".join(f"{type(error).__name__}: {error}".split())[:400])
            raise
        return


class MemoryWatch:
    """The highest growth of the process's own (anonymous) memory and of the machine's used RAM, which counts pages that
    a driver has pinned for no process.
    """

    def __init__(self, every_seconds: float) -> None:
        self._start, self._own, self._machine = self._now(), 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(every_seconds,), name="memory-watch", daemon=True)
        self._thread.start()

    @staticmethod
    def _now() -> tuple[int, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        own = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")]
        if not own:  # a kernel that does not tell it
            info = psutil.Process().memory_info()
            own = [info.rss - info.shared]
        memory = psutil.virtual_memory()
        return own[0], memory.total - memory.available

    def _run(self, every_seconds: float) -> None:
        while not self._stop.wait(every_seconds):
            self.growth()

    def growth(self) -> tuple[int, int]:
        """Bytes so far: the process's own, the machine's."""
        own, machine = self._now()
        self._own = max(self._own, own - self._start[0])
        self._machine = max(self._machine, machine - self._start[1])
        return self._own, self._machine

    def end(self) -> tuple[int, int]:
        """The last `growth`."""
        self._stop.set()
        self._thread.join()
        return self.growth()
