"""Starts `vb` processes quickly: one process imports everything once, and forks a child for each command.

A child is a process of its own in every respect that the tests are about (signals, files, locks, limits, exit codes). Run as a script:
reads a JSON request a line, answers the child's process id, and its exit code once it ended.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any


class Child:
    """A running command."""

    def __init__(self, answers: IO[str], stdout: Path, stderr: Path) -> None:
        self._answers = answers
        self._code: int | None = None
        self.stdout, self.stderr = stdout, stderr
        self.pid = int(answers.readline())
        assert self.pid > 1

    @property
    def alive(self) -> bool:
        """Whether it still runs; a process that ended but was not collected does not."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        except (FileNotFoundError, ProcessLookupError):
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
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
            env=environment, start_new_session=True,
        )  # fmt: skip
        self._child: Child | None = None
        self._count = 0

    def start(
        self,
        words: list[str],
        folder: Path,
        environment: dict[str, str] | None = None,
        file_bytes: int | None = None,
        signal_after: tuple[str, list[int]] | None = None,
    ) -> Child:
        """A child that runs ``vb words``, or the script that the first word names, in ``folder``.

        Args:
            file_bytes: the largest file it may write (RLIMIT_FSIZE).
            signal_after: ("module:Class.method", signals): it sends itself the signals when that method has returned for the first
                time. A signal from here would come too late on a busy machine.
        """
        self._end_child()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._count += 1
        stdout, stderr = (self._folder / f"{self._count}.{name}" for name in ("out", "err"))
        request = {
            "words": words, "folder": str(folder), "environment": environment or {}, "file_bytes": file_bytes,
            "signal_after": signal_after, "stdout": str(stdout), "stderr": str(stderr),
        }  # fmt: skip
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self._child = Child(self._process.stdout, stdout, stderr)
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
        assert self._process.wait() == 0
        self._process.stdout.close()


def _signal_after(name: str, numbers: list[int]) -> None:
    module, _, path = name.partition(":")
    owner, _, method = path.partition(".")
    kind = getattr(importlib.import_module(module), owner)
    called = getattr(kind, method)

    def call_then_signal(*args: Any, **kwargs: Any) -> Any:
        found = called(*args, **kwargs)
        setattr(kind, method, called)
        for number in numbers:
            os.kill(os.getpid(), number)
        return found

    setattr(kind, method, call_then_signal)


def _child(request: dict[str, Any]) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    if request["file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], request["file_bytes"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["signal_after"] is not None:
        _signal_after(*request["signal_after"])
    from vblackwell.cli import main

    code = 1  # an error that nobody foresaw
    try:
        if request["words"][0].endswith(".py"):
            sys.argv = request["words"]
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        else:
            code = main(request["words"])
    except SystemExit as leave:
        code = leave.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    # No torch operation may run before the fork: its threads would not survive it.
    import jsonargparse  # noqa: F401
    import peft  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo  # noqa: F401  (torch.optim does, at its first use)
    import transformers.conversion_mapping
    import transformers.models.auto.modeling_auto  # noqa: F401

    import vblackwell.infer.command
    import vblackwell.memory.stack
    import vblackwell.train.run  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _child(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
