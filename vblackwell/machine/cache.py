"""Things that can be computed again, kept under ``~/.cache/vblackwell`` by the hash of what they were computed from.

An entry is a folder: built under a temporary name, synced, and renamed, so that it is there complete or not at all. Two
processes that build the same entry both work and the first to finish wins: nobody waits for a process that may hang.
"""

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from vblackwell.errors import DiskError
from vblackwell.machine.lock import SUFFIX, disk_error, make_work_folder, remove_if_abandoned


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


def cached_folder(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder of entry ``key``; where there is none, ``build`` fills an empty one. Raises DiskError."""
    parent = cache_root() / kind
    final = parent / key
    if final.is_dir():
        return final
    work = parent / f"{key}.{secrets.token_hex(4)}{SUFFIX}"
    try:
        descriptor = make_work_folder(work)
        try:
            for leftover in set(parent.glob(f"*{SUFFIX}")) - {work}:
                remove_if_abandoned(leftover)
            build(work)
            for path in (*work.iterdir(), work):
                opened = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(opened)
                finally:
                    os.close(opened)
            try:
                os.rename(work, final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
            os.close(descriptor)
    except OSError as error:
        failed = disk_error("writing the cache", work, error)
        raise DiskError(f"{failed}; or set XDG_CACHE_HOME to a folder with room") from error
    return final


def drop_entry(path: Path) -> None:
    """Removes an entry that turned out to be damaged; readers that have it open keep their bytes."""
    gone = path.with_name(f"{path.name}.{secrets.token_hex(4)}{SUFFIX}")
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    remove_if_abandoned(gone)
