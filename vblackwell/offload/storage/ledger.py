"""What is known of the bytes of ranges: how often they changed, whether a write is under way, and whether one failed.

Bytes that were read ahead are used only if their range has not changed since; a range is read, or written again, only
when its last write is over; and a range whose write failed is lost for every reader until it is written whole.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from vblackwell.errors import VBError
from vblackwell.memory.level import Transfer
from vblackwell.memory.pool import Reservation

Stamp = tuple[Reservation, int]


class Ledger:
    """The ranges of one model. Safe from several threads."""

    def __init__(self) -> None:
        self._changes: dict[Reservation, int] = {}
        self._writes: dict[Reservation, Transfer] = {}
        self._lost: dict[Reservation, BaseException] = {}
        self._lock = threading.Lock()

    def stamp(self, reservation: Reservation) -> Stamp:
        """Tells the bytes that ``reservation`` has now, or has when what was queued is over, from all others."""
        return reservation, self._changes.get(reservation, 0)

    def changed(self, reservation: Reservation) -> None:
        """Its bytes have changed, or will have when what has just been queued is over."""
        with self._lock:
            self._changes[reservation] = self._changes.get(reservation, 0) + 1

    def begin(self, reservation: Reservation, write: Transfer) -> None:
        """``write`` fills it in the background."""
        with self._lock:
            self._writes[reservation] = write

    def is_written(self, reservation: Reservation) -> bool:
        """Whether no write to it is under way, and none has failed."""
        write = self._writes.get(reservation)
        return reservation not in self._lost and (write is None or write.done())

    def wait(self, reservation: Reservation) -> None:
        """Return when no write to it is under way, so that the caller may write there."""
        write = self._writes.get(reservation)
        if write is not None:
            with suppress(VBError, OSError):  # then it is lost
                write.wait()
            with self._lock:
                if self._writes.get(reservation) is write:
                    del self._writes[reservation]

    def wait_to_read(self, reservation: Reservation) -> None:
        """`wait`, for a caller that reads.

        Raises:
            DiskError: the last write failed.
        """
        self.wait(reservation)
        lost = self._lost.get(reservation)
        if lost is not None:
            raise lost

    def end(self, reservation: Reservation, error: BaseException | None) -> None:
        """A write of the whole range is over; ``error``: it failed, and what the range held is lost."""
        with self._lock:
            self._changes[reservation] = self._changes.get(reservation, 0) + 1
            self._writes.pop(reservation, None)
            if error is None:
                self._lost.pop(reservation, None)
            else:
                self._lost[reservation] = error

    def forget(self, reservation: Reservation) -> None:
        """The range ends."""
        with self._lock:
            for table in (self._changes, self._writes, self._lost):
                table.pop(reservation, None)
