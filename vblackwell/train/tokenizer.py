"""Byte-level byte-pair tokenizers: trained on the data, or read from a file.

Byte-level (GPT-2's alphabet and splitting) because every text can be written with it: no unknown token, no normalisation,
and decoding gives the text back byte for byte. Training reads at most ``SAMPLE_BYTES`` of text, whole pieces spread evenly
over the corpus: more hardly changes the merges of a small vocabulary, but costs time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vblackwell.errors import ConfigurationError
from vblackwell.train.documents import Source
from vblackwell.units import MiB

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
MIN_VOCAB_SIZE = 257  # 256 bytes and the end of a document
SAMPLE_BYTES = 64 * MiB


def train_tokenizer(source: Source, vocab_size: int) -> Tokenizer:
    """A tokenizer of at most ``vocab_size`` tokens (fewer where the text has no more pairs); the same for the same text.

    Raises:
        ConfigurationError: ``vocab_size`` below 257, which byte-level text needs.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigurationError(
            f"vocabulary size {vocab_size} is too small: give at least {MIN_VOCAB_SIZE}, for 256 bytes and the end of text"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(source), trainer)
    return tokenizer


def _sample(source: Source) -> Iterator[str]:
    """All pieces, or of a large corpus as many as keep step with an even spread of ``SAMPLE_BYTES``."""
    share = min(1.0, SAMPLE_BYTES / max(1, source.size_bytes))
    seen = taken = 0
    for piece in source.pieces():
        seen += len(piece.text)
        if taken <= share * seen:
            taken += len(piece.text)
            yield piece.text


def end_of_text_id(tokenizer: Tokenizer, path: Path | None) -> int | None:
    """The token that ends a document: ``eos_token`` of the ``tokenizer_config.json`` beside ``path``, or a well-known name.

    ``None`` where the tokenizer has none; documents then follow each other without a mark.
    """
    names = list(KNOWN_ENDS)
    if path is not None:
        config = (path if path.is_dir() else path.parent) / "tokenizer_config.json"
        if config.is_file():
            try:
                stated = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, RecursionError, AttributeError) as error:
                raise ConfigurationError(f"{config} is not a JSON object: {error}; repair or remove it") from error
            name = stated.get("content") if isinstance(stated, dict) else stated
            names = [name, *names] if name else names
    found = (tokenizer.token_to_id(name) for name in names)
    return next((number for number in found if number is not None), None)
