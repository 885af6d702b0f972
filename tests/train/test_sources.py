"""Where settings come from, and what YAML may hold."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise

import pytest

from vblackwell.errors import ConfigurationError
from vblackwell.nn.decoder.config import PRESETS
from vblackwell.train.config import RECIPES, resolve
from vblackwell.units import MiB


def test_recipes_are_valid_and_name_the_presets():
    assert list(RECIPES) == list(PRESETS)
    for name in RECIPES:
        config = resolve({"config": name})
        assert config.preset == name and config.name == name
        assert config.seq_length <= PRESETS[name].max_position
    assert resolve({"model": "some/model"}).learning_rate == 2e-5
    assert resolve({"model": "some/model", "lora": "16"}).learning_rate == 2e-4
    assert resolve({"model": "some/model", "lora": "16", "learning_rate": "1e-3"}).learning_rate == 1e-3


def test_flags_beat_the_file_beat_the_resumed_run_beat_the_recipe(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: small\nmax-steps: 7\nbatch_size: 3\nbeta1: 1e-1\n")
    config = resolve({"config": str(file), "batch_size": "5"})
    assert (config.preset, config.max_steps, config.epochs) == ("small", 7, None)  # the recipe's epochs gave way
    assert (config.batch_size, config.learning_rate, config.beta1) == (5, 1e-3, 0.1)
    (tmp_path / "settings.json").write_text(json.dumps(asdict(config)))
    resumed = resolve({"out": str(tmp_path), "resume": True, "epochs": "2", "fast_memory": "1MiB"})
    assert (resumed.preset, resumed.batch_size, resumed.max_steps, resumed.epochs) == ("small", 5, None, 2.0)
    assert resumed.fast_memory == MiB


# Each list is ten of the one before: printed, it has 10^10 words.
BOMB = "[&a [x], " + ", ".join(f"&{b} [{', '.join(['*' + a] * 10)}]" for a, b in pairwise("abcdefghijk")) + "]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "list"),
        ("a: [\n", "not YAML"),
        ("node: 2\n", "'node'"),
        ("resume: 3\n", "true or false"),
        ("out: 3\n", "not text"),
        ("batch_size: 1.5\n", "whole number"),
        ("learning_rate: .nan\n", "finite"),
        ("precision: fp8\n", "fp8"),
        ("architecture: 3\n", "mapping"),
        ("seed: " + "[" * 1000, "not YAML"),
        ("seed: 2024-13-45\n", "not YAML"),
        ("out: !!python/object/apply:os.system [ls]\n", "not YAML"),
        ("seed: !!timestamp x\n", "not YAML"),
        ("max_steps: [3]\n", "'max_steps' holds a list"),
        ("? [seed]\n: 3\n", "not YAML"),
        ("architecture: {num_layers: [3]}\n", "'architecture' holds"),
        ("seed: [1]\n", "holds a list"),
        (f"seed: {BOMB}\n", "'seed' holds a list"),
        (f"architecture: {{a: {BOMB}}}\n", "'architecture' holds"),
    ],
)
def test_yaml_is_checked_like_flags(tmp_path, text, said):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        resolve({"config": str(file)})
