"""The stack against a plain dict: thousands of random operations, then several threads, with copies held back at
random.

No key is lost, no byte changed, no capacity exceeded, and the counts add up.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
import torch

from tests.delay import set_transfer_delay
from tests.memory.conftest import random_bytes
from vblackwell.errors import InsufficientMemory, StaleTensor
from vblackwell.machine.limits import default_disk_path
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.disk import DiskLevel
from vblackwell.memory.host import HostLevel
from vblackwell.memory.level import DeviceLevel
from vblackwell.units import KiB

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule  # noqa: E402

KEYS = [f"k{i}" for i in range(12)]
SIZES = [1, 500, 4096, 5000, 12_000, 20_000]
keys = st.sampled_from(KEYS)
sizes = st.sampled_from(SIZES)
priorities = st.integers(0, 10)
seeds = st.integers(0, 2**16)


def tiny_stack(policy: str, promotion: str) -> VGPUStack:
    disk = DiskLevel(default_disk_path(), 56 * KiB, piece_bytes=4 * KiB, threads=2)
    return VGPUStack([DeviceLevel("cpu", 24 * KiB), HostLevel(32 * KiB), disk], policy=policy, promotion=promotion)


class StackMachine(RuleBasedStateMachine):
    """One thread; held tensors, borrows and reservations live on between the steps."""

    held = Bundle("held")
    ranges = Bundle("ranges")
    policy = "lru"
    promotion = "direct"

    def __init__(self) -> None:
        super().__init__()
        self.stack = tiny_stack(self.policy, self.promotion)
        self.model: dict[str, torch.Tensor] = {}
        self.accesses = 0
        self.names = 0

    def find(self, key: str) -> torch.Tensor:
        self.accesses += 1
        return self.stack.access(key)

    def snapshot(self) -> dict[str, int]:
        return {key: self.stack.level_of(key) for key in self.stack}

    @rule(key=keys, size=sizes, priority=priorities, seed=seeds, take=st.booleans())
    def register(self, key: str, size: int, priority: int, seed: int, take: bool) -> None:
        value, before = random_bytes(size, seed), self.snapshot()
        try:
            self.stack.register(key, value.clone(), priority=priority, take=take)
        except InsufficientMemory:
            assert self.snapshot() == before  # nothing moved
        else:
            self.model[key] = value

    @rule(key=keys)
    def access(self, key: str) -> None:
        if key in self.model:
            assert torch.equal(self.find(key), self.model[key])

    @rule(target=held, key=keys)
    def hold(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (self.find(key), self.model[key]) if key in self.model else None

    @rule(pair=consumes(held))
    def let_go(self, pair: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if pair is not None:
            assert torch.equal(*pair)  # valid to the end, whatever happened to the key

    @rule(key=keys, other=keys, level=st.integers(0, 2))
    def borrow(self, key: str, other: str, level: int) -> None:
        if key in self.model and other in self.model:
            with self.stack.borrow(key) as value:
                self.accesses += 1
                self.find(other)
                self.shift(other, level)
                assert torch.equal(value, self.model[key])

    @rule(key=keys, seed=seeds)
    def update(self, key: str, seed: int) -> None:
        if key in self.model:
            value = random_bytes(len(self.model[key]), seed)
            try:
                self.stack.update(key, value)
            except InsufficientMemory:
                pass  # the old bytes are held, and there is no room for the new ones next to them
            else:
                self.model[key] = value

    @rule(key=keys)
    def remove(self, key: str) -> None:
        if self.model.pop(key, None) is not None:
            self.stack.remove(key)

    @rule(key=keys, level=st.integers(0, 2))
    def shift(self, key: str, level: int) -> None:
        if key in self.model:
            before = self.snapshot()
            try:
                self.stack.move(key, level)
            except (InsufficientMemory, StaleTensor):
                assert self.snapshot() == before
            else:
                assert self.stack.level_of(key) == level

    @rule(some=st.lists(keys, max_size=4))
    def prefetch(self, some: list[str]) -> None:
        self.stack.prefetch([key for key in some if key in self.model])
        self.stack._mover.submit(int).result()  # one thread here: the race is the other test's

    @rule(target=ranges, size=sizes, level=st.integers(0, 2), seed=seeds)
    def reserve(self, size: int, level: int, seed: int):
        before = self.snapshot()
        self.names += 1
        try:
            reservation = self.stack.reserve(f"range{self.names}", size, level)
        except InsufficientMemory:
            assert self.snapshot() == before
            return None
        content = random_bytes(size, seed)
        self.stack.write(reservation, content).wait()
        return reservation, content

    @rule(pair=consumes(ranges))
    def unreserve(self, pair) -> None:
        if pair is not None:
            out = torch.zeros_like(pair[1])
            self.stack.read(pair[0], out).wait()
            assert torch.equal(out, pair[1])
            self.stack.unreserve(pair[0])

    @invariant()
    def adds_up(self) -> None:
        stats = self.stack.get_stats()["levels"]
        for level in stats:
            assert 0 <= level["used_bytes"] <= level["peak_bytes"] <= level["capacity_bytes"]
            assert level["evictions"] <= level["demotions"]
        assert sum(level["hits"] for level in stats) == self.accesses
        assert stats[0]["hits"] + stats[0]["misses"] == self.accesses
        assert sorted(self.stack.keys()) == sorted(self.model)
        for number, level in enumerate(self.stack.levels):
            entries = [entry for entry in self.stack._entries.values() if entry.level == number]
            kept = [entry.extent for entry in (*entries, *self.stack._placement.dropped) if entry.extent is not None]
            live = set(kept) | {r.extent for r in self.stack._reservations.values()}
            assert {extent for extent in live if extent in level._live} == level._live  # nothing leaked
            assert level.used_bytes == sum(extent.held_bytes for extent in level._live)

    def teardown(self) -> None:
        for key, value in self.model.items():
            assert torch.equal(self.stack.access(key), value)
        self.stack.close()


class NextUseMachine(StackMachine):
    policy = "next_use"
    promotion = "gradual"


_SETTINGS = settings(
    max_examples=50, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestLRUStack = StackMachine.TestCase
TestLRUStack.settings = _SETTINGS
TestNextUseStack = NextUseMachine.TestCase
TestNextUseStack.settings = _SETTINGS


@pytest.mark.each_value
@pytest.mark.parametrize("policy", ["lru", "next_use"])
@pytest.mark.parametrize("delayed", [False, True])
def test_several_threads(policy: str, delayed: bool, no_delay_left: None):
    """Each thread owns some keys, which it changes, and reads everybody's shared ones;
    prefetches race with all of it.
    """
    stack = tiny_stack(policy, "direct")
    shared = {f"shared{i}": random_bytes(5000, seed=i) for i in range(6)}
    for i, (key, value) in enumerate(shared.items()):
        stack.register(key, value, priority=3 + i)
    if delayed:
        rng = random.Random(0)
        set_transfer_delay(lambda kind: time.sleep(rng.random() * 2e-3))
    failures: list[BaseException] = []
    accesses = [0] * 4
    start = threading.Barrier(4)

    def work(number: int) -> None:
        rng, mine, held = random.Random(number), {}, []
        start.wait()
        try:
            for step in range(120 if delayed else 400):
                key, action = f"mine{number}.{rng.randrange(3)}", rng.random()
                if action < 0.15:
                    value = random_bytes(rng.choice([100, 3000, 6000]), seed=number * 10_000 + step)
                    try:
                        stack.register(key, value, priority=rng.randrange(11))
                        mine[key] = value
                    except InsufficientMemory:
                        pass
                elif action < 0.25 and key in mine:
                    value = random_bytes(len(mine[key]), seed=step)
                    try:
                        stack.update(key, value)
                        mine[key] = value
                    except InsufficientMemory:
                        pass
                elif action < 0.3 and key in mine:
                    stack.remove(key)
                    del mine[key]
                elif action < 0.4:
                    stack.prefetch(rng.sample(sorted(shared), 2))
                elif action < 0.5:
                    with contextlib.suppress(InsufficientMemory, StaleTensor):
                        stack.move(rng.choice(sorted(shared)), rng.randrange(3))
                elif action < 0.6 and key in mine:
                    held = [(stack.access(key), mine[key]), *held[:1]]
                    accesses[number] += 1
                elif action < 0.65:
                    with stack.borrow(other := rng.choice(sorted(shared))) as value:
                        assert torch.equal(value, shared[other]), other
                    accesses[number] += 1
                else:
                    other = rng.choice([*sorted(shared), *mine])
                    expected = shared.get(other, mine.get(other))
                    assert torch.equal(stack.access(other), expected), other
                    accesses[number] += 1
                for tensor, expected in held:
                    assert torch.equal(tensor, expected)
                for level in stack.levels:
                    assert level.used_bytes <= level.capacity_bytes
            for key, value in mine.items():
                assert torch.equal(stack.access(key), value), key
                accesses[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    stack._mover.submit(int).result()
    stats = stack.get_stats()["levels"]
    assert sum(level["hits"] for level in stats) == stats[0]["hits"] + stats[0]["misses"] == sum(accesses)
    for key, value in shared.items():
        assert torch.equal(stack.access(key), value)
    stack.close()
