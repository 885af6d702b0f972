"""Room on level 0 and in host memory: what is waited for until it is free, and what gives way when there is none."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vblackwell.errors import InsufficientMemory
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import EventTransfer
from vblackwell.offload.movement.worker import Outcome
from vblackwell.offload.storage.storage import Storage
from vblackwell.units import format_bytes

FreeSome = Callable[[], bool]  # frees some bytes; False if it has none to give


def current_stream(device: torch.device) -> Any:
    """The CUDA stream that computes now, None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


# -- busy until --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class InFlight:
    """Bytes that are free again when ``ends`` are over: copies, or tasks of the worker that read them in place."""

    ends: Sequence[Transfer | Outcome]
    free: Callable[[], None]

    def is_over(self) -> bool:
        return all(end.done() for end in self.ends)

    def wait(self) -> None:
        for end in self.ends:
            end.wait() if isinstance(end, Transfer) else end.settle()

    def order(self, stream: torch.cuda.Stream | None) -> bool:
        """Let ``stream``, from whose memory the bytes are, wait in place of the host; False if that is not possible."""
        transfers = [end for end in self.ends if isinstance(end, EventTransfer)]
        if stream is None or len(transfers) < len(self.ends):  # the worker reads them
            return False
        for transfer in transfers:
            transfer.wait_on(stream)
            transfer.let_go()
        return True


class InFlightQueue:
    """What is in flight, oldest first."""

    def __init__(self) -> None:
        self._queue: deque[InFlight] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, ends: Sequence[Transfer | Outcome], free: Callable[[], None] = lambda: None) -> None:
        """``free`` is called once, when ``ends`` are over or have failed."""
        self._queue.append(InFlight(ends, free))

    def free_oldest(self, stream: torch.cuda.Stream | None = None) -> bool:
        """Free the oldest; False if there is none. ``stream`` waits in place of the host where it can.

        On a GPU a host that waits has nothing queued when it wakes, and link and GPU stand still.
        """
        if not self._queue:
            return False
        oldest = self._queue.popleft()
        try:
            if not oldest.order(stream):
                oldest.wait()
        finally:
            oldest.free()
        return True

    def sweep(self, stream: torch.cuda.Stream | None = None) -> None:
        """Free what is over, without waiting."""
        while self._queue and self._queue[0].is_over():
            self.free_oldest(stream)


class Stalls:
    """Waits for bytes on their way to or from level 0, counted as stall of the stack. Not thread-safe: the owner has a
    lock.

    On a GPU the computing stream waits and the host does not, so how long it took is known only later: two timed events
    are kept and read when both have passed.
    """

    def __init__(self, stack: VGPUStack) -> None:
        self._stack = stack
        self._device = stack.level0_device
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def stream(self) -> Any:
        """The CUDA stream that computes now, None on the CPU."""
        return current_stream(self._device)

    def wait_for(self, transfer: Transfer) -> None:
        """Order what computes next on level 0 after ``transfer``."""
        stream = self.stream()
        if stream is None or transfer.done():
            started = time.perf_counter()
            transfer.wait_on(stream)
            self._stack.add_stall(time.perf_counter() - started)
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        transfer.wait_on(stream)
        after.record(stream)
        self._waits.append((before, after))
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._stack.add_stall(before.elapsed_time(after) / 1e3)


# -- room-making -------------------------------------------------------------------------------------------------------


def reserve(take: Callable[[], Reservation], *free_some: FreeSome) -> Reservation:
    """What ``take`` gives; while it finds no room, the first of ``free_some`` that has something frees it.

    Raises:
        InsufficientMemory: none of them has anything left.
    """
    while True:
        try:
            return take()
        except InsufficientMemory:
            if not any(free() for free in free_some):
                raise


_locks: weakref.WeakKeyDictionary[VGPUStack, threading.RLock] = weakref.WeakKeyDictionary()
_rooms: weakref.WeakKeyDictionary[VGPUStack, weakref.WeakSet[Level0Room]] = weakref.WeakKeyDictionary()


def lock_of(stack: VGPUStack) -> threading.RLock:
    """Held while a thread changes what level 0 holds of the stack's models: each may take room from the others.

    Threads that run models meet here, and those of autograd. No background thread takes it, so its holder may wait for
    them; nobody may call a model's code, or backward, while holding it.
    """
    return _locks.setdefault(stack, threading.RLock())


def drop_idle_weights(stack: VGPUStack) -> None:
    """Let the models that stream through ``stack`` give up what they keep on level 0 for later."""
    with lock_of(stack):
        for room in _rooms.get(stack, ()):
            while room.end_update() or room.drop_weights():
                pass


class Level0Room:
    """Level 0 as one model sees it, which shares it with the other models of the stack.

    Attributes:
        drop_weights: drops an idle group. end_gradient: frees the oldest gradient that leaves. end_update: frees the
            oldest group that an update holds; each returns False if it has none. sweep_updates: frees those whose
            update is over. The engine sets them.
    """

    def __init__(self, stack: VGPUStack, storage: Storage) -> None:
        self.lock = lock_of(stack)
        self.drop_weights: FreeSome = lambda: False
        self.end_gradient: FreeSome = lambda: False
        self.end_update: FreeSome = lambda: False
        self.sweep_updates: Callable[[], None] = lambda: None
        self._stack, self._storage = stack, storage

    def join(self) -> None:
        """From now on, other models of the stack may ask this one for room."""
        _rooms.setdefault(self._stack, weakref.WeakSet()).add(self)

    def reserve(
        self, what: str, num_bytes: int, *free_some: FreeSome, check: Callable[[], None] = lambda: None
    ) -> Reservation:
        """Bytes of level 0 for a while; ``check`` is called before every attempt.

        Raises:
            InsufficientMemory: everything on level 0 is in use.
        """

        def take() -> Reservation:
            check()
            return self._storage.take(what, num_bytes, 0)

        def give_up() -> bool:
            raise self.no_room(what, num_bytes)

        with self.lock:
            return reserve(take, *free_some, give_up)

    def no_room(self, what: str, num_bytes: int) -> InsufficientMemory:
        level = self._stack.levels[0]
        return InsufficientMemory(
            f"{what!r} needs {format_bytes(num_bytes)} on level 0 ({level.name}), which has "
            f"{format_bytes(level.capacity_bytes)} and everything on it is in use: raise fast_memory (the capacity of "
            "level 0)",
            needed_bytes=num_bytes,
            available_bytes=level.capacity_bytes - level.used_bytes,
        )

    def free_any(self) -> bool:
        """This model has no idle weights: wait for what leaves level 0, then ask the stack's other models."""
        return (
            self.end_gradient()
            or self.end_update()
            or any(room.drop_weights() or room.end_gradient() or room.end_update() for room in self._others())
        )

    def free_weights(self) -> bool:
        """Drop weights, of this model first; wait for an update that holds some."""
        return any(room.drop_weights() or room.end_update() for room in (self, *self._others()))

    def _others(self) -> list[Level0Room]:
        return [room for room in _rooms.get(self._stack, ()) if room is not self]
