"""The groups whose AdamW runs on level 0: their lane, their speculation, and their way back.

Behind a group's backward its weights and gradient are on level 0 still. The update changes the loaded weights in place, where nobody
else holds them, so the last groups of backward are ready for the next forward without a journey home and back. What it writes at
home goes into shadows (`shadow`) until the step confirms it, or, if the optimizer was told that every backward is followed by its
step (``undo=False``), into the ranges themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vblackwell.errors import StepAbandoned
from vblackwell.kernels.optimizer.adamw import AdamWStep
from vblackwell.memory.transfer import EventTransfer
from vblackwell.offload.layout.groups import Group
from vblackwell.offload.layout.placement import deferred_groups
from vblackwell.offload.movement.lane import Lane, LaneEnd, LaneJob
from vblackwell.offload.movement.update import Job
from vblackwell.offload.movement.weights import current_stream
from vblackwell.offload.movement.worker import uninterrupted
from vblackwell.offload.storage.shadows import Ranges, Shadows

# Updates that wait for the forward are queued when it is so many groups before them, or when the lane has nothing else to do.
ADVANCE_GROUPS = 3
MOST_LENT = 4  # groups whose weights stay on level 0 while they go home; the host may be many groups ahead of that

if TYPE_CHECKING:
    from vblackwell.offload.engine import Offload
    from vblackwell.offload.movement.weights import Loaded


@dataclass(eq=False)
class Anticipated:
    """An update that was queued before its step. ``shadows`` is None where it is final."""

    jobs: list[Job]
    steps: list[torch.Tensor]
    shadows: Ranges | None
    end: LaneEnd


class Level0Updates:
    """Updates of one model that run on level 0.

    Args:
        groups: the groups, in the order of the forward.
    """

    def __init__(self, engine: Offload, lane: Lane, groups: Sequence[Group]) -> None:
        self._engine = engine
        self._lane = lane
        self._groups = set(groups)
        self._deferred = (
            set(deferred_groups(groups, engine.homes.plan)) if engine.device.type == "cuda" else set[Group]()
        )
        self._ends: dict[int, LaneEnd] = {}
        self._anticipated: dict[int, Anticipated] = {}
        self._lent: deque[tuple[Loaded, LaneEnd]] = deque()
        self._order: list[Group] = []
        self._previous_order: list[Group] = []
        self._looked_ahead = False
        self.at_once = (
            engine.device.type != "cuda"
        )  # late updates; on the arena nothing would run beside. Tests switch it off
        self._waiting: dict[int, tuple[list[Job], torch.Tensor | None]] = {}
        self._newest: LaneEnd | None = None
        self.shadows = Shadows(engine.homes)

    def __contains__(self, group: Group) -> bool:
        return group in self._groups

    # -- before the step ---------------------------------------------------------------------------------------------

    def look_ahead(self) -> None:
        """A gradient is on its way: bring up states in the order in which the last backward needed them."""
        if not self._looked_ahead:
            self._looked_ahead = True
            self.flush()
            self._lane.expect(self._previous_order)
            self._lane.pump()

    def is_deferred(self, group: Group) -> bool:
        """Whether ``group`` is updated under the next forward even where its update could run behind its backward."""
        return group in self._deferred

    @uninterrupted()
    def anticipate(self, group: Group, jobs: list[Job], gradient: torch.Tensor, undo: bool) -> LaneEnd | None:
        """Update ``group`` behind its backward, from ``gradient`` on level 0; None if there is no room for a way back."""
        engine = self._engine
        self._take_back(group)
        self.sweep()
        own = self._own_ranges(group)
        shadows = self.shadows.take(group, own) if undo else None
        if undo and shadows is None:
            return None
        steps = [job.step.clone() for job in jobs]
        loaded = engine.weights.lend(group)
        try:
            end = self._submit(group, jobs, own if shadows is None else shadows, loaded, gradient, None)
        except BaseException:
            self.shadows.give_back(shadows or {})
            raise
        self._anticipated[group.index] = Anticipated(jobs, steps, shadows, end)
        self._order.append(group)
        return end

    def _own_ranges(self, group: Group) -> Ranges:
        homes = self._engine.homes
        return {kind: homes.range(group, kind) for kind in ("weight", *homes.states_of(group))}

    def _submit(
        self, group: Group, jobs: Sequence[Job], targets: Ranges, loaded: Loaded | None,
        gradient: torch.Tensor | None, factor: torch.Tensor | None,
    ) -> LaneEnd:  # fmt: skip
        engine = self._engine
        if loaded is None:
            engine.weights.invalidate(group)
        try:
            end = self._lane.submit(self._job(group, jobs, targets, loaded, gradient, factor))
        except BaseException:
            if loaded is None:
                engine.weights.revert(group)
            else:  # some of it may be updated
                engine.weights.returned(loaded)
                engine.weights.discard(group)
            raise
        for job in jobs:
            job.step.add_(1)
        previous = self._ends.get(group.index)
        if previous is not None and previous.stored.done():
            engine.homes.in_flight.discard(previous.stored)
        engine.homes.in_flight.add(end.stored)  # nobody gives the ranges back before
        self._ends[group.index] = self._newest = end
        if loaded is not None:
            engine.weights.renew(loaded, end.computed)
            self._lent.append((loaded, end))
            while len(self._lent) > MOST_LENT:
                self.make_room()
        return end

    def _job(
        self, group: Group, jobs: Sequence[Job], targets: Ranges, loaded: Loaded | None,
        gradient: torch.Tensor | None, factor: torch.Tensor | None,
    ) -> LaneJob:  # fmt: skip
        engine, kind = self._engine, None
        sources = self._own_ranges(group)
        if gradient is None or engine.gradients.has_at_home(group):
            kind = engine.gradients.settled_kind(group)
            sources[kind] = engine.homes.range(group, kind)
        return LaneJob(
            group=group,
            numbers={job.slot: AdamWStep(**vars(job.hyper), step=int(job.step) + 1) for job in jobs},
            sources=sources,
            targets=dict(targets),
            weight=None if loaded is None else loaded.buffer,
            gradient=gradient,
            gradient_kind=kind,
            factor=None if factor is None else factor.to(engine.device),
            last_load=engine.weights.last_load(group),
        )

    def sweep(self) -> None:
        """Let weights go whose updates are stored, without waiting."""
        while self._lent and self._lent[0][1].stored.done():
            self.make_room()

    def make_room(self) -> bool:
        """Let the weights go that the oldest update holds on level 0; False if there is none.

        On a GPU their memory is that of the current stream, which waits in place of the host (`GradientCollector.make_room`).
        """
        if not self._lent:
            return False
        loaded, end = self._lent.popleft()
        try:
            stream = current_stream(self._engine.device)
            if stream is not None and isinstance(end.stored, EventTransfer):
                end.stored.wait_on(stream)
            else:
                end.stored.wait()
        finally:
            self._engine.weights.returned(loaded)
        return True

    def _take_back(self, group: Group) -> None:
        """Wait for the update that still holds ``group``'s weights on level 0, of the step before at the latest."""
        while any(loaded.group is group for loaded, _ in self._lent):
            self.make_room()

    # -- at the step -------------------------------------------------------------------------------------------------

    def is_anticipated(self, group: Group) -> bool:
        return group.index in self._anticipated

    def confirm(self, group: Group, jobs: list[Job], factor: torch.Tensor | None) -> bool:
        """The step has come. Whether the update that was anticipated is the one that it asks for; if not, it is undone.

        Raises:
            StepAbandoned: it is not, and it was final.
        """
        anticipated = self._anticipated[group.index]
        if factor is not None or not same_jobs(anticipated.jobs, jobs):
            self.roll_back(group)
            return False
        del self._anticipated[group.index]
        self._engine.weights.confirm(group)
        if anticipated.shadows is not None:
            self.shadows.commit(group, anticipated.shadows)
        return True

    def update(self, group: Group, jobs: list[Job], factor: torch.Tensor | None) -> None:
        """The step's update of a group that was not anticipated: everything comes from home, at once or a little later (`advance`)."""
        if group.index in self._waiting:  # of another step, whose turn is first
            self._release(group)
        self._waiting[group.index] = (jobs, factor)
        self._engine.weights.distrust(group)
        if self.at_once:
            self._release(group)

    def advance(self, group: Group) -> None:
        """The forward reaches ``group``: queue the updates that its successors will need.

        Not all at once at the step: copies queue up in the GPU's copy engine, and whatever else has to pass it then (tokens, a loss,
        the next group's weights) waits behind them.
        """
        if self._waiting:
            last = group.index + ADVANCE_GROUPS
            for index in [index for index in self._waiting if index <= last]:
                self._release(self._engine.groups[index])
            if self._waiting and self._idle():
                self._release(self._engine.groups[min(self._waiting)])

    def _idle(self) -> bool:
        """Whether the lane has nothing to do but what it is storing."""
        return self._newest is None or self._newest.computed.done()

    @uninterrupted()
    def _release(self, group: Group) -> None:
        """Queue a waiting update: on the weights that the forward is going to use, if level 0 has room for them already."""
        jobs, factor = waiting = self._waiting.pop(group.index)
        try:
            self._take_back(group)
            self._engine.weights.confirm(group)  # what is loaded is what the update starts from
            # What a sliced leaf's home has may be written past level 0: no copy of it stays there.
            loaded = None if self._engine.is_sliced(group) else self._engine.weights.fetch(group)
            self._submit(group, jobs, self._own_ranges(group), loaded, None, factor)
        except BaseException:
            self._waiting[group.index] = waiting
            self._engine.weights.distrust(group)
            raise
        self._engine.weights.confirm(group)

    def flush(self) -> None:
        """Backward begins: what still waits is queued."""
        for index in list(self._waiting):
            self._release(self._engine.groups[index])

    def end_step(self) -> None:
        """The step has been queued; the next backward is expected to go as this one did."""
        self._looked_ahead = False
        if self._order:
            self._previous_order, self._order = self._order, []

    def roll_back(self, group: Group) -> None:
        """Make everything what it was before `anticipate`.

        Raises:
            StepAbandoned: the update was final.
        """
        anticipated = self._anticipated.pop(group.index)
        self._order = []
        if anticipated.shadows is None:
            self._engine.weights.confirm(group)
            raise abandoned(group.name, self._engine.name)
        self.wait(group)
        self._take_back(group)
        self._engine.weights.discard(group)
        self._engine.weights.revert(group)
        self.shadows.give_back(anticipated.shadows)
        for job, step in zip(anticipated.jobs, anticipated.steps, strict=True):
            job.step.copy_(step)

    def roll_back_all(self) -> list[Group]:
        """Undo all that was anticipated; the groups whose updates were final, and stay."""
        final = [index for index, anticipated in self._anticipated.items() if anticipated.shadows is None]
        for index in final:
            del self._anticipated[index]
            self._engine.weights.confirm(self._engine.groups[index])
        for index in list(self._anticipated):
            self.roll_back(self._engine.groups[index])
        return [self._engine.groups[index] for index in final]

    def free_shadows(self) -> bool:
        """Give up shadows that are not in use; False if there are none."""
        if not self.shadows.has_spare:
            return False
        self._lane.drain()
        self.shadows.free_spare()
        return True

    # -- whoever needs a group ---------------------------------------------------------------------------------------

    def order_loads(self, group: Group) -> None:
        """Weights that are loaded from now on are those after the group's last update."""
        if group.index in self._waiting:
            self._release(group)
        end = self._ends.get(group.index)
        if end is not None:
            self._lane.order_loads(end)

    def wait(self, group: Group) -> None:
        """Return when the group's last update is at home."""
        if group.index in self._waiting:
            self._release(group)
        end = self._ends.pop(group.index, None)
        if end is not None:
            end.stored.wait()
            self._engine.homes.in_flight.discard(end.stored)

    def is_under_way(self, group: Group) -> bool:
        end = self._ends.get(group.index)
        return end is not None and not end.stored.done()

    def drain(self) -> None:
        """Return when all updates are at home."""
        self.flush()
        self._lane.expect(())  # whoever waits for this is about to change what was brought up
        self._looked_ahead = False
        self._lane.drain()
        for group in self._groups:
            self.wait(group)
        self.sweep()


def abandoned(group: str, model: str) -> StepAbandoned:
    """The error for a final update whose step did not come."""
    return StepAbandoned(
        f"{group!r} of {model!r} was updated behind its backward, and with undo=False that is final, but the step did not come as "
        "announced (a second backward, another forward or a look at the weights before step(), changed hyperparameters, step(only=...), "
        "or zero_grad() before step()): reload the last checkpoint, and use undo=True"
    )


def same_jobs(left: Sequence[Job], right: Sequence[Job]) -> bool:
    """Whether two lists update the same parameters with the same numbers."""
    return [(job.slot, job.hyper) for job in left] == [(job.slot, job.hyper) for job in right]
