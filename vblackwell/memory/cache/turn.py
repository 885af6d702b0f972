"""Who may plan and move next: one thread at a time, and those that somebody waits for before those that work ahead.

A plan may take seconds to carry out (a disk), so it does not run under the lock that guards the stack's tables; it runs in
its thread's turn. A prefetch that works through a long list lets every waiting `access` go first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """A lock with two classes of waiters. A thread may not take it twice."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._foreground = 0

    @contextmanager
    def take(self, *, background: bool = False) -> Iterator[None]:
        """Hold the turn; ``background`` waits until no foreground thread wants it."""
        me = threading.get_ident()
        with self._condition:
            assert self._owner != me, "a turn inside a turn"
            if background:
                self._condition.wait_for(lambda: self._owner is None and not self._foreground)
            else:
                self._foreground += 1
                try:
                    self._condition.wait_for(lambda: self._owner is None)
                finally:
                    self._foreground -= 1
            self._owner = me
        try:
            yield
        finally:
            with self._condition:
                self._owner = None
                self._condition.notify_all()
