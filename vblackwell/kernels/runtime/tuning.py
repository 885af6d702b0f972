"""What was measured on this machine and never changes a result: the one cache of tuned settings and times.

Entries are found first in the cache of this very GPU, driver, torch and triton version under
``$XDG_CACHE_HOME/vblackwell/autotune``, then in the table shipped for its kind. Files are replaced as a whole and
a torn or foreign one is ignored. Each kind of kernel ('attention') has a file.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from vblackwell.kernels.runtime.launch import driver_version
from vblackwell.machine.cache import cache_root, write_atomically

Entries = dict[str, dict[str, int]]
_dependents: list[Callable[[], None]] = []
SHIPPED = Path(__file__).parents[1] / "tuned"
_VERSION = 1


def machine(device: torch.device) -> dict[str, str]:
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "multiprocessors": str(properties.multi_processor_count),
        "driver": str(driver_version()),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def bucket(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()


def dtype_name(dtype: torch.dtype) -> str:
    """As entries spell it: 'bfloat16'."""
    return str(dtype).removeprefix("torch.")


def cache_path(kind: str, parts: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / "autotune" / f"{kind}-{digest}.json"


def shipped_path(kind: str, device: torch.device) -> Path:
    """Of GPUs of one compute capability and number of multiprocessors, whatever their names: an H100 is as an H200."""
    major, minor = torch.cuda.get_device_capability(device)
    return SHIPPED / f"{kind}-sm_{major}{minor}-{machine(device)['multiprocessors']}.json"


@functools.lru_cache
def entries(kind: str, device: torch.device) -> Entries:
    """What is known of ``device``: shipped, and measured here; nothing of a device that is no GPU."""
    if device.type != "cuda":
        return {}
    parts = machine(device)
    return {**read_entries(shipped_path(kind, device)), **read_entries(cache_path(kind, parts))}


def store(kind: str, device: torch.device, found: Entries, path: Path | None = None) -> None:
    """Add ``found`` to the machine's cache, or to the file ``path``, which is replaced as a whole."""
    parts = machine(device)
    path = path or cache_path(kind, parts)
    content = {"version": _VERSION, "machine": parts, "entries": {**read_entries(path), **found}}
    write_atomically(path, json.dumps(content, indent=1, sort_keys=True).encode())
    entries.cache_clear()
    for clear in _dependents:
        clear()


def clear_with_entries(clear: Callable[[], None]) -> None:
    """Have `store` call ``clear``, which forgets what was decided by the entries before."""
    _dependents.append(clear)


def read_entries(path: Path) -> Entries:
    """Entries of a file; none if it is missing, torn or of another version."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    found = content.get("entries") if isinstance(content, dict) and content.get("version") == _VERSION else None
    return {
        name: fields
        for name, fields in (found.items() if isinstance(found, dict) else ())
        if isinstance(fields, dict) and all(isinstance(value, int) for value in fields.values())
    }
