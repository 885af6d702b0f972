"""Models by name: as people and hubs write them, what is ambiguous, what is unknown, and what their experts read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from vblackwell.cli import main
from vblackwell.errors import ConfigurationError
from vblackwell.machine.gpus import GPUS
from vblackwell.nn.decoder.config import PRESETS
from vblackwell.planner.known_models import KNOWN_MODELS, NUM_PARAMETERS, known_name
from vblackwell.planner.model_spec import fields_of, find_model
from vblackwell.planner.what_fits import WhatFits
from vblackwell.trace.causal_lm import build_causal_lm


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("Llama-3-8B", "llama-3-8b"), ("llama3-8b", "llama-3-8b"), ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Qwen2.5 7B", "qwen2.5-7b"), ("qwen25_7b", "qwen2.5-7b"), ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("qwen3-30b", "qwen3-30b-a3b"), ("Mixtral", "mixtral-8x7b"), ("google/gemma-2-2b-it", "gemma-2-2b"),
        ("phi3 mini", "phi-3-mini"), ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"), ("gpt2 XL", "gpt2-xl"),
        ("OpenAI/gpt-oss-20b", "gpt-oss-20b"), ("Tiny", "tiny"), ("7B", "7b"),
        ("someone/Llama-3-8B", None), ("gemma-2b", None), ("llama 8b", None), ("a.module:llama", None), ("", None),
    ],
)  # fmt: skip
def test_what_people_and_hubs_write(typed, name):
    assert known_name(typed, PRESETS) == name
    if name in KNOWN_MODELS:
        assert fields_of(typed) is KNOWN_MODELS[name] and find_model(typed, {}, 8).name == name


def test_every_name_is_its_own_however_it_is_written():
    for name in (*PRESETS, *KNOWN_MODELS):
        for typed in (name, name.upper(), name.replace("-", " "), name.replace("-", "_")):
            assert known_name(typed, PRESETS) == name


def test_a_folder_of_the_user_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Llama-3-8B").mkdir()
    assert known_name("Llama-3-8B") is None and known_name("LLAMA-3-8B") == known_name("llama-3-8b") == "llama-3-8b"


def test_several_and_unknown_names_are_refused_by_a_few(capsys):
    with pytest.raises(ConfigurationError, match=r"'gpt-oss' may be gpt-oss-20b, gpt-oss-120b: give the whole name"):
        known_name("gpt-oss")
    with pytest.raises(ConfigurationError, match=r"may be qwen3-0.6b, qwen3-1.7b, qwen3-4b and 4 more: "):
        known_name("qwen3")
    assert main(["estimate", "llama-3-9b", "--gpu", "4070"]) == 2
    said = capsys.readouterr().err
    near = "llama-13b, llama-3-8b, llama-30b (vb estimate --list shows all)"
    assert f"model 'llama-3-9b' is unknown; the nearest: {near}; or give a Hugging Face folder" in said


def test_all_names_are_listed(capsys):
    assert main(["estimate", "--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in (*KNOWN_MODELS, *GPUS)) and all(name in said for name in PRESETS)
    assert "  gpt-oss-20b     24 layers of width 2880, 32 experts, 4 a token\n" in said


LARGEST_FIRST = sorted(KNOWN_MODELS, key=lambda name: -NUM_PARAMETERS[name])
# Of each architecture; all of them with what is slow.
SMALLEST = {KNOWN_MODELS[name]["model_type"]: name for name in LARGEST_FIRST}


@pytest.mark.each_value  # not where there is a GPU
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in SMALLEST.values())) for name in KNOWN_MODELS]
)
def test_each_model_has_as_many_parameters_as_are_said(name):
    model = build_causal_lm(dict(KNOWN_MODELS[name]), name)
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]


# What a token multiplies by, of what was published: all but the table of the embedding.
ACTIVE = {"mixtral-8x7b": 12.75e9, "qwen3-30b-a3b": 3.04e9, "gpt-oss-20b": 3.61e9, "gpt-oss-120b": 5.13e9}


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_reads_the_experts_that_it_meets(name):
    work = WhatFits([name])._decoding(name, False, (9, 0), True).work
    assert sum(each.flops for each in work) / 2 == pytest.approx(ACTIVE[name], rel=0.01)
    assert sum(each.num_bytes for each in work) / 2 == pytest.approx(ACTIVE[name], rel=0.015)


@pytest.mark.each_value
@pytest.mark.parametrize("command", [("estimate",), ("generate", "--prompt", "a", "--model")])
@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_hub_id_without_a_network_is_refused_at_once(command, offline, tmp_path):
    """Nothing listens on the hub's port; torch, which takes as long to import, is not imported."""
    env = os.environ | {"HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    env |= {"no_proxy": "*"}
    program = "import sys; from vblackwell.cli import main; code = main(sys.argv[1:])\n"
    program += "assert 'torch' not in sys.modules; sys.exit(code)"
    began = time.monotonic()
    words = [sys.executable, "-c", program, *command, "owner/name"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=tmp_path)
    reason = "HF_HUB_OFFLINE is set" if offline == "1" else "no network: 127.0.0.1 cannot be reached"
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert reason in done.stderr and "run `hf download owner/name --local-dir DIR`" in done.stderr
    assert time.monotonic() - began < 10  # of which a busy machine takes most; huggingface_hub tries for 25


def test_a_folder_that_cannot_be_listed_is_no_reason_to_say_something_else(tmp_path, monkeypatch):
    (tmp_path / "modell").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"'model' is unknown; .*; did you mean 'modell'\?"):
        find_model("model", {}, 8)

    def refuse(folder: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ConfigurationError, match=r"'model' is unknown; .*module:factory$"):
        find_model("model", {}, 8)
