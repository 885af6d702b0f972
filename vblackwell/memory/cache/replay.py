"""What a policy would have made of a recorded trace: hits, and the time that the trace would have waited for its link.

Keys of one size, a level that holds ``capacity`` of them, one link that moves one key at a time. An access of a key that is there is a
hit. While the trace computes (``compute`` of a key's transfer time an access) the link brings what the policy expects next, nearest first,
into places of keys that are expected later. Hit rates of demand alone, without bringing anything early, are what Belady's optimum bounds
(Belady 1966), so they are counted in a replay of their own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from vblackwell.errors import ConfigurationError
from vblackwell.memory.cache.entry import Entry, Layout
from vblackwell.memory.cache.next_use import NextUse
from vblackwell.memory.cache.policy import LRU
from vblackwell.memory.cache.predictor import AccessPredictor

POLICIES = ("lru", "next_use", "predictor", "belady")
NEVER = float("inf")
_SURE = 0.5  # share of a context's successors from which a key is brought early
_HORIZON = 4  # of the predictor's forecast, in capacities


@dataclass(frozen=True)
class Replayed:
    """One policy on one trace.

    Attributes:
        hit_rate: of demand alone.
        stall: time waited with prefetching, in transfers of one key, over the whole trace.
    """

    policy: str
    hit_rate: float
    stall: float


def replay(trace: Sequence[str], capacity: int, policy: str, *, compute: float = 1.0, depth: int = 4) -> Replayed:
    """``policy`` on ``trace``.

    Args:
        capacity: keys that the level holds.
        policy: 'lru', 'next_use', 'predictor' or 'belady', which knows the future.
        compute: time an access computes, in transfers of one key.
        depth: keys that may be brought early.

    Raises:
        ConfigurationError: an unknown policy, an empty trace, or no capacity.
    """
    if policy not in POLICIES:
        raise ConfigurationError(f"policy {policy!r} is not known: choose one of {', '.join(POLICIES)}")
    if not trace or capacity < 1:
        raise ConfigurationError(f"a trace of {len(trace)} keys on a level of {capacity}: both must be at least 1")
    hits = _demand(trace, capacity, policy)
    return Replayed(policy, hits / len(trace), _stall(trace, capacity, policy, compute, depth))


class _Future:
    """What a policy expects: the keys that come next, and whom it would let go."""

    def __init__(self, trace: Sequence[str], capacity: int, policy: str) -> None:
        self._trace, self._capacity, self._policy = trace, capacity, policy
        self._at = 0
        self._entries = {key: Entry(key, None, 5, Layout((), 0, None, None)) for key in trace}
        self._lru: LRU = NextUse() if policy == "next_use" else LRU()
        self._predictor = AccessPredictor()
        self._recent: deque[str] = deque(maxlen=self._predictor.order)
        self._places: dict[str, deque[int]] = defaultdict(deque)
        if policy == "belady":
            for place, key in enumerate(trace):
                self._places[key].append(place)

    def used(self, key: str) -> None:
        self._at += 1
        if self._policy == "belady":
            self._places[key].popleft()
        self._predictor.hear(key)
        self._recent.append(key)
        self._lru.touch(self._entries[key])

    def enters(self, key: str) -> None:
        self._lru.add(self._entries[key])

    def leaves(self, key: str) -> None:
        self._lru.discard(self._entries[key])

    def ahead(self, count: int, min_share: float = 0.0) -> list[str]:
        """The next keys, as far as they are known."""
        if self._policy == "belady":
            return list(self._trace[self._at : self._at + count])
        if self._policy == "predictor":
            return self._predictor.predict_next(list(self._recent), count, min_share)
        if isinstance(self._lru, NextUse) and self._lru.periodic:
            return self._lru.ahead(count)
        return []

    def victim(self, resident: set[str], spared: set[str]) -> str | None:
        """Who goes from the level; none of ``spared``, None if there is nobody else."""
        if self._policy == "belady":
            free = [key for key in resident if key not in spared]
            return max(free, key=lambda key: (self._places[key][0] if self._places[key] else NEVER, key), default=None)
        order = (entry.key for entry in self._lru.victims(0) if entry.key not in spared)
        if self._policy != "predictor":
            return next(order, None)
        soon: dict[str, int] = {}
        for distance, key in enumerate(self.ahead(_HORIZON * self._capacity)):
            soon.setdefault(key, distance)
        best, last = None, -1.0
        for key in order:  # least recent first: of those that are not expected at all, it goes
            distance = soon.get(key, NEVER)
            if distance == NEVER:
                return key
            if distance > last:
                best, last = key, distance
        return best


def _demand(trace: Sequence[str], capacity: int, policy: str) -> int:
    future, resident, hits = _Future(trace, capacity, policy), set[str](), 0
    for key in trace:
        if key in resident:
            hits += 1
        else:
            if len(resident) == capacity:
                _let_go(future, resident, set())
            resident.add(key)
            future.enters(key)
        future.used(key)
    return hits


def _let_go(future: _Future, resident: set[str], spared: set[str]) -> bool:
    gone = future.victim(resident, spared)
    if gone is None:
        return False
    resident.discard(gone)
    future.leaves(gone)
    return True


def _stall(trace: Sequence[str], capacity: int, policy: str, compute: float, depth: int) -> float:
    """Time waited: a miss waits for the link to finish what it moves and then for the key; a key on its way, for the rest of that."""
    future, resident = _Future(trace, capacity, policy), set[str]()
    now = free_at = waited = 0.0
    coming: dict[str, float] = {}  # keys on the link, and when they are here
    for key in trace:
        if key in coming:
            waited, now = waited + max(0.0, coming[key] - now), max(now, coming[key])
            del coming[key]
        elif key not in resident:
            if len(resident) == capacity:
                _let_go(future, resident, set(coming))
            resident.add(key)
            future.enters(key)
            free_at = max(now, free_at) + 1.0
            waited, now = waited + free_at - now, free_at
        future.used(key)
        wanted = future.ahead(depth, _SURE)
        for later in wanted:
            if later in resident or len(coming) >= min(depth, capacity - 1):
                continue
            if len(resident) == capacity and not _let_go(future, resident, {key, *wanted, *coming}):
                break
            resident.add(later)
            future.enters(later)
            free_at = max(now, free_at) + 1.0
            coming[later] = free_at
        now += compute
        coming = {name: when for name, when in coming.items() if when > now}
    return waited
