"""Conversations as rows of tokens: ``prepare_chat`` encodes and caches them, ``ChatDataset`` makes windows with masked
targets.

The cache holds one flat file of 32-bit numbers, a token in the lower 31 bits and in the highest whether it is to be
learnt, and a table of lengths. Rows hold whole conversations. With packing several share a row: positions begin again
at 0 with each, and no token attends to another conversation or is predicted from one. Without, each has a separate row,
filled up after its end with tokens that nothing attends to and nothing learns.

Legend: B batch, S sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from vblackwell.data.chat import ChatTemplate, Span, conversations, find_template
from vblackwell.data.corpus import Progress, cached, content_hash, vocab_size_of
from vblackwell.data.dataset import HELD_OUT_SHARE, Corpus, pack_rows, permute
from vblackwell.data.documents import TextFiles
from vblackwell.data.tokenizer import end_of_text_id
from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.folders.folder import read_tokenizer
from vblackwell.nn.decoder.decoder import IGNORED_TARGET

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 2  # of the cache, and of which conversations are held out; part of every key
LEARNT = np.uint32(1 << 31)
_BATCH = 512  # conversations encoded at a time


@dataclass(frozen=True)
class ChatCorpus(Corpus):
    """Encoded conversations; ``tokens`` have the highest bit set where they are to be learnt.

    Args:
        lengths: tokens of each conversation, int64.
        kind: of the lines: 'messages', 'sharegpt' or 'alpaca'.
        template: how they were written down.
    """

    lengths: np.ndarray
    kind: str
    template: ChatTemplate


def prepare_chat(source: TextFiles, kind: str, tokenizer_path: Path | None, report: Progress) -> ChatCorpus:
    """The tokens of the conversations of ``source``.

    Raises:
        ConfigurationError: no tokenizer, or lines that cannot be used, with file and line.
        DiskError: the cache cannot be written.
    """
    if tokenizer_path is None:
        raise ConfigurationError(
            f"{source.name} holds conversations ({kind}): give --model, or --tokenizer with a chat template, to encode "
            "them"
        )
    tokenizer = read_tokenizer(tokenizer_path)
    template = find_template(tokenizer, tokenizer_path)
    content = content_hash(source, report)
    parts = (FORMAT, content, kind, template.source, sorted(template.special.items()), tokenizer.to_str())
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())

    def build(folder: Path) -> None:
        report(f"encoding {source.name}", None)
        _write(folder, _encoded(source, kind, tokenizer, template))

    tokens, lengths = cached("chat", fingerprint, build, _open, report, "encoding again")
    end = end_of_text_id(tokenizer, tokenizer_path)
    return ChatCorpus(
        tokens,
        tokenizer,
        vocab_size_of(tokenizer),
        end,
        fingerprint,
        source.name,
        lengths=lengths,
        kind=kind,
        template=template,
    )


# -- encoding ----------------------------------------------------------------------------------------------------------


def _encoded(source: TextFiles, kind: str, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[np.ndarray]:
    """Each conversation's tokens, marked."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    found = conversations(source, kind)
    while batch := list(islice(found, _BATCH)):
        rendered = [template.render(conversation) for conversation in batch]
        encodings = tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        for conversation, (text, spans), encoding in zip(batch, rendered, encodings, strict=True):
            learnt = _learnt(text, spans, encoding, set() if template.marks_answers else special)
            numbers = np.asarray(encoding.ids, dtype=np.uint32)
            if not learnt[1:].any():
                raise ConfigurationError(
                    f"{conversation.place} has answers without a token: there is nothing to learn; remove it"
                )
            numbers[learnt] |= LEARNT
            yield numbers


def _learnt(text: str, spans: list[Span], encoding: Any, special: set[int]) -> np.ndarray:
    """Which tokens have characters of a span, and the special token right after each."""
    starts, ends = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    learnt = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        learnt |= (starts < end) & (ends > start) & (ends > starts)
        after = int(np.searchsorted(starts, end))
        following = next((at for at in range(after, len(starts)) if text[starts[at] : ends[at]].strip()), None)
        if following is not None and encoding.ids[following] in special and not text[end : starts[following]].strip():
            learnt[after : following + 1] = True
    return learnt


def _write(folder: Path, encoded: Iterator[np.ndarray]) -> None:
    lengths, digest = [], xxhash.xxh3_128()
    with (folder / "tokens.bin").open("wb") as file:
        for numbers in encoded:
            data = numbers.tobytes()
            file.write(data)
            digest.update(data)
            lengths.append(len(numbers))
    table = np.asarray(lengths, dtype=np.int64).tobytes()
    (folder / "lengths.bin").write_bytes(table)
    digest.update(table)
    (folder / "chat.json").write_text(json.dumps({"xxh3": digest.hexdigest()}))


def _open(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        stated = json.loads((folder / "chat.json").read_text())["xxh3"]
        lengths = np.fromfile(folder / "lengths.bin", dtype=np.int64)
        tokens = np.memmap(folder / "tokens.bin", dtype=np.uint32, mode="r", shape=(int(lengths.sum()),))
        digest = xxhash.xxh3_128(tokens)  # pyright: ignore[reportArgumentType]
        digest.update(lengths.tobytes())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"the cached conversations in {folder} cannot be read ({error})") from error
    if digest.hexdigest() != stated:
        raise CorruptData(f"the cached conversations in {folder} differ from what was written")
    return tokens, lengths


