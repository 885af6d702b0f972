"""What one model's movers share: its worker thread, the state of each layer group, bytes in flight, level 0's budget.

One thread a model works on gradients and states in storage, because order is the cheapest lock: a group's gradient
arrives, is summed, measured and applied by tasks submitted in that order. Gradients of the last groups come first, but
the next forward needs the first groups first: so an update is *postponable*, and runs when nothing else can.

`Phase`, changed by `GroupState.to` alone, says what the next caller that needs a group has to do:

    phase      the weights of the last step are                   goes to, when
    ---------  -------------------------------------------------  -----------------------------------------------------
    STORED     in storage                                         LOADING: their copy to level 0 was queued
    LOADING    on level 0 when a transfer is over                 LOADED: it was waited for; STORED: they were dropped
    LOADED     on level 0                                         STORED: they were dropped
    EARLY      in storage; an update whose step has not come      STORED: it was rolled back; committed with its step
               was queued (`EarlyUpdate`)                         LOADING where it is in place on level 0, else UPDATING
    DUE        made by an update whose step has come, and which   as EARLY, when it was queued
               is not queued yet
    UPDATING   in storage when an update that is queued is over   STORED: loads, or the caller, are ordered after it

An update may begin whenever no step is open: STORED, LOADING, LOADED and UPDATING go to EARLY, DUE and UPDATING. Bytes
on level 0 outlive the phase: ``loaded`` may be there in EARLY and DUE, where nobody but the update itself may use them.
"""

import signal
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from vblackwell.errors import InsufficientMemory, StaleTensor
from vblackwell.kernels.optimizer.adamw import AdamWStep
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import EventTransfer, current_stream
from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.storage.storage import Ranges, Storage
from vblackwell.units import format_bytes

_delay: Callable[[], None] | None = None


def set_worker_delay(delay: Callable[[], None] | None) -> None:
    """For stress tests: ``delay`` runs in the worker before each task."""
    global _delay
    _delay = delay


LONGEST_CLOSE_S = 10.0  # then its memory comes back when its updates are over


class Task(Future[Any]):
    """Work of the worker. A failure is raised once by `wait` or the worker's next call, and each time by `result`."""

    raised = False

    def __init__(
        self, work: Callable[[], Any], group: int | None, postponable: bool, arriving: Transfer | None
    ) -> None:
        super().__init__()
        self.work: Callable[[], Any] | None = work  # until it is done
        self.group, self.postponable, self.arriving = group, postponable, arriving

    def has_arrived(self) -> bool:
        """Whether it need not wait. A transfer that failed is raised by the work itself."""
        try:
            return self.arriving is None or self.arriving.done()
        except Exception:
            return True

    def result(self, timeout: float | None = None) -> Any:
        try:
            if self.exception(timeout) is not None:
                self.raised = True
            return super().result()
        finally:
            del self  # a failure holds this frame, and must not hold itself by it

    def wait(self) -> None:
        """Return at the end, as `Transfer.wait`; raise the failure if nobody has."""
        try:
            if self.exception() is not None and not self.raised:
                self.result()
        finally:
            del self  # as in `result`


