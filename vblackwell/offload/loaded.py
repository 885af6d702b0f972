"""Records of weights on level 0, and of what autograd keeps instead of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vblackwell.memory.level import Transfer
from vblackwell.memory.stack import Reservation
from vblackwell.offload.groups import Group


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


@dataclass(frozen=True)
class PackedView:
    """What autograd keeps instead of a view into a buffer."""

    group: Group
    version: tuple[int, int]
    dtype: torch.dtype
    offset: int  # bytes from the group's start
    size: torch.Size
    stride: tuple[int, ...]