# -- rows --------------------------------------------------------------------------------------------------------------


class ChatDataset:
    """Rows of conversations, with the interface of `PackedDataset`.

    Args:
        corpus: encoded conversations.
        seq_length: inputs in a row. Longer conversations are cut there; those whose answers all lie after the cut are
            left out.
        split: 'train', shuffled, or 'validation': 2 % of the conversations (at least one), drawn, and always the same
            ones.
        seed: of the order.
        packing: several conversations a row.

    Attributes:
        cut, left_out: numbers of such conversations.

    Raises:
        ConfigurationError: fewer than two conversations, or none with an answer within ``seq_length``.
    """

    def __init__(
        self, corpus: ChatCorpus, seq_length: int, split: str = "train", seed: int = 0, *, packing: bool = True
    ) -> None:
        self.seq_length, self.seed, self.packing, self.shuffled = seq_length, seed, packing, split == "train"
        self._tokens = corpus.tokens
        count = len(corpus.lengths)
        if count < 2:
            raise ConfigurationError(f"{corpus.name} holds {count} conversations: give at least two, one is held out")
        starts = np.concatenate(([0], np.cumsum(corpus.lengths)))[:-1]
        held_out = max(1, int(count * HELD_OUT_SHARE))
        is_held_out = np.zeros(count, dtype=bool)
        is_held_out[permute(np.arange(held_out), count, seed=0, epoch=0)] = True
        part = np.flatnonzero(is_held_out != self.shuffled)
        starts, lengths = starts[part], np.minimum(corpus.lengths[part], seq_length + 1)
        kept = np.asarray([self._has_target(*pair) for pair in zip(starts, lengths, strict=True)], dtype=bool)
        self.cut = int((corpus.lengths[part] > seq_length + 1).sum())
        self.left_out = int((~kept).sum())
        if not kept.any():
            raise ConfigurationError(
                f"{corpus.name}: no {'training' if self.shuffled else 'held-out'} conversation has an answer in its "
                f"first {seq_length} tokens: raise --seq-length"
            )
        self._starts, self._lengths = starts[kept], lengths[kept]
        inputs = self._lengths - 1
        self._rows = pack_rows(inputs, seq_length) if packing else [[index] for index in range(len(inputs))]

    def __len__(self) -> int:
        """Rows in an epoch."""
        return len(self._rows)

    @property
    def conversations(self) -> int:
        """In an epoch."""
        return len(self._lengths)

    @property
    def filled(self) -> float:
        """The share of positions that hold a token of a conversation."""
        return float((self._lengths - 1).sum()) / (len(self._rows) * self.seq_length)

    def batch(self, positions: np.ndarray) -> tuple[Tensor, ...]:
        """Inputs and targets, (B, S) int64, of the rows at ``positions``, as `PackedDataset.batch`; with packing,
        places too.
        """
        shape = (len(positions), self.seq_length)
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED_TARGET, np.int64)
        places = np.zeros(shape, np.int64)
        epochs, indices = np.divmod(positions, len(self))
        for row, (epoch, index) in enumerate(zip(epochs, indices, strict=True)):
            chosen = int(permute(np.asarray([index]), len(self), self.seed, int(epoch))[0]) if self.shuffled else index
            at = 0
            for one in self._rows[chosen]:
                numbers = self._marked(self._starts[one], self._lengths[one])
                plain, stop = (numbers & ~LEARNT).astype(np.int64), at + len(numbers) - 1
                inputs[row, at:stop] = plain[:-1]
                targets[row, at:stop] = np.where(numbers[1:] & LEARNT, plain[1:], IGNORED_TARGET)
                places[row, at:stop] = np.arange(stop - at)
                at = stop
            places[row, at:] = np.arange(self.seq_length - at)
        made = (inputs, targets, places) if self.packing else (inputs, targets)
        return tuple(torch.from_numpy(array) for array in made)

    def _marked(self, start: int, length: int) -> np.ndarray:
        return np.asarray(self._tokens[start : start + length])

    def _has_target(self, start: int, length: int) -> bool:
        return bool((self._marked(start + 1, length - 1) & LEARNT).any())

    def example(self) -> tuple[list[int], list[int]]:
        """The first conversation's tokens up to its first answer, and those of that answer."""
        numbers = self._marked(self._starts[0], self._lengths[0])
        learnt, plain = (numbers & LEARNT) != 0, (numbers & ~LEARNT).tolist()
        begin = max(1, int(learnt.argmax()))
        rest = np.flatnonzero(~learnt[begin:])
        return plain[:begin], plain[begin : begin + int(rest[0]) if len(rest) else None]

    def learnt_share(self) -> float:
        """The share of tokens that are learnt."""
        learnt = sum(
            int(((self._marked(start, length)[1:] & LEARNT) != 0).sum())
            for start, length in zip(self._starts, self._lengths, strict=True)
        )
        return learnt / max(1, int((self._lengths - 1).sum()))