class Worker:
    """Runs tasks in a separate thread. The first failure is raised at the next `submit` or `drain`, once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"vblackwell-{name}")
        self._lock = threading.Lock()
        self._waiting = deque[Task]()  # at most as many as the pool has calls of `_run_next` to come
        self._running: Task | None = None
        self._ends = deque[tuple[Callable[[], None], threading.Event]]()
        self._closed = False
        self._thread: int | None = None
        self._failed: Task | None = None
        self.failures = Counter[int | None]()  # raised or not, by the group's number
        self.forgiven = Counter[int | None]()  # those of them that were there when all gradients were last given up
        self.broken = False  # an update of a step that came has failed, while others of it may have been made

    def submit(
        self,
        work: Callable[..., Any],
        *args: Any,
        group: int | None = None,
        postponable: bool = False,
        arriving: Transfer | None = None,
    ) -> Task:
        """Run ``work(*args)`` after the earlier tasks of ``group``, to whose ranges it keeps; None: after all tasks.

        Other groups' tasks may go before a ``postponable`` one, and before one whose ``arriving`` is not over.
        """
        self.raise_failure()
        if self._closed:
            raise RuntimeError("nothing is submitted after the shutdown")
        task = Task(partial(work, *args), group, postponable, arriving)
        with self._lock:
            self._pool.submit(self._run_next)  # first: where this raises, or is interrupted, nothing waits in vain
            self._waiting.append(task)
        return task

    def cancel(self, task: Task) -> bool:
        """Forget a task that has not begun: its result is None. False if it has."""
        with self._lock:
            if task not in self._waiting:
                return False
            self._waiting.remove(task)
        task.work = None
        task.set_result(None)
        return True

    def _run_next(self) -> None:
        self._thread = threading.get_ident()
        with self._lock:
            if not self._waiting:  # an interrupt came between the call and its task
                return
            task = self._choose()
            self._running = task  # first: `close` must not find neither
            self._waiting.remove(task)
        task.set_running_or_notify_cancel()
        work, task.work = task.work, None
        assert work is not None
        try:
            if _delay is not None:
                _delay()
            result = work()
        except BaseException as failure:
            self._failed = self._failed or task
            self.failures[task.group] += 1
            task.set_exception(failure)
        else:
            task.set_result(result)
        finally:
            self._running = None
            del task, work  # as in `Task.result`
            self._end()

    def _choose(self) -> Task:
        """The oldest task that need not wait; else the postponable one of the first group; else the oldest."""
        seen: set[int] = set()
        postponed: Task | None = None
        for task in self._waiting:
            if task.group is None:
                if task is self._waiting[0]:
                    return task
                break
            if task.group in seen:
                continue
            seen.add(task.group)
            if task.postponable:
                if postponed is None or task.group < (postponed.group or 0):
                    postponed = task
            elif task.has_arrived():
                return task
        return postponed or self._waiting[0]

    def drain(self) -> None:
        """Wait until everything submitted so far is done; raise the first failure."""
        with self._lock:
            unfinished = [*self._waiting, *([] if self._running is None else [self._running])]
        wait(unfinished)
        del unfinished  # as in `Task.result`
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the first failure that nobody has raised yet."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            try:
                failed.wait()
            finally:
                del failed  # as in `Task.result`

    def check_whole(self) -> None:
        """Raise StaleTensor if an update failed: some groups are a step ahead of others."""
        if self.broken:
            raise StaleTensor(
                f"an update of model {self._name!r} failed in the background, so some of its groups are a step behind "
                "others: go on from a checkpoint (release(model) gives the weights as they are)"
            )

    def check_gradients(self) -> None:
        """`check_whole`; raise StaleTensor, too, if a task failed since gradients were last given up."""
        self.check_whole()
        if self.failures != self.forgiven:
            raise StaleTensor(
                f"a background task of model {self._name!r} failed since the last zero_grad(), so its gradients may be "
                "incomplete: zero_grad(), and repeat forward and backward"
            )

    def forgive(self) -> None:
        """All gradients were given up: what failed until now concerns none that comes."""
        if self.failures != self.forgiven:
            self.forgiven = self.failures.copy()

    def close(self, then: Callable[[], None]) -> None:
        """Run ``then`` after all that was submitted, in the worker's thread where some of it is left. Idempotent.

        It takes no lock and does not wait for ever, because the garbage collector may call it anywhere: under a lock
        that what is left needs, or in a thread for whose start another one waits with the lock of all executors.
        """
        self._closed = True
        over = threading.Event()
        self._ends.append((then, over))
        self._end()
        if self._thread != threading.get_ident():
            over.wait(LONGEST_CLOSE_S)

    def _end(self) -> None:
        while self._running is None and not self._waiting:
            try:
                then, over = self._ends.popleft()
            except IndexError:
                return
            try:
                then()
            finally:
                over.set()


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Inside, an interrupt from the keyboard waits for the end; only the main thread gets any."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[-1])


# -- groups -----------------------------------------------------------------------------------------------------------

Phase = Enum("Phase", ["STORED", "LOADING", "LOADED", "EARLY", "DUE", "UPDATING"])
_UPDATES = {Phase.EARLY, Phase.DUE, Phase.UPDATING}
_NEXT = {
    Phase.STORED: {Phase.LOADING} | _UPDATES,
    Phase.LOADING: {Phase.LOADED, Phase.STORED} | _UPDATES,
    Phase.LOADED: {Phase.STORED} | _UPDATES,
    Phase.EARLY: {Phase.STORED, Phase.LOADING, Phase.UPDATING},
    Phase.DUE: {Phase.LOADING, Phase.UPDATING},
    Phase.UPDATING: {Phase.STORED} | _UPDATES,
}


@dataclass(frozen=True)
class Hyper:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Job:
    """One parameter's share of an update; equal where parameter and numbers are."""

    slot: Slot
    steps: dict[Slot, int] = field(compare=False, repr=False)  # of the model's parameters, counted up by updates
    hyper: Hyper

    @property
    def step(self) -> int:
        return self.steps[self.slot]


