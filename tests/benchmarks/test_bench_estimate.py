"""The check of estimates: the same draw everywhere, children that fail are rows,
errors are those of the numbers given.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from dataclasses import asdict, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vblackwell.machine.gpus import find_gpu
from vblackwell.machine.rates import assumed_rates


@pytest.fixture
def part():
    def load(name: str) -> ModuleType:
        return importlib.import_module(f"benchmarks.lib.estimate.{name}")

    return load


def test_the_draw_is_fixed_and_covers_the_grid(part):
    cases = part("cases").draw(100)
    assert cases == part("cases").draw(100) != part("cases").draw(100, seed=1)
    assert len({replace(case, number=0) for case in cases}) == 100
    assert cases[:60] == part("cases").draw(60)
    for name, wanted in (("attention", 2), ("optimizer", 6), ("precision", 3), ("stack", 2), ("family", 10)):
        assert len({getattr(case, name) for case in cases}) == wanted
    assert part("cases").Case.from_dict(asdict(cases[3])) == cases[3]
    limits = part("cases").boundary_cases(cases, 12)
    assert len(set(limits)) == 12 and {case.card_bytes // 2**30 for case in limits} == {0, 8, 16, 24}
    assert sum(case.card_bytes == 24 * 2**30 for case in limits) == 2
    more = part("cases").boundary_cases(cases, 18)
    assert len(set(more)) == 18 and more[:12] == limits


def _answer(value: int) -> dict[str, Any]:
    return {"value": value, "pid": os.getpid()}


def _raise() -> dict[str, Any]:
    raise ValueError("no such thing")


def _die() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _sleep() -> dict[str, Any]:
    signal.pause()
    return {}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # children here touch no thread's lock
def test_children_that_fail_are_rows(part, monkeypatch):
    """By a clock on which the slow one has had its time when it alone has not answered."""
    pool, told = part("pool"), []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (2e4 if len(told) == 4 else 0))
    monkeypatch.setattr(pool, "time", clock)
    tasks = [pool.Task("slow", _sleep, {}), pool.Task("bad", _raise, {}), pool.Task("dead", _die, {})]
    tasks += [pool.Task(f"good {i}", _answer, {"value": i}, gpu_bytes=60) for i in range(3)]
    found = pool.Pool(3, time.monotonic() + 1e5, case_seconds=1e4, gpu_bytes=100).run(tasks, told.append)
    assert [found[f"good {i}"]["value"] for i in range(3)] == [0, 1, 2]
    assert len({each["pid"] for key, each in found.items() if key.startswith("good")} | {os.getpid()}) == 4
    assert found["bad"]["error"].startswith("ValueError: no such thing at test_bench_estimate.py:")
    assert "-9" in found["dead"]["error"] and found["slow"]["error"].startswith("stopped after 2")
    kept = {"before": {"value": 7}}
    assert (
        pool.Pool(1, clock.monotonic() + 1e5, 1e4).run([pool.Task("after", _answer, {"value": 8})], done=kept) is kept
    )
    assert [kept[key]["value"] for key in ("before", "after")] == [7, 8]
    late = pool.Pool(1, clock.monotonic() - 1, case_seconds=1.0).run([pool.Task("late", _answer, {"value": 1})])
    assert late == {"late": {"error": "not run: out of time"}}


def test_a_prediction_and_a_run_of_the_same_module(part):
    case = part("cases").Case(7, "mlp", (64, 2, 0), "adamw", "fp32", False, "eager", 8, 1)
    told = part("predict").predict(case, (9, 0), with_cap=True)
    parameters = 2 * (64 * 64 + 64) + 64 * 1000 + 1000
    assert told["parameters"] == parameters
    assert told["allocated"] <= told["smallest_cap"] <= told["reserved"]
    rates = assumed_rates(find_gpu("H200"))
    slow = part("predict").predict(case, (9, 0), measured=asdict(replace(rates, issue_seconds=1e-3)))
    assert (
        told["step_seconds"] == max(told["gpu_seconds"], told["host_seconds"])
        and slow["gpu_seconds"] == told["gpu_seconds"]
    )
    assert (
        slow["step_seconds"] == slow["host_seconds"] == pytest.approx(told["host_seconds"] * 1e-3 / rates.issue_seconds)
    )
    training = part("measure").Training(case, "cpu")
    training.two_steps()
    assert sum(p.numel() for p in training.model.parameters()) == parameters
    assert all(torch.isfinite(p).all() for p in training.model.parameters())


@pytest.mark.parametrize(("expected", "most"), [(7000, 2), (7300, 9), (6000, 9), (0, 9)])
def test_the_search_ends_next_to_the_boundary(part, expected, most):
    real, tried = 7001, []

    def runs(limit):
        tried.append(limit)
        return limit >= real

    low, high = part("measure").search(runs, 5000, 9000, 28, expected, [(7200, True)], lambda: False)
    assert low < real <= high and high - low <= 28 and len(tried) <= most
    tried.clear()
    assert part("measure").search(runs, 5000, 9000, 28, 0, [(6800, False)], lambda: True) == (6800, 9000) and not tried


def test_errors_and_claims(part):
    report = part("report")
    told = {
        "allocated": 90,
        "reserved": 110,
        "context": 10,
        "peak_p50": 120,
        "peak_p99": 130,
    }
    real = {"allocated": 100, "reserved": 100, "context": 20}
    rows = report.rows_of(
        {"0 mlp 1 fp32": told, "1 mlp 1 fp32": {"error": "no"}}, {"0 mlp 1 fp32": real, "1 mlp 1 fp32": real}
    )
    assert report.relative(rows[0], "predicted_allocated", "allocated") == pytest.approx(-0.1)
    assert rows[0]["device"] == 120 and rows[1]["error"] == "predicted: no"
    lines = report.summary_lines(rows)
    assert "10.00%" in lines[1] and "P99 below what was used: 0 (none)" in lines
    timed = rows[0] | {"step_seconds": 0.1, "predicted_step_seconds": 0.11, "gpu_seconds": 0.11, "host_seconds": 0.02}
    assert "+10.0%" in report.step_lines([*rows, timed])[1] and report.step_lines(rows) == []
    limits = {"boundary a": {"boundary": 100, "claim": 100, "claim_runs": True, "left_over": 0}}
    assert "says fits where it fails: 1" in report.boundary_lines({"a": told}, limits, 20)[-1]
    assert "says fits where it fails: 0" in report.boundary_lines({"a": told}, limits, 5)[-1]


def test_the_report_tells_how_many_boundaries_there_are_and_of_which_cards(part):
    told = {"context": 10, "case": {"card_bytes": 8 << 30}}
    limits = {
        "boundary a": {"boundary": 1000, "fails": 950, "claim": 1000, "claim_runs": True, "left_over": 0},
        "boundary b": {"error": "stopped after 40 s"},
    }
    lines = part("report").boundary_lines({"a": told, "b": told}, limits, 20, wanted=2)
    assert "searched to 5.0%" in lines[1] and "stopped" in lines[2]
    assert lines[-2] == "1 boundaries compared, 2 asked for; cards of 8 GiB among them; 1 TOO FEW"
    assert "TOO FEW" not in part("report").boundary_lines({"a": told}, limits, 20, wanted=1)[-2]


def test_a_case_without_an_answer_is_told_and_a_floor_that_nothing_measures_is_not_met(part):
    report = part("report")
    good = {
        "predicted_allocated": 100,
        "allocated": 101,
        "predicted_step_seconds": 1.0,
        "step_seconds": 2.0,
        "error": "",
    }
    told = report.verdict_lines(
        [good, {"error": "predicted: Untraceable: no"}, {"error": "measured: not run: out of time"}]
    )
    assert "3, of these 1 could not be predicted and 1 failed" in told[0] and "2 WITHOUT AN ANSWER" in told[0]
    assert told[1:] == [
        "allocated: floor met, of 1 cases",
        "reserved + context: NOT MEASURED",
        "step time: FLOOR MISSED, of 1 cases",
    ]


def test_planned_runs_are_drawn_of_every_kind(part):
    planned = part("planned")
    runs = planned.draw_runs(18, 5, on_gpu=True)
    assert runs == planned.draw_runs(18, 5, on_gpu=True) != planned.draw_runs(18, 6, on_gpu=True)
    assert {(run.flags, run.clipping) for run in runs} >= {
        (kind, name) for kind in planned.KINDS for name in planned.NORMS
    }
    assert len({run.name for run in runs}) == 18 and {run.cap_bytes >> 30 for run in runs} <= {8, 12, 16, 24}


def test_what_plans_promised_is_compared_with_reports(part):
    planned = part("planned")
    runs = planned.draw_runs(3, 5, on_gpu=True)
    tokens = runs[0].seq * runs[0].batch
    answer = {
        "gpu_bytes": {"predicted": 103, "measured": 100},
        "host_bytes": {"predicted": 50, "measured": 0},
        "tokens_per_second": {"predicted": tokens / 2, "measured": tokens / 4},
        "choice": "streamed", "clipped_share": 1.0, "again": False, "held": False, "seconds": 9.0,
    }  # fmt: skip
    rows = planned.planned_rows(runs, {runs[0].name: answer, runs[1].name: {"error": "exit code 2: no"}})
    assert [row["error"] for row in rows] == ["", "exit code 2: no", "not run"]
    assert (rows[0]["predicted_step"], rows[0]["step"]) == (2.0, 4.0)
    lines = planned.planned_lines(rows)
    assert "+3.0%       -  -50.0%   100%  streamed OVER THE CAP" in lines[1] and "no" in lines[2]
    said = "\n".join(lines)
    assert "reserved of the GPU, or of the arena" in said and "FLOOR MISSED" in said
    assert lines[-1] == "runs: 1 of 3; did not fit as planned: 1 (floor 0)"


@pytest.mark.slow
def test_a_planned_run_is_a_command_of_the_package(part, capsys):
    """Some seconds of imports, and a plan by rates that are measured first; with all threads, as a user has them, which
    is slow where other tests take every core: only a hang reaches the limit.
    """
    bench = importlib.import_module("benchmarks.bench_estimate")
    assert not bench.main(["--random", "2", "--seed", "3", "--device", "cpu", "--case-limit", "400"])
    said = capsys.readouterr().out
    assert "runs: 2 of 2; did not fit as planned: 0" in said and "streamed" in said
