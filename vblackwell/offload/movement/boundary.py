"""Boundary activations: what leaves, what is known of it meanwhile, and what autograd holds instead of it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vblackwell.memory.level import Transfer
from vblackwell.offload.movement.host_buffer import HostBuffer


class Load(NamedTuple):
    """A copy on its way to level 0: its destination, and the CUDA stream from whose pool that is (None on the CPU)."""

    transfer: Transfer
    flat: torch.Tensor
    stream: torch.cuda.Stream | None


Departed = deque[tuple[HostBuffer, Load | None]]


class Boundary:
    """One tensor that left level 0, or may leave. Only tickets refer to it strongly.

    Args:
        tensor: strided, with a storage.
        departed: where a note goes when nobody wants the tensor any more.

    Attributes:
        resident: the tensor while it is on level 0, without its graph. version: autograd's count of in-place writes to it.
        spoiled: it was written to before its copy was over.
        lead_bytes: distance of its address from an aligned one; kernels choose by alignment, so it is kept.
        span_bytes: from its first to its last element in memory; these bytes travel.
        buffer, sent: where they are in host memory, and the copy there; None as long as they did not leave.
        load: their way back, from when it was started until backward asked.
        saves, calls, last_call: how often it was saved, by how many checkpoints, and which was the last.
    """

    def __init__(self, tensor: torch.Tensor, departed: Departed) -> None:
        self.resident: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.spoiled = False
        self.lead_bytes = tensor.data_ptr() % _alignment(tensor.device)
        self.span_bytes = span_bytes(tensor)
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.buffer: HostBuffer | None = None
        self.sent: Transfer | None = None
        self.load: Load | None = None
        self.saves, self.calls, self.last_call = 0, 0, -1
        self._departed = departed
        self._identity = StorageWeakRef(tensor.untyped_storage())  # so that no other storage gets this one's address

    def flat(self) -> torch.Tensor:
        """The resident tensor's span, contiguous."""
        tensor = self.resident
        assert tensor is not None
        return tensor.as_strided((self.span_bytes // tensor.element_size(),), (1,), tensor.storage_offset())

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor over ``flat``, uint8, which has the span behind ``lead_bytes``."""
        start = (flat.storage_offset() + self.lead_bytes) // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=flat.device)
        return tensor.set_(flat.untyped_storage(), start, self.shape, self.stride)

    def __del__(self) -> None:
        # In any thread and at any moment, even while the store's lock is held: so it only leaves a note.
        if self.buffer is not None:
            self._departed.append((self.buffer, self.load))


class Ticket:
    """What autograd holds instead of a tensor: one for each time that it was saved.

    Attributes:
        call: the number of the checkpoint that saved it; later ones have larger numbers.
    """

    def __init__(self, boundary: Boundary, call: int, tape: list[weakref.ref[Ticket]]) -> None:
        self.boundary = boundary
        self.call = call
        self._tape = tape
        self._position = len(tape)
        tape.append(weakref.ref(self))

    def before(self, calls: int) -> list[Ticket]:
        """What the last ``calls`` checkpoints before this one saved in the same forward, if somebody still holds it; last first."""
        found: list[Ticket] = []
        call = self.call
        for position in range(self._position - 1, -1, -1):
            ticket = self._tape[position]()
            if ticket is None or ticket.call == self.call:
                continue
            if ticket.call != call:
                call, calls = ticket.call, calls - 1
                if calls < 0:
                    break
            found.append(ticket)
        return found


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element in memory; 0 without elements."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + reach) * tensor.element_size() if tensor.numel() else 0


def _alignment(device: torch.device) -> int:
    """To what torch's allocator aligns a block on ``device``, bytes."""
    return 512 if device.type == "cuda" else 64
