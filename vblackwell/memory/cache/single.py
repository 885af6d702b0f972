"""One level by itself, with keys: for code that wants a place for tensors rather than a hierarchy."""

from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from vblackwell.errors import ConfigurationError, CorruptData, UnknownKey, Unsupported, nearest
from vblackwell.kernels.fp4.encode import quantize
from vblackwell.memory.cache.config import LevelConfig, build_level, parse_capacity
from vblackwell.memory.cache.entry import Layout, layout_of, packed_bytes
from vblackwell.memory.level import Extent

CODECS = ("lossless", "fp4")
MIN_SAVING = 1 / 16  # or bytes are held as they are


class VGPULevel:
    """A capped place for tensors by name.

    ``level`` is its number (0 in RAM is an arena, more is host slabs), ``capacity_mb`` MiB or a string with a unit,
    ``device`` one of ``'cuda:0'``, ``'cpu'`` and ``'ssd'`` (with a ``path``), ``transfer_speed_gbps`` what its link
    moves, GB/s, as stated. Raises ConfigurationError as `VGPUStack`.
    """

    def __init__(
        self,
        level: int = 0,
        capacity_mb: float | str = 1024,
        device: str = "cpu",
        transfer_speed_gbps: float | None = None,
        path: str | None = None,
    ) -> None:
        config = LevelConfig(device, parse_capacity(capacity_mb), transfer_speed_gbps, path)
        self.level, self.transfer_speed_gbps = level, transfer_speed_gbps
        self._place = build_level(config, level)
        self._device = self._place.device or torch.device("cpu")  # of what `get` returns
        self._entries: dict[str, tuple[Any, Extent]] = {}  # what tells how to read the bytes, and where they are

    capacity_bytes = property(lambda self: self._place.capacity_bytes)
    used_bytes = property(lambda self: self._place.used_bytes)
    peak_bytes = property(lambda self: self._place.peak_bytes)

    def put(self, key: str, tensor: Any) -> None:
        """Copy a tensor, or a packed tensor, in; one that is there already is replaced. Raises InsufficientMemory where
        it does not fit; what was under ``key`` still is."""
        layout, tensors = layout_of(tensor)
        self._store(key, layout, packed_bytes(layout, tensors))

    def _store(self, key: str, reading: Any, buffer: torch.Tensor) -> None:
        """Write ``buffer`` (flat uint8), then let it take the place of what was under ``key``."""
        extent = self._place.allocate(max(1, buffer.nbytes))
        try:
            self._place.write(extent, buffer).finish()
        except BaseException:
            self._place.free(extent)
            raise
        if key in self._entries:
            self.remove(key)
        self._entries[key] = (reading, extent)

    def get(self, key: str) -> Any:
        """A copy on the level's device (in RAM, for a disk). Raises UnknownKey."""
        layout, extent = self._find(key)
        return layout.value(layout.tensors_over(self._read(extent, self._device)))

    def _read(self, extent: Extent, device: torch.device | str) -> torch.Tensor:
        buffer = torch.empty(extent.num_bytes, dtype=torch.uint8, device=device)
        self._place.read(extent, buffer).finish()
        return buffer

    def remove(self, key: str) -> None:
        """Forget ``key`` and free its bytes."""
        extent = self._find(key)[1]
        del self._entries[key]
        self._place.free(extent)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def _find(self, key: str) -> tuple[Any, Extent]:
        if key not in self._entries:
            raise UnknownKey(f"{key!r} is not on this level{nearest(key, self._entries)}; put it there first")
        return self._entries[key]

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._entries.clear()
        self._place.close()


class _Held(NamedTuple):
    layout: Layout  # of what was compressed: the value, or its packed form
    codec: str
    digest: int
    is_compressed: bool


