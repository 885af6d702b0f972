"""The table of cases, and `vb` as they call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import vblackwell as vb

PACKAGE = Path(vb.__file__).parents[1]
Results = Iterator[tuple[str, Any]]
Case = Callable[[Path], Results]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """A group of results that are computed in one process, in a separate folder."""
    CASES[function.__name__.replace("_", "-")] = function
    return function


def vb_command(folder: Path, *words: str) -> str:
    """What `vb` prints with ``words`` in ``folder``. Caches are next to it, shared by all cases of one start."""
    environment = os.environ | {
        "PYTHONPATH": str(PACKAGE),
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
        "COLUMNS": "120",
    }
    command = [sys.executable, "-m", "vblackwell", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"vb {' '.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {key: line[key] for key in ("step", "loss", "lr", "grad_norm", "val_loss") if key in line} for line in lines
    ]


def text_to_learn(folder: Path) -> Path:
    """A file of sentences, the same each time."""
    words = ("a", "model", "larger", "than", "memory", "streams", "layers", "through", "the", "fast", "level", "again")
    lines = [" ".join(words[(7 * i + 3 * j * j + i // 5) % len(words)] for j in range(12)) for i in range(400)]
    path = folder / "text.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