Numbers = dict[Slot, AdamWStep]


@dataclass(eq=False)
class Behind:
    """States of a group that lack its last step, which its weights have had.

    A rollback is then the old weights: an update before its step makes the step that the states lack, for good, and of
    its own the weights alone. That takes 2 bytes a parameter, and 2 for a gradient that waits while the next one comes,
    where shadows of everything take 12.
    """

    numbers: Numbers
    gradient: Reservation  # of the step; the range ``old_weight`` has what the states belong to
    task: Task | None = None  # of the worker, which makes the step


@dataclass(eq=False)
class EarlyUpdate:
    jobs: list[Job]
    steps: list[int]  # the jobs' before it
    shadows: Ranges | None  # what it writes; None: the group's own ranges, which is final
    ahead: Numbers | None = None  # its numbers where it makes weights alone, and shadows are of them alone
    behind: Behind | None = None  # what the group's states lack, which it makes then
    reads_until: Transfer | None = None  # until then it reads the gradient on level 0; None: it does not
    lands: Transfer | None = None  # with which the gradient is in storage, too; None: it is sent as others are
    earlier: Task | None = None  # the worker's last before it that touches the gradient


@dataclass(eq=False)
class LoadedWeights:
    group: Group
    reservation: Reservation
    buffer: Tensor
    transfer: Transfer | None  # what brings or changes them; None: it was waited for
    storage_key: int  # of the buffer's storage
    pins: int = 0  # how many use them
    own_count: int | None = None  # that storage's uses while nobody else holds it
    locked: bool = False  # one of the pins is an update, which changes them in place


@dataclass(eq=False)
class GradientBuffer:
    """A group's flat gradient on level 0, being filled or (``closed``) on its way; opened for ``expected`` parts."""

    group: Group
    reservation: Reservation
    bytes: Tensor
    expected: int  # counted once: groups of experts have hundreds
    slots: dict[Slot, None] = field(default_factory=dict)
    promised: set[Slot] = field(default_factory=set)  # whose gradients are being made in it
    closed: bool = False

    def may_be_sent(self) -> bool:
        """Whether it is open, and none of its gradients is being made in it."""
        return not self.closed and self.promised <= self.slots.keys()

    def is_whole(self) -> bool:
        """Whether every parameter that wants a gradient has one in it."""
        return len(self.slots) == self.expected


@dataclass(eq=False)
class GradientState:
    """A group's gradient since the last `zero_grad`."""

    slots: dict[Slot, None] = field(default_factory=dict)  # that have one in host memory, or on the way there
    # The range that holds it when the worker has done what is queued, in compute type; or "accumulated", the fp32 sum.
    kind: str = "gradient"
    ranges: Ranges = field(default_factory=dict)  # by kind, when a task is queued, which runs later
    task: Task | None = None  # the worker's last that touches the gradient's range
    level0_norms: dict[Slot, Tensor] = field(default_factory=dict)  # that were taken there
    measured: Task | None = None  # the worker's task that takes the others, if the gradient has not changed since
    norms: dict[Slot, Tensor] = field(default_factory=dict)  # the worker's, of what it finds in host memory


