"""Transfers that are late, for stress tests."""

from collections.abc import Callable

from vblackwell.memory import transfer


def set_transfer_delay(delay: Callable[[str], None] | None) -> None:
    """Call ``delay(kind)`` before the bytes of every later transfer move (`transfer.hold_back`); None: no more."""
    transfer.hold_back = delay
