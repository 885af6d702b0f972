"""Where things are kept that can be computed again: ``~/.cache/vblackwell``."""

import contextlib
import os
import tempfile
from pathlib import Path


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/vblackwell``; relative values are ignored, as the XDG specification asks."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "vblackwell"


def write_atomically(path: Path, content: bytes) -> None:
    """``content`` appears at ``path`` whole or not at all, also when the power fails; failing to write is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or the new name may stand for an empty file
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
