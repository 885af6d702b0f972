"""Which placements the planner is compared with, what was measured and predicted, and how the plan did.

They are drawn from all that are predicted to fit, along the axes that a plan decides on: micro-batches, checkpointing,
where AdamW runs, where checkpoints wait, and how level 0 is divided: as the planner does it, with half of the weights,
and with what it keeps there for good given to loaded weights instead.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vblackwell.planner.forecast import Forecast
from vblackwell.planner.placement import Choice, Lacking, Plan, Prediction, Space
from vblackwell.trace.work import phase_seconds
from vblackwell.units import GiB, format_bytes

FLOOR, AIM = 0.08, 0.03
# Left out: arithmetic says more than this many times the best that was measured; or so many of its kind were measured,
# all this much slower; or this many times the plan is predicted: predictions were never off by that much.
CERTAINLY, ALIKE, ALIKE_SLOWER, FAR_SLOWER = 1.25, 4, 1.35, 2.0


@dataclass(frozen=True)
class Measured:
    """Seconds of each step, bytes reserved at the peak, seconds until the first step."""

    seconds: list[float]
    reserved: int
    setup_seconds: float

    @property
    def step_seconds(self) -> float:
        """The median."""
        return statistics.median(self.seconds)


@dataclass
class Row:
    """One placement, predicted and measured.

    ``error``: why it was not. ``again``: seconds of each step in the rounds at the end.
    """

    choice: Choice
    prediction: Prediction
    step_seconds: float | None = None
    reserved: int | None = None
    error: str = ""
    is_plan: bool = False
    setup_seconds: float = 0.0
    again: list[float] = field(default_factory=list)

    @property
    def left_out(self) -> bool:
        """Whether it was not run because it is certain, or nearly, to be slower."""
        return self.error.startswith("left out")

    def record(self) -> dict[str, Any]:
        """The row of a results file: what was chosen, predicted and measured."""
        predicted = {"predicted_seconds": self.prediction.step_seconds, "predicted_p99": self.prediction.gpu_p99}
        measured = {"step_seconds": self.step_seconds, "reserved": self.reserved, "setup_seconds": self.setup_seconds}
        told = {"again": " ".join(f"{each:.6g}" for each in self.again), "is_plan": self.is_plan, "error": self.error}
        return {**asdict(self.choice), **predicted, **measured, **told}


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
    if len(times) >= ALIKE and min(times) > ALIKE_SLOWER * best and row.prediction.step_seconds > told:
        return f"left out: {len(times)} with {count} micro-batches took at least {min(times):.3f} s"
    plan = next((each.prediction.step_seconds for each in rows if each.is_plan), float("inf"))
    slower = row.prediction.step_seconds / plan
    return f"left out: predicted to take {slower:.1f} times as long as the plan" if slower > FAR_SLOWER else ""


def report(rows: list[Row]) -> list[str]:
    """The table, fastest first, and the verdict."""
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
        f"predicted step time off by {statistics.median(errors):.1%} in the median, "
        f"{errors[int(0.9 * (len(errors) - 1))]:.1%} at P90, of "
        f"{len(measured)} (floor 12 % / 30 %); more reserved than P99: {over}"
    ]
    chosen, best = _seconds(own), min(_seconds([row]) for row in others)
    if own[0].again and any(row.again for row in others):  # runs in turns alone are compared
        chosen = statistics.median(own[0].again)
        best = min(statistics.median(row.again) for row in others if row.again)
        lines += [
            f"in turns: {'*' if row.is_plan else ' '} {statistics.median(row.again):.4f} s ({min(row.again):.4f} to "
            f"{max(row.again):.4f}, "
            f"{len(row.again)} steps; predicted {row.prediction.step_seconds:.4f}) {row.choice}"
            for row in measured
            if row.again
        ]
    best = min(best, chosen)
    slower = chosen / best - 1
    verdict = "aim met" if slower <= AIM else "floor met" if slower <= FLOOR else "FLOOR MISSED"
    left_out = sum(row.left_out for row in rows)
    missing = sum(row.step_seconds is None and not row.left_out for row in rows)
    lines.append(
        f"{len(measured)} placements measured, {left_out} left out as slower, {missing} not "
        f"measured{' (INCOMPLETE)' if missing else ''}"
    )
    count = len(measured) + left_out
    lines.append(
        f"the plan (*): {chosen:.4f} s a step, the best of {count} placements {best:.4f} s: {slower:+.1%} "
        f"(floor {FLOOR:.0%}, aim {AIM:.0%}): {verdict}"
    )
    return lines


def _seconds(rows: list[Row]) -> float:
    return statistics.median(row.step_seconds for row in rows if row.step_seconds is not None)


# -- what is compared --------------------------------------------------------------------------------------------------

NEVER = 1e-15
UPDATES: tuple[str | float, ...] = ("device", 0.1, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, "host")
Sized = tuple[Choice, Prediction]


def space_of(sequences: int, has_gpu: bool) -> Space:
    """What may be chosen for a step of so many sequences."""
    batches = ((sequences, 1), (sequences // 2, 2)) if sequences % 2 == 0 else ((sequences, 1),)
    checkpointing, activations = ((False, True), ("level0", "host")) if has_gpu else ((False,), ("level0",))
    return Space(batches, checkpointing, updates=UPDATES if has_gpu else ("host", "device"), activations=activations)


def draw(space: Space, forecast: Forecast, plan: Plan, count: int, seed: int) -> list[Row]:
    """The plan's row, and others that are predicted to fit, at random: ``count`` in all, or as many as there are."""
    found = [each for choice in space.choices() for each in _predicted(choice, forecast)]
    fitting = {choice: prediction for choice, prediction in found if choice != plan.choice}
    drawn = random.Random(seed).sample(list(fitting), min(count - 1, len(fitting)))
    return [Row(plan.choice, plan.prediction, is_plan=True), *(Row(choice, fitting[choice]) for choice in drawn)]


def _predicted(choice: Choice, forecast: Forecast) -> Iterator[Sized]:
    """``choice`` as the planner would divide level 0, and in other ways."""
    found = forecast.predict(choice)
    if isinstance(found, Lacking):
        return
    yield found
    sized = found[0]
    if sized.placement != "streamed":
        return
    others = [replace(sized, weight_bytes=sized.weight_bytes // 2)]
    if sized.resident_bytes:
        others.append(replace(sized, weight_bytes=sized.weight_bytes + sized.resident_bytes, resident_bytes=0))
    for other in others:
        found = forecast.predict(other)
        if not isinstance(found, Lacking):
            yield found


def min_seconds(forecast: Forecast, choice: Choice) -> float:
    """Of a step: the GPU's operators alone, or the CPU's updates alone. Nothing of the host's time, which is an
    estimate.
    """
    rates = replace(forecast.machine.rates, issue_seconds=NEVER)
    work = forecast.trace(choice.checkpointing, choice.batch_size).work
    compute = choice.accumulation_steps * sum(phase_seconds(work, rates, waits=not forecast.machine.has_gpu).values())
    model = forecast.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # Whole groups are updated on the host, maybe a little less than the share.
    on_host = 0.0 if choice.placement == "resident" else max(0.0, choice.host_share - 0.1)
    return max(compute, on_host * trained / rates.cpu_adamw)
