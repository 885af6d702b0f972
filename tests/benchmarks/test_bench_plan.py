"""The planner's benchmark: what it makes of measurements.
(What runs is tested where the planner and the engine are.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import bench_plan
from vblackwell.machine.rates import Rates
from vblackwell.planner.placement import Choice, Lacking, Prediction


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
    lines = bench_plan.report(rows)
    assert verdict in lines[-1]
    assert "more reserved than P99: 1" in lines[-3] and "1 not measured (INCOMPLETE)" in lines[-2]
    assert any("failed: " in line and "out of memory" in line for line in lines)


def test_without_others_there_is_no_verdict():
    assert bench_plan.report([row(1.0, is_plan=True)])[-1] == "nothing to compare"


def test_the_command_line():
    options = bench_plan.parse(["--device", "cpu", "--shape", "tiny"])
    assert (options.placements, options.limit, options.sequences) == (30, 180.0, 8)


def test_a_placement_that_fails_in_a_step_leaves_the_stack_to_the_next(monkeypatch):
    rates = Rates(1e11, 1e11, 1e10, 5e9, 5e9, 3e9, 3e9, 1e8)
    monkeypatch.setattr(bench_plan, "cpu_rates", lambda: rates)
    small = bench_plan.Shape(32, 64, 2, 2, 64)
    monkeypatch.setitem(bench_plan.SHAPES, "tiny", small)
    bench = bench_plan.Bench(
        bench_plan.parse(["--device", "cpu", "--shape", "tiny", "--seq", "8", "--sequences", "2", "--cap", "1MiB"])
    )
    step, calls = bench_plan.VGPUAdamW.step, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return step(*args, **kwargs)

    monkeypatch.setattr(bench_plan.VGPUAdamW, "step", failing)
    rows = [row(None) for _ in range(2)]
    for each in rows:
        each.choice = Choice("streamed", 2, 1, False, level0_bytes=1 << 20, update="host")
    bench_plan.measure_all(bench, rows)  # the first call of all, which compiles, is the one that fails
    bench.stack.close()
    assert [each.error for each in rows] == ["", ""] and all(each.step_seconds for each in rows)


def test_runs_in_turns_decide_where_there_are_some():
    rows = [row(1.0, is_plan=True), row(0.9), row(0.95)]
    rows[0].again = [1.3]
    assert "+11.1%" in bench_plan.report(rows)[-1]  # stopped before any other's turn: by what was measured first
    rows[0].again, rows[1].again = [1.0, 1.02], [1.0, 1.0]
    assert "+1.0%" in bench_plan.report(rows)[-1]


def test_what_is_left_out_says_why():
    rows = [row(1.0, is_plan=True), *(row(2.0 + i, predicted=1.8) for i in range(4)), row(None, predicted=1.9)]
    for each in rows[1:]:
        each.choice = Choice("streamed", 4, 2, True)
    why = bench_plan.why_left_out
    assert why(rows[5], rows, 0.0, 1.0) == "left out: 4 with 2 micro-batches took at least 2.000 s"
    assert why(rows[5], rows[:4], 0.0, 1.0) == "" == why(rows[0], rows, 9.0, 1.0)
    assert why(rows[5], [], 1.3, 1.0) == "left out: at least 1.300 s by arithmetic alone"
    far = row(None, predicted=2.1)
    assert why(far, [*rows[:1], far], 0.0, 1.0) == "left out: predicted to take 2.1 times as long as the plan"
    rows[5].error = why(rows[5], rows, 0.0, 1.0)
    assert "5 placements measured, 1 left out as slower, 0 not measured" in bench_plan.report(rows)
    stopped = [*rows, row(None)]  # before its turn came
    assert "5 placements measured, 1 left out as slower, 1 not measured (INCOMPLETE)" in bench_plan.report(stopped)


def test_the_last_rounds_have_their_time():
    rows = [row(1.0, is_plan=True, setup_seconds=2.0), *(row(1.0 + i, setup_seconds=1.0) for i in range(4)), row(None)]
    assert [each.step_seconds for each in bench_plan.finalists(rows)] == [1.0, 1.0, 2.0]
    steps = bench_plan.WARM + bench_plan.FINAL + 1
    assert bench_plan.last_rounds_seconds(rows) == 2 * 3 * (1.0 + 2.0 * steps)  # of the slowest of them
    assert bench_plan.last_rounds_seconds(rows[1:]) == 0.0 and bench_plan.finalists(rows[:1]) == []


def test_placements_are_drawn_once_each_and_along_every_axis():
    """Halved weights and no groups on level 0 are separate placements; the plan's is the first and comes once."""
    kept = Choice("streamed", 8, 1, True, level0_bytes=9, weight_bytes=4, resident_bytes=2)

    class Oracle:
        def predict(self, choice: Choice) -> Any:
            sizes = (
                {}
                if choice.level0_bytes or choice.placement == "resident"
                else {"level0_bytes": 9, "weight_bytes": 4, "resident_bytes": 2}
            )
            sized = replace(choice, **sizes)
            return Lacking("RAM") if choice.update == "host" else (sized, Prediction(80, 100, 0, 0, 1.0, 1000))

    space = bench_plan.space_of(8, True)
    plan: Any = bench_plan.Row(kept, Prediction(80, 100, 0, 0, 1.0, 1000))
    rows = bench_plan.draw(space, Oracle(), plan, 1000, 0)  # pyright: ignore[reportArgumentType]
    choices = [each.choice for each in rows]
    assert choices[0] == kept and rows[0].is_plan and len(set(choices)) == len(choices)
    assert {(each.weight_bytes, each.resident_bytes) for each in choices if each.placement == "streamed"} == {
        (4, 2),
        (2, 2),
        (6, 0),
    }
    # Ten shares, of which checkpoints in RAM need checkpointing: three places by two batches; resident, of either.
    assert len(choices) == 3 * 10 * 3 * 2 + 2 * 2
    assert choices[1:6] == [each.choice for each in bench_plan.draw(space, Oracle(), plan, 6, 0)][1:]  # pyright: ignore
