"""What is known of one layer group: where its weights are, what updates them, and what has come of its gradient.

There is one `GroupState` a group. `Phase` says what the next caller that needs the group has to do, and changes by
`GroupState.to` alone:

    phase      the weights of the last step are                   goes to, when
    ---------  -------------------------------------------------  -----------------------------------------------------
    STORED     in storage                                         LOADING: their copy to level 0 was queued
    LOADING    on level 0 when a transfer is over                 LOADED: it was waited for; STORED: they were dropped
    LOADED     on level 0                                         STORED: they were dropped
    EARLY      in storage; an update whose step has not come      STORED: it was rolled back; committed with its step
               was queued (`EarlyUpdate`)                         LOADING where it is in place on level 0, else UPDATING
    DUE        made by an update whose step has come, and which   as EARLY, when it was queued
               is not queued yet
    UPDATING   in storage when an update that is queued is over   STORED: loads, or the caller, are ordered after it

An update may begin whenever no step is open: STORED, LOADING, LOADED and UPDATING go to EARLY, DUE and UPDATING. Bytes
on level 0 outlive the phase: ``loaded`` may be there in EARLY and DUE, where nobody but the update itself may use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from vblackwell.memory.cache.stack import Reservation
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.movement.worker import Outcome

Phase = Enum("Phase", ["STORED", "LOADING", "LOADED", "EARLY", "DUE", "UPDATING"])
_UPDATES = {Phase.EARLY, Phase.DUE, Phase.UPDATING}
_NEXT = {
    Phase.STORED: {Phase.LOADING} | _UPDATES,
    Phase.LOADING: {Phase.LOADED, Phase.STORED} | _UPDATES,
    Phase.LOADED: {Phase.STORED} | _UPDATES,
    Phase.EARLY: {Phase.STORED, Phase.LOADING, Phase.UPDATING},
    Phase.DUE: {Phase.LOADING, Phase.UPDATING},
    Phase.UPDATING: {Phase.STORED} | _UPDATES,
}


@dataclass(frozen=True)
class Hyper:
    """AdamW's numbers for one parameter at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, eq=False)
class Job:
    """One parameter's share of an update. ``step`` is torch's fp32 scalar, counted up by the update."""

    slot: Slot
    step: torch.Tensor
    hyper: Hyper


def same_jobs(left: Sequence[Job], right: Sequence[Job]) -> bool:
    """Whether two lists update the same parameters with the same numbers."""
    return [(job.slot, job.hyper) for job in left] == [(job.slot, job.hyper) for job in right]


@dataclass(eq=False)
class EarlyUpdate:
    """An update that was queued before its step.

    Attributes:
        rollback: what its place (host or level 0) needs to undo it; None: it is final.
        reads_until: when it has read the gradient on level 0; None: it does not.
    """

    jobs: list[Job]
    rollback: Any
    reads_until: Transfer | None = None

    @property
    def is_final(self) -> bool:
        return self.rollback is None


@dataclass(eq=False)
class LoadedWeights:
    """A group's weights on level 0.

    Attributes:
        transfer: what brings or changes them; None: it was waited for.
        storage_key: of the buffer's storage. own_count: that storage's uses while nobody else holds it.
        pins: how many use them. locked: one of these is an update, which changes them in place.
    """

    group: Group
    reservation: Reservation
    buffer: torch.Tensor
    transfer: Transfer | None
    storage_key: int
    pins: int = 0
    own_count: int | None = None
    locked: bool = False


@dataclass(eq=False)
class GradientBuffer:
    """A group's flat gradient on level 0, being filled or on its way.

    ``expected``: how many gradients it was to take when it was opened. ``leaving``: nothing more fills it.
    """

    group: Group
    reservation: Reservation
    bytes: torch.Tensor
    expected: int
    slots: dict[Slot, None] = field(default_factory=dict)
    leaving: bool = False

    def is_whole(self) -> bool:
        """Whether every parameter that wants a gradient has one in it."""
        return len(self.slots) == len(self.group.trainable())


@dataclass(eq=False)
class GradientState:
    """A group's gradient since the last `zero_grad`.

    Attributes of the thread that runs the model:
        slots: parameters that have one, in host memory or on the way there. filling: those of them that are on level 0.
        kind_queued: what ``kind`` will be when the worker has done what is queued.
        task: the worker's last task that touches the gradient's range. level0_norms: norms that were taken on level 0.

    Attributes of the worker:
        landed: parameters whose gradient is in the range of ``kind``: ``gradient`` (compute type) or ``accumulated``
            (fp32 sum).
        norms: 2-norms that were taken of these.
    """

    slots: dict[Slot, None] = field(default_factory=dict)
    filling: GradientBuffer | None = None
    kind_queued: str = "gradient"
    task: Outcome | None = None
    level0_norms: dict[Slot, torch.Tensor] = field(default_factory=dict)
    landed: dict[Slot, None] = field(default_factory=dict)
    kind: str = "gradient"
    norms: dict[Slot, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class GroupState:
    """See the module's text.

    Attributes:
        version: counts the changes of the weights.
        last_load: the newest copy out of the group's weights in storage; the host waits for it before it overwrites
            them.
        early: the update of `Phase.EARLY`. due: jobs and factor of an update that is not queued yet.
        update_end: of the group's last update: a task of the worker, or the `LaneEnd` of one on level 0; None: it was
            waited for.
    """

    phase: Phase = Phase.STORED
    loaded: LoadedWeights | None = None
    version: int = 0
    last_load: Transfer | None = None
    early: EarlyUpdate | None = None
    due: tuple[list[Job], torch.Tensor | None] | None = None
    update_end: Any = None
    gradient: GradientState = field(default_factory=GradientState)

    def to(self, phase: Phase) -> None:
        """Change the phase, as the module's table allows."""
        assert phase in _NEXT[self.phase], f"{self.phase.name} to {phase.name}"
        self.phase = phase

    @property
    def is_unsettled(self) -> bool:
        """Whether weights on level 0 are not those of the last step, or may not stay so: its update comes first."""
        return self.phase in (Phase.EARLY, Phase.DUE)

    def update_is_queued(self) -> None:
        """An update whose step has come is queued: what it changes in place on level 0 is a load that is under way."""
        self.to(Phase.UPDATING if self.loaded is None else Phase.LOADING)


class GroupStates:
    """The states of one model, by group."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._states = [GroupState() for _ in groups]

    def __getitem__(self, group: Group) -> GroupState:
        return self._states[group.index]
