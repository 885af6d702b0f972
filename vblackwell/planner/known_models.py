"""The models that `vb estimate` knows by name, and which of them a name means as people and hubs write it."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vblackwell.errors import ConfigurationError, likeness, nearest_path
from vblackwell.machine.gpus import GPUS
from vblackwell.units import columns

# The shapes that authors published, as fields of transformers' configurations, and what such a model has.
KNOWN_MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("known_models.json").read_text("utf-8"))
NUM_PARAMETERS: dict[str, int] = {name: fields.pop("num_parameters") for name, fields in KNOWN_MODELS.items()}

_PUBLISHERS = "meta-llama|qwen|google|microsoft|openai|openai-community|mistralai|tinyllama|huggyllama|unsloth"
# What published names have in addition, and sizes do not depend on.
_SAME_SIZES = {"meta", "base", "instruct", "it", "chat", "hf", "4k"}
MAX_SHOWN = 3


def _words(name: str) -> list[str]:
    """'Meta-Llama3_8B' -> llama, 3, 8b."""
    apart = re.sub(r"(?<=[a-z]{3})(?=\d)", " ", name.lower())
    return [word for word in re.split(r"[\s_-]+", apart) if word and word not in _SAME_SIZES]


def _key(words: Iterable[str]) -> str:
    return "".join(words).replace(".", "")


def known_name(text: str, presets: Iterable[str] = ()) -> str | None:
    """The name of `KNOWN_MODELS` or of ``presets`` that ``text`` means, whatever its case, spaces, dots, dashes and a
    publisher before it: the whole name, or its first words where these are one model's alone. None of a folder, a file,
    a factory, another hub id and what is like no name. ConfigurationError: the first words of several."""
    names = [*presets, *KNOWN_MODELS]
    if text in names:
        return text
    publisher, slash, name = text.rpartition("/")
    if ":" in text or Path(text).suffix == ".json" or Path(text).exists():
        return None
    if slash and not re.fullmatch(_PUBLISHERS, publisher, re.IGNORECASE):
        return None
    words = _words(name)
    same = [each for each in names if _key(_words(each)) == _key(words)]
    if not same and not slash:
        same = [each for each in names if words and _words(each)[: len(words)] == words]
    if len(same) > 1:
        more = f" and {len(same) - MAX_SHOWN} more" if len(same) > MAX_SHOWN else ""
        choice = f"{', '.join(same[:MAX_SHOWN])}{more}"
        raise ConfigurationError(f"model {text!r} may be {choice}: give the whole name (vb estimate --list shows all)")
    return same[0] if same else None


def unknown_model(text: str, presets: Iterable[str] = ()) -> ConfigurationError:
    """Says which names are the nearest to ``text``, and what else may be given."""
    key = _key(_words(text.rpartition("/")[2]))
    near = sorted([*presets, *KNOWN_MODELS], key=lambda each: -likeness(key, _key(_words(each))))[:MAX_SHOWN]
    others = "a Hugging Face folder or hub id, a config.json, or package.module:factory"
    return ConfigurationError(
        f"model {text!r} is unknown; the nearest: {', '.join(near)} (vb estimate --list shows all); or give {others}"
        f"{nearest_path(Path(text))}"
    )


def known_lines(presets: Iterable[str]) -> list[str]:
    """All names with what they mean, a line each: of models, and of GPUs."""
    models = columns([(name, _sizes(fields)) for name, fields in KNOWN_MODELS.items()])
    cards = columns([(name, f"{gpu.sold_gb} GB") for name, gpu in GPUS.items()], right=(1,))
    return [
        f"presets of vb train: {', '.join(presets)}",
        "",
        "models by name (others: a Hugging Face folder, a hub id, a config.json):",
        *(f"  {line}" for line in models),
        "",
        "GPUs by name (others: --gpu-memory):",
        *(f"  {line}" for line in cards),
    ]


def _sizes(fields: Mapping[str, Any]) -> str:
    layers = fields.get("num_hidden_layers") or fields["n_layer"]
    width = fields.get("hidden_size") or fields["n_embd"]
    experts = fields.get("num_local_experts") or fields.get("num_experts")
    mixture = f", {experts} experts, {fields['num_experts_per_tok']} a token" if experts else ""
    return f"{layers} layers of width {width}{mixture}"
