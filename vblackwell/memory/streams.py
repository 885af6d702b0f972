"""One CUDA stream per direction and device, made once.

Copies to the GPU, from the GPU and inside it run side by side with compute, each in its own order. Why not a stream per
transfer, or per stack: torch's allocator keeps a memory pool for every stream that it has seen, so fresh streams leak
pools. Nothing happens at import, and nothing without CUDA.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from vblackwell.errors import Unsupported


class CopyStreams(NamedTuple):
    """The three copy streams of one device."""

    h2d: torch.cuda.Stream
    d2h: torch.cuda.Stream
    d2d: torch.cuda.Stream


_lock = threading.Lock()
_streams: dict[int, CopyStreams] = {}


def copy_streams(device: torch.device | str) -> CopyStreams:
    """The copy streams of the CUDA ``device``, the same ones on every call.

    Raises:
        Unsupported: ``device`` is not a CUDA device.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise Unsupported(f"copy streams belong to CUDA devices, not to {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if index not in _streams:
            _streams[index] = CopyStreams(*(torch.cuda.Stream(index) for _ in range(3)))
        return _streams[index]
