"""The share of the updates that the host makes: chosen before the first step by rates that were measured without one,
and again when steps have shown how fast the CPU updates in them, and of several micro-batches how long they take. No
bit depends on it.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable

from vblackwell.kernels.optimizer.cpu import few_threads
from vblackwell.offload.layout.forecast import FastestUpdates, Update

NEW = 2  # steps, the first ones and those after a move, that do not count: they compile, and bring memory's pages
LOOKS = 5  # steps to the first look; then twice as many each time, as machines change
UNLIKE = 0.1  # of the rate, or of a step's time, that was taken: hosts do the same step in times that differ by as much
MOST_STEPS = 16  # whose seconds count
MIN_SECONDS = 0.1  # of updates, for a rate to be one
MIN_CHANGE = 0.04  # of the updates: for less nothing is moved


class HostShare:
    """Of one streamed model. ``updated``: parameters that its stack's CPU has updated so far, and the seconds.

    Attributes:
        place: where updates run; None: not yet chosen.
        next_look: steps after which `again` is to be asked.
        rates: parameters/s in a step, as they were taken, and the places that followed; none where it is stated.
    """

    def __init__(self, updates: FastestUpdates, updated: Callable[[], tuple[int, float]]) -> None:
        self._updates, self._updated = updates, updated
        self._cpu = updates.cpu
        self._since: tuple[int, float] | None = None  # what had been updated when steps began to count
        self._begun: tuple[int, float] | None = None  # of the latest step its number, and the time
        self._seconds = deque[float](maxlen=MOST_STEPS)
        self._step, self._clips = 0.0, False  # seconds of steps by which the place was chosen, and whether they clipped
        self._then, self.next_look = LOOKS, NEW
        self.place: Update | None = None
        self.rates = list[tuple[float, Update]]()

    def first(self, micro_batches: int, undo: bool) -> Update:
        """Before the first step; the caller says with `moved` that it is so."""
        return self._updates(micro_batches, undo)

    def begin(self, num_steps: int) -> None:
        """A forward begins after so many steps."""
        now, before = time.perf_counter(), self._begun
        if before is None or before[0] != num_steps:
            if before is not None:
                self._seconds.append((now - before[1]) / (num_steps - before[0]))
            self._begun = num_steps, now

    def again(self, num_steps: int, micro_batches: int, undo: bool, clips: bool = False) -> Update | None:
        """After so many steps: another place than now if steps have shown a rate that gives one, or clip (``clips``)
        and did not before, or the other way, else None; simulates then, for a part of a second. The caller says with
        `moved` that it is so.
        """
        before, self._since = self._since, self._updated()
        if before is None:  # of several micro-batches later, as the first steps' seconds are not yet the others'
            self.next_look = max(self._then * min(2, micro_batches), num_steps + LOOKS - NEW)
            self._seconds.clear()
            return None
        count, seconds = (now - then for now, then in zip(self._since, before, strict=True))
        self.next_look = self._then = 2 * num_steps
        if not isinstance(self.place, float) or not self._cpu:
            return None
        rate = count / seconds if seconds >= MIN_SECONDS else self._cpu
        step = statistics.median(self._seconds or [self._step])  # some have an evaluation beside them
        if abs(rate / self._cpu - 1) <= UNLIKE:
            alike = micro_batches == 1 or abs(step - self._step) <= UNLIKE * self._step
            if alike and clips == self._clips:
                return None
            rate = self._cpu
        place = self._updates(micro_batches, undo, rate, (self.place, step), clips)
        self._cpu, self._step, self._clips = rate, step, clips
        return None if isinstance(place, str) or abs(place - self.place) < MIN_CHANGE else place

    def moved(self, place: Update, num_steps: int) -> None:
        """Updates run there from now on."""
        self.place = place
        if isinstance(place, float) and self._cpu:
            self.rates.append((self._cpu, place))
        self._since, self.next_look = None, num_steps + NEW

    @property
    def about(self) -> str:
        """For reports; '' where it is stated."""
        few = few_threads()
        found = [f"{place:.3g} of the updates by {cpu / 1e9:.2f} G/s" for cpu, place in self.rates]
        return f"the CPU's share: {', then '.join(found)}{few and ' with ' + few}" if found else ""
