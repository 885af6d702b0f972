"""A stack for the machine at hand, when nobody has said how large its levels should be.

Margins: a GPU keeps a fifth of its free memory for activations and for what else runs there; RAM keeps half for the page
cache, the data loader and everybody else; a disk half of what is free. Host slabs and the disk file grow as they are used, so
large caps cost nothing.
"""

from __future__ import annotations

import torch

from vblackwell.errors import ConfigurationError
from vblackwell.machine.facts import disk_facts, memory_facts
from vblackwell.memory.cache.config import LevelConfig, default_disk_path
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.units import GiB, parse_bytes

GPU_SHARE = 0.8
ARENA_SHARE = 0.125
HOST_SHARE = 0.5
DISK_SHARE = 0.5
LARGEST_DISK_BYTES = 1024 * GiB

Size = str | int | None


def create_vgpu_stack(
    fast_memory: Size = None,
    host_memory: Size = None,
    disk_memory: Size = None,
    disk_path: str | None = None,
    *,
    device: torch.device | str | None = None,
    policy: str = "lru",
    promotion: str = "direct",
) -> VGPUStack:
    """Probe the machine and make a stack: GPU, RAM, disk; a capped arena over RAM and disk where torch can use no GPU.

    Args:
        fast_memory: cap of level 0, bytes or ``'8GiB'``. host_memory, disk_memory: the same below; 0 leaves the level out.
        disk_path: directory for the disk level. By default ``$VBLACKWELL_DISK_PATH``, else the temporary directory, the
            cache directory or the current one, the first of them that is on a disk.
        device: level 0's; by default the first GPU where torch can use one. ``'cpu'`` makes level 0 an arena in RAM.
        policy, promotion: as `VGPUStack`.

    Raises:
        ConfigurationError: a size that the machine does not have, or no directory on a disk.
    """
    available = memory_facts().available_bytes
    chosen = torch.device(("cuda:0" if torch.cuda.is_available() else "cpu") if device is None else device)
    if chosen.type == "cuda":
        free = torch.cuda.mem_get_info(chosen)[0]
        levels = [_level(str(chosen), fast_memory, int(free * GPU_SHARE))]
    else:
        levels = [_level("arena", fast_memory, int(available * ARENA_SHARE))]
    levels.append(_level("cpu", host_memory, int(available * HOST_SHARE)))
    if disk_memory is None or parse_bytes(disk_memory) > 0:
        path = disk_path or default_disk_path()
        room = min(int(disk_facts(path).free_bytes * DISK_SHARE), LARGEST_DISK_BYTES)
        levels.append(_level("ssd", disk_memory, room, path))
    kept = [level for level in levels if level is not None]
    if not kept or levels[0] is None:
        raise ConfigurationError("fast_memory 0 leaves no level 0: give it at least 4 KiB")
    return VGPUStack(kept, policy=policy, promotion=promotion)


def _level(device: str, asked: Size, default: int, path: str | None = None) -> LevelConfig | None:
    capacity = default if asked is None else parse_bytes(asked)
    return LevelConfig(device, capacity, path=path) if capacity else None
