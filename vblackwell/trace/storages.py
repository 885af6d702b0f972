"""Storages in RAM as operators make them, in the order of their births and deaths, and not more of them than there is room for."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vblackwell.errors import InsufficientMemory


class Storages(TorchDispatchMode):
    """Notes storages while entered, until the last reference to each goes. What is made on meta has no bytes and does not count.

    Args:
        most_bytes: that they may hold together.
        refusal: what an error says about more.

    Attributes:
        sizes: bytes of each. events: ``i`` where storage i is made, ``~i`` where it goes.

    Raises:
        InsufficientMemory: out of the operator that makes one too many.
    """

    def __init__(self, most_bytes: int, refusal: str) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.events: list[int] = []
        self.most_bytes, self.refusal, self.live_bytes = most_bytes, refusal, 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self.see(each)
        return out

    def settle(self) -> None:
        """Forget what came and went so far."""
        alive = [storage for seen in self._alive.values() if (storage := seen()) is not None]
        self._alive.clear()
        self.sizes.clear()
        self.events.clear()
        self.live_bytes = 0
        for storage in alive:
            self._note(storage)

    def see(self, tensor: Tensor) -> None:
        """Note the storage of ``tensor``, if it is new."""
        if tensor.device.type != "meta":
            self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        index = len(self.sizes)
        self.sizes.append(storage.nbytes())
        self.events.append(index)
        self._alive[key] = weakref.ref(storage, lambda _: self._death(key, index))
        self.live_bytes += storage.nbytes()
        if self.live_bytes > self.most_bytes:
            raise InsufficientMemory(self.refusal, needed_bytes=self.live_bytes, available_bytes=self.most_bytes)

    def _death(self, key: int, index: int) -> None:
        del self._alive[key]
        self.live_bytes -= self.sizes[index]
        self.events.append(~index)
