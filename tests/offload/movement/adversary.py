"""Queues, transfers and a disk whose work runs in any order that the declared dependencies allow, chosen by a seed.

A GPU runs what it was given as early as it can, so a missing wait shows once in many runs, and then as a wrong number.
Here work runs when somebody waits for it, or at random moments before, one step at a time; a missing wait shows in most
runs. If everybody waits and nothing can run, that is a deadlock, and an error.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from vblackwell.memory.level import Extent, Level, RangeAllocator
from vblackwell.memory.transfer import EventTransfer, Transfer, flat_bytes
from vblackwell.offload.movement.lane import Copies, Queues
from vblackwell.offload.storage.staging import Continuations

PAGE = 4096
Actor = Callable[[], Callable[[], Any] | None]


class Adversary:
    """Chooses what runs next.

    Args:
        eagerness: the chance that work runs at a moment when nobody waits for it.
        threads: whether several threads take part: then nothing to run is a reason to wait a little.
    """

    def __init__(self, seed: int, eagerness: float, *, threads: bool = False) -> None:
        self.chance = random.Random(seed)
        self.eagerness = eagerness
        self.lock = threading.RLock()
        self._actors: list[Actor] = []
        self._threads = threads

    def enter(self, actor: Actor) -> None:
        """``actor()`` gives its next step, None while it cannot go on."""
        with self.lock:
            self._actors.append(actor)

    def leave(self, actor: Actor) -> None:
        self._actors.remove(actor)

    def step(self) -> bool:
        """Run one step of somebody."""
        with self.lock:
            for actor in self.chance.sample(self._actors, len(self._actors)):
                work = actor()
                if work is not None:
                    work()
                    return True
        return False

    def wander(self) -> None:
        """A moment at which anything may happen, or nothing. Not where somebody holds a lock:
        what happens may want it.
        """
        while self.chance.random() < self.eagerness and self.step():
            pass

    def until(self, over: Callable[[], bool]) -> None:
        idle = 0
        while not over():
            if self.step():
                idle = 0
                continue
            idle += 1
            assert self._threads and idle < 200_000, "everybody waits, and nothing can run: a deadlock"
            time.sleep(1e-4)


class LateMark:
    """A point in a queue. Forgotten waits are what is looked for, so it says nothing until it has been passed."""

    def __init__(self, adversary: Adversary) -> None:
        self._adversary = adversary
        self.passed = False

    def query(self) -> bool:
        return self.passed  # nothing happens meanwhile: the caller may hold a lock

    def synchronize(self) -> None:
        self._adversary.until(lambda: self.passed)

    def elapsed_time(self, end: LateMark) -> float:
        return 1.0


class _Gate:
    """Where a queue waits for a mark."""

    def __init__(self, mark: Any) -> None:
        self._mark = mark

    def is_open(self) -> bool:
        return self._mark.query()


class LateQueue:
    """Work in order, later."""

    def __init__(self, adversary: Adversary) -> None:
        self._adversary = adversary
        self._items: deque[_Gate | Callable[[], None]] = deque()
        adversary.enter(self._next)

    def _next(self) -> Callable[[], Any] | None:
        if not self._items:
            return None
        head = self._items[0]
        if isinstance(head, _Gate):
            return self._items.popleft if head.is_open() else None
        return self._run

    def _run(self) -> None:
        work = self._items.popleft()
        assert not isinstance(work, _Gate)
        work()

    def add(self, work: Callable[[], None]) -> None:
        with self._adversary.lock:
            self._items.append(work)
        self._adversary.wander()

    def wait_event(self, event: Any) -> None:
        with self._adversary.lock:
            self._items.append(_Gate(event))
        self._adversary.wander()

    def synchronize(self) -> None:
        self._adversary.until(lambda: not self._items)


class LateQueues(Queues):
    """Three late queues, and late ones for what the model computes, loads and writes back."""

    def __init__(self, adversary: Adversary) -> None:
        self.adversary = adversary
        self.states_in, self.update, self.states_out = (LateQueue(adversary) for _ in range(3))
        self.model, self.gradients_out, self.loads = (LateQueue(adversary) for _ in range(3))
        self.loading = (self.loads,)

    def computing(self) -> Any:
        return self.model

    def mark(self, queue: Any, *, long: bool = False) -> Transfer:
        mark = LateMark(self.adversary)
        queue.add(lambda: setattr(mark, "passed", True))
        return EventTransfer(mark)  # type: ignore[arg-type]

    def run(self, queue: Any, work: Callable[[], None]) -> None:
        queue.add(work)

    def copy(self, queue: Any, copies: Copies, *memory: Any) -> Transfer:
        queue.add(lambda: [ctypes.memmove(*copy) for copy in copies])
        return self.mark(queue)


class LateTransfer(Transfer):
    """Parts that run later, in any order."""

    def __init__(self, adversary: Adversary, parts: list[Callable[[], None]]) -> None:
        self._adversary = adversary
        self._parts = parts
        self._error: Exception | None = None
        adversary.enter(self._next)

    def _next(self) -> Callable[[], None] | None:
        return self._run if self._parts else None

    def _run(self) -> None:
        part = self._parts.pop(self._adversary.chance.randrange(len(self._parts)))
        try:
            part()
        except Exception as error:
            self._error = self._error or error
        if not self._parts:
            self._adversary.leave(self._next)

    def wait(self) -> None:
        self._adversary.until(lambda: not self._parts)
        if self._error is not None:
            raise self._error

    def wait_on(self, stream: Any) -> None:
        self.wait()

    def done(self) -> bool:
        return not self._parts


class LateDisk(Level):
    """A disk in RAM that reads and writes page by page, late. ``failing(extent, 'read' or 'write')`` may raise."""

    def __init__(self, adversary: Adversary, capacity_bytes: int) -> None:
        super().__init__("ssd", None, capacity_bytes, PAGE)
        self._adversary = adversary
        self._ranges = RangeAllocator(self.capacity_bytes)
        self._memory = torch.zeros(self.capacity_bytes, dtype=torch.uint8)
        self.failing: Callable[[Extent, str], None] = lambda extent, doing: None
        self.moved = {"read": 0, "write": 0}

    def _take(self, held_bytes: int) -> tuple[int, Any] | None:
        offset = self._ranges.allocate(held_bytes)
        return None if offset is None else (offset, None)

    def _give(self, extent: Extent) -> None:
        self._ranges.free(extent.offset, extent.held_bytes)

    def view(self, extent: Extent) -> None:
        return None

    def read(self, extent: Extent, out: torch.Tensor) -> Transfer:
        return self._move(extent, flat_bytes(out), "read")

    def write(self, extent: Extent, src: torch.Tensor) -> Transfer:
        return self._move(extent, flat_bytes(src), "write")

    def _move(self, extent: Extent, memory: torch.Tensor, doing: str) -> Transfer:
        def part(start: int) -> Callable[[], None]:
            def move() -> None:
                self.failing(extent, doing)
                near = memory[start : start + PAGE]
                far = self._memory[extent.offset + start : extent.offset + start + near.numel()]
                (near if doing == "read" else far).copy_(far if doing == "read" else near)
                self.moved[doing] += near.numel()

            return move

        return LateTransfer(self._adversary, [part(start) for start in range(0, memory.numel(), PAGE)])

    def close(self) -> None:
        with self._lock:
            self._live.clear()
            self._used = 0


class LateContinuations(Continuations):
    """Chains that go on when the adversary lets them."""

    def __init__(self, adversary: Adversary) -> None:
        self._adversary = adversary

    def chain(
        self, first: Transfer, start_next: Callable[[], list[Transfer]], finish: Callable[[BaseException | None], None]
    ) -> Transfer:
        return LateChain(self._adversary, first, start_next, finish)


class LateChain(Transfer):
    def __init__(
        self,
        adversary: Adversary,
        first: Transfer,
        start_next: Callable[[], list[Transfer]],
        finish: Callable[[BaseException | None], None],
    ) -> None:
        self._adversary, self._first, self._start_next, self._finish = adversary, first, start_next, finish
        self._started: list[Transfer] | None = None
        self._error: BaseException | None = None
        self._over = self._going_on = False
        adversary.enter(self._next)

    def _next(self) -> Callable[[], None] | None:
        if self._going_on:
            return None
        waiting_for = [self._first] if self._started is None else self._started
        return self._go_on if all(transfer.done() for transfer in waiting_for) else None

    def _go_on(self) -> None:
        if self._started is None:
            self._going_on = True  # starting lets others run
            self._started = self._start_next()
            self._going_on = False
            return
        self._adversary.leave(self._next)
        for transfer in self._started:
            try:
                transfer.wait()
            except Exception as error:
                self._error = self._error or error
        self._finish(self._error)
        self._over = True

    def wait(self) -> None:
        self._adversary.until(lambda: self._over)
        if self._error is not None:
            raise self._error

    def wait_on(self, stream: Any) -> None:
        self.wait()

    def done(self) -> bool:
        return self._over
