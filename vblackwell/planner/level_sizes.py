"""The levels of a stack for a training run: sizes from its estimate, and beside them what a rule of thumb says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.planner.memory_estimate import MemoryEstimate, room
from vblackwell.units import MiB, format_bytes

ABOVE = 1.02  # of what lies below level 0: places are multiples of pages
THUMB_FIRST, THUMB_NEXT = 1.5, 4


@dataclass(frozen=True)
class _Sizes:
    device: str
    num_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {"capacity_mb": self.num_bytes / MiB, "device": self.device}


class StackConfig(dict[str, Any]):
    """The dict that `VGPUStack` takes, ``{'levels': [...]}``, with why.

    Attributes:
        hit_rate: share of the accesses to weights that level 0 serves, if they go forth and back and the farthest next use makes room
            (``policy='next_use'``): the share of the weights that it holds.
        rule_of_thumb: the same kind of dict by the rule that level 0 should hold 1.5 times a batch's parameters and each next level 4 times
            the one above.
        lines: for people.
    """

    hit_rate: float
    rule_of_thumb: dict[str, Any]
    lines: tuple[str, ...]


def stack_config(
    estimate: MemoryEstimate, gpus: Sequence[float], target_hit_rate: float = 0.9, host_memory_mb: float | None = None
) -> StackConfig:
    """Levels for the weights, gradients and optimizer states of ``estimate``.

    Level 0 is the first GPU without the CUDA context, P99's margin and the step's activations, logits and workspace: enough for all
    states if they fit there, else what holds ``target_hit_rate`` of the weights. Then come the other GPUs, RAM, and a disk for the rest.

    Args:
        gpus: MiB of each GPU.
        target_hit_rate: above 0, at most 1.
        host_memory_mb: MiB of RAM; None: as much as is needed.

    Raises:
        ConfigurationError: no GPU, a size or a rate out of range.
        InsufficientMemory: the step alone is more than the first GPU.
    """
    _check(gpus, target_hit_rate, host_memory_mb)
    step = estimate.activations + estimate.logits_and_loss + estimate.workspace
    free = room(int(gpus[0] * MiB), estimate.context) - step
    if free < MiB:
        raise InsufficientMemory(
            f"a GPU of {gpus[0]:g} MiB has no room for a level beside the CUDA context, {format_bytes(estimate.context)}, and the step's "
            f"activations, logits and workspace, {format_bytes(step)}: give a smaller batch",
            needed_bytes=estimate.context + step + MiB,
            available_bytes=int(gpus[0] * MiB),
        )
    weights, state = max(1, estimate.weights), estimate.state_bytes
    wanted = state if state <= free else math.ceil(weights * target_hit_rate)
    first = min(free, max(wanted, MiB))
    levels = [_Sizes("cuda:0", first)]
    left = state - first
    for number, size in enumerate(gpus[1:], start=1):
        other = max(0, room(int(size * MiB), estimate.context))
        if left > 0 and other:
            levels.append(_Sizes(f"cuda:{number}", other))
            left -= other
    if left > 0:
        below = math.ceil(left * ABOVE)
        host = below if host_memory_mb is None else min(below, int(host_memory_mb * MiB))
        levels.append(_Sizes("cpu", max(host, MiB)))
        if below > host:
            levels.append(_Sizes("ssd", max(below - host, MiB)))
    made = StackConfig(levels=[level.as_dict() for level in levels])
    made.hit_rate = min(1.0, first / weights)
    made.rule_of_thumb = _by_thumb(weights)
    made.lines = tuple(_lines(estimate, made, levels, target_hit_rate, free))
    return made


def _check(gpus: Sequence[float], target_hit_rate: float, host_memory_mb: float | None) -> None:
    if not gpus:
        raise ConfigurationError("gpus is empty: give the memory of each GPU in MiB, e.g. [8 * 1024]")
    for size in (*gpus, *([] if host_memory_mb is None else [host_memory_mb])):
        if not (math.isfinite(size) and size > 0):
            raise ConfigurationError(f"{size} MiB of memory: give a number above 0")
    if not 0 < target_hit_rate <= 1:
        raise ConfigurationError(f"target_hit_rate is {target_hit_rate}: give a share above 0 and of at most 1")


def _by_thumb(weights: int) -> dict[str, Any]:
    sizes = [THUMB_FIRST * weights * THUMB_NEXT**level for level in range(3)]
    return {
        "levels": [
            _Sizes(device, int(size)).as_dict() for device, size in zip(("cuda:0", "cpu", "ssd"), sizes, strict=True)
        ]
    }


def _lines(
    estimate: MemoryEstimate, made: StackConfig, levels: Sequence[_Sizes], target: float, free: int
) -> list[str]:
    found = [f"{level.device}: {format_bytes(level.num_bytes)}" for level in levels]
    found.append(f"level 0 holds {made.hit_rate:.0%} of the weights, and serves so many of the accesses to them")
    if made.hit_rate < target:
        more = math.ceil(estimate.weights * target) - free
        found.append(f"{target:.0%} would need {format_bytes(more)} more of the first GPU")
    thumb = ", ".join(
        f"{each['device']} {format_bytes(int(each['capacity_mb'] * MiB))}" for each in made.rule_of_thumb["levels"]
    )
    found.append(f"by the rule of thumb (1.5 times the weights, then 4 times the level above): {thumb}")
    return found
