"""The learning rate and the loss scale of a step.

The rate rises linearly and then falls by half a cosine down to a floor: a pure function of the step, so that resuming
needs no state. The scale is for fp16: as large as the gradients bear, halved when they overflow. torch's `GradScaler`
reads `p.grad`, whose values have left level 0 while a model is offloaded; here the optimizer divides by the scale and
says whether the gradients were finite, and `LossScaler` only decides the next scale. Powers of two only, so that
scaling and unscaling are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MIN_SCALE = 1.0
MAX_SCALE = 2.0**24


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


class LossScaler:
    """The scale of the next step.

    Args:
        initial: first scale.
        growth_interval: finite steps in a row after which the scale doubles.
    """

    def __init__(self, initial: float = 2.0**16, growth_interval: int = 200) -> None:
        self.scale = initial
        self.growth_interval = growth_interval
        self._finite_steps = 0

    def update(self, *, overflowed: bool) -> None:
        """Record how the step went."""
        if overflowed:
            self.scale = max(MIN_SCALE, self.scale / 2)
            self._finite_steps = 0
            return
        self._finite_steps += 1
        if self._finite_steps >= self.growth_interval:
            self.scale = min(MAX_SCALE, self.scale * 2)
            self._finite_steps = 0

    @property
    def exhausted(self) -> bool:
        """Whether overflow can no longer be blamed on the scale."""
        return self.scale <= MIN_SCALE

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_interval": self.growth_interval, "finite_steps": self._finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.growth_interval = int(state["growth_interval"])
        self._finite_steps = int(state["finite_steps"])
