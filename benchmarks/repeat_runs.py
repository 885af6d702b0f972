"""Starts one run again and again, and compares what the starts wrote: ``metrics.jsonl`` is equal, but for times.

    python benchmarks/repeat_runs.py                              twenty times `vb train` with its defaults
    python benchmarks/repeat_runs.py --busy 2 -- --max-steps 12   short ones, with two busy loops at the same time

Exits with 1 and names the first line that differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TIMES = ("tokens_per_second", "stall_seconds")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``, without times."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def first_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str | None:
    """The first line in which two runs differ, in words; None where they are equal."""
    for mine, other in zip(ours, theirs, strict=False):
        names = [name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)]
        if names:
            return f"step {mine['step']}: " + ", ".join(f"{n} {mine.get(n)} and {other.get(n)}" for n in sorted(names))
    return None if len(ours) == len(theirs) else f"{len(ours)} lines and {len(theirs)}"


def run(out: Path, flags: list[str]) -> list[dict[str, Any]]:
    """What `vb train` with ``flags`` writes to ``metrics.jsonl`` in ``out``, without times."""
    command = [sys.executable, "-m", "vblackwell", "train", "--out", str(out), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return lines_of(out / "metrics.jsonl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=20, help="how many times the run is started")
    parser.add_argument("--at-once", type=int, default=1, help="starts that run side by side")
    parser.add_argument("--busy", type=int, default=0, help="busy loops that run at the same time")
    parser.add_argument("flags", nargs="*", help="of `vb train`, after --")
    options = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
            starts = pool.map(lambda number: run(Path(folder, str(number)), options.flags), range(options.starts))
            first, odd = None, 0
            for number, found in enumerate(starts):
                first = found if first is None else first
                difference = first_difference(first, found)
                odd += difference is not None
                print(f"start {number + 1}: {difference or f'{len(found)} lines, equal'}", flush=True)
    finally:
        for process in busy:
            process.kill()
    print(f"{options.starts - odd} of {options.starts} starts wrote the same metrics")
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main())
