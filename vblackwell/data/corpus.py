"""From files to tokens, cached by the hash of what they came from, and from tokens to windows and rows in an order that
is a pure function: position i of an epoch is computed, so a resumed run needs no list of indices, no replay, and no
library's shuffle that stays the same. A window is ``seq_length`` inputs and, shifted by one, as many targets. B batch,
S sequence.
"""

import os
from array import array
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
import torch
import xxhash
from tokenizers import Tokenizer
from torch import Tensor

from vblackwell.data.documents import Piece, TextFiles, find_text, reading
from vblackwell.data.tokenizer import end_of_text_id, train_tokenizer, vocab_size_of
from vblackwell.errors import ConfigurationError, CorruptData, DiskError
from vblackwell.folders.commit import CommitFolder, discard, verify_folder
from vblackwell.folders.folder import read_tokenizer
from vblackwell.machine.cache import cache_root
from vblackwell.machine.lock import SUFFIX, disk_error, remove_if_abandoned
from vblackwell.nn.decoder.decoder import IGNORED_TARGET
from vblackwell.units import MiB

HELD_OUT_SHARE = 0.02
Batch = tuple[Tensor, ...]
Progress = Callable[[str, "float | None"], None]  # what is being done, and the share done where it is known
FORMAT = 2  # of the cache; part of every key
DRAWN_AT_ONCE = 4096  # documents
BATCH_BYTES = MiB // 2 * (os.cpu_count() or 1)  # of text encoded at a time: half a second, between which a stop is met


