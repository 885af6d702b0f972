"""Which launches may begin before the kernel ahead of them in the stream has ended (programmatic dependent launch).

Kernels load their weights before they wait for the kernel ahead (`wait_for_previous` in cuda/ptx.cuh), because nobody writes weights:
except a packing, or a copy in place. So the first launch that reads a weight as it is now goes without the overlap: it begins when all
that is ahead of it in the stream, the writing kernel among them, has ended and is seen. Every later launch comes after that one,
and so after the write. Copies from other streams are no concern of this: a stream waits for their events before a launch, overlapped
or not.

A captured launch has run nothing, so it does not count as the first. A graph that is replayed begins when all that is ahead of it in
the stream has ended, so a captured launch must mind only what is written in the same graph: that changed the weight when it was
captured. A weight that no launch has read before a capture is read without overlap in each replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

# By the first tensor's id and how many there are: the tensors of a weight, each with the address and the version at which a launch has
# read it.
_read: dict[tuple[int, int], list[tuple[weakref.ref[Tensor], int, int]]] = {}


def may_overlap(weight: Sequence[Tensor]) -> bool:
    """Whether a launch on the current device that loads the tensors of ``weight`` early may overlap the kernel ahead; the next one may.

    Tensors made under ``inference_mode`` do not tell whether they were written: never, for these.
    """
    key = id(weight[0]), len(weight)  # w4a8 reads one tensor more of the weight that is dequantised as well
    known = _read.get(key)
    if known is not None and len(known) == len(weight):
        for (ref, address, version), tensor in zip(known, weight, strict=True):
            if ref() is not tensor or tensor.data_ptr() != address or tensor._version != version:
                break
        else:
            return True
    if not torch.cuda.is_current_stream_capturing() and not any(tensor.is_inference() for tensor in weight):
        found = [(weakref.ref(tensor), tensor.data_ptr(), tensor._version) for tensor in weight]
        first = weakref.ref(weight[0], lambda _: _read.pop(key, None))  # before another tensor can have its id
        _read[key] = [(first, *found[0][1:]), *found[1:]]
    return False
