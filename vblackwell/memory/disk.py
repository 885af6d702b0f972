"""Bytes on an SSD: one unlinked scratch file, a pool of threads, and a checksum for every piece that is written.

Threads read and write pieces of 8 MiB straight from and into the caller's memory where that is 4 KiB aligned, through a
buffer of the thread otherwise. Each piece has its XXH3 in memory from the moment it is written; a piece that is wanted
in part is read and checked whole. A write that failed poisons the file: nothing is written to it any more, and bytes
that were there before are read with their checksums. Nothing is synced: the file dies with the process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
import xxhash

from vblackwell.errors import ConfigurationError, CorruptData, DiskError, InsufficientMemory
from vblackwell.machine.facts import disk_facts
from vblackwell.machine.limits import DISK_PIECE_BYTES, DISK_THREADS
from vblackwell.memory.host import map_slab
from vblackwell.memory.level import Extent, Level, RangeAllocator
from vblackwell.memory.transfer import (
    FutureTransfer,
    Transfer,
    copy_streams,
    flat_bytes,
    transfer_delay,
    working_streams,
)
from vblackwell.units import MiB, align_up, format_bytes

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
    """An unlinked file in the directory ``path`` that grows up to ``capacity_bytes``: a crash leaves nothing.

    Attributes:
        direct: whether it is open with ``O_DIRECT``, as where a probe shows that it works (the page cache would hold a
            second copy): then addresses, offsets and lengths must be multiples of 4 KiB.
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
        """Make the file system reserve ``[0, end)``; raises DiskFull, or DiskError where it failed otherwise or the
        file is poisoned."""
        self.check_writable()
        if end <= self.reserved_bytes:
            return
        generous = min(max(end, self.reserved_bytes + GROW_BYTES), max(end, self.capacity_bytes))
        for size in dict.fromkeys((generous, end)):
            try:
                self.calls.fallocate(self.fd, self.reserved_bytes, size - self.reserved_bytes)
                self.reserved_bytes = size
                return
            except OSError as error:
                if size == end or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    self._refuse(error, end)

    def _refuse(self, error: OSError, end: int) -> None:
        needed, free = end - self.reserved_bytes, disk_facts(self.path).free_bytes
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
        """Fill ``buffer`` from ``offset`` on, through short reads; raises DiskError with file, offset and size."""
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
        """Write ``buffer`` at ``offset``, through short writes. A failure poisons the file and raises DiskError."""
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


Check = tuple[int, int | None]  # how many bytes of the piece were written, and their XXH3-64
# Of a piece that is being written, or was when the disk failed: it holds neither the old bytes nor the new ones.
LOST: Check = (0, None)