def _mix(value: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele et al., 2014): a bijection of 64-bit words."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def permute(index: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where position ``index`` of ``epoch`` points: a permutation of ``0 .. count - 1``, the same everywhere, a Feistel
    network over the next power of four, applied again while the result is out of range (cycle walking).
    """
    half = np.uint64(max(1, (max(1, count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    base = _mix(np.asarray([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) ^ np.uint64(0x9E3779B97F4A7C15))
    base = _mix(base ^ np.uint64(epoch))
    keys = [_mix(base ^ np.uint64(step + 1)) for step in range(4)]
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
    tokens: np.ndarray  # all of them, one flat read-only memmap of uint16 or uint32
    tokenizer: Tokenizer
    vocab_size: int
    end_of_text_id: int | None  # the token after each document; None where the tokenizer has none
    fingerprint: str  # hash of text and tokenizer: equal where the tokens are equal
    name: str  # what messages call it


def prepare_data(
    path: Path | None, tokenizer_path: Path | None = None, vocab_size: int = 4096, progress: Progress | None = None
) -> Corpus:
    """The tokens of the documents under ``path``, by default those of the Python standard library's sources, by the
    tokenizer of ``tokenizer_path`` (a tokenizer.json or its folder), or one of ``vocab_size`` trained on them. Raises
    ConfigurationError for input that cannot be read, or holds no text, DiskError where the cache cannot be written.
    """
    report = progress or (lambda message, share: None)
    source = find_text(path)
    content = content_hash(source, report)
    given = None if tokenizer_path is None else read_tokenizer(tokenizer_path)
    tokenizer = given or _trained_tokenizer(source, content, vocab_size, report)
    end = end_of_text_id(tokenizer, tokenizer_path)
    if end is None:
        report(f"{tokenizer_path} has no end-of-text token: documents follow each other without a mark", None)
    fingerprint = xxhash.xxh3_128_hexdigest(f"{FORMAT} {content} {end} {tokenizer.to_str()}".encode())

    vocab_size = vocab_size_of(tokenizer)
    kind = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    build = partial(_pack, source, tokenizer, end, kind, report)
    folder = cached("tokens", fingerprint, build, report, "packing again")
    tokens = np.memmap(folder / "tokens.bin", dtype=kind, mode="r")
    return Corpus(tokens, tokenizer, vocab_size, end, fingerprint, source.name)


def content_hash(source: TextFiles, report: Progress) -> str:
    digest = xxhash.xxh3_128()
    total, done = max(1, source.size_bytes), 0
    for path in source.files:
        digest.update(f"{path.relative_to(source.root).as_posix()}\0{path.stat().st_size}\0".encode())
        with reading(path), path.open("rb") as file:
            while block := file.read(4 * MiB):
                digest.update(block)
                done += len(block)
                report(f"reading {source.name}", done / total)
    return digest.hexdigest()


def cached(kind: str, key: str, build: Callable[[CommitFolder], None], report: Progress, again: str) -> Path:
    """The cache's folder for ``key``, whose files ``build`` writes; where they have changed since, ``again``. Nobody
    waits for another process that builds the same, and may hang. Raises DiskError."""
    parent = cache_root() / kind
    entry = parent / f"{key}-manifest"  # not the name of an entry that an older version wrote, without one

    def make() -> None:
        try:
            for leftover in parent.glob(f"*{SUFFIX}"):
                remove_if_abandoned(leftover)
            with CommitFolder(parent, entry.name, shared=True) as folder:
                build(folder)
        except OSError as error:
            failed = disk_error("writing the cache", parent, error)
            raise DiskError(f"{failed}; or set XDG_CACHE_HOME to a folder with room") from error

    if not entry.is_dir():
        make()
    try:
        verify_folder(entry, again)  # a changed digit may be another tokenizer, which can be read
    except CorruptData as error:
        report(str(error), None)
        discard(entry)
        make()
    return entry


def _trained_tokenizer(source: TextFiles, content: str, vocab_size: int, report: Progress) -> Tokenizer:
    def build(folder: CommitFolder) -> None:
        report(f"training a tokenizer of {vocab_size} tokens on {source.name}", None)
        folder.add("tokenizer.json", train_tokenizer(source, vocab_size).to_str(pretty=True).encode())

    key = xxhash.xxh3_128_hexdigest(f"{FORMAT} {content} {vocab_size} {tokenizers.__version__}".encode())
    return read_tokenizer(cached("tokenizers", key, build, report, "training the tokenizer again"))


def _pack(
    source: TextFiles, tokenizer: Tokenizer, end: int | None, kind: np.dtype, report: Progress, folder: CommitFolder
) -> None:
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True  # the words '<|endoftext|>' in a document are text, not the end of it
    ends, count, text_bytes = array("q"), 0, 0
    read_order = folder.path / "read_order.bin"
    with read_order.open("wb") as file:
        for batch, batch_bytes in _batches(source):
            numbers = list[int]()
            encodings = plain.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                numbers += encoding.ids
                if piece.ends_document:
                    numbers += [] if end is None else [end]
                    ends.append(count + len(numbers))
            file.write(np.asarray(numbers, dtype=kind).tobytes())
            count += len(numbers)
            text_bytes += batch_bytes
            report(f"packing tokens of {source.name}", min(1.0, text_bytes / max(1, source.size_bytes)))
    if not text_bytes:
        raise ConfigurationError(f"{source.name} holds no text: give files with text in them")
    if not count:
        remedy = "give files with other text, or another --tokenizer"
        raise ConfigurationError(f"{source.name} becomes no tokens by this tokenizer: {remedy}")
    tokens = np.memmap(read_order, dtype=kind, mode="r")
    with folder.open("tokens.bin") as file:
        for start, stop in stretches(np.asarray(ends, dtype=np.int64)):
            if start < stop:
                file.write(tokens[start:stop].data)
    read_order.unlink()


def stretches(ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Every token once, as ranges (from, to), of documents with these ``ends``: those drawn to be held out, always the
    same ones, come last, the first of them at the end, so that only its end may be held out.
    """
    starts, wanted = np.concatenate(([0], ends[:-1])), max(1, int(ends[-1] * HELD_OUT_SHARE))
    drawn, held = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    while not len(held) or held[-1] < wanted:  # a few at a time: a corpus may have more documents than fit in memory
        places = np.arange(len(drawn), min(len(drawn) + DRAWN_AT_ONCE, len(ends)))
        drawn = np.concatenate((drawn, permute(places, len(ends), seed=0, epoch=0)))
        held = np.cumsum((ends - starts)[drawn])
    drawn = drawn[: int(np.searchsorted(held, wanted)) + 1].tolist()
    at = 0
    for document in sorted(drawn):
        yield at, int(starts[document])
        at = int(ends[document])
    yield at, int(ends[-1])
    for document in reversed(drawn):
        yield int(starts[document]), int(ends[document])


