"""Which level holds each byte of a streamed model: arithmetic on sizes, which the runtime then carries out.

Level 0 keeps a ring for states, loaded weights, gradients on their way out and, where asked for, whole groups with
their states; the levels below store the model. `place_streamed` decides it for levels of which it knows the sizes
alone, so the code that places a model also forecasts where every byte of it will be, or that there is no room.

Where each group's AdamW runs. On a GPU, on level 0 for most: a CPU's update is what makes offloaded training slow,
while the states of a group pass the link in about the time that its backward takes. A share stays in host memory, where
the CPU updates some groups while the link serves the others. Without a GPU, level 0 is RAM like the levels below, and
the states would only be copied to and fro. Groups with 8-bit moments are updated on level 0 everywhere.

The CPU's share. A parameter that is updated on level 0 costs the link `STATE_BYTES` up; one that is updated on the host
costs the CPU its AdamW. Some bytes of every parameter go up in any case for forward and backward, ``pass_bytes``: twice
its weight, less what stays loaded from one to the other. All is done together when

    (pass_bytes + (1 - share) * STATE_BYTES) / link = share / cpu

with ``link`` in bytes/s while copies go both ways, of which a step uses `LINK_USE` at best, and ``cpu`` in
parameters/s. The CPU cannot begin before the first gradient is there, and must be done before the next forward: it has
`OVERLAP` of a step. Tokens do not enter: where compute takes longer than both, any share does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, InsufficientMemory, Unsupported
from vblackwell.offload.layout.groups import (
    EXACT,
    MIN_BUFFER_BYTES,
    Formats,
    Group,
    Site,
    bytes_of,
    find_groups,
    moment_ranges,
    num_elements,
    rows_per_slice,
    sliceable,
    smallest_buffer,
)
from vblackwell.offload.layout.storage_plan import PAGE, LevelSpace, StoragePlan
from vblackwell.units import MiB, format_bytes

PLACES = ("auto", "level0", "home")

# On a GPU, level 0's capacity is the whole process: this share is left to activations and workspaces...
CUDA_ACTIVATION_SHARE = 0.5
# ...and weights take no more than the groups in use, loading and turning around, unless ``weight_bytes`` says so.
CUDA_GROUPS = 6
MAX_RESIDENT = 0.75  # of level 0: what groups that live there may take of it

# The ring holds one group's states and half of the next: what comes in while a group computes, and what is on its way
# out.
RING_GROUPS = 1.5
RING_SHARE = 0.25  # of level 0 at most
# Of three or four kinds. Every piece costs the host 0.2 ms, and the last one nothing hides.
BUFFER_BYTES = 144 * MiB
MAX_BUFFERS = 24

STATE_BYTES, PASS_BYTES = 10, 4  # a parameter: split bf16 masters, every weight loaded twice
LINK_USE, OVERLAP = 0.9, 0.95
MIN_SHARE, MAX_SHARE = 0.02, 0.5  # less is not worth a thread
FIRST_SHARE = 0.15  # of the groups: they are not updated on the host while others can be
DEFERRED_SHARE = 0.15  # of the elements that are updated on a GPU
GROUPS_IN_USE = 3  # of the loaded ones: the one that computes, the next, and one on its way
# Groups whose weights stay on level 0 while they are stored after an update there; the host may be many groups ahead.
MAX_LOCKED = 4
NEWEST = 2  # inputs of checkpoints that stay on level 0 in any case: one is read by its layer, one is on its way
AHEAD = 3  # checkpoints whose inputs are loaded before backward asks for them

Measured = Callable[[], tuple[float, float]]  # link in bytes/s each way and CPU in parameters/s, while both work


@dataclass(frozen=True)
class StreamingOptions:
    """What the user said about streaming; `enable_vgpu_stack_optimization` explains each."""

    compute_dtype: torch.dtype | None = None
    groups: tuple[str, ...] | None = None
    update: str | float = "auto"
    resident_bytes: int = 0
    weight_bytes: int | None = None
    activation_bytes: int = 0
    formats: Formats = EXACT


@dataclass(frozen=True)
class StreamedPlacement:
    """A model's groups and where their bytes are.

    Attributes:
        storage: the ranges of its weights and masters, and of groups that live on level 0.
        budget_bytes: what loaded weights may take of level 0.
        slice_rows: groups that are computed in slices of that many rows.
        on_level0: groups whose AdamW runs there; ring_bytes: level-0 bytes through which their states pass.
    """

    groups: list[Group]
    sites: list[Site]
    storage: StoragePlan
    budget_bytes: int
    slice_rows: dict[Group, int]
    on_level0: list[Group]
    ring_bytes: int

    @property
    def trainable(self) -> list[Group]:
        return [group for group in self.groups if group.trainable()]

    @property
    def deferred(self) -> list[Group]:
        """Groups whose updates on a GPU wait for the next forward."""
        return deferred_groups(self.on_level0, self.storage)


def place_streamed(
    model: nn.Module, levels: Sequence[LevelSpace], options: StreamingOptions, measured: Measured | None = None
) -> StreamedPlacement:
    """Find the groups of ``model`` and place its weights and masters.

    Args:
        measured: rates for update='auto', asked where they decide; None: everything is updated on the host then.

    Raises:
        ConfigurationError, Unsupported: as `find_groups`; or there is one level, or nothing could live on level 0.
        InsufficientMemory: level 0 cannot hold the largest group, or the lower levels the model.
    """
    groups, sites = find_groups(model, options.compute_dtype, options.groups, options.formats)
    trainable = [group for group in groups if group.trainable()]
    level, resident_bytes = levels[0], options.resident_bytes
    free = level.free_bytes
    slice_rows = _choose_slices(groups, sites, free)
    whole = [group for group in groups if group not in slice_rows]
    # A sliced leaf's weights and gradient come from storage, as those of any update that has to wait for its step.
    able = groups if options.formats.packed else whole
    on_level0 = groups_on_level0(able, options, measured)
    ring = ring_bytes(on_level0, free) if on_level0 else 0
    resident = groups_kept([group for group in on_level0 if group in whole], resident_bytes)
    kept_bytes = sum(state_bytes(group) for group in resident)
    if resident_bytes and not on_level0:
        raise ConfigurationError(
            f"resident_bytes={resident_bytes} keeps groups that are updated on level 0, and none is: use "
            "update='level0'"
        )
    if kept_bytes > free * MAX_RESIDENT:
        raise InsufficientMemory(
            f"resident_bytes would keep {format_bytes(kept_bytes)} on level 0 ({level.name}), more than "
            f"{MAX_RESIDENT:.0%} of the {format_bytes(free)} that are free there: lower it, or raise fast_memory (the "
            "capacity of level 0)",
            needed_bytes=int(kept_bytes / MAX_RESIDENT),
            available_bytes=free,
        )
    budget = _weights_budget(whole, replace(level, capacity_bytes=level.capacity_bytes - ring - kept_bytes), options)
    if len(levels) < 2:
        raise ConfigurationError("streaming needs a level below level 0: add a 'cpu' or 'ssd' level to the stack")
    # Slices are cut from addressable ranges: those first.
    ordered = sorted(groups, key=lambda group: group not in slice_rows)
    storage = StoragePlan.empty(
        levels, range(1, len(levels)), groups, resident, on_level0, options.activation_bytes
    ).with_ranges(
        [(group, "weight") for group in ordered]
        + [(group, "remainder" if group in on_level0 else "master") for group in trainable if group.needs_master],
        # With gradients that wait for an update on the host: whatever will spill passes through RAM that weights must
        # leave.
        later=[(group, "gradient") for group in trainable if group not in on_level0] + moment_ranges(trainable),
    )
    refuse_slices_on_disk(slice_rows, storage)
    return StreamedPlacement(groups, sites, storage, budget, slice_rows, on_level0, ring)


def refuse_slices_on_disk(sliced: Iterable[Group], storage: StoragePlan) -> None:
    """
    Raises:
        InsufficientMemory: weights that are to be cut into slices are on a disk.
    """
    for group in sliced:
        level = storage.level_of(group, "weight")
        if level.kind == "disk":
            raise InsufficientMemory(
                f"{group.name!r} is larger than level 0 and must be cut from RAM, but only {level.name} has room "
                f"for its {format_bytes(group.num_bytes)}: raise host_memory",
                needed_bytes=group.num_bytes,
                available_bytes=0,
            )


def _choose_slices(groups: Iterable[Group], sites: Sequence[Site], free: int) -> dict[Group, int]:
    """Rows a slice for every group that with its gradient does not fit ``free`` and can be cut."""
    chosen: dict[Group, int] = {}
    for group in groups:
        whole = group.num_bytes * (2 if group.trainable() else 1)
        if whole > free and sliceable(group, sites):
            rows = rows_per_slice(group, free // 2)
            if rows > 0:
                chosen[group] = rows
    return chosen


def _weights_budget(groups: Sequence[Group], level: LevelSpace, options: StreamingOptions) -> int:
    """What loaded weights may take of ``level``: as asked for, or all but a gradient buffer, on a GPU a few groups."""
    free = level.free_bytes
    weights = max((group.num_bytes for group in groups), default=0)
    gradient = max((group.num_bytes for group in groups if group.trainable()), default=0)
    if weights + gradient > free:
        largest = max(groups, key=lambda group: group.num_bytes)
        raise InsufficientMemory(
            f"level 0 ({level.name}) has {format_bytes(free)} free, and the largest layer group, {largest.name!r}, "
            f"needs {format_bytes(weights + gradient)} there (weights {format_bytes(weights)}, gradient "
            f"{format_bytes(gradient)}): raise fast_memory (the capacity of level 0)",
            needed_bytes=weights + gradient,
            available_bytes=free,
        )
    budget = free - gradient
    if options.weight_bytes is not None:
        return max(weights, min(budget, options.weight_bytes))
    if level.kind == "gpu":
        budget = max(weights, min(budget, CUDA_GROUPS * weights, int(free * (1 - CUDA_ACTIVATION_SHARE))))
    return budget


# -- where AdamW runs --------------------------------------------------------------------------------------------------


def check_update(update: str | float, formats: Formats = EXACT) -> None:
    """Refuse what is neither a place nor a share, and a place that the formats exclude.

    Raises:
        ConfigurationError: with what is allowed.
    """
    if isinstance(update, str) and update not in PLACES:
        raise ConfigurationError(f"update {update!r} is none of {', '.join(PLACES)}, nor a share between 0 and 1")
    if not isinstance(update, str) and not 0 <= update <= 1:
        raise ConfigurationError(f"update {update} is no share of the parameters to update at home: give 0 to 1")
    if formats.packed and update not in ("auto", "level0", 0):
        raise ConfigurationError(
            f"update={update!r} would update at home, and {formats.states} states are updated on level 0 alone: use "
            "'level0' or 'auto'"
        )


def groups_on_level0(groups: Sequence[Group], options: StreamingOptions, measured: Measured | None) -> list[Group]:
    """The groups of ``groups`` (in the order of the forward) that are updated on level 0.

    Args:
        options: ``update``: 'level0', 'home', the share of the parameters that is updated on the host, or 'auto': the
            share that keeps a GPU's link and the CPU busy alike, by ``measured`` rates.

    Raises:
        Unsupported: 'level0', and a group that is to be trained cannot be updated there. Otherwise the host updates it.
    """
    update = options.update
    trained = [group for group in groups if group.trainable()]
    able = [group for group in trained if _can_update_on_level0(group)]
    if update == "level0" and len(able) < len(trained):
        unable = next(group for group in trained if group not in able)
        raise Unsupported(
            f"update='level0' is for groups that compute in bf16 or fp32 alone, and {unable.name!r} has "
            f"{unable.dtype_names}: give compute_dtype=torch.bfloat16, or use update='auto', which updates such "
            "groups on the CPU"
        )
    if update == "auto" and any(group.formats.packed for group in groups):
        update = "level0"
    if update == "auto":
        update = "home" if measured is None else share_of_all(groups, options, measured)
    if isinstance(update, str):
        return able if update == "level0" else []
    on_host = _on_host(able, update)
    return [group for group in able if group not in on_host]


def share_of_all(groups: Sequence[Group], options: StreamingOptions, measured: Measured) -> float:
    """The share of all parameters that the host updates; groups that live on level 0 need neither link nor CPU."""
    able = [group for group in groups if group.trainable() and _can_update_on_level0(group)]
    kept = set(groups_kept(able, options.resident_bytes))
    streamed = [group for group in groups if group not in kept]
    part = sum(map(num_elements, streamed)) / max(1, sum(map(num_elements, groups)))
    return round(part * share_for(*measured(), pass_bytes(streamed, options.weight_bytes)), 2)


def share_for(link: float, cpu: float, pass_bytes: float = PASS_BYTES) -> float:
    """The share, 0 to `MAX_SHARE`, for a ``link`` in bytes/s each way and a ``cpu`` in parameters/s (see above)."""
    link *= LINK_USE
    share = OVERLAP * (pass_bytes + STATE_BYTES) / link / (STATE_BYTES / link + 1 / cpu)
    return 0.0 if share < MIN_SHARE else min(round(share, 2), MAX_SHARE)


def pass_bytes(groups: Sequence[Group], weight_bytes: int | None) -> float:
    """Bytes a parameter that a forward and its backward load: each weight twice, less what stays at the two turns."""
    whole, count = sum(group.num_bytes for group in groups), sum(num_elements(group) for group in groups)
    in_use = GROUPS_IN_USE * max((group.num_bytes for group in groups), default=0)
    stays = 0 if weight_bytes is None else min(max(0, weight_bytes - in_use), whole)
    return 2 * (whole - stays) / max(count, 1)


def _can_update_on_level0(group: Group) -> bool:
    """One compute type, fp32 or bf16 with a split master."""
    return group.uniform and group.slots[0].dtype in (torch.float32, torch.bfloat16)


def _on_host(groups: list[Group], share: float) -> list[Group]:
    """About ``share`` of the elements of ``groups``, evenly, so that link and worker have work all through backward.

    Not the first of the forward, which finish backward last and are needed first.
    """
    wanted = share * sum(num_elements(group) for group in groups)
    late = groups[int(len(groups) * FIRST_SHARE) :] if share < 1 - FIRST_SHARE else groups
    found: list[Group] = []
    taken = seen = 0
    total = sum(num_elements(group) for group in late) or 1
    for group in reversed(late):
        seen += num_elements(group)
        if taken + num_elements(group) / 2 <= wanted * seen / total:
            found.append(group)
            taken += num_elements(group)
    return found


def deferred_groups(groups: Sequence[Group], storage: StoragePlan | None = None) -> list[Group]:
    """The last of ``groups``, `DEFERRED_SHARE` of their elements: their updates on a GPU wait for the next forward.

    Backward needs the link for weights and states, forward for weights alone; the weights of these are needed last.
    Their gradients are stored and come back, 4 bytes a parameter more. None where some groups live on level 0.
    """
    if storage is not None and any(storage.is_resident(group) for group in groups):
        return []
    left = DEFERRED_SHARE * sum(num_elements(group) for group in groups)
    found = []
    for group in reversed(groups):
        if left < num_elements(group) / 2:
            break
        left -= num_elements(group)
        found.append(group)
    return found


def passing_bytes(group: Group) -> int:
    """Bytes of what passes through the ring: a group's remainders and moments."""
    narrow = group.slots[0].dtype.itemsize == 2 and not group.formats.stochastic
    kinds = [*(["remainder"] if narrow else []), *group.formats.moments]
    return sum(bytes_of(group, kind, num_elements(group)) for kind in kinds)


