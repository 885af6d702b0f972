"""The decoder that a run trains: a preset with random weights, or a Hugging Face folder's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vblackwell.artifacts.folder import load_weights, read_config
from vblackwell.errors import ConfigurationError, nearest
from vblackwell.nn.decoder import Decoder
from vblackwell.nn.decoder_config import DecoderConfig
from vblackwell.train.config import TrainConfig
from vblackwell.train.presets import find_preset

if TYPE_CHECKING:
    from vblackwell.train.data import Corpus


@dataclass(frozen=True)
class Source:
    """Where the model comes from.

    Attributes:
        folder: Hugging Face folder with shape and weights; None for a preset.
        tokenizer_path: what the data is to be encoded with; None to train a tokenizer.
    """

    folder: Path | None
    tokenizer_path: Path | None

    def shape(self, config: TrainConfig, corpus: Corpus) -> DecoderConfig:
        """The decoder's shape for this run.

        Raises:
            ConfigurationError: data and model do not go together, or an unknown architecture key.
            Unsupported: the folder describes a model that `Decoder` does not compute.
        """
        if self.folder is None:
            return _preset_shape(config, corpus)
        shape = DecoderConfig.from_hf(read_config(self.folder))
        if corpus.vocab_size > shape.vocab_size:
            raise ConfigurationError(
                f"the tokenizer has {corpus.vocab_size} tokens, {self.folder} was trained with {shape.vocab_size}: "
                "give the model's own "
                "--tokenizer"
            )
        if config.seq_length > shape.max_position:
            raise ConfigurationError(
                f"--seq-length {config.seq_length} is beyond the {shape.max_position} positions of {self.folder}: shorten it"
            )
        return shape

    def build(self, config: TrainConfig, corpus: Corpus) -> Decoder:
        """The model on the CPU in fp32: drawn from the run's seed, or read from the folder."""
        model = Decoder(self.shape(config, corpus), seed=config.seed, device="cpu")
        if self.folder is not None:
            load_weights(model, self.folder)
        return model


def find_source(config: TrainConfig) -> Source:
    """What ``--model`` and ``--tokenizer`` mean.

    Raises:
        ConfigurationError: the folder is not there, or has no tokenizer and none was given.
    """
    tokenizer = None if config.tokenizer is None else Path(config.tokenizer)
    if config.model is None:
        return Source(None, tokenizer)
    folder = Path(config.model)
    if not folder.is_dir():
        raise ConfigurationError(
            f"--model {folder}: no such folder; give a Hugging Face folder with config.json and safetensors"
        )
    if tokenizer is None:
        if not (folder / "tokenizer.json").is_file():
            raise ConfigurationError(
                f"--model {folder} has no tokenizer.json: give the one it was trained with as --tokenizer"
            )
        tokenizer = folder
    return Source(folder, tokenizer)


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
