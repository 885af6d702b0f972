"""What plans predicted and runs then measured, on this machine: a line of JSON a run, in the cache."""

import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vblackwell.machine.cache import cache_root
from vblackwell.units import columns

NUMBERS = {"gpu_bytes": "GPU or fast memory", "host_bytes": "RAM", "tokens_per_second": "tokens/s"}


def keep_prediction(machine: str, rates: str, compared: dict[str, Any]) -> None:
    """Add a run on ``machine`` (its GPU's name, or 'CPU') that was planned by ``rates``; ``compared``: a report's
    'plan', with 'predicted' and 'measured' of each of `NUMBERS`. A cache that cannot be written is no error."""
    line = {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": machine, "rates": rates} | compared
    with contextlib.suppress(OSError):
        cache_root().mkdir(parents=True, exist_ok=True)
        file = os.open(_path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")  # at once: runs may end at the same time
        finally:
            os.close(file)


def kept_predictions() -> list[dict[str, Any]]:
    """What `keep_prediction` added, oldest first; lines that are none are left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in _path().read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                read = json.loads(line)
                numbers = [float(read[name][of] or 0) for name in NUMBERS for of in ("predicted", "measured")]
                if read["machine"] and isinstance(read["rates"], str) and min(numbers) >= 0:
                    found.append(read)
    return found


def prediction_lines(kept: Iterable[dict[str, Any]]) -> list[str]:
    """For each machine and source of rates: runs, and by how much predictions were above what was measured: in the
    median, in the median of sizes, and at worst."""
    rows, groups = [("machine", "rates", "", "runs", "median", "median size", "worst")], dict[Any, list[Any]]()
    for each in kept:
        groups.setdefault((each["machine"], each["rates"]), []).append(each)
    for (machine, rates), runs in groups.items():
        for name, text in NUMBERS.items():
            pairs = [(run[name]["predicted"], run[name]["measured"]) for run in runs]
            errors = [said / was - 1 for said, was in pairs if was]
            if errors:
                typical, size = statistics.median(errors), statistics.median(map(abs, errors))
                worst = max(errors, key=abs)
                rows.append((machine, rates, text, str(len(errors)), f"{typical:+.1%}", f"{size:.1%}", f"{worst:+.1%}"))
    return columns(rows, right=range(3, 7)) if len(rows) > 1 else ["No run with a plan has ended here yet."]


def _path() -> Path:
    return cache_root() / "predictions.jsonl"
