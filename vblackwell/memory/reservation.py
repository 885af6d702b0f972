"""A range on one level that its owner fills and empties by hand: the stack counts it and never moves it."""

from __future__ import annotations

import torch

from vblackwell.errors import StaleTensor
from vblackwell.memory.level import Extent, Level


class Reservation:
    """Made by `VGPUStack.reserve`, ended by `VGPUStack.unreserve`. Compared by identity.

    Attributes:
        name: unique in its stack. level: number of its level. num_bytes: its size.
    """

    __slots__ = ("name", "level", "num_bytes", "_extent", "_place", "_parts", "_address")

    def __init__(self, name: str, level: int, extent: Extent, place: Level) -> None:
        self.name = name
        self.level = level
        self.num_bytes = extent.num_bytes
        self._extent: Extent | None = extent
        self._place = place
        self._parts: dict[tuple[int, int], torch.Tensor] = {}
        self._address: int | None = None

    @property
    def is_addressable(self) -> bool:
        """Whether `view` gives a tensor: everywhere but on a disk."""
        return self._place.device is not None

    @property
    def extent(self) -> Extent:
        """The extent on its level.

        Raises:
            StaleTensor: the reservation has ended.
        """
        if self._extent is None:
            raise StaleTensor(f"reservation {self.name!r} has been given back; reserve it again before use")
        return self._extent

    def view(self) -> torch.Tensor | None:
        """The bytes as a uint8 tensor that aliases them; None on a disk. Not to be used after `unreserve`."""
        return self._place.view(self.extent)

    @property
    def address(self) -> int:
        """Of the first byte, of a range that has a view; for those who hand it to a driver."""
        if self._address is None:
            view = self.view()
            assert view is not None, f"{self.name} is on a disk"
            self._address = view.data_ptr()
        return self._address

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Bytes ``start`` to ``stop`` of `view`, of a range that has one.

        Remembered: who moves a range in pieces asks for the same ones at every step, and views are most of what that costs the host.
        """
        found = self._parts.get((start, stop))
        if found is None:
            view = self.view()
            assert view is not None, f"{self.name} is on a disk"
            found = self._parts[start, stop] = view[start:stop]
        return found

    def end(self) -> Extent:
        """Mark it as given back; its extent, for the stack to free."""
        self._parts.clear()
        self._address = None
        extent, self._extent = self.extent, None
        return extent

    def __repr__(self) -> str:
        return f"Reservation({self.name!r}, level={self.level}, num_bytes={self.num_bytes})"
