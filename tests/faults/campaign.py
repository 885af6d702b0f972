"""Runs the campaign: every try of every case, on several workers, and the page that tells of it."""

from __future__ import annotations

import queue
import shutil
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.case import Case, Try
from tests.faults.lab import Lab


@dataclass
class Outcome:
    """What became of a case: how many tries held, and what the others say."""

    case: Case
    missing: str | None = None
    held: int = 0
    broken: list[tuple[str, str]] = field(default_factory=list)

    @property
    def tries(self) -> int:
        return self.held + len(self.broken)


def attempt(lab: Lab, tried: Try) -> str | None:
    """Run one try in a fresh folder; what broke, or None."""
    place = lab.place()
    try:
        tried.run(place)
    except AssertionError as broken:
        return str(broken) or repr(broken)
    except Exception as unforeseen:  # of the try itself: it showed nothing
        return "".join(traceback.format_exception(unforeseen))
    finally:
        lab.server.end_children()
        shutil.rmtree(place.folder, ignore_errors=True)
    return None


def run_campaign(
    cases: Sequence[Case], folder: Path, seed: int, workers: int, count: int | None = None
) -> list[Outcome]:
    """Every try of ``cases``, or ``count`` of each, in ``folder``."""
    outcomes = [Outcome(case, case.missing()) for case in cases]
    labs = []
    for number in range(workers):
        own = folder / f"worker{number}"
        own.mkdir()
        labs.append(Lab(own, folder / "corpus.py"))
    waiting: queue.Queue[tuple[Outcome, Try]] = queue.Queue()
    noting = threading.Lock()

    def work(lab: Lab) -> None:
        while True:
            try:
                outcome, tried = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            broken = attempt(lab, tried)
            with noting:
                if broken is None:
                    outcome.held += 1
                else:
                    outcome.broken.append((tried.label, broken))
                    print(f"BROKEN {outcome.case.name}: {tried.label}: {broken}\n", flush=True)
                if time.monotonic() - began > 30:
                    print(f"{outcome.case.name}: {tried.label} took {time.monotonic() - began:.0f} s", flush=True)

    try:
        for outcome in outcomes:
            if outcome.missing is None:
                for tried in outcome.case.drawn(labs[0], seed, count):
                    waiting.put((outcome, tried))
        print(f"{waiting.qsize()} tries of {len(cases)} cases, seed {seed}, {workers} workers", flush=True)
        with ThreadPoolExecutor(workers) as pool:
            try:
                for done in [pool.submit(work, lab) for lab in labs]:
                    done.result()
            except BaseException:  # stopped: what is being tried still ends, with its mounts
                with suppress(queue.Empty):
                    while True:
                        waiting.get_nowait()
                raise
    finally:
        for lab in labs:
            lab.close()
    return outcomes
