"""A level that holds keys in fewer bytes: without loss, or in a block format where the caller says that it may lose.

``lossless`` is for anything: byte planes by zstd (lossless.py). ``fp4`` (nvfp4) and ``int8`` (by rows) are for weights that the caller
marks, and ``fp4+zstd`` compresses what nvfp4 left. Every key says what it saved and what that took; `worth` says whether that pays.
An XXH3 of the held bytes is checked before they are turned back, so a flipped bit is an error and never a wrong number.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from vblackwell.errors import ConfigurationError, CorruptData, UnknownKey, nearest
from vblackwell.memory import lossless
from vblackwell.memory.cache.entry import Layout, layout_of
from vblackwell.memory.cache.single import VGPULevel
from vblackwell.memory.copying import flat_bytes
from vblackwell.memory.level import Extent
from vblackwell.numerics.fp4 import quantize

CODECS = ("lossless", "fp4", "int8", "fp4+zstd")
_FORMATS = {"fp4": "nvfp4", "fp4+zstd": "nvfp4", "int8": "int8"}


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
    sizes: tuple[int, ...]  # of each part as it is held
    digest: int
    extent: Extent | None
    stats: KeyStats
    quantized: bool


def worth(stats: KeyStats, link_bytes_per_second: float, *, reads_per_write: float = 1.0) -> bool:
    """Whether moving the held bytes and turning them back is faster than moving the value, by what was measured of the key.

    Args:
        link_bytes_per_second: of the slower place, e.g. 1.75e9 for a disk.
        reads_per_write: how often it is read for each time it is written.

    Raises:
        ConfigurationError: the key was never read, so nothing is known of its way back.
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
        zstd_level: int = lossless.LEVEL,
    ) -> None:
        self.codec = _checked(codec)
        if not 1 <= zstd_level <= 19:
            raise ConfigurationError(f"zstd_level {zstd_level!r} must be from 1 to 19")
        self.zstd_level = zstd_level
        super().__init__(level, capacity_mb, device, transfer_speed_gbps, path)
        self._held: dict[str, _Held] = {}

    def put(self, key: str, tensor: Any, codec: str | None = None) -> None:
        """Compress a tensor, or with 'lossless' a packed tensor, and hold it; one that is there already is replaced.

        Raises:
            InsufficientMemory: no room; what was under ``key`` still is.
            ConfigurationError: an unknown codec; a value that its format does not take (integers, inf or NaN, packed tensors).
            Unsupported: zstd is wanted and the package zstandard is not installed.
        """
        codec = _checked(codec or self.codec)
        began = time.perf_counter()
        layout, _ = layout_of(tensor)
        num_bytes, form = layout.num_bytes, _FORMATS.get(codec)
        if form is not None:
            if not isinstance(tensor, torch.Tensor):
                raise ConfigurationError(
                    f"{key!r} is {type(tensor).__name__}: {codec} takes tensors, hold it 'lossless'"
                )
            tensor = quantize(tensor, form, name=key)
        layout, tensors = layout_of(tensor)
        parts = [part.cpu() for part in tensors]
        if codec in ("lossless", "fp4+zstd"):
            blobs = [lossless.compress(part, self.zstd_level) for part in parts]
        else:
            blobs = [flat_bytes(part) for part in parts]
        buffer = torch.cat(blobs) if len(blobs) > 1 else blobs[0].contiguous()
        extent = self._place.allocate(buffer.numel()) if buffer.numel() else None
        if extent is not None:
            try:
                self._place.write(extent, buffer).finish()
            except BaseException:
                self._place.free(extent)
                raise
        if key in self._held:
            self.remove(key)
        stats = KeyStats(codec, num_bytes, buffer.numel(), time.perf_counter() - began, None)
        digest = xxhash.xxh3_64_intdigest(lossless.memory_of(buffer))
        self._held[key] = _Held(layout, tuple(blob.numel() for blob in blobs), digest, extent, stats, form is not None)

    def get(self, key: str) -> Any:
        """The value on the level's device (in RAM, for a disk): the same bits with 'lossless', rounded to the format otherwise.

        Raises:
            UnknownKey: nothing is there under ``key``.
            CorruptData: the held bytes are not those that were written.
            DiskError: they cannot be read.
        """
        held, began = self._find(key), time.perf_counter()
        buffer = torch.empty(sum(held.sizes), dtype=torch.uint8)
        if held.extent is not None:
            self._place.read(held.extent, buffer).finish()
        if xxhash.xxh3_64_intdigest(lossless.memory_of(buffer)) != held.digest:
            raise CorruptData(
                f"{key!r}: {buffer.numel()} compressed bytes on level {self.level} differ from what was written: "
                "the memory or disk is failing, or something else wrote there"
            )
        squeezed = held.stats.codec in ("lossless", "fp4+zstd")
        parts = []
        for part, blob in zip(held.layout.parts, buffer.split(held.sizes), strict=True):
            try:
                flat = lossless.decompress(blob.contiguous()) if squeezed else blob.clone()
            except CorruptData as error:
                raise CorruptData(f"{key!r} on level {self.level}: {error}") from error
            if flat.numel() != part.num_bytes:
                raise CorruptData(f"{key!r} on level {self.level}: {flat.numel()} bytes where {part.num_bytes} belong")
            parts.append(flat.view(part.dtype).view(part.shape))
        device = self._place.device or torch.device("cpu")
        value = held.layout.value(tuple(part.to(device) for part in parts))
        if held.quantized:
            value = value.dequantize()
        stats = held.stats
        held.stats = KeyStats(
            stats.codec, stats.num_bytes, stats.held_bytes, stats.put_seconds, time.perf_counter() - began
        )
        return value

    def remove(self, key: str) -> None:
        """Forget ``key`` and free its bytes."""
        held = self._find(key)
        del self._held[key]
        if held.extent is not None:
            self._place.free(held.extent)

    def stats(self) -> dict[str, KeyStats]:
        """By key: bytes before and after, and seconds."""
        return {key: held.stats for key, held in self._held.items()}

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def _find(self, key: str) -> _Held:
        if key not in self._held:
            raise UnknownKey(f"{key!r} is not on this level{nearest(key, self._held)}; put it there first")
        return self._held[key]

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._held.clear()
        super().close()


def _checked(codec: str) -> str:
    if codec not in CODECS:
        raise ConfigurationError(f"codec {codec!r} is not known: choose one of {', '.join(CODECS)}")
    return codec