class DiskLevel(Level):
    """A level in an unlinked file in the directory ``path``; raises as `ScratchFile`. ``bytes_read`` and
    ``bytes_written`` count what the disk moved."""

    def __init__(
        self,
        path: str,
        capacity_bytes: int,
        *,
        piece_bytes: int = DISK_PIECE_BYTES,
        threads: int = DISK_THREADS,
        calls: SystemCalls | None = None,
    ) -> None:
        super().__init__("ssd", None, capacity_bytes, PAGE, threads)
        assert piece_bytes % PAGE == 0
        self._file = ScratchFile(path, self.capacity_bytes, calls)
        self._ranges = RangeAllocator(self.capacity_bytes)
        self._piece_bytes = piece_bytes
        self._local = threading.local()
        self._pin = torch.cuda.is_available()
        self.bytes_read = 0
        self.bytes_written = 0

    @property
    def path(self) -> str:
        return str(self._file.path)

    def _fits(self, held_bytes: int) -> bool:
        fit = self._ranges.best_fit(held_bytes)
        return fit is not None and self._file.can_reserve(fit[1] + held_bytes)

    def _take(self, held_bytes: int) -> tuple[int, list[Check | None]] | None:
        offset = self._ranges.allocate(held_bytes)
        if offset is None:
            return None
        try:
            self._file.reserve(offset + held_bytes)
        except BaseException:
            self._ranges.free(offset, held_bytes)
            raise
        return offset, [None] * -(-held_bytes // self._piece_bytes)

    def _give(self, extent: Extent) -> None:
        self._ranges.free(extent.offset, extent.held_bytes)

    def _retake(self, extent: Extent) -> None:
        self._ranges.take(extent.offset, extent.held_bytes)

    def view(self, extent: Extent) -> None:
        return None

    def read(self, extent: Extent, out: torch.Tensor) -> Transfer:
        return self._start(self._read_piece, extent, flat_bytes(out))

    def write(self, extent: Extent, src: torch.Tensor) -> Transfer:
        return self._start(self._write_piece, extent, flat_bytes(src))

    def _start(self, run: Any, extent: Extent, tensor: torch.Tensor) -> Transfer:
        assert tensor.nbytes <= extent.num_bytes
        ready = [stream.record_event() for stream in working_streams(tensor.device)] if tensor.is_cuda else []
        starts = range(0, tensor.nbytes, self._piece_bytes)
        boxes = [[tensor[start : start + self._piece_bytes]] for start in starts]
        futures = [self._threads.submit(run, extent, index, box, ready) for index, box in enumerate(boxes)]
        return FutureTransfer(futures, keep=(tensor,))

    def _read_piece(self, extent: Extent, index: int, box: list[torch.Tensor], ready: list[Any]) -> None:
        out = box.pop()  # the pool holds a job's arguments for a moment after its result: not the memory
        transfer_delay("thread")
        offset = extent.offset + index * self._piece_bytes
        check = extent.handle[index]
        length = max(out.nbytes, check[0]) if check else out.nbytes
        straight = not out.is_cuda and length == out.nbytes and out.data_ptr() % PAGE == 0
        memory = out if straight else self._scratch()
        self._fetch(offset, memory.data_ptr(), length)
        self._verify(offset, memory.data_ptr(), check)
        if not straight:
            self._carry(out, memory[: out.nbytes], ready)

    def _write_piece(self, extent: Extent, index: int, box: list[torch.Tensor], ready: list[Any]) -> None:
        src = box.pop()
        transfer_delay("thread")
        offset = extent.offset + index * self._piece_bytes
        old = extent.handle[index]
        length, memory = src.nbytes, src
        if src.is_cuda or src.data_ptr() % PAGE or (old and old[0] > length):
            memory = self._scratch()
            if old and old[0] > length:  # the front of a piece: its rest stays, and stays checked
                length = old[0]
                self._fetch(offset, memory.data_ptr(), length)
                self._verify(offset, memory.data_ptr(), old)
            self._carry(memory[: src.nbytes], src, ready)
        digest = xxhash.xxh3_64_intdigest(memory_at(memory.data_ptr(), length))
        self._file.check_writable()  # what a poisoned file refuses changes nothing
        extent.handle[index] = LOST
        self._store(offset, memory.data_ptr(), length)
        extent.handle[index] = (length, digest)

    def _verify(self, offset: int, address: int, check: Check | None) -> None:
        if check is None:
            return
        if check is LOST:
            raise CorruptData(
                f"the piece at offset {offset} of the scratch file in {self.path} was being written when the disk "
                "failed, and holds neither the old bytes nor the new ones: go back to a checkpoint and give the ssd "
                "level another path"
            )
        found = xxhash.xxh3_64_intdigest(memory_at(address, check[0]))
        if found != check[1]:
            raise CorruptData(
                f"{format_bytes(check[0])} at offset {offset} of the scratch file in {self.path} came back changed: "
                f"XXH3 {found:016x} instead of {check[1]:016x}; the disk or its cable is failing: go back to a "
                f"checkpoint and give the ssd level another path"
            )

    def _fetch(self, offset: int, address: int, length: int) -> None:
        whole = length // PAGE * PAGE if self._file.direct else length
        if whole:
            self._file.read(offset, memory_at(address, whole))
        if whole < length:
            page = self._scratch().data_ptr() + self._piece_bytes
            self._file.read(offset + whole, memory_at(page, PAGE))
            ctypes.memmove(address + whole, page, length - whole)
        with self._lock:
            self.bytes_read += length

    def _store(self, offset: int, address: int, length: int) -> None:
        whole = length // PAGE * PAGE if self._file.direct else length
        if whole:
            self._file.write(offset, memory_at(address, whole))
        if whole < length:
            page = self._scratch().data_ptr() + self._piece_bytes
            ctypes.memmove(page, address + whole, length - whole)
            self._file.write(offset + whole, memory_at(page, PAGE))
        with self._lock:
            self.bytes_written += length

    def _carry(self, dst: torch.Tensor, src: torch.Tensor, ready: list[Any]) -> None:
        """Copy between a tensor and this thread's buffer, done on return; on a GPU it starts after ``ready``."""
        if not ready:
            ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes)
            return
        streams = copy_streams(dst.device if dst.is_cuda else src.device)
        stream = streams.h2d if dst.is_cuda else streams.d2h
        with torch.cuda.stream(stream):
            for event in ready:
                stream.wait_event(event)
            dst.copy_(src, non_blocking=True)
            end = stream.record_event(torch.cuda.Event(blocking=True))
        end.synchronize()

    def _scratch(self) -> torch.Tensor:
        """This thread's own memory: a piece, and a page for the tail after it."""
        if not hasattr(self._local, "memory"):
            self._local.memory = map_slab(align_up(self._piece_bytes, PAGE) + PAGE, pin=self._pin)
        return self._local.memory

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._file.close()
        super().close()
