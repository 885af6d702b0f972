"""Which of several equal plans is fastest here: measured once by ``tune``, kept on disk, never a matter of the result.

What may be tuned are the fields that leave the order of additions alone. Entries are looked up by (plan, dtype, rows
rounded up to a power of two, N, K); without one the plan stands as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4.mma_plan import MmaPlan, fits_with_norm
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan, goes_round
from vblackwell.kernels.runtime import tuning
from vblackwell.kernels.runtime.tuning import bucket, dtype_name

Plan = TypeVar("Plan", MmaPlan, WgmmaPlan)
KIND = "fp4"
TUNABLE = {MmaPlan: ("prefetch", "min_blocks", "x_stages"), WgmmaPlan: ("stages", "prefetch", "min_blocks")}
# Fields as files spell them, which are older than the names of today.
_KEY_NAMES = {"windows_per_step": "together"}


def entry_name(plan: MmaPlan | WgmmaPlan, dtype: torch.dtype, m: int, n: int, k: int) -> str:
    """The key of a shape bucket; the plan's fixed fields are part of it, so that an entry never changes an order."""
    fields, tunable = dataclasses.asdict(plan), TUNABLE[type(plan)]
    fixed = {_KEY_NAMES.get(name, name): value for name, value in fields.items() if name not in tunable}
    if isinstance(plan, WgmmaPlan):
        fixed["helped"] = 0  # of plans that are gone
    shape = "x".join(str(value) for value in (bucket(m), n, k))
    return f"{type(plan).__name__}|{dtype_name(dtype)}|{shape}|{sorted(fixed.items())}"


def tuned(plan: Plan, device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> Plan:
    """``plan`` as it was found to run fastest on ``device`` for M rows of ``dtype``, or unchanged."""
    return _tuned(plan, device, dtype, bucket(m), n, k)


@functools.lru_cache(4096)  # every call of a layer asks, and making an entry's name takes longer than a launch
def _tuned(plan: Plan, device: torch.device, dtype: torch.dtype, rows: int, n: int, k: int) -> Plan:
    entries = tuning.entries(KIND, device)
    fields = entries.get(entry_name(plan, dtype, rows, n, k), {}) if entries else {}
    try:
        found = dataclasses.replace(plan, **{name: fields[name] for name in TUNABLE[type(plan)] if name in fields})
    except ConfigurationError:
        return plan  # kept by a version that still allowed these fields
    return found if _fits(found, k) else plan  # kept by one that needed less memory for them


def forget() -> None:
    tuning.entries.cache_clear()
    _tuned.cache_clear()


def _fits(plan: MmaPlan | WgmmaPlan, k: int) -> bool:
    return plan.fits() if isinstance(plan, WgmmaPlan) else not plan.chunk or fits_with_norm(plan, k)


def variants(plan: Plan) -> list[Plan]:
    """``plan`` and its neighbours that add in the same order."""
    if isinstance(plan, MmaPlan):
        warps = plan.threads // 32
        choices = [{"min_blocks": blocks} for blocks in sorted({1, max(1, 16 // warps), max(1, 24 // warps)})]
        # chunk sizes follow from the prefetch where x comes in several chunks, so it stays
    else:
        turn = plan.k_groups, plan.windows_per_step
        choices = [{"stages": count} for count in (3, 4, 6, 8, 12) if goes_round(count, *turn)]
    others = [dataclasses.replace(plan, **choice) for choice in choices]
    return [plan, *(other for other in others if other != plan and _fits(other, 64))]


def tune(
    plan: Plan, device: torch.device, dtype: torch.dtype, m: int, n: int, k: int, measure_us: Callable[[Plan], float]
) -> Plan:
    """Measure ``variants(plan)``, store the fastest and return it. A variant that the GPU refuses raises."""
    best = min(variants(plan), key=measure_us)
    fields = {name: getattr(best, name) for name in TUNABLE[type(plan)]}
    tuning.store(KIND, device, {entry_name(plan, dtype, m, n, k): fields})
    forget()
    return best
