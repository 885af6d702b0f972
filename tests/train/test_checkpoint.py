"""Which checkpoints a run goes on from."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from vblackwell.errors import ConfigurationError
from vblackwell.train.checkpoint import refuse_other_run
from vblackwell.train.config import TrainConfig


@pytest.mark.parametrize(
    ("now", "part"),
    [
        ({"learning_rate": 0.2}, "--learning-rate is 0.2"),
        ({"seed": 1}, "--seed is 1"),
        ({"beta2": 0.9}, "--beta2 is 0.9"),
        ({"weight_decay": 0.2}, "--weight-decay is 0.2"),
        ({"warmup_steps": 9}, "--warmup-steps is 9"),
        ({"max_steps": 800, "warmup_steps": 20}, None),
        ({"max_steps": 800, "warmup_steps": 40}, None),
        ({"max_steps": 800, "warmup_steps": 41}, "--warmup-steps is 41"),
        ({"fast_memory": "1GiB"}, None),
    ],
)
def test_a_checkpoint_of_other_settings_is_not_gone_on_from(now, part, tmp_path):
    """Whatever became of settings.json: trainer.json is hashed, and holds what the run was computed with."""
    began = {"learning_rate": 0.1, "max_steps": 400, "warmup_steps": 20}
    written = json.loads(json.dumps(asdict(TrainConfig(**began))))
    config = TrainConfig(**(began | now))
    if part is None:
        refuse_other_run(config, tmp_path, written)
        return
    with pytest.raises(ConfigurationError, match=f"{part}, the run was started with .*trainer.json"):
        refuse_other_run(config, tmp_path, written)
