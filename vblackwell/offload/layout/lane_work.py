"""What a streamed training step asks of the lanes that the offload runtime keeps busy, and how fast these are: values, seconds and bytes.

Lanes: *up* and *down*, the two directions of the GPU's link, *gpu*, *cpu*, which updates the groups that stay at home, and *disk*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vblackwell.machine.rates import ADDS_PER_UPDATE
from vblackwell.units import MiB

LANES: tuple[str, ...] = ("gpu", "up", "down", "cpu", "disk")


@dataclass(frozen=True)
class LaneRates:
    """Bytes a second of each direction alone and while both work; parameters a second of the CPU's AdamW beside copies.

    Attributes:
        gpu_bytes: of the GPU's memory. cpu_slows_link: share of the link's rates that is left while the CPU updates.
        disk_read, disk_write: of the disk, which does one thing at a time.
        adds_per_update: parameters whose gradients the CPU adds up in the time of one AdamW.
    """

    up: float
    down: float
    up_both: float
    down_both: float
    cpu: float
    gpu_bytes: float
    cpu_slows_link: float = 0.9
    disk_read: float = math.inf
    disk_write: float = math.inf
    adds_per_update: float = ADDS_PER_UPDATE


@dataclass(frozen=True)
class GroupWork:
    """What a layer group asks of the lanes.

    Attributes:
        parameters: elements that are trained. weight_bytes: of its compute weights.
        forward, backward: seconds of compute; backward with what it computes again.
        input_bytes: of its checkpoint's input, if that waits in host memory.
        at_home: the CPU updates it. deferred: its update on the GPU waits for the next forward.
        kept: it lives on level 0 with its states, so that nothing of it but gradients takes a journey.
        disk_read, disk_write: bytes of its states, and of its gradient, on the disk, read before and written behind its update.
        weights_on_disk: a load has to read them there first.
    """

    parameters: int
    weight_bytes: int
    forward: float
    backward: float
    input_bytes: int = 0
    at_home: bool = False
    deferred: bool = False
    kept: bool = False
    disk_read: int = 0
    disk_write: int = 0
    weights_on_disk: bool = False


@dataclass(frozen=True)
class LanePlan:
    """Groups in the order of the forward and the room on level 0.

    Attributes:
        weight_budget: bytes of loaded weights. ring_bytes: of states on their way.
        states_up, states_down: bytes a parameter that pass for an update on the GPU (bf16: remainder and moments up, and the new weight
            beside them down).
        gradient: bytes a parameter of a gradient.
        piece_bytes: states pass in pieces of about that size.
        micro_batches: forwards and backwards of a step, each with the seconds of its groups; gradients add up at home.
        clips: no update may begin before the norm of all gradients is known.
        gradients_home: gradients of groups that are updated behind their backward go home as well (the runtime's undo).
        disk_sets: groups whose states may be between disk and GPU at a time.
    """

    groups: tuple[GroupWork, ...]
    weight_budget: int
    ring_bytes: int
    states_up: float = 10
    states_down: float = 12
    gradient: float = 2
    piece_bytes: int = 144 * MiB
    micro_batches: int = 1
    clips: bool = False
    gradients_home: bool = False
    disk_sets: int = 3


def gradient_traffic(
    gradients: int, sums: int, micro_batches: int, is_wide: bool, norms: bool = False
) -> tuple[int, int]:
    """Bytes a step that are (read, written) where so many of the gradients, and of their fp32 sums, are on the disk.

    RAM is full before states spill, and gradients come after weights. Each micro-batch's gradient is written as it leaves. A wide one is
    itself the sum: the next is added to it and it is written again. Of narrower ones the first alone is read, and the sum is written with
    every later micro-batch and read behind each. All as the runtime was seen to do it (`tests/planner/test_forecast.py`).

    Args:
        is_wide: gradients are fp32. norms: one more pass takes norms at home.
    """
    several = micro_batches > 1
    again = norms * (sums if several and not is_wide else gradients)
    if is_wide:
        return micro_batches * gradients + again, (2 * micro_batches - 1) * gradients
    added = (micro_batches - 1) * sums
    return gradients + added + again, micro_batches * gradients + added


def with_disk_traffic(plan: LanePlan, read: int, written: int) -> LanePlan:
    """``plan`` with so many more bytes of its groups on their way from and to the disk, by the groups' parameters."""
    parameters = sum(group.parameters for group in plan.groups)
    if not read + written or not parameters:
        return plan

    def with_its_own(group: GroupWork) -> GroupWork:
        share = group.parameters / parameters
        return replace(
            group, disk_read=group.disk_read + round(read * share), disk_write=group.disk_write + round(written * share)
        )  # fmt: skip

    return replace(plan, groups=tuple(map(with_its_own, plan.groups)))


@dataclass(frozen=True)
class LaneTimes:
    """One step in the long run: seconds, bytes of both directions and of the disk, and the share of the time in which each lane worked."""

    step_seconds: float
    up_bytes: float
    down_bytes: float
    busy: dict[str, float]
    disk_bytes: float = 0.0

    @property
    def bottleneck(self) -> str:
        """The lane that worked most."""
        return max(self.busy, key=lambda lane: self.busy[lane])
