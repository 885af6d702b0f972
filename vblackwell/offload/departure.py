"""Records of gradients that fill, leave level 0, and are at home."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from vblackwell.memory.level import Transfer
from vblackwell.memory.stack import Reservation
from vblackwell.offload.groups import Group, Slot


@dataclass(eq=False)
class Leaving:
    """A group's flat gradient buffer on level 0, being filled or on its way."""

    group: Group
    reservation: Reservation
    buffer: torch.Tensor
    slots: list[Slot] = field(default_factory=list)


@dataclass(eq=False)
class Departure:
    """Bytes of level 0 that are free again when ``end`` is over: a copy, or a task of the worker that reads them in place."""

    reservation: Reservation
    end: Transfer | Future[None]

    def over(self) -> bool:
        return self.end.done()

    def wait(self) -> None:
        self.end.wait() if isinstance(self.end, Transfer) else self.end.result()


@dataclass(eq=False)
class GroupGradient:
    """A group's gradient at home. ``slots`` and ``task`` belong to the thread that runs the model, the rest to the worker."""

    slots: dict[Slot, None] = field(default_factory=dict)
    task: Future[None] | None = None  # the worker's last one that touches the range at home
    landed: dict[Slot, None] = field(default_factory=dict)
    kind: str = "gradient"
    norms: dict[Slot, torch.Tensor] = field(default_factory=dict)
