"""Files that are hashed on their way to the disk, and what makes them durable.

A write that the disk refuses names file, offset, size and what is free; a refused ``fsync`` is final, because the kernel may
have dropped the pages and a second call would succeed.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from vblackwell.errors import DiskError
from vblackwell.machine.lock import disk_error
from vblackwell.units import MiB, format_bytes

WRITE_BYTES = 16 * MiB
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class HashedFile:
    """A file of a ``CommitFolder`` being written front to back; made by ``CommitFolder.open``."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self._digest, self.size = xxhash.xxh3_128(), 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends ``data``.

        Raises:
            DiskError: the disk refused; with offset, size and free space.
        """
        view = memoryview(data).cast("B")
        for start in range(0, len(view), WRITE_BYTES):
            piece = view[start : start + WRITE_BYTES]
            try:
                self._file.write(piece)
            except OSError as error:
                raise write_error(self.path, self.size, len(view) - start, error) from error
            self._digest.update(piece)
            self.size += len(piece)

    def reserve(self, size_bytes: int) -> None:
        """Claims the file's final size on the disk, so that a full disk is met before the first byte is written."""
        if not size_bytes or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file systems without it
                raise write_error(self.path, 0, size_bytes, error) from error

    def finish(self) -> dict[str, Any]:
        """Syncs the file; returns its entry of the manifest."""
        sync(self._file.fileno(), self.path)
        return {"size": self.size, "xxh3": self._digest.hexdigest()}


class WholeWrites:
    """An unbuffered file whose ``write`` goes on after a short write."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.fileno = raw.fileno

    def write(self, data: memoryview) -> None:
        while data:
            data = data[self._raw.write(data) :]


def sync(descriptor: int, path: Path) -> None:
    """``fsync``, with its refusal as a ``DiskError``: the data are then lost, whatever a second call says."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise disk_error("syncing", path, error) from error


def sync_folder(path: Path) -> None:
    """Makes names created and renamed in ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor, path)
    finally:
        os.close(descriptor)


def write_error(path: Path, offset: int, size_bytes: int, error: OSError) -> DiskError:
    """A refused write as the user should read it."""
    if error.errno not in NO_ROOM:
        return DiskError(
            f"writing {size_bytes} bytes at offset {offset} of {path} failed: {error.strerror}; check the disk"
        )
    free = shutil.disk_usage(path.parent).free
    return DiskError(
        f"no room for {format_bytes(size_bytes)} at offset {offset} of {path} ({error.strerror}); {format_bytes(free)} "
        "are free on its disk: make room or lift the limit, or choose another folder; older checkpoints are untouched"
    )


def hash_file(path: Path) -> dict[str, Any]:
    """Size and XXH3 of a file, as the manifest has them."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(4 * MiB):
            digest.update(block)
            size += len(block)
    return {"size": size, "xxh3": digest.hexdigest()}


def sync_and_hash(path: Path) -> dict[str, Any]:
    """Syncs a file that somebody else wrote; returns its entry of the manifest."""
    with path.open("rb") as file:
        sync(file.fileno(), path)
    return hash_file(path)
