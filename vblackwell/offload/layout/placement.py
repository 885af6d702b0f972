"""Which level holds each byte of a streamed model, and where its AdamW runs: arithmetic, which the runtime carries out.

On a GPU, updates run on level 0 for most groups: a CPU's update is what makes offloaded training slow, while a group's
states pass the link in about the time of its backward. The CPU gets a share. Without a GPU the host updates all but
8-bit moments, which are updated on level 0 everywhere.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, InsufficientMemory, Unsupported
from vblackwell.offload.layout.groups import (
    EXACT,
    MIN_BUFFER_BYTES,
    OLD_KINDS,
    OLD_WEIGHT,
    PARAMETER_KINDS,
    Formats,
    Found,
    Group,
    Site,
    find_groups,
    moment_ranges,
    num_elements,
    passing_bytes,
    rows_per_slice,
    smallest_buffer,
    weight_ranges,
)
from vblackwell.offload.layout.places import OLD_PLACES, PLACES
from vblackwell.offload.layout.storage_plan import GOLDEN, PAGE, LevelSpace, StoragePlan
from vblackwell.units import MiB, format_bytes

# On a GPU, level 0's capacity is the whole process: this share is left to activations and workspaces...
CUDA_ACTIVATION_SHARE = 0.5
# ...and weights take no more than the groups in use, loading and turning around, unless ``weight_bytes`` says so.
CUDA_GROUPS = 6
# Beyond the `GROUPS_IN_USE` no more than this share of a GPU, and the ring no more than this share: activations of a
# large model have to fit next to groups of 5 % of level 0.
CUDA_SHARE = 0.15
MAX_RESIDENT = 0.75  # of level 0: what groups that live there may take of it

# The ring holds one group's states and half of the next: what comes in while a group computes, and what goes out.
RING_GROUPS = 1.5
RING_SHARE = 0.25  # of level 0 at most, where that is no GPU
# Of three or four kinds. Every piece costs the host 0.2 ms, and the last one nothing hides.
BUFFER_BYTES = 144 * MiB
MIN_BUFFERS, MAX_BUFFERS = 4, 24

LATE_SHARE = 0.15  # of the elements that are updated on level 0
FIRST_SHARE = 0.15  # of the groups: they are not updated on the host while others can be
GROUPS_IN_USE = 3  # of the loaded ones: the one that computes, the next, and one on its way
# Groups whose weights stay on level 0 while they are stored after an update there; the host may be many groups ahead.
MAX_LOCKED = 4
MAX_IN_FLIGHT = 5  # gradients that leave level 0: where one may not, the GPU waits for the link in its next backward
# Of either, on a GPU, as many as begin within this share of level 0: two where a group takes 5 % of it.
PLACES_SHARE = 0.09
NEWEST = 2  # inputs of checkpoints that stay on level 0 in any case: one is read by its layer, one is on its way
AHEAD = 3  # checkpoints whose inputs are loaded before backward asks for them
# On a GPU as many as begin within this share of level 0: where an input takes more, a layer's backward takes 10 times
# what the link needs for the next one.
AHEAD_SHARE = 0.03


@dataclass(frozen=True)
class StreamingOptions:
    """What the user said about streaming; `enable_vgpu_stack_optimization` explains each. Raises ConfigurationError:
    ``update`` is neither a place nor a share, or the formats exclude it.
    """

    compute_dtype: torch.dtype | None = None
    groups: tuple[str, ...] | None = None
    update: str | float = "auto"
    resident_bytes: int = 0
    weight_bytes: int | None = None
    activation_bytes: int = 0
    formats: Formats = EXACT

    def __post_init__(self) -> None:
        update = OLD_PLACES.get(self.update, self.update)
        object.__setattr__(self, "update", update)
        if isinstance(update, str) and update not in PLACES:
            raise ConfigurationError(f"update {update!r} is none of {', '.join(PLACES)}, nor a share between 0 and 1")
        if not isinstance(update, str) and not 0 <= update <= 1:
            raise ConfigurationError(
                f"update {update} is no share of the parameters to update on the host: give 0 to 1"
            )
        if self.formats.packed and update not in ("auto", "device", 0):
            raise ConfigurationError(
                f"update={update!r} would update on the host, and {self.formats.states} states are updated on level 0 "
                "alone: use 'device' or 'auto'"
            )


@dataclass(frozen=True)
class StreamedPlacement:
    """A model's groups and where their bytes are."""

    groups: list[Group]
    sites: list[Site]
    storage: StoragePlan  # the ranges of its weights and masters, and of groups that live on level 0
    budget_bytes: int  # what loaded weights may take of level 0
    slice_rows: dict[Group, int]  # rows a slice of groups that are cut
    on_level0: list[Group]  # whose AdamW runs there
    ring_bytes: int  # of level 0, through which their states pass
    max_locked: int  # groups whose weights an update holds on level 0 until they are stored
    max_in_flight: int  # gradients on level 0, the one that fills and those that leave
    # What weights may have in addition of what steps turn out to leave of level 0; None: steps are not watched.
    spare_bytes: int | None
    able: list[Group]  # to be updated on level 0

    def updated(self, update: str | float) -> "StreamedPlacement":
        """The same with another ``update``, of which no other size follows; self where nothing is on level 0."""
        if not self.on_level0:
            return self
        chosen, resident = set(groups_on_level0(self.able, update)), self.storage.resident
        on_level0 = [group for group in self.groups if group in chosen or group.index in resident]
        updated = frozenset(group.index for group in on_level0) - resident
        return replace(self, on_level0=on_level0, storage=replace(self.storage, on_level0=updated))

    @property
    def trainable(self) -> list[Group]:
        return [group for group in self.groups if group.trainable()]

    @cached_property
    def sent_twice(self) -> set[Group]:
        """Sliced groups of several modules, each of which sends its gradient: a half of it is none to update from."""
        uses = Counter(group for site in self.sites for group in site.groups)
        return {group for group in self.slice_rows if uses[group] > 1}

    def gradient_ranges(self, groups: Sequence[Group], micro_batches: int, *, undo: bool) -> list[tuple[Group, str]]:
        """The ranges below level 0 that gradients of ``groups`` and their sums need. ``undo``: their updates wait for
        the step, or can be rolled back, which takes the gradient; without it an update on level 0 that follows its
        backward at once uses up the last gradient there, and of two micro-batches the sum as well.
        """
        held, sums = self._gradients_held(groups, micro_batches, undo)
        return [(g, "gradient") for g in held] + [(g, "accumulated") for g in sums if not g.is_fp32]

    def _gradients_held(
        self, groups: Sequence[Group], micro_batches: int, undo: bool
    ) -> tuple[list[Group], list[Group]]:
        """Of ``groups`` those whose gradients are held below level 0, and those that are summed there."""
        at_once = set(self.on_level0) - set(self.slice_rows)
        late = [group for group in groups if undo or group not in at_once or not group.all_trainable()]
        held = list(groups) if micro_batches > 1 else late
        sums = held if micro_batches > 2 else late if micro_batches == 2 else [g for g in late if g in self.sent_twice]
        return held, sums

    def incoming_bytes(self, micro_batches: int, *, undo: bool) -> int:
        """RAM in one piece that a GPU's gradients need on their way to a sum; slices find some, or wait for this."""
        _, sums = self._gradients_held(self.trainable, micro_batches, undo)
        if self.storage.levels[0].kind != "gpu":
            return 0
        return max((group.num_bytes for group in sums if group not in self.slice_rows), default=0)

    def early(self, storage: StoragePlan, micro_batches: int) -> tuple[list[Group], list[Group]]:
        """Those groups that are updated before their step, as far as there is room for a rollback where all of
        ``storage`` is placed: whose states stay a step behind, and that have shadows.
        """
        late = set(late_groups(self.on_level0, self.storage)) if micro_batches > 1 else set[Group]()
        waiting = late | self.sent_twice
        groups = [group for group in self.trainable if group.all_trainable() and group not in waiting]
        able = [g for g in groups if micro_batches == 1 and g not in self.slice_rows and may_be_behind(g, storage)]
        return early_groups(groups, able, self.on_level0, storage)


