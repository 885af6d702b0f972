"""What is busy until something is over, and who gives way when a level is full."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.offload.conftest import MakeStack
from vblackwell.errors import InsufficientMemory
from vblackwell.memory.transfer import DoneTransfer, FutureTransfer
from vblackwell.offload.movement.state import InFlightQueue, Level0Budget, reserve


def test_the_oldest_is_freed_first_and_once():
    queue, freed, pending = InFlightQueue(), list[str](), Future[Any]()
    queue.add([DoneTransfer()], lambda: freed.append("first"))
    queue.add([FutureTransfer([pending])], lambda: freed.append("second"))
    queue.add([DoneTransfer()], lambda: freed.append("third"))
    queue.sweep()
    assert freed == ["first"] and len(queue) == 2  # the third waits for its turn
    pending.set_result(None)
    assert queue.free_oldest() and queue.free_oldest() and not queue.free_oldest()
    assert freed == ["first", "second", "third"]


def test_what_failed_is_freed_too():
    queue, freed, failed = InFlightQueue(), list[str](), Future[Any]()
    failed.set_exception(OSError("the disk said no"))
    queue.add([FutureTransfer([failed])], lambda: freed.append("it"))
    with pytest.raises(OSError, match="said no"):
        queue.free_oldest()
    assert freed == ["it"] and not queue


def test_room_is_asked_of_the_first_that_has_some(make_stack: MakeStack):
    stack = make_stack(64 << 10)
    held = [stack.reserve(f"held {number}", 16 << 10, 0) for number in range(4)]
    asked: list[str] = []

    def nothing() -> bool:
        asked.append("nothing")
        return False

    def some() -> bool:
        asked.append("some")
        if held:
            stack.unreserve(held.pop())
            return True
        return False

    taken = reserve(lambda: stack.reserve("wanted", 32 << 10, 0), nothing, some)
    assert asked == ["nothing", "some"] * 2 and len(held) == 2
    with pytest.raises(InsufficientMemory):
        reserve(lambda: stack.reserve("too much", 128 << 10, 0), nothing, some)
    assert not held
    stack.unreserve(taken)


def test_who_finds_no_room_on_another_level_says_so(make_stack: MakeStack):
    """A gradient that is to leave level 0 may find host memory full: to raise level 0 would not help."""
    stack = make_stack(64 << 10)
    budget = Level0Budget(stack, SimpleNamespace(take=stack.reserve))  # type: ignore[arg-type]
    with pytest.raises(InsufficientMemory, match=r"'wanted' needs .* on level 0 .*raise fast_memory"):
        budget.reserve("wanted", 128 << 10, lambda: False)

    def leave() -> bool:
        raise InsufficientMemory("host memory is full", needed_bytes=1, available_bytes=0)

    with pytest.raises(InsufficientMemory, match="host memory is full"):
        budget.reserve("wanted", 128 << 10, leave)


def test_a_model_may_be_enabled_while_others_are_asked_to_give_way(make_stack: MakeStack):
    """Another thread may, while this one waits for what a model of the stack has under way."""
    stack = make_stack(64 << 10)
    storage: Any = SimpleNamespace(take=stack.reserve)
    budgets = [Level0Budget(stack, storage) for _ in range(3)]
    come = list[Level0Budget]()

    def enable() -> bool:
        come.append(Level0Budget(stack, storage))
        return False

    for budget in budgets:
        budget.drop_weights = enable
    assert not budgets[0].free_any() and len(come) == 2
    Level0Budget.drop_idle(stack)
    assert len(come) == 5
