"""Forecasts of accesses: tables of successors, and policies on traces against Belady's optimum."""

import random

import pytest

from vblackwell.errors import ConfigurationError
from vblackwell.memory.cache.predictor import AccessPredictor
from vblackwell.memory.cache.replay import POLICIES, replay

SWEEP = [f"layer{i}" for i in range(12)]
TRAINING = (SWEEP + SWEEP[::-1]) * 12
GENERATION = SWEEP * 20


def test_periods_and_branches_are_foretold():
    predictor = AccessPredictor(order=2)
    for key in TRAINING:
        predictor.hear(key)
    assert predictor.predict_next(["layer3", "layer4"], 3) == ["layer5", "layer6", "layer7"]
    assert predictor.predict_next(["layer4", "layer3"], 3) == ["layer2", "layer1", "layer0"]  # a context tells the way
    assert predictor.predict_next(["layer10", "layer11", "layer11"], 2) == ["layer10", "layer9"]
    assert (
        predictor.predict_next(["never"], 3)
        == []
        == AccessPredictor().predict_next(["a"], 2)
        == predictor.predict_next([], 1)
    )
    for arguments in ({"order": 0}, {"order": 3, "history": 3}):
        with pytest.raises(ConfigurationError):
            AccessPredictor(**arguments)
    with pytest.raises(ConfigurationError):
        predictor.predict_next(["layer0"], -1)


def test_what_is_old_is_forgotten_and_tables_stay_bounded():
    predictor, fresh = AccessPredictor(order=2, history=40), AccessPredictor(order=2)
    keys = [random.Random(0).choice("abcdef") for _ in range(500)]
    for key in keys:
        predictor.hear(key)
    for key in keys[-40:]:
        fresh.hear(key)
    assert [dict(table) for table in predictor._tables] == [dict(table) for table in fresh._tables]


def brute_force(trace, capacity):
    """Most hits of demand alone, over every choice of victims."""
    states = {frozenset(): 0}
    for key in trace:
        after = {}
        for held, hits in states.items():
            if key in held:
                choices = [(held, hits + 1)]
            elif len(held) < capacity:
                choices = [(held | {key}, hits)]
            else:
                choices = [(held - {gone} | {key}, hits) for gone in held]
            for state, count in choices:
                after[state] = max(after.get(state, -1), count)
        states = after
    return max(states.values())


def test_belady_is_the_optimum_and_nobody_is_above_it():
    chance = random.Random(1)
    for capacity in (2, 3):
        trace = [chance.choice("abcdef") for _ in range(40)]
        best = replay(trace, capacity, "belady").hit_rate
        assert best * len(trace) == pytest.approx(brute_force(trace, capacity))
        assert all(replay(trace, capacity, policy).hit_rate <= best for policy in POLICIES)


@pytest.mark.parametrize("trace", [TRAINING, GENERATION], ids=["training", "generation"])
def test_periodic_traces(trace):
    """Within the warm-up of two periods of the optimum, above LRU, and without waiting once the link has a transfer's time an access."""
    found = {policy: replay(trace, 8, policy, compute=1.0) for policy in POLICIES}
    warm_up = 2 * 24 / len(trace)
    assert found["next_use"].hit_rate >= found["belady"].hit_rate - warm_up
    # Least recent is the optimum where a trace turns on its heel; where it begins again, it is the worst.
    assert found["lru"].hit_rate == (found["belady"].hit_rate if trace is TRAINING else 0)
    assert min(found["next_use"].hit_rate, found["predictor"].hit_rate) > found["lru"].hit_rate - warm_up
    assert trace is TRAINING or found["predictor"].hit_rate > found["belady"].hit_rate - warm_up
    assert found["next_use"].stall < found["lru"].stall / 3


def test_stall_of_a_trace_by_hand():
    assert replay(["a", "b", "a", "b"], 2, "lru").stall == 2  # two first times, a transfer each
    assert replay(["a", "b", "c"] * 3, 1, "lru").stall == 9
    assert replay(["a", "b"] * 2, 2, "belady", compute=2.0).stall == 1  # b came while a computed
    for arguments in (([], 1, "lru"), (["a"], 0, "lru"), (["a"], 1, "fifo")):
        with pytest.raises(ConfigurationError):
            replay(*arguments)
