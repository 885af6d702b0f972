"""Runs each measurement in a separate process and hands on what it says, whatever becomes of it.

A script that measures is started once and stands by: its modules are imported, no GPU is touched, and each measurement
is a fork of it. So nothing imports beside a measurement; what a measurement imports later is its own.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
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
    """One line from a measuring process to the one that started it; of its own, whatever was printed before."""
    sys.stdout.flush()
    os.write(1, f"\n{MARK}{json.dumps({'kind': kind, **values})}\n".encode())


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
    until = time.monotonic() + limit_seconds
    standing = _standing_by(script)
    tail: deque[str] = deque(maxlen=KEPT_LINES)
    child = code = None
    threading.Thread(target=standing.send, args=(argument,), name=f"ask-{script.stem}", daemon=True).start()
    try:
        while (line := standing.line(until)) is not None:
            event = _event(line)
            if event is None:
                tail.extend([line.rstrip()[:300]] if line.strip() else [])
            elif event["kind"] == "began":
                child = event["pid"]
            elif event["kind"] == "ended":
                code = event["code"]
                break
            else:
                hear(event)
        else:  # not even its imports ended well
            code = standing.process.wait()
    except TimeoutError:
        tell("stopped, the time is over")
    finally:
        if child is None or code is None:
            standing.end()
            del _standing[script]
        else:  # what it has started
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
    if code != 0:
        for line in tail:
            tell(f"| {line}")
    return code


def _event(line: str) -> dict[str, Any] | None:
    """What a line says to us; None: somebody's chatter."""
    try:
        event = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else None
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


class _Standing:
    """The process of a script that forks for each argument."""

    def __init__(self, script: Path) -> None:
        self.process = subprocess.Popen(
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
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"listen-{script.stem}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def send(self, argument: str) -> None:
        """Returns when the process has read it, which for a long one is after its imports."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it has ended, or been ended
            self.process.stdin.write(argument + "\n")
            self.process.stdin.flush()

    def line(self, until: float) -> str | None:
        """The next line; None: there will be no other. Raises TimeoutError after ``until``."""
        left = until - time.monotonic()
        try:
            if left > 0:
                return self._lines.get(timeout=left)
        except queue.Empty:
            pass
        raise TimeoutError

    def end(self) -> None:
        """Kill the process, the one that it has forked, and theirs."""
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            self.process.send_signal(signal.SIGSTOP)  # it forks no other
            for each in psutil.Process(self.process.pid).children(recursive=True):
                for kill in (os.kill, os.killpg):
                    with suppress(ProcessLookupError):
                        kill(each.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._reader.join(5)  # but for a pipe that a daemon of theirs still holds
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()


_standing: dict[Path, _Standing] = {}


def _standing_by(script: Path) -> _Standing:
    standing = _standing.get(script)
    if standing is None:
        standing = _standing[script] = _Standing(script)
    return standing


@atexit.register
def _end_standing() -> None:
    for standing in _standing.values():
        standing.end()


def answer(work: Callable[[str], None]) -> None:
    """In a script: ``work`` on each line of standard input, in a fork; a failure is told in one line, and raised."""
    for line in sys.stdin:
        if child := os.fork():
            say("began", pid=child)
            say("ended", code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            continue
        os.setsid()
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
