"""Blocks of RAM for pages that left level 0, and the copies between both, one block each.

All copies are ordered with what computes, and with each other, on the device: each begins after what was queued before
it, and what is queued later begins after it. So no block, here or there, is written while something else reads it, and
the host waits for nothing; on the CPU a copy has ended when it returns. RAM is taken a chunk at a time, some ahead of
the one that fills on a GPU, for pinning it takes a while, in the background; until it is there nothing sinks into it.
"""

import logging
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from vblackwell.errors import InsufficientMemory, VBError
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.pool import Reservation
from vblackwell.memory.transfer import Transfer, copy_pool, current_stream, start_copies
from vblackwell.units import GiB

_log = logging.getLogger(__name__)
LEVEL = 1  # of the stack
CHUNK_BYTES, AHEAD = GiB, 2  # chunks that are pinned before the one in use is full


class SunkPages:
    """``total`` blocks of ``block_bytes`` on level 1 of ``stack``, for those of ``pages``, uint8 on level 0. A place is
    a block of ``pages``, or after them one of RAM. ``name`` is unique in the stack. Close it before ``pages`` are given
    back."""

    def __init__(self, stack: VGPUStack, name: str, pages: Tensor, block_bytes: int, total: int) -> None:
        self.total, self._stack, self._block_bytes = total, stack, block_bytes
        self._device = pages.device
        self._blocks = [*pages.view(-1, block_bytes).unbind()]  # by place; of RAM, as far as it is there
        self._num_pages = len(self._blocks)
        self._each = max(1, CHUNK_BYTES // block_bytes)  # blocks of a chunk
        self._chunks, self._name = list[Reservation](), name
        self._threads = copy_pool("pages")
        self._last: Transfer | None = None
        self._is_full = False  # no more RAM was there
        self._ahead = AHEAD if self._device.type == "cuda" else 0
        self._grow(self._ahead)

    def is_ready(self, block: int) -> bool:
        """Whether it can be filled now; if not, its memory is on its way, or never comes."""
        number = block // self._each
        self._grow(number + 1 + self._ahead)
        if number >= len(self._chunks) or not self._chunks[number].is_resident:
            return False
        while len(self._blocks) <= self._num_pages + block:
            done = (len(self._blocks) - self._num_pages) // self._each
            self._blocks += self._chunks[done].bytes.view(-1, self._block_bytes).unbind()
        return True

    def _grow(self, count: int) -> None:
        """Have so many chunks, or all, or what the level has."""
        while len(self._chunks) < min(count, -(-self.total // self._each)) and not self._is_full:
            begun = len(self._chunks) * self._each
            num_bytes = min(self._each, self.total - begun) * self._block_bytes
            try:
                self._chunks.append(self._stack.reserve(f"{self._name}#{len(self._chunks)}", num_bytes, LEVEL))
            except InsufficientMemory as error:
                self._is_full = True
                _log.warning("pages of keys and values have %d of %d blocks in RAM: %s", begun, self.total, error)

    def move(self, moves: Sequence[tuple[int, int]]) -> bool:
        """Copy from place to place, in this order, before any later pass; False where that failed. Raises
        torch.AcceleratorError for a device that is lost."""
        try:
            for sinks, part in groupby(moves, lambda move: move[0] < self._num_pages):
                pairs = [(self._blocks[target], self._blocks[source]) for source, target in part]
                transfer = start_copies(pairs, self._threads)
                link = (0, LEVEL) if sinks else (LEVEL, 0)
                self._stack.count_transfer(*link, len(pairs) * self._block_bytes, transfer)
                transfer.wait_on(current_stream(self._device))
                transfer.let_go()
                self._last = transfer
        except torch.AcceleratorError:
            raise
        except (VBError, RuntimeError, OSError):  # these are read again, no text ends for it
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # what was begun must not write later
            _log.warning("%d pages could not be copied between level 0 and RAM", len(moves), exc_info=True)
            return False
        return True

    def close(self) -> None:
        """Give the RAM back when the last copy has ended. Idempotent."""
        last, self._last = self._last, None
        try:
            if last is not None:
                last.finish()
        finally:
            self._threads.shutdown()
            self._blocks.clear()
            while self._chunks:
                self._stack.unreserve(self._chunks.pop())
