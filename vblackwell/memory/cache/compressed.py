"""A level that holds keys in fewer bytes: without loss, or in a block format where the caller says that it may lose.

``lossless`` is for anything. Trained numbers hardly repeat as elements, but their bytes do: signs and exponents of
neighbouring weights are much alike, and lie in the high bytes. So the bytes of a piece are laid out by their place in
the element (a *plane*) and each plane is compressed by zstd; one that would not shrink by a sixteenth, as low mantissa
bytes, is kept as it is. ``fp4`` (nvfp4) and ``int8`` (by rows) are for weights that the caller marks, and ``fp4+zstd``
compresses what nvfp4 left.

Every key says what it saved and what that took; `worth` says whether that pays. An XXH3 of the held bytes is checked
before they are turned back, so a flipped bit is an error and never a wrong number.
"""

from __future__ import annotations

import functools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.memory.cache.entry import Layout, layout_of
from vblackwell.memory.cache.single import VGPULevel
from vblackwell.memory.transfer import flat_bytes
from vblackwell.numerics.fp4 import quantize
from vblackwell.units import MiB

CODECS = ("lossless", "fp4", "int8", "fp4+zstd")
PIECE_BYTES = 4 * MiB  # that a thread works on
ZSTD_LEVEL = 1
_FORMATS = {"fp4": "nvfp4", "fp4+zstd": "nvfp4", "int8": "int8"}
_SHRINKS = 15 / 16


@dataclass(frozen=True)
class KeyStats:
    """What one key saves and takes.

    Attributes:
        codec: how it is held.
        num_bytes: of the value. held_bytes: of what is held instead.
        put_seconds: to compress and write. get_seconds: of the last get, None before the first.
    """

    codec: str
    num_bytes: int
    held_bytes: int
    put_seconds: float
    get_seconds: float | None

    @property
    def ratio(self) -> float:
        """Bytes of the value over bytes held."""
        return self.num_bytes / max(1, self.held_bytes)


@dataclass
class _Held:
    layout: Layout  # of what was compressed: the value, or its packed form
    piece_bytes: list[int]  # of a piece, by part of the layout
    sizes: list[tuple[int, ...]]  # of the planes of each piece of each part, in the order in which they are held
    digest: int
    stats: KeyStats
    quantized: bool


def worth(stats: KeyStats, link_bytes_per_second: float, *, reads_per_write: float = 1.0) -> bool:
    """Whether moving the held bytes and turning them back is faster than moving the value, as measured of the key.

    Args:
        link_bytes_per_second: of the slower place, e.g. 1.75e9 for a disk.
        reads_per_write: how often it is read for each time it is written.

    Raises:
        ConfigurationError: the key was never read, so nothing is known of how long that takes.
    """
    if stats.get_seconds is None:
        raise ConfigurationError("a key that was never read has no measured time: get it once first")
    codec_seconds = stats.put_seconds + reads_per_write * stats.get_seconds
    saved_bytes = (1 + reads_per_write) * (stats.num_bytes - stats.held_bytes)
    return saved_bytes / link_bytes_per_second > codec_seconds


