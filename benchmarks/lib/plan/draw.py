"""Which placements the planner is held against: drawn from all that are predicted to fit, along the axes that a plan decides on.

Micro-batches, checkpointing, where AdamW runs, where checkpoints wait: those of the planner's own `Space`. And how level 0 is divided: as
the planner does it, with half of the weights, and with what it keeps there for good given to loaded weights instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.lib.plan.report import Row
from vblackwell.planner.forecast import Forecast, share_on_host
from vblackwell.planner.placement import Choice, Lacking, Plan, Prediction, Space
from vblackwell.trace.work import phase_seconds

NEVER = 1e-15
Sized = tuple[Choice, Prediction]


def space_of(sequences: int, has_gpu: bool) -> Space:
    """What may be chosen for a step of so many sequences."""
    batches = ((sequences, 1), (sequences // 2, 2)) if sequences % 2 == 0 else ((sequences, 1),)
    checkpointing, activations = ((False, True), ("level0", "host")) if has_gpu else ((False,), ("level0",))
    return Space(batches, checkpointing, activations=activations)


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


def least_seconds(forecast: Forecast, choice: Choice) -> float:
    """Of a step: the GPU's operators alone, or the CPU's updates alone. Nothing of the host's time, which is an estimate."""
    rates = replace(forecast.machine.rates, issue_seconds=NEVER)
    work = forecast.trace(choice.checkpointing, choice.fp4, choice.batch_size).work
    compute = choice.accumulation_steps * sum(phase_seconds(work, rates, waits=not forecast.machine.has_gpu).values())
    model = forecast.model(choice.checkpointing, choice.fp4)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # Whole groups go home, maybe a little less than the share.
    at_home = 0.0 if choice.placement == "resident" else max(0.0, share_on_host(choice) - 0.1)
    return max(compute, at_home * trained / rates.cpu_adamw)
