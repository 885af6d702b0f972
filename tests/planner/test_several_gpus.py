"""All states divided among several GPUs: what is hidden under compute, what waits, what each sends and holds."""

from __future__ import annotations

import random

import pytest

from tests.planner.test_memory_estimate import SMALL
from vblackwell.errors import ConfigurationError
from vblackwell.machine.gpus import find_gpu
from vblackwell.planner.memory_estimate import Run, state_bytes
from vblackwell.planner.model_spec import of_config
from vblackwell.planner.several_gpus import Link, Unit, check_several, cost_of, flow, sharded_step


def test_what_compute_covers_is_hidden_and_no_more():
    draw = random.Random(5)
    for _ in range(20):
        units = [
            Unit(draw.randrange(1, 50) * 1000, draw.uniform(1, 5), draw.uniform(2, 10))
            for _ in range(draw.randrange(1, 9))
        ]
        p = draw.choice([2, 4, 8])
        link = Link(draw.choice([0.0, 0.1]), draw.choice([1e3, 1e4, 1e6]))
        total, sent, exposed = flow(units, p, "ring", link)
        moved = 3 * sum(unit.weight_bytes for unit in units) - units[-1].weight_bytes
        assert sent == pytest.approx(moved * (p - 1) / p)
        assert 0 < exposed <= total
        # The first gather and the last scatter overlap with nothing.
        ends = [cost_of(kind, units[0].weight_bytes, p).seconds(link) for kind in ("all_gather", "reduce_scatter")]
        assert exposed >= sum(ends) * (1 - 1e-9)
    assert flow([Unit(1000, 1.0, 2.0)] * 8, 4, "ring", Link(0.0, 1e18))[2] == pytest.approx(0)


def test_one_pass_by_hand():
    """Two groups on two GPUs, a byte a second: gathers of 1 s each, forwards of 2 s, backwards of 3 s.

    Gather 0 to 1; forward 1 to 3 while the next gather ends at 2; forward and backward of the last 3 to 8, the gather
    of the first group under it; its backward 8 to 11, the last one's scatter 8 to 9, and its scatter 11 to 12.
    """
    total, sent, exposed = flow([Unit(2, 2.0, 3.0)] * 2, 2, "ring", Link(0.0, 1.0))
    assert (total, sent, exposed) == (5.0, 5.0, 2.0)


def test_a_real_model_on_cards_of_a_name():
    run = Run(of_config(SMALL["llama"] | {"model_type": "llama"}, "small", 16), 16)
    trace, card = run.trace(2), find_gpu("RTX 3090")
    two, eight = (sharded_step(run, trace, 2, card, card.total_bytes, count, "ring") for count in (2, 8))
    assert two.tokens == 64 and eight.tokens == 256 and two.fits and eight.fits
    assert 0 < eight.gpu_bytes < two.gpu_bytes
    assert two.gpu_bytes - eight.gpu_bytes == pytest.approx(state_bytes(trace) * 3 / 8, abs=1)
    assert "2 such GPUs" in two.lines()[0] and "which fits" in two.lines()[1]
    assert not sharded_step(run, trace, 2, card, 1 << 20, 2, "ring").fits


def test_what_is_no_group_of_gpus_is_refused():
    with pytest.raises(ConfigurationError, match="1 GPUs"):
        check_several(1, "ring")
    with pytest.raises(ConfigurationError, match="did you mean 'mesh'"):
        check_several(2, "mesch")