def flat_of(slot: Slot, gradient: Tensor, kind: str) -> Tensor:
    return slot.flat_fp32(gradient) if kind == "accumulated" else slot.flat(gradient)


@dataclass(eq=False)
class GroupState:
    phase: Phase = Phase.STORED
    loaded: LoadedWeights | None = None
    version: int = 0  # counts the changes of the weights; counted down where one was undone
    last_load: Transfer | None = None  # newest copy out of the weights in storage; over before the host overwrites them
    update_end: Any = None  # of the last update: the worker's task, or the `LaneEnd`; None: it was waited for
    early: EarlyUpdate | None = None  # in EARLY
    behind: Behind | None = None
    gradient: GradientState = field(default_factory=GradientState)

    def to(self, phase: Phase) -> None:
        """Change the phase, as the module's table allows."""
        assert phase in _NEXT[self.phase], f"{self.phase.name} to {phase.name}"
        self.phase = phase

    def update_is_queued(self) -> None:
        """An update whose step has come is queued: what it changes in place on level 0 is a load that is under way."""
        self.to(Phase.UPDATING if self.loaded is None else Phase.LOADING)

    def update_is_stored(self) -> None:
        """What comes next is ordered after the update."""
        if self.phase is Phase.UPDATING:
            self.to(Phase.STORED)


# -- waiting for bytes -------------------------------------------------------------------------------------------------


def free_after(
    ends: Iterable[Transfer | Task], free: Callable[[], object], stream: torch.cuda.Stream | None = None
) -> None:
    """Call ``free`` when all ``ends`` are over, whichever of them fails; ``stream``, if given, waits for events."""

    def wait(end: Transfer | Task) -> None:
        if stream is not None and isinstance(end, EventTransfer):
            end.wait_on(stream)
            end.let_go()
        else:
            end.wait()

    with ExitStack() as left:
        left.callback(free)
        for end in ends:
            left.callback(wait, end)


