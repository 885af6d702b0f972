"""Waiting for what another thread or process does, without a limit of time that a busy machine could pass."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object]) -> None:
    """Return once ``condition()`` holds. What never comes true is a hang, which pytest's own limit ends."""
    while not condition():
        time.sleep(1e-3)
