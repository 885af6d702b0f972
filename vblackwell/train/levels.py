"""The levels that a run's flags ask for, and what a step moved between them.

Sizes are arithmetic on facts (`plan_levels`), apart from building them. What the user says is taken as said; what is
left open follows from the model: RAM gets what the model needs there, and a disk level appears only where it was
asked for, or with ``--vgpu-auto`` where RAM alone would not do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vblackwell.errors import InsufficientMemory
from vblackwell.train.config import TrainConfig
from vblackwell.units import MiB, align_up, format_bytes

if TYPE_CHECKING:
    from vblackwell.memory.stack import VGPUStack

# Of what is free, what a run may take when it is not told: the rest is for activations, the page cache and other programs.
GPU_SHARE = 0.9
RAM_SHARE = 0.7
# Beyond weights, gradients and states: a group's undo snapshot, staging for the disk, alignment.
SLACK = 1.3
SLACK_BYTES = 64 * MiB


@dataclass(frozen=True)
class Room:
    """What the machine has free, in bytes."""

    gpu: int | None
    ram: int
    disk: int


def training_state_bytes(model: nn.Module, compute_dtype: torch.dtype | None) -> int:
    """Weights, gradients, fp32 masters and AdamW's moments of ``model``, whatever the placement."""
    total = 0
    for param in model.parameters():
        itemsize = compute_dtype.itemsize if compute_dtype is not None and param.is_floating_point() else param.itemsize
        master = 4 if itemsize < 4 else 0
        total += param.numel() * (2 * itemsize + 8 + master if param.requires_grad else itemsize)
    return total


def plan_levels(config: TrainConfig, state_bytes: int, room: Room) -> list[dict[str, Any]]:
    """The ``levels`` of a `VGPUStack` for a model whose training state takes ``state_bytes``.

    Raises:
        InsufficientMemory: the lower levels together cannot hold it.
    """
    needed = int(state_bytes * SLACK) + SLACK_BYTES
    fast = _fast_bytes(config, needed, room)
    levels = [_level("arena" if room.gpu is None else "cuda:0", fast)]
    untold = config.fast_memory is None and config.host_memory is None and config.disk_memory is None
    if untold and room.gpu is None and state_bytes <= fast and config.placement != "streamed":
        return levels  # everything is in one arena; nothing is left for a level below it
    host = _given(config.host_memory, min(needed, int(room.ram * RAM_SHARE)))
    disk = _given(config.disk_memory, 0)
    if config.disk_memory is None and (config.disk_path is not None or config.vgpu_auto) and host < needed:
        disk = align_up(needed - host, MiB)
    if host:
        levels.append(_level("cpu", host))
    if disk:
        levels.append({**_level("ssd", disk), "path": config.disk_path or "."})
    if disk > room.disk:
        raise InsufficientMemory(
            f"the disk level needs {format_bytes(disk)}, {format_bytes(room.disk)} are free at "
            f"{config.disk_path or '.'}: make room, choose "
            "another --disk-path, or lower --disk-memory",
            needed_bytes=disk,
            available_bytes=room.disk,
        )
    return levels


def _given(value: str | int | None, otherwise: int) -> int:
    assert not isinstance(value, str), "TrainConfig has parsed it"
    return otherwise if value is None else value


def _fast_bytes(config: TrainConfig, needed: int, room: Room) -> int:
    if room.gpu is not None:
        return _given(config.fast_memory, int(room.gpu * GPU_SHARE))
    # Without a GPU the arena is RAM like the level below it: all of the model if it fits, else half of what is free.
    half = int(room.ram * RAM_SHARE / 2)
    return _given(config.fast_memory, needed if needed <= half else half)


def _level(device: str, capacity_bytes: int) -> dict[str, Any]:
    speed_gbps = {"arena": 50, "cpu": 50, "ssd": 2}.get(device, 2000)
    return {"device": device, "capacity_mb": capacity_bytes / MiB, "speed_gbps": speed_gbps}


def measure_room(device: torch.device, disk_path: str | None) -> Room:
    """What is free now."""
    from vblackwell.hardware import disk_facts, memory_facts

    gpu = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    return Room(gpu, memory_facts().available_bytes, disk_facts(Path(disk_path or ".")).free_bytes)


def describe_levels(levels: list[dict[str, Any]]) -> str:
    """One line for the user."""
    return " over ".join(f"{level['device']} {format_bytes(level['capacity_mb'] * MiB)}" for level in levels)


# -- what moved ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Counters of a stack at one moment, or their growth between two.

    Attributes:
        level_bytes: held now, by level label.
        link_bytes: moved, by 'source>destination'.
        stall_seconds: waited.
    """

    level_bytes: dict[str, int]
    link_bytes: dict[str, int]
    stall_seconds: float

    def since(self, before: Traffic) -> Traffic:
        """What was moved after ``before``."""
        moved = {link: count - before.link_bytes.get(link, 0) for link, count in self.link_bytes.items()}
        return Traffic(self.level_bytes, moved, self.stall_seconds - before.stall_seconds)


def level_labels(stats: dict[str, Any]) -> list[str]:
    """A unique name for each level: its device, numbered where two levels share one."""
    devices = [level["device"] for level in stats["levels"]]
    return [name if devices.count(name) == 1 else f"{name}#{index}" for index, name in enumerate(devices)]


def read_traffic(stack: VGPUStack) -> Traffic:
    """The stack's counters now."""
    stats = stack.get_stats()
    held = [level["used_bytes"] for level in stats["levels"]]
    links: dict[str, int] = {}
    for link in stats["links"]:
        name = f"{link['source']}>{link['destination']}"
        links[name] = links.get(name, 0) + link["bytes"]
    return Traffic(dict(zip(level_labels(stats), held, strict=True)), links, stats["stall_seconds"])
