"""From files to tokens: ``prepare_data`` finds the documents, makes or reads a tokenizer, and packs tokens.

Tokenizer and tokens are cached by the hash of what they came from, so a second run starts at once and a changed file is
never met with old tokens. Tokens lie in one flat file, documents in order, an end-of-text token after each; windows are
cut by ``PackedDataset``, which holds out the end of the file. So documents that are to be held out, drawn from the
whole corpus, lie there. A cached file whose bytes changed since is built again, and the progress says so.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import xxhash

from vblackwell.data.dataset import HELD_OUT_SHARE, Corpus, permute
from vblackwell.data.documents import Piece, TextFiles, find_text
from vblackwell.data.tokenizer import end_of_text_id, train_tokenizer
from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.folders.commit import MANIFEST, hash_file, verify_folder
from vblackwell.folders.folder import read_tokenizer
from vblackwell.machine.cache import cached_folder, drop_entry
from vblackwell.units import MiB

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Progress = Callable[[str, "float | None"], None]  # what is being done, and the share done where it is known
FORMAT = 2  # of the cache; part of every key
BATCH_BYTES = MiB // 2 * (os.cpu_count() or 1)  # of text encoded at a time: half a second, between which a stop is met
COPIED_TOKENS = 4 * MiB  # at a time
DRAWN_AT_ONCE = 4096  # documents
Opened = TypeVar("Opened")


def prepare_data(
    path: Path | None, tokenizer_path: Path | None = None, vocab_size: int = 4096, progress: Progress | None = None
) -> Corpus:
    """The tokens of the documents under ``path``.

    Args:
        path: a text, jsonl or parquet file, or a folder of them; ``None``: the Python standard library's sources.
        tokenizer_path: a ``tokenizer.json`` or a folder with one; ``None``: one is trained on the documents.
        vocab_size: of the tokenizer that is trained.
        progress: called with what is being done and the share done.

    Raises:
        ConfigurationError: input that cannot be read, or that holds no text; with file and place.
        DiskError: the cache cannot be written.
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

    def build(folder: Path) -> None:
        _pack(source, tokenizer, end, folder, report)

    tokens = cached("tokens", fingerprint, build, _open_tokens, report, "packing again")
    return Corpus(tokens, tokenizer, vocab_size_of(tokenizer), end, fingerprint, source.name)


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """One more than the largest token number."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1


def content_hash(source: TextFiles, report: Progress) -> str:
    """Hash of the files' names and bytes."""
    digest = xxhash.xxh3_128()
    total, done = max(1, source.size_bytes), 0
    for path in source.files:
        digest.update(f"{path.relative_to(source.root).as_posix()}\0{path.stat().st_size}\0".encode())
        try:
            with path.open("rb") as file:
                while block := file.read(4 * MiB):
                    digest.update(block)
                    done += len(block)
                    report(f"reading {source.name}", done / total)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    return digest.hexdigest()


def cached(
    kind: str, key: str, build: Callable[[Path], None], read: Callable[[Path], Opened], report: Progress, again: str
) -> Opened:
    """What ``read`` makes of the cache's folder for ``key``, which ``build`` fills; where it is damaged, ``again``."""
    folder = cached_folder(kind, key, build)
    try:
        return read(folder)
    except (ConfigurationError, CorruptData) as error:
        report(f"{error}: {again}", None)
        drop_entry(folder)
        return read(cached_folder(kind, key, build))


def _trained_tokenizer(source: TextFiles, content: str, vocab_size: int, report: Progress) -> Tokenizer:
    import tokenizers

    def build(folder: Path) -> None:
        report(f"training a tokenizer of {vocab_size} tokens on {source.name}", None)
        text = train_tokenizer(source, vocab_size).to_str(pretty=True)
        path = folder / "tokenizer.json"
        path.write_text(text, encoding="utf-8")  # its own save raises a bare Exception
        (folder / MANIFEST).write_text(json.dumps({"files": {path.name: hash_file(path)}}), encoding="utf-8")

    def read(folder: Path) -> Tokenizer:
        verify_folder(folder)  # a changed digit may be another tokenizer, which can be read
        return read_tokenizer(folder)

    key = xxhash.xxh3_128_hexdigest(f"{FORMAT} {content} {vocab_size} {tokenizers.__version__}".encode())
    return cached("tokenizers", key, build, read, report, "training the tokenizer again")


