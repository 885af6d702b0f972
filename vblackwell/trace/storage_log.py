"""Births and deaths of storages: which bytes there are, and when.

A storage begins with the first tensor on it and ends when the last reference to it goes. No tensor is kept alive.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vblackwell.errors import InsufficientMemory


class StorageLog:
    """Storages in the order of their birth: bytes of each, and events, ``i`` where storage i is allocated, ``~i`` where
    it is freed.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.events: list[int] = []
        self._alive: dict[int, tuple[int, Any]] = {}  # by address: number and weak reference

    def add(self, num_bytes: int) -> int:
        """A block of ``num_bytes`` that has no storage; its number."""
        index = len(self.sizes)
        self.sizes.append(num_bytes)
        self.events.append(index)
        return index

    def free(self, index: int) -> None:
        """The end of block ``index``."""
        self.events.append(~index)

    def see(self, tensor: Tensor) -> int:
        """The number of the storage of ``tensor``, which is noted if it is new."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is not None:
            return known[0]
        index = self.add(storage.nbytes())
        self._watch(storage, index)
        return index

    def hand_over(self, old: Tensor, new: Tensor) -> None:
        """Let ``new`` have the memory of ``old``, which nobody reads any more."""
        known = self._alive.pop(old.untyped_storage()._cdata, None)
        if known is not None:
            self._watch(new.untyped_storage(), known[0])

    def knows(self, tensor: Tensor) -> bool:
        """Whether the storage of ``tensor`` was seen."""
        return tensor.untyped_storage()._cdata in self._alive

    def alive(self) -> set[int]:
        """Numbers of the storages that were seen and are still there."""
        return {index for index, _ in self._alive.values()}

    def forget_past(self) -> None:
        """Start again with what is alive now."""
        alive = [storage for _, seen in self._alive.values() if (storage := seen()) is not None]
        for each in (self._alive, self.sizes, self.events):
            each.clear()
        for storage in alive:
            self._watch(storage, self.add(storage.nbytes()))

    def _watch(self, storage: torch.UntypedStorage, index: int) -> None:
        address = storage._cdata
        self._alive[address] = (index, weakref.ref(storage, lambda _: self._died(address, index)))

    def _died(self, address: int, index: int) -> None:
        if self._alive.get(address, (None,))[0] == index:
            del self._alive[address]
            self.free(index)


class StoragesWithBytes(TorchDispatchMode):
    """Logs the storages of all operators inside, in RAM or on a GPU; meta has no bytes.

    Raises:
        InsufficientMemory: with ``refusal``, out of the operator that makes more than ``max_bytes`` together.
    """

    def __init__(self, max_bytes: int, refusal: str) -> None:
        super().__init__()
        self.log = StorageLog()
        self.max_bytes, self.refusal = max_bytes, refusal
        self._live_bytes = self._counted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self.see(each)
        return out

    def see(self, tensor: Tensor) -> None:
        """Log the storage of ``tensor``."""
        if tensor.device.type == "meta":
            return
        self.log.see(tensor)
        for event in self.log.events[self._counted :]:
            self._live_bytes += self.log.sizes[event] if event >= 0 else -self.log.sizes[~event]
        self._counted = len(self.log.events)
        if self._live_bytes > self.max_bytes:
            raise InsufficientMemory(self.refusal, needed_bytes=self._live_bytes, available_bytes=self.max_bytes)

    def forget_past(self) -> None:
        """As `StorageLog.forget_past`."""
        self.log.forget_past()
        self._live_bytes = self._counted = 0
