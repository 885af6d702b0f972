"""Which of two rules would have had more hits lately: least recent first, or least frequent first.

Two shadow directories of keys, as large as the level, are kept by the two rules and count nothing but hits (set duelling: Qureshi et
al. 2007). Accesses that only one of them has are the evidence, forgotten exponentially. The frequency rule wins where its surplus is
beyond what a fair coin would give it (McNemar's test), and loses where the surplus has gone; at the start, and on noise, it has not won.

The score of a key is the sum over its accesses of 2^(-age / half-life), between recency and frequency (Lee et al. 2001), kept as its
logarithm on an axis that moves along, so that it changes at accesses only and never overflows. Spared are the keys that came
within `LAG` accesses behind the newest key in more than a share of its occurrences. Why these and not the tables of
`AccessPredictor`: routing to experts says little about the one next key and much about the four next, in any order; and the
tables cost more. docs/precision.md has both beside each other.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Container

HALF_LIFE = 10  # of an access in a score, in capacities
LAG = 4  # accesses within which a follower comes
SHARE = 0.05  # of a key's occurrences that a follower was behind, to be spared
HISTORY = 8192  # keys whose followers are counted
MEMORY = 4096  # accesses in which evidence fades to 1/e
WIN = 3.5  # surplus that wins, in roots of the number of differing accesses: standard deviations of a fair coin; it is asked often
PATIENCE, START = 4, 64  # accesses for each different key, and at least, before anybody wins: a period shows in them


class Followers:
    """What came within `LAG` keys behind each key, among the last `HISTORY`."""

    def __init__(self) -> None:
        self._recent: deque[str] = deque()
        self._count: dict[str, int] = {}
        self._behind: dict[str, dict[str, int]] = {}

    def hear(self, key: str) -> None:
        """Take the next key."""
        recent, behind = self._recent, self._behind
        for back in range(1, min(LAG, len(recent)) + 1):
            counts = behind[recent[-back]]
            counts[key] = counts.get(key, 0) + 1
        recent.append(key)
        self._count[key] = self._count.get(key, 0) + 1
        if key not in behind:
            behind[key] = {}
        if len(recent) > HISTORY:
            self._forget()

    def _forget(self) -> None:
        gone = self._recent.popleft()
        counts = self._behind[gone]
        for place in range(LAG):
            key = self._recent[place]
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
        self._count[gone] -= 1
        if not self._count[gone]:
            del self._count[gone], self._behind[gone]

    @property
    def distinct(self) -> int:
        """Different keys in the history."""
        return len(self._count)

    def soon(self, share: float) -> frozenset[str]:
        """The keys that came within the next `LAG` after at least this share of the newest key's occurrences."""
        if not self._recent:
            return frozenset()
        newest = self._recent[-1]
        enough = share * self._count[newest]
        return frozenset(key for key, count in self._behind[newest].items() if count >= enough)


class Duel:
    """Hears the accesses of a level and says by which rule its victims should be chosen.

    Args:
        share: of a key's occurrences that a follower came behind, to be spared; above `LAG` no key is.

    Attributes:
        won: whether the frequency rule is the better one by the evidence.
    """

    def __init__(self, share: float = SHARE) -> None:
        self.won = False
        self._share = share
        self._heard = 0
        self._age = 0.0  # in half-lives
        self._scores: dict[str, float] = {}
        self._followers = Followers()
        self._soon: frozenset[str] | None = None
        self._recent: OrderedDict[str, None] = OrderedDict()  # the directory of least recent
        self._frequent: set[str] = set()  # that of the frequency rule
        self._heap: list[tuple[float, str]] = []  # of it, by scores that may have risen since
        self._surplus = self._differing = 0.0
        self._differed_at = 0

    def hear(self, key: str, capacity: int) -> None:
        """``key`` is accessed, of a level that holds ``capacity`` keys now (at least 1)."""
        self._heard += 1
        self._age += 1 / (HALF_LIFE * capacity)
        self._soon = None
        self._followers.hear(key)
        self._raise(key, 64 + 16 * capacity)
        hit_recent = key in self._recent
        self._recent[key] = None
        self._recent.move_to_end(key)
        while len(self._recent) > capacity:
            self._recent.popitem(last=False)
        hit_frequent = key in self._frequent
        if not hit_frequent:
            while len(self._frequent) >= capacity:
                self._evict()
            self._frequent.add(key)
            heapq.heappush(self._heap, (self._scores[key], key))
        if hit_recent != hit_frequent:
            self._judge(1 if hit_frequent else -1)

    def has(self, key: str) -> bool:
        """Whether the level would hold ``key`` had the frequency rule decided all along."""
        return key in self._frequent

    def score(self, key: str) -> float:
        """How hot ``key`` is, on an axis for comparison alone: more recent and more frequent accesses are more."""
        return self._scores.get(key, -math.inf)

    def soon(self) -> Container[str]:
        """The keys that are likely within the next few accesses."""
        if self._soon is None:
            self._soon = self._followers.soon(self._share)
        return self._soon

    def _raise(self, key: str, limit: int) -> None:
        scores, now = self._scores, self._age
        old = scores.get(key)
        if old is None:
            scores[key] = now
            if len(scores) > limit:  # the coldest half is forgotten, but for what the directory holds
                hot = set(sorted(scores, key=lambda name: (-scores[name], name))[: limit // 2])
                self._scores = {name: scores[name] for name in scores if name in hot or name in self._frequent}
                self._scores[key] = now
            return
        high, low = (now, old) if now > old else (old, now)
        scores[key] = high + math.log2(1 + 2.0 ** (low - high))

    def _evict(self) -> None:
        """The coldest of the frequency rule's directory goes; of those that are not spared, if there are any."""
        spared, soon = [], self.soon()
        while self._heap:
            score, key = self._heap[0]
            now = self._scores[key]
            if now > score:
                heapq.heapreplace(self._heap, (now, key))
                continue
            heapq.heappop(self._heap)
            if key not in soon:
                break
            spared.append((score, key))
        else:
            key = spared.pop(0)[1]
        for item in spared:
            heapq.heappush(self._heap, item)
        self._frequent.discard(key)

    def _judge(self, whose: int) -> None:
        faded = math.exp((self._differed_at - self._heard) / MEMORY)
        self._differed_at = self._heard
        self._surplus = self._surplus * faded + whose
        self._differing = self._differing * faded + 1
        if self._heard > START + PATIENCE * self._followers.distinct:
            self.won = self._surplus > (0 if self.won else WIN * math.sqrt(self._differing))