def _pack(source: TextFiles, tokenizer: Tokenizer, end: int | None, folder: Path, report: Progress) -> None:
    """Writes ``tokens.bin`` and ``tokens.json`` into ``folder``."""
    kind = np.dtype(np.uint16 if vocab_size_of(tokenizer) <= 1 << 16 else np.uint32)
    ends, count, text_bytes = array("q"), 0, 0
    read_order = folder / "read_order.bin"
    with read_order.open("wb") as file:
        for numbers, ends_here, read in _encoded(source, tokenizer, end):
            file.write(np.asarray(numbers, dtype=kind).tobytes())
            ends.extend(count + at for at in ends_here)
            count += len(numbers)
            text_bytes += read
            report(f"packing tokens of {source.name}", min(1.0, text_bytes / max(1, source.size_bytes)))
    if not text_bytes:
        raise ConfigurationError(f"{source.name} holds no text: give files with text in them")
    if not count:
        remedy = "give files with other text, or another --tokenizer"
        raise ConfigurationError(f"{source.name} becomes no tokens by this tokenizer: {remedy}")
    tokens, digest = np.memmap(read_order, dtype=kind, mode="r"), xxhash.xxh3_128()
    with (folder / "tokens.bin").open("wb") as file:
        for start, stop in stretches(np.asarray(ends, dtype=np.int64)):
            for at in range(start, stop, COPIED_TOKENS):
                data = tokens[at : min(at + COPIED_TOKENS, stop)].tobytes()
                file.write(data)
                digest.update(data)
    read_order.unlink()
    facts = {"count": count, "dtype": kind.name, "xxh3": digest.hexdigest()}
    (folder / "tokens.json").write_text(json.dumps(facts))


def stretches(ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Every token once, as ranges (from, to), of documents with these ``ends``: those that are held out come last.

    Documents are drawn, the same ones always, until they have the held-out share of the tokens. The first that was
    drawn is the last, so of one that is drawn in part only the end is held out.
    """
    starts, wanted = np.concatenate(([0], ends[:-1])), max(1, int(ends[-1] * HELD_OUT_SHARE))
    drawn, held = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    while not len(held) or held[-1] < wanted:
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


def _encoded(source: TextFiles, tokenizer: Tokenizer, end: int | None) -> Iterator[tuple[list[int], list[int], int]]:
    """For each batch of pieces: its tokens, where in them documents end, and the bytes of its text."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True  # the words '<|endoftext|>' in a document are text, not the end of it
    batch, held, begun = [], 0, False  # an empty document has nothing to learn from, not even its end
    for piece in source.pieces():
        begun |= bool(piece.text)
        if begun:
            batch.append(piece)
            held += len(piece.text.encode())
        begun &= not piece.ends_document
        if held >= BATCH_BYTES:
            yield *_numbers(plain, batch, end), held
            batch, held = [], 0
    if batch:
        yield *_numbers(plain, batch, end), held


def _numbers(tokenizer: Tokenizer, batch: list[Piece], end: int | None) -> tuple[list[int], list[int]]:
    numbers, ends = list[int](), list[int]()
    encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    for piece, encoding in zip(batch, encodings, strict=True):
        numbers += encoding.ids
        if piece.ends_document:
            if end is not None:
                numbers.append(end)
            ends.append(len(numbers))
    return numbers, ends


def _open_tokens(folder: Path) -> np.ndarray:
    path = folder / "tokens.bin"
    try:
        facts = json.loads((folder / "tokens.json").read_text())
        tokens = np.memmap(path, dtype=facts["dtype"], mode="r", shape=(facts["count"],))
        found = xxhash.xxh3_128_hexdigest(tokens)  # pyright: ignore[reportArgumentType]
        intact = found == facts["xxh3"] and path.stat().st_size == tokens.nbytes
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"the cached tokens in {folder} cannot be read ({error})") from error
    if not intact:
        raise CorruptData(f"the cached tokens in {path} differ from what was written")
    return tokens
