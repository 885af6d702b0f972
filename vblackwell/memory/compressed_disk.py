"""A disk level that writes fewer bytes than it holds: every piece goes through zstd on its way, where that saves time.

A disk is one and slow, cores are many: each of the level's threads compresses the piece that it writes, or turns back the one that it
read, while others wait for the disk. Bytes of a piece are laid out by their place in the element (lossless.py); nothing here knows
what an element is, so the layout is tried on the piece's first bytes. The place of an extent is that of its plain bytes: what is saved is
time and wear of the disk, not room, because an extent is placed before anybody knows what will be written there, and written anew later.

Whether it pays is measured all the time: seconds of the codec against the seconds that the saved bytes would have taken. Where it does
not, pieces are written plain, and one in `PROBE_EVERY` is compressed to look again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from vblackwell.memory import lossless
from vblackwell.memory.disk import PIECE_BYTES, THREADS, DiskLevel
from vblackwell.memory.level import Extent
from vblackwell.memory.scratch_file import PAGE, SystemCalls, memory_at
from vblackwell.memory.slab import map_slab
from vblackwell.memory.transfer import transfer_delay
from vblackwell.units import align_up

LEAST_BYTES = 4 * PAGE  # of a piece: below, whole pages save nothing
SAMPLE_BYTES = 64 << 10
ITEMSIZES = (2, 4, 1)
PROBE_BYTES = 64 << 20  # of pieces, before what was measured decides
PROBE_EVERY = 32
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
class Savings:
    """What was measured so far; older halves weigh less.

    Attributes:
        plain_bytes: of pieces that were compressed. stored_bytes: what became of them.
        pack_seconds: that took, over all threads. unpacked_bytes, unpack_seconds: the way back.
        disk_bytes, disk_seconds: of reads and writes, over all threads.
    """

    plain_bytes: float = 0
    stored_bytes: float = 0
    pack_seconds: float = 0
    unpacked_bytes: float = 0
    unpack_seconds: float = 0
    disk_bytes: float = 0
    disk_seconds: float = 0

    @property
    def ratio(self) -> float:
        """Bytes of compressed pieces over what they take on the disk."""
        return self.plain_bytes / max(1.0, self.stored_bytes)

    @property
    def pays(self) -> bool:
        """Whether a byte that is written once and read once comes sooner compressed; True until enough was seen."""
        if self.plain_bytes < PROBE_BYTES:
            return True
        pack = self.pack_seconds / self.plain_bytes
        unpack = self.unpack_seconds / self.unpacked_bytes if self.unpacked_bytes else pack
        return 2 * (1 - 1 / self.ratio) * self.disk_seconds / max(1.0, self.disk_bytes) > pack + unpack

    def forget(self) -> None:
        """Let what is long past weigh less."""
        if self.plain_bytes + self.disk_bytes > FORGET_BYTES:
            for name, value in vars(self).items():
                setattr(self, name, value / 2)


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
            return Savings(**vars(self._savings))

    # -- pieces, in a thread of the pool -------------------------------------------------------------------------------------

    def _write_piece(self, extent: Extent, index: int, box: list[torch.Tensor], ready: Any) -> None:
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
        packed = self._pack(whole)
        extent.handle[index] = None  # while the bytes change, nobody reads them as what they were
        if packed is None:
            super()._write_piece(extent, index, [whole], None)
            return
        sizes, held = packed
        digest = xxhash.xxh3_64_intdigest(memory_at(held.data_ptr(), held.nbytes))
        self._store(offset, held.data_ptr(), held.nbytes)
        extent.handle[index] = _Squeezed(whole.nbytes, digest, sizes)

    def _read_piece(self, extent: Extent, index: int, box: list[torch.Tensor], ready: Any) -> None:
        entry = extent.handle[index]
        if not isinstance(entry, _Squeezed):
            super()._read_piece(extent, index, box, ready)
            return
        out = box.pop()
        transfer_delay("thread")
        if not out.is_cuda and out.nbytes == entry.length:
            self._unpack(self._offset(extent, index), entry, out)
            return
        whole = self._buffer()[: max(entry.length, out.nbytes)]
        self._unpack(self._offset(extent, index), entry, whole[: entry.length])
        self._carry(out, whole[: out.nbytes], ready)

    def _offset(self, extent: Extent, index: int) -> int:
        return extent.offset + index * self._piece_bytes

    def _pack(self, piece: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """Sizes of the planes, and their bytes in the thread's own memory; None where the piece is better plain."""
        if piece.nbytes < LEAST_BYTES or not self._wanted():
            return None
        began = time.perf_counter()
        itemsize = _itemsize_of(piece, self._zstd_level)
        planes = lossless.compress_piece(piece, itemsize, self._zstd_level)
        sizes = tuple(len(plane) for plane in planes)
        stored = sum(sizes)
        shrinks = align_up(stored, PAGE) < piece.nbytes
        held = self._packed_buffer()
        if shrinks:
            view, at = memory_at(held.data_ptr(), stored), 0
            for plane in planes:
                view[at : at + len(plane)] = plane
                at += len(plane)
        with self._counted:
            found = self._savings
            found.plain_bytes += piece.nbytes
            found.stored_bytes += min(stored, piece.nbytes)
            found.pack_seconds += time.perf_counter() - began
            found.forget()
        return (sizes, held[:stored]) if shrinks else None

    def _wanted(self) -> bool:
        with self._counted:
            self._pieces += 1
            return self._savings.pays or self._pieces % PROBE_EVERY == 0

    def _unpack(self, offset: int, entry: _Squeezed, out: torch.Tensor) -> None:
        held = self._packed_buffer()
        self._fetch(offset, held.data_ptr(), entry.stored)
        self._verify(offset, held.data_ptr(), (entry.stored, entry.digest))
        began = time.perf_counter()
        lossless.decompress_piece(out, memory_at(held.data_ptr(), entry.stored), entry.sizes, len(entry.sizes))
        with self._counted:
            self._savings.unpacked_bytes += entry.length
            self._savings.unpack_seconds += time.perf_counter() - began

    def _packed_buffer(self) -> torch.Tensor:
        """This thread's own memory for a compressed piece; direct reads go by whole pages."""
        if not hasattr(self._local, "packed"):
            self._local.packed = map_slab(align_up(self._piece_bytes, PAGE))
        return self._local.packed

    def _fetch(self, offset: int, address: int, length: int) -> None:
        began = time.perf_counter()
        super()._fetch(offset, address, length)
        self._count_disk(length, began)

    def _store(self, offset: int, address: int, length: int) -> None:
        began = time.perf_counter()
        super()._store(offset, address, length)
        self._count_disk(length, began)

    def _count_disk(self, num_bytes: int, began: float) -> None:
        with self._counted:
            self._savings.disk_bytes += num_bytes
            self._savings.disk_seconds += time.perf_counter() - began


def _itemsize_of(piece: torch.Tensor, level: int) -> int:
    """Bytes of an element, as far as the piece's beginning shows: what its first bytes shrink the most by."""
    sizes = {}
    for itemsize in ITEMSIZES:
        if piece.nbytes % itemsize == 0:
            sample = piece[: min(SAMPLE_BYTES, piece.nbytes) // itemsize * itemsize]
            sizes[itemsize] = sum(len(plane) for plane in lossless.compress_piece(sample, itemsize, level))
    return min(sizes, key=lambda itemsize: sizes[itemsize])
