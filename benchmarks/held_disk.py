"""Disks that are as fast as a benchmark wants: a real one that is held back, or RAM in its place, which nobody else reads meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from vblackwell.memory.compressed_disk import CompressedDiskLevel
from vblackwell.memory.scratch_file import SystemCalls
from vblackwell.memory.slab import map_slab


class HeldDisk(SystemCalls):
    """A disk at most so fast: one call at a time, and no call sooner over than its bytes take.

    Args:
        bytes_per_second: of reads and writes alike.
        memory_bytes: of RAM that takes the file's place; None: the bytes go to the disk. What they hold is checked by the level as ever.
    """

    def __init__(self, bytes_per_second: float, memory_bytes: int | None = None) -> None:
        self._rate, self._disk = bytes_per_second, threading.Lock()
        self._memory = None if memory_bytes is None else map_slab(memory_bytes)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return self._timed(super().preadv if self._memory is None else self._load, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return self._timed(super().pwritev if self._memory is None else self._store, fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        if self._memory is None:
            super().fallocate(fd, offset, length)

    def _load(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return self._copied(buffers, offset, False)

    def _store(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return self._copied(buffers, offset, True)

    def _copied(self, buffers: list[memoryview], offset: int, store: bool) -> int:
        assert self._memory is not None
        (buffer,) = buffers
        theirs, ours = torch.frombuffer(buffer, dtype=torch.uint8), self._memory[offset : offset + len(buffer)]
        ours.copy_(theirs) if store else theirs.copy_(ours)  # without the GIL, which a slice of a memoryview would keep
        return len(buffer)

    def _timed(self, call: Callable[..., int], fd: int, buffers: list[memoryview], offset: int) -> int:
        with self._disk:
            began = time.perf_counter()
            done = call(fd, buffers, offset)
            time.sleep(max(0.0, done / self._rate - (time.perf_counter() - began)))
        return done


class AlwaysCompressed(CompressedDiskLevel):
    """Compresses every piece, whatever its books say."""

    def _wanted(self) -> bool:
        return True
