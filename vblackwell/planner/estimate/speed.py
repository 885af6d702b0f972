"""Tokens a second for ``vb estimate``: resident from the trace's work, streamed from a simulation of the lanes, by a known card's rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vblackwell.errors import VBError
from vblackwell.machine.gpus import RUNTIME_BYTES, KnownGPU, context_bytes
from vblackwell.machine.measured import rates_of
from vblackwell.machine.rates import assumed_rates
from vblackwell.memory.cache.config import default_disk_path
from vblackwell.planner.compression import Compression, DiskSpeed
from vblackwell.planner.estimator import OffloadEstimate, Run, streamed_seconds
from vblackwell.trace.trace import Trace
from vblackwell.trace.work import phase_seconds
from vblackwell.train.disk_speed import DiskSpeeds, sample_of

# Of 21 placements of a small decoder (docs/log-estimate.md), whose steps waited for the host.
STREAMED_ERROR = "on an H200 streamed steps with AdamW on the GPU were predicted up to 9 % too fast, and with some of it on the CPU more"


@dataclass(frozen=True)
class Speed:
    """Tokens a second of a run.

    Attributes:
        resident: with everything on the GPU, whether or not it fits. streamed: through an offload stack; None where none was asked for.
        bottleneck: the lane that works most of a streamed step. rates: where the card's are from.
        disk: whether its disk level is compressed, and why; None where there is none, or nothing was measured of it here.
    """

    resident: float
    streamed: float | None
    bottleneck: str | None
    rates: str
    disk: Compression | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {
            "resident": self.resident, "streamed": self.streamed, "bottleneck": self.bottleneck, "rates": self.rates,
            "disk": None if self.disk is None else asdict(self.disk),
        }  # fmt: skip


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
    is_here = rates != assumed_rates(card)  # then this machine's disk and cores are meant too
    try:
        disk = _kept_disk(run) if disk_bytes and is_here else None
        capacities = [left, host_bytes, *([disk_bytes] if disk_bytes else [])]
        times, verdict = streamed_seconds(run, trace, capacities, rates, disk)
    except VBError:  # a share of the updates at home takes more RAM than all on level 0, which fitted
        return Speed(resident, None, None, rates.source)
    return Speed(resident, tokens / times.step_seconds, times.bottleneck, rates.source, verdict)


def _kept_disk(run: Run) -> Callable[[Iterable[str]], DiskSpeed] | None:
    """What the cache has of this machine's disk, and of the codec on the model's weights, or else on drawn ones; nothing is measured."""
    folder = Path(run.subject.name)
    try:
        path = default_disk_path()
    except VBError:
        return None
    known = [DiskSpeeds(path, sample_of(None, each)) for each in (folder if folder.is_dir() else None, None)]

    def look(kinds: Iterable[str]) -> DiskSpeed:
        found = [each(kinds) for each in known]
        return next((each for each in found if each.codec), found[0])

    return look
