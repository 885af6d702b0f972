"""Virtual Blackwell: train and run transformer models several times larger than the GPU's memory.

The public names. They are resolved on first use, so that importing the package costs nothing beyond torch and never
touches a GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "VBError": "vblackwell.errors",
    "ConfigurationError": "vblackwell.errors",
    "InsufficientMemory": "vblackwell.errors",
    "DiskError": "vblackwell.errors",
    "CorruptData": "vblackwell.errors",
    "KeyClash": "vblackwell.errors",
    "StaleTensor": "vblackwell.errors",
    "Unsupported": "vblackwell.errors",
}

__all__ = sorted(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from vblackwell.errors import (
        ConfigurationError,
        CorruptData,
        DiskError,
        InsufficientMemory,
        KeyClash,
        StaleTensor,
        Unsupported,
        VBError,
    )


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'vblackwell' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_WHERE))
