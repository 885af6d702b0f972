"""A disk level that writes fewer bytes than it holds: every piece goes through zstd on its way, where that saves time.

A disk is one and slow, cores are many: each of the level's threads compresses the piece that it writes, or turns back the one that it
read, while others wait for the disk. Bytes of a piece are laid out by their place in the element (lossless.py); nothing here knows
what an element is, so the layout is tried on the piece's first bytes. The place of an extent is that of its plain bytes: what is saved is
time and wear of the disk, not room, because an extent is placed before anybody knows what will be written there, and written anew later.

Whether it pays is measured all the time: the seconds that a thread has a piece for, compressed and plain, each while most pieces are of its
kind. (A disk is quicker for who asks while others compress: what plain pieces take then says nothing.) So a few pieces in a row are tried
the other way every so often, and the quicker way is taken for the rest.
"""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from vblackwell.memory import lossless
from vblackwell.memory.disk import LOST, PIECE_BYTES, THREADS, DiskLevel
from vblackwell.memory.level import Extent
from vblackwell.memory.scratch_file import PAGE, SystemCalls, memory_at
from vblackwell.memory.slab import map_slab
from vblackwell.memory.transfer import transfer_delay
from vblackwell.units import align_up

LEAST_BYTES = 4 * PAGE  # of a piece: below, whole pages save nothing
SAMPLE_BYTES = 64 << 10
ITEMSIZES = (2, 4, 1)
CYCLE, TRIED = 128, 8  # pieces, and how many of them go the other way; the first of all are plain
FORGET_BYTES = 4 << 30


@dataclass(frozen=True)
class _Squeezed:
    """A piece on the disk: its planes one behind the other."""

    length: int  # of the plain bytes
    digest: int  # XXH3 of what is on the disk
    sizes: tuple[int, ...]  # of the planes, as many as an element has bytes

    @property
    def stored(self) -> int:
        return sum(self.sizes)


@dataclass
class Way:
    """Pieces that went one way: bytes as their owner has them, and the threads' seconds from the first look at a piece to the last."""

    written_bytes: float = 0
    write_seconds: float = 0
    read_bytes: float = 0
    read_seconds: float = 0

    def forget(self) -> None:
        """Let what is long past weigh less."""
        if self.written_bytes + self.read_bytes > FORGET_BYTES:
            for name, value in vars(self).items():
                setattr(self, name, value / 2)


@dataclass
class Savings:
    """What was measured so far; older halves weigh less.

    Attributes:
        plain, packed: pieces as they are, and those that were to be compressed, whatever came of it.
        packed_bytes, stored_bytes: of the latter before and after.
    """

    plain: Way = field(default_factory=Way)
    packed: Way = field(default_factory=Way)
    packed_bytes: float = 0
    stored_bytes: float = 0

    @property
    def ratio(self) -> float:
        """Bytes of compressed pieces over what they take on the disk."""
        return self.packed_bytes / max(1.0, self.stored_bytes)

    @property
    def pays(self) -> bool:
        """Whether a byte that is written and read is so sooner compressed; True until both ways were seen."""
        plain, packed = self.plain, self.packed
        if not plain.written_bytes or not packed.written_bytes:
            return True
        seconds = [way.write_seconds / way.written_bytes for way in (plain, packed)]
        if plain.read_bytes and packed.read_bytes:
            seconds = [
                sum(pair)
                for pair in zip(seconds, (w.read_seconds / w.read_bytes for w in (plain, packed)), strict=True)
            ]
        return seconds[1] < seconds[0]


