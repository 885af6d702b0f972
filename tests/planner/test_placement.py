"""Which plan is made: enumeration, pruning, ties, and the words for it."""

from __future__ import annotations

import pytest

from vblackwell.errors import InsufficientMemory
from vblackwell.planner.placement import Bounds, Choice, Lacking, Prediction, Space, make_plan
from vblackwell.units import GiB

BOUNDS = Bounds(8 * GiB, 64 * GiB)


def predicted(seconds: float, **more) -> Prediction:
    return Prediction(GiB, 2 * GiB, 0, 0, seconds, 1000, {"gpu": 0.5, "up": 0.9}, **more)


def test_only_combinations_that_mean_something():
    choices = list(Space(((8, 1), (4, 2)), states=("fp32", "8bit")).choices())
    assert len(choices) == len(set(choices))
    assert {(each.batch_size, each.accumulation_steps) for each in choices} == {(8, 1), (4, 2)}
    assert all(each.checkpointing for each in choices if each.activations == "host")
    told = list(Space(((8, 1),), updates=("device", 0.3, "host"), states=("fp32", "8bit")).choices())
    assert {each.update for each in told if each.states == "8bit"} == {"device"}
    assert {each.update for each in told if each.states == "fp32"} == {"device", 0.3, "host"}
    plain = list(Space(((8, 1),)).choices())
    assert all(each.states == "fp32" for each in plain)  # what changes numbers is not tried by itself
    assert {each.placement for each in plain} == {"resident", "streamed"}
    assert {each.placement for each in Space(((8, 1),), placements=("streamed",)).choices()} == {"streamed"}


def test_the_fastest_that_fits_and_what_the_others_lack():
    space = Space(((8, 1),), updates=("device", 0.3, "host"), activations=("level0",))
    seconds = {"device": 2.0, 0.3: 1.5, "host": 3.0}

    def predict(choice: Choice):
        if choice.placement == "resident":
            return Lacking("GPU memory", 3 * GiB)
        return choice, predicted(seconds[choice.update] + choice.checkpointing)

    plan = make_plan(space.choices(), lambda choice: 0.0, predict, BOUNDS, "measured")
    assert (plan.choice.update, plan.choice.checkpointing) == (
        0.3,
        False,
    ) and plan.prediction.tokens_per_second == 1000 / 1.5
    assert [each.step_seconds for _, each in plan.others] == sorted(each.step_seconds for _, each in plan.others)
    text = "\n".join(plan.lines())
    assert text.startswith(
        "plan: streamed, 8 sequences, 0.3 of AdamW on the CPU\n  667 tokens/s (1.5 s a step, link to the GPU busy 90%)"
    )
    assert "instead, 1.33 times as long: streamed, 8 sequences, AdamW on the GPU: 500 tokens/s" in text
    assert "not resident, 8 sequences: lacks 3.00 GiB of GPU memory" in text and "rates: measured" in text
    assert plan.as_dict()["rejected"][0]["lacked"] == {"what": "GPU memory", "num_bytes": 3 * GiB, "words": ""}


def test_what_cannot_be_the_fastest_is_not_predicted():
    asked: list[Choice] = []

    def predict(choice: Choice):
        asked.append(choice)
        return choice, predicted(2.0 if choice.checkpointing else 1.0)

    space = Space(((8, 1),), updates=("device", "host"), activations=("level0",))
    plan = make_plan(space.choices(), lambda each: (2.0 if each.checkpointing else 0.5) / 1000, predict, BOUNDS)
    assert plan.pruned == 3 and not any(each.checkpointing for each in asked)
    assert "3 more were left out" in plan.lines()[-1]


def test_among_equals_the_one_that_takes_least():
    def predict(choice: Choice):
        return choice, predicted(1.0 if choice.placement == "streamed" else 1.004)

    plan = make_plan(Space(((8, 1),)).choices(), lambda choice: 0.0, predict, BOUNDS)
    assert plan.choice.placement == "resident" and not plan.choice.checkpointing


def test_batches_are_compared_by_the_token():
    def predict(choice: Choice):
        seconds = {8: 1.0, 4: 0.6}[choice.batch_size]
        return choice, Prediction(0, 0, 0, 0, seconds, choice.batch_size * 100)

    space = Space(((8, 1), (4, 1)), placements=("resident",), checkpointing=(False,))
    assert make_plan(space.choices(), lambda choice: 0.0, predict, BOUNDS).choice.batch_size == 8


def test_if_nothing_fits_it_says_what_the_nearest_lacks():
    def predict(choice: Choice):
        return Lacking("GPU memory", GiB if choice.checkpointing else 5 * GiB)

    with pytest.raises(
        InsufficientMemory, match="nearest is resident, 8 sequences, checkpointing, which lacks 1.00 GiB of GPU memory"
    ):
        make_plan(Space(((8, 1),)).choices(), lambda choice: 0.0, predict, BOUNDS)


def test_remarks_about_clipping_and_the_disk():
    def predict(choice: Choice):
        return choice, predicted(1.0, clipped_seconds=2.0, disk_written=GiB, disk_hidden_from=4096)

    one = Space(((8, 1),), placements=("resident",), checkpointing=(False,))
    text = "\n".join(make_plan(one.choices(), lambda choice: 0.0, predict, BOUNDS).lines())
    assert "while steps clip: 500 tokens/s" in text
    assert (
        "written to the SSD: 1000 GiB in 1,000 steps" in text
        and "the disk costs nothing from 4,096 tokens a step on" in text
    )
