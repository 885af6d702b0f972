"""What a level is: a place that holds extents of bytes, and moves them asynchronously.

A level hands out contiguous extents from a fixed capacity and copies bytes between them and tensors. Reads and writes
return a `Transfer` at once. Everything else (which key lives where, who is evicted) is the stack's business.

Two rules make asynchrony safe:

1. A transfer starts after everything that was queued, at the time of the call, on the *current* CUDA stream of every
   CUDA device that takes part. So memory that the caller just allocated, or just finished computing on, may be passed in.
2. Nobody may touch the source (write) or the destination (read or write) until the transfer is done: `wait()` for
   the host, `wait_on(stream)` for work that is queued on a CUDA stream afterwards.

Whoever starts two transfers on one extent orders them.

Allocation has two halves, `place` (arithmetic, can be taken back) and `materialise` (memory), and so has freeing,
`displace` and `release`: the stack plans a whole cascade of moves with the arithmetic halves, so that it knows before
the first byte moves that the last one will find room. Why not a dry run on a copy of the allocators: the plan's
offsets are the ones that get used, and taking a plan back is the same code as planning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Extent:
    """A contiguous range of bytes held by one level. Compared by identity; made and freed only by its level.

    Attributes:
        offset: start in the level's own address space, bytes.
        num_bytes: what was asked for.
        held_bytes: what the level accounts for it (``num_bytes`` rounded up to the level's alignment).
        handle: the level's own bookkeeping (a slab, a tensor); nobody else looks at it.
    """

    offset: int
    num_bytes: int
    held_bytes: int
    handle: Any = None


class Transfer(ABC):
    """An asynchronous copy that has been started."""

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until the bytes have arrived. Raises what the transfer raised, every time."""

    @abstractmethod
    def wait_on(self, stream: Any) -> None:
        """Make work queued on ``stream`` (a `torch.cuda.Stream`, or None for the host) from now on see the bytes.

        Waiting on a CUDA event that was not recorded yet is a no-op, so this first blocks until it has been.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether the bytes have arrived (or the transfer failed)."""

    def let_go(self) -> None:  # noqa: B027 (a transfer that keeps nothing has nothing to do)
        """Stop keeping source and destination alive: the caller does, or has ordered their reuse behind this transfer."""


class Level(ABC):
    """A place for bytes. Thread-safe: allocate, free, read and write may be called from any thread.

    Attributes:
        name: as shown to users, ``'cuda:0'``, ``'arena'``, ``'cpu'``, ``'ssd'``.
        device: where `view` tensors live; None when the bytes are not addressable (a disk).
        capacity_bytes: the cap; `used_bytes` never exceeds it.
        alignment: extents start at, and are accounted in, multiples of this.
    """

    name: str
    device: torch.device | None
    capacity_bytes: int
    alignment: int

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes accounted to live extents."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The largest `used_bytes` so far."""

    @abstractmethod
    def can_allocate(self, num_bytes: int) -> bool:
        """Whether `allocate` would succeed now. Exact: fragmentation counts."""

    def allocate(self, num_bytes: int) -> Extent:
        """A new extent of ``num_bytes`` > 0 with undefined contents.

        Raises:
            InsufficientMemory: no room; nothing changed.
            DiskError: the file system could not reserve the space (a full one raises a child of both).
        """
        extent = self.place(num_bytes)
        try:
            self.materialise(extent)
        except BaseException:
            self.displace(extent)
            raise
        return extent

    def free(self, extent: Extent) -> None:
        """Give ``extent`` back. Its transfers must be done."""
        self.displace(extent)
        self.release(extent)

    @abstractmethod
    def place(self, num_bytes: int) -> Extent:
        """The first half of `allocate`: decide where, and account for it. Raises as `allocate`; touches no memory."""

    @abstractmethod
    def materialise(self, extent: Extent) -> None:
        """The second half of `allocate`: make memory stand behind a placed extent. Repeating it changes nothing.

        Raises:
            InsufficientMemory: the device gave no memory although the cap allows it.
        """

    @abstractmethod
    def displace(self, extent: Extent) -> None:
        """The first half of `free`: the range may be placed again; the bytes stay readable until somebody writes there."""

    @abstractmethod
    def restore(self, extent: Extent) -> None:
        """Take `displace` back. Whatever was placed into the range since has been displaced again."""

    @abstractmethod
    def release(self, extent: Extent) -> None:
        """The second half of `free`: let go of the memory behind a displaced extent."""

    @abstractmethod
    def read(self, extent: Extent, out: torch.Tensor) -> Transfer:
        """Start copying the extent's first ``out.nbytes`` bytes into the contiguous tensor ``out``, any dtype, any device."""

    @abstractmethod
    def write(self, extent: Extent, src: torch.Tensor) -> Transfer:
        """Start copying the contiguous tensor ``src`` (any dtype, any device) to the extent's start."""

    @abstractmethod
    def view(self, extent: Extent) -> torch.Tensor | None:
        """The extent's bytes as a uint8 tensor of ``num_bytes`` that aliases them; None where not addressable."""

    @abstractmethod
    def close(self) -> None:
        """Release everything the level holds (memory, files, threads). Idempotent."""
