"""What MODEL of ``vb estimate`` means: how to build it without bytes, its vocabulary, and how its loss is had."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, VBError, nearest
from vblackwell.folders.folder import find_config, is_hub_id, read_json
from vblackwell.machine.facts import memory_facts
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
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
        raise ConfigurationError(
            f"{batch_size} sequences of {seq_length} tokens are {batch_size * seq_length:.3g} tokens in one forward: "
            f"give at most {MAX_TOKENS}"
        )


@dataclass(frozen=True)
class ModelSpec:
    """A model to be estimated: how it is built on meta, the size of its vocabulary, and its loss of a batch. ``make``:
    makes it with its bytes (None: nobody knows how). ``note``: why ``build`` is not what one would expect.
    """

    name: str
    build: Callable[[torch.dtype], nn.Module]
    vocab_size: int
    loss: Callable[[nn.Module, Any], Tensor]
    make: Callable[[], nn.Module] | None = None
    note: str | None = None


def find_model(text: str, decoders: dict[str, DecoderConfig], seq_length: int) -> ModelSpec:
    """A preset of ``decoders``, a known name, a folder, a config.json, a hub id, or ``package.module:factory``. Raises
    CorruptData (no JSON object), ConfigurationError (nothing of the sort, or a factory that fails) and
    InsufficientMemory (a factory that can only be built for real, without room for it).
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
        f"model {text!r} is unknown{nearest(text, names)}; give one of {', '.join(names)}, a Hugging Face folder or "
        "hub id, a config.json, or package.module:factory"
    )


def of_decoder(name: str, config: DecoderConfig) -> ModelSpec:
    """Our decoder of that shape."""
    return ModelSpec(
        name,
        lambda dtype: Decoder(config, device="meta", dtype=dtype).train(),
        config.vocab_size,
        lambda model, batch: model(batch["input_ids"], batch["labels"]),
    )


def of_config(fields: dict[str, Any], source: str, seq_length: int) -> ModelSpec:
    """The causal model that a config.json's ``fields`` describe; ``source`` is its name in errors. Raises
    ConfigurationError where there is no vocabulary, or learned positions end before ``seq_length``.
    """
    limit = fields.get("n_positions")
    if isinstance(limit, int) and seq_length > limit:
        raise ConfigurationError(f"{source} learns positions up to {limit}: --seq-length {seq_length} is beyond them")
    check_fields(fields, source)
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
        raise ConfigurationError(
            f"{text} is {type(factory).__name__}: give a function or class that makes a torch.nn.Module"
        )
    make: Callable[[], Any] = factory
    model, note = _built(text, make)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{text} gives {type(model).__name__}, not a torch.nn.Module")
    sizes = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    if not sizes:
        raise ConfigurationError(
            f"{text} has no nn.Embedding, so what it takes is not known: use vblackwell.trace.trace.trace_training "
            "from Python"
        )
    model.train()
    return ModelSpec(text, lambda dtype: model.to(dtype), max(sizes), _any_loss, make, note)


def _built(text: str, factory: Callable[[], Any]) -> tuple[Any, str | None]:
    """What ``factory`` gives, on meta, and why it was built for real before, if it was. What can neither be built nor
    copied on meta is the real module: it cannot be traced, and can be measured.
    """

    def without_bytes(found: Any) -> Any:
        return on_meta(found) if isinstance(found, nn.Module) else found

    try:
        with torch.device("meta"):
            found = factory()
        return without_bytes(found), None
    except Exception as error:  # as above: reading a tensor's values, loading a file, or a mistake
        why = brief(error)
    free = memory_facts().available_bytes
    refusal = (
        f"{text} cannot be built on device 'meta' ({why}), and for real it takes more than the {format_bytes(free)} of "
        "RAM that were free: leave out of the factory what needs values, such as .item() and files that are loaded"
    )
    try:
        with StoragesWithBytes(free, refusal):
            found = factory()
    except VBError:
        raise
    except Exception as error:
        alike = "" if brief(error) == why else f"; on device 'meta': {why}"
        raise ConfigurationError(f"{text} cannot be built: {brief(error)}{alike}") from error
    note = f"{text} cannot be built on device 'meta' ({why}): it was built for real in this machine's RAM"
    try:
        return without_bytes(found), note
    except Untraceable:
        return found, note


