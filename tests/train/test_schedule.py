"""The learning rate's schedule and the loss scaler."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from vblackwell.train.trainer import MIN_SCALE, LossScaler, Schedule


# A ratio is 0 or one that a rate survives: below 1e-12 of a small peak, products leave the range of floats.
@given(st.integers(1, 500), st.integers(0, 100), st.floats(1e-6, 1.0), st.just(0.0) | st.floats(1e-12, 1.0))
def test_schedule_rises_to_the_peak_and_falls_to_the_floor(total, warmup, peak, ratio):
    schedule = Schedule(peak, peak * ratio, min(warmup, total - 1), total)
    rates = [schedule.learning_rate(step) for step in range(total)]
    top = schedule.warmup_steps
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates if ratio > 0)
    slack = peak * 1e-12  # floor + (peak - floor) rounds
    assert all(later >= sooner - slack for sooner, later in zip(rates[:top], rates[1 : top + 1], strict=True))
    assert all(later <= sooner + slack for sooner, later in zip(rates[top:], rates[top + 1 :], strict=False))
    assert math.isclose(rates[top], peak, rel_tol=1e-12)
    if total - 1 > top:
        assert math.isclose(rates[-1], peak * ratio, rel_tol=1e-9, abs_tol=1e-15)


@given(st.lists(st.booleans(), max_size=200))
def test_scaler_halves_on_overflow_and_stays_a_power_of_two(history):
    scaler = LossScaler(2.0**8, growth_interval=3)
    for overflowed in history:
        before = scaler.scale
        scaler.update(overflowed=overflowed)
        assert math.frexp(scaler.scale)[0] == 0.5 and scaler.scale >= MIN_SCALE
        assert scaler.scale == max(MIN_SCALE, before / 2) if overflowed else scaler.scale in (before, before * 2)
    other = LossScaler(**json.loads(json.dumps(asdict(scaler))))
    for overflowed in (False, False, True, False):
        scaler.update(overflowed=overflowed)
        other.update(overflowed=overflowed)
        assert other.scale == scaler.scale


def test_scaler_grows_after_its_interval():
    scaler = LossScaler(4.0, growth_interval=2)
    scales = []
    for _ in range(4):
        scaler.update(overflowed=False)
        scales.append(scaler.scale)
    assert scales == [4.0, 8.0, 8.0, 16.0]
    assert not scaler.exhausted and LossScaler(MIN_SCALE).exhausted
