"""Threads that wait, so that nobody else has to: one transfer, then the next, then a word that all is over."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import FutureTransfer


def failure_of(transfer: Transfer) -> BaseException | None:
    """Wait for ``transfer``; why it failed, if it did."""
    try:
        transfer.wait()
    except Exception as error:
        return error
    return None


class Behind:
    """A few threads; they start when they are needed.

    Args:
        threads: chains that may wait at the same time.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="vblackwell-stage")

    def chain(
        self, first: Transfer, start_next: Callable[[], list[Transfer]], finish: Callable[[BaseException | None], None]
    ) -> Transfer:
        """A transfer that is over when ``first`` is, then all that ``start_next`` gives, then ``finish``, which hears what failed."""

        def run() -> None:
            error = failure_of(first)
            try:
                for transfer in start_next() if error is None else []:
                    error = failure_of(transfer) or error  # all: nobody may touch the memory while one still goes on
            except BaseException as other:
                error = other
            finish(error)
            if error is not None:
                raise error

        return FutureTransfer([self._pool.submit(run)])
