"""Records of weights on level 0, and of what autograd keeps instead of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vblackwell.memory.cache.stack import Reservation
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import Group


@dataclass(eq=False)
class Loaded:
    """A group's weights on level 0."""

    group: Group
    reservation: Reservation
    buffer: torch.Tensor
    transfer: Transfer
    storage_key: int
    arrived: bool = False
    pins: int = 0
    own_count: int | None = None  # of its storage, while nobody else holds it
    lent: bool = False  # an update changes it in place
    provisional: bool = False  # these are the weights after a step that has not come yet


class SavedTensor(NamedTuple):
    """What autograd keeps of a tensor that stays where it is, and its version: hooks have torch leave out its check of in-place writes."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedTensor:
        """Detached: an operator may save its own output, whose graph would hold itself for ever where no backward comes."""
        return cls(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)

    def unchanged(self) -> torch.Tensor:
        """The tensor again.

        Raises:
            RuntimeError: it was written to since; as torch says it.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
                f"{self.tensor.dtype} and shape {tuple(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version}"
            )
        return self.tensor


@dataclass(frozen=True)
class PackedView:
    """What autograd keeps instead of a view into a buffer."""

    group: Group
    version: tuple[int, int]
    dtype: torch.dtype
    offset: int  # bytes from the group's start
    stop: int  # of the byte after the last
    size: torch.Size
    stride: tuple[int, ...]
