"""Which keys come next, from those that came before: tables of successors, longest known context first.

For every context of the last ``order`` keys, and each shorter one, the table counts what followed. A forecast walks the tables: the
likeliest successor of the longest context that was seen, then the successor of that, and so on. It learns on the way, forgets nothing
within ``history`` keys, and costs O(order) a key. For traces that repeat exactly `next_use` knows the whole future (next_use.py); this is
for those that do not.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from vblackwell.errors import ConfigurationError

ORDER, HISTORY = 3, 1 << 16


class AccessPredictor:
    """Learns a sequence of keys, one at a time.

    Args:
        order: keys in the longest context.
        history: keys that count; older ones are forgotten, so that the tables stay bounded.

    Raises:
        ConfigurationError: an order below 1, or a history shorter than a context and its successor.
    """

    def __init__(self, order: int = ORDER, history: int = HISTORY) -> None:
        if order < 1 or history < order + 1:
            raise ConfigurationError(
                f"order {order} and history {history}: at least 1, and more keys than a context has"
            )
        self.order, self.history = order, history
        self._recent: deque[str] = deque()
        self._tables: list[dict[tuple[str, ...], Counter[str]]] = [{} for _ in range(order + 1)]

    def hear(self, key: str) -> None:
        """Take the next key."""
        tail = [self._recent[-back] for back in range(min(self.order, len(self._recent)), 0, -1)]
        for length in range(1, len(tail) + 1):
            self._tables[length].setdefault(tuple(tail[-length:]), Counter())[key] += 1
        self._recent.append(key)
        if len(self._recent) > self.history:
            self._forget()

    def _forget(self) -> None:
        """The oldest key leaves, and with it what it was the beginning of."""
        head = [self._recent[place] for place in range(self.order + 1)]
        for length in range(1, self.order + 1):
            context, table = tuple(head[:length]), self._tables[length]
            counts = table[context]
            counts[head[length]] -= 1
            if not counts[head[length]]:
                del counts[head[length]]
            if not counts:
                del table[context]
        self._recent.popleft()

    def predict_next(self, history: Sequence[str], k: int, min_share: float = 0.0) -> list[str]:
        """The likeliest next ``k`` keys behind ``history``, in order; fewer where nothing is known of what follows.

        Args:
            history: the newest key last; the last ``order`` of it are looked at. It need not be what was heard.
            k: how many.
            min_share: stop before a key that followed its context less often than this: a wrong prefetch costs more than none.

        Raises:
            ConfigurationError: ``k`` below 0.
        """
        if k < 0:
            raise ConfigurationError(f"k {k}: how many keys, 0 or more")
        context, found = list(history[-self.order :]), []
        while len(found) < k:
            key = self._successor(context, min_share)
            if key is None:
                break
            found.append(key)
            context = [*context, key][-self.order :]
        return found

    def _successor(self, context: list[str], min_share: float) -> str | None:
        for length in range(len(context), 0, -1):
            counts = self._tables[length].get(tuple(context[-length:]))
            if counts:
                best = max(counts, key=lambda key: (counts[key], key))
                return best if counts[best] >= min_share * counts.total() else None
        return None
