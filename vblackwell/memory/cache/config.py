"""From what users write, or the machine has, to levels.

``{'levels': [{'capacity_mb': 2000, 'device': 'cuda:0', 'speed_gbps': 2000}, ...]}``, fastest first. ``cpu`` as the
first level is the arena, because level 0 allocates tensors one by one. Keys that are not supported are refused. Where
sizes are not given, a GPU keeps a fifth of its free memory, RAM half of it, a disk half; slabs and file grow as they
are used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from vblackwell.errors import ConfigurationError, nearest
from vblackwell.machine.facts import memory_facts, numa_node_of_cuda, why_no_cuda
from vblackwell.machine.limits import ARENA_SHARE, default_disk_path, free_disk_bytes
from vblackwell.memory.disk import DiskLevel
from vblackwell.memory.host import HostLevel
from vblackwell.memory.level import DeviceLevel, Level, NullLevel
from vblackwell.units import MiB, format_bytes, parse_bytes

GPU_SHARE = 0.8
HOST_SHARE = 0.5
_KEYS = ("capacity_mb", "device", "speed_gbps", "path")


@dataclass(frozen=True)
class LevelConfig:
    """One level as asked for.

    Attributes:
        device: ``'cuda:0'``, ``'cpu'``, ``'ssd'``, ``'arena'`` (RAM as level 0) or ``'null'`` (only accounts).
        speed_gbps: what it moves, GB/s, as far as the user says. path: a directory for ``'ssd'``.
    """

    device: str
    capacity_bytes: int
    speed_gbps: float | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        kind = self.device.split(":")[0]
        if kind not in ("cuda", "cpu", "ssd", "arena", "null"):
            known = ("cuda:0", "cpu", "ssd", "arena", "null")
            raise ConfigurationError(
                f"level device {self.device!r} must be one of {', '.join(known)}{nearest(self.device, known)}"
            )
        if self.capacity_bytes < 4096:
            raise ConfigurationError(
                f"level {self.device} of {self.capacity_bytes} bytes is too small: give it 4 KiB or more"
            )
        if self.speed_gbps is not None and not (math.isfinite(self.speed_gbps) and self.speed_gbps > 0):
            raise ConfigurationError(f"speed_gbps {self.speed_gbps} of level {self.device} must be a number > 0")
        if self.path is not None and kind != "ssd":
            raise ConfigurationError(f"only an ssd level has a path, not {self.device} (path {self.path!r})")


Size = str | int | None  # bytes, or '8GiB'; None: a share of what the machine has free


def machine_levels(
    fast_memory: Size, host_memory: Size, disk_memory: Size, disk_path: str | None, device: torch.device | str | None
) -> list[LevelConfig]:
    """GPU, RAM, disk; or a capped arena over RAM and disk. As `create_vgpu_stack`."""
    available = memory_facts().available_bytes
    chosen = torch.device(("cuda:0" if torch.cuda.is_available() else "cpu") if device is None else device)
    if chosen.type == "cuda":
        level0, free = str(chosen), int(torch.cuda.mem_get_info(chosen)[0] * GPU_SHARE)
    else:
        level0, free = "arena", int(available * ARENA_SHARE)
    sizes: list[tuple[str, Size, int, str | None]] = [
        (level0, fast_memory, free, None),
        ("cpu", host_memory, int(available * HOST_SHARE), None),
    ]
    if disk_memory is None or parse_bytes(disk_memory) > 0:
        path = disk_path or default_disk_path()
        sizes.append(("ssd", disk_memory, free_disk_bytes(path), path))
    asked = [(name, free if size is None else parse_bytes(size), path) for name, size, free, path in sizes]
    if not asked[0][1]:
        raise ConfigurationError("fast_memory 0 leaves no level 0: give it at least 4 KiB")
    return [LevelConfig(name, capacity, path=path) for name, capacity, path in asked if capacity]


def parse_capacity(value: Any) -> int:
    """Bytes of a ``capacity_mb``: a number of MiB, fractions allowed, or a string with a unit such as ``'8GiB'``."""
    if isinstance(value, str) and not value.strip().replace(".", "", 1).isdigit():
        return parse_bytes(value, "capacity_mb")
    try:
        mebibytes = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"capacity_mb {value!r} must be a number of MiB or a size such as '8GiB'") from error
    if not math.isfinite(mebibytes) or mebibytes <= 0:
        raise ConfigurationError(f"capacity_mb {value!r} must be a number of MiB > 0, or a size such as '8GiB'")
    return round(mebibytes * MiB)


def parse_levels(config: Mapping[str, Any]) -> list[LevelConfig]:
    """The levels of a dict; raises ConfigurationError for unknown, missing or wrong keys (with the nearest name)."""
    _refuse_unknown(config, ("levels",), "stack config")
    levels = config.get("levels")
    if not isinstance(levels, (list, tuple)) or not levels:
        raise ConfigurationError("a stack needs a list of 'levels', e.g. [{'device': 'cuda:0', 'capacity_mb': 2000}]")
    parsed = []
    for number, raw in enumerate(levels):
        if not isinstance(raw, Mapping):
            raise ConfigurationError(f"level {number} must be a dict with {', '.join(_KEYS)}, not {raw!r}")
        _refuse_unknown(raw, _KEYS, f"level {number}")
        for key in ("capacity_mb", "device"):
            if key not in raw:
                raise ConfigurationError(f"level {number} lacks {key!r}")
        speed, path = raw.get("speed_gbps"), raw.get("path")
        speed, path = None if speed is None else float(speed), None if path is None else os.fspath(path)
        parsed.append(LevelConfig(str(raw["device"]), parse_capacity(raw["capacity_mb"]), speed, path))
    return parsed


def _refuse_unknown(raw: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in raw:
        if key not in known:
            raise ConfigurationError(
                f"{where} has the key {key!r}, which is not supported (known: {', '.join(known)})"
                f"{nearest(str(key), known)}"
            )


def check_order(levels: Iterable[LevelConfig]) -> None:
    """Refuse levels that are not listed fastest first, as far as speeds are stated."""
    stated = [level for level in levels if level.speed_gbps is not None]
    for faster, slower in zip(stated, stated[1:], strict=False):
        if (slower.speed_gbps or 0) > (faster.speed_gbps or 0):
            raise ConfigurationError(
                f"levels go from the fastest to the slowest, but {slower.device} ({slower.speed_gbps} GB/s) is listed "
                f"below {faster.device} ({faster.speed_gbps} GB/s): change their order or their speed_gbps"
            )


def build_level(config: LevelConfig, number: int = 0, *, numa_node: int | None = None) -> Level:
    """Make one level. ``number`` is its place in the stack: ``cpu`` at 0 is the arena."""
    kind = config.device.split(":")[0]
    if kind == "cuda":
        return DeviceLevel(_usable_gpu(config), config.capacity_bytes)
    if kind == "arena" or (kind == "cpu" and number == 0):
        return DeviceLevel("cpu", config.capacity_bytes)
    if kind == "cpu":
        return HostLevel(config.capacity_bytes, numa_node=numa_node)
    if kind == "ssd":
        return DiskLevel(config.path or default_disk_path(), config.capacity_bytes)
    return NullLevel(config.capacity_bytes)


def build_levels(config: Mapping[str, Any] | Iterable[LevelConfig] | Iterable[Level]) -> list[Level]:
    """Make the levels of a stack; if one is refused, those made before it are closed."""
    items: list[LevelConfig | Level]
    items = [*parse_levels(cast("Mapping[str, Any]", config))] if isinstance(config, Mapping) else [*config]
    if not items:
        raise ConfigurationError("a stack needs at least one level")
    check_order(item for item in items if isinstance(item, LevelConfig))
    levels: list[Level] = []
    try:
        for number, item in enumerate(items):
            levels.append(item if isinstance(item, Level) else build_level(item, number, numa_node=_numa_node(levels)))
        if levels[0].device is None:
            raise ConfigurationError(
                f"level 0 cannot be {levels[0].name}: tensors are handed out there; list a cuda device, cpu or arena "
                f"first"
            )
    except BaseException:
        for level in levels:
            level.close()
        raise
    return levels


def _numa_node(levels: list[Level]) -> int | None:
    """The NUMA node of the first GPU above."""
    gpus = [level.device for level in levels if level.device is not None and level.device.type == "cuda"]
    return numa_node_of_cuda(gpus[0]) if gpus else None


def _usable_gpu(config: LevelConfig) -> torch.device:
    reason = why_no_cuda()
    if reason is not None:
        raise ConfigurationError(f"level {config.device} is not possible: {reason}; or use 'cpu' as level 0")
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigurationError(f"level device {config.device!r} is not a device: write e.g. 'cuda:0'") from error
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigurationError(
            f"level {config.device} is not possible: torch sees {torch.cuda.device_count()} GPU(s)"
        )
    total = torch.cuda.get_device_properties(index).total_memory
    if config.capacity_bytes > total:
        raise ConfigurationError(
            f"a level of {format_bytes(config.capacity_bytes)} does not fit on {config.device} with "
            f"{format_bytes(total)}"
        )
    return torch.device("cuda", index)
