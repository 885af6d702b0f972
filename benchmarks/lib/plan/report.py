"""Placements beside each other: what was measured and predicted, what was left out and why, and how the plan did."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from benchmarks.lib.plan.lanes import table_head, table_line
from vblackwell.planner.placement import Choice, Prediction
from vblackwell.units import GiB, format_bytes

FLOOR, AIM = 0.08, 0.03
# Left out: arithmetic says more than this many times the best that was measured; or so many of its kind were measured, all this far behind;
# or this many times the plan is predicted: predictions were never off by that much.
CERTAINLY, ALIKE, ALIKE_BEHIND, FAR_BEHIND = 1.25, 4, 1.35, 2.0


@dataclass(frozen=True)
class Measured:
    """Seconds of each step, bytes reserved at the peak, what the lanes did in a step, seconds until the first, bytes reserved before."""

    seconds: list[float]
    reserved: int
    lanes: dict[str, float]
    setup_seconds: float
    left_behind: int

    @property
    def step_seconds(self) -> float:
        """The median."""
        return statistics.median(self.seconds)


@dataclass
class Row:
    """One placement: predicted and measured. ``error``: why it was not. ``again``: seconds of each step in the rounds at the end."""

    choice: Choice
    prediction: Prediction
    step_seconds: float | None = None
    reserved: int | None = None
    error: str = ""
    is_plan: bool = False
    lanes: dict[str, float] = field(default_factory=dict)
    setup_seconds: float = 0.0
    left_behind: int = 0
    again: list[float] = field(default_factory=list)

    @property
    def left_out(self) -> bool:
        """Whether it was not run because it is certain, or nearly, to be slower."""
        return self.error.startswith("left out")


def why_left_out(row: Row, rows: list[Row], least: float, best: float) -> str:
    """Why ``row`` is certain, or nearly so, to be slower than ``best`` seconds a step; empty where it is not."""
    if row.is_plan:
        return ""
    if least > CERTAINLY * best:
        return f"left out: at least {least:.3f} s by arithmetic alone"
    count = row.choice.accumulation_steps
    alike = [each for each in rows if each.step_seconds and each.choice.accumulation_steps == count]
    times = [each.step_seconds or 0.0 for each in alike]
    told = min((each.prediction.step_seconds for each in alike), default=0.0)
    if len(times) >= ALIKE and min(times) > ALIKE_BEHIND * best and row.prediction.step_seconds > told:
        return f"left out: {len(times)} with {count} micro-batches took at least {min(times):.3f} s"
    plan = next((each.prediction.step_seconds for each in rows if each.is_plan), float("inf"))
    behind = row.prediction.step_seconds / plan
    return f"left out: predicted to take {behind:.1f} times as long as the plan" if behind > FAR_BEHIND else ""


def report(rows: list[Row]) -> list[str]:
    """The table, fastest first, what the lanes did, and the verdict."""
    lines = [f"{'':2}{'measured':>10}{'predicted':>11}{'off':>7}{'reserved':>10}{'P99':>10}  placement"]
    measured = sorted((row for row in rows if row.step_seconds is not None), key=lambda row: row.step_seconds or 0.0)
    for row in measured:
        assert row.step_seconds is not None and row.reserved is not None
        off, over = row.prediction.step_seconds / row.step_seconds - 1, row.reserved > row.prediction.gpu_p99
        lines.append(
            f"{'*' if row.is_plan else '':2}{row.step_seconds:>9.4f}s{row.prediction.step_seconds:>10.4f}s{off:>+7.1%}"
            f"{row.reserved / GiB:>9.3f}G{row.prediction.gpu_p99 / GiB:>9.3f}G{' !' if over else '  '}{row.choice}"
            + (f", {format_bytes(row.choice.weight_bytes)} of weights" if row.choice.weight_bytes else "")
        )
    lines += [
        "ms a step, in the same order: measured, and behind the bar simulated",
        table_head() + "    setup s   left MB",
    ]
    lines += [
        table_line(row.lanes, row.prediction.busy, row.prediction.step_seconds)
        + f"{row.setup_seconds:>11.1f}{row.left_behind / 1e6:>10.0f}"
        for row in measured
    ]
    lines += [f"  {'' if row.left_out else 'failed: '}{row.choice}: {row.error}" for row in rows if row.error]
    return [*lines, *verdict_lines(rows)]


def verdict_lines(rows: list[Row]) -> list[str]:
    """How far predictions were off, and the plan's against the best."""
    measured = [row for row in rows if row.step_seconds is not None]
    own, others = ([row for row in measured if row.is_plan is mine] for mine in (True, False))
    if not own or not others:
        return ["nothing to compare"]
    errors = sorted(abs(row.prediction.step_seconds / (row.step_seconds or 1.0) - 1) for row in measured)
    over = sum((row.reserved or 0) > row.prediction.gpu_p99 for row in measured)
    lines = [
        f"predicted step time off by {statistics.median(errors):.1%} in the median, {errors[int(0.9 * (len(errors) - 1))]:.1%} at P90, of "
        f"{len(measured)} (floor 12 % / 30 %); more reserved than P99: {over}"
    ]
    chosen, best = _seconds(own), min(_seconds([row]) for row in others)
    if own[0].again and any(row.again for row in others):  # runs in turns alone are compared
        chosen = statistics.median(own[0].again)
        best = min(statistics.median(row.again) for row in others if row.again)
        lines += [
            f"in turns: {'*' if row.is_plan else ' '} {statistics.median(row.again):.4f} s ({min(row.again):.4f} to {max(row.again):.4f}, "
            f"{len(row.again)} steps; predicted {row.prediction.step_seconds:.4f}) {row.choice}"
            for row in measured if row.again
        ]  # fmt: skip
    best = min(best, chosen)
    verdict = (
        "aim met" if chosen <= best * (1 + AIM) else "floor met" if chosen <= best * (1 + FLOOR) else "FLOOR MISSED"
    )
    left_out = sum(row.left_out for row in rows)
    missing = sum(row.step_seconds is None and not row.left_out for row in rows)
    lines.append(
        f"{len(measured)} placements measured, {left_out} left out as slower, {missing} not measured{' (INCOMPLETE)' if missing else ''}"
    )
    count = len(measured) + left_out
    lines.append(
        f"the plan (*): {chosen:.4f} s a step, the best of {count} placements {best:.4f} s: {chosen / best - 1:+.1%} "
        f"(floor {FLOOR:.0%}, aim {AIM:.0%}): {verdict}"
    )
    return lines


def _seconds(rows: list[Row]) -> float:
    return statistics.median(row.step_seconds for row in rows if row.step_seconds is not None)
