"""One level by itself, with keys: for code that wants a place for tensors rather than a hierarchy."""

from __future__ import annotations

from typing import Any

import torch

from vblackwell.errors import UnknownKey, nearest
from vblackwell.memory.cache.config import LevelConfig, build_level, parse_capacity
from vblackwell.memory.cache.entry import layout_of, packed_bytes
from vblackwell.memory.level import Extent


class VGPULevel:
    """A capped place for tensors by name.

    Args:
        level: its number; 0 in RAM is an arena, more is host slabs.
        capacity_mb: MiB, or a string with a unit.
        device: ``'cuda:0'``, ``'cpu'``, ``'ssd'``. path: for ``'ssd'``.
        transfer_speed_gbps: what its link moves, GB/s, as stated; `expected_seconds` uses it.

    Raises:
        ConfigurationError: as `VGPUStack`.
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
        self.level = level
        self.transfer_speed_gbps = transfer_speed_gbps
        self._place = build_level(config, level)
        self._device = self._place.device or torch.device("cpu")  # of what `get` returns
        self._entries: dict[str, tuple[Any, Extent | None]] = {}  # what tells how to read the bytes, and where they are

    @property
    def capacity_bytes(self) -> int:
        """The cap."""
        return self._place.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes held."""
        return self._place.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was held."""
        return self._place.peak_bytes

    def put(self, key: str, tensor: Any) -> None:
        """Copy a tensor, or a packed tensor, in; one that is there already is replaced.

        Raises:
            InsufficientMemory: no room; what was under ``key`` still is.
        """
        layout, tensors = layout_of(tensor)
        self._store(key, layout, packed_bytes(layout, tensors))

    def _store(self, key: str, reading: Any, buffer: torch.Tensor) -> None:
        """Write ``buffer`` (flat uint8), then let it take the place of what was under ``key``."""
        extent = self._place.allocate(buffer.nbytes) if buffer.nbytes else None
        if extent is not None:
            try:
                self._place.write(extent, buffer).finish()
            except BaseException:
                self._place.free(extent)
                raise
        if key in self._entries:
            self.remove(key)
        self._entries[key] = (reading, extent)

    def get(self, key: str) -> Any:
        """A copy on the level's device (in RAM, for a disk).

        Raises:
            UnknownKey: nothing is there under ``key``.
        """
        layout, extent = self._find(key)
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
        if extent is not None:
            self._place.read(extent, buffer).finish()
        return layout.value(layout.tensors_over(buffer))

    def remove(self, key: str) -> None:
        """Forget ``key`` and free its bytes."""
        extent = self._find(key)[1]
        del self._entries[key]
        if extent is not None:
            self._place.free(extent)

    def expected_seconds(self, num_bytes: int) -> float | None:
        """How long moving that many bytes takes at the stated speed; None where none was stated."""
        return num_bytes / (self.transfer_speed_gbps * 1e9) if self.transfer_speed_gbps else None

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def _find(self, key: str) -> tuple[Any, Extent | None]:
        if key not in self._entries:
            raise UnknownKey(f"{key!r} is not on this level{nearest(key, self._entries)}; put it there first")
        return self._entries[key]

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._entries.clear()
        self._place.close()
