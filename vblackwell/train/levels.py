"""The levels that a run's flags ask for, and what a step moved between them.

What the user says is taken as said, what is left open is probed (`create_vgpu_stack`). A disk level wears an SSD out, so it
is there only where somebody asked for it: with a size, a path, or ``--vgpu-auto``.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vblackwell.errors import InsufficientMemory
from vblackwell.machine.facts import disk_facts, memory_facts
from vblackwell.memory.cache.config import default_disk_path
from vblackwell.memory.cache.stack import create_vgpu_stack
from vblackwell.train.config import TrainConfig
from vblackwell.units import format_bytes

if TYPE_CHECKING:
    from vblackwell.memory.cache.stack import VGPUStack
    from vblackwell.planner.placement import Plan


def build_stack(
    config: TrainConfig, device: torch.device, plan: Plan | None = None, *, state_bytes: int | None = None
) -> VGPUStack:  # fmt: skip
    """The stack of a run on ``device``: of the sizes that were planned, or else asked for.

    Args:
        state_bytes: the most that will come to a disk level; by default all that it may hold.

    Raises:
        ConfigurationError: a size that the machine does not have, a path that is no directory on a disk.
        InsufficientMemory: the disk has less room than ``--disk-memory``, or RAM than the sizes that are RAM.
    """
    disk = has_disk(config)
    if config.disk_memory:
        _refuse_full_disk(config, state_bytes)
    if device.type == "cpu":
        _refuse_more_than_ram(config, state_bytes)
    if plan is not None:
        bounds = plan.bounds
        level0 = plan.choice.level0_bytes if device.type == "cuda" else bounds.gpu
        return create_vgpu_stack(level0, bounds.host, bounds.disk, config.disk_path, device=device)
    return create_vgpu_stack(
        config.fast_memory,
        config.host_memory,
        config.disk_memory if disk else 0,
        config.disk_path,
        device=device,
    )


def has_disk(config: TrainConfig) -> bool:
    """Whether a run's stack has a disk level: where the settings ask for one, or leave everything to the plan."""
    asked = config.vgpu_auto or config.disk_memory is not None or config.disk_path is not None
    return asked and config.disk_memory != 0


def _refuse_more_than_ram(config: TrainConfig, state_bytes: int | None) -> None:
    """Without a GPU level 0 is RAM, as the level below it: a run that fills both would be killed without a word.

    Caps are held against what the machine has; what is free just now need only hold the run's state, if that is less.
    """
    asked = {"--fast-memory": config.fast_memory, "--host-memory": config.host_memory}
    sizes = {flag: size for flag, size in asked.items() if isinstance(size, int) and size}
    facts, wanted = memory_facts(), sum(sizes.values())
    needed = wanted if state_bytes is None else min(wanted, state_bytes)
    if wanted > facts.total_bytes or needed > facts.available_bytes:
        raise InsufficientMemory(
            f"{' and '.join(f'{flag} {format_bytes(size)}' for flag, size in sizes.items())} are RAM on a CPU: "
            f"{format_bytes(facts.available_bytes)} of {format_bytes(facts.total_bytes)} are available (limited by {facts.limited_by}), "
            f"and up to {format_bytes(needed)} are needed; give less",
            needed_bytes=needed,
            available_bytes=facts.available_bytes,
        )


def _refuse_full_disk(config: TrainConfig, state_bytes: int | None) -> None:
    """Bytes are reserved when they are first needed; a run is told before it starts. It needs no more than its state, whatever the cap."""
    assert isinstance(config.disk_memory, int)
    disk = disk_facts(config.disk_path or default_disk_path())
    total = shutil.disk_usage(disk.path).total
    needed = config.disk_memory if state_bytes is None else min(config.disk_memory, state_bytes)
    if config.disk_memory > total or needed > disk.free_bytes:
        raise InsufficientMemory(
            f"--disk-memory {format_bytes(config.disk_memory)}: {format_bytes(disk.free_bytes)} of {format_bytes(total)} are free at "
            f"{disk.path}, and up to {format_bytes(needed)} are needed; make room, choose another --disk-path, or lower "
            "--disk-memory",
            needed_bytes=needed,
            available_bytes=disk.free_bytes,
        )


def describe_levels(stack: VGPUStack) -> str:
    """One line for the user."""
    return " over ".join(f"{level.name} {format_bytes(level.capacity_bytes)}" for level in stack.levels)


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
