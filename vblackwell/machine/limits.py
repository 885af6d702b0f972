"""What a run may take of a machine where nobody says it: shares of what is free, and where a disk level's file goes."""

import os
import tempfile
from pathlib import Path

from vblackwell.errors import ConfigurationError
from vblackwell.machine.facts import disk_facts, list_gpus
from vblackwell.machine.gpus import KnownGPU, known_as
from vblackwell.units import GiB, MiB

HOST_SHARE = 0.75  # of the RAM that is free, by a plan; the rest is for the page cache and other processes
# Of the RAM that is free, or a host level's own already, whenever the size of a level that nobody chose is measured.
MEASURED_HOST_SHARE = 0.875
ARENA_SHARE = 0.125  # of that RAM, for level 0 where there is no GPU
DISK_SHARE = 0.5
# RAM and disk of a machine that is only thought of, for a card that this one lacks; the disk as fast as Rates has it.
HYPOTHETICAL_BYTES = 64 * GiB, 500 * 10**9
MAX_DISK_BYTES = 1024 * GiB
LATER_BYTES = 300 * MiB  # of CUDA's context that are not there yet: cuBLAS, kernels (758 MiB in all on an H200)
DISK_THREADS, DISK_PIECE_BYTES = 8, 8 * MiB
DISK_THREAD_BYTES = DISK_THREADS * DISK_PIECE_BYTES  # RAM in addition to the levels: a piece each
DISK_PATH_VARIABLE = "VBLACKWELL_DISK_PATH"


def free_disk_bytes(path: str) -> int:
    """What a disk level may take of the disk at ``path``."""
    return min(int(disk_facts(path).free_bytes * DISK_SHARE), MAX_DISK_BYTES)


def default_disk_path() -> str:
    """`DISK_PATH_VARIABLE`, or the first of three directories that is on a disk; raises ConfigurationError for none."""
    given = os.environ.get(DISK_PATH_VARIABLE)
    if given:
        return given
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    candidates = [Path(tempfile.gettempdir()), cache, Path.cwd()]
    for path in candidates:
        if path.is_dir() and os.access(path, os.W_OK) and not disk_facts(path).ram_backed:
            return str(path)
    raise ConfigurationError(
        f"none of {', '.join(map(str, candidates))} is a writable directory on a disk: give the ssd level a 'path',"
        f" or set {DISK_PATH_VARIABLE}"
    )


def stated_beside(card: KnownGPU | None) -> tuple[int, int] | None:
    """Bytes of RAM and of disk next to a ``card`` that this machine lacks; None where it has it, or there is none."""
    if card is None or any(known_as(found.name) == card for found in list_gpus()):
        return None
    return HYPOTHETICAL_BYTES
