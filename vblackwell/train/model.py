"""The model that a run trains: a preset's decoder with random weights, or the causal model of a Hugging Face folder.

A folder whose architecture is Llama's is computed by our `Decoder`, any other by transformers. Either is built on the meta device, and
its folder checked whole (configuration, tokenizer, tables of all shards), before the data is looked at. Weights are drawn or read when
the stack has room for all of the model, one layer group after the other: there is no second copy, and a model that does not fit is
refused before it takes memory.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.errors import ConfigurationError, CorruptData, Unsupported, nearest
from vblackwell.folders.checked import check_tokenizer
from vblackwell.folders.commit import MANIFEST, verify_folder
from vblackwell.folders.folder import read_config, read_tokenizer
from vblackwell.folders.hub import find_folder
from vblackwell.folders.meta_model import build_on_meta
from vblackwell.folders.weights import FolderWeights
from vblackwell.generate.causal_lm import config_json
from vblackwell.nn.convert.causal_lm import Acceleration, accelerate_causal_lm, has_fused_loss
from vblackwell.nn.decoder.config import DecoderConfig, not_supported_reasons
from vblackwell.nn.decoder.decoder import IGNORED_TARGET, Decoder
from vblackwell.nn.decoder.presets import find_preset
from vblackwell.offload.storage.initialize import Initialize
from vblackwell.train.config import TrainConfig

if TYPE_CHECKING:
    from vblackwell.data.corpus import Corpus


@dataclass(frozen=True)
class Learner:
    """A model that is about to be put into a stack and trained.

    Attributes:
        loss: called with input_ids, targets and, for packed documents, positions, all (B, S) int64; the mean cross entropy.
        config: the model's Hugging Face config.json.
        heads: query heads, key and value heads, and the width of one.
        initialize: fills the model, which is on the meta device; None for one that has its weights (in plans).
    """

    model: nn.Module
    loss: Callable[..., Tensor]
    config: dict[str, Any]
    heads: tuple[int, int, int]
    initialize: Initialize | None = None


@dataclass(frozen=True)
class Source:
    """Where the model comes from.

    Attributes:
        learner: the folder's model; None for a preset, whose vocabulary is the data's.
        tokenizer_path: what the data is to be encoded with; None to train a tokenizer.
        tokenizer_folder: the model folder, if its tokenizer is used.
        folder: the model folder; None for a preset.
    """

    learner: Learner | None
    tokenizer_path: Path | None
    tokenizer_folder: Path | None = None
    folder: Path | None = None

    def build(self, config: TrainConfig, corpus: Corpus) -> Learner:
        """The folder's model; or the preset's in fp32, whose weights are drawn from the run's seed when the stack takes them.

        Raises:
            ConfigurationError: an unknown architecture key.
        """
        if self.learner is not None:
            return self.learner
        model = Decoder(_preset_shape(config, corpus), device="meta", dtype=torch.float32)
        return dataclasses.replace(learner_of(model), initialize=model.initial_weights(config.seed))


def find_source(config: TrainConfig, cleanup: ExitStack) -> Source:
    """What ``--model`` and ``--tokenizer`` mean. The folder's files stay open until ``cleanup``.

    Raises:
        ConfigurationError: the folder is not there, has no tokenizer and none was given, or model, tokenizer and flags disagree.
        FolderMismatch: its tensors are not those of its config.json.
        CorruptData: one of its files is damaged.
        Unsupported: an architecture that neither `Decoder` nor transformers computes.
    """
    tokenizer = None if config.tokenizer is None else Path(config.tokenizer)
    if config.model is None:
        return Source(None, tokenizer)
    folder = find_folder(config.model)
    if (folder / MANIFEST).is_file():  # we wrote it, and know its bytes
        try:
            verify_folder(folder)
        except CorruptData as error:
            raise CorruptData(f"{error}, or remove {MANIFEST} if you changed the folder yourself") from error
    if tokenizer is None and not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(
            f"--model {folder} has no tokenizer.json: give the one it was trained with as --tokenizer"
        )
    learner = _open_folder(folder, config, cleanup)
    path = tokenizer or folder
    check_tokenizer(folder, read_tokenizer(path), path, remedy=" as --tokenizer")
    return Source(learner, path, folder if tokenizer is None else None, folder)


def _open_folder(folder: Path, config: TrainConfig, cleanup: ExitStack) -> Learner:
    raw, file = read_config(folder), folder / "config.json"
    if not_supported_reasons(raw):
        learner = learner_of(build_on_meta(folder, torch.float32))
    else:
        try:
            shape = DecoderConfig.from_hf(raw)
        except (ConfigurationError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{file}: {error}; give the config.json that the weights were published with"
            ) from error
        learner = learner_of(Decoder(shape, device="meta", dtype=torch.float32))
    limit = learner.config.get("max_position_embeddings")
    if limit is not None and config.seq_length > limit:
        raise ConfigurationError(
            f"--seq-length {config.seq_length} is beyond the {limit} positions of {file}: shorten it"
        )
    weights = cleanup.enter_context(FolderWeights(learner.model, folder))
    weights.load_buffers()
    return dataclasses.replace(learner, initialize=weights)


def learner_of(model: nn.Module) -> Learner:
    """A `Decoder` or a causal model of transformers with what training asks of it."""
    if isinstance(model, Decoder):
        shape = model.config
        return Learner(model, model, shape.to_hf(), (shape.num_heads, shape.kv_heads, shape.head_size))
    made: Any = model
    config = made.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise Unsupported(
            f"{type(model).__name__} states no num_attention_heads: only models of attention are trained by this command"
        )
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    names = {name: getattr(config, name, None) for name in ("vocab_size", "max_position_embeddings")}
    return Learner(model, NextTokenLoss(model), config_json(model) | names, (heads, kv_heads, width))


def fuse(model: nn.Module) -> Acceleration | None:
    """Run a causal model of transformers on fused operators, its loss in chunks of tokens; None of a `Decoder`, which always does."""
    if isinstance(model, Decoder):
        return None
    takes_shifted = any(
        each.kind is each.VAR_KEYWORD or each.name == "shift_labels" for each in _parameters_of(model).values()
    )
    return accelerate_causal_lm(model, loss=takes_shifted)


def _parameters_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(model).forward).parameters


class NextTokenLoss:
    """The mean cross entropy, in fp32, of a causal model of transformers; targets of -100 do not count.

    After `fuse` there are never the logits of a whole batch, which for a vocabulary of 150,000 are larger than anything else of a step; and
    in training the routers' loss is added where the model's configuration says so (``output_router_logits``).
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, input_ids_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        given: dict[str, Any] = {} if positions_BS is None else {"position_ids": positions_BS}
        if has_fused_loss(self._model):
            given |= {
                "labels": targets_BS,
                "shift_labels": targets_BS,
            }  # the first asks for a loss, the second is what counts
            if not self._model.training and "output_router_logits" in _parameters_of(self._model):
                given["output_router_logits"] = False
            return self._model(input_ids=input_ids_BS, use_cache=False, **given).loss
        logits_BSV = self._model(input_ids=input_ids_BS, use_cache=False, **given).logits
        return functional.cross_entropy(
            logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED_TARGET
        )


def _preset_shape(config: TrainConfig, corpus: Corpus) -> DecoderConfig:
    preset = find_preset(config.preset)
    shape = preset.decoder_config(
        corpus.vocab_size, max(config.seq_length, preset.max_position), eos_token_id=corpus.end_of_text_id
    )
    changed: dict[str, Any] = dict(config.architecture or {})
    known = [
        field.name for field in dataclasses.fields(DecoderConfig) if field.name not in ("vocab_size", "eos_token_id")
    ]
    for name, value in changed.items():
        if name not in known:
            raise ConfigurationError(
                f"--architecture has no {name!r}: choose from {', '.join(known)}{nearest(name, known)}"
            )
        wanted = float if name in ("rope_theta", "norm_eps", "initializer_range") else int
        if isinstance(value, bool) or not isinstance(value, (int, float)) or wanted(value) != value:
            raise ConfigurationError(
                f"--architecture {name} {value!r} is not {'a number' if wanted is float else 'a whole number'}"
            )
    if "num_heads" in changed or "hidden_size" in changed:
        changed = {"head_dim": None, "num_kv_heads": None} | changed
    return dataclasses.replace(shape, **changed)
