"""Runs one system in a process group of its own, tells its progress, and comes back with a result whatever happens.

A crash, an out-of-memory kill or a time limit of one system is a row with its error; the others go on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.offload.case import MARK, Case, Result

CHILD = Path(__file__).with_name("measure.py")
REPO = Path(__file__).resolve().parents[3]
KEPT_LINES = 30  # of what a system prints, to be shown if it fails


class Listener:
    """Reads what a child prints: results, how far it is, and the last of its chatter."""

    def __init__(self, system: str, tell: Callable[[str], None]) -> None:
        self.system = system
        self.result: Result | None = None
        self.error = ""
        self.steps = 0
        self.loss: float | None = None
        self.tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._tell = tell

    def read(self, stream: Any) -> None:
        """Until the stream ends."""
        for line in stream:
            if line.startswith(MARK):
                self._hear(json.loads(line[len(MARK) :]))
            else:
                self.tail.append(line.rstrip())

    def _hear(self, event: dict[str, Any]) -> None:
        kind = event.pop("kind")
        if kind == "result":
            self.result = Result(**event["result"])
        elif kind == "failed":
            self.error = event["error"]
        elif kind == "step":
            self.steps = event["step"]
            norm = "" if event["norm"] is None else f", norm {event['norm']:.3f}"
            self._tell(
                f"step {event['step']}/{event['of']}: loss {event['loss']:.5f}{norm}, {event['since_start']:.1f} s"
            )
        else:
            self._tell(event["text"])


def run_system(case: Case, limit_seconds: float, tell: Callable[[str], None]) -> Result:
    """The result of ``case``, with what went wrong, if something did."""
    process = subprocess.Popen(
        [sys.executable, str(CHILD), case.to_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        # What `vb train` sets; here for every system alike.
        env={"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ, "PYTHONUNBUFFERED": "1"},
        cwd=REPO,
    )
    listener = Listener(case.system, tell)
    reader = threading.Thread(target=listener.read, args=(process.stdout,), name=f"listen-{case.system}")
    reader.start()
    late = False
    try:
        process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        _end(process)
        reader.join()
        assert process.stdout is not None
        process.stdout.close()
    return _outcome(case, listener, process.returncode, limit_seconds if late else None, tell)


def _end(process: subprocess.Popen[str]) -> None:
    """The process and whatever it started, compilers for example."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(case: Case, listener: Listener, code: int, limit: float | None, tell: Callable[[str], None]) -> Result:
    result = listener.result
    if code == 0 and result is not None:
        return result
    if limit is not None:
        where = f"stopped after step {listener.steps}" if listener.steps else "not up"
        status, error = f"{where} in {limit:.0f} s", ""
    else:
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        status, error = "failed", listener.error or ended
    tell(f"{status} {error}".strip())
    for line in listener.tail:
        tell(f"| {line}")
    if result is not None:  # measured, and failed afterwards: the numbers stand, and say so
        return replace(result, notes=[*result.notes, f"afterwards: {status} {error}"])
    return Result(case.system, status, error)
