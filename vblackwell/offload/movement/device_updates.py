"""AdamW on level 0 through a `Lane`: early, after a group's backward, or under the next forward, when each is due.

After a group's backward its weights and gradient are on level 0 still: what is loaded is changed in place if nothing
else holds it. Weights that are not, of an embedding or of an update that is due, whose step has come, are loaded for it
if they have room: the next forward will use them, and has not to wait until they are stored. A gradient that stayed on
level 0 until its step, and the states that came up meanwhile, are used as after the backward.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from vblackwell.kernels.optimizer.adamw import AdamWStep, compile_kernels
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import current_stream
from vblackwell.offload.layout.groups import OLD_GRADIENT, OLD_WEIGHT, AccessTrace, Group, Slot, smallest_buffer
from vblackwell.offload.layout.placement import StreamedPlacement, num_buffers
from vblackwell.offload.movement.gradients import GradientCollector
from vblackwell.offload.movement.lane import Lane, LaneEnd, LaneJob, WorkerQueues
from vblackwell.offload.movement.lane_cuda import CudaLane, CudaQueues
from vblackwell.offload.movement.state import (
    Behind,
    EarlyUpdate,
    Hyper,
    InFlightQueue,
    Job,
    LoadedWeights,
    Mover,
    Phase,
    Shared,
    defer_sigint,
    free_until,
)
from vblackwell.offload.movement.weights import WeightStreamer
from vblackwell.offload.storage.storage import Ranges, Shadows

ADVANCE_GROUPS = 3  # groups before an update's own in the forward at which it is queued, if the lane has more to do


def _compile(dtypes: Iterable[torch.dtype], device: torch.device, ahead: bool) -> None:
    with suppress(Exception):  # is raised once more by the first launch
        compile_kernels(dtypes, device, ahead=ahead)


class DeviceUpdates(Mover):
    """Updates on level 0, as ``found`` places them there."""

    def __init__(
        self, shared: Shared, found: StreamedPlacement, weights: WeightStreamer, gradients: GradientCollector
    ) -> None:
        super().__init__(shared)
        self.groups = set(found.on_level0)  # `StepControl` may choose others between steps
        self._sliced = found.slice_rows.keys()  # never whole on level 0
        self._weights = weights
        self._gradients = gradients
        self.shadows = Shadows(self._storage)
        memory = self._storage.take("update ring", found.ring_bytes, 0).bytes
        kind, queues = (CudaLane, CudaQueues(memory.device)) if memory.is_cuda else (Lane, WorkerQueues(self._worker))
        count = num_buffers(memory.numel(), max(map(smallest_buffer, found.on_level0), default=0))
        self._lane = kind(self._stack, self._storage, memory, count, queues, self._worker)
        self._device = self._stack.level0_device
        self._on_gpu = self._device.type == "cuda"
        self._locked = InFlightQueue()  # groups whose weights an update holds on level 0
        self._max_locked = found.max_locked
        self._due: dict[Group, tuple[list[Job], Tensor | None]] = {}  # with the factor of gradients
        self._factor: tuple[Tensor, Tensor] | None = None  # of the last step that clipped, and on the device
        self._trace = AccessTrace()  # of early updates
        self._expecting = False
        self.staying: list[Group] = []  # whose gradients are to stay until the step
        self.at_once = not self._on_gpu  # due updates; on the arena nothing would run meanwhile. Tests switch it off
        self._newest: LaneEnd | None = None
        self.queueing: Group | None = None  # whose ranges are not to be exchanged now

    def compile_ahead(self, *, behind: bool = False) -> None:
        """Compile AdamW's kernels in the worker, while the first forward runs; or, while a backward does, those for
        states that are a step ``behind``.
        """
        if self._on_gpu:
            exact = {group.slots[0].dtype for group in self.groups if not group.formats.packed}
            self._worker.submit(_compile, exact, self._device, behind)

    def expect_backward(self, *, after_step: bool) -> None:
        """A gradient is on its way: bring up states in the order in which the last backward needed them, or, if no
        update begins before the step, of the first groups of the forward, whose gradients stay.
        """
        if not self._expecting:
            self._expecting = True
            self.start_all_due()
            able = self.groups if after_step else ()
            first = [group for group in self._groups if group in able and group not in self._sliced]
            self.staying = [group for group in first if group.trainable()][: self._max_locked]
            last = [self._groups[index] for index in self._trace.last_pass]
            expected = self.staying if after_step else [group for group in last if group in self.groups]
            behind = {group: found.gradient for group in expected if (found := self._states[group].behind) is not None}
            self._lane.expect(expected, behind)
            self._lane.pump()

    def commit(self, group: Group, early: EarlyUpdate) -> None:
        if early.ahead is not None:
            self._storage.exchange(group, "weight", OLD_WEIGHT)
            self._states[group].behind = Behind(early.ahead, self._storage.range(group, "gradient"))
        elif early.shadows is not None:
            self.shadows.give_back(self.shadows.swap(group, early.shadows))  # in the lane's order

    def roll_back(self, group: Group, early: EarlyUpdate) -> None:
        self._trace.forget_pass()
        self.wait(group)
        self._unlock_group(group)
        self._weights.drop(group)
        if early.ahead is not None:
            self._states[group].behind = None  # that step is made
        elif early.shadows is not None:
            self.shadows.give_back(early.shadows)

    def queue(
        self, group: Group, jobs: list[Job], gradient: Tensor | None, factor: Tensor | None, early: EarlyUpdate
    ) -> Transfer:
        """Queue an ``early`` update, from ``gradient`` on level 0, where the weights are too. Its end on level 0."""
        more = self._gradients.has_all_on_host(group)
        with self._queueing(group):
            end = self._queue(group, jobs, gradient, factor, early, stored=more)
        self._trace.use(group.index)
        return end

    @contextmanager
    def _queueing(self, group: Group) -> Iterator[None]:
        self.queueing = group
        try:
            yield
        finally:
            self.queueing = None

    def _queue(
        self,
        group: Group,
        jobs: list[Job],
        gradient: Tensor | None,
        factor: Tensor | None,
        early: EarlyUpdate | None,
        *,
        stored: bool,
    ) -> Transfer:
        """Queue an update from ``gradient``, ``stored`` one, or both: there is more of it in storage."""
        self._unlock_group(group)
        self.sweep()
        weights, state, in_flight = self._weights, self._states[group], self._storage.in_flight
        kind, own = None, self._storage.own_ranges(group)
        sources, targets = self._ranges_of(group, own, early)
        loaded = self._lock_or_load(group)
        if loaded is None:
            weights.invalidate(group)
        try:
            if stored:
                kind = self._gradients.kind_when_idle(group)
                sources[kind] = self._storage.range(group, kind)
            made = dict[tuple[Hyper, int], AdamWStep]()  # mostly one for all: its words are computed once
            numbers = dict[Slot, AdamWStep]()
            for job in jobs:
                key = job.hyper, job.step + 1
                numbers[job.slot] = made.get(key) or made.setdefault(key, AdamWStep(**vars(job.hyper), step=key[1]))
            weight = None if loaded is None else loaded.buffer
            behind = None if early is None or early.behind is None else early.behind.numbers
            end = self._lane.submit(
                LaneJob(group, numbers, sources, targets, weight, gradient, kind, factor, state.last_load, behind)
            )
        except BaseException:
            self._worker.broken |= early is not None and early.behind is not None  # as where it fails later
            if loaded is None:
                state.version -= 1
            else:  # some of it may be updated
                weights.unlock(loaded)
                weights.drop(group)
            raise
        for job in jobs:
            job.steps[job.slot] += 1
        previous: LaneEnd | None = state.update_end
        if previous is not None and previous.stored.done():
            in_flight.discard(previous.stored)
        in_flight.add(end.stored)  # nobody gives the ranges back before
        state.update_end = self._newest = end
        if early is not None and early.ahead is not None:
            early.lands = end.weights
        if loaded is not None:
            weights.mark_updated(loaded, end.computed)
            self._locked.add((end.stored,), partial(weights.unlock, loaded))
            free_until(lambda: len(self._locked) <= self._max_locked, self.end_oldest)
        return end.computed

    def _ranges_of(self, group: Group, own: Ranges, early: EarlyUpdate | None) -> tuple[Ranges, Ranges]:
        """What an update reads, but for its gradient, and what it writes."""
        if early is None or early.shadows is None:
            return own.copy(), own
        if early.ahead is None:
            return own.copy(), early.shadows
        self._gradients.reserve_range(group, adding=False)
        self._gradients.wait_idle(group)
        gradient = {"gradient": self._storage.range(group, "gradient")}
        if early.behind is None:
            return own.copy(), early.shadows | gradient
        # The last gradient has come up, a piece at a time, before this one takes its place.
        olds = {OLD_WEIGHT: early.shadows["weight"], OLD_GRADIENT: early.behind.gradient}
        return own | olds, own | early.shadows | gradient

    def end_oldest(self) -> bool:
        """Let the weights go that the oldest update holds on level 0; False if there is none."""
        return self._locked.free_oldest(current_stream(self._device))

    def sweep(self) -> None:
        self._locked.sweep(current_stream(self._device))

    def _unlock_group(self, group: Group) -> None:
        """Wait for the update that still holds ``group``'s weights on level 0, of the step before at the latest."""
        state = self._states[group]
        free_until(lambda: state.loaded is None or not state.loaded.locked, self.end_oldest)

    # -- at the step ---------------------------------------------------------------------------------------------------

    def update(self, group: Group, jobs: list[Job], factor: Tensor | None) -> None:
        """The step's update of ``group``: at once where its states were brought up for it, else a little later
        (`advance`), when all but a gradient that stayed comes from storage.
        """
        self._start_due(group)  # of another step, whose turn is first
        stayed = self._gradients.stays(group) and self._lane.is_ahead(group)
        at_once = self.at_once or (stayed and not self._weights.is_pinned(group))
        if at_once:  # before it is due: it would be made later, when others of its step were not
            self._unlock_group(group)
            self._weights.refuse_in_use(group)
        self._due[group] = jobs, None if factor is None else self._on_device(factor)
        self._states[group].to(Phase.DUE)
        if at_once:
            self._start_due(group)

    def _on_device(self, factor: Tensor) -> Tensor:
        """The step's ``factor`` on level 0, copied once, without a wait: the host would wait for the computing stream,
        and that for copies of gradients.
        """
        if self._factor is None or self._factor[0] is not factor:
            source = factor.pin_memory() if self._on_gpu else factor
            self._factor = factor, source.to(self._device, non_blocking=True)
        return self._factor[1]

    def advance(self, group: Group) -> None:
        """The forward reaches ``group``: queue the updates that its successors will need, and one if the lane is idle.

        Not all at once at the step: whatever else has to pass the copies in the GPU's copy engine (tokens, a loss, the
        next group's weights) would wait for them.
        """
        if self._due:
            last = group.index + ADVANCE_GROUPS
            for due in [due for due in self._due if due.index <= last]:
                self._start_due(due)
            if self._due and (self._newest is None or self._newest.computed.done()):
                self._start_due(min(self._due, key=lambda due: due.index))

    def _start_due(self, group: Group) -> None:
        """Queue the group's due update."""
        if group not in self._due:
            return
        with defer_sigint():
            (jobs, factor), staying = self._due[group], self._gradients.take_staying(group)
            readers, gradient = list[Transfer](), None if staying is None else staying.bytes
            try:
                with self._queueing(group):
                    readers.append(self._queue(group, jobs, gradient, factor, None, stored=staying is None))
                del self._due[group]
                self._states[group].update_is_queued()
            finally:
                if staying is not None:
                    self._gradients.end_staying(staying, *readers)

    def _lock_or_load(self, group: Group) -> LoadedWeights | None:
        """The weights that the next forward will use, locked, or on their way there; None where they have no room."""
        weights = self._weights
        # What is stored of a sliced leaf may be written past level 0: no copy of it stays there.
        may_load = group not in self._sliced and not self.is_busy(group)
        if not (weights.is_loaded(group) or (may_load and weights.load_ahead(group, self._order_loads))):
            return None
        return weights.lock(group, arriving=True)

    def start_all_due(self) -> None:
        for group in list(self._due):
            self._start_due(group)

    def end_step(self) -> None:
        """The step has been queued; the next backward is expected to go as this one did."""
        self._expecting = False
        self._trace.begin_pass()

    # -- for callers that need a group ---------------------------------------------------------------------------------

    def order_loads(self, group: Group) -> None:
        """Weights that are loaded from now on are those after the group's last update."""
        self._start_due(group)
        self._order_loads(group)

    def _order_loads(self, group: Group) -> None:
        state = self._states[group]
        if state.update_end is not None:
            self._lane.order_loads(state.update_end)
        state.update_is_stored()

    def wait(self, group: Group) -> None:
        """Return when the group's last update is in storage."""
        self._start_due(group)
        state = self._states[group]
        end: LaneEnd | None = state.update_end
        if end is not None:
            try:
                end.stored.wait()
            except Exception:
                state.update_end = None
                # In its middle some of the states have had the step that all lacked.
                self._worker.broken |= state.behind is not None
                raise
            state.update_end = None  # not where an interrupt came: the next caller must wait as well
            self._storage.in_flight.discard(end.stored)
        state.update_is_stored()

    def is_busy(self, group: Group) -> bool:
        """Whether a load would wait for an update: the host does, where level 0 is RAM."""
        end: LaneEnd | None = self._states[group].update_end
        return not self._on_gpu and end is not None and not end.stored.done()

    def drain(self) -> None:
        self.start_all_due()
        self.forget_ahead()
        for group in self.groups:
            self.wait(group)
        self.sweep()

    def forget_ahead(self) -> None:
        """What was brought up for updates that come may change, or end."""
        self._lane.expect(())
        self._expecting = False
        self._lane.drain()

    def free_shadows(self) -> bool:
        """Give up shadows that are not in use; False if there are none."""
        if not any(self.shadows.spare.values()):
            return False
        self._lane.drain()
        return self.shadows.free_spare()
