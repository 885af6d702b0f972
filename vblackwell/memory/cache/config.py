"""From what users write to levels. ``cpu`` as the first one is the arena: level 0 allocates tensors one by one."""

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch

from vblackwell.errors import ConfigurationError, nearest
from vblackwell.machine.facts import numa_node_of_pci, pci_of_cuda, why_no_cuda
from vblackwell.machine.limits import default_disk_path
from vblackwell.memory.disk import DiskLevel
from vblackwell.memory.host import HostLevel
from vblackwell.memory.level import DeviceLevel, Level
from vblackwell.units import MiB, format_bytes, parse_bytes

GPU_SHARE = 0.8
_KEYS = ("capacity_mb", "device", "speed_gbps", "path")
DEVICES = ("cuda:0", "cpu", "ssd", "arena")


@dataclass(frozen=True)
class LevelConfig:
    """One level as asked for."""

    device: str  # 'cuda:0', 'cpu', 'ssd' or 'arena' (RAM as level 0)
    capacity_bytes: int
    speed_gbps: float | None = None  # GB/s, as far as the user says
    path: str | None = None  # a directory for 'ssd'

    @property
    def kind(self) -> str:
        return self.device.split(":")[0]

    def __post_init__(self) -> None:
        if self.kind not in ("cuda", *DEVICES[1:]):
            raise ConfigurationError(
                f"level device {self.device!r} must be one of {', '.join(DEVICES)}{nearest(self.device, DEVICES)}"
            )
        if (size := self.capacity_bytes) < 4096:
            raise ConfigurationError(f"level {self.device} of {size} bytes is too small: give it 4 KiB or more")
        if self.speed_gbps is not None and not (math.isfinite(self.speed_gbps) and self.speed_gbps > 0):
            raise ConfigurationError(f"speed_gbps {self.speed_gbps} of level {self.device} must be a number > 0")
        if self.path is not None and self.kind != "ssd":
            raise ConfigurationError(f"only an ssd level has a path, not {self.device} (path {self.path!r})")


def parse_capacity(value: Any) -> int:
    """Bytes of a ``capacity_mb``: a number of MiB, fractions allowed, or a string with a unit such as ``'8GiB'``."""
    if isinstance(value, str) and not value.strip().replace(".", "", 1).isdigit():
        return parse_bytes(value, "capacity_mb")
    with suppress(TypeError, ValueError):
        if 0 < (mebibytes := float(value)) < math.inf:
            return round(mebibytes * MiB)
    raise ConfigurationError(f"capacity_mb {value!r} must be a number of MiB > 0, or a size such as '8GiB'")


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
        if missing := [key for key in _KEYS[:2] if key not in raw]:
            raise ConfigurationError(f"level {number} lacks {missing[0]!r}")
        speed, path = raw.get("speed_gbps"), raw.get("path")
        speed, path = None if speed is None else float(speed), None if path is None else os.fspath(path)
        parsed.append(LevelConfig(str(raw["device"]), parse_capacity(raw["capacity_mb"]), speed, path))
    return parsed


def _refuse_unknown(raw: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in (key for key in raw if key not in known):
        names = f"(known: {', '.join(known)}){nearest(str(key), known)}"
        raise ConfigurationError(f"{where} has the key {key!r}, which is not supported {names}")


def build_level(config: LevelConfig, number: int = 0, *, numa_node: int | None = None) -> Level:
    """Make one level. ``number`` is its place in the stack: ``cpu`` at 0 is the arena."""
    kind, capacity_bytes = config.kind, config.capacity_bytes
    if kind == "cuda":
        return DeviceLevel(_usable_gpu(config), capacity_bytes)
    if kind == "arena" or (kind == "cpu" and number == 0):
        return DeviceLevel("cpu", capacity_bytes)
    if kind == "cpu":
        return HostLevel(capacity_bytes, numa_node=numa_node)
    return DiskLevel(config.path or default_disk_path(), capacity_bytes)


def build_levels(config: Mapping[str, Any] | Iterable[LevelConfig] | Iterable[Level]) -> list[Level]:
    """Make the levels of a stack; if one is refused, those made before it are closed."""
    items: list[LevelConfig | Level]
    items = [*parse_levels(cast("Mapping[str, Any]", config))] if isinstance(config, Mapping) else [*config]
    if not items:
        raise ConfigurationError("a stack needs at least one level")
    stated = [item for item in items if isinstance(item, LevelConfig) and item.speed_gbps is not None]
    for faster, slower in zip(stated, stated[1:], strict=False):
        if (slower.speed_gbps or 0) > (faster.speed_gbps or 0):
            raise ConfigurationError(
                f"levels go from the fastest to the slowest, but {slower.device} ({slower.speed_gbps} GB/s) is listed "
                f"below {faster.device} ({faster.speed_gbps} GB/s): change their order or their speed_gbps"
            )
    levels: list[Level] = []
    try:
        for number, item in enumerate(items):
            gpus = [level.device for level in levels if level.device is not None and level.device.type == "cuda"]
            node = numa_node_of_pci(pci_of_cuda(gpus[0])) if gpus else None  # of the first above
            levels.append(item if isinstance(item, Level) else build_level(item, number, numa_node=node))
        if levels[0].device is None:
            raise ConfigurationError(
                f"level 0 cannot be {levels[0].name}: tensors are handed out there; list a GPU, cpu or arena first"
            )
    except BaseException:
        for level in levels:
            level.close()
        raise
    return levels


def _usable_gpu(config: LevelConfig) -> torch.device:
    try:
        index = torch.device(config.device).index or 0
    except RuntimeError as error:
        raise ConfigurationError(f"level device {config.device!r} is not a device: write e.g. 'cuda:0'") from error
    reason = why_no_cuda()
    if reason is None and index >= torch.cuda.device_count():
        reason = f"torch sees {torch.cuda.device_count()} GPU(s)"
    if reason is not None:
        raise ConfigurationError(f"level {config.device} is not possible: {reason}; or use 'cpu' as level 0")
    total = torch.cuda.get_device_properties(index).total_memory
    if config.capacity_bytes > total:
        asked, has = format_bytes(config.capacity_bytes), format_bytes(total)
        raise ConfigurationError(f"a level of {asked} does not fit on {config.device} with {has}")
    return torch.device("cuda", index)