class CompressedVGPULevel(VGPULevel):
    """A capped place for tensors by name, in fewer bytes; its capacity is of the bytes that are held.

    ``lossless`` is for anything: bytes are laid out by their place in the element (signs and exponents of neighbouring
    weights are much alike) and compressed by zstd, unless they would hardly shrink. ``fp4`` (nvfp4) is for weights that
    the caller names. ``codec`` is that of keys that are put without one; other settings, and what is raised, are as for
    `VGPULevel`.
    """

    def __init__(self, level: int = 1, *settings: Any, codec: str = "lossless", **named: Any) -> None:
        self.codec = _checked(codec)
        super().__init__(level, *settings, **named)

    def put(self, key: str, tensor: Any, codec: str | None = None) -> None:
        """Compress a tensor, or with 'lossless' a packed tensor, and hold it; one that is there already is replaced.

        Raises as `VGPULevel.put`; ConfigurationError for an unknown codec, or a value that FP4 does not take (integer,
        inf, NaN, packed); Unsupported without the package zstandard.
        """
        codec = _checked(codec or self.codec)
        layout, tensors = layout_of(tensor)
        if codec == "fp4":
            if not isinstance(tensor, torch.Tensor):
                raise ConfigurationError(f"{key!r} is {type(tensor).__name__}: fp4 takes tensors, hold it 'lossless'")
            layout, tensors = layout_of(quantize(tensor, "nvfp4", name=key))
        buffer, is_compressed = packed_bytes(layout, tensors).cpu(), False
        if codec == "lossless":
            planes = np.ascontiguousarray(buffer.numpy().reshape(-1, _element_bytes(layout)).T)
            small = _compressor().compress(planes.data if planes.size else b"")
            if is_compressed := not planes.size or len(small) < (1 - MIN_SAVING) * planes.size:
                buffer = torch.frombuffer(bytearray(small), dtype=torch.uint8)
        self._store(key, _Held(layout, codec, xxhash.xxh3_64_intdigest(buffer.numpy().data), is_compressed), buffer)

    def get(self, key: str) -> Any:
        """The value on the level's device (in RAM, for a disk): the same bits with 'lossless', else rounded. Raises
        UnknownKey; CorruptData where the held bytes are not those that were written; DiskError."""
        held, extent = self._find(key)
        flat = self._read(extent, "cpu")
        data = flat.numpy().data
        if xxhash.xxh3_64_intdigest(data) != held.digest:
            raise CorruptData(
                f"{key!r}: {len(data)} compressed bytes on level {self.level} differ from what was written: "
                "the memory or disk is failing, or something else wrote there"
            )
        if held.is_compressed:
            raw = require_zstandard().ZstdDecompressor().decompress(data, max_output_size=held.layout.num_bytes)
            size = _element_bytes(held.layout)
            flat = torch.empty(held.layout.num_bytes, dtype=torch.uint8)
            for at, plane in enumerate(np.frombuffer(raw, dtype=np.uint8).reshape(size, -1)):
                flat.numpy()[at::size] = plane
        value = held.layout.value(held.layout.tensors_over(flat.to(self._device)))
        return value.dequantize() if held.codec == "fp4" else value


def _checked(codec: str) -> str:
    if codec not in CODECS:
        raise ConfigurationError(f"codec {codec!r} is not known: choose one of {', '.join(CODECS)}")
    return codec


def _element_bytes(layout: Layout) -> int:
    """A packed value's parts are taken as bytes."""
    return layout.parts[0].dtype.itemsize if len(layout.parts) == 1 else 1


def require_zstandard() -> Any:
    """The package; raises Unsupported where it is not installed."""
    try:
        import zstandard
    except ImportError as error:
        said = "lossless compression needs the package zstandard: pip install 'vblackwell[compressed]'"
        raise Unsupported(said) from error
    return zstandard


def _compressor() -> Any:
    """Exponents hold few repetitions and much skew: a small table of long matches leaves the work to zstd's entropy
    coder, three times as fast there and a twelfth smaller than level 1's settings."""
    zstd = require_zstandard()
    sizes = {"window_log": 17, "hash_log": 6, "chain_log": 6, "min_match": 7, "threads": -1}
    chosen = zstd.ZstdCompressionParameters(strategy=zstd.STRATEGY_FAST, write_content_size=True, **sizes)
    return zstd.ZstdCompressor(compression_params=chosen)
