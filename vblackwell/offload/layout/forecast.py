"""Bytes and seconds of a streamed step beforehand: the engine's own placement of a model, handed to the simulation of its lanes.

Nothing is moved and no GPU is asked; the model may be on meta. Seconds of compute come from a trace of the resident model, by phase;
groups get their parts by the parameters that they multiply tokens with, and the last of those the head's and the loss's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from vblackwell.machine.rates import Rates
from vblackwell.offload.layout.formats import EXACT
from vblackwell.offload.layout.groups import Group, find_groups, moment_ranges
from vblackwell.offload.layout.lanes import GroupWork, LanePlan, LaneRates, LaneTimes, simulate
from vblackwell.offload.layout.pieces import num_elements
from vblackwell.offload.layout.placement import Streamed, Wishes, paper_pool, reserve_streamed
from vblackwell.offload.layout.update_place import passing_bytes, share_of_all
from vblackwell.offload.layout.update_rates import share_for
from vblackwell.offload.movement.level0_updates import deferred_groups
from vblackwell.offload.storage.ranges import KEPT_KINDS, Homes

# Groups whose weights stay on level 0 until their update is home, beside the loaded ones: of at most four, an H200 was seen to have three.
LENT = 3
CPU_SLOWS_LINK = 0.9  # copies beside the CPU's update: 43 to 46 of 49.6 GB/s (docs/log-offload.md)


@dataclass(frozen=True)
class Foreseen:
    """A streamed model before it is one.

    Attributes:
        bytes_by_level: of each kind of range and of 'ring', 'loaded', 'leaving', 'lent' and 'undo', by level.
        lanes: what a step asks of them.
    """

    bytes_by_level: dict[str, list[int]]
    lanes: LanePlan

    def bytes_of(self, level: int) -> int:
        """All of one level; 0 for a level that is not there."""
        return sum(row[level] for row in self.bytes_by_level.values() if level < len(row))


def foresee(
    model: nn.Module, capacities: Sequence[int], wishes: Wishes, seconds: Mapping[str, float], *, input_bytes: int = 0,
    micro_batches: int = 1, undo: bool = False, clips: bool = False, name: str = "GPU",
) -> Foreseen:  # fmt: skip
    """Where the bytes of ``model``, which may be on meta, would be while it streams as on a GPU, and the tasks of a step.

    Args:
        capacities: bytes of level 0, of RAM and, if there is one, of the disk.
        wishes: with a stated ``update``; ``weight_bytes`` None means all that level 0 has, as without a GPU.
        seconds: of each phase of one micro-batch of a resident step, as `vblackwell.trace.work.phase_seconds` gives them.
        input_bytes: of the input of a checkpointed group that waits in host memory; 0: they stay on level 0.
        name: of level 0 in errors.
        undo: updates behind the backward keep a way back, in host memory as far as it goes. clips: every step clips.

    Raises:
        As `reserve_streamed`; InsufficientMemory too where optimizer states find no room.
    """
    pool = paper_pool(capacities, "cpu", name)
    found = reserve_streamed(model, pool, "plan", wishes)
    try:
        homes, trainable = found.homes, [group for group in found.groups if group.trainable()]
        late = set(found.slice_rows) | {group for group in trainable if group not in found.on_level0}
        late |= set(deferred_groups(found.on_level0, found.homes))
        held = trainable if undo or micro_batches > 1 else [group for group in trainable if group in late]
        # Of two micro-batches the second's gradient is added on level 0 where a final update follows it there, else at home: a way back
        # needs the sum as well.
        sums = [group for group in held if micro_batches > 2 or (micro_batches == 2 and (undo or group in late))]
        homes.reserve(
            [(group, "gradient") for group in held]
            + [(group, "accumulated") for group in sums if not is_wide(group)]
            + moment_ranges(trainable)
        )
        table = homes.bytes_by_level()
        _add_rest(table, found, pool.levels, trainable, undo)
        lanes = _plan(model, found, seconds, input_bytes)
        return Foreseen(table, replace(lanes, micro_batches=micro_batches, clips=clips, gradients_home=undo))
    finally:
        found.homes.close()


def is_wide(group: Group) -> bool:
    """Whether gradients of ``group`` are fp32 already, so that their sum needs no range of its own."""
    return all(slot.dtype.itemsize >= 4 for slot in group.slots)


def _add_rest(
    table: dict[str, list[int]], found: Streamed, levels: Sequence[Any], trainable: list[Group], undo: bool
) -> None:  # fmt: skip
    """What is in no group's range: staging, the ring, loaded weights, gradients on their way, and ways back."""
    count = len(levels)
    for level, row in enumerate(zip(*table.values(), strict=True)):
        staged = levels[level].used_bytes - sum(row)
        table.setdefault("staging", [0] * count)[level] = max(0, staged)
    largest = max((group.num_bytes for group in trainable), default=0)
    loaded = min(found.budget_bytes, sum(group.num_bytes for group in found.groups))
    table["ring"], table["loaded"] = [found.ring_bytes, *[0] * (count - 1)], [loaded, *[0] * (count - 1)]
    # One gradient is made while the one before leaves: three decoders on an H200 took 3 % more, 2 % less and 7 % more than all this.
    table["leaving"] = [2 * largest, *[0] * (count - 1)]
    table["lent"] = [LENT * largest if found.on_level0 else 0, *[0] * (count - 1)]
    if undo:
        homes = found.homes
        moving = [group for group in trainable if homes.range(group, "weight").level > 0]
        wanted = sum(homes.size_of(group, kind) for group in moving for kind in KEPT_KINDS if (group, kind) in homes)
        free = levels[1].capacity_bytes - levels[1].used_bytes
        table["undo"] = [0, min(wanted, free), *[0] * (count - 2)]


