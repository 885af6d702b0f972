"""Runs one system in a separate process, tells its progress, and comes back with a result whatever happens.

A crash, an out-of-memory kill or a time limit of one system is a row with its error; the others go on.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.child_process import run_child
from benchmarks.lib.offload.case import Case, Result

CHILD = Path(__file__).with_name("measure.py")


def run_system(case: Case, limit_seconds: float, tell: Callable[[str], None]) -> Result:
    """The result of ``case``, with what went wrong, if something did."""
    result: Result | None = None
    failed, steps = "", 0

    def hear(event: dict[str, Any]) -> None:
        nonlocal result, failed, steps
        kind = event["kind"]
        if kind == "result":
            result = Result(**event["result"])
        elif kind == "failed":
            failed = event["error"]
        elif kind == "step":
            steps = event["step"]
            norm = "" if event["norm"] is None else f", norm {event['norm']:.3f}"
            tell(f"step {steps}/{event['of']}: loss {event['loss']:.5f}{norm}, {event['since_start']:.1f} s")
        else:
            tell(event["text"])

    code = run_child(CHILD, case.to_json(), limit_seconds, hear, tell)
    if code == 0 and result is not None:
        return result
    if code is None:
        where = f"stopped after step {steps}" if steps else "not up"
        status, error = f"{where} in {limit_seconds:.0f} s", ""
    else:
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        status, error = "failed", failed or ended
    tell(f"{status} {error}".strip())
    if result is not None:  # measured, and failed afterwards: the numbers stand, and say so
        return replace(result, notes=[*result.notes, f"afterwards: {status} {error}"])
    return Result(case.system, status, error)
