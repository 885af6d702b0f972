"""Measurements in processes of their own, forked from one that has imported everything: a library that takes 15 s to import does so once.

The process that forks never touches CUDA. A script takes part by calling `serve` with its main function.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.lib.offload.case import MARK

SERVE = "--serve"
KEPT_LINES = 12


class Ended(BaseException):
    """SIGTERM has come."""


@contextmanager
def until_told_to_end() -> Iterator[None]:
    """Inside, SIGTERM raises `Ended` in the main thread, which must be the one that calls this."""

    def end(number: int, frame: Any) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class WarmProcess:
    """``script``, started to `serve`."""

    def __init__(self, script: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script), SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
            # A library that asks whether there is CUDA must not start it here.
            env={
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ,
                "PYTHONUNBUFFERED": "1",
            },
        )  # fmt: skip
        self._hear: Callable[[dict[str, Any]], None] = lambda event: None
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._over, self._pid, self._code = threading.Event(), 0, 0
        self._reader = threading.Thread(target=self._read, name=f"listen-{script.stem}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if not line.startswith(MARK):
                self._tail.append(line.rstrip()[:300])
                continue
            event = json.loads(line[len(MARK) :])
            if event["kind"] == "began":
                self._pid = event["pid"]
            elif event["kind"] == "over":
                self._code = event["code"]
                self._over.set()
            else:
                self._hear(event)
        self._code = self._code or 1
        self._over.set()

    def run(
        self, argument: str, limit_seconds: float, hear: Callable[[dict[str, Any]], None], tell: Callable[[str], None]
    ) -> None:  # fmt: skip
        """As `child_process.run_child`: one measurement, which ends after ``limit_seconds``."""
        if self._process.poll() is not None:  # it could not import something, or was stopped before it had begun
            self._reader.join(5)
            for line in [*self._tail, "the process that imports has ended"]:
                tell(f"| {line}")
            return
        self._hear, self._pid, self._code = hear, 0, 0
        self._tail.clear()
        self._over.clear()
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(argument + "\n")
        pipe.flush()
        try:
            late = not self._over.wait(max(1.0, limit_seconds))
        except BaseException:
            self._stop()
            raise
        if late:
            tell("stopped, the time is over")
            self._stop()
            self._over.wait(20)
        elif self._code:
            for line in self._tail:
                tell(f"| {line}")

    def _stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL) if self._pid else self._process.kill()

    def close(self) -> None:
        """End it."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        self._reader.join(5)


def forked(script: str, argument: str, cuda: bool, main: Callable[[str], None]) -> None:
    """``main(argument)`` in a fork; in a new process where something that was imported has touched CUDA, which no fork survives."""
    import torch

    if cuda:
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError as error:
            text = f"anew, because the fork has no CUDA ({' '.join(str(error).split())[:120]})"
            print(MARK + json.dumps({"kind": "phase", "text": text}), flush=True)
            os.execv(sys.executable, [sys.executable, script, argument])
    main(argument)


def serve(main: Callable[[str], None]) -> None:
    """Call ``main`` with each line of standard input, in a fork of this process."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            code = 1
            try:
                main(line.strip())
                code = 0
            except SystemExit as error:
                code = int(error.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(MARK + json.dumps({"kind": "began", "pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(MARK + json.dumps({"kind": "over", "code": os.waitstatus_to_exitcode(status)}), flush=True)
