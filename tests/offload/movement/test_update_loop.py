"""The CPU's update of whole masters: torch's bits, whichever way the loop runs,
and the interpreter's lock left to others.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vblackwell.kernels.optimizer import adamw
from vblackwell.offload.movement import update_loop
from vblackwell.offload.movement.state import Hyper
from vblackwell.offload.movement.update_loop import CHUNK, MIN_PART, MasterLoop, SumLoop
from vblackwell.offload.storage.masters import round_from_fp32

NUMBERS = Hyper(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def reference(
    master: torch.Tensor,
    moments: list[torch.Tensor],
    gradient: torch.Tensor,
    step: int,
    factor: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """torch's fused AdamW on the whole tensors; the weight of ``dtype`` that goes with the new master."""
    values = gradient.float() if factor is None else gradient.float() * factor
    torch._fused_adamw_(
        [master],
        [values],
        [moments[0]],
        [moments[1]],
        [],
        [torch.tensor(float(step))],
        amsgrad=False,
        maximize=False,
        **vars(NUMBERS),
    )
    weight = torch.empty(len(master), dtype=dtype)
    round_from_fp32(master, weight)
    return weight


@pytest.mark.parametrize("way", ["compiled", "plain"])
@given(
    length=st.sampled_from([1, 7, 16, 31, 4096, CHUNK - 1, CHUNK, CHUNK + 17, MIN_PART + CHUNK + 3]),
    wide=st.booleans(),
    clipped=st.lists(st.booleans(), min_size=3, max_size=3),
    in_place=st.booleans(),
    seed=st.integers(0, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    elsewhere=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_bits_are_torchs(
    way: str,
    length: int,
    wide: bool,
    clipped: list[bool],
    in_place: bool,
    seed: int,
    dtype: torch.dtype,
    elsewhere: bool,
):
    """fp32: the weight is its own master. ``elsewhere``: the new states are written to other memory."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(length, generator=generator)
    moments = [torch.zeros(length), torch.zeros(length)]
    ours, ours_moments = master.clone(), [torch.zeros(length), torch.zeros(length)]
    weight, step, loop = torch.empty(length, dtype=dtype), torch.zeros(()), MasterLoop()
    with pytest.MonkeyPatch.context() as patch:
        if way == "plain":
            patch.setattr(update_loop, "compiled", lambda loop: loop)
        for number, clip in enumerate(clipped, 1):
            gradient = torch.randn(length, generator=generator)
            gradient = gradient if wide else gradient.to(dtype)
            factor = torch.tensor(0.37) if clip else None
            expected = reference(master, moments, gradient, number, factor, dtype)
            if in_place and not wide and dtype != torch.float32:  # the gradient landed where the weight was
                weight.copy_(gradient)
                gradient = weight
            step.add_(1)
            old: list[torch.Tensor | None] = [None] * 3
            if elsewhere:
                old = [ours, *ours_moments]
                ours, *ours_moments = (torch.full_like(each, torch.nan) for each in (ours, *ours_moments))
            narrow = None if dtype == torch.float32 else weight
            loop.add(ours, narrow, gradient, *ours_moments, step, factor, NUMBERS, old)
            loop.run()
            assert torch.equal(ours, master) and torch.equal(ours if narrow is None else weight, expected)
            assert all(map(torch.equal, ours_moments, moments))


ODD_BITS = [
    0x7FFFFFFF,
    -1,
    0x7F800001,
    0x7F808000,
    -0x7FFFFF,
    0x7FC00000,
    0x7F800000,
    -0x800000,
    0x7F7FFFFF,
    0x7F7F8000,
]


@pytest.mark.parametrize("odd", [ODD_BITS, ODD_BITS[:1], ODD_BITS[1:2], ODD_BITS[6:8]])
@pytest.mark.parametrize("way", ["compiled", "plain"])
def test_a_nan_master_stays_a_nan(way: str, odd: list[int], monkeypatch: pytest.MonkeyPatch):
    """A gradient of zero, no decay and no rate: the master keeps its bits. The odd ones are the last of three chunks,
    whose others are healthy."""
    if way == "plain":
        monkeypatch.setattr(update_loop, "compiled", lambda loop: loop)
    master = torch.randn(2 * CHUNK + 1000)
    master[-len(odd) :] = torch.tensor(odd, dtype=torch.int32).view(torch.float32)
    was, weight, loop = master.clone(), torch.zeros(len(master), dtype=torch.bfloat16), MasterLoop()
    numbers = replace(NUMBERS, lr=0.0, weight_decay=0.0)
    states = [torch.zeros_like(master), torch.ones_like(master)]
    loop.add(master, weight, torch.zeros_like(weight), *states, torch.ones(()), None, numbers)
    loop.run()
    assert torch.equal(master.isnan(), was.isnan()) and torch.equal(weight.isnan(), was.isnan())
    finite = ~was.isnan()
    expected = torch.empty_like(weight)
    round_from_fp32(was, expected)
    assert torch.equal(weight[finite], expected[finite]) and torch.equal(master[finite], was[finite])


def test_a_split_master_keeps_nan_and_infinity():
    truth = torch.tensor(ODD_BITS, dtype=torch.int32).view(torch.float32)
    weight, remainder = torch.empty(len(truth), dtype=torch.bfloat16), torch.empty(len(truth), dtype=torch.int16)
    scratch = torch.empty(len(truth), dtype=torch.int32)
    adamw.split(truth.view(torch.int32), weight, remainder, scratch)
    joined = adamw.join(weight, remainder, scratch)
    assert torch.equal(weight.isnan(), truth.isnan()) and torch.equal(joined.isnan(), truth.isnan())
    assert torch.equal(joined[~truth.isnan()], truth[~truth.isnan()])


def test_the_loop_is_compiled_and_lets_other_threads_run():
    """A busy main thread must not be stopped for the length of an update, nor stop it at every operation."""
    assert isinstance(update_loop.compiled(update_loop._adamw), torch.jit.ScriptFunction)
    length = 1 << 23
    tensors = [torch.zeros(length) for _ in range(3)]
    weight, gradient = torch.zeros(length, dtype=torch.bfloat16), torch.ones(length, dtype=torch.bfloat16)
    loop, step = MasterLoop(), torch.ones(())
    arguments = (tensors[0], weight, gradient, *tensors[1:], step, None)

    def update() -> None:
        loop.add(*arguments, NUMBERS)
        loop.run()

    update()  # compiled, and memory made
    counted = 0
    thread = threading.Thread(target=update)
    thread.start()
    while thread.is_alive():
        counted += 1
    # The update takes tens of milliseconds, a turn of the loop under a microsecond; with the lock held there would be a
    # few turns.
    assert counted > 1000


def test_a_torch_that_does_not_compile_it_is_named(monkeypatch: pytest.MonkeyPatch):
    def refuse(function: Any) -> Any:
        raise NotImplementedError("no TorchScript\nany more")

    monkeypatch.setattr(torch.jit, "script", refuse)
    with pytest.warns(RuntimeWarning, match=r"\(NotImplementedError: no TorchScript any more\)"):
        assert update_loop.compiled.__wrapped__(update_loop._adamw) is update_loop._adamw


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
    length, loop, step = 3 * MIN_PART, MasterLoop(), torch.ones(())
    tensors = [torch.zeros(length) for _ in range(3)]
    weight, gradient = torch.zeros(length, dtype=torch.bfloat16), torch.ones(length, dtype=torch.bfloat16)
    loop.add(tensors[0], weight, gradient[:MIN_PART], *tensors[1:], step, None, NUMBERS)  # too short for the others
    with pytest.raises(RuntimeError):
        loop.run()
    tensors = [torch.zeros(length) for _ in range(3)]
    loop.add(tensors[0], weight, gradient, *tensors[1:], step, None, NUMBERS)
    loop.run()
    assert len(tensors[0].unique()) == 1


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

    length, loop = 8 * MIN_PART, MasterLoop()
    tensors = [torch.zeros(length) for _ in range(3)]
    weight = torch.zeros(length, dtype=torch.bfloat16)
    loop.add(tensors[0], weight, weight, *tensors[1:], torch.ones(()), None, NUMBERS)
    monkeypatch.setattr(MasterLoop, "_work", update)
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(update_loop, "_pool", lambda: (Interrupted(), 2))
        with pytest.raises(KeyboardInterrupt):
            loop.run()
        assert len(over) == 1
    assert len(over) == 1


FORKED = """
import os, signal, torch, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from vblackwell.offload.measure import HostUpdate
torch.set_num_threads(2)
HostUpdate()()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # OpenMP's threads do not live in a child either
    signal.alarm(250)  # a thread that is waited for in vain
    HostUpdate()()
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
    length, loop = 9 * MIN_PART + 13, SumLoop()
    first, *more = (torch.randn(length).to(dtype) for _ in range(3))
    total = torch.full((length,), float("nan"))  # what was there before does not count
    expected = first.float().clone()

    def add_up() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        loop.add(total, first, more[0])
        loop.run()
        loop.add(total, None, more[1])
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
    loop.add(total, first, None)
    loop.run()
    assert torch.equal(total, first.float())