def _any_loss(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch["input_ids"])
    found = getattr(out, "logits", out[0] if isinstance(out, (tuple, list)) else out)
    if found.dim() == 0:
        return found
    return nn.functional.cross_entropy(found.flatten(0, -2), batch["labels"].flatten())


# -- known models: the shapes their authors published, as fields of transformers' configurations -----------------------


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
        "n_embd": width, "n_layer": layers, "n_head": heads,
    }  # fmt: skip


def _llama(
    kind: str = "llama", *, shape: tuple[int, ...], positions: int, tied: bool = False, **more: Any
) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_type": kind, "tie_word_embeddings": tied, "max_position_embeddings": positions}
    fields |= zip(("vocab_size", "hidden_size", "intermediate_size"), shape[:3], strict=True)
    fields |= zip(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), shape[3:], strict=True)
    return fields | more


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "tinyllama-1.1b": _llama(shape=(32000, 2048, 5632, 22, 32, 4), positions=2048),
    "llama-7b": _llama(shape=(32000, 4096, 11008, 32, 32, 32), positions=2048, rms_norm_eps=1e-6),
    "llama-13b": _llama(shape=(32000, 5120, 13824, 40, 40, 40), positions=2048, rms_norm_eps=1e-6),
    "llama-3-8b": _llama(shape=(128256, 4096, 14336, 32, 32, 8), positions=8192, rope_theta=500000.0),
    "llama-30b": _llama(shape=(32000, 6656, 17920, 60, 52, 52), positions=2048, rms_norm_eps=1e-6),
    "llama-65b": _llama(shape=(32000, 8192, 22016, 80, 64, 64), positions=2048, rms_norm_eps=1e-6),
    "llama-3-70b": _llama(shape=(128256, 8192, 28672, 80, 64, 8), positions=8192, rope_theta=500000.0),
    "llama-3.1-405b": _llama(shape=(128256, 16384, 53248, 126, 128, 8), positions=131072, rope_theta=500000.0),
    "llama-3.2-1b": _llama(shape=(128256, 2048, 8192, 16, 32, 8), positions=131072, tied=True),
    "llama-3.2-3b": _llama(shape=(128256, 3072, 8192, 28, 24, 8), positions=131072, tied=True),
    "mistral-7b": _llama("mistral", shape=(32000, 4096, 14336, 32, 32, 8), positions=32768, sliding_window=None),
    "qwen2.5-0.5b": _llama("qwen2", shape=(151936, 896, 4864, 24, 14, 2), positions=32768, tied=True),
    "qwen2.5-1.5b": _llama("qwen2", shape=(151936, 1536, 8960, 28, 12, 2), positions=32768, tied=True),
    "qwen2.5-3b": _llama("qwen2", shape=(151936, 2048, 11008, 36, 16, 2), positions=32768, tied=True),
    "qwen2.5-7b": _llama("qwen2", shape=(152064, 3584, 18944, 28, 28, 4), positions=131072),
    "qwen2.5-14b": _llama("qwen2", shape=(152064, 5120, 13824, 48, 40, 8), positions=131072),
    "qwen2.5-32b": _llama("qwen2", shape=(152064, 5120, 27648, 64, 40, 8), positions=131072),
    "qwen2.5-72b": _llama("qwen2", shape=(152064, 8192, 29568, 80, 64, 8), positions=131072),
    "mixtral-8x7b": _llama(
        "mixtral", shape=(32000, 4096, 14336, 32, 32, 8), positions=32768, num_local_experts=8,
        num_experts_per_tok=2,
    ),
}  # fmt: skip
