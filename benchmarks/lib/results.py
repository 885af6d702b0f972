"""What all benchmarks share of their results: the machine, lines with the time or with floor and aim, the rows of a
CSV file.
"""

from __future__ import annotations

import csv
import os
import platform
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib.child_process import REPO
from vblackwell.machine.facts import list_gpus

RESULTS = REPO / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "transformers", "deepspeed")
WIDTH = 66
GB = 1e9
STARTED = time.monotonic()


def seconds_since_start() -> float:
    """Since the process imported this module."""
    return time.monotonic() - STARTED


def tell(*parts: str) -> None:
    """A line with the time, at once: a run that is cut short has told what it found."""
    print(f"[{seconds_since_start():6.1f} s] {': '.join(parts)}", flush=True)


def machine() -> dict[str, Any]:
    """What the numbers were measured on. Starts no CUDA here: what is measured needs the GPU to itself."""
    gpus = list_gpus()
    versions = dict.fromkeys(PACKAGES, "")
    versions |= {name: metadata.version(name) for name in PACKAGES if list(metadata.distributions(name=name))}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpus[0].name if gpus else "none",
        "driver": gpus[0].driver_version if gpus else "",
        "cpus": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        **versions,
        "command": " ".join(["python", *map(_relative, sys.argv)]),
    }


def told_machine() -> dict[str, Any]:
    """`machine`, printed."""
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items() if value), flush=True)
    return about


def _relative(argument: str) -> str:
    """Commands are kept without this machine's folders."""
    if argument.startswith(str(REPO)):
        return os.path.relpath(argument, REPO)
    return Path(argument).name if argument.startswith("/") else argument


def goal_header(what: str = "ratio") -> str:
    """Above `goal_line`s."""
    return f"{what:{WIDTH}}{'value':>9}{'floor':>8}{'aim':>8}"


def goal_line(
    words: str, value: float, floor: float | None = None, aim: float | None = None, *, less: bool = False
) -> str:
    """``words`` and ``value``, of which more (or ``less``) is better, and whether ``floor`` and ``aim`` are met where
    there are."""
    goals = "".join(f"{'' if goal is None else f'{goal:.3g}':>8}" for goal in (floor, aim))
    sign = -1 if less else 1
    missed = floor is not None and not sign * value >= sign * floor
    met = aim is not None and sign * value >= sign * aim
    said = "MISSED" if missed else "aim met" if met else "" if floor is None else "floor met"
    return f"{words:{WIDTH}}{value:9.3f}{goals}  {said}".rstrip()


def read_csv(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows of ``path``; none if there is no such file.

    Raises:
        SystemExit: a row has more values than there are columns.
    """
    if not path.exists():
        return [], []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows: list[dict[str, Any]] = []
        for row in reader:
            if None in row:
                raise SystemExit(
                    f"{path}, line {reader.line_num}: more values than the first line has names; mend it first"
                )
            rows.append(row)
        return list(reader.fieldnames or []), rows


def append_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add ``rows``; columns that the file does not have yet are added to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns, held = read_csv(path)
    columns = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
    fresh = path.with_suffix(".csv.tmp")
    with fresh.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(held + rows)
    fresh.replace(path)
