"""Starts `vb` processes quickly: one process imports everything once, and forks a child for each command.

A child is a process of its own in every respect that the tests are about (signals, files, locks, exit codes). Run as a script: reads
a JSON list of words a line, answers the child's process id, and its exit code once it ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO


class Child:
    """A running command."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers
        self.pid = int(answers.readline())
        assert self.pid > 1
        self._code: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it still runs; a process that ended but was not collected does not."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        except FileNotFoundError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._code is None and self.alive:
            os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit code; negative: killed by that signal."""
        if self._code is None:
            self._code = int(self._answers.readline())
        return self._code


class ForkServer:
    """Talks to the script below; one child at a time."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
            env=environment, start_new_session=True,
        )  # fmt: skip
        self._child: Child | None = None

    def start(self, words: list[str]) -> Child:
        """A child that runs ``vb words``; its output is appended to ``output.txt``."""
        self._end_child()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        self._child = Child(self._process.stdout)
        return self._child

    def _end_child(self) -> None:
        """A test that failed may have left one running."""
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
            self._child.wait()

    def close(self) -> None:
        self._end_child()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()


def _child(words: list[str]) -> int:
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from vblackwell.cli import main

    code = main(words)
    sys.stdout.flush()
    return code


def _serve() -> None:
    # No torch operation may run before the fork: its threads would not survive it.
    import tokenizers  # noqa: F401

    import vblackwell.infer.generate
    import vblackwell.memory.stack
    import vblackwell.train.run  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_child(json.loads(line)))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
