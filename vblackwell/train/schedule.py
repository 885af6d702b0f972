"""Linear warm-up, then half a cosine down to a floor: a pure function of the step, so that resuming needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Learning rates of a run.

    Attributes:
        peak: the rate after the warm-up.
        floor: the rate of the last step.
        warmup_steps: steps that rise to the peak; the first of them is already above zero.
        total_steps: steps of the whole run.
    """

    peak: float
    floor: float
    warmup_steps: int
    total_steps: int

    def learning_rate(self, step: int) -> float:
        """The rate of step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        falling_steps = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / falling_steps)
        return self.floor + (self.peak - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def default_warmup_steps(total_steps: int) -> int:
    """A twentieth of the run, at most 1000."""
    return min(1000, total_steps // 20)
