"""Dynamic loss scaling for fp16: as large as the gradients bear, halved when they overflow.

torch's `GradScaler` reads `p.grad`, whose values have left level 0 while a model is offloaded; here the optimizer divides by the scale and
says whether the gradients were finite, and this only decides the next scale. Powers of two only, so that scaling and
unscaling are exact.
"""

from __future__ import annotations

from typing import Any

LEAST = 1.0
MOST = 2.0**24


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
            self.scale = max(LEAST, self.scale / 2)
            self._finite_steps = 0
            return
        self._finite_steps += 1
        if self._finite_steps >= self.growth_interval:
            self.scale = min(MOST, self.scale * 2)
            self._finite_steps = 0

    @property
    def exhausted(self) -> bool:
        """Whether overflow can no longer be blamed on the scale."""
        return self.scale <= LEAST

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_interval": self.growth_interval, "finite_steps": self._finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.growth_interval = int(state["growth_interval"])
        self._finite_steps = int(state["finite_steps"])
