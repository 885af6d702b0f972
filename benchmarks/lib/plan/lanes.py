"""What the lanes did while a placement was measured: links and waits as the stack counts them, threads as the system does.

`vblackwell.offload.layout.lanes` predicts how long each lane works in a step. Beside that stand here seconds a step of
each direction of the link, of
the computing stream's waits for weights, and of the CPU time of the thread that runs the model, of autograd's, and of all others. Where the
model's two threads together take nearly a step, the step waits for the host. The same loop in Python before each (`loop_seconds`) tells
a machine that became slower from a placement that is.
"""

from __future__ import annotations

import collections
import os
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

LANES = ("up", "down", "stall", "main", "backward", "others")
CORE = "core"  # what `loop_seconds` said before
LOOPED, LOOPS = 40_000, 5
AUTOGRAD = "pt_autograd"  # how torch calls the threads of its backward
SAMPLE_SECONDS = 0.002


class Marks:
    """Moments between steps, on the computing stream or on the host where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Now, behind what is queued."""
        mark: Any = torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter()
        if self._cuda:
            mark.record()
        self._marks.append(mark)

    def __len__(self) -> int:
        return len(self._marks)

    def interval(self, index: int) -> float:
        """Seconds from mark ``index`` to the next, waiting until that has passed."""
        before, after = self._marks[index : index + 2]
        if not self._cuda:
            return after - before
        after.synchronize()
        return before.elapsed_time(after) / 1e3


class Lanes:
    """Counts from here on.

    Args:
        stack: whose links and stalls count.
    """

    def __init__(self, stack: Any) -> None:
        self._stack = stack
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        stats = self._stack.get_stats()
        found: dict[str, float] = dict.fromkeys(LANES, 0.0)
        first = stats["levels"][0]["device"]
        for link in stats["links"]:
            if link["source"] != link["destination"]:
                found["down" if link["source"] == first else "up"] += link["seconds"]
        found["stall"] = stats["stall_seconds"]
        for role, seconds in thread_seconds().items():
            found[role] += seconds
        return found

    def per_step(self, steps: int) -> dict[str, float]:
        """Seconds of each of `LANES` a step, of ``steps`` since the beginning."""
        now = self._now()
        return {lane: max(0.0, now[lane] - self._before[lane]) / steps for lane in LANES}


def thread_seconds(tasks: Path = Path("/proc/self/task")) -> dict[str, float]:
    """CPU seconds so far of the main thread, of autograd's and of all others; nothing where the system does not tell."""
    found: dict[str, float] = {}
    for task in tasks.glob("*"):
        try:
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            name = (task / "comm").read_text()
        except (OSError, ValueError, IndexError):  # it has just ended, or this system counts nothing
            continue
        role = "main" if task.name == str(os.getpid()) else "backward" if name.startswith(AUTOGRAD) else "others"
        found[role] = found.get(role, 0.0) + seconds
    return found


def loop_seconds() -> float:
    """Of the same loop in Python: how fast a core is just now, whatever the runtime does; the median of `LOOPS`."""
    found = []
    for _ in range(LOOPS):
        began = time.perf_counter()
        sum(number & 7 for number in range(LOOPED))
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def table_head() -> str:
    """Of `table_line`."""
    return "".join(f"{name:>9}" for name in (*LANES, CORE, "| gpu", "up", "down", "cpu"))


def table_line(measured: Mapping[str, float], busy: Mapping[str, float], step_seconds: float) -> str:
    """Milliseconds a step: measured, then simulated (shares ``busy`` of a predicted step)."""
    simulated = [f"{1e3 * busy.get(lane, 0.0) * step_seconds:>9.0f}" for lane in ("gpu", "up", "down", "cpu")]
    return "".join(f"{1e3 * measured.get(lane, 0.0):>9.0f}" for lane in (*LANES, CORE)) + "".join(simulated)


class Sampler:
    """Where Python is, every other millisecond: the innermost lines of this package by thread."""

    def __init__(self) -> None:
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        main, own = threading.main_thread().ident, threading.get_ident()
        while not self._end.wait(SAMPLE_SECONDS):
            names = {each.ident: each.name for each in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != own:
                    role = "main" if ident == main else names.get(ident, "backward")
                    role = "backward" if role.startswith("Dummy") else role  # a thread that Python did not start
                    self.counts[role][_where(frame)] += 1

    def lines(self, most: int = 8) -> list[str]:
        """The places where each thread was most often, with their shares of its samples."""
        found = []
        for role, counts in self.counts.items():
            total = sum(counts.values())
            found.append(f"  {role}: {total} samples")
            found += [f"    {count / total:>5.1%} {place}" for place, count in counts.most_common(most)]
        return found


def _where(frame: Any) -> str:
    """The innermost two lines of ours, and what they call."""
    inner, ours = f"{frame.f_code.co_name}", []
    while frame is not None and len(ours) < 2:
        path = frame.f_code.co_filename
        if "vblackwell" in path or "benchmarks" in path:
            ours.append(f"{Path(path).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join([inner, *ours])
