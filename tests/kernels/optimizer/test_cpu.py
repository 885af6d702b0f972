"""AdamW and sums on the CPU in C: the bits of torch's operations, which is what runs where there is no compiler."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vblackwell.kernels.optimizer import adamw, cpu
from vblackwell.kernels.optimizer.adamw import AdamWStep, Then, adamw_piece
from vblackwell.kernels.optimizer.cpu import New, States, Sum, Update

PART = 1 << 16  # elements that a thread takes at a time
NUMBERS = AdamWStep(3e-3, 0.9, 0.95, 1e-8, 0.1, 2)

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


@pytest.fixture(scope="module", params=["C", "torch"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """C, where the machine has a compiler; torch: as where it has none."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(cpu, "_library", lambda: (None, "none asked for"))
        elif not any(map(shutil.which, ("cc", "gcc", "clang"))):
            pytest.skip("there is no C compiler")
        else:
            assert cpu.why_not() == "" and cpu.library() is not None
        yield request.param


def states_of(length: int, generator: torch.Generator, *, split: bool) -> States:
    weight, exp_avg, exp_avg_sq = (torch.randn(length, generator=generator) for _ in range(3))
    remainder = torch.randint(-(2**15), 2**15, (length,), generator=generator).to(torch.int16) if split else None
    return States(weight.to(torch.bfloat16) if split else weight, remainder, exp_avg, exp_avg_sq.square())


def copied(states: States) -> States:
    return States(*(None if each is None else each.clone() for each in states))


def stepped(states: States, gradient: torch.Tensor, numbers: AdamWStep, factor: torch.Tensor | None) -> States:
    """torch's fused AdamW on whole fp32 tensors, its result split by integers."""
    weight, remainder, exp_avg, exp_avg_sq = copied(states)
    if remainder is not None:
        weight = ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)
    values = gradient.float() if factor is None else gradient.float() * factor
    adamw._fused(weight, values, exp_avg, exp_avg_sq, numbers)
    if remainder is not None:
        bits = weight.view(torch.int32)
        weight, remainder = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)
    return States(weight, remainder, exp_avg, exp_avg_sq)


def same(a: States, b: States) -> bool:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return all(torch.equal(x.view(torch.int8), y.view(torch.int8)) for x, y in pairs)


