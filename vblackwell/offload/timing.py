"""The seconds of a streamed step beforehand: the engine's own placement of a model, handed to the simulation of its lanes.

Nothing is moved and no GPU is asked; the model may be on meta. Seconds of compute come from a trace of the resident model, by phase;
groups get their parts by the parameters that they multiply tokens with, and the last of those the head's and the loss's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from vblackwell.offload.formats import EXACT
from vblackwell.offload.groups import Group, find_groups
from vblackwell.offload.level0_updates import deferred_groups
from vblackwell.offload.pieces import num_elements
from vblackwell.offload.streamed import Streamed, Wishes, paper_pool, reserve_streamed
from vblackwell.offload.update_place import pass_bytes, passing_bytes
from vblackwell.offload.update_rates import share_for
from vblackwell.plan.lanes import GroupWork, LanePlan, LaneRates, LaneTimes, simulate
from vblackwell.plan.rates import Rates

CPU_SLOWS_LINK = 0.9  # copies beside the CPU's update: 43 to 46 of 49.6 GB/s (docs/log-offload.md)


def streamed_times(
    model: nn.Module, capacities: Sequence[int], wishes: Wishes, seconds: Mapping[str, float], rates: Rates, input_bytes: int = 0
) -> LaneTimes:  # fmt: skip
    """One step of ``model`` streaming through levels of these capacities, its update placed as ``wishes`` say ('auto' by ``rates``).

    Args:
        capacities: bytes of level 0, of RAM and, if there is one, of the disk, which is taken to be no bottleneck.
        seconds: of each phase of a resident step, as `vblackwell.plan.work.phase_seconds` gives them.
        input_bytes: of the input of a checkpointed group that waits in host memory; 0: they stay on the GPU.

    Raises:
        As `reserve_streamed`.
    """
    if wishes.update == "auto":
        groups = find_groups(model, wishes.compute_dtype, wishes.groups, EXACT)[0]
        wishes = replace(
            wishes, update=share_for(rates.up_both, rates.cpu_adamw, pass_bytes(groups, wishes.weight_bytes))
        )
    found = reserve_streamed(model, paper_pool(capacities, "cpu"), "plan", wishes)
    try:
        return simulate(_plan(model, found, seconds, input_bytes), lane_rates(rates))
    finally:
        found.homes.close()


def lane_rates(rates: Rates) -> LaneRates:
    """What the lanes need of a machine's rates."""
    return LaneRates(
        rates.up, rates.down, rates.up_both, rates.down_both, rates.cpu_adamw, rates.memory, CPU_SLOWS_LINK
    )


def _plan(model: nn.Module, found: Streamed, seconds: Mapping[str, float], input_bytes: int) -> LanePlan:
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    on_level0, late = set(found.on_level0), set(deferred_groups(found.on_level0))
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
        works.append(_work(group, parts, inputs, group not in on_level0, group in late))
    states = [passing_bytes(group) / num_elements(group) for group in found.on_level0]
    width = max((slot.dtype.itemsize for group in found.groups for slot in group.slots), default=2)
    up = max(states, default=10.0)
    return LanePlan(
        tuple(works), found.budget_bytes, max(1, found.ring_bytes), states_up=up, states_down=up + width, gradient=float(width)
    )  # fmt: skip


def _work(group: Group, parts: Sequence[float], inputs: int, at_home: bool, deferred: bool) -> GroupWork:
    trained = num_elements(group) if group.trainable() else 0
    return GroupWork(
        trained, group.num_bytes, parts[0], parts[1], inputs, at_home and bool(trained), deferred and not at_home
    )
