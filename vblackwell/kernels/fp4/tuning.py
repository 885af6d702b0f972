"""Which of several equal plans is fastest here, as files of this machine or of the package say (benchmarks/tune makes
them): never a matter of the result.

What may be tuned are the fields that leave the order of additions alone. Entries are looked up by (plan, dtype, rows
rounded up to a power of two, N, K); without one the plan stands as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

import torch

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4.mma_plan import MmaPlan, fits_with_norm
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan
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
    fits = found.fits() if isinstance(found, WgmmaPlan) else not found.chunk or fits_with_norm(found, k)
    return found if fits else plan  # kept by one that needed less memory for them
