"""The process of one `vb` command, a fork of one that has imported what training imports; what the command prints goes
to a file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
os.environ.pop("OMP_NUM_THREADS", None)  # threads as a user has them; read when torch is imported

import transformers.models.auto.modeling_auto  # noqa: F401

import vblackwell.train.run  # noqa: F401
from benchmarks.lib.child_process import answer
from vblackwell.cli import main as vb


def main(argument: str) -> None:
    case = json.loads(argument)
    printed = os.open(case["printed"], os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    raise SystemExit(vb(case["words"]))


if __name__ == "__main__":
    answer(main)
