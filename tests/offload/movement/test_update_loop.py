"""The CPU's updates by many threads: each part once, torch's bits, and nobody at work after an error."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from vblackwell.kernels.optimizer import cpu
from vblackwell.kernels.optimizer.adamw import AdamWStep, adamw_piece
from vblackwell.kernels.optimizer.cpu import States, Sum, Update
from vblackwell.offload.movement import update_loop
from vblackwell.offload.movement.update_loop import CHUNK, MIN_PART, Loop, Stretch, make_updates
from vblackwell.offload.storage.masters import round_from_fp32

NUMBERS = AdamWStep(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=2)


def fp32_states(length: int) -> States:
    return States(torch.zeros(length), None, torch.zeros(length), torch.ones(length))


@pytest.mark.parametrize("length", [1, CHUNK + 17, MIN_PART + CHUNK + 3, 5 * MIN_PART + 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "split"])
def test_parts_have_the_bits_of_the_whole(length: int, dtype: torch.dtype | str):
    """Two parameters at once, the second in one part: clipped to other memory, then in place. Narrow weights are the
    new masters, rounded, or parts of split ones."""
    generator = torch.Generator().manual_seed(length)
    loop, factor, made = Loop(make_updates), torch.tensor(0.37), []
    narrow = torch.bfloat16 if isinstance(dtype, str) else dtype
    for count in (length, 100):
        old = fp32_states(count)
        old.weight.copy_(torch.randn(count, generator=generator))
        if dtype == "split":
            rest = torch.randint(-(2**15), 2**15, (count,), generator=generator).to(torch.int16)
            old = old._replace(weight=old.weight.to(torch.bfloat16), remainder=rest)
        gradient = torch.randn(count, generator=generator).to(narrow)
        weight = None if dtype in ("split", torch.float32) else torch.empty(count, dtype=narrow)
        new = States(*(None if each is None else torch.full_like(each, 77) for each in old))
        loop.add(Stretch(Update(new, old, gradient, factor, NUMBERS), weight))
        made.append((new, weight, old, gradient))
    loop.run()
    for new, weight, _, gradient in made:
        loop.add(Stretch(Update(new, new, gradient, None, NUMBERS), weight))
    loop.run()
    for new, weight, old, gradient in made:
        adamw_piece(*old, gradient, NUMBERS, factor=factor)
        adamw_piece(*old, gradient, NUMBERS)
        assert all(torch.equal(a, b) for a, b in zip(new, old, strict=True) if a is not None and b is not None)
        if weight is not None:
            expected = torch.empty_like(weight)
            round_from_fp32(old.weight, expected)
            assert torch.equal(weight, expected)


def test_updating_threads_compute_alone_and_others_do_not():
    """One OpenMP thread each; torch's number for the process, and for threads to come, stays what it was."""
    before = torch.get_num_threads()
    pool, count = update_loop._pool()
    at_once = threading.Barrier(count)

    def ask() -> int:
        at_once.wait()
        return torch.get_num_threads()

    assert [task.result() for task in [pool.submit(ask) for _ in range(count)]] == [1] * count
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert torch.get_num_threads() == before and later == [before]
    assert 1 <= count <= max(2, before)


def test_an_error_is_raised_when_no_thread_is_at_work():
    """What was added is forgotten, and the next update is as if nothing had happened."""
    length, loop, states = 3 * MIN_PART, Loop(make_updates), fp32_states(3 * MIN_PART)
    short = Update(states, states, torch.ones(MIN_PART), None, NUMBERS)
    loop.add(Stretch(short))
    with pytest.raises(ValueError, match="a gradient of 524288 elements"):
        loop.run()
    loop.add(Stretch(Update(states, states, torch.ones(length), None, NUMBERS)))
    loop.run()
    assert len(states.weight.unique()) == 1


def test_threads_that_start_together_leave_the_number_of_threads_as_it_was(monkeypatch: pytest.MonkeyPatch):
    """One of them must not take the other's 1 for the number of the process."""
    before, count, change = torch.get_num_threads(), 8, torch.set_num_threads

    def change_slowly(number: int) -> None:
        change(number)
        time.sleep(0.02)

    at_once = threading.Barrier(count)
    change(3)
    try:
        monkeypatch.setattr(torch, "set_num_threads", change_slowly)
        with ThreadPoolExecutor(count, initializer=update_loop._compute_alone) as pool:
            for task in [pool.submit(at_once.wait) for _ in range(count)]:
                task.result()
        with ThreadPoolExecutor(1) as fresh:
            assert fresh.submit(torch.get_num_threads).result() == 3
    finally:
        change(before)


def test_an_interrupt_waits_for_threads_that_are_at_work(monkeypatch: pytest.MonkeyPatch):
    """After it nobody writes to the caller's memory, and what nobody had begun is not begun."""
    begun, over = threading.Event(), []

    def update(*_: Any) -> None:
        begun.set()
        time.sleep(0.2)
        over.append(None)

    class Interrupted:
        def submit(self, task: Any) -> Future[None]:
            if begun.is_set():
                raise KeyboardInterrupt
            future = pool.submit(task)
            assert begun.wait()
            return future

    length, loop = 8 * MIN_PART, Loop(update)
    states = fp32_states(length)
    loop.add(Stretch(Update(states, states, torch.zeros(length), None, NUMBERS)))
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(update_loop, "_pool", lambda: (Interrupted(), 2))
        with pytest.raises(KeyboardInterrupt):
            loop.run()
        assert len(over) == 1
    assert len(over) == 1


FORKED = """
import os, signal, torch
from vblackwell.offload.measure import HostUpdate
torch.set_num_threads(2)
HostUpdate(1 << 22)()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # OpenMP's threads do not live in a child either
    signal.alarm(250)  # a thread that is waited for in vain
    HostUpdate(1 << 22)()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_has_threads_of_its_own(program: Callable[..., str]):
    program(FORKED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_have_torchs_bits_and_need_no_new_memory(dtype: torch.dtype):
    """torch makes all of a narrow addend fp32 first, a page fault every 4 KiB. Ours may fault where a thread is new
    alone.

    The copy has 36 MiB: from 32 on glibc takes memory from the system every time, below it may give again what was
    freed.
    """
    length, loop = 9 * MIN_PART + 13, Loop(cpu.add_up)
    first, *more = (torch.randn(length).to(dtype) for _ in range(3))
    total = torch.full((length,), float("nan"))  # what was there before does not count
    expected = first.float().clone()

    def add_up() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        loop.add(Sum(total, first, more[0]))
        loop.run()
        loop.add(Sum(total, None, more[1]))
        loop.run()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for each in more:
        expected.add_(each)
    add_up()
    faults = add_up()
    assert torch.equal(total, expected)
    if dtype != torch.float32:
        assert (
            faults < 4 * length // 4096 // 4
        )  # one copy of one addend, a quarter of it; torch's two are eight times that
    loop.add(Sum(total, first, None))
    loop.run()
    assert torch.equal(total, first.float())
