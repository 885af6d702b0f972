"""What a compressed disk level's threads do to bytes, without a disk: ratio, and bytes a second in and out, in a moment.

The same calls on pieces of the same size by as many threads as `CompressedDiskLevel` has: planes, their copy into the thread's own memory
and the checksum on the way there; checksum and planes on the way back.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from vblackwell.memory import lossless
from vblackwell.memory.compressed_disk import LEAST_BYTES, planes_of
from vblackwell.memory.disk import PIECE_BYTES, THREADS
from vblackwell.memory.scratch_file import PAGE
from vblackwell.units import align_up

FIRST_BYTES = 64 << 10
ROUNDS, LIMIT_SECONDS = 3, 0.3  # of one kind of bytes; one round at least


@dataclass
class _Piece:
    plain: Tensor
    out: Tensor
    held: bytearray
    sizes: tuple[int, ...] = field(default=())  # of its planes

    def pack(self, level: int) -> None:
        planes = planes_of(self.plain, level)
        self.sizes, at = tuple(len(plane) for plane in planes), 0
        for plane in planes:
            self.held[at : at + len(plane)] = plane
            at += len(plane)
        xxhash.xxh3_64_intdigest(memoryview(self.held)[:at])

    def unpack(self) -> None:
        held = memoryview(self.held)[: sum(self.sizes)]
        xxhash.xxh3_64_intdigest(held)
        lossless.decompress_piece(self.out, held, self.sizes, len(self.sizes))

    @property
    def stored(self) -> int:
        """Whole pages; one that saves none stays plain."""
        num_bytes = self.plain.numel()
        return min(num_bytes, align_up(sum(self.sizes), PAGE)) if num_bytes >= LEAST_BYTES else num_bytes


def codec_speed(
    values: Sequence[Tensor], *, level: int = lossless.LEVEL, piece_bytes: int = PIECE_BYTES, threads: int = THREADS,
    limit_seconds: float = LIMIT_SECONDS,
) -> tuple[float, float, float]:  # fmt: skip
    """Ratio, and bytes of ``values`` a second that are compressed and turned back, by all threads at work.

    Args:
        values: contiguous CPU tensors of one kind; cut into pieces; every thread has one at least.
        limit_seconds: rounds are repeated until then, three at most; the median counts.

    Raises:
        Unsupported: the package zstandard is not installed.
        ValueError: there are no bytes.
    """
    lossless.require_zstandard()
    flats = [value.reshape(-1).view(torch.uint8) for value in values if value.numel()]
    plain = [piece.contiguous() for flat in flats for piece in flat.split(piece_bytes)]
    if not plain:
        raise ValueError("there are no bytes to compress")
    pieces = [plain[number % len(plain)] for number in range(max(threads, len(plain)))]
    # A plane that would not shrink is kept as it is, so that planes are never more than the piece.
    work = [_Piece(piece, torch.empty_like(piece), bytearray(piece.numel())) for piece in pieces]
    total = sum(each.plain.numel() for each in work)
    with ThreadPoolExecutor(threads, thread_name_prefix="vblackwell-codec") as pool:
        first = [_Piece(each.plain[:FIRST_BYTES], each.out[:FIRST_BYTES], each.held) for each in work[:threads]]
        for do in (lambda each: each.pack(level), _Piece.unpack):  # starts threads and what each has of its own
            _together(pool, threads, first, do)
        began, packing, unpacking = time.perf_counter(), list[float](), list[float]()
        while not packing or (len(packing) < ROUNDS and time.perf_counter() - began < limit_seconds):
            packing.append(_together(pool, threads, work, lambda each: each.pack(level)))
            unpacking.append(_together(pool, threads, work, _Piece.unpack))
    ratio = total / sum(each.stored for each in work)
    return ratio, total / statistics.median(packing), total / statistics.median(unpacking)


def _together(pool: ThreadPoolExecutor, threads: int, work: Sequence[_Piece], do: Callable[[_Piece], Any]) -> float:
    """Seconds until every piece of ``work`` is done, by threads that begin at the same time."""
    waiting = threading.Barrier(threads + 1)

    def run(mine: Sequence[_Piece]) -> None:
        waiting.wait()
        for each in mine:
            do(each)

    jobs = [pool.submit(run, work[number::threads]) for number in range(threads)]
    waiting.wait()
    began = time.perf_counter()
    for job in jobs:
        job.result()
    return time.perf_counter() - began
