"""Lossless compression of tensors' bytes: byte planes, each by zstd, in pieces that several threads work on.

Trained numbers hardly repeat as elements, but their bytes do: signs and exponents of neighbouring weights are much alike, and lie in the
high bytes. So the bytes of a piece are laid out by their place in the element (a *plane*) and each plane is compressed by itself; one
that would not shrink by a sixteenth, as low mantissa bytes, is kept as it is, which also makes it free to read.

    magic, bytes an element, bytes in all, pieces | size of each plane of each piece, uint32 | the planes

A plane whose size is that of its elements is a raw one. Nothing here checks that bytes are what was written: that is whoever stores them.
"""

from __future__ import annotations

import functools
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vblackwell.errors import CorruptData, Unsupported

MAGIC = b"VBZ1"
PIECE_BYTES = 4 << 20
LEVEL = 1
_HEADER = struct.Struct("<4sIQQ")
_SHRINKS = 15 / 16


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="vblackwell-zstd")


@functools.cache
def require_zstandard() -> Any:
    """The package.

    Raises:
        Unsupported: it is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise Unsupported(
            "lossless compression needs the package zstandard: pip install 'vblackwell[compressed]'"
        ) from error
    return zstandard


_local = threading.local()


def _compressor(level: int, planes: bool) -> Any:
    """This thread's own: zstandard's objects are not for several threads.

    Planes of exponents hold few repetitions and much skew. At level 1 a small table of long matches leaves the work to zstd's entropy
    coder, which is
    three times as fast there and a twelfth smaller than level 1's own settings.
    """
    made: dict[tuple[int, bool], Any] = _local.__dict__.setdefault("compressors", {})
    if (level, planes) not in made:
        package = require_zstandard()
        if planes and level == 1:
            chosen = package.ZstdCompressionParameters(
                strategy=package.STRATEGY_FAST,
                window_log=17,
                hash_log=6,
                chain_log=6,
                min_match=7,
                write_content_size=True,
            )
            made[level, planes] = package.ZstdCompressor(compression_params=chosen)
        else:
            made[level, planes] = package.ZstdCompressor(level=level, write_content_size=True)
    return made[level, planes]


def _decompressor() -> Any:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = require_zstandard().ZstdDecompressor()
    return _local.decompressor


def compress(tensor: Tensor, level: int = LEVEL) -> Tensor:
    """The bytes of a contiguous CPU tensor as a uint8 tensor, smaller where they can be; at most 24 bytes and 4 a plane more.

    Args:
        level: zstd's, 1 (fast) to 19.

    Raises:
        Unsupported: the package zstandard is not installed.
    """
    require_zstandard()
    itemsize = tensor.element_size()
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    pieces = flat.split(_piece_bytes(itemsize)) if flat.numel() else ()
    done = list(_pool().map(lambda piece: compress_piece(piece, itemsize, level), pieces))
    planes = [plane for piece in done for plane in piece]
    sizes = struct.pack(f"<{len(planes)}I", *(len(plane) for plane in planes))
    header = _HEADER.pack(MAGIC, itemsize, flat.numel(), len(done))
    out = torch.empty(len(header) + len(sizes) + sum(len(plane) for plane in planes), dtype=torch.uint8)
    view, at = memory_of(out), 0
    for part in (header, sizes, *planes):
        view[at : at + len(part)] = part
        at += len(part)
    return out


def decompress(blob: Tensor) -> Tensor:
    """The bytes, uint8, that ``compress`` was given.

    Raises:
        CorruptData: not what ``compress`` returns.
        Unsupported: the package zstandard is not installed.
    """
    zstandard = require_zstandard()
    view = memory_of(blob)
    try:
        magic, itemsize, total, count = _HEADER.unpack_from(view)
        if magic != MAGIC or not 0 < itemsize <= 16 or total % itemsize or count != -(-total // _piece_bytes(itemsize)):
            raise CorruptData("compressed bytes without their header: they are damaged, or something else")
        sizes = struct.unpack_from(f"<{count * itemsize}I", view, _HEADER.size)
        at = _HEADER.size + 4 * len(sizes)
        if at + sum(sizes) != len(view):
            raise CorruptData(
                f"compressed bytes of {len(view)} where their table says {at + sum(sizes)}: cut short, or damaged"
            )
        out, jobs = torch.empty(total, dtype=torch.uint8), []
        for number, piece in enumerate(out.split(_piece_bytes(itemsize)) if total else ()):
            own = sizes[number * itemsize : (number + 1) * itemsize]
            jobs.append((piece, view[at : at + sum(own)], own, itemsize))
            at += sum(own)
        list(_pool().map(lambda job: decompress_piece(*job), jobs))
    except (struct.error, zstandard.ZstdError, ValueError) as error:
        raise CorruptData(f"compressed bytes cannot be read ({error}): they are damaged") from error
    return out


def memory_of(flat: Tensor) -> memoryview:
    """The bytes of a flat uint8 tensor in RAM, for whoever takes a buffer."""
    return memoryview(flat.numpy())  # pyright: ignore[reportArgumentType]


def _piece_bytes(itemsize: int) -> int:
    return PIECE_BYTES // itemsize * itemsize


def compress_piece(piece: Tensor, itemsize: int, level: int) -> list[Any]:
    """The planes of flat bytes, as many as ``itemsize``, each compressed or, where that saves little, as it is; by this thread alone."""
    planes = np.ascontiguousarray(piece.numpy().reshape(-1, itemsize).T)  # far faster than torch transposes bytes
    out: list[Any] = []
    for plane in planes:
        data = memoryview(plane)
        small = _compressor(level, itemsize > 1).compress(data)
        out.append(small if len(small) < _SHRINKS * len(data) else data)
    return out


def decompress_piece(piece: Tensor, data: memoryview, sizes: tuple[int, ...], itemsize: int) -> None:
    """Fill ``piece`` with the bytes whose planes, of these sizes, are in ``data``.

    Raises:
        CorruptData: they are not what `compress_piece` returns.
    """
    planes, at = piece.numpy().reshape(-1, itemsize), 0
    for number, size in enumerate(sizes):
        part = data[at : at + size]
        raw = part if size == len(planes) else _decompressor().decompress(part, max_output_size=len(planes))
        if len(raw) != len(planes):
            raise CorruptData(f"a plane of {len(raw)} bytes where {len(planes)} belong: the bytes are damaged")
        planes[:, number] = np.frombuffer(raw, dtype=np.uint8)
        at += size
