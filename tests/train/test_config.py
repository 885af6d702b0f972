"""Settings: their help texts, their ranges, and what a resumed run may change."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from vblackwell.errors import ConfigurationError
from vblackwell.train.config import FIXED, TrainConfig, field_help, refuse_changes, resolve


def test_every_setting_has_a_help_text():
    assert set(field_help()) == set(TrainConfig.__dataclass_fields__)
    assert all(text.endswith(".") or text.endswith("'.") for text in field_help().values())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mixed_precision": True, "precision": "fp32"}, "contradicts"),
        ({"beta2": 1.0}, "--beta2"),
        ({"min_learning_rate_ratio": 2.0}, "--min-learning-rate-ratio"),
        ({"max_grad_norm": float("inf")}, "finite"),
        ({"model": "x", "architecture": {"num_layers": 1}}, "--model"),
        ({"seed": True}, "--seed"),
        ({"epochs": 0.0}, "--epochs"),
        ({"host_memory": "-3"}, "--host-memory"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_values_out_of_range(values, said):
    with pytest.raises(ConfigurationError, match=said):
        TrainConfig(**values)


@pytest.mark.parametrize(("word", "older"), [("device", "level0"), ("host", "home"), ("auto", "auto")])
def test_a_place_of_updates_has_an_older_name(word, older):
    assert resolve({"update": older}) == resolve({"update": word})
    assert TrainConfig(update=older).update == TrainConfig(update=word).update_place == word
    with pytest.raises(ConfigurationError, match="give auto, device, host, or a share between 0 and 1"):
        TrainConfig(update=f"{older}s")
    assert TrainConfig(update="0.25").update_place == 0.25


def test_a_resumed_run_computes_as_it_began():
    stored = asdict(TrainConfig(learning_rate=0.1))
    refuse_changes(TrainConfig(learning_rate=0.1, fast_memory="1GiB", max_steps=9, profile=True), stored)
    with pytest.raises(ConfigurationError, match="--learning-rate is 0.2, the run was started with 0.1"):
        refuse_changes(TrainConfig(learning_rate=0.2), stored)
    assert set(FIXED) <= set(TrainConfig.__dataclass_fields__)
