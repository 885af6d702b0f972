"""Advice that is computed: what else to do, what it saves on this model and machine in bytes or seconds, and what it costs.

A way to run is compared with another by its predicted peak and step; what saves neither noticeably is not said. No number, no advice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from vblackwell.units import format_bytes, format_seconds

LEAST_SHARE = 0.02  # of the peak, or of the step: what saves less is within what predictions are off by


@dataclass(frozen=True)
class Way:
    """One way to run.

    Attributes:
        change: what to say to get it; for the present way anything.
        peak: bytes of the GPU. seconds: of a token, None where the GPU's speed is not known. work: operations of a token.
        also: what it costs beside bytes and seconds, as measured, with where.
    """

    change: str
    peak: int
    seconds: float | None = None
    work: float = 0.0
    also: str = ""


@dataclass(frozen=True)
class Advice:
    """A change that pays.

    Attributes:
        saved_bytes: of the GPU's peak; negative: it costs them. saved_time: share of the time of a token; None: not known.
        cost: in words. peak_bytes: of the GPU, that it comes to.
    """

    change: str
    saved_bytes: int
    saved_time: float | None
    cost: str
    peak_bytes: int

    def __str__(self) -> str:
        peak = f" (peak {format_bytes(self.peak_bytes)})"
        saved = [f"{format_bytes(self.saved_bytes)} of the GPU{peak}"] if self.saved_bytes > 0 else []
        if self.saved_time is not None and self.saved_time > 0:
            saved.append(f"{self.saved_time:.0%} of the time")
        return f"{self.change}: saves {' and '.join(saved)}; costs {self.cost}"

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def advise(now: Way, others: Iterable[Way], tokens: int, *, for_memory: bool) -> list[Advice]:
    """What of ``others`` saves at least `LEAST_SHARE` of the peak or of the time, the most first.

    Args:
        tokens: a step, for costs in seconds.
        for_memory: whether memory is what is missing; otherwise time comes first.
    """
    found = []
    for other in others:
        saved_bytes, saved_time = now.peak - other.peak, None
        if now.seconds is not None and other.seconds is not None:
            saved_time = 1 - other.seconds / now.seconds
        if saved_bytes >= LEAST_SHARE * now.peak or (saved_time or 0.0) >= LEAST_SHARE:
            found.append(Advice(other.change, saved_bytes, saved_time, _cost(now, other, tokens), other.peak))
    return sorted(found, key=lambda each: -each.saved_bytes if for_memory else -(each.saved_time or 0.0))


def _cost(now: Way, other: Way, tokens: int) -> str:
    costs = []
    if other.peak > now.peak * (1 + LEAST_SHARE):
        costs.append(f"{format_bytes(other.peak - now.peak)} of the GPU")
    if now.seconds is not None and other.seconds is not None:
        longer = other.seconds / now.seconds - 1
        if longer >= LEAST_SHARE / 2:
            costs.append(
                f"{longer:.0%} more time ({format_seconds((other.seconds - now.seconds) * tokens)} in {tokens:,} tokens)"
            )
    elif other.work > now.work * (1 + LEAST_SHARE / 2):
        costs.append(f"{other.work / now.work - 1:.0%} more operations")
    costs += [other.also] if other.also else []
    return ", ".join(costs) or "nothing that was measured"
