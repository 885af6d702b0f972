"""Bytes on an SSD: one unlinked scratch file, a pool of threads, and a checksum for every piece that is written.

Threads move pieces of 8 MiB straight from and into the caller's memory where that is 4 KiB aligned, through a buffer of
the thread otherwise. A piece that is wanted in part is read and checked whole. Nothing is synced:
the file dies with the process.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
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
from vblackwell.units import format_bytes

PAGE = 4096
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(InsufficientMemory, DiskError):
    """The file system has no room for what a disk level should hold."""


def memory_at(address: int, num_bytes: int) -> memoryview:
    """A writable view of memory that the caller keeps alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


class ScratchFile:
    """An unlinked file in the directory ``path``: a crash leaves nothing.

    ``direct``: it is open with ``O_DIRECT`` (the page cache would hold a second copy), and addresses, offsets and
    lengths must be multiples of 4 KiB. A write that failed poisons it: nothing is written any more. Raises
    ConfigurationError where the directory does not exist or is RAM-backed, DiskError where no file can be made.
    """

    calls: Any = os  # `preadv`, `pwritev` and `posix_fallocate`; a test replaces it to break the disk

    def __init__(self, path: str | os.PathLike[str]) -> None:
        facts = disk_facts(path)
        if facts.ram_backed or not facts.path.is_dir():
            wrong = f"on {facts.file_system}, which is RAM" if facts.path.is_dir() else "a file"
            raise ConfigurationError(f"disk path {facts.path} is {wrong}: give an existing directory on a disk")
        self.path, self.reserved_bytes = facts.path, 0
        self.poison: str | None = None
        try:
            file = tempfile.TemporaryFile(buffering=0, dir=facts.path)  # noqa: SIM115 (the finalizer closes it)
        except OSError as error:
            raise DiskError(
                f"could not make a scratch file in {facts.path}: {error.strerror}; give the ssd level a directory you "
                "may write to"
            ) from error
        self.close = weakref.finalize(self, file.close)  # idempotent; frees the file's space
        self.fd = file.fileno()
        self.direct = _open_direct(self.fd)

    def check_writable(self) -> None:
        """Raises DiskError if the file is poisoned."""
        if self.poison:
            raise DiskError(self.poison)

    def reserve(self, end: int) -> None:
        """Make the file system reserve ``[0, end)``; raises DiskFull, or DiskError where it failed otherwise."""
        self.check_writable()
        needed = end - self.reserved_bytes
        if needed <= 0:
            return
        try:
            self.calls.posix_fallocate(self.fd, self.reserved_bytes, needed)
        except OSError as error:
            if error.errno not in _FULL:
                raise DiskError(
                    f"could not reserve {format_bytes(needed)} at offset {self.reserved_bytes} of the scratch file in "
                    f"{self.path}: {error.strerror}; check the disk, or give the ssd level another path"
                ) from error
            free = disk_facts(self.path).free_bytes
            raise DiskFull(
                f"the disk at {self.path} is full: {format_bytes(needed)} more are needed and {format_bytes(free)} are "
                f"free ({error.strerror}); free some space, or give the ssd level another path",
                needed_bytes=needed,
                available_bytes=free,
            ) from error
        self.reserved_bytes = end

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on; raises DiskError with file, offset and size."""
        self._move("reading", self.calls.preadv, offset, buffer)

    def write(self, offset: int, buffer: memoryview) -> None:
        """Write ``buffer`` at ``offset``. A failure poisons the file and raises DiskError."""
        self.check_writable()
        try:
            self._move("writing", self.calls.pwritev, offset, buffer)
        except DiskError as error:
            self.poison = f"the scratch file in {self.path} is not written to any more: {error}"
            raise

    def _move(self, doing: str, call: Callable[..., int], offset: int, buffer: memoryview) -> None:
        """The whole of ``buffer``, through short reads and writes: direct I/O must resume at a page."""
        position = 0
        while position < len(buffer):
            try:
                count = call(self.fd, [buffer[position:]], offset + position)
                if self.direct and count < len(buffer) - position:
                    count = count // PAGE * PAGE
                if count == 0:
                    raise OSError(f"it stopped after {position} bytes")
            except OSError as error:
                raise DiskError(
                    f"{doing} {len(buffer)} bytes at offset {offset} of the scratch file in {self.path} failed: "
                    f"{error.strerror or error}; check the disk (dmesg, smartctl), or give the ssd level another path"
                ) from error
            position += count


def _open_direct(fd: int) -> bool:
    """Switch ``O_DIRECT`` on where a page can be written and read so: some file systems let it be and then refuse."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with mmap.mmap(-1, PAGE) as page:
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            works = os.pwritev(fd, [page], 0) == PAGE and os.preadv(fd, [page], 0) == PAGE
            os.ftruncate(fd, 0)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise DiskError(f"writing to a new scratch file failed: {error.strerror}; check the disk") from error
            works = False
    if not works:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return works


Check = tuple[int, int | None]  # how many bytes of the piece were written, and their XXH3-64
LOST: Check = (0, None)  # of a piece that is being written, or was when the disk failed


