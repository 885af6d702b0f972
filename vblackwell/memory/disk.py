"""Bytes on an SSD: one scratch file, a pool of threads, and a checksum for everything that is written.

An extent is cut into pieces of 8 MiB that the threads read and write independently, straight from and into the caller's
memory where that is 4 KiB aligned (host slabs and scratch buffers are), through a buffer of the thread's own otherwise.
CUDA tensors pass through pinned buffers of the threads, on the copy streams.

Each piece has its XXH3 checksum from the moment it is written, kept in memory, and every read checks every piece it
touches. So partial reads are checked too: a piece that is wanted in part is read whole. Why not one checksum for the
whole extent: its pieces are read out of order by several threads, and a part could not be checked at all.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
import xxhash

from vblackwell.errors import CorruptData
from vblackwell.machine.limits import DISK_PIECE_BYTES, DISK_THREADS
from vblackwell.memory.copying import copy_streams, flat_bytes, working_streams
from vblackwell.memory.level import Extent, Level
from vblackwell.memory.ranges import RangeAllocator
from vblackwell.memory.scratch_file import PAGE, ScratchFile, SystemCalls, memory_at
from vblackwell.memory.slab import map_slab
from vblackwell.memory.transfer import FutureTransfer, Transfer, transfer_delay
from vblackwell.units import align_up, format_bytes

Check = tuple[int, int | None]  # how many bytes of the piece were written, and their XXH3-64
# Of a piece that is being written, or was when the disk failed: it holds neither the old bytes nor the new ones.
LOST: Check = (0, None)


class DiskLevel(Level):
    """A level in an unlinked file in the directory ``path``.

    Attributes:
        bytes_read: from the disk so far. bytes_written: to the disk so far.

    Raises:
        ConfigurationError, DiskError: as `ScratchFile`.
    """

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
        """The directory that the scratch file is in."""
        return str(self._file.path)

    # -- placing: the range, and the file system's reservation of it ---------------------------------------------------

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

    # -- moving --------------------------------------------------------------------------------------------------------

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
        out = (
            box.pop()
        )  # the pool holds a job's arguments for a moment after its result: they are not to hold the memory
        transfer_delay("thread")
        offset = extent.offset + index * self._piece_bytes
        check = extent.handle[index]
        length = max(out.nbytes, check[0]) if check else out.nbytes
        straight = not out.is_cuda and length == out.nbytes and out.data_ptr() % PAGE == 0
        if straight:
            self._fetch(offset, out.data_ptr(), length)
            self._verify(offset, out.data_ptr(), check)
            return
        buffer = self._buffer()
        self._fetch(offset, buffer.data_ptr(), length)
        self._verify(offset, buffer.data_ptr(), check)
        self._carry(out, buffer[: out.nbytes], ready)

    def _write_piece(self, extent: Extent, index: int, box: list[torch.Tensor], ready: list[Any]) -> None:
        src = box.pop()
        transfer_delay("thread")
        offset = extent.offset + index * self._piece_bytes
        old = extent.handle[index]
        length = src.nbytes
        memory = src
        if src.is_cuda or src.data_ptr() % PAGE or (old and old[0] > length):
            memory = self._buffer()
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
            page = self._page()
            self._file.read(offset + whole, memory_at(page, PAGE))
            ctypes.memmove(address + whole, page, length - whole)
        with self._lock:
            self.bytes_read += length

    def _store(self, offset: int, address: int, length: int) -> None:
        whole = length // PAGE * PAGE if self._file.direct else length
        if whole:
            self._file.write(offset, memory_at(address, whole))
        if whole < length:
            page = self._page()
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

    def _buffer(self) -> torch.Tensor:
        return self._scratch()[: self._piece_bytes]

    def _page(self) -> int:
        return self._scratch().data_ptr() + self._piece_bytes

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._file.close()
        super().close()