@given(
    length=st.sampled_from([1, 7, 16, 31, 1023, 1024, 4096, 4101, 65553]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    split=st.booleans(),
    clipped=st.booleans(),
    elsewhere=st.booleans(),
    first=st.integers(0, 3),
    beta1=st.sampled_from([0.9, 0.3]),
    decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_bits_are_those_of_torchs_operations(
    length: int,
    dtype: torch.dtype,
    split: bool,
    clipped: bool,
    elsewhere: bool,
    first: int,
    beta1: float,
    decay: float,
    seed: int,
):
    """Three steps. ``first``: where tensors begin in their memory: streams past the caches need 32 or 64 bytes."""
    generator = torch.Generator().manual_seed(seed)
    now = States(
        *(None if each is None else each[first:] for each in states_of(length + first, generator, split=split))
    )
    expected = copied(now)
    factor = torch.tensor(0.37) if clipped else None
    for step in (1, 2, 3):
        gradient = torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
        numbers = AdamWStep(3e-3, beta1, 0.95, 1e-8, decay, step)
        expected = stepped(expected, gradient, numbers, factor)
        was, before = now, copied(now)
        if elsewhere:
            now = States(*(None if each is None else torch.full_like(each, 77) for each in now))
        cpu.update([Update(now, was, gradient, factor, numbers)])
        assert same(now, expected)
        assert not elsewhere or same(was, before)


def poisoned(states: States) -> States:
    return States(*(None if each is None else torch.full_like(each, 77) for each in states))


FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.each_pair
@pytest.mark.parametrize("length", [1, 4096, 5003, 70000])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("step", [1, 7])
def test_a_step_and_one_more_are_two_of_which_the_second_leaves_its_weight(length: int, split: bool, step: int):
    """For every place of the weight and of the rest, in place or elsewhere, and where the weight alone is written."""
    generator, factor = torch.Generator().manual_seed(length + step), torch.tensor(0.37)
    numbers, next_numbers = AdamWStep(3e-3, 0.9, 0.95, 1e-8, 0.1, step), AdamWStep(1e-2, 0.4, 0.9, 1e-6, 0.0, step + 1)
    for index, types in enumerate(itertools.product(FLOATS, FLOATS)):
        given = states_of(length, generator, split=split)
        gradient, after = (torch.randn(length, generator=generator).to(dtype) for dtype in types)
        then, clipped = Then(after, next_numbers), factor if index % 2 else None
        first = stepped(given, gradient, numbers, clipped)
        expected = first._replace(weight=stepped(first, after, next_numbers, None).weight)
        for weight_here, rest in itertools.product((False, True), ("here", "elsewhere", "nowhere")):
            old, other = copied(given), poisoned(given)
            weight = old.weight if weight_here else other.weight
            new = New(weight) if rest == "nowhere" else (old if rest == "here" else other)._replace(weight=weight)
            cpu.update([Update(new, old, gradient, clipped, numbers, then)])
            for found, was, has_weight, has_rest in (
                (old, given, weight_here, rest == "here"),
                (other, poisoned(given), not weight_here, rest == "elsewhere"),
            ):
                weights = expected if has_weight else was
                assert same(found, States(weights.weight, *(expected if has_rest else was)[1:]))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("here", [False, True])
def test_parts_that_are_not_wanted_are_not_written(split: bool, here: bool):
    """Every choice of them, for one step and for two, of several parameters at once."""
    generator = torch.Generator().manual_seed(5)
    given = states_of(5003, generator, split=split)
    gradient, after = torch.randn(2, 5003, generator=generator).to(torch.bfloat16)
    then = Then(after, AdamWStep(3e-3, 0.9, 0.95, 1e-8, 0.1, 3))
    first = stepped(given, gradient, NUMBERS, None)
    second = first._replace(weight=stepped(first, after, then.numbers, None).weight)
    updates, checks = list[Update](), list[tuple[States, States]]()
    for wanted, following in itertools.product(itertools.product((False, True), repeat=3), (None, then)):
        old = copied(given)
        target, expected = old if here else poisoned(old), second if following else first
        parts = [part if each else None for part, each in zip(target[1:], wanted, strict=True)]
        left = given if here else poisoned(given)
        rest = [made if each else was for made, was, each in zip(expected[1:], left[1:], wanted, strict=True)]
        updates.append(Update(New(target.weight, *parts), old, gradient, None, NUMBERS, following))
        checks.append((target, States(expected.weight, *rest)))
        if not here:
            checks.append((old, given))
    cpu.update(updates)
    assert all(same(found, expected) for found, expected in checks)


def test_states_that_do_not_belong_together_are_refused():
    split, whole = (states_of(5, torch.Generator(), split=each) for each in (True, False))
    kept, gradient = copied(whole), torch.ones(5)
    with pytest.raises(ValueError, match=r"a gradient of 5 elements, and states of \[\(5,\).*, \(4,\)\]"):
        cpu.update([Update(whole, whole, gradient, None, NUMBERS, Then(torch.ones(4), NUMBERS))])
    with pytest.raises(ValueError, match="fp32 weights have none"):
        cpu.update([Update(New(whole.weight, split.remainder), whole, gradient, None, NUMBERS)])
    assert same(whole, kept)


def test_numbers_that_are_none():
    """Infinite gradients, masters that are NaN, and moments too small to be normal: as torch has them, NaN for NaN."""
    count = 2 * 1024 + 33  # the odd ones are the last of three blocks, whose others are healthy
    truth = torch.randn(count).view(torch.int32)
    truth[-33:] = torch.tensor([*ODD_BITS, 1] * 3, dtype=torch.int32)
    weight, remainder = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
    adamw.split(truth, weight, remainder, torch.empty(count, dtype=torch.int32))
    gradient = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 2.0**-24, -(2.0**-14)] * count)[:count]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for lr in (0.0, 0.1):
            ours = States(weight.clone(), remainder.clone(), torch.full((count,), 1e-40), torch.full((count,), 1e-42))
            theirs, numbers = copied(ours), AdamWStep(lr, 0.9, 0.95, 1e-8, 0.0, 1)
            adamw_piece(*theirs, gradient.to(dtype), numbers)
            cpu.update([Update(ours, ours, gradient.to(dtype), None, numbers)])
            for a, b in ((ours.weight, theirs.weight), *zip(ours[2:], theirs[2:], strict=True)):
                assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
            finite = ~ours.weight.isnan()
            assert torch.equal(ours.remainder[finite], theirs.remainder[finite])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_are_torchs(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    for length in (1, 1024, 4101):
        first, addend = (torch.randn(length, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
        total = torch.full((length,), torch.nan)
        cpu.add_up([Sum(total, first, None), Sum(kept := torch.ones(length), None, addend)])
        assert torch.equal(total, first.float()) and torch.equal(kept, torch.ones(length).add_(addend))
        cpu.add_up([Sum(total, first, addend)])
        assert torch.equal(total, first.float().add_(addend))


def test_every_half_is_widened_to_its_value():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    total = torch.empty(2**16)
    cpu.add_up([Sum(total, every, None)])
    assert torch.equal(total.isnan(), every.isnan()) and torch.equal(total.nan_to_num(), every.float().nan_to_num())


def test_other_threads_run_meanwhile(way: str):
    """A busy main thread must not be stopped for the length of an update."""
    if way == "torch":
        return  # whose operations take the lock
    length = 1 << 23
    states = States(torch.zeros(length), None, torch.zeros(length), torch.zeros(length))
    update = Update(states, states, torch.ones(length), None, AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 1))
    cpu.update([update])  # compiled, and memory made
    counted, thread = 0, threading.Thread(target=cpu.update, args=([update],))
    thread.start()
    while thread.is_alive():
        counted += 1
    # The update takes tens of milliseconds, a turn of the loop under a microsecond; with the lock held there would be a
    # few turns.
    assert counted > 1000


def test_states_of_another_length_are_refused_before_anything_is_made():
    states, good = (States(*torch.zeros(4, 5).unbind()[:1], None, *torch.zeros(2, 5).unbind()) for _ in range(2))
    with pytest.raises(ValueError, match=r"a gradient of 4 elements, and states of \[\(5,\), "):
        updates = [Update(each, each, torch.ones(n), None, NUMBERS) for each, n in ((good, 5), (states, 4))]
        cpu.update(updates)
    assert not any(each.any() for each in (*good, *states) if each is not None)


@pytest.mark.each_pair
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("split", [False, True])
def test_parts_have_the_bits_of_the_whole(threads: int, split: bool, monkeypatch: pytest.MonkeyPatch):
    """Several parameters at once, of no, one and several parts: clipped to other memory, then in place; and sums."""
    monkeypatch.setattr(cpu, "update_threads", lambda: threads)
    generator, factor = torch.Generator().manual_seed(threads), torch.tensor(0.37)
    olds = [states_of(n, generator, split=split) for n in (0, 5 * PART + 7, 100, PART, 2 * PART - 1, 3)]
    news = [States(*(None if each is None else torch.full_like(each, 77) for each in old)) for old in olds]
    gradients = [torch.randn(len(old.weight), generator=generator).to(torch.bfloat16) for old in olds]
    expected = [stepped(old, each, NUMBERS, factor) for old, each in zip(olds, gradients, strict=True)]
    three = list(zip(news, olds, gradients, strict=True))
    cpu.update([Update(new, old, gradient, factor, NUMBERS) for new, old, gradient in three])
    assert all(map(same, news, expected))
    cpu.update([Update(new, new, gradient, None, NUMBERS) for new, _, gradient in three])
    expected = [stepped(old, each, NUMBERS, None) for old, each in zip(expected, gradients, strict=True)]
    assert all(map(same, news, expected))
    totals = [torch.full((len(each),), torch.nan) for each in gradients]
    cpu.add_up([Sum(total, each, each) for total, each in zip(totals, gradients, strict=True)])
    assert all(torch.equal(total, 2 * each.float()) for total, each in zip(totals, gradients, strict=True))


def test_threads_work_during_an_update_and_end_with_it(way: str, monkeypatch: pytest.MonkeyPatch):
    if way == "torch":
        return  # whose threads are torch's
    monkeypatch.setattr(cpu, "update_threads", lambda: 5)
    states = states_of(1 << 24, torch.Generator(), split=False)
    update = Update(states, states, torch.ones(1 << 24), None, NUMBERS)

    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before, most, end = count(), 0, time.monotonic() + 60
    while most < before + 3 and time.monotonic() < end:  # on a busy machine this thread may miss all of an update
        thread = threading.Thread(target=cpu.update, args=([update],))
        thread.start()
        while thread.is_alive():
            most = max(most, count())
        thread.join()
    while count() > before and time.monotonic() < end:  # a joined thread leaves the list a little later
        time.sleep(0.001)
    assert most >= before + 3 and count() <= before  # another thread of the process may end meanwhile


def test_refused_threads_are_told_of_once(way: str, monkeypatch: pytest.MonkeyPatch):
    """The work is done by those that there are."""
    native = cpu.library()
    if way == "torch" or native is None:
        return
    cpu._tell.cache_clear()
    monkeypatch.setattr(cpu, "update_threads", lambda: 7)
    monkeypatch.setattr(cpu, "library", lambda: SimpleNamespace(add_up=lambda *args: native.add_up(*args) + 4))
    ones = torch.ones(5)
    with pytest.warns(RuntimeWarning, match=r"refused 4 of 7 threads .*ulimit -u") as told:
        for _ in range(2):
            cpu.add_up([Sum(total := torch.empty(5), ones, ones)])
    assert len(told) == 1 and torch.equal(total, 2 * ones)


def test_some_cores_are_left_to_other_threads(monkeypatch: pytest.MonkeyPatch):
    for cores, asked, expected in ((16, 16, 13), (16, 8, 8), (4, 4, 2), (2, 2, 2), (1, 1, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setattr(torch, "get_num_threads", lambda asked=asked: asked)
        assert cpu.update_threads.__wrapped__() == expected


FORKED = """
import os, signal, torch
from vblackwell.offload.measure import HostUpdate
torch.set_num_threads(2)
HostUpdate(1 << 22)()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # OpenMP's threads do not live in a child
    signal.alarm(250)  # a thread that is waited for in vain
    HostUpdate(1 << 22)()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_has_threads_of_its_own(way: str, program: Callable[..., str]):
    if way == "C":
        program(FORKED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_need_no_new_memory(way: str, dtype: torch.dtype):
    """torch makes all of a narrow addend fp32 first, a page fault every 4 KiB. Ours may fault where a thread is new
    alone.

    The copy has 36 MiB: from 32 on glibc takes memory from the system every time, below it may give again what was
    freed.
    """
    if way == "torch":
        return
    length = 9 * (1 << 20) + 13
    first, addend = (torch.randn(length).to(dtype) for _ in range(2))
    total, faults = torch.empty(length), 0
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        cpu.add_up([Sum(total, first, addend)])
        cpu.add_up([Sum(total, None, addend)])
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 4 * length // 4096 // 4  # a quarter of one copy of one addend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_callers_defaults_change_nothing(way: str, dtype: torch.dtype):
    states = states_of(5003, torch.Generator().manual_seed(0), split=True)
    gradient, numbers = torch.ones(5003, dtype=torch.bfloat16), AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0, 1)
    expected = stepped(states, gradient, numbers, None)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            assert adamw.torch_order.__wrapped__() == adamw.torch_order()
            assert way == "torch" or cpu._library.__wrapped__()[0] is not None
            cpu.update([Update(states, states, gradient, None, numbers)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(states, expected)


@pytest.mark.parametrize("count", [0, 1, 1023, 3 * 65536 + 5003])
def test_masters_are_split_as_torch_splits_them(way: str, count: int):
    """Wherever they begin, by all threads, NaN and infinity among them."""
    room = torch.randn(count + 2, generator=torch.Generator().manual_seed(count))
    for start in range(2):
        master = room[start : start + count]
        odd = torch.tensor(ODD_BITS, dtype=torch.int32)[:count]
        master[: len(odd)] = odd.view(torch.float32)
        ours, theirs = (
            (torch.zeros(count + 1, dtype=torch.bfloat16)[1:], torch.zeros(count + 3, dtype=torch.int16)[3:])
            for _ in range(2)
        )
        if not cpu.split(master, *ours):
            assert way == "torch" and not any(each.view(torch.int16).any() for each in ours)
            continue
        adamw.split(master.view(torch.int32), *theirs, torch.empty(count, dtype=torch.int32))
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(ours, theirs, strict=True))


def test_a_split_master_keeps_nan_and_infinity():
    truth = torch.tensor(ODD_BITS, dtype=torch.int32).view(torch.float32)
    weight, remainder = torch.empty(len(truth), dtype=torch.bfloat16), torch.empty(len(truth), dtype=torch.int16)
    scratch = torch.empty(len(truth), dtype=torch.int32)
    adamw.split(truth.view(torch.int32), weight, remainder, scratch)
    joined = adamw.join(weight, remainder, scratch)
    assert torch.equal(weight.isnan(), truth.isnan()) and torch.equal(joined.isnan(), truth.isnan())
    assert torch.equal(joined[~truth.isnan()], truth[~truth.isnan()])


@pytest.mark.parametrize(("cores", "threads", "few"), [(16, 1, True), (16, 6, True), (16, 7, False), (4, 1, False)])
def test_a_number_of_threads_that_holds_updates_back_is_told(
    cores: int, threads: int, few: bool, monkeypatch: pytest.MonkeyPatch
):
    """As in each process of torchrun, which sets OMP_NUM_THREADS to 1: updates are all on the GPU then."""
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cpu.update_threads.cache_clear()
    said = cpu.few_threads()
    cpu.update_threads.cache_clear()
    assert bool(said) is few and (not few or said.startswith(f"{threads} of 13 threads"))
