"""The share of the updates that the host makes: chosen before the first step by rates that were measured without one,
and again when steps have shown how fast the CPU updates in them. No bit depends on it.
"""

from collections.abc import Callable

from vblackwell.offload.layout.forecast import FastestUpdates, Update

FIRST_STEPS = 2  # compile, and bring memory's pages
LOOKS = 5  # steps to the first look; then twice as many each time, as machines change
UNLIKE = 0.1  # of the rate that was taken: hosts do the same step in times that differ by as much
MIN_SECONDS = 0.1  # of updates, for a rate to be one
MIN_CHANGE = 0.04  # of the updates: for less nothing is moved


class HostShare:
    """Of one streamed model. ``updated``: parameters that its stack's CPU has updated so far, and the seconds.

    Attributes:
        found: is told the rate of steps where it is another than was taken. rates: that were taken, and the places.
        place: where updates run, as last chosen; None: not yet.
        cpu: parameters/s in a step, as last taken; 0: not known, as the place is stated.
        next_look: steps after which `again` is to be asked.
    """

    def __init__(self, updates: FastestUpdates, updated: Callable[[], tuple[int, float]]) -> None:
        self._updates, self._updated = updates, updated
        self.found: Callable[[float], None] | None = None
        self._since, self.next_look = (0, 0.0), FIRST_STEPS
        self.place: Update | None = None
        self.cpu = updates.cpu
        self.rates = list[tuple[float, Update]]()

    def first(self, micro_batches: int, undo: bool) -> Update:
        """Before the first step; the caller makes it `place`."""
        place = self._updates(micro_batches, undo)
        self.rates = [(self.cpu, place)] if self.cpu else []
        return place

    def again(self, num_steps: int, micro_batches: int, undo: bool) -> Update | None:
        """After so many steps: the place from now on where it is another one, else None."""
        before, self._since = self._since, self._updated()
        count, seconds = (now - then for now, then in zip(self._since, before, strict=True))
        was_first, self.next_look = num_steps < LOOKS, max(LOOKS, 2 * num_steps)
        if was_first or seconds < MIN_SECONDS:
            return None
        rate = count / seconds
        if self.cpu and abs(rate / self.cpu - 1) <= UNLIKE:
            return None
        self.cpu = rate
        if self.found is not None:
            self.found(self.cpu)
        place = self._updates(micro_batches, undo, self.cpu)
        if isinstance(place, str) or isinstance(self.place, str) or abs(place - (self.place or 0.0)) < MIN_CHANGE:
            return None
        self.place = place
        self.rates.append((self.cpu, place))
        return place

    @property
    def about(self) -> str:
        """For reports; '' where it is stated."""
        found = [f"{place:.3g} of the updates by {cpu / 1e9:.2f} G/s" for cpu, place in self.rates]
        return f"the CPU's share: {', then '.join(found)}" if found else ""
