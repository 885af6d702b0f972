"""Rates of this machine, kept in the cache for ``vb estimate`` and plans: a file for each GPU and disk."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from vblackwell.machine.cache import cache_root, write_atomically
from vblackwell.machine.facts import disk_facts
from vblackwell.machine.gpus import KnownGPU, known_as
from vblackwell.machine.rates import Rates, assumed_rates


def keep(gpu_name: str, rates: Rates) -> None:
    """Remember ``rates`` of the GPU that the driver calls ``gpu_name``. A cache that cannot be written is no error."""
    values = {"gpu": gpu_name} | rates.as_dict()
    write_atomically(_folder() / f"{_slug(gpu_name)}.json", json.dumps(values, indent=2).encode())


def rates_of(card: KnownGPU) -> Rates:
    """Measured on this machine, if it has such a card and ``vb doctor`` has run; else by its data sheet."""
    folder = _folder()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        found = _read(path)
        if found is not None and known_as(found[0]) == card:
            return found[1]
    return assumed_rates(card)


def kept_rates(gpu_name: str) -> Rates | None:
    """What `keep` remembers of the GPU that the driver calls so; None if it was never measured here."""
    folder = _folder()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        found = _read(path)
        if found is not None and found[0] == gpu_name:
            return found[1]
    return None


def keep_disk(path: str, gbps: dict[str, Any]) -> None:
    """Remember the rates of the disk at ``path`` in GB/s, ``{'read', 'write'}``, unless it was refused."""
    if "refused" not in gbps:
        file, disk = _disk_of(path)
        write_atomically(file, json.dumps(disk | gbps, indent=2).encode())


def kept_disk(path: str) -> tuple[float, float] | None:
    """What `keep_disk` remembers of the disk at ``path``, bytes/s read and written; None if it was never measured."""
    file, disk = _disk_of(path)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        is_same = all(values[name] == value for name, value in disk.items())
        return (float(values["read"]) * 1e9, float(values["write"]) * 1e9) if is_same else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _disk_of(path: str) -> tuple[Path, dict[str, Any]]:
    """Where the rates of the disk at ``path`` are kept, and what tells that disk from others."""
    mount = Path(path).resolve()
    while not os.path.ismount(mount):
        mount = mount.parent
    disk = {"mount": str(mount), "file_system": disk_facts(path).file_system, "device": os.stat(mount).st_dev}
    return _folder() / f"disk-{_slug(str(mount)).strip('-') or 'root'}.json", disk


def _slug(text: str) -> str:
    return re.sub("[^a-z0-9]+", "-", text.lower())


def _folder() -> Path:
    return cache_root() / "rates"


def _read(path: Path) -> tuple[str, Rates] | None:
    """The GPU's name and its rates; None where the file holds neither."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return str(values["gpu"]), Rates.from_dict(values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