def place_streamed(
    model: nn.Module, levels: Sequence[LevelSpace], options: StreamingOptions, found: Found | None = None
) -> StreamedPlacement:
    """Find the groups of ``model`` and place them; raises as `find_groups` and `place_groups`. ``found``: they are
    known."""
    groups, sites = found or find_groups(model, options.compute_dtype, options.groups, options.formats)
    return place_groups(groups, sites, levels, options)


def place_groups(
    groups: list[Group], sites: list[Site], levels: Sequence[LevelSpace], options: StreamingOptions
) -> StreamedPlacement:
    """Place the weights and masters of ``groups``, which ``sites`` use. With update='auto' the host updates all that it
    may: see `vblackwell.offload.layout.forecast.fastest_updates`.

    Raises ConfigurationError: there is one level, or nothing could live on level 0; InsufficientMemory: level 0 cannot
    hold the largest group, or the lower levels the model.
    """
    trainable = [group for group in groups if group.trainable()]
    trained = set(trainable)
    level, resident_bytes, free = levels[0], options.resident_bytes, levels[0].free_bytes
    # What with its gradient does not fit level 0 is cut, if it can be.
    large = [group for group in groups if group.num_bytes * (2 if group in trained else 1) > free]
    slice_rows = {group: rows for group in large if (rows := rows_per_slice(group, sites, free // 2))}
    whole = [group for group in groups if group not in slice_rows]
    # A sliced leaf's weights and gradient come from storage, as those of any update that has to wait for its step.
    able = groups if options.formats.packed else whole
    on_level0 = groups_on_level0(able, options.update)
    on_gpu = level.kind == "gpu"
    ring = ring_bytes(on_level0, free, on_gpu=on_gpu) if on_level0 else 0
    largest = max((group.num_bytes for group in whole if group in trained), default=0)
    max_locked, max_in_flight = (places(most, largest, free, on_gpu=on_gpu) for most in (MAX_LOCKED, MAX_IN_FLIGHT))
    resident = groups_kept([group for group in on_level0 if group in whole], resident_bytes)
    kept_bytes = sum(state_bytes(group) for group in resident)
    if resident_bytes and not on_level0:
        kept = f"resident_bytes={resident_bytes} keeps groups that are updated on level 0"
        raise ConfigurationError(f"{kept}, and none is: use update='device'")
    if kept_bytes > free * MAX_RESIDENT:
        raise InsufficientMemory(
            f"resident_bytes would keep {format_bytes(kept_bytes)} on level 0 ({level.name}), more than "
            f"{MAX_RESIDENT:.0%} of the {format_bytes(free)} that are free there: lower it, or raise fast_memory (the "
            "capacity of level 0)",
            needed_bytes=int(kept_bytes / MAX_RESIDENT),
            available_bytes=free,
        )
    rest = replace(level, capacity_bytes=level.capacity_bytes - ring - kept_bytes)
    locked_bytes = max_locked * largest if on_level0 else 0
    budget = _weights_budget(whole, sites, rest, options, int(free * CUDA_SHARE), locked_bytes, largest)
    if len(levels) < 2:
        raise ConfigurationError("streaming needs a level below level 0: add a 'cpu' or 'ssd' level to the stack")
    # Slices are cut from addressable ranges: those first.
    ordered = sorted(groups, key=lambda group: group not in slice_rows)
    storage = StoragePlan.empty(
        levels, range(1, len(levels)), groups, resident, on_level0, options.activation_bytes
    ).with_ranges(
        weight_ranges(ordered),
        # With gradients that wait for an update on the host: what spills passes through RAM that weights must leave.
        later=[(group, "gradient") for group in trainable if group not in on_level0] + moment_ranges(trainable),
    )
    refuse_slices_on_disk(slice_rows, storage)
    spare_bytes = (0 if options.weight_bytes is not None else free) if on_gpu and trainable else None
    places_of = (max_locked, max_in_flight, spare_bytes, able)
    return StreamedPlacement(groups, sites, storage, budget, slice_rows, on_level0, ring, *places_of)


def refuse_slices_on_disk(sliced: Iterable[Group], storage: StoragePlan) -> None:
    """Raise InsufficientMemory if weights that are to be cut into slices are on a disk."""
    for group in sliced:
        level = storage.level_of(group, "weight")
        if level.kind == "disk":
            raise InsufficientMemory(
                f"{group.name!r} is larger than level 0 and must be cut from RAM, but only {level.name} has room "
                f"for its {format_bytes(group.num_bytes)}: raise host_memory",
                needed_bytes=group.num_bytes,
                available_bytes=0,
            )


def _weights_budget(
    groups: Sequence[Group],
    sites: Sequence[Site],
    level: LevelSpace,
    options: StreamingOptions,
    share_bytes: int,
    locked_bytes: int,
    gradient: int,
) -> int:
    """What loaded weights may take of ``level``: as asked for, or all but the largest ``gradient``, on a GPU a few
    groups, as far as ``share_bytes`` go, or those in use; with those that updates hold no more than half of it. What
    one module's forward needs at once in any case.
    """
    free = level.free_bytes
    weights = max((group.num_bytes for group in groups), default=0)
    together = max(held_together(sites, groups), key=_weight_bytes, default=[])
    least = max(weights, _weight_bytes(together))
    if least + gradient > free:
        largest = max(groups, key=lambda group: group.num_bytes)
        named = f"the largest layer group, {largest.name!r}, needs"
        if least > weights:
            named = f"{', '.join(repr(group.name) for group in together)}, which are in use together, need"
        raise InsufficientMemory(
            f"level 0 ({level.name}) has {format_bytes(free)} free, and {named} "
            f"{format_bytes(least + gradient)} there (weights {format_bytes(least)}, gradient "
            f"{format_bytes(gradient)}): raise fast_memory (the capacity of level 0)",
            needed_bytes=least + gradient,
            available_bytes=free,
        )
    budget = free - gradient
    if options.weight_bytes is not None:
        return max(least, min(budget, options.weight_bytes))
    if level.kind == "gpu":
        few = min(CUDA_GROUPS * weights, max(GROUPS_IN_USE * weights, share_bytes))
        budget = max(least, min(budget, few, int(free * (1 - CUDA_ACTIVATION_SHARE)) - locked_bytes))
    return budget


def held_together(sites: Sequence[Site], groups: Iterable[Group]) -> list[list[Group]]:
    """For each of ``sites`` those of ``groups`` that are on level 0 in its forward: its own, and those of modules
    around it.
    """
    whole, around = set(groups), dict[nn.Module, dict[Group, None]]()
    always = [site for site in sites if site.when is Site.when]
    asked = {site.module for site in always}
    for site in always:
        for module in asked.intersection(site.modules):
            around.setdefault(module, {}).update(dict.fromkeys(site.groups))
    return [[group for group in around[site.module] if group in whole] for site in always]


def _weight_bytes(groups: Iterable[Group]) -> int:
    return sum(group.num_bytes for group in groups)


# -- where AdamW runs --------------------------------------------------------------------------------------------------


def groups_on_level0(groups: Sequence[Group], update: str | float) -> list[Group]:
    """Those of ``groups``, in the order of the forward, that are updated on level 0; for 'auto' those that are updated
    nowhere else. Unsupported: 'device', and one cannot be updated there.
    """
    able = _able_on_level0(groups)
    others = [] if update != "device" else [group for group in groups if group not in able]
    unable = next((group for group in others if group.trainable()), None)
    if unable is not None:
        raise Unsupported(
            f"update='device' is for groups that compute in bf16 or fp32 alone, and {unable.name!r} has "
            f"{unable.dtype_names}: give compute_dtype=torch.bfloat16, or use update='auto', which updates such "
            "groups on the CPU"
        )
    if update == "auto" and any(group.formats.packed for group in groups):
        update = "device"
    if isinstance(update, str):
        return able if update == "device" else []
    on_host = set(_on_host(able, update))
    return [group for group in able if group not in on_host]


def _able_on_level0(groups: Iterable[Group]) -> list[Group]:
    """Those with something to train, and one compute type: fp32, or bf16 with a split master."""
    types = (torch.float32, torch.bfloat16)
    return [group for group in groups if group.trainable() and group.uniform and group.slots[0].dtype in types]


def _on_host(groups: list[Group], share: float) -> list[Group]:
    """About ``share`` of the elements of ``groups``, evenly, so that link and worker have work all through backward;
    not the first of the forward, which finish backward last and are needed first.
    """
    late = groups[int(len(groups) * FIRST_SHARE) :] if share < 1 - FIRST_SHARE else groups
    wanted, total = share * sum(map(num_elements, groups)), sum(map(num_elements, late)) or 1
    found, taken, seen = list[Group](), 0, 0
    for group in reversed(late):
        seen += num_elements(group)
        if taken + num_elements(group) / 2 <= wanted * seen / total:
            found.append(group)
            taken += num_elements(group)
    return found


def late_groups(groups: Sequence[Group], storage: StoragePlan) -> list[Group]:
    """The last of ``groups``, `LATE_SHARE` of their elements. Of several micro-batches the last one's backward is short
    for all updates on a GPU: those of the groups that it comes to first wait for the next forward. None without a GPU,
    or where some groups live on it.
    """
    if storage.levels[0].kind != "gpu" or storage.resident:
        return []
    left, found = LATE_SHARE * sum(map(num_elements, groups)), []
    for group in reversed(groups):
        if left < num_elements(group) / 2:
            break
        left -= num_elements(group)
        found.append(group)
    return found


def old_kinds(group: Group, *, on_host: bool) -> tuple[str, ...]:
    """The ranges that states of ``group`` need to be a step behind. On level 0 an update reads the last gradient before
    the next one takes its place in storage; one on the host comes after that.
    """
    return OLD_KINDS if on_host else (OLD_WEIGHT,)


def may_be_behind(group: Group, storage: StoragePlan) -> bool:
    """Whether ``group`` has exact states of one type, in RAM."""
    if group.formats.packed or group not in _able_on_level0([group]) or (group, "master") in storage:
        return False
    kinds = [kind for kind in (*PARAMETER_KINDS, "gradient") if (group, kind) in storage]
    placed = [storage.range(group, kind).level for kind in kinds]
    return all(level and storage.levels[level].kind == "ram" for level in placed)


def early_groups(
    groups: Sequence[Group], able: Collection[Group], on_level0: Collection[Group], storage: StoragePlan
) -> tuple[list[Group], list[Group]]:
    """Which of ``groups``, in the order of the forward, are (a step behind, shadowed). Of those that are ``able`` to be
    behind, ones that the host updates are, as that costs it nothing; others have shadows as far as there is room next
    to all of these, evenly over the model, because the last gradient and weight of one that is behind pass the link
    again. Where not even those have room, the first do: updates of the others, under the next forward, have the most
    time there. No group that lives on level 0 is either.
    """
    free = [level.free_bytes for level in storage.levels]
    if storage.has_host_level:
        free[storage.staging_level] -= storage.set_aside_bytes

    def cost(group: Group, kinds: Iterable[str]) -> int:
        return sum(storage.levels[storage.staging_level].held_bytes(group.size_of(kind)) for kind in kinds)

    able, on_level0, behind = dict.fromkeys(able), set(on_level0), dict[Group, int]()  # in order, and found at once
    for group in sorted(able, key=lambda group: group not in on_level0):
        needed = cost(group, old_kinds(group, on_host=group not in on_level0))
        if needed <= free[storage.staging_level]:
            free[storage.staging_level] -= needed
            behind[group] = needed
    shadowed = set[Group]()
    left = [group for group in behind if group in on_level0]
    spread = sorted(range(len(left)), key=lambda number: number * GOLDEN % 1)
    for group in [*(left[number] for number in spread), *(each for each in groups if each not in able)]:
        ranges = [storage.range(group, kind) for kind in PARAMETER_KINDS if (group, kind) in storage]
        after = free.copy()
        after[storage.staging_level] += behind.get(group, 0)
        for each in ranges:
            after[each.level] -= storage.levels[each.level].held_bytes(each.num_bytes)
        if ranges and all(each.level and after[each.level] >= 0 for each in ranges):
            free = after
            shadowed.add(group)
            behind.pop(group, None)
    return [group for group in groups if group in behind], [group for group in groups if group in shadowed]


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


def ring_bytes(groups: Sequence[Group], free_bytes: int, *, on_gpu: bool) -> int:
    """What the ring for ``groups`` may take of ``free_bytes`` on level 0; InsufficientMemory if no buffer fits."""
    share = CUDA_SHARE if on_gpu else RING_SHARE
    least = max(smallest_buffer(group) for group in groups)
    wanted = max(2 * least, int(RING_GROUPS * max(passing_bytes(group) for group in groups)))
    found = min(wanted, int(free_bytes * share)) // 512 * 512
    if found < least:
        raise InsufficientMemory(
            f"updates on level 0 pass through {format_bytes(least)} of it at least, {share:.0%} of the "
            f"{format_bytes(free_bytes)} that are free is less: raise fast_memory (the capacity of level 0), or use "
            "update='host' with states='fp32'",
            needed_bytes=int(least / share),
            available_bytes=free_bytes,
        )
    return found


def places(most: int, each_bytes: int, free_bytes: int, *, on_gpu: bool, share: float = PLACES_SHARE) -> int:
    """``most`` buffers of ``each_bytes``, fewer (one at least) where they exceed a ``share`` of a GPU's level 0."""
    if not on_gpu or not each_bytes:
        return most
    return max(1, min(most, math.ceil(share * free_bytes / each_bytes)))


def checkpoints_ahead(input_bytes: int, level0_bytes: int, *, on_gpu: bool) -> int:
    """Of how many checkpoints the inputs, of ``input_bytes``, are on their way to level 0 while one is computed."""
    return places(AHEAD, input_bytes, level0_bytes, on_gpu=on_gpu, share=AHEAD_SHARE)


def num_buffers(total_bytes: int, least_bytes: int = MIN_BUFFER_BYTES) -> int:
    """Into how many buffers, of ``least_bytes`` at least, a ring of ``total_bytes`` is cut."""
    wanted = max(total_bytes // BUFFER_BYTES, MIN_BUFFERS)
    return max(1, min(MAX_BUFFERS, wanted, total_bytes // least_bytes))


def spaces(capacities: Sequence[int], *, on_gpu: bool) -> list[LevelSpace]:
    """Empty levels of ``capacities`` bytes: level 0, a GPU or an arena, RAM, and a disk."""
    level0 = ("GPU", "gpu", 512) if on_gpu else ("arena", "ram", 512)
    levels = (level0, ("cpu", "ram", PAGE), ("ssd", "disk", PAGE))
    return [
        LevelSpace(each, kind, size // alignment * alignment, 0, alignment)
        for size, (each, kind, alignment) in zip(capacities, levels, strict=False)
    ]
