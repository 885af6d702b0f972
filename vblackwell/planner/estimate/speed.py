"""Tokens a second for ``vb estimate``: resident from the trace's work, streamed from a simulation of the lanes, by a known card's rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vblackwell.errors import VBError
from vblackwell.machine.gpus import RUNTIME_BYTES, KnownGPU, context_bytes
from vblackwell.machine.measured import rates_of
from vblackwell.planner.estimator import OffloadEstimate, Run, streamed_seconds
from vblackwell.trace.trace import Trace
from vblackwell.trace.work import phase_seconds

# Of 21 placements of a small decoder (docs/journal/estimate.md), whose steps waited for the host.
STREAMED_ERROR = "on an H200 streamed steps with AdamW on the GPU were predicted up to 9 % too fast, and with some of it on the CPU more"


@dataclass(frozen=True)
class Speed:
    """Tokens a second of a run.

    Attributes:
        resident: with everything on the GPU, whether or not it fits. streamed: through an offload stack; None where none was asked for.
        bottleneck: the lane that works most of a streamed step. rates: where the card's are from.
    """

    resident: float
    streamed: float | None
    bottleneck: str | None
    rates: str

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def speed_of(
    run: Run, trace: Trace, batch_size: int, card: KnownGPU, gpu_bytes: int, stack: OffloadEstimate | None,
    host_bytes: int, disk_bytes: int,
) -> Speed:  # fmt: skip
    """What ``run`` does on ``card`` with batches of ``batch_size``; streamed too if ``stack`` holds it."""
    rates, tokens = rates_of(card), batch_size * run.seq_length
    resident = tokens / sum(phase_seconds(trace.work, rates).values())
    if stack is None or stack.refused:
        return Speed(resident, None, None, rates.source)
    left = gpu_bytes - context_bytes(run.capability) - RUNTIME_BYTES - stack.step
    try:
        capacities = [left, host_bytes, *([disk_bytes] if disk_bytes else [])]
        times = streamed_seconds(run, trace, capacities, rates)
    except VBError:  # a share of the updates at home takes more RAM than all on level 0, which fitted
        return Speed(resident, None, None, rates.source)
    return Speed(resident, tokens / times.step_seconds, times.bottleneck, rates.source)
