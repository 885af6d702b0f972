"""Records of gradients that fill, leave level 0, and are at home."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vblackwell.memory.cache.stack import Reservation
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import EventTransfer
from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.movement.worker import Outcome


@dataclass(eq=False)
class Leaving:
    """A group's flat gradient buffer on level 0, being filled or on its way.

    ``expected``: how many gradients it was to take when it was opened. ``goes``: nothing more fills it.
    """

    group: Group
    reservation: Reservation
    buffer: torch.Tensor
    expected: int
    slots: dict[Slot, None] = field(default_factory=dict)
    goes: bool = False

    def is_whole(self) -> bool:
        """Whether every parameter that wants a gradient has one in it."""
        return len(self.slots) == len(self.group.trainable())


@dataclass(frozen=True)
class Claim:
    """What an update has to do with a gradient that is about to leave level 0.

    Attributes:
        end: until then the update reads it there; None: it does not.
        final: nobody needs the gradient at home.
        landing: the range at home that it goes to.
    """

    end: Transfer | None = None
    final: bool = False
    landing: str = "gradient"


@dataclass(eq=False)
class Departure:
    """Bytes of level 0 that are free again when ``end`` is over: a copy, or a task of the worker that reads them in place."""

    reservation: Reservation
    ends: tuple[Transfer | Outcome, ...]

    def over(self) -> bool:
        return all(end.done() for end in self.ends)

    def wait(self) -> None:
        for end in self.ends:
            end.wait() if isinstance(end, Transfer) else end.settle()

    def order(self, stream: torch.cuda.Stream | None) -> bool:
        """Let ``stream``, from whose memory the bytes are, wait in place of the host; False if that is not possible."""
        if stream is None:
            return False
        transfers = [end for end in self.ends if isinstance(end, EventTransfer)]
        if len(transfers) < len(self.ends):  # the worker reads them
            return False
        for transfer in transfers:
            transfer.wait_on(stream)
            transfer.let_go()
        return True


@dataclass(eq=False)
class GroupGradient:
    """A group's gradient at home.

    ``slots``, ``kind_queued``, ``task`` and ``level0_norms`` belong to the thread that runs the model, the rest to the worker.
    """

    slots: dict[Slot, None] = field(default_factory=dict)
    kind_queued: str = "gradient"  # what ``kind`` will be when the worker has done what is queued
    task: Outcome | None = None  # the worker's last one that touches the range at home
    landed: dict[Slot, None] = field(default_factory=dict)
    kind: str = "gradient"
    norms: dict[Slot, torch.Tensor] = field(default_factory=dict)
    level0_norms: dict[Slot, torch.Tensor] = field(default_factory=dict)