class DiskLevel(Level):
    """A level in an unlinked file in the directory ``path``; raises as `ScratchFile`."""

    def __init__(
        self, path: str, capacity_bytes: int, *, piece_bytes: int = DISK_PIECE_BYTES, threads: int = DISK_THREADS
    ) -> None:
        super().__init__("ssd", None, capacity_bytes, PAGE, threads)
        assert piece_bytes % PAGE == 0
        self._file = ScratchFile(path)
        self.path = str(self._file.path)
        self._ranges = RangeAllocator(self.capacity_bytes)
        self._piece_bytes = piece_bytes
        self._local = threading.local()
        self._pin = torch.cuda.is_available()

    def _fits(self, held_bytes: int) -> bool:
        fit = self._ranges.best_fit(held_bytes)
        if fit is None or self._file.poison is not None:
            return False
        grow = fit[1] + held_bytes - self._file.reserved_bytes
        return grow <= 0 or grow <= disk_facts(self.path).free_bytes

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

    def read(self, extent: Extent, out: torch.Tensor) -> Transfer:
        return self._start(self._read_piece, extent, flat_bytes(out))

    def write(self, extent: Extent, src: torch.Tensor) -> Transfer:
        return self._start(self._write_piece, extent, flat_bytes(src))

    def _start(self, run: Any, extent: Extent, tensor: torch.Tensor) -> Transfer:
        assert tensor.nbytes <= extent.num_bytes
        ready = [stream.record_event() for stream in working_streams(tensor.device)] if tensor.is_cuda else []
        boxes = [[tensor[at : at + self._piece_bytes]] for at in range(0, tensor.nbytes, self._piece_bytes)]
        futures = [self._threads.submit(run, extent, index, box, ready) for index, box in enumerate(boxes)]
        return FutureTransfer(futures, keep=(tensor,))

    def _read_piece(self, extent: Extent, index: int, box: list[torch.Tensor], ready: list[Any]) -> None:
        out = box.pop()  # the pool holds a job's arguments for a moment after its result: not the memory
        transfer_delay("thread")
        offset, check = extent.offset + index * self._piece_bytes, extent.handle[index]
        length = max(out.nbytes, check[0] if check else 0)
        straight = not out.is_cuda and length == out.nbytes and out.data_ptr() % PAGE == 0
        memory = out if straight else self._scratch()
        self._fetch(offset, memory.data_ptr(), length, check)
        if not straight:
            self._carry(out, memory[: out.nbytes], ready)

    def _write_piece(self, extent: Extent, index: int, box: list[torch.Tensor], ready: list[Any]) -> None:
        src = box.pop()
        transfer_delay("thread")
        offset, old = extent.offset + index * self._piece_bytes, extent.handle[index]
        length, memory = max(src.nbytes, old[0] if old else 0), src
        if src.is_cuda or src.data_ptr() % PAGE or length > src.nbytes:
            memory = self._scratch()
            if length > src.nbytes:  # the front of a piece: its rest stays, and stays checked
                self._fetch(offset, memory.data_ptr(), length, old)
            self._carry(memory[: src.nbytes], src, ready)
        digest = xxhash.xxh3_64_intdigest(memory_at(memory.data_ptr(), length))
        self._file.check_writable()  # what a poisoned file refuses changes nothing
        extent.handle[index] = LOST
        for address, size, tail in self._parts(memory.data_ptr(), length):
            if tail:
                ctypes.memmove(address, memory.data_ptr() + length - tail, tail)
            self._file.write(offset, memory_at(address, size))
            offset += size
        extent.handle[index] = (length, digest)

    def _parts(self, address: int, length: int) -> list[tuple[int, int, int]]:
        """What the file moves of ``length`` bytes at ``address``: (address, size, bytes of the tail). A tail that is no
        whole page goes through a page of the thread where direct I/O wants whole ones."""
        tail = length % PAGE if self._file.direct else 0
        parts = [(address, length - tail, 0)] if length > tail else []
        return parts + ([(self._scratch().data_ptr() + self._piece_bytes, PAGE, tail)] if tail else [])

    def _fetch(self, start: int, memory: int, length: int, check: Check | None) -> None:
        """Read a piece to the address ``memory``, and verify it; raises CorruptData."""
        offset = start
        for address, size, tail in self._parts(memory, length):
            self._file.read(offset, memory_at(address, size))
            if tail:
                ctypes.memmove(memory + length - tail, address, tail)
            offset += size
        if check is None:
            return
        if check is LOST:
            raise CorruptData(
                f"the piece at offset {start} of the scratch file in {self.path} was being written when the disk "
                "failed, and holds neither the old bytes nor the new ones: go back to a checkpoint and give the ssd "
                "level another path"
            )
        found = xxhash.xxh3_64_intdigest(memory_at(memory, check[0]))
        if found != check[1]:
            raise CorruptData(
                f"{format_bytes(check[0])} at offset {start} of the scratch file in {self.path} came back changed: "
                f"XXH3 {found:016x} instead of {check[1]:016x}; the disk or its cable is failing: go back to a "
                f"checkpoint and give the ssd level another path"
            )

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
            self._local.memory = map_slab(self._piece_bytes + PAGE, pin=self._pin)
        return self._local.memory

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._file.close()
        super().close()
