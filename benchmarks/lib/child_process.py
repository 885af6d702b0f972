"""Runs one measurement in a separate process and hands on what it says, whatever becomes of it."""

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
from pathlib import Path
from typing import Any

MARK = "@ "  # begins the lines in which a process answers
KEPT_LINES = 30  # of what a process prints, to be shown if it fails
REPO = Path(__file__).resolve().parents[2]


def say(kind: str, **values: Any) -> None:
    """One line from a system's process to the one that started it."""
    print(MARK + json.dumps({"kind": kind, **values}), flush=True)


def run_child(
    script: Path, argument: str, limit_seconds: float, hear: Callable[[dict[str, Any]], None],
    tell: Callable[[str], None]
) -> int | None:  # fmt: skip
    """Start ``script`` with ``argument``; its lines that begin with the mark go to ``hear``, and if it fails the last
    of the others to ``tell``.

    The process, and whatever it started, ends after ``limit_seconds``.

    Returns:
        Its exit code; None if the time was over first.
    """
    process = subprocess.Popen(
        [sys.executable, str(script), argument], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True, cwd=REPO,
        # What `vb train` sets; here for every system alike.
        env={"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    tail: deque[str] = deque(maxlen=KEPT_LINES)

    def read(stream: Any) -> None:
        for line in stream:
            if line.startswith(MARK):
                hear(json.loads(line[len(MARK) :]))
            else:
                tail.append(line.rstrip()[:300])

    reader, late = threading.Thread(target=read, args=(process.stdout,), name=f"listen-{script.stem}"), False
    reader.start()
    try:
        process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()
    if late:
        tell("stopped, the time is over")
    if late or process.returncode:
        for line in tail:
            tell(f"| {line}")
    return None if late else process.returncode