class CompressedDiskLevel(DiskLevel):
    """`DiskLevel` with pieces that are compressed without loss; arguments as there.

    Args:
        zstd_level: 1 (fast) to 19.

    Raises:
        Unsupported: the package zstandard is not installed.
        ConfigurationError, DiskError: as `DiskLevel`.
    """

    def __init__(
        self, path: str, capacity_bytes: int, *, zstd_level: int = lossless.LEVEL, piece_bytes: int = PIECE_BYTES,
        threads: int = THREADS, calls: SystemCalls | None = None,
    ) -> None:  # fmt: skip
        lossless.require_zstandard()
        super().__init__(path, capacity_bytes, piece_bytes=piece_bytes, threads=threads, calls=calls)
        self.name = "ssd+zstd"
        self._zstd_level = zstd_level
        self._savings, self._counted, self._pieces = Savings(), threading.Lock(), 0

    @property
    def savings(self) -> Savings:
        """A copy of what was measured so far."""
        with self._counted:
            return copy.deepcopy(self._savings)

    # -- pieces, in a thread of the pool -------------------------------------------------------------------------------------

    def _write_piece(self, extent: Extent, index: int, box: list[torch.Tensor], ready: list[Any]) -> None:
        src = box.pop()
        offset, old = self._offset(extent, index), extent.handle[index]
        if old is not None and not isinstance(old, _Squeezed) and old[0] > src.nbytes:
            super()._write_piece(extent, index, [src], ready)  # the front of a plain piece
            return
        transfer_delay("thread")
        whole = src
        if isinstance(old, _Squeezed) and old.length > src.nbytes:  # the front of a piece: its rest stays
            whole = self._buffer()[: old.length]
            self._unpack(offset, old, whole)
            self._carry(whole[: src.nbytes], src, ready)
        elif src.is_cuda:
            whole = self._buffer()[: src.nbytes]
            self._carry(whole, src, ready)
        began = time.perf_counter()
        tried = whole.nbytes >= LEAST_BYTES and self._wanted()
        packed = self._pack(whole) if tried else None
        self._file.check_writable()
        extent.handle[index] = LOST
        if packed is None:
            super()._write_piece(extent, index, [whole], [])
        else:
            sizes, held = packed
            digest = xxhash.xxh3_64_intdigest(memory_at(held.data_ptr(), held.nbytes))
            self._store(offset, held.data_ptr(), held.nbytes)
            extent.handle[index] = _Squeezed(whole.nbytes, digest, sizes)
        # What compressing takes is also the time for pieces that it could not make smaller.
        self._note(self._savings.packed if tried else self._savings.plain, "write", whole.nbytes, began)

    def _read_piece(self, extent: Extent, index: int, box: list[torch.Tensor], ready: list[Any]) -> None:
        entry, num_bytes, began = extent.handle[index], box[0].nbytes, time.perf_counter()
        if not isinstance(entry, _Squeezed):
            super()._read_piece(extent, index, box, ready)
            self._note(self._savings.plain, "read", num_bytes, began)
            return
        out = box.pop()
        transfer_delay("thread")
        offset = self._offset(extent, index)
        if not out.is_cuda and num_bytes == entry.length:
            self._unpack(offset, entry, out)
        else:
            whole = self._buffer()[: max(entry.length, num_bytes)]
            self._unpack(offset, entry, whole[: entry.length])
            self._carry(out, whole[:num_bytes], ready)
        self._note(self._savings.packed, "read", num_bytes, began)

    def _note(self, way: Way, what: str, num_bytes: int, began: float) -> None:
        if num_bytes < LEAST_BYTES:
            return
        seconds = time.perf_counter() - began
        with self._counted:
            if what == "write":
                way.written_bytes += num_bytes
                way.write_seconds += seconds
            else:
                way.read_bytes += num_bytes
                way.read_seconds += seconds
            way.forget()

    def _offset(self, extent: Extent, index: int) -> int:
        return extent.offset + index * self._piece_bytes

    def _pack(self, piece: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """Sizes of the planes, and their bytes in the thread's own memory; None where that saves no page."""
        planes = planes_of(piece, self._zstd_level)
        sizes = tuple(len(plane) for plane in planes)
        stored = sum(sizes)
        with self._counted:
            self._savings.packed_bytes += piece.nbytes
            self._savings.stored_bytes += min(stored, piece.nbytes)
            if self._savings.packed_bytes > FORGET_BYTES:
                self._savings.packed_bytes /= 2
                self._savings.stored_bytes /= 2
        if align_up(stored, PAGE) >= piece.nbytes:
            return None
        held = self._packed_buffer()
        view, at = memory_at(held.data_ptr(), stored), 0
        for plane in planes:
            view[at : at + len(plane)] = plane
            at += len(plane)
        return sizes, held[:stored]

    def _wanted(self) -> bool:
        with self._counted:
            tried = self._pieces % CYCLE < TRIED
            self._pieces += 1
            return self._savings.pays != tried

    def _unpack(self, offset: int, entry: _Squeezed, out: torch.Tensor) -> None:
        held = self._packed_buffer()
        self._fetch(offset, held.data_ptr(), entry.stored)
        self._verify(offset, held.data_ptr(), (entry.stored, entry.digest))
        lossless.decompress_piece(out, memory_at(held.data_ptr(), entry.stored), entry.sizes, len(entry.sizes))

    def _packed_buffer(self) -> torch.Tensor:
        """This thread's own memory for a compressed piece; direct reads go by whole pages."""
        if not hasattr(self._local, "packed"):
            self._local.packed = map_slab(align_up(self._piece_bytes, PAGE))
        return self._local.packed


def planes_of(piece: torch.Tensor, level: int) -> list[Any]:
    """The compressed planes of a piece of unknown elements: one for each byte of what its beginning shows an element to be."""
    return lossless.compress_piece(piece, _itemsize_of(piece, level), level)


def _itemsize_of(piece: torch.Tensor, level: int) -> int:
    """Bytes of an element, as far as the piece's beginning shows: what its first bytes shrink the most by."""
    sizes = {}
    for itemsize in ITEMSIZES:
        if piece.nbytes % itemsize == 0:
            sample = piece[: min(SAMPLE_BYTES, piece.nbytes) // itemsize * itemsize]
            sizes[itemsize] = sum(len(plane) for plane in lossless.compress_piece(sample, itemsize, level))
    return min(sizes, key=lambda itemsize: sizes[itemsize])
