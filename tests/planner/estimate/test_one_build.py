"""How often a plan of a run, and the screen of all ways, build the model and trace it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from vblackwell import cli
from vblackwell.nn.convert.causal_lm import is_accelerated
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.planner import memory_estimate, model_spec, what_fits

FIELDS = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
FIELDS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256}
CARD = ("--gpu", "RTX 3060", "--host-memory", "16GiB")


@dataclass
class Counts:
    """``built``: models; ``traced``: what each trace of training was of: the module, and what it was told."""

    built: int = 0
    traced: list[tuple[Any, ...]] = field(default_factory=list)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    found = Counts()

    def counting(build: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            found.built += 1
            return build(*args, **options)

        return counted

    trace = memory_estimate.trace_training

    def traced(model: nn.Module, make_batch: Any, *args: Any, autocast: Any = None, **options: Any) -> Any:
        recomputes = any(vars(each).get("gradient_checkpointing") for each in model.modules())
        fused = is_accelerated(model) or isinstance(model, Decoder)
        found.traced.append((model, recomputes, fused, autocast, batch_of(make_batch)))
        return trace(model, make_batch, *args, autocast=autocast, **options)

    for module in (model_spec, what_fits):
        monkeypatch.setattr(module, "build_causal_lm", counting(module.build_causal_lm))
    monkeypatch.setattr(Decoder, "__init__", counting(Decoder.__init__))
    monkeypatch.setattr(memory_estimate, "trace_training", traced)
    return found


def batch_of(make_batch: Any) -> int:
    """Sequences in what `language_batch` makes."""
    names = make_batch.__code__.co_freevars
    return dict(zip(names, (each.cell_contents for each in make_batch.__closure__), strict=True))["batch_size"]


def estimate(tmp_path: Path, *flags: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FIELDS))
    assert cli.main(["estimate", str(path), *flags]) == 0


def test_a_plan_traces_its_model_once_for_each_way_to_keep_activations(tmp_path, counts, capsys):
    estimate(tmp_path, *CARD, "--max-grad-norm", "1", "--batch-size", "2", "--seq-length", "64")
    assert counts.built == 1 and len({id(model) for model, *_ in counts.traced}) == 1
    ways = [way for _, *way in counts.traced]
    assert sorted(map(str, ways)) == sorted({*map(str, ways)}) and len(ways) <= 2


def test_the_screen_of_all_ways_repeats_no_trace(tmp_path, counts, capsys):
    estimate(tmp_path, *CARD)
    # The frozen model that runs, whose copies are trained or get adapters; plain PyTorch in fp32.
    assert counts.built == 2
    assert len({(id(model), *map(str, way)) for model, *way in counts.traced}) == len(counts.traced)
