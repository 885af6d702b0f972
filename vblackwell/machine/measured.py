"""Rates of this machine as ``vb doctor`` measured them, kept for ``vb estimate``: a file a GPU in the cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

from vblackwell.kernels.runtime.nvrtc import write_atomically
from vblackwell.machine.cache import cache_root
from vblackwell.machine.gpus import KnownGPU, known_as
from vblackwell.machine.rates import Rates, assumed_rates


def keep(gpu_name: str, rates: Rates) -> None:
    """Remember ``rates`` of the GPU that the driver calls ``gpu_name``. A cache that cannot be written is no error."""
    values = {"gpu": gpu_name} | rates.as_dict()
    name = re.sub("[^a-z0-9]+", "-", gpu_name.lower())
    write_atomically(_folder() / f"{name}.json", json.dumps(values, indent=2).encode())


def rates_of(card: KnownGPU) -> Rates:
    """Measured on this machine, if it has such a card and ``vb doctor`` has run; else what its data sheet lets expect."""
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


def _folder() -> Path:
    return cache_root() / "rates"


def _read(path: Path) -> tuple[str, Rates] | None:
    """The GPU's name and its rates; None where the file holds neither."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return str(values["gpu"]), Rates.from_dict(values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
