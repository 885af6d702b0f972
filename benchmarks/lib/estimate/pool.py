"""Runs tasks in separate processes, several at a time, from a parent that has loaded everything and started no CUDA.

A child is a fork of the parent (no import to pay for) or, where CUDA does not start in a fork, a fresh interpreter. A
child that raises, is killed, or takes too long is a result with its error; the others go on. The GPU's bytes are shared
out by what is predicted.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from vblackwell.units import GiB

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """``function(**arguments)`` in a child; ``gpu_bytes`` of the pool's budget."""

    key: str
    function: Callable[..., dict[str, Any]]
    arguments: dict[str, Any]
    gpu_bytes: int = 0


@dataclass
class _Running:
    task: Task
    process: Any
    answers: Connection
    began: float = field(default_factory=time.monotonic)


def _child(task: Task, answers: Connection) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        found = task.function(**task.arguments)
    except BaseException as error:  # a case may fail in any way; all of them are a row
        last = traceback.extract_tb(error.__traceback__)[-1:]
        where = "".join(f" at {os.path.basename(each.filename)}:{each.lineno}" for each in last)
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"}
    answers.send(found)
    answers.close()
    os._exit(0)  # CUDA's and the allocator's farewell takes time and tells nothing


def cuda_in_a_fork() -> dict[str, Any]:
    """Whether CUDA starts here."""
    import torch

    torch.cuda.init()
    return {"capability": list(torch.cuda.get_device_capability()), "name": torch.cuda.get_device_name()}


def rates_here() -> dict[str, Any]:
    """The rates of this GPU and of its host, as ``vb doctor`` measures them."""
    import torch

    from vblackwell.offload.measure import as_rates, gpu_rates

    return asdict(as_rates(gpu_rates(torch.device("cuda", 0))))


class Pool:
    """``jobs`` children at a time on ``gpu_bytes`` of a GPU, until ``deadline`` (of time.monotonic)."""

    def __init__(
        self, jobs: int, deadline: float, case_seconds: float, gpu_bytes: int = 100 * GiB, start: str = "fork"
    ) -> None:
        self.jobs, self.deadline, self.case_seconds, self.gpu_bytes = jobs, deadline, case_seconds, gpu_bytes
        self.context = multiprocessing.get_context(start)

    def run(
        self, tasks: list[Task], tell: Tell = lambda text: None, done: dict[str, dict[str, Any]] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Answers by key, of tasks in their order as far as room allows; they go into ``done`` as they come."""
        waiting, running, done = list(tasks), [], {} if done is None else done
        most = len(done) + len(tasks)
        try:
            while waiting or running:
                if time.monotonic() > self.deadline:
                    for task in waiting:
                        done[task.key] = {"error": "not run: out of time"}
                    waiting = []
                self._start(waiting, running)
                wait([each.answers for each in running], timeout=0.5)
                for each in list(running):
                    answer = self._answer(each)
                    if answer is not None:
                        running.remove(each)
                        done[each.task.key] = answer
                        seconds = time.monotonic() - each.began
                        tell(f"[{len(done)}/{most}] {each.task.key}: {answer.get('error', 'ok')} ({seconds:.1f} s)")
        finally:
            for each in running:
                _end(each)
        return done

    def _start(self, waiting: list[Task], running: list[_Running]) -> None:
        taken = sum(each.task.gpu_bytes for each in running)
        for task in list(waiting):
            if len(running) >= self.jobs:
                return
            if running and taken + task.gpu_bytes > self.gpu_bytes:
                continue
            waiting.remove(task)
            ours, theirs = self.context.Pipe(duplex=False)
            process = self.context.Process(target=_child, args=(task, theirs), daemon=False)
            sys.stdout.flush()
            process.start()
            theirs.close()
            running.append(_Running(task, process, ours))
            taken += task.gpu_bytes

    def _answer(self, each: _Running) -> dict[str, Any] | None:
        """What it says, once it has said or cannot say anything any more."""
        if each.answers.poll():
            try:
                found = each.answers.recv()
            except EOFError:
                each.process.join(5)
                found = {"error": f"ended with code {each.process.exitcode}"}
        elif not each.process.is_alive():
            found = {"error": f"ended with code {each.process.exitcode}"}
        elif time.monotonic() > min(each.began + self.case_seconds, self.deadline + self.case_seconds / 2):
            found = {"error": f"stopped after {time.monotonic() - each.began:.0f} s"}
        else:
            return None
        _end(each)
        return found


def _end(each: _Running) -> None:
    each.process.join(0.2)
    if each.process.is_alive():
        each.process.kill()
    each.process.join()
    each.answers.close()