def state_bytes(group: Group) -> int:
    """Bytes of a group's weights, their masters and AdamW's states."""
    return group.num_bytes + passing_bytes(group)


def groups_kept(groups: Iterable[Group], resident_bytes: int) -> list[Group]:
    """The first of ``groups`` whose weights and states fit ``resident_bytes``."""
    found = []
    for group in groups:
        resident_bytes -= state_bytes(group)
        if resident_bytes < 0:
            break
        found.append(group)
    return found


def ring_bytes(groups: Sequence[Group], free_bytes: int) -> int:
    """What the ring for ``groups`` may take of ``free_bytes`` on level 0.

    Raises:
        InsufficientMemory: not even the smallest buffer fits.
    """
    least = max(smallest_buffer(group) for group in groups)
    wanted = max(2 * least, int(RING_GROUPS * max(passing_bytes(group) for group in groups)))
    found = min(wanted, int(free_bytes * RING_SHARE)) // 512 * 512
    if found < least:
        raise InsufficientMemory(
            f"updates on level 0 pass through {format_bytes(least)} of it at least, a quarter of the "
            f"{format_bytes(free_bytes)} that are free is less: raise fast_memory (the capacity of level 0), or use "
            "update='home' with states='fp32'",
            needed_bytes=int(least / RING_SHARE),
            available_bytes=free_bytes,
        )
    return found


def num_buffers(total_bytes: int, least_bytes: int = MIN_BUFFER_BYTES) -> int:
    """Into how many buffers, of ``least_bytes`` at least, a ring of ``total_bytes`` is cut."""
    wanted = max(total_bytes // BUFFER_BYTES, 8)
    return max(1, min(MAX_BUFFERS, wanted, total_bytes // least_bytes))


def spaces(capacities: Sequence[int], name: str = "cpu") -> list[LevelSpace]:
    """Empty levels of ``capacities`` bytes: level 0, called ``name`` in errors, RAM, and a disk."""
    levels = ((name, "ram", 512), ("cpu", "ram", PAGE), ("ssd", "disk", PAGE))
    return [
        LevelSpace(each, kind, size // alignment * alignment, 0, alignment)
        for size, (each, kind, alignment) in zip(capacities, levels, strict=False)
    ]
