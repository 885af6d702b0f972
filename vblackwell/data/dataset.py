"""Windows and rows of tokens in an order that is a pure function, so that a position is one integer.

A window is ``seq_length`` inputs and, shifted by one, as many targets; windows overlap by that one token only. The
training order of an epoch is a Feistel permutation of (seed, epoch): position i is computed, not looked up, so a
resumed run needs no list of indices, no replay, and no library's shuffle that stays the same between versions.

Legend: B batch, S sequence.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.nn.decoder.decoder import IGNORED_TARGET

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HELD_OUT_SHARE = 0.02
ROUNDS = 4
INSPECTED_ROWS = 2


def _mix(value: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele et al., 2014): a bijection of 64-bit words that leaves no pattern."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def permute(index: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where position ``index`` of ``epoch`` points: a permutation of ``0 .. count - 1``, the same everywhere.

    A Feistel network over the next power of four, applied again while the result is out of range (cycle walking).
    """
    half = np.uint64(max(1, (max(1, count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    base = _mix(np.asarray([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) ^ np.uint64(0x9E3779B97F4A7C15))
    base = _mix(base ^ np.uint64(epoch))
    keys = [_mix(base ^ np.uint64(step + 1)) for step in range(ROUNDS)]
    value = np.asarray(index, dtype=np.uint64).copy()
    pending = np.ones(value.shape, dtype=bool)
    while pending.any():
        left, right = value[pending] >> half, value[pending] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        value[pending] = (left << half) | right
        pending = value >= np.uint64(count)
    return value.astype(np.int64)


@dataclass(frozen=True)
class Corpus:
    """Packed tokens and the tokenizer that made them."""

    tokens: np.ndarray  # all of them, one flat read-only memmap of uint16 or uint32
    tokenizer: Tokenizer
    vocab_size: int  # one more than the largest token number; a tokenizer may leave some below unused
    end_of_text_id: int | None  # the token after each document; None where the tokenizer has none
    fingerprint: str  # hash of text and tokenizer: equal where the tokens are equal
    name: str  # what messages call it


class PackedDataset:
    """The training windows of a corpus, ``seq_length`` inputs each, shuffled, or those held out, in order.

    Those are in the last 2 % of the tokens (at least one window), where `prepare_data` puts documents from all of it.

    Raises:
        ConfigurationError: too few tokens for one window of each split, or an unknown split.
    """

    def __init__(self, corpus: Corpus, seq_length: int, split: str = "train", seed: int = 0) -> None:
        if seq_length < 1:
            raise ConfigurationError(f"sequence length {seq_length}: give at least 1")
        if split not in ("train", "validation"):
            raise ConfigurationError(f"split {split!r} is not known: 'train' or 'validation'")
        total, window = len(corpus.tokens), seq_length + 1
        held_out = max(window, int(total * HELD_OUT_SHARE))
        if total - held_out < window:
            raise ConfigurationError(
                f"{corpus.name} has {total} tokens: sequences of {seq_length} need at least {2 * window}, one to train "
                "on and one held out; give more text or a shorter --seq-length"
            )
        self.tokens = corpus.tokens[: total - held_out] if split == "train" else corpus.tokens[total - held_out :]
        self.seq_length, self.seed, self.shuffled = seq_length, seed, split == "train"

    def __len__(self) -> int:
        """Windows in an epoch."""
        return (len(self.tokens) - 1) // self.seq_length

    def windows(self, positions: np.ndarray) -> Tensor:
        """The windows (B, S + 1), int64, at ``positions``: p is index p % len(self) of epoch p // len(self)."""
        rows = np.empty((len(positions), self.seq_length + 1), dtype=np.int64)
        epochs, indices = np.divmod(positions, len(self))
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts = permute(indices[here], len(self), self.seed, int(epoch)) if self.shuffled else indices[here]
            rows[here] = self.tokens[starts[:, None] * self.seq_length + np.arange(self.seq_length + 1)]
        return torch.from_numpy(rows)

    def batch(self, positions: np.ndarray) -> tuple[Tensor, ...]:
        """Inputs and targets, (B, S) int64 each, of the windows at ``positions``."""
        rows = self.windows(positions)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Dataset(Protocol):
    """What a run trains on: windows at positions that are counted through all epochs.

    A batch is what the loss is called with: inputs, targets and maybe positions, (B, S) int64 each.
    """

    def __len__(self) -> int: ...

    def batch(self, positions: np.ndarray) -> tuple[Tensor, ...]: ...


class BatchStream:
    """Batches without end; the last batch of an epoch is filled from the next.

    ``state`` is how many windows were consumed before, also under another batch size.
    """

    def __init__(self, dataset: Dataset, batch_size: int, state: int = 0) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"batch size {batch_size}: give at least 1")
        if state < 0:
            raise ConfigurationError(f"data position {state}: it counts windows and cannot be negative")
        self.dataset, self.batch_size, self.state = dataset, batch_size, state

    @property
    def epoch(self) -> int:
        """The one that the next batch begins in."""
        return self.state // len(self.dataset)

    def next(self) -> tuple[Tensor, ...]:
        """The next inputs and targets, and what else the data set gives, (B, S) int64 each."""
        found = self.dataset.batch(np.arange(self.state, self.state + self.batch_size))
        self.state += self.batch_size
        return found


def evaluation_batches(
    dataset: Dataset, batch_size: int, max_batches: int | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Every window of ``dataset`` once, or those of the first ``max_batches``; the last batch may be smaller."""
    count = len(dataset) if max_batches is None else min(len(dataset), max_batches * batch_size)
    for start in range(0, count, batch_size):
        yield dataset.batch(np.arange(start, min(start + batch_size, count)))


def pack_rows(lengths: np.ndarray, row_length: int) -> list[list[int]]:
    """Indices of the sequences, each at most ``row_length`` long, of each row; every one is in exactly one row.

    The longest first, each takes the fullest row that it still fits (Johnson's best fit decreasing, at most 11/9 of the
    fewest rows possible and 6/9 of one more).
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # rows by their free positions
    sizes: list[int] = []  # the keys of open_rows, ascending
    for index in np.argsort(-lengths, kind="stable"):
        length = int(lengths[index])
        at = bisect_left(sizes, length)
        if at == len(sizes):
            rows.append([])
            row, free = len(rows) - 1, row_length
        else:
            free = sizes[at]
            row = open_rows[free].pop()
            if not open_rows[free]:
                del open_rows[free], sizes[at]
        rows[row].append(int(index))
        left = free - length
        if left:
            if left not in open_rows:
                insort(sizes, left)
            open_rows.setdefault(left, []).append(row)
    return rows


def inspect_lines(dataset: Dataset, tokenizer: Tokenizer) -> Iterator[str]:
    """A line a position of the first rows: place in its document, token, and the next one where it is learnt."""
    for row, arrays in enumerate(zip(*dataset.batch(np.arange(min(INSPECTED_ROWS, len(dataset)))), strict=True)):
        inputs, targets = (array.tolist() for array in arrays[:2])
        places = arrays[2].tolist() if len(arrays) > 2 else range(len(inputs))
        last = max((at for at, target in enumerate(targets) if target != IGNORED_TARGET), default=0)
        learnt = sum(target != IGNORED_TARGET for target in targets)
        yield f"row {row}: {learnt} of {len(inputs)} positions learn the token that follows"
        yield f"{'at':>6} {'token':>7}  {'text':<24} learns"
        for place, number, target in list(zip(places, inputs, targets, strict=True))[: last + 1]:
            text = repr(tokenizer.decode([number], skip_special_tokens=False))
            shown = "" if target == IGNORED_TARGET else repr(tokenizer.decode([target], skip_special_tokens=False))
            yield f"{place:>6} {number:>7}  {text:<24} {shown}".rstrip()
        if last + 1 < len(inputs):
            yield f"       (nothing is learnt in the {len(inputs) - last - 1} positions after them)"
