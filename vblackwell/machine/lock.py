"""Locks of processes by ``flock``, which the kernel drops when the process dies, however it dies.

A work folder is a ``.tmp`` folder that its writer holds locked, so that others can tell work in progress from
leftovers: the lock is on the folder itself. A process id in the name would lie after a reboot and inside containers.
"""

import fcntl
import os
import shutil
from pathlib import Path

from vblackwell.errors import DiskError

SUFFIX = ".tmp"


class Locked(Exception):
    """Another process holds the lock; its number is the message."""


def lock_file(path: Path) -> int:
    """Lock the file ``path``, made if need be, and write this process's number into it; closing the descriptor unlocks.
    Raises Locked where another process holds it, and OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise Locked(holder) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def refuse_locked(path: Path) -> None:
    """Raises as `lock_file` where that could not lock ``path``; makes, writes and keeps nothing.

    Linux has no query for ``flock``, and /proc/locks leaves out containers and NFS: a shared lock is held for an
    instant, which others that ask share.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # as `lock_file` opens it
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Locked(_holder(descriptor)) from None
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"


def disk_error(action: str, path: Path, error: OSError) -> DiskError:
    if isinstance(error, DiskError):
        return error
    return DiskError(f"{action} {path} failed: {error.strerror or error}; check that it is writable and has room")


def make_work_folder(path: Path) -> int:
    """Creates the empty folder ``path`` and locks it by the returned descriptor; raises DiskError where it cannot."""
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not remove_if_abandoned(path):
                raise DiskError(f"{path} is being written by another process: wait for it") from None
            continue
        except OSError as error:
            raise disk_error("creating", path, error) from error
        # A process that has locked it in between takes it for a leftover, and is about to remove it.
        descriptor = _lock(path, wait=True)
        if descriptor is not None:
            return descriptor


def remove_if_abandoned(path: Path) -> bool:
    descriptor = _lock(path)
    if descriptor is None:
        return not path.exists()
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise disk_error("removing the leftover", path, error) from error
    finally:
        os.close(descriptor)
    return True


def _lock(path: Path, *, wait: bool = False) -> int | None:
    """A descriptor that holds the lock on the folder now at ``path``; None: it is gone, or (no ``wait``) locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error("opening", path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # not deleted between open and lock
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(descriptor)
        raise disk_error("locking", path, error) from error
    os.close(descriptor)
    return None
