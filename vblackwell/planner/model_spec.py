"""What MODEL of ``vb estimate`` means: how to build it without bytes, its vocabulary, and how its loss is had."""

import copy
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, Unsupported, VBError
from vblackwell.folders.compressed_tensors import PackedLinears, not_trained, packed_linears
from vblackwell.folders.folder import read_config, read_json
from vblackwell.folders.hub import find_config, is_hub_id
from vblackwell.machine.facts import memory_facts
from vblackwell.nn.convert.linears import find_linears
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.planner.known_models import KNOWN_MODELS, known_name, unknown_model
from vblackwell.trace.causal_lm import build_causal_lm, check_fields, language_loss
from vblackwell.trace.recorder import StoragesWithBytes
from vblackwell.trace.trace import Untraceable, brief, on_meta
from vblackwell.units import format_bytes

MAX_TOKENS = 1 << 28


def check_batch(batch_size: int, seq_length: int) -> None:
    """Raises ConfigurationError where a batch is empty or beyond any GPU."""
    for name, value in (("batch size", batch_size), ("sequence length", seq_length)):
        if value < 1:
            raise ConfigurationError(f"{name} {value} is not possible: give at least 1")
    if batch_size * seq_length > MAX_TOKENS:
        wrong = f"{batch_size} sequences of {seq_length} tokens are {batch_size * seq_length:.3g} tokens in one forward"
        raise ConfigurationError(f"{wrong}: give at most {MAX_TOKENS}")


@dataclass(frozen=True)
class ModelSpec:
    """A model to be estimated: how it is built on meta, the size of its vocabulary, and its loss of a batch. ``make``:
    makes it with its bytes (None: nobody knows how). ``note``: why ``build`` is not what one would expect."""

    name: str
    build: Callable[[torch.dtype], nn.Module]
    vocab_size: int
    loss: Callable[[nn.Module, Any], Tensor]
    make: Callable[[], nn.Module] | None = None
    note: str | None = None


def find_model(text: str, decoders: dict[str, DecoderConfig], seq_length: int) -> ModelSpec:
    """A preset of ``decoders``, a known name, a folder, a config.json, a hub id, or ``package.module:factory``. Raises
    CorruptData (no JSON object), ConfigurationError, and InsufficientMemory (a factory that needs bytes, and too many).
    """
    text = known_name(text, decoders) or text
    if text in decoders:
        return of_decoder(text, decoders[text])
    fields = fields_of(text)
    if fields is not None and (stated := fields.get("quantization_config")):
        said = "; an estimate with flags of a run is of training all weights: without them, or with --gpu, --ram and "
        said += "--disk alone, it is of what can be done"
        raise Unsupported(f"{not_trained(text, stated)}{said}")
    if fields is not None:
        return of_config(fields, text, seq_length)
    if ":" in text:
        return _of_factory(text)
    raise unknown_model(text, decoders)


def fields_of(text: str) -> dict[str, Any] | None:
    """The fields of the config.json that a known name, a folder, a config.json or a hub id stands for; None of others.
    Raises CorruptData: it is no JSON object."""
    if (name := known_name(text)) is not None:
        return KNOWN_MODELS[name]
    path = Path(text)
    if path.is_dir():
        return read_config(path)
    if path.suffix == ".json":
        return read_json(path)
    return read_json(find_config(text)) if ":" not in text and is_hub_id(text) else None


def positions_of(fields: dict[str, Any]) -> int | None:
    """The longest sequence, in tokens, that a config.json's ``fields`` say the model learnt; None where none does."""
    text = fields.get("text_config")
    for each in (fields, text if isinstance(text, dict) else {}):
        for name in ("max_position_embeddings", "n_positions"):
            if isinstance(limit := each.get(name), int) and limit > 0:
                return limit
    return None


def packed_in(fields: Mapping[str, Any], model: nn.Module) -> PackedLinears | None:
    """The linears of ``model``, which a config.json's ``fields`` describe, that its folder holds packed; None where it
    holds none so. Raises Unsupported for a quantisation that is not read here."""
    stated = fields.get("quantization_config")
    return packed_linears(stated, find_linears(model, transposed=True)) if stated else None


