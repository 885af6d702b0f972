"""What MODEL of ``vb estimate`` means: how to build it without bytes, its vocabulary, and how its loss is had."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.artifacts.folder import read_json
from vblackwell.artifacts.hub import find_config, is_hub_id
from vblackwell.errors import ConfigurationError, VBError, nearest
from vblackwell.nn.decoder import Decoder
from vblackwell.nn.decoder_config import DecoderConfig
from vblackwell.plan.causal_lm import build_causal_lm, language_loss
from vblackwell.plan.known_models import KNOWN_MODELS
from vblackwell.plan.trace import on_meta

MOST_TOKENS = 1 << 28


def check_batch(batch_size: int, seq_length: int) -> None:
    """Raises ConfigurationError where a batch is empty or beyond any GPU."""
    for name, value in (("batch size", batch_size), ("sequence length", seq_length)):
        if value < 1:
            raise ConfigurationError(f"{name} {value} is not possible: give at least 1")
    if batch_size * seq_length > MOST_TOKENS:
        raise ConfigurationError(
            f"{batch_size} sequences of {seq_length} tokens are {batch_size * seq_length:.3g} tokens in one forward: "
            f"give at most {MOST_TOKENS}"
        )


@dataclass(frozen=True)
class Subject:
    """A model to be estimated: how to build it on meta, its vocabulary, how its loss is had, and how it is made with its bytes."""

    name: str
    build: Callable[[torch.dtype], nn.Module]
    vocab_size: int
    loss: Callable[[nn.Module, Any], Tensor]
    make: Callable[[], nn.Module] | None = None


def find_subject(text: str, decoders: dict[str, DecoderConfig], seq_length: int) -> Subject:
    """What MODEL of ``vb estimate`` means: a preset of ``decoders``, a known name, a folder, a config.json, a hub id, or
    ``package.module:factory``.

    Raises:
        CorruptData: a file that is no JSON object.
        ConfigurationError: nothing of the sort; a factory that is missing, raises or gives no module.
    """
    if text in decoders:
        return of_decoder(text, decoders[text])
    if text in KNOWN_MODELS:
        return of_config(KNOWN_MODELS[text], text, seq_length)
    path = Path(text)
    if path.is_dir() or path.suffix == ".json":
        return of_config(read_json(path / "config.json" if path.is_dir() else path), text, seq_length)
    if ":" in text:
        return _of_factory(text)
    if is_hub_id(text):
        return of_config(read_json(find_config(text)), text, seq_length)
    names = [*decoders, *KNOWN_MODELS]
    raise ConfigurationError(
        f"model {text!r} is unknown{nearest(text, names)}; give one of {', '.join(names)}, a Hugging Face folder or hub id, a config.json, "
        "or package.module:factory"
    )


def of_decoder(name: str, config: DecoderConfig) -> Subject:
    """Our decoder of that shape."""

    def build(dtype: torch.dtype) -> nn.Module:
        return Decoder(config, device="meta", dtype=dtype).train()

    return Subject(name, build, config.vocab_size, lambda model, batch: model(batch["input_ids"], batch["labels"]))


def of_config(fields: dict[str, Any], source: str, seq_length: int) -> Subject:
    """The causal model that a config.json's ``fields`` describe; ``source`` is its name in errors.

    Raises:
        ConfigurationError: no vocabulary, or learned positions that end before ``seq_length``; what `build_causal_lm` refuses, when built.
    """
    limit = fields.get("n_positions")
    if isinstance(limit, int) and seq_length > limit:
        raise ConfigurationError(f"{source} learns positions up to {limit}: --seq-length {seq_length} is beyond them")
    vocab = fields.get("vocab_size")
    if not isinstance(vocab, int) or not 1 <= vocab < 1 << 31:
        raise ConfigurationError(f"{source}: vocab_size is {vocab!r}: the field must be a number of at least 1")
    return Subject(source, partial(build_causal_lm, fields, source), vocab, language_loss)


def _of_factory(text: str) -> Subject:
    """``package.module:factory``, called without arguments; the module's forward takes token numbers and gives logits or a loss."""
    module_name, _, factory_name = text.partition(":")
    try:
        with _working_folder_on_path():
            factory = getattr(importlib.import_module(module_name), factory_name)
        with torch.device("meta"):
            model = factory()
    except VBError:
        raise
    except Exception as error:  # a stranger's code may raise anything
        words = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"{text} cannot be built on device 'meta': {type(error).__name__}: {words}") from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{text} gives {type(model).__name__}, not a torch.nn.Module")
    sizes = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    if not sizes:
        raise ConfigurationError(
            f"{text} has no nn.Embedding, so what it takes is not known: use vblackwell.plan.trace.trace_training from Python"
        )
    model = on_meta(model).train()
    return Subject(text, lambda dtype: model.to(dtype), max(sizes), _any_loss, factory)


@contextmanager
def _working_folder_on_path() -> Iterator[None]:
    """Imports look into the working folder first, as under `python -m`; behind it ``sys.path`` is the list that it was."""
    before = sys.path
    sys.path = [str(Path.cwd()), *before]
    try:
        yield
    finally:
        sys.path = before


def _any_loss(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch["input_ids"])
    found = getattr(out, "logits", out[0] if isinstance(out, (tuple, list)) else out)
    if found.dim() == 0:
        return found
    return nn.functional.cross_entropy(found.flatten(0, -2), batch["labels"].flatten())
