"""Several runs of the package's own trainer, one after the other here, or some at a time, each in a process of its own.

A small model's step on a GPU is the time of launching its kernels, so runs beside each other take little longer than one. What a run
prints goes to a file beside its folder; a run that fails is reported by the last line of that file and stops no other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def train_all(flags: dict[str, dict[str, Any]], folder: Path, jobs: int) -> dict[str, str | None]:
    """Train every run of ``flags`` (by name: fields of `TrainConfig`) into ``folder / run_folder(name)``, ``jobs`` at a time.

    Returns:
        By name ``None``, or why it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if jobs == 1:
        return {name: _train(given | {"out": str(folder / run_folder(name))}, None) for name, given in flags.items()}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {
            name: pool.submit(_train, given | {"out": str(folder / run_folder(name))}, threads)
            for name, given in flags.items()
        }
        return {name: future.result() for name, future in futures.items()}


def run_folder(name: str) -> str:
    """The folder of the run ``name``."""
    return name.replace(" ", "-").replace(",", "")


def _train(flags: dict[str, Any], threads: int | None) -> str | None:
    import torch

    from vblackwell.train.run import train
    from vblackwell.train.sources import resolve

    if threads is not None:
        torch.set_num_threads(threads)
    log, began = Path(f"{flags['out']}.log"), time.perf_counter()
    with log.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            code = train(resolve(flags | {"resume": Path(flags["out"]).exists()}))
        except Exception:  # one run's failure is a line of the report, with its trace in the log
            traceback.print_exc()
            code = 1
    print(f"-- {Path(flags['out']).name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return None if code == 0 else f"exit code {code}: {last_line(log)}"


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"
