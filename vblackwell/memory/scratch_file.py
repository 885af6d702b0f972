"""The file of a disk level: unlinked, private, reserved before it is used, and honest about its errors.

`O_TMPFILE` where the file system has it, an ordinary file that is unlinked at once elsewhere: a crash leaves nothing.
`O_DIRECT` where a probe shows that it works: the page cache would hold a second copy of what is on disk because RAM was
short. RAM-backed file systems are refused, they are no disk.

A write that failed poisons the file: what is there now is unknown, so nothing is written to it any more; bytes that
were there before can still be read, and their checksums say whether they are good. Nothing is synced: the file dies
with the process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from pathlib import Path

from vblackwell.errors import ConfigurationError, DiskError, InsufficientMemory
from vblackwell.machine.facts import disk_facts
from vblackwell.units import MiB, format_bytes

PAGE = 4096
GROW_BYTES = 16 * MiB
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.ENOSYS}


class DiskFull(InsufficientMemory, DiskError):
    """The file system has no room for what a disk level should hold."""


class SystemCalls:
    """The calls that touch the file; a test replaces some to break the disk."""

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)


def memory_at(address: int, num_bytes: int) -> memoryview:
    """A writable view of memory that the caller keeps alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


class ScratchFile:
    """An unlinked file in the directory ``path`` that grows up to ``capacity_bytes``.

    Attributes:
        direct: whether it is open with ``O_DIRECT``: then addresses, offsets and lengths must be multiples of 4 KiB.
        poison: why nothing may be written any more; None while all is well.

    Raises:
        ConfigurationError: the directory does not exist, or is RAM-backed.
        DiskError: no file could be made there.
    """

    def __init__(self, path: str | os.PathLike[str], capacity_bytes: int, calls: SystemCalls | None = None) -> None:
        facts = disk_facts(path)
        if not facts.path.is_dir():
            raise ConfigurationError(f"disk path {facts.path} is a file: give an existing directory on a disk")
        if facts.ram_backed:
            raise ConfigurationError(
                f"disk path {facts.path} is on {facts.file_system}, which is RAM: give a directory on a disk"
            )
        self.path = facts.path
        self.capacity_bytes = capacity_bytes
        self.calls = calls or SystemCalls()
        self.poison: str | None = None
        self.fd, self.direct = _open(facts.path)
        self.reserved_bytes = 0
        self._close = weakref.finalize(self, os.close, self.fd)

    def check_writable(self) -> None:
        """Raises DiskError if the file is poisoned."""
        if self.poison:
            raise DiskError(self.poison)

    def can_reserve(self, end: int) -> bool:
        """Whether `reserve` would succeed, as far as the file system tells."""
        grow = end - self.reserved_bytes
        return self.poison is None and (grow <= 0 or grow <= disk_facts(self.path).free_bytes)

    def reserve(self, end: int) -> None:
        """Make the file system reserve ``[0, end)``.

        Raises:
            DiskFull: it has none.
            DiskError: it failed otherwise, or the file is poisoned.
        """
        self.check_writable()
        if end <= self.reserved_bytes:
            return
        generous = min(max(end, self.reserved_bytes + GROW_BYTES), max(end, self.capacity_bytes))
        try:
            self._grow(generous)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or generous == end:
                self._refuse(error, end)
            try:
                self._grow(end)
            except OSError as again:
                self._refuse(again, end)

    def _grow(self, end: int) -> None:
        self.calls.fallocate(self.fd, self.reserved_bytes, end - self.reserved_bytes)
        self.reserved_bytes = end

    def _refuse(self, error: OSError, end: int) -> None:
        needed = end - self.reserved_bytes
        free = disk_facts(self.path).free_bytes
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"the disk at {self.path} is full: {format_bytes(needed)} more are needed and {format_bytes(free)} are "
                f"free ({error.strerror}); free some space, or give the ssd level another path",
                needed_bytes=needed,
                available_bytes=free,
            ) from error
        raise DiskError(
            f"could not reserve {format_bytes(needed)} at offset {self.reserved_bytes} of the scratch file in "
            f"{self.path}: {error.strerror}; check the disk, or give the ssd level another path"
        ) from error

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on, through short reads.

        Raises:
            DiskError: with file, offset and size.
        """
        position = 0
        while position < len(buffer):
            try:
                count = self.calls.preadv(self.fd, [buffer[position:]], offset + position)
            except OSError as error:
                raise self._failed("reading", offset, len(buffer), error.strerror) from error
            step = self._whole_pages(count, len(buffer) - position)
            if step == 0:
                raise self._failed("reading", offset, len(buffer), f"it stopped after {position} bytes")
            position += step

    def write(self, offset: int, buffer: memoryview) -> None:
        """Write ``buffer`` at ``offset``, through short writes. A failure poisons the file.

        Raises:
            DiskError: with file, offset and size.
        """
        self.check_writable()
        position = 0
        while position < len(buffer):
            try:
                count = self.calls.pwritev(self.fd, [buffer[position:]], offset + position)
            except OSError as error:
                raise self._poisoned(offset, len(buffer), error.strerror) from error
            step = self._whole_pages(count, len(buffer) - position)
            if step == 0:
                raise self._poisoned(offset, len(buffer), f"it stopped after {position} bytes")
            position += step

    def _whole_pages(self, count: int, wanted: int) -> int:
        """Where to go on after a short transfer: direct I/O must resume at a page."""
        return count if count == wanted or not self.direct else count // PAGE * PAGE

    def _poisoned(self, offset: int, size: int, reason: str | None) -> DiskError:
        failed = self._failed("writing", offset, size, reason)
        self.poison = f"the scratch file in {self.path} is not written to any more: {failed}"
        return failed

    def _failed(self, doing: str, offset: int, size: int, reason: str | None) -> DiskError:
        return DiskError(
            f"{doing} {size} bytes at offset {offset} of the scratch file in {self.path} failed: {reason}; "
            f"check the disk (dmesg, smartctl), or give the ssd level another path"
        )

    def close(self) -> None:
        """Close the file, and with it free its space. Idempotent."""
        self._close()


def _open(folder: Path) -> tuple[int, bool]:
    """(descriptor, whether direct) of a new unlinked file, by the first way that works here."""
    last: OSError | None = None
    for tmpfile, direct in ((True, True), (False, True), (True, False), (False, False)):
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            fd = os.open(folder, flags | os.O_TMPFILE, 0o600) if tmpfile else _open_unlinked(folder, flags)
        except OSError as error:
            last = error
            if error.errno not in _NO_DIRECT:
                break
            continue
        if not direct or _direct_works(fd):
            return fd, direct
        os.close(fd)
    assert last is not None, "the last way opens without probing"
    raise DiskError(
        f"could not make a scratch file in {folder}: {last.strerror}; give the ssd level a directory you may write to"
    ) from last


def _open_unlinked(folder: Path, flags: int) -> int:
    name = os.path.join(folder, next(tempfile._get_candidate_names()) + ".vblackwell")  # pyright: ignore
    fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    return fd


def _direct_works(fd: int) -> bool:
    """Whether a page can be written and read with ``O_DIRECT``: some file systems open so and then refuse."""
    with mmap.mmap(-1, PAGE) as page:
        try:
            works = os.pwritev(fd, [page], 0) == PAGE and os.preadv(fd, [page], 0) == PAGE
            os.ftruncate(fd, 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            os.close(fd)
            raise DiskError(f"the first write to a scratch file failed: {error.strerror}; check the disk") from error
    return works