class CompressedVGPULevel(VGPULevel):
    """A capped place for tensors by name, in fewer bytes; its capacity is of the bytes that are held.

    Args:
        level, capacity_mb, device, transfer_speed_gbps, path: as `VGPULevel`.
        codec: of keys that are put without one: 'lossless', 'fp4', 'int8' or 'fp4+zstd'.
        zstd_level: 1 (fast) to 19.

    Raises:
        ConfigurationError: as `VGPULevel`; an unknown codec or level of zstd.
    """

    def __init__(
        self,
        level: int = 1,
        capacity_mb: float | str = 1024,
        device: str = "cpu",
        transfer_speed_gbps: float | None = None,
        path: str | None = None,
        *,
        codec: str = "lossless",
        zstd_level: int = ZSTD_LEVEL,
    ) -> None:
        self.codec = _checked(codec)
        if not 1 <= zstd_level <= 19:
            raise ConfigurationError(f"zstd_level {zstd_level!r} must be from 1 to 19")
        self.zstd_level = zstd_level
        super().__init__(level, capacity_mb, device, transfer_speed_gbps, path)

    def put(self, key: str, tensor: Any, codec: str | None = None) -> None:
        """Compress a tensor, or with 'lossless' a packed tensor, and hold it; one that is there already is replaced.

        Raises:
            InsufficientMemory: no room; what was under ``key`` still is.
            ConfigurationError: an unknown codec; a value that its format does not take (integer, inf, NaN, packed).
            Unsupported: zstd is wanted and the package zstandard is not installed.
        """
        codec = _checked(codec or self.codec)
        began = time.perf_counter()
        num_bytes, form = layout_of(tensor)[0].num_bytes, _FORMATS.get(codec)
        if form is not None:
            if not isinstance(tensor, torch.Tensor):
                raise ConfigurationError(
                    f"{key!r} is {type(tensor).__name__}: {codec} takes tensors, hold it 'lossless'"
                )
            tensor = quantize(tensor, form, name=key)
        layout, tensors = layout_of(tensor)
        zstd_level = self.zstd_level if codec in ("lossless", "fp4+zstd") else None
        jobs, piece_bytes = [], []
        for part in tensors:
            itemsize = 1 if zstd_level is None else part.element_size()
            piece_bytes.append(max(1, PIECE_BYTES // itemsize) * itemsize)
            flat = flat_bytes(part.cpu())
            jobs += [(piece, itemsize, zstd_level) for piece in flat.split(piece_bytes[-1]) if piece.numel()]
        pieces = list(_pool().map(lambda job: _planes(*job), jobs))
        sizes = [tuple(len(plane) for plane in planes) for planes in pieces]
        buffer = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8)
        memory, at = _memory(buffer), 0
        for plane in (plane for planes in pieces for plane in planes):
            memory[at : at + len(plane)] = plane
            at += len(plane)
        stats = KeyStats(codec, num_bytes, buffer.numel(), 0.0, None)
        held = _Held(layout, piece_bytes, sizes, _digest(buffer), stats, form is not None)
        self._store(key, held, buffer)
        held.stats = replace(stats, put_seconds=time.perf_counter() - began)

    def get(self, key: str) -> Any:
        """The value on the level's device (in RAM, for a disk): the same bits with 'lossless', else rounded.

        Raises:
            UnknownKey: nothing is there under ``key``.
            CorruptData: the held bytes are not those that were written.
            DiskError: they cannot be read.
        """
        (held, extent), began = self._find(key), time.perf_counter()
        buffer = torch.empty(held.stats.held_bytes, dtype=torch.uint8)
        if extent is not None:
            self._place.read(extent, buffer).finish()
        if _digest(buffer) != held.digest:
            raise CorruptData(
                f"{key!r}: {buffer.numel()} compressed bytes on level {self.level} differ from what was written: "
                "the memory or disk is failing, or something else wrote there"
            )
        data, sizes, at, jobs, flats = _memory(buffer), iter(held.sizes), 0, [], []
        for part, piece_bytes in zip(held.layout.parts, held.piece_bytes, strict=True):
            flats.append(torch.empty(part.num_bytes, dtype=torch.uint8))
            for piece in flats[-1].split(piece_bytes) if part.num_bytes else ():
                planes = next(sizes)
                jobs.append((piece, data[at : at + sum(planes)], planes))
                at += sum(planes)
        list(_pool().map(lambda job: _restore(*job), jobs))
        parts = zip(flats, held.layout.parts, strict=True)
        value = held.layout.value(
            tuple(flat.view(part.dtype).view(part.shape).to(self._device) for flat, part in parts)
        )
        if held.quantized:
            value = value.dequantize()
        held.stats = replace(held.stats, get_seconds=time.perf_counter() - began)
        return value

    def stats(self) -> dict[str, KeyStats]:
        """By key: bytes before and after, and seconds."""
        return {key: held.stats for key, (held, _) in self._entries.items()}


def _checked(codec: str) -> str:
    if codec not in CODECS:
        raise ConfigurationError(f"codec {codec!r} is not known: choose one of {', '.join(CODECS)}")
    return codec


# -- planes ------------------------------------------------------------------------------------------------------------


def _planes(piece: torch.Tensor, itemsize: int, zstd_level: int | None) -> list[Any]:
    """The planes of flat bytes, ``itemsize`` of them, each compressed or, where that saves little, as it is."""
    planes = np.ascontiguousarray(piece.numpy().reshape(-1, itemsize).T)  # far faster than torch transposes bytes
    if zstd_level is None:
        return [memoryview(plane) for plane in planes]
    compressor, found = _compressor(zstd_level, itemsize > 1), []
    for plane in planes:
        small = compressor.compress(memoryview(plane))
        found.append(small if len(small) < _SHRINKS * len(plane) else memoryview(plane))
    return found


def _restore(piece: torch.Tensor, data: memoryview, sizes: tuple[int, ...]) -> None:
    """Fill ``piece`` with the bytes whose planes, of these sizes, are in ``data``; a full one is not compressed."""
    planes, at = piece.numpy().reshape(-1, len(sizes)), 0
    for number, size in enumerate(sizes):
        part = data[at : at + size]
        raw = (
            part
            if size == len(planes)
            else require_zstandard().ZstdDecompressor().decompress(part, max_output_size=len(planes))
        )
        planes[:, number] = np.frombuffer(raw, dtype=np.uint8)
        at += size


def _memory(flat: torch.Tensor) -> memoryview:
    return memoryview(flat.numpy())  # pyright: ignore[reportArgumentType]


def _digest(flat: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(_memory(flat))


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


def _compressor(level: int, of_planes: bool) -> Any:
    """One for one thread.

    Planes of exponents hold few repetitions and much skew. At level 1 a small table of long matches leaves the work to
    zstd's entropy coder, which is three times as fast there and a twelfth smaller than level 1's own settings.
    """
    zstd = require_zstandard()
    if not of_planes or level != 1:
        return zstd.ZstdCompressor(level=level)
    sizes = {"window_log": 17, "hash_log": 6, "chain_log": 6, "min_match": 7}
    chosen = zstd.ZstdCompressionParameters(strategy=zstd.STRATEGY_FAST, write_content_size=True, **sizes)
    return zstd.ZstdCompressor(compression_params=chosen)
