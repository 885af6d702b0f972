"""Memory of tensors on the CPU, counted as they are made and dropped:
what ``torch.cuda.max_memory_allocated`` is to a GPU.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class PeakBytes(TorchDispatchMode):
    """Bytes of tensor storage alive at once beyond those of ``known``; tensors on the meta device have none.

    Attributes:
        now: alive at the moment.
        peak: the most since the start, or since it was set to ``now``.
    """

    def __init__(self, *known):
        super().__init__()
        self.live = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, out)
        return out

    def _see(self, tensor):
        storage = tensor.untyped_storage()
        if tensor.is_meta:
            return
        if storage._cdata not in self.live:
            self.live[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key):
        self.now -= self.live.pop(key)
