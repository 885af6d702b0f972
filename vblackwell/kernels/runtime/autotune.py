"""Which of several equal plans is fastest here: measured once, kept on disk, never a matter of the result.

A plan (fp4_plan.py) comes from the shape. What may be tuned are the fields that leave the order of additions alone (how many windows are
in flight, how many blocks share a multiprocessor), so results do not depend on whether or where somebody tuned. Entries
are looked up by (op, dtype, rows rounded up to a power of two, N, K) first in the cache of this very GPU, driver, torch and triton
version under ``$XDG_CACHE_HOME/vblackwell/autotune``, then in the table shipped for the GPU's name; without either the plan
stands as it is. Nothing is measured unasked: ``tune`` does it. Files are replaced as a whole and a torn or foreign one is ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4.mma_plan import MmaPlan, fits_with_norm
from vblackwell.kernels.fp4.plan import WgmmaPlan, goes_round
from vblackwell.kernels.runtime.nvrtc import cache_folder, driver_version, write_atomically

Plan = TypeVar("Plan", MmaPlan, WgmmaPlan)
TUNABLE = {MmaPlan: ("prefetch", "min_blocks", "x_stages"), WgmmaPlan: ("stages", "prefetch", "min_blocks")}
SHIPPED = Path(__file__).parents[1] / "tuned"
_VERSION = 1


def machine(device: torch.device) -> dict[str, str]:
    """What a timing belongs to."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "multiprocessors": str(properties.multi_processor_count),
        "driver": str(driver_version()),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def entry_name(plan: MmaPlan | WgmmaPlan, dtype: torch.dtype, m: int, n: int, k: int) -> str:
    """The key of a shape bucket; the plan's own fixed fields are part of it, so that an entry never changes an order."""
    fixed = {name: value for name, value in dataclasses.asdict(plan).items() if name not in TUNABLE[type(plan)]}
    shape = "x".join(str(value) for value in (1 << max(0, m - 1).bit_length(), n, k))
    return f"{type(plan).__name__}|{str(dtype).removeprefix('torch.')}|{shape}|{sorted(fixed.items())}"


def cache_path(parts: dict[str, str]) -> Path:
    """The file of the machine described by ``parts``."""
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "autotune" / f"fp4-{digest}.json"


def read_entries(path: Path) -> dict[str, dict[str, int]]:
    """Entries of a file; none if it is missing, torn or of another version."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return {}
    entries = content.get("entries")
    if not isinstance(entries, dict):
        return {}
    return {
        name: fields
        for name, fields in entries.items()
        if isinstance(fields, dict) and all(isinstance(value, int) for value in fields.values())
    }


def write_entries(path: Path, parts: dict[str, str], entries: dict[str, dict[str, int]]) -> None:
    """Add ``entries`` to the file, replacing it as a whole."""
    merged = {**read_entries(path), **entries}
    text = json.dumps({"version": _VERSION, "machine": parts, "entries": merged}, indent=1, sort_keys=True)
    write_atomically(path, text.encode())


def shipped_path(gpu: str) -> Path:
    """The table that comes with the package for GPUs of this name; it may not exist."""
    return SHIPPED / f"{gpu.lower().replace(' ', '-')}.json"


@functools.lru_cache
def _entries(device: torch.device) -> dict[str, dict[str, int]]:
    parts = machine(device)
    return {**read_entries(shipped_path(parts["gpu"])), **read_entries(cache_path(parts))}


def apply(plan: Plan, fields: dict[str, int]) -> Plan:
    """``plan`` with its tunable fields from ``fields``; anything else in there is ignored."""
    return dataclasses.replace(plan, **{name: fields[name] for name in TUNABLE[type(plan)] if name in fields})


def tuned(plan: Plan, x_MK: Tensor, n: int, k: int) -> Plan:
    """``plan`` as it was found to run fastest on the device of ``x_MK``, or unchanged."""
    return _tuned(plan, x_MK.device, x_MK.dtype, 1 << max(0, x_MK.shape[0] - 1).bit_length(), n, k)


@functools.lru_cache(4096)  # every call of a layer asks, and making an entry's name takes longer than a launch
def _tuned(plan: Plan, device: torch.device, dtype: torch.dtype, rows: int, n: int, k: int) -> Plan:
    entries = _entries(device)
    if not entries:
        return plan
    try:
        found = apply(plan, entries.get(entry_name(plan, dtype, rows, n, k), {}))
    except ConfigurationError:
        return plan  # kept by a version that still allowed these fields
    return found if _fits(found, k) else plan  # kept by one that needed less memory for them


def forget() -> None:
    """Read entries anew from now on: after writing."""
    _entries.cache_clear()
    _tuned.cache_clear()


def _fits(plan: MmaPlan | WgmmaPlan, k: int) -> bool:
    """Whether a block finds the shared memory that it needs for rows of ``k`` features."""
    return plan.fits() if isinstance(plan, WgmmaPlan) else not plan.chunk or fits_with_norm(plan, k)


def variants(plan: Plan) -> list[Plan]:
    """``plan`` and its neighbours that add in the same order."""
    if isinstance(plan, MmaPlan):
        warps = plan.threads // 32
        choices = [{"min_blocks": blocks} for blocks in sorted({1, max(1, 16 // warps), max(1, 24 // warps)})]
        # chunk sizes follow from the prefetch where x comes in several chunks, so it stays
    else:
        choices = [{"stages": count} for count in (3, 4, 6, 8, 12) if goes_round(count, plan.k_groups, plan.together)]
    return [plan, *(other for choice in choices if (other := apply(plan, choice)) != plan and _fits(other, 64))]


def tune(plan: Plan, x_MK: Tensor, n: int, k: int, measure_us: Callable[[Plan], float]) -> Plan:
    """Measure ``variants(plan)``, store the fastest and return it. A variant that the GPU refuses raises."""
    best = min(variants(plan), key=measure_us)
    parts = machine(x_MK.device)
    fields = {name: getattr(best, name) for name in TUNABLE[type(plan)]}
    name = entry_name(plan, x_MK.dtype, x_MK.shape[0], n, k)
    write_entries(cache_path(parts), parts, {name: fields})
    forget()
    return best
