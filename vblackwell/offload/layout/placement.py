"""What a streamed model takes of its levels: decided by arithmetic on sizes, then reserved.

Level 0 keeps a ring for states, loaded weights, gradients on their way out and, where asked for, whole groups with their states; the
levels below are the model's home. `reserve_streamed` works on any `LevelPool`. `bytes_by_level` asks it for a pool that holds
nothing, so the same code that places a model says beforehand where every byte of it will be, or that there is no room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.memory.level import NullLevel
from vblackwell.memory.pool import LevelPool
from vblackwell.offload.layout.formats import EXACT, Formats
from vblackwell.offload.layout.groups import Group, Site, find_groups, moment_ranges
from vblackwell.offload.layout.stage_plan import PAGE
from vblackwell.offload.layout.update_place import groups_kept, groups_on_level0, ring_bytes, state_bytes
from vblackwell.offload.movement.level0_updates import deferred_groups
from vblackwell.offload.movement.sliced import rows_per_slice, sliceable
from vblackwell.offload.storage.masters import needs_master
from vblackwell.offload.storage.ranges import Homes
from vblackwell.units import format_bytes

# On CUDA, level 0's capacity is the whole process: this share is left to activations and workspaces...
CUDA_ACTIVATION_SHARE = 0.5
# ...and weights take no more than the groups in use, loading and turning around, unless ``weight_bytes`` says so.
CUDA_GROUPS = 6
MOST_RESIDENT = 0.75  # of level 0: what groups that live there may take of it


@dataclass(frozen=True)
class Wishes:
    """What the user said about streaming; `enable_vgpu_stack_optimization` explains each."""

    compute_dtype: torch.dtype | None = None
    groups: tuple[str, ...] | None = None
    update: str | float = "auto"
    resident_bytes: int = 0
    weight_bytes: int | None = None
    activation_bytes: int = 0
    formats: Formats = EXACT


@dataclass(frozen=True)
class Streamed:
    """A model's groups and their homes, reserved.

    Attributes:
        budget_bytes: what loaded weights may take of level 0.
        slice_rows: groups that are computed in slices of that many rows.
        on_level0: groups whose AdamW runs there; ring_bytes: level-0 bytes through which their states pass.
    """

    groups: list[Group]
    sites: list[Site]
    homes: Homes
    budget_bytes: int
    slice_rows: dict[Group, int]
    on_level0: list[Group]
    ring_bytes: int


def reserve_streamed(model: nn.Module, stack: LevelPool, name: str, wishes: Wishes) -> Streamed:
    """Find the groups of ``model`` and reserve the ranges of its weights and masters.

    Raises:
        ConfigurationError, Unsupported: as `find_groups`; or the stack has one level, or nothing could live on level 0.
        InsufficientMemory: level 0 cannot hold the largest group, or the lower levels the model; nothing is reserved.
    """
    formats = wishes.formats
    groups, sites = find_groups(model, wishes.compute_dtype, wishes.groups, formats)
    level = stack.levels[0]
    free = level.capacity_bytes - level.used_bytes
    slice_rows = _choose_slices(groups, sites, free)
    whole = [group for group in groups if group not in slice_rows]
    # A sliced leaf's weights and gradient come from home, as those of any update that has to wait for its step.
    able = groups if formats.packed else whole
    on_level0 = groups_on_level0(able, wishes.update, stack.level0_device, wishes.weight_bytes, wishes.resident_bytes)
    ring = ring_bytes(on_level0, free) if on_level0 else 0
    kept = groups_kept([group for group in on_level0 if group in whole], wishes.resident_bytes)
    kept_bytes = sum(state_bytes(group) for group in kept)
    if wishes.resident_bytes and not on_level0:
        raise ConfigurationError(
            f"resident_bytes={wishes.resident_bytes} keeps groups that are updated on level 0, and none is: use update='level0'"
        )
    if kept_bytes > free * MOST_RESIDENT:
        raise InsufficientMemory(
            f"resident_bytes would keep {format_bytes(kept_bytes)} on level 0 ({level.name}), more than {MOST_RESIDENT:.0%} of the "
            f"{format_bytes(free)} that are free there: lower it, or raise fast_memory (the capacity of level 0)",
            needed_bytes=int(kept_bytes / MOST_RESIDENT),
            available_bytes=free,
        )
    budget = _weights_budget(whole, free - ring - kept_bytes, stack.level0_device, level.name, wishes.weight_bytes)
    if len(stack.levels) < 2:
        raise ConfigurationError("streaming needs a level below level 0: add a 'cpu' or 'ssd' level to the stack")
    homes = Homes(
        stack, name, range(1, len(stack.levels)), groups, kept, on_level0, set_aside_bytes=wishes.activation_bytes
    )
    trainable = [group for group in groups if group.trainable()]
    # Slices are cut from addressable ranges: those first.
    ordered = sorted(groups, key=lambda group: group not in slice_rows)
    homes.reserve(
        [(group, "weight") for group in ordered]
        + [(group, "remainder" if group in on_level0 else "master") for group in trainable if needs_master(group)],
        # With gradients that wait for an update at home: whatever will spill passes through RAM that weights must leave.
        later=[(group, "gradient") for group in trainable if group not in on_level0] + moment_ranges(trainable),
    )
    _check_slices(slice_rows, homes)
    return Streamed(groups, sites, homes, budget, slice_rows, on_level0, ring)


def _check_slices(slice_rows: Iterable[Group], homes: Homes) -> None:
    for group in slice_rows:
        reservation = homes.range(group, "weight")
        if not reservation.is_addressable:
            level_name = homes.stack.levels[reservation.level].name
            homes.close()
            raise InsufficientMemory(
                f"{group.name!r} is larger than level 0 and must be cut from RAM, but only {level_name} has room for its "
                f"{format_bytes(group.num_bytes)}: raise host_memory",
                needed_bytes=group.num_bytes,
                available_bytes=0,
            )


def _choose_slices(groups: list[Group], sites: list[Site], free: int) -> dict[Group, int]:
    """Rows a slice for every group that with its gradient does not fit ``free`` and can be cut."""
    chosen: dict[Group, int] = {}
    for group in groups:
        whole = group.num_bytes * (2 if group.trainable() else 1)
        if whole > free and sliceable(group, sites):
            rows = rows_per_slice(group, free // 2)
            if rows > 0:
                chosen[group] = rows
    return chosen


def _weights_budget(groups: list[Group], free: int, device: torch.device, level_name: str, wanted: int | None) -> int:
    """What loaded weights may take of ``free`` bytes: ``wanted``, or all but one gradient buffer, on CUDA a few groups.

    Raises:
        InsufficientMemory: the largest group with its gradient does not fit.
    """
    weights = max((group.num_bytes for group in groups), default=0)
    gradient = max((group.num_bytes for group in groups if group.trainable()), default=0)
    if weights + gradient > free:
        largest = max(groups, key=lambda group: group.num_bytes)
        raise InsufficientMemory(
            f"level 0 ({level_name}) has {format_bytes(free)} free, and the largest layer group, {largest.name!r}, needs "
            f"{format_bytes(weights + gradient)} there (weights {format_bytes(weights)}, gradient {format_bytes(gradient)}): "
            "raise fast_memory (the capacity of level 0)",
            needed_bytes=weights + gradient,
            available_bytes=free,
        )
    budget = free - gradient
    if wanted is not None:
        return max(weights, min(budget, wanted))
    if device.type == "cuda":
        budget = max(weights, min(budget, CUDA_GROUPS * weights, int(free * (1 - CUDA_ACTIVATION_SHARE))))
    return budget


# -- beforehand ----------------------------------------------------------------------------------------------------------


def paper_pool(capacities: Sequence[int], device: torch.device | str, name: str | None = None) -> LevelPool:
    """Levels that hold nothing, of ``capacities`` bytes: the first on ``device`` and called ``name`` in errors, then RAM, then a disk."""
    level0 = torch.device(device)
    names = (name or str(level0), "cpu", "ssd")
    places = (level0, torch.device("cpu"), None)
    alignments = (512, PAGE, PAGE)
    return LevelPool([NullLevel(*each) for each in zip(capacities, names, places, alignments, strict=False)])


def bytes_by_level(
    model: nn.Module, capacities: Sequence[int], wishes: Wishes, device: torch.device | str = "cpu", name: str | None = None
) -> dict[str, list[int]]:  # fmt: skip
    """Where the bytes of ``model``, which may be on the meta device, would be while it trains with ``undo=False``; moves nothing.

    Args:
        capacities: bytes of level 0, which is on ``device``, of RAM and, if there is one, of the disk.
        name: of level 0 in errors, if it is not its device's.

    Returns:
        Reserved bytes of each kind of range, and of 'staging', 'ring' and 'loaded', by level. Activations are not among them, but
        for the ``activation_bytes`` of ``wishes``.

    Raises:
        As `reserve_streamed`; InsufficientMemory too where optimizer states find no room.
    """
    level0 = torch.device(device)
    pool = paper_pool(capacities, level0, name)
    levels = pool.levels
    found = reserve_streamed(model, pool, "plan", wishes)
    trainable = [group for group in found.groups if group.trainable()]
    late = set(found.slice_rows) | {group for group in trainable if group not in found.on_level0}
    if level0.type == "cuda":
        late |= set(deferred_groups(found.on_level0, found.homes))
    found.homes.reserve(
        [(group, "gradient") for group in trainable if group in late] + moment_ranges(trainable),
    )
    table = found.homes.bytes_by_level()
    for level, row in enumerate(zip(*table.values(), strict=True)):
        staged = levels[level].used_bytes - sum(row)
        table.setdefault("staging", [0] * len(levels))[level] = max(0, staged)
    table["ring"] = [found.ring_bytes] + [0] * (len(levels) - 1)
    table["loaded"] = [found.budget_bytes] + [0] * (len(levels) - 1)
    table["activations"] = [0] * len(levels)
    table["activations"][1] = wishes.activation_bytes
    found.homes.close()
    return table
