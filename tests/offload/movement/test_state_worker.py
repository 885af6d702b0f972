"""The order in which a model's worker runs its tasks."""

import gc
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.offload.conftest import MakeStack
from vblackwell.memory.level import Transfer
from vblackwell.offload.movement import state
from vblackwell.offload.movement.lane import WorkerQueues
from vblackwell.offload.movement.state import Worker


class Arriving(Transfer):
    """A transfer that is over when the test says so."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def wait(self) -> None:
        self.event.wait()

    def wait_on(self, stream: Any) -> None:
        raise NotImplementedError

    def done(self) -> bool:
        return self.event.is_set()


class Held:
    """A worker whose thread stands still until `go`, so that what is submitted meanwhile can be ordered."""

    def __init__(self) -> None:
        self.worker, self._gate = Worker("test"), threading.Event()
        self.ran: list[Any] = []
        self.worker.submit(self._gate.wait, 10)

    def submit(self, name: object, **how: Any) -> Future[Any]:
        return self.worker.submit(self.ran.append, name, **how)

    def go(self) -> list[Any]:
        self._gate.set()
        self.worker.drain()
        self.worker.close(lambda: self.ran.append("closed"))
        assert self.ran.pop() == "closed"
        return self.ran


def test_updates_of_the_first_groups_go_first_and_last_of_all():
    held = Held()
    for group in (5, 4, 3):
        held.submit(f"land {group}", group=group)
        held.submit(f"update {group}", group=group, postponable=True)
    held.submit("forget 5", group=5)
    assert held.go() == ["land 5", "land 4", "land 3", "update 3", "update 4", "update 5", "forget 5"]


def test_what_has_not_arrived_lets_others_go_first():
    held, arriving = Held(), Arriving()
    held.submit("land 3", group=3, arriving=arriving)
    held.submit("update 3", group=3, postponable=True)
    held.submit("update 7", group=7, postponable=True)
    held.submit("add 2", group=2)
    held.worker.submit(arriving.event.set, group=9, postponable=True)
    assert held.go() == ["add 2", "update 7", "land 3", "update 3"]


def test_a_task_without_a_group_keeps_its_place():
    held = Held()
    held.submit("update 5", group=5, postponable=True)
    held.submit("all")
    held.submit("update 1", group=1, postponable=True)
    held.submit("land 0", group=0)
    assert held.go() == ["update 5", "all", "land 0", "update 1"]


def test_a_failure_is_raised_once_and_the_rest_still_runs():
    held = Held()
    failing = held.worker.submit([].pop, group=4, postponable=True)
    later = held.submit("later", group=4)
    with pytest.raises(IndexError):
        held.go()
    assert later.done() and isinstance(failing.exception(), IndexError) and held.ran == ["later"]
    held.worker.drain()
    held.worker.close(lambda: None)


@pytest.mark.parametrize("first", ["future", "drain"])
def test_a_failure_is_raised_once_wherever_it_is_heard_first(first: str):
    held = Held()
    failing = held.worker.submit([].pop, group=4)
    with pytest.raises(IndexError):
        held.go() if first == "drain" else (held._gate.set(), failing.wait())
    failing.wait()
    held.worker.drain()
    with pytest.raises(IndexError):
        failing.result()  # whose value is wanted
    held.worker.close(lambda: None)


def test_a_transfer_that_raises_when_asked_is_the_tasks_to_hear_of():
    held = Held()

    class Broken(Arriving):
        def done(self) -> bool:
            raise OSError("the device is lost")

        def wait(self) -> None:
            self.done()

    broken = Broken()
    landing = held.worker.submit(broken.wait, group=3, arriving=broken)
    later = held.submit("later", group=3)
    with pytest.raises(OSError, match="lost"):
        held.go()
    assert isinstance(landing.exception(1), OSError) and later.done()


def test_after_the_end_nothing_waits_for_what_will_not_run():
    held = Held()
    held.go()
    with pytest.raises(RuntimeError, match="shutdown"):
        held.submit("late")
    held.worker.drain()
    assert not held.ran


def test_a_close_that_cannot_wait_leaves_the_end_to_the_worker(monkeypatch: pytest.MonkeyPatch):
    """As in a collection under a lock that a task needs."""
    monkeypatch.setattr(state, "LONGEST_CLOSE_S", 0.01)
    held, closed = Held(), threading.Event()
    held.submit("left", group=1)
    held.worker.close(lambda: (held.ran.append("closed"), closed.set()))
    assert not held.ran
    held._gate.set()
    assert closed.wait(60) and held.ran == ["left", "closed"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_submit_loses_no_other_task(when: str, monkeypatch: pytest.MonkeyPatch):
    held = Held()
    held.submit("first", group=1)
    submit = held.worker._pool.submit

    def interrupted(*args: Any) -> None:
        if when == "after":
            submit(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(held.worker._pool, "submit", interrupted)
        held.submit("interrupted", group=2)
    held.submit("last", group=3)
    assert held.go() == ["first", "last"]


def test_what_failed_holds_its_arguments_no_longer_than_its_failure():
    held, argument = Held(), torch.empty(1)
    kept = weakref.ref(argument)

    def fail(tensor: torch.Tensor) -> None:
        raise OSError("no room")

    gc.disable()  # no cycle is to be found by chance
    try:
        failing = held.worker.submit(fail, argument, group=1)
        del argument
        with pytest.raises(OSError, match="no room"):
            held.go()
        held.worker.drain()
        del failing, held
        assert kept() is None
    finally:
        gc.enable()


def test_what_the_worker_copies_by_address_outlives_its_stack(make_stack: MakeStack):
    held, stack = Held(), make_stack(64 << 10)
    queues, ranges = WorkerQueues(held.worker), [stack.reserve(f"range {level}", 4 << 10, level) for level in (0, 1)]
    memory = [weakref.ref(each.bytes.untyped_storage()) for each in ranges]
    copied = queues.copy(queues.update, [(ranges[0].address, ranges[1].address, 4 << 10)], *ranges)
    del ranges
    stack.close()
    gc.collect()
    assert all(each() is not None for each in memory) and not copied.done()
    held.go()
    copied.wait()


TASKS = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 4)), st.booleans(), st.booleans()), min_size=1, max_size=25
)


@settings(max_examples=60, deadline=None)
@given(tasks=TASKS)
def test_groups_keep_their_order_and_others_their_place(tasks: list[tuple[int | None, bool, bool]]):
    """Whatever is postponed or late: nothing is lost, a group keeps its order,
    and nothing passes a task without a group.
    """
    held, arrivals = Held(), []
    for number, (group, postponable, late) in enumerate(tasks):
        arriving = Arriving() if late and group is not None else None
        arrivals += [arriving] if arriving is not None else []
        held.submit(number, group=group, postponable=postponable and group is not None, arriving=arriving)
    for arriving in arrivals[::2]:
        arriving.event.set()
    ran = held.go()
    assert sorted(ran) == list(range(len(tasks)))
    place = {number: at for at, number in enumerate(ran)}
    for later, (group, _, _) in enumerate(tasks):
        for earlier in range(later):
            other = tasks[earlier][0]
            if group == other or group is None or other is None:
                assert place[earlier] < place[later]