class InFlightQueue:
    """Bytes that are free again when copies, or tasks of the worker that read them in place, are over; oldest first."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Sequence[Transfer | Task], Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, ends: Sequence[Transfer | Task], free: Callable[[], None] = lambda: None) -> None:
        """Call ``free`` once, when ``ends`` are over or have failed."""
        self._queue.append((ends, free))

    def free_oldest(self, stream: torch.cuda.Stream | None = None) -> bool:
        """Free the oldest; False if there is none.

        ``stream``, from whose memory the bytes are, waits in place of the host where it can: a host that waits has
        nothing queued when it wakes, and link and GPU stand still.
        """
        if not self._queue:
            return False
        ends, free = self._queue.popleft()
        on_stream = all(isinstance(end, EventTransfer) for end in ends)
        free_after(ends, free, stream if on_stream else None)
        return True

    def sweep(self, stream: torch.cuda.Stream | None = None) -> None:
        while self._queue and all(end.done() for end in self._queue[0][0]):
            self.free_oldest(stream)


class Stalls:
    """Waits for bytes of level 0, of the computing stream on a GPU, counted as stall. The owner has a lock."""

    def __init__(self, stack: VGPUStack) -> None:
        self._stack = stack
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # timed, read when both have passed

    def wait_for(self, transfer: Transfer) -> None:
        """Order what computes next on level 0 after ``transfer``."""
        stream = current_stream(self._stack.level0_device)
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


# -- bytes of level 0 -------------------------------------------------------------------------------------------------

T = TypeVar("T")
FreeSome = Callable[[], bool]  # frees some bytes; False if it has none to give


def free_until(enough: Callable[[], object], *free_some: FreeSome) -> bool:
    """Free until there is ``enough``, from the first of ``free_some`` that has some; False if none has any more."""
    while not enough():
        if not any(free() for free in free_some):
            return False
    return True


def reserve(take: Callable[[], T], *free_some: FreeSome) -> T:
    """What ``take`` gives; it is tried again as long as one of ``free_some`` has something to free, the first first."""
    while True:
        try:
            return take()
        except InsufficientMemory:
            if not any(free() for free in free_some):
                raise


class Level0Budget:
    """Level 0 as one model sees it, which shares it with the other models of the stack.

    ``lock`` is held while a thread, of a model or of autograd, changes what level 0 holds of the stack's models. No
    background thread takes it, so its holder may wait for them, but may not call a model's code or backward.
    """

    last_used, pinned = 0.0, False  # in seconds of `time.monotonic`; others take nothing of one that is pinned
    _by_stack = weakref.WeakKeyDictionary[VGPUStack, tuple[Any, weakref.WeakSet["Level0Budget"]]]()

    def __init__(self, stack: VGPUStack, storage: Storage) -> None:
        self.lock, self._all = self._by_stack.setdefault(stack, (threading.RLock(), weakref.WeakSet()))
        # `StepControl` sets these.
        self.drop_weights: FreeSome = lambda: False  # of an idle group
        self.end_gradient: FreeSome = lambda: False  # the oldest that leaves
        self.end_update: FreeSome = lambda: False  # the oldest group that an update holds
        self.sweep_updates: Callable[[], None] = lambda: None  # those whose update is over
        self.free_spare: FreeSome = lambda: False  # host memory that rollbacks keep and do not need now
        self._stack, self._storage = stack, storage
        with self.lock:  # whose holders go through all
            self._all.add(self)

    @classmethod
    def drop_idle(cls, stack: VGPUStack) -> None:
        """Let the models of ``stack`` that are not pinned give up what they keep for speed, on level 0 and in RAM."""
        lock, budgets = cls._by_stack.get(stack, (nullcontext(), ()))
        with lock:
            for budget in [each for each in budgets if not each.pinned]:
                free_until(lambda: False, budget.end_update, budget.drop_weights, budget.free_spare)

    def reserve(
        self, what: str, num_bytes: int, *free_some: FreeSome, fits: Callable[[], bool] = lambda: True
    ) -> Reservation:
        """Bytes of level 0 for a while, when they have a place in the model's own budget too (``fits``).

        Raises InsufficientMemory where everything on level 0 is in use.
        """
        level = self._stack.levels[0]

        def take() -> Reservation:
            if not free_until(fits, self.drop_weights, self.free_any):
                give_up()
            # Where no key could give way, bytes are freed before they are asked for: an attempt in vain costs an error.
            free_until(lambda: level.can_allocate(num_bytes) or self._stack.keys(), *free_some)
            return self._storage.take(what, num_bytes, 0)

        def give_up() -> NoReturn:
            raise InsufficientMemory(
                f"{what!r} needs {format_bytes(num_bytes)} on level 0 ({level.name}), which has "
                f"{format_bytes(level.capacity_bytes)} and everything on it is in use: raise fast_memory (the capacity "
                "of level 0)",
                needed_bytes=num_bytes,
                available_bytes=level.capacity_bytes - level.used_bytes,
            )

        with self.lock:
            return reserve(take, *free_some, give_up)

    def free_any(self) -> bool:
        """This model has no idle weights: wait for what leaves level 0, then ask others, the longest unused first."""
        others = sorted((each for each in self._all - {self} if not each.pinned), key=lambda each: each.last_used)
        return (
            self.end_gradient()
            or self.end_update()
            or any(other.drop_weights() or other.end_gradient() or other.end_update() for other in others)
        )

    def free_host(self) -> bool:
        """Let the stack's models, this one first, give up some host memory that they do not need; False if none has."""
        others = [budget for budget in self._all if budget is not self]
        return any(budget.free_spare() for budget in (self, *others))


class Shared(NamedTuple):
    name: str
    stack: VGPUStack
    groups: list[Group]
    storage: Storage
    worker: Worker
    states: dict[Group, GroupState]
    budget: Level0Budget


class Mover:
    def __init__(self, shared: Shared) -> None:
        self._name, self._stack, self._groups, self._storage, self._worker, self._states, self._budget = shared