def _batches(source: TextFiles) -> Iterator[tuple[list[Piece], int]]:
    """Pieces, and the bytes of their text; an empty document has nothing to learn from, not even its end."""
    batch, held, begun = [], 0, False
    for piece in source.pieces():
        begun |= bool(piece.text)
        if begun:
            batch.append(piece)
            held += len(piece.text.encode())
        begun &= not piece.ends_document
        if held >= BATCH_BYTES:
            yield batch, held
            batch, held = [], 0
    if batch:
        yield batch, held


class PackedDataset:
    """The training windows of a corpus, ``seq_length`` inputs each, shuffled, or those held out, in order: the last 2 %
    of the tokens (at least one window). ConfigurationError for too few tokens, or an unknown split.
    """

    def __init__(self, corpus: Corpus, seq_length: int, split: str = "train", seed: int = 0) -> None:
        if seq_length < 1:
            raise ConfigurationError(f"sequence length {seq_length}: give at least 1")
        if split not in ("train", "validation"):
            raise ConfigurationError(f"split {split!r} is not known: 'train' or 'validation'")
        total, window = len(corpus.tokens), seq_length + 1
        trained = total - max(window, int(total * HELD_OUT_SHARE))
        if trained < window:
            raise ConfigurationError(
                f"{corpus.name} has {total} tokens: sequences of {seq_length} need at least {2 * window}, one to train "
                "on and one held out; give more text or a shorter --seq-length"
            )
        self.tokens = corpus.tokens[:trained] if split == "train" else corpus.tokens[trained:]
        self.seq_length, self.seed, self.shuffled = seq_length, seed, split == "train"

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_length

    def batch(self, positions: np.ndarray) -> Batch:
        """Inputs and targets, (B, S) int64, at ``positions``: p is index p % len(self) of epoch p // len(self)."""
        rows = np.empty((len(positions), self.seq_length + 1), dtype=np.int64)
        epochs, indices = np.divmod(positions, len(self))
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts = permute(indices[here], len(self), self.seed, int(epoch)) if self.shuffled else indices[here]
            rows[here] = self.tokens[starts[:, None] * self.seq_length + np.arange(self.seq_length + 1)]
        windows = torch.from_numpy(rows)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class Dataset(Protocol):
    """What a run trains on: windows at positions that are counted through all epochs."""

    seq_length: int

    def __len__(self) -> int: ...

    def batch(self, positions: np.ndarray) -> Batch:
        """What the loss is called with: inputs and targets, (B, S) int64; of packed rows also positions, as these, and
        `document_starts`."""
        ...


def pack_rows(lengths: np.ndarray, row_length: int) -> list[list[int]]:
    """Indices of the sequences of each row. The longest first, each takes the fullest row of ``row_length`` that it
    still fits (Johnson's best fit decreasing, at most 11/9 of the fewest rows possible and 6/9 of one more).
    """
    rows: list[list[int]] = []
    open_rows = defaultdict[int, list[int]](list)  # rows by their free positions
    sizes: list[int] = []  # those that there are, ascending
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
                del sizes[at]
        rows[row].append(int(index))
        if left := free - length:
            if not open_rows[left]:
                insort(sizes, left)
            open_rows[left].append(row)
    return rows


def inspect_lines(dataset: Dataset, tokenizer: Tokenizer) -> Iterator[str]:
    """A line a position of the first two rows: place in its document, token, and the next one where it is learnt."""

    def text_of(number: int) -> str:
        return "" if number == IGNORED_TARGET else repr(tokenizer.decode([number], skip_special_tokens=False))

    for row, arrays in enumerate(zip(*dataset.batch(np.arange(min(2, len(dataset))))[:3], strict=True)):
        inputs, targets, *given = (array.tolist() for array in arrays)
        places = given[0] if given else range(len(inputs))
        learnt = [at for at, target in enumerate(targets) if target != IGNORED_TARGET]
        shown = max(learnt, default=0) + 1
        yield f"row {row}: {len(learnt)} of {len(inputs)} positions learn the token that follows"
        yield f"{'at':>6} {'token':>7}  {'text':<24} learns"
        for place, number, target in zip(places[:shown], inputs[:shown], targets[:shown], strict=True):
            yield f"{place:>6} {number:>7}  {text_of(number):<24} {text_of(target)}".rstrip()
        if shown < len(inputs):
            yield f"       (nothing is learnt in the {len(inputs) - shown} positions after them)"
