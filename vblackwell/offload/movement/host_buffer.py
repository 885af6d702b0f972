"""Buffers in host memory for what comes and goes every step: taken from the stack once, used again and again.

Whoever takes a used buffer may write to it at once: `HostBuffers.take` orders that behind the copies that its last owner
started. On a GPU that is a wait between streams, and the host never waits.

Sizes are rounded up by at most an eighth, so that batches of slightly different length share buffers; when longer ones
come, buffers that have become too short are given back for them one by one.
"""

from __future__ import annotations

import itertools
from typing import Any

from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.copying import copy_streams
from vblackwell.memory.level import Transfer
from vblackwell.units import KiB, align_up, format_bytes


class HostBuffer:
    """A reserved range of host memory.

    Attributes:
        reservation: the range. num_bytes: its size.
        pending: the last copy into it and the last one out of it; they may still be under way.
    """

    __slots__ = ("num_bytes", "pending", "reservation")

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.num_bytes = reservation.num_bytes
        self.pending: list[Transfer] = []


class HostBuffers:
    """The buffers of one owner. Not thread-safe: the owner has a lock.

    Args:
        stack: level 0 is where the bytes come from; the buffers are on its first level in RAM below that.
        name: of their reservations.

    Raises:
        ConfigurationError: the stack has no level in RAM below level 0.
        InsufficientMemory: that level is full.
    """

    def __init__(self, stack: VGPUStack, name: str) -> None:
        in_ram = (
            i for i, level in enumerate(stack.levels) if i and level.device is not None and level.device.type == "cpu"
        )
        level = next(in_ram, None)
        if level is None:
            raise ConfigurationError(
                f"{name!r} needs host memory, and the stack has no level in RAM below level 0: add a 'cpu' level"
            )
        self.level = level
        self._stack = stack
        self._name = name
        self._all: dict[HostBuffer, None] = {}
        self._free: list[HostBuffer] = []
        self._serial = itertools.count()
        # The first range of a level may start CUDA, to pin it. That must not happen in the middle of a checkpoint, which has
        # saved the state of the generators that existed when it began.
        stack.unreserve(stack.reserve(f"{name}#first", 1, level))

    @property
    def num_bytes(self) -> int:
        """All bytes that are reserved now."""
        return sum(buffer.num_bytes for buffer in self._all)

    def take(self, num_bytes: int) -> HostBuffer:
        """A buffer of at least ``num_bytes``, ready for `VGPUStack.write`.

        Raises:
            InsufficientMemory: none is free, and the level has no room for another one.
        """
        wanted = _rounded(num_bytes)
        fitting = [buffer for buffer in self._free if buffer.num_bytes >= wanted]
        if not fitting:
            if self._free:
                self._end(max(self._free, key=lambda buffer: buffer.num_bytes))
            buffer = self._reserve(wanted)
            self._all[buffer] = None
            return buffer
        buffer = min(fitting, key=lambda buffer: buffer.num_bytes)  # of equal ones the first: it has been free longest
        self._free.remove(buffer)
        for transfer in buffer.pending:
            transfer.wait_on(self._outward_stream())
        buffer.pending.clear()
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """End of `take`. Its pending copies need not be over."""
        self._free.append(buffer)

    def close(self) -> None:
        """Wait for all copies, also those of buffers in use, and give every range back. Idempotent."""
        for buffer in list(self._all):
            self._end(buffer)

    def _reserve(self, num_bytes: int) -> HostBuffer:
        name = f"{self._name}#{next(self._serial)}"
        try:
            return HostBuffer(self._stack.reserve(name, num_bytes, self.level))
        except InsufficientMemory as error:
            level = self._stack.levels[self.level]
            free = level.capacity_bytes - level.used_bytes
            raise InsufficientMemory(
                f"{self._name!r} holds {format_bytes(self.num_bytes)} of host memory and needs {format_bytes(num_bytes)} more, but "
                f"{level.name} has {format_bytes(free)} free: raise host_memory (the capacity of "
                "the level), keep more of it on level 0, use a smaller batch, or, where a model's states spill to a disk, keep RAM free of "
                "them with activation_bytes=",
                needed_bytes=num_bytes,
                available_bytes=free,
            ) from error

    def _end(self, buffer: HostBuffer) -> None:
        for transfer in buffer.pending:
            transfer.wait()
        self._stack.unreserve(buffer.reservation)
        del self._all[buffer]
        if buffer in self._free:
            self._free.remove(buffer)

    def _outward_stream(self) -> Any:
        """The stream on which level 0's bytes leave; None on the CPU."""
        device = self._stack.level0_device
        return copy_streams(device).d2h if device.type == "cuda" else None


def _rounded(num_bytes: int) -> int:
    """``num_bytes`` in steps of an eighth of the power of two below it, at least of a page."""
    return align_up(num_bytes, max(4 * KiB, 1 << max(0, num_bytes.bit_length() - 4)))
