"""The planner's benchmark: what it makes of measurements. (What runs is tested where the planner and the engine are.)"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_plan

from vblackwell.plan.placement import Choice, Prediction


def row(seconds: float | None, predicted: float = 1.0, reserved: int = 90, **more: Any) -> bench_plan.Row:
    choice = Choice("streamed", 8, 1, True, weight_bytes=1 << 30)
    return bench_plan.Row(choice, Prediction(80, 100, 0, 0, predicted, 1000), seconds, reserved, **more)


@pytest.mark.parametrize(
    ("own", "verdict"),
    [((1.0, 1.02), "+1.0% (floor 8%, aim 3%): aim met"), ((1.06, 1.06), "floor met"), ((1.2, 1.2), "FLOOR MISSED")],
)
def test_the_plan_is_judged_by_its_median_against_the_best(own, verdict):
    rows = [
        row(own[0], is_plan=True),
        row(1.0),
        row(1.5, reserved=101),
        row(None, error="out of memory"),
        row(own[1], is_plan=True),
    ]
    lines = bench_plan.report(SimpleNamespace(), rows)  # type: ignore[arg-type]
    assert verdict in lines[-1]
    assert "more reserved than P99: 1" in lines[-2] and any(
        "failed: " in line and "out of memory" in line for line in lines
    )


def test_without_others_there_is_no_verdict():
    assert bench_plan.report(SimpleNamespace(), [row(1.0, is_plan=True)])[-1] == "nothing to compare"  # type: ignore[arg-type]


def test_the_command_line():
    options = bench_plan.parse(["--device", "cpu", "--shape", "tiny"])
    assert (options.placements, options.limit, options.sequences) == (30, 140.0, 8)