def of_decoder(name: str, config: DecoderConfig) -> ModelSpec:
    def build(dtype: torch.dtype) -> nn.Module:
        return Decoder(config, device="meta", dtype=dtype).train()

    return ModelSpec(name, build, config.vocab_size, lambda model, batch: model(batch["input_ids"], batch["labels"]))


def of_config(fields: dict[str, Any], source: str, seq_length: int) -> ModelSpec:
    """The causal model that a config.json's ``fields`` describe; ``source`` is its name in errors. Raises
    ConfigurationError where there is no vocabulary, or learned positions end before ``seq_length``."""
    limit = fields.get("n_positions")
    if isinstance(limit, int) and seq_length > limit:
        raise ConfigurationError(f"{source} learns positions up to {limit}: --seq-length {seq_length} is beyond them")
    check_fields(fields, source, (("vocab_size",),))
    vocab = fields["vocab_size"]
    if not isinstance(vocab, int) or not 1 <= vocab < 1 << 31:
        raise ConfigurationError(f"{source}: vocab_size is {vocab!r}: the field must be a number of at least 1")
    return ModelSpec(source, partial(build_causal_lm, fields, source), vocab, language_loss)


def _of_factory(text: str) -> ModelSpec:
    """``package.module:factory``, called without arguments; its forward takes tokens and gives logits or a loss."""
    module_name, _, factory_name = text.partition(":")
    try:
        # Imports look into the working folder first, as under `python -m`.
        with mock.patch.object(sys, "path", [str(Path.cwd()), *sys.path]):
            factory = getattr(importlib.import_module(module_name), factory_name)
    except VBError:
        raise
    except Exception as error:  # a stranger's code may raise anything
        where = "modules are looked for in the working folder, then where Python finds them"
        raise ConfigurationError(f"{text} cannot be imported: {brief(error)} ({where})") from error
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ConfigurationError(f"{text} is {type(factory).__name__}: give a function or class that makes a Module")

    def make() -> nn.Module:
        made: Any = factory()
        if not isinstance(made, nn.Module):
            raise ConfigurationError(f"{text} gives {type(made).__name__}, not a torch.nn.Module")
        return made

    model, note = _built(text, make)
    sizes = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    if not sizes:
        wrong = f"{text} has no nn.Embedding, so what it takes is not known"
        raise ConfigurationError(f"{wrong}: use vblackwell.trace.trace.trace_training from Python")
    model.train()

    def build(dtype: torch.dtype) -> nn.Module:
        """One that may be changed, unless it has bytes: that is measured, and never traced."""
        if note is None:
            with torch.device("meta"):
                return on_meta(make()).train().to(dtype)
        is_copy = all(each.is_meta for each in (*model.parameters(), *model.buffers()))
        return (copy.deepcopy(model) if is_copy else model).to(dtype)

    return ModelSpec(text, build, max(sizes), _any_loss, make, note)


def _built(text: str, make: Callable[[], nn.Module]) -> tuple[nn.Module, str | None]:
    """What ``make`` gives, on meta if it can be copied there, and why it was built for real before, if it was."""
    try:
        with torch.device("meta"):
            found = make()
        return on_meta(found), None
    except Exception as error:  # as above: reading a tensor's values, loading a file, or a mistake
        why = brief(error)
    free = memory_facts().available_bytes
    unbuilt = f"{text} cannot be built on device 'meta' ({why})"
    remedy = "leave out of the factory what needs values, such as .item() and files that are loaded"
    refusal = f"{unbuilt}, and for real it takes more than the {format_bytes(free)} of RAM that were free: {remedy}"
    try:
        with StoragesWithBytes(free, refusal):
            found = make()
    except VBError:
        raise
    except Exception as error:
        alike = "" if brief(error) == why else f"; on device 'meta': {why}"
        raise ConfigurationError(f"{text} cannot be built: {brief(error)}{alike}") from error
    note = f"{unbuilt}: it was built for real in this machine's RAM"
    try:
        return on_meta(found), note
    except Untraceable:
        return found, note


def _any_loss(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch["input_ids"])
    found = getattr(out, "logits", out[0] if isinstance(out, (tuple, list)) else out)
    if found.dim() == 0:
        return found
    return nn.functional.cross_entropy(found.flatten(0, -2), batch["labels"].flatten())
