"""Runs one measurement in a process of its own and hands on what it says, whatever becomes of it."""

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

from benchmarks.lib.offload.case import MARK

KEPT_LINES = 12


def run_child(
    script: Path, argument: str, limit_seconds: float, hear: Callable[[dict[str, Any]], None], tell: Callable[[str], None]
) -> None:  # fmt: skip
    """Start ``script`` with ``argument``; lines that begin with the mark go to ``hear``, the last of the others to ``tell`` if it fails.

    The process, and whatever it started, ends after ``limit_seconds``.
    """
    process = subprocess.Popen(
        [sys.executable, str(script), argument], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
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
        process.wait(max(1.0, limit_seconds))
    except subprocess.TimeoutExpired:
        late = True
        tell("stopped, the time is over")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
    if process.returncode and not late:
        for line in tail:
            tell(f"| {line}")
