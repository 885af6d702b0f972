"""Where each group's AdamW runs, and the level-0 memory that updates there pass through.

On a GPU, level 0 for most: a CPU's update is what makes offloaded training slow, while the states of a group pass the link in about
the time that its backward takes. A share stays at home, where the CPU updates some groups while the link serves the others. Without a
GPU, level 0 is RAM like the levels below, and the states would only be copied to and fro.

Groups with 8-bit moments (`formats`) are updated on level 0 everywhere: the update at home is torch's, which knows no such states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from vblackwell.errors import ConfigurationError, InsufficientMemory, Unsupported
from vblackwell.offload.layout.formats import EXACT, Formats
from vblackwell.offload.layout.groups import Group
from vblackwell.offload.layout.pieces import num_elements
from vblackwell.offload.layout.update_rates import balanced_share
from vblackwell.offload.movement.lane import SMALLEST_BUFFER, bytes_of, smallest_buffer
from vblackwell.units import MiB, format_bytes

PLACES = ("auto", "level0", "home")
# The ring holds one group's states and half of the next: what comes in while a group computes, and what is on its way out.
RING_GROUPS = 1.5
FIRST_SHARE = 0.15  # of the groups: they are not updated at home while others can be
GROUPS_IN_USE = 3  # of the loaded ones: the one that computes, the next, and one on its way
RING_SHARE = 0.25  # of level 0 at most
BUFFER_BYTES = (
    144 * MiB
)  # of three or four kinds. Every piece costs the host 0.2 ms (docs/log-offload.md), and the last one nothing hides
MOST_BUFFERS = 24


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
            f"update={update!r} would update at home, and {formats.states} states are updated on level 0 alone: use 'level0' or 'auto'"
        )


def groups_on_level0(
    groups: Iterable[Group], update: str | float, device: torch.device, weight_bytes: int | None = None, resident_bytes: int = 0
) -> list[Group]:  # fmt: skip
    """The groups of ``groups`` (in the order of the forward) that are updated on level 0.

    Args:
        update: 'level0', 'home', the share of the parameters that is updated at home, or 'auto': the share that keeps a GPU's link and the
            CPU busy alike (`balanced_share`), and everything at home without a GPU.
        weight_bytes: what loaded weights may take of level 0; None: the few groups in use.
        resident_bytes: what groups that live on level 0 with their states may take of it.

    Raises:
        Unsupported: 'level0', and a group that is to be trained cannot be updated there. With 'auto' or a share it is updated at home.
    """
    groups = list(groups)
    if update == "level0":
        _refuse_unable(groups)
    if update == "auto":
        packed = any(group.formats.packed for group in groups)
        if packed:
            update = "level0"
        elif device.type == "cuda":
            update = share_of_all(groups, weight_bytes, resident_bytes, functools.partial(balanced_share, device))
        else:
            update = "home"
    able = [group for group in groups if group.trainable() and _can_update_on_level0(group)]
    if isinstance(update, str):
        return able if update == "level0" else []
    home = _spread(able, update)
    return [group for group in able if group not in home]


def share_of_all(
    groups: Sequence[Group], weight_bytes: int | None, resident_bytes: int, share_for_pass: Callable[[float], float]
) -> float:
    """The share of all parameters that ``share_for_pass(pass_bytes)`` asks for among those that do not live on level 0.

    What lives there asks neither the link nor the CPU.
    """
    kept = set(
        groups_kept([group for group in groups if group.trainable() and _can_update_on_level0(group)], resident_bytes)
    )
    streamed = [group for group in groups if group not in kept]
    part = sum(map(num_elements, streamed)) / max(1, sum(map(num_elements, groups)))
    return round(part * share_for_pass(pass_bytes(streamed, weight_bytes)), 2)


def pass_bytes(groups: Sequence[Group], weight_bytes: int | None) -> float:
    """Bytes a parameter that are loaded for a forward and its backward: each weight twice, but for what stays at the two turns."""
    whole, count = sum(group.num_bytes for group in groups), sum(num_elements(group) for group in groups)
    in_use = GROUPS_IN_USE * max((group.num_bytes for group in groups), default=0)
    stays = 0 if weight_bytes is None else min(max(0, weight_bytes - in_use), whole)
    return 2 * (whole - stays) / max(count, 1)


def _refuse_unable(groups: Iterable[Group]) -> None:
    for group in groups:
        if group.trainable() and not _can_update_on_level0(group):
            found = ", ".join(sorted({str(slot.dtype).removeprefix("torch.") for slot in group.slots}))
            raise Unsupported(
                f"update='level0' is for groups that compute in bf16 or fp32 alone, and {group.name!r} has {found}: give "
                "compute_dtype=torch.bfloat16, or use update='auto', which updates such groups on the CPU"
            )


def _spread(groups: list[Group], share: float) -> list[Group]:
    """About ``share`` of the elements of ``groups``, evenly over those that are not the first of the forward.

    Evenly, because the link and the worker then both have work all through backward; not the first, because those finish backward last and
    are needed first.
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


def _can_update_on_level0(group: Group) -> bool:
    """One compute type, fp32 or bf16 with a split master; others are updated at home."""
    return group.uniform and group.slots[0].dtype in (torch.float32, torch.bfloat16)


def state_bytes(group: Group) -> int:
    """Bytes of a group's weights, their masters and AdamW's states."""
    return group.num_bytes + passing_bytes(group)


def passing_bytes(group: Group) -> int:
    """Bytes of what passes through the ring: a group's remainders and moments."""
    narrow = group.slots[0].dtype.itemsize == 2 and not group.formats.stochastic
    kinds = [*(["remainder"] if narrow else []), *group.formats.moments]
    return sum(bytes_of(group, kind, num_elements(group)) for kind in kinds)


def groups_kept(groups: Iterable[Group], resident_bytes: int) -> list[Group]:
    """The first of ``groups`` whose weights and states fit ``resident_bytes``."""
    found = []
    for group in groups:
        resident_bytes -= state_bytes(group)
        if resident_bytes < 0:
            break
        found.append(group)
    return found


def ring_bytes(groups: Iterable[Group], free_bytes: int) -> int:
    """What the ring for ``groups`` may take of ``free_bytes`` on level 0.

    Raises:
        InsufficientMemory: not even the smallest buffer fits.
    """
    groups = list(groups)
    least = max(smallest_buffer(group) for group in groups)
    wanted = max(2 * least, int(RING_GROUPS * max(passing_bytes(group) for group in groups)))
    found = min(wanted, int(free_bytes * RING_SHARE)) // 512 * 512
    if found < least:
        raise InsufficientMemory(
            f"updates on level 0 pass through {format_bytes(least)} of it at least, a quarter of the {format_bytes(free_bytes)} "
            "that are free is less: raise fast_memory (the capacity of level 0), or use update='home' with states='fp32'",
            needed_bytes=int(least / RING_SHARE),
            available_bytes=free_bytes,
        )
    return found


def num_buffers(total_bytes: int, least_bytes: int = SMALLEST_BUFFER) -> int:
    """Into how many buffers, of ``least_bytes`` at least, a ring of ``total_bytes`` is cut."""
    wanted = max(total_bytes // BUFFER_BYTES, 8)
    return max(1, min(MOST_BUFFERS, wanted, total_bytes // least_bytes))
