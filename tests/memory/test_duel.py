"""The duel of recency and frequency: against arithmetic done plainly, silent on periods and noise, above LRU on routing to experts."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from vblackwell.memory.cache import duel as module
from vblackwell.memory.cache.duel import LAG, Duel, Followers
from vblackwell.memory.cache.entry import Entry, Layout
from vblackwell.memory.cache.next_use import NextUse
from vblackwell.memory.cache.policy import LRU

pytest.importorskip("hypothesis")
from hypothesis import settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule  # noqa: E402


class Before(NextUse):
    """Next use as it is without the duel: plain LRU while no period is known."""

    def _weigh(self, entry: Entry) -> None:
        pass


class Fickle(Duel):
    """Changes its mind every few accesses, so that little can hide behind a verdict that is never given."""

    def hear(self, key: str, capacity: int) -> None:
        super().hear(key, capacity)
        self.won = self._heard // 5 % 2 == 0

    def _judge(self, whose: int) -> None:
        pass


def routing(seed: int, tokens: int, experts: int = 48) -> list[str]:
    """Two layers, two experts a token: words are few and skewed, and a word has its experts. Subjects change the words."""
    rng = random.Random(seed)
    words = [[f"{layer}.{rng.randrange(experts)}" for layer in (0, 0, 1, 1)] for _ in range(80)]
    trace: list[str] = []
    for token in range(tokens):
        subject = token // 400 * 7
        trace += words[(subject + int(rng.paretovariate(0.7)) - 1) % len(words)]
    return trace


def noise(seed: int, length: int, keys: int = 64) -> list[str]:
    rng = random.Random(seed)
    return [f"k{rng.randrange(keys)}" for _ in range(length)]


CYCLES = {
    "forward and backward": [*range(9), *reversed(range(9))],
    "loop": list(range(9)),
    "long loop": list(range(40)),
    "micro-batches and an update": ([*range(9), *reversed(range(9))] * 2 + [*range(9)]),
}


def decisions(policy: LRU, trace: list[str], capacity: int) -> list[list[str]]:
    """The order of victims before every miss, from a level of so many keys that starts empty."""
    entries = {key: Entry(key, None, 5, Layout((), 0, None, None)) for key in trace}
    inside, orders = set[str](), []
    for key in trace:
        if key not in inside:
            if len(inside) == capacity:
                order = list(policy.victims(0))
                orders.append([each.key for each in order])
                policy.discard(order[0])
                inside.discard(order[0].key)
            inside.add(key)
            policy.add(entries[key])
        policy.touch(entries[key])
    return orders


@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.parametrize("capacity", [3, 6])
def test_nothing_changes_on_a_trace_that_repeats(name: str, capacity: int):
    trace = [f"k{number}" for number in CYCLES[name]] * 8
    policy = NextUse()
    assert decisions(policy, trace, capacity) == decisions(Before(), trace, capacity)
    assert policy.periodic and policy._duel._heard <= 2 * len(CYCLES[name])  # and it is not even fed with a period


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_decided_as_lru_does(seed: int):
    policy, plain = NextUse(), Before()
    trace = noise(seed, 3000)
    assert decisions(policy, trace, 42) == decisions(plain, trace, 42)
    assert not policy.by_frequency and policy._duel._heard > 2900


@pytest.mark.parametrize(("capacity", "gain"), [(10, 0.05), (24, 0.02), (40, -0.001)])
def test_routing_goes_above_lru(capacity: int, gain: float):
    """Where nearly all keys fit, the evidence of 3,200 accesses may come too late to gain by, but costs nothing to speak of."""
    trace = routing(capacity, 800)
    recency, duelling = (len(decisions(policy, trace, capacity)) / len(trace) for policy in (LRU(), NextUse()))
    assert duelling < recency - gain  # misses


def test_the_verdict_turns_with_the_trace():
    """Frequency wins on routing, and loses on a stack walk, where the least recent is the least needed."""
    duel = Duel()
    for key in routing(0, 1200):
        duel.hear(key, 24)
    assert duel.won
    rng, at = random.Random(0), 0
    for _ in range(12_000):  # a walk over a circle: what was left is far
        at = (at + rng.choice((-1, 1))) % 400
        duel.hear(f"w{at}", 24)
    assert not duel.won


def test_evidence_of_before_a_long_period_is_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vblackwell.memory.cache.next_use.MEMORY", 100)
    policy = NextUse()
    decisions(policy, routing(0, 1000), 24)
    assert policy.by_frequency
    decisions(
        policy, [f"k{number}" for number in range(8)] * 250, 3
    )  # beyond the 16 times 94 keys after which a rhythm listens anew
    assert policy.periodic and not policy.by_frequency
    decisions(policy, ["k7", "k1"], 3)
    assert not policy.periodic and not policy.by_frequency and policy._duel._heard == 2


def test_followers_are_those_of_the_history(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HISTORY", 40)
    followers, keys = Followers(), noise(1, 300, keys=6)
    for heard in range(1, len(keys) + 1):
        followers.hear(keys[heard - 1])
        window = keys[max(0, heard - 40) : heard]
        behind: dict[str, Counter[str]] = {key: Counter() for key in window}
        for place, key in enumerate(window):
            behind[key].update(window[place + 1 : place + 1 + LAG])
        assert followers._behind == behind and followers.distinct == len(behind)
        enough = 0.3 * window.count(window[-1])
        assert followers.soon(0.3) == {key for key, count in behind[window[-1]].items() if count >= enough}
    assert Followers().soon(0.3) == frozenset()


def test_the_frequency_directory_keeps_what_plain_arithmetic_keeps():
    duel, uses, inside = Duel(), {}, set[str]()
    trace, capacity = routing(3, 150, experts=12), 7
    for now, key in enumerate(trace):
        duel.hear(key, capacity)
        uses.setdefault(key, []).append(now)
        if key not in inside:
            if len(inside) == capacity:
                score = {k: sum(2 ** ((use - now) / (10 * capacity)) for use in uses[k]) for k in inside}
                free = [k for k in inside if k not in duel.soon()] or list(inside)
                inside.discard(min(free, key=lambda k: score[k]))
            inside.add(key)
        assert {k for k in uses if duel.has(k)} == inside
        assert list(duel._recent)[-1] == key and len(duel._recent) <= capacity


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HISTORY", 50)
    duel = Duel()
    for number in range(2000):
        duel.hear(f"k{number}", 5)
        duel.hear("always", 5)
    assert len(duel._scores) <= 64 + 16 * 5 and "always" in duel._frequent
    assert len(duel._heap) == len(duel._frequent) == len(duel._recent) == 5
    assert len(duel._followers._behind) <= 50


KEYS = [f"k{i}" for i in range(10)]


def test_with_an_empty_level_0_the_others_keep_their_victims():
    policy, entries = NextUse(), {key: Entry(key, None, 5, Layout((), 0, None, None)) for key in "abc"}
    policy._duel = Fickle()
    for key, level in zip("abc", (0, 1, 1), strict=True):
        entries[key].level = level
        policy.add(entries[key])
    policy.touch(entries["a"])
    assert policy.by_frequency
    policy.discard(entries["a"])
    policy.touch(entries["b"])
    assert sorted(entry.key for entry in policy.victims(1)) == ["b", "c"]


class PolicyMachine(RuleBasedStateMachine):
    """Entries come, go, change levels, are used and announced, under a duel that changes its mind all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.policies = [NextUse(), NextUse()]  # the same history: the same answers
        self.entries: list[dict[str, Entry]] = [{}, {}]
        for policy in self.policies:
            policy._duel = Fickle()
        for number, key in enumerate(KEYS[:6]):
            self.add_one(key, number % 2, 4 + number % 3)

    @rule(key=st.sampled_from(KEYS), level=st.integers(0, 1), priority=st.integers(4, 6))
    def add(self, key: str, level: int, priority: int) -> None:
        self.add_one(key, level, priority)

    def add_one(self, key: str, level: int, priority: int) -> None:
        for policy, entries in zip(self.policies, self.entries, strict=True):
            if key not in entries:
                entries[key] = Entry(key, None, priority, Layout((), 0, None, None))
                entries[key].level = level
                policy.add(entries[key])

    @rule(key=st.sampled_from(KEYS))
    def discard(self, key: str) -> None:
        for policy, entries in zip(self.policies, self.entries, strict=True):
            if key in entries:
                policy.discard(entries.pop(key))

    @rule(key=st.sampled_from(KEYS))
    def replace(self, key: str) -> None:
        """The new bytes of a key are placed before the old ones go."""
        for policy, entries in zip(self.policies, self.entries, strict=True):
            if key in entries:
                old, entries[key] = entries[key], Entry(key, None, 5, Layout((), 0, None, None))
                policy.add(entries[key])
                policy.discard(old)

    @rule(key=st.sampled_from(KEYS), level=st.integers(0, 1))
    def shift(self, key: str, level: int) -> None:
        """Between its levels an entry may be used too, by whoever waits for it."""
        for policy, entries in zip(self.policies, self.entries, strict=True):
            if key in entries:
                policy.discard(entries[key])
                policy.touch(entries[key])
                entries[key].level = level
                policy.add(entries[key])

    @rule(some=st.lists(st.sampled_from(KEYS), min_size=1, max_size=12))
    def touch(self, some: list[str]) -> None:
        for policy, entries in zip(self.policies, self.entries, strict=True):
            for key in some:
                if key in entries:
                    entries[key].expected = False
                    policy.touch(entries[key])

    @rule(key=st.sampled_from(KEYS))
    def announce(self, key: str) -> None:
        for policy, entries in zip(self.policies, self.entries, strict=True):
            if key in entries:
                policy.touch(entries[key], accessed=False)
                entries[key].expected = True

    @rule(level=st.integers(0, 1), most=st.integers(4, 6), take=st.integers(1, 3))
    def look_at_some(self, level: int, most: int, take: int) -> None:
        """A plan that stops after some victims must leave the order whole."""
        for policy in self.policies:
            for _ in zip(range(take), policy.victims(level, most), strict=False):
                pass

    @invariant()
    def victims_are_those_that_are_there(self) -> None:
        for level in (0, 1):
            orders = [list(policy.victims(level)) for policy in self.policies]
            there = {key for key, entry in self.entries[0].items() if entry.level == level}
            assert sorted(entry.key for entry in orders[0]) == sorted(there)  # each once, nobody else
            assert [entry.priority for entry in orders[0]] == sorted(entry.priority for entry in orders[0])
            assert [entry.key for entry in orders[0]] == [entry.key for entry in orders[1]]
            if self.policies[0].by_frequency:
                newest = max(self.entries[0].values(), key=lambda each: each.last_use, default=None)
                for entry in orders[0]:  # room for what is used last, as under LRU
                    assert newest is None or entry is newest or self.policies[0].colder(entry, newest)


TestPolicy = PolicyMachine.TestCase
TestPolicy.settings = settings(max_examples=25, stateful_step_count=40, deadline=None, derandomize=True)
