"""docs/reliability.md: what was tried, how often, and what held; written by the command that ran it."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from tests.faults.campaign import Outcome

HEAD = """\
# Reliability

What happens to a run when something breaks: a process is killed, a disk fills up or fails, bits flip, memory runs out,
a signal comes, a folder is damaged or made to do harm. All up to the kernels was written by the command that tries it,
on real processes with real faults; nothing in it was typed.

The run is a miniature: a decoder of 50 thousand parameters that streams through all three levels, six steps, three
checkpoints. In every try one fault is put at one place, and the exit code and the words are looked at. A run is then
resumed without the fault. **The same bits** means: the weights of the end are equal to those of an undisturbed run in
every bit, and so are each step's loss, learning rate, gradient norm and validation loss; no step is missing or told
twice; nothing half-written is left. **One line** means: `vb: error: ...` alone on standard error, and no traceback.

Faults at calls come from a library that is preloaded (`tests/faults/shim.c`): it counts the calls that reach a disk,
and kills, fails, shortens or signals at a given one. Small disks and memory limits are real file systems and cgroups.
"""

KERNELS = "\n## Kernels under compute-sanitizer\n"  # from here on the page is kept as it is


def rewrite(path: Path, page: str) -> None:
    """Replaces what was tried in the file ``path`` by ``page``, and keeps what the file says of kernels."""
    kept = path.read_text(encoding="utf-8").partition(KERNELS) if path.exists() else ("", "", "")
    path.write_text(page + "".join(kept[1:]), encoding="utf-8")


def write_page(outcomes: Sequence[Outcome], seed: int, workers: int, seconds: float) -> str:
    """The page."""
    tries, held = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("tries", "held"))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    facts = {
        "Command": f"`python -m tests.faults {shlex.join(sys.argv[1:])}` (`make faults`)",
        "Date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "Commit": _commit(),
        "Machine": f"{os.cpu_count()} cores, {gpu}, {platform.system()} {platform.release().split('-')[0]}",
        "Load at the end": f"{os.getloadavg()[0]:.0f}",
        "Versions": f"vblackwell {version('vblackwell')}, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        "Seed": str(seed),
        "Time": f"{seconds:.0f} s with {workers} workers",
        "Tries": f"{tries}, of which {held} held and {tries - held} did not",
    }
    lines = [HEAD, *_table(("", ""), facts.items()), "", "## Cases", ""]
    rows = [
        (
            f"`{outcome.case.name}`",
            outcome.case.fault,
            outcome.case.holds,
            f"not tried: {outcome.missing}" if outcome.missing else f"{outcome.held} of {outcome.tries}",
        )
        for outcome in outcomes
    ]
    lines += _table(("case", "fault", "what must hold", "held"), rows)
    broken = [(outcome, label, said) for outcome in outcomes for label, said in outcome.broken]
    if broken:
        lines += ["", "## What did not hold", ""]
        lines += [f"- `{outcome.case.name}`: {label}: {_shortly(said)}" for outcome, label, said in broken]
    lines += [
        "",
        "`python -m tests.faults --only NAME` tries one case alone, `--tries N` a few of each; the suite draws a "
        "sample.",
    ]
    return "\n".join(lines) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells]


def _shortly(said: str) -> str:
    """What broke, on a line, without the names of temporary folders."""
    words = " ".join(said.split())
    return words if len(words) <= 200 else f"{words[:60]} ... {words[-140:]}"


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
