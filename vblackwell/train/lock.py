"""One process per run folder, by flock: the kernel lets go when the holder dies, however it dies.

A file with a process id in it would outlive a ``kill -9`` and need guessing.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from vblackwell.errors import ConfigurationError, DiskError

LOCK_NAME = ".lock"


class RunLock:
    """Holds ``folder`` until `release` or the end of the process.

    Raises:
        ConfigurationError: another process holds it; its process id is named.
        DiskError: the lock file cannot be opened, locked or written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_NAME
        self._file = -1
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise ConfigurationError(
                f"run folder {folder} is in use by process {holder}: wait for it, or choose another --out"
            ) from None
        except OSError as error:
            self.release()
            raise DiskError(
                f"cannot lock the run folder: {path}: {error.strerror}; make room if its disk is full, or choose another --out"
            ) from error

    def release(self) -> None:
        """Let go. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
