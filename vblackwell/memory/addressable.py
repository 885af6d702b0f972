"""A level whose bytes are tensors: reading and writing are copies from and to a view."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor

import torch

from vblackwell.memory.accounting import AccountedLevel
from vblackwell.memory.copying import flat_bytes, start_copy
from vblackwell.memory.level import Extent, Transfer


class AddressableLevel(AccountedLevel):
    """Subclasses own the memory (`view`) and the threads that copy between places in RAM (``_pool``)."""

    _pool: ThreadPoolExecutor

    @abstractmethod
    def view(self, extent: Extent) -> torch.Tensor: ...

    def read(self, extent: Extent, out: torch.Tensor) -> Transfer:
        out = flat_bytes(out)
        return start_copy(out, self.view(extent)[: out.nbytes], self._pool)

    def write(self, extent: Extent, src: torch.Tensor) -> Transfer:
        src = flat_bytes(src)
        return start_copy(self.view(extent)[: src.nbytes], src, self._pool)
