"""Bounds for what a stranger wrote and we evaluate: chat templates come with models, and ``{{ 'x' * 10**10 }}`` is one.

jinja's sandbox, in which transformers renders, keeps a template from files and from code. It does not bound what is repeated, joined or
raised to a power. So the process' own limits do: memory of a few hundred MiB beyond what it holds, which an allocation meets as
`MemoryError`, and seconds of CPU time, which load does not stretch. Both are put back afterwards.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from vblackwell.units import MiB, format_bytes

MAX_SECONDS = 5.0  # of CPU time; a conversation takes milliseconds
MAX_BYTES = 256 * MiB


@contextmanager
def bounded() -> Iterator[None]:
    """While this lasts, the process is bounded: in memory, and on the main thread, which is the one that signals interrupt, in time.

    Raises:
        TimeoutError, MemoryError: a bound was met; with it in words.
    """

    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes more than {MAX_SECONDS:g} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    held = _process(os.getpid()).memory_info().data + MAX_BYTES
    is_timed = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGPROF, expire) if is_timed else None
    resource.setrlimit(resource.RLIMIT_DATA, (held if soft == resource.RLIM_INFINITY else min(soft, held), hard))
    if is_timed:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        yield
    except MemoryError as error:
        raise MemoryError(f"it takes more than {format_bytes(MAX_BYTES)}") from error
    finally:
        if is_timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        if is_timed:
            signal.signal(signal.SIGPROF, handler)


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> psutil.Process:
    return psutil.Process(pid)
