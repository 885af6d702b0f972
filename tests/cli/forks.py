"""Starts `vb` processes quickly: one process imports everything once, and forks a child for each command.

A child is a separate process in every respect that the tests are about (signals, files, locks, limits, exit codes).
Run as a script, with the names of further modules to import: reads a JSON request a line; answers the process id of a
child that was asked for, or the exit code of one to wait for.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import pickle
import resource
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Child:
    """A running command; ``ask`` talks to the server that it was forked from."""

    def __init__(self, ask: Callable[[dict[str, Any]], int], pid: int, stdout: Path, stderr: Path) -> None:
        assert pid > 1
        self._ask = ask
        self._code: int | None = None
        self.pid, self.stdout, self.stderr = pid, stdout, stderr

    @property
    def state(self) -> str:
        """The letter that /proc has for it: T where it is stopped, X where it is gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        except (FileNotFoundError, ProcessLookupError):
            return "X"
        return stat.rpartition(")")[2].split()[0]

    @property
    def alive(self) -> bool:
        """Whether it still runs; a process that ended but was not collected does not."""
        return self.state not in "ZX"

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._code is None and self.alive:
            os.kill(self.pid, number)

    def wait(self, limit_seconds: float | None = None) -> int | None:
        """The exit code; negative: killed by that signal; None: it has not ended within the limit."""
        if self._code is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                if limit_seconds is not None and not select.select([descriptor], [], [], limit_seconds)[0]:
                    return None
            finally:
                os.close(descriptor)
            self._code = self._ask({"wait": self.pid})
        return self._code


class ForkServer:
    """Talks to the script below."""

    def __init__(self, folder: Path, environment: dict[str, str], *modules: str) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        self._children: list[Child] = []
        self._count = 0

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(
        self,
        words: list[str],
        folder: Path,
        environment: dict[str, str | None] | None = None,
        limits: dict[str, int] | None = None,
        cgroup: Path | None = None,
        signal_after: tuple[str, list[int]] | None = None,
    ) -> Child:
        """A child that runs ``vb words``, or the script that the first word names, in ``folder``.

        Args:
            environment: added to the server's; None removes a variable.
            limits: by name, as RLIMIT_FSIZE for the largest file that it may write.
            cgroup: what it joins.
            signal_after: ("module:function" or "module:Class.method", signals): it sends itself the signals when that
                has returned for the first time. A signal from here would come too late on a busy machine.
        """
        self._count += 1
        stdout, stderr = (self._folder / f"{self._count}.{name}" for name in ("out", "err"))
        stdout.touch()  # which may be read before the child, on a busy machine, has opened it
        request = {
            "words": words,
            "folder": str(folder),
            "environment": environment or {},
            "limits": limits or {},
            "cgroup": None if cgroup is None else str(cgroup),
            "signal_after": signal_after,
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        child = Child(self._ask, self._ask(request), stdout, stderr)
        self._children.append(child)
        return child

    def end_children(self) -> None:
        """A test that failed may have left some running."""
        for child in self._children:
            child.signal(signal.SIGKILL)
            child.wait()
        self._children.clear()

    def close(self) -> None:
        self.end_children()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait() == 0
        self._process.stdout.close()


def _signal_after(name: str, numbers: list[int]) -> None:
    module, _, path = name.partition(":")
    *owners, function = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    called = getattr(owner, function)

    def call_then_signal(*args: Any, **kwargs: Any) -> Any:
        found = called(*args, **kwargs)
        setattr(owner, function, called)
        for number in numbers:
            os.kill(os.getpid(), number)
        return found

    setattr(owner, function, call_then_signal)


def _child(request: dict[str, Any]) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    os.chdir(request["folder"])
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for name, value in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if request["cgroup"] is not None:
        Path(request["cgroup"], "cgroup.procs").write_text(f"{os.getpid()}\n")
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


def _keep_rates(file: Path) -> None:
    """The first child that asks how fast this CPU is measures it, for half a second, and the others are told."""
    import vblackwell.offload.measure
    import vblackwell.train.auto

    measure = vblackwell.offload.measure.cpu_rates

    def kept_rates() -> Any:
        if not file.exists():
            written = file.with_suffix(f".{os.getpid()}")
            written.write_bytes(pickle.dumps(measure()))
            written.replace(file)
        return pickle.loads(file.read_bytes())

    vblackwell.offload.measure.cpu_rates = vblackwell.train.auto.cpu_rates = kept_rates


def _serve() -> None:
    # What is imported stays: no collection need look through it, now or in a child, which would copy all its pages.
    gc.disable()
    # No torch operation may run before the fork: its threads would not survive it.
    import jsonargparse  # noqa: F401
    import peft  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo  # noqa: F401  (torch.optim does, at its first use)
    import torch.utils.flop_counter  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import vblackwell.cli
    import vblackwell.generate.command
    import vblackwell.memory.cache.stack
    import vblackwell.planner.estimate.command
    import vblackwell.planner.several_gpus
    import vblackwell.tools.what_fits
    import vblackwell.train.plan
    import vblackwell.train.run  # noqa: F401

    for name in ("numpy.ma", *sys.argv[1:]):
        importlib.import_module(name)
    # A thousand regular expressions, and the sources that flags' help is read from: kept once they were needed.
    get_checkpoint_conversion_mapping("llama")
    for command in ("train", "estimate"):
        vblackwell.cli.make_parser(command)
    _keep_rates(Path("rates").resolve())
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _child(request)
        print(answer, flush=True)
    os._exit(0)  # nothing is left to write, and to free a million objects takes half a second


if __name__ == "__main__":
    _serve()
