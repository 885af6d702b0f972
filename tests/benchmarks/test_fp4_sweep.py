"""The sweep over plans of the FP4 kernels goes on where a plan hangs or ends its process: with workers that need no GPU."""

from __future__ import annotations

import importlib
import queue
import sys
from types import SimpleNamespace

import pytest

CELLS = [(1, 8, 8), (2, 8, 8), (3, 8, 8)]
FAMILIES = ["plain", "hangs", "hangs", "dies", "plain"]
# Plans of families that hang or die do so from two rows on; each answer names the plans that it has been through.
WORKER = f"""
import json, signal, sys
say = lambda **message: print(json.dumps(message), flush=True)
print("a warning of some library", flush=True)
say(ready=True)
for line in sys.stdin:
    job = json.loads(line)
    done = []
    for place, family in enumerate({FAMILIES!r}):
        if family in job["skip"]:
            continue
        say(phase="check", plan=place)
        if job["cell"][0] >= 2 and family == "hangs":
            say(phase="hang", plan=place)
            signal.pause()
        if job["cell"][0] >= 2 and family == "dies":
            sys.exit(1)
        done.append(place)
    say(rows=done)
"""


@pytest.fixture
def sweep():
    return importlib.import_module("benchmarks.tune.fp4_sweep")


class Patient(queue.Queue):
    """Waits for a worker however slow the machine is, and not at all once it hangs."""

    hangs = False

    def get(self, block=True, timeout=None):
        if self.hangs:
            raise queue.Empty
        said = super().get()
        self.hangs = said is not None and said.get("phase") == "hang"
        return said


def test_a_plan_that_hangs_or_dies_costs_its_family(sweep, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "queue", SimpleNamespace(Queue=Patient, Empty=queue.Empty))
    answers = {}
    lost = sweep.drive(
        CELLS,
        [sys.executable, "-S", "-c", WORKER],
        lambda cell: FAMILIES,
        lambda cell, answer: answers.update({cell: answer["rows"]}),
    )
    assert answers == {CELLS[0]: [0, 1, 2, 3, 4], CELLS[1]: [0, 4], CELLS[2]: [0, 4]}
    assert lost == {"hangs": (CELLS[1], 1, "hang"), "dies": (CELLS[1], 3, "check")}
    said = capsys.readouterr().out
    assert "a warning of some library" in said and said.count("GIVEN UP") == 2


def test_a_worker_that_never_works_costs_the_cell(sweep):
    taken = []
    lost = sweep.drive(
        CELLS[:2],
        [sys.executable, "-S", "-c", "raise SystemExit(3)"],
        lambda cell: FAMILIES,
        lambda *answer: taken.append(answer),
    )
    assert not taken and set(lost) == {"1x8x8", "2x8x8"} and lost["1x8x8"][1:] == (None, "starting")


def test_no_cell_starts_after_its_time(sweep, capsys):
    taken = []
    sweep.drive(
        CELLS,
        [sys.executable, "-S", "-c", WORKER],
        lambda cell: FAMILIES,
        lambda *answer: taken.append(answer),
        seconds=-1,
    )
    assert not taken and capsys.readouterr().out.count("not run") == 3