def streamed_times(
    model: nn.Module, capacities: Sequence[int], wishes: Wishes, seconds: Mapping[str, float], rates: Rates, input_bytes: int = 0
) -> LaneTimes:  # fmt: skip
    """One step of ``model`` streaming through levels of these capacities, its update placed as ``wishes`` say ('auto' by ``rates``).

    Arguments and errors as `foresee`.
    """
    if wishes.update == "auto":
        wishes = replace(wishes, update=auto_share(model, wishes, rates))
    return simulate(foresee(model, capacities, wishes, seconds, input_bytes=input_bytes).lanes, lane_rates(rates))


def auto_share(model: nn.Module, wishes: Wishes, rates: Rates) -> float:
    """The share of the updates at home that ``rates`` ask for (`share_for`)."""
    groups = find_groups(model, wishes.compute_dtype, wishes.groups, EXACT)[0]
    measured = functools.partial(share_for, rates.up_both, rates.cpu_adamw)
    return share_of_all(groups, wishes.weight_bytes, wishes.resident_bytes, measured)


def lane_rates(rates: Rates) -> LaneRates:
    """What the lanes need of a machine's rates."""
    return LaneRates(
        rates.up, rates.down, rates.up_both, rates.down_both, rates.cpu_adamw, rates.memory, CPU_SLOWS_LINK, rates.disk_read,
        rates.disk_write, rates.adds_per_update,
    )  # fmt: skip


def _plan(model: nn.Module, found: Streamed, seconds: Mapping[str, float], input_bytes: int) -> LanePlan:
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    on_level0, late = set(found.on_level0), set(deferred_groups(found.on_level0, found.homes))
    multiplied = [
        sum(slot.num_elements for slot in group.slots if id(slot.param) not in looked_up) for group in found.groups
    ]
    last = max((index for index, count in enumerate(multiplied) if count), default=len(found.groups) - 1)
    body = sum(count for index, count in enumerate(multiplied) if index != last) or 1
    works = []
    for index, (group, count) in enumerate(zip(found.groups, multiplied, strict=True)):
        if index == last:
            parts = seconds.get("loss", 0.0), seconds.get("loss_backward", 0.0)
        else:
            parts = tuple(seconds.get(phase, 0.0) * count / body for phase in ("forward", "backward"))
        # Blocks, not the norm behind them.
        inputs = input_bytes if index != last and count * 10 > max(multiplied) else 0
        work = _work(group, parts, inputs, group not in on_level0, group in late)
        works.append(replace(work, **_places(group, found.homes)))
    states = [passing_bytes(group) / num_elements(group) for group in found.on_level0]
    width = max((slot.dtype.itemsize for group in found.groups for slot in group.slots), default=2)
    up = max(states, default=10.0)
    return LanePlan(
        tuple(works), found.budget_bytes, max(1, found.ring_bytes), states_up=up, states_down=up + width, gradient=float(width),
        disk_sets=max(1, len(found.homes.sets)),
    )  # fmt: skip


def _places(group: Group, homes: Homes) -> dict[str, Any]:
    """Which of the group's ranges are on level 0, and which below RAM."""
    held = {kind: homes.range(group, kind) for kind in KEPT_KINDS if (group, kind) in homes}
    below = {kind: each.num_bytes for kind, each in held.items() if each.level > 0 and not each.is_addressable}
    states = sum(size for kind, size in below.items() if kind != "weight")
    return {
        "kept": held["weight"].level == 0,
        "disk_read": states if group.trainable() else 0,
        "disk_write": sum(below.values()) if group.trainable() else 0,
        "weights_on_disk": "weight" in below,
    }


def _work(group: Group, parts: Sequence[float], inputs: int, at_home: bool, deferred: bool) -> GroupWork:
    trained = num_elements(group) if group.trainable() else 0
    return GroupWork(
        trained, group.num_bytes, parts[0], parts[1], inputs, at_home and bool(trained), deferred and not at_home
    )
