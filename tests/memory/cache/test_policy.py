"""The order of victims: LRU with priorities, and next use against Belady's optimum on traces that repeat."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from vblackwell.memory.cache.entry import Entry, Layout, default_priority
from vblackwell.memory.cache.policy import LRU, NextUse, Rhythm
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.level import Level
from vblackwell.units import KiB

EMPTY = Layout((), 0, None)


def entry(key: str, priority: int = 5, level: int = 0) -> Entry:
    made = Entry(key, priority, EMPTY)
    made.level = level
    return made


@pytest.mark.parametrize("policy", [LRU, NextUse])
def test_order_is_priority_then_recency(policy: type[LRU]):
    """Against sorting, while entries come, go, sink, rise and are used at random."""
    rng, chosen, alive, used = random.Random(1), policy(), [], {}
    for step in range(3000):
        action = rng.random()
        if action < 0.2 or not alive:
            new = entry(f"k{step}", rng.randrange(11), rng.randrange(3))
            chosen.add(new)
            alive.append(new)
            used[new] = step
        elif action < 0.3:
            gone = alive.pop(rng.randrange(len(alive)))
            chosen.discard(gone)
        elif action < 0.5:
            moved = rng.choice(alive)
            chosen.discard(moved)
            moved.level = rng.randrange(3)
            chosen.add(moved)
        else:
            touched = rng.choice(alive)
            chosen.touch(touched)
            used[touched] = step
        if step % 50 == 0 and not (isinstance(chosen, NextUse) and chosen.cycle):
            for level in range(3):
                there = sorted((e for e in alive if e.level == level), key=lambda e: (e.priority, used[e]))
                assert list(chosen.victims(level)) == there
                assert list(chosen.victims(level, 4)) == [e for e in there if e.priority <= 4]
                than = alive[0]
                colder = [e for e in there if used[e] < used[than]]
                assert list(chosen.victims(level, 10, than)) == colder


def rhythm_of(trace: str) -> tuple[list[str] | None, int]:
    rhythm = Rhythm()
    for key in trace:
        rhythm.hear(key)
    return rhythm.cycle, rhythm.position


@pytest.mark.parametrize("cycle", ["ab", "abc", "abccba", "aab", "abacabad", "abcdeedcbaabcdeedcbaxyz"])
def test_a_period_is_found_after_two_rounds_and_kept(cycle: str):
    for rounds in (2, 3, 4, 17):
        for extra in range(len(cycle)):
            found, position = rhythm_of(cycle * rounds + cycle[:extra])
            assert found is not None and "".join(found) == cycle and position == extra


def test_no_period_before_two_rounds_and_none_after_a_surprise():
    assert rhythm_of("abcdefabcde") == (None, 0)
    assert rhythm_of("abc" * 5 + "x")[0] is None
    assert rhythm_of("abc" * 5 + "ac")[0] is None
    assert "".join(rhythm_of("abc" * 5 + "x" + "abcx" * 2)[0] or []) in ("xabc", "abcx")


def test_an_irregular_start_does_not_hide_the_period():
    rng = random.Random(0)
    start = "".join(rng.choice("abcdef") for _ in range(100))
    assert sorted(rhythm_of(start + "abcdef" * 60)[0] or []) == list("abcdef")


def test_random_traces_have_no_period():
    rng = random.Random(3)
    rhythm, wrong = Rhythm(), 0
    for _ in range(20_000):
        rhythm.hear(rng.choice("abcdefghij"))
        wrong += rhythm.cycle is not None
    assert wrong < 1000  # a double letter now and then looks like a rhythm for a moment


def belady_misses(trace: list[str], start: list[str], room: int) -> int:
    """Misses of the optimum with bypass: a key whose next use is the furthest of all does not come in."""
    inside, misses = set(start), 0
    for now, key in enumerate(trace):
        if key in inside:
            continue
        misses += 1
        following = {k: next((i for i in range(now + 1, len(trace)) if trace[i] == k), 10**9) for k in inside | {key}}
        if len(inside) == room:
            furthest = max(following, key=lambda k: following[k])
            inside.discard(furthest)
            if furthest == key:
                continue
        inside.add(key)
    return misses


def stack_of(make_level: Callable[..., Level], room: int, keys: int, policy: str) -> VGPUStack:
    levels = [make_level("arena", room * 4 * KiB), make_level("host", keys * 4 * KiB)]
    stack = VGPUStack(levels, policy=policy)
    for i in range(keys):
        stack.register(f"k{i}", torch.full((KiB,), float(i)), priority=5)
    return stack


TRACES = {
    "forward and backward": [*range(10), *reversed(range(10))],
    "loop": list(range(9)),
    "two micro-batches, then an update": [*range(7), *reversed(range(7)), *range(7), *reversed(range(7)), 7, 8, 9],
}


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("room", [3, 5])
def test_next_use_is_belady_on_a_trace_that_repeats(make_level: Callable[..., Level], name: str, room: int):
    cycle, rounds = [f"k{i}" for i in TRACES[name]], 6
    stack = stack_of(make_level, room, 10, "next_use")
    for key in cycle * 3:  # two rounds to learn, one to settle
        stack.access(key)
    inside = [key for key in stack if stack.level_of(key) == 0]
    before = stack.get_stats()["levels"][0]["misses"]
    for key in cycle * rounds:
        stack.access(key)
    misses = stack.get_stats()["levels"][0]["misses"] - before
    # the future goes on beyond what is counted, for both
    optimum = belady_misses(cycle * (rounds + 3), inside, room) - belady_misses_tail(cycle, inside, room, rounds)
    assert misses == optimum
    stack.close()


def belady_misses_tail(cycle: list[str], inside: list[str], room: int, rounds: int) -> int:
    """Misses of the optimum in the last three of ``rounds + 3`` rounds: it is periodic too by then."""
    longer = belady_misses(cycle * (rounds + 6), inside, room)
    return longer - belady_misses(cycle * (rounds + 3), inside, room)


def test_lru_is_hopeless_on_a_loop_and_next_use_is_not(make_level: Callable[..., Level]):
    hits = {}
    for policy in ("lru", "next_use"):
        stack = stack_of(make_level, 5, 9, policy)
        for _ in range(20):
            for i in range(9):
                stack.access(f"k{i}")
        hits[policy] = stack.get_stats()["levels"][0]["hits"]
        stack.close()
    assert hits["lru"] == 0 and hits["next_use"] > 60


def test_next_use_falls_back_to_lru_the_moment_the_trace_breaks():
    policy, entries = NextUse(), {key: entry(key) for key in "abcdef"}
    for key in "abcdef":
        policy.add(entries[key])
    for key in "abcdef" * 4 + "abc":
        policy.touch(entries[key])
    assert policy.cycle is not None
    assert [e.key for e in policy.victims(0)] == list("cbafed")  # d comes next, c last
    policy.touch(entries["f"])  # d was expected
    assert policy.cycle is None
    assert [e.key for e in policy.victims(0)] == list("deabcf")


def test_announced_entries_stay_victims_of_next_use():
    """A prefetch changes the recency of an entry, and must not lose it."""
    policy, entries = NextUse(), {key: entry(key) for key in "abcd"}
    for key in "abcd":
        policy.add(entries[key])
    for key in "abcd" * 4:
        policy.touch(entries[key])
    policy.touch(entries["b"], accessed=False)
    assert sorted(e.key for e in policy.victims(0)) == list("abcd")
    assert [e.key for e in policy.victims(0)][0] == "d"


def test_a_replaced_entry_is_a_victim_when_the_period_is_found():
    """A stack adds the new entry of a key before it discards the old one."""
    policy, entries = NextUse(), {key: entry(key) for key in "abc"}
    for key in "abc":
        policy.add(entries[key])
    old, entries["b"] = entries["b"], entry("b")
    policy.add(entries["b"])
    policy.discard(old)
    for key in "acac":
        policy.touch(entries[key])
    assert policy.cycle is not None
    assert [e.key for e in policy.victims(0)] == list("bca")


def test_default_priorities():
    names = {
        "model.embed_tokens.weight": 10, "transformer.wte.weight": 10, "lm_head.weight": 10,
        "model.layers.0.self_attn.q_proj.weight": 7, "h.0.attn.c_attn.weight": 7,
        "model.layers.0.mlp.gate_proj.weight": 5, "h.0.mlp.c_fc.weight": 5, "ffn": 5, "whatever": 5,
        "model.layers.0.input_layernorm.weight": 3, "h.0.ln_1.weight": 3,
        "model.layers.0.post_attention_layernorm.weight": 3,
    }  # fmt: skip
    assert {name: default_priority(name) for name in names} == names


def test_what_is_stale_in_the_order_by_next_use_stays_few_and_unseen():
    policy, entries = NextUse(), {key: entry(key) for key in "abc"}
    for key in "abc":
        policy.add(entries[key])
    for _ in range(200):
        for key in "abc":
            policy.touch(entries[key])
    assert len(policy._heaps[entries["a"].seat]) <= 2 * 3 + 64
    for _ in range(2):
        assert [e.key for e in policy.victims(0)] == list("cba")
