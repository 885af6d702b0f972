"""Records out of files: jsonl, json (an array of objects, or an object a line) and parquet, one at a time.

An array is read in pieces, and at most one of them and one record are held: what ``json.load`` makes of a file takes
several times its size. Whatever cannot be read is one line with the file and the place in it.
"""

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.units import MiB

BLOCK_BYTES = 1 * MiB
TABLE = frozenset((".parquet",))
RECORDS = frozenset((".jsonl", ".ndjson", ".json")) | TABLE
PACKED = {
    ".gz": "gunzip -k", ".zst": "unzstd", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zip": "unzip", ".tar": "tar xf",
}  # fmt: skip
MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ": ".xz", b"PK\x03\x04": ".zip"}
_WHITE = re.compile(r"\s*")
# What is read of a record; other columns of a table may be large, and are not.
COLUMNS = (
    "text", "messages", "conversations", "instruction", "input", "output", "system", "prompt", "completion", "chosen",
    "rejected", "label", "tools", "functions", "history",
)  # fmt: skip
WANTED = "write text, messages, conversations, instruction and output, or prompt and completion (`vb docs models`)"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(f"{path} cannot be read: {reason}; check the file and its permissions") from error


def decode_text(data: bytes, path: Path, start: int, place: str = "") -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_text(path, f"{place}byte {start + error.start} (0x{data[error.start]:02x})") from error


def _no_text(path: Path, where: str) -> ConfigurationError:
    with path.open("rb") as file:
        begin = file.read(8)
    if suffix := next((suffix for magic, suffix in MAGIC.items() if begin.startswith(magic)), None):
        return compressed(path, suffix)
    advice = "convert the file, e.g. with `iconv -f latin1 -t utf-8`, or take it out"
    return ConfigurationError(f"{path}: {where} is not UTF-8; {advice}")


def compressed(path: Path, suffix: str) -> ConfigurationError:
    advice = f"unpack it first, e.g. with `{PACKED[suffix]} {path.name}`"
    return ConfigurationError(f"{path} is compressed ({suffix}), which is not read: {advice}")


def kind_of_value(value: Any) -> str:
    """What a JSON value is, in words for a message."""
    kinds = {type(None): "nothing", bool: "true or false", int: "a number", float: "a number", str: "a string"}
    return (kinds | {list: "a list", dict: "an object"}).get(type(value), f"a value of type {type(value).__name__}")


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each record of a file of `RECORDS` stands, for messages of errors, and what it holds, one at a time.

    A .json file is an array of objects, or an object a line; of a parquet file the columns in `COLUMNS` are read.
    Raises ConfigurationError, with file and place: not JSON, no object, not a table; Unsupported without pyarrow.
    """
    suffix = path.suffix.lower()
    with reading(path):
        if suffix in TABLE:
            yield from _table_rows(path)
            return
        found = _json_array(path) if suffix == ".json" and _is_array(path) else _json_lines(path)
        for place, record in found:
            if not isinstance(record, dict):
                raise ConfigurationError(f"{place} holds {kind_of_value(record)}, not an object; {WANTED}")
            yield place, record


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Blank lines are left out."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = decode_text(line, path, start, f"line {number}, ")
            start += len(line)
            if text.strip():
                place = f"{path}: line {number}"
                with _parsing(place, "write one object a line"):
                    record = json.loads(text)
                    _check_characters(text, record)
                yield place, record


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _json_array(path: Path) -> Iterator[tuple[str, Any]]:
    """Elements of an array, of which at most a piece and one element are held."""
    decoder, blocks, text, at, number = json.JSONDecoder(), _text_blocks(path), "", 0, 0

    def following() -> str:
        """The next character that is not white, at ``at`` then; none at the end."""
        nonlocal text, at
        while (at := _WHITE.match(text, at).end()) == len(text):  # type: ignore[union-attr]
            block = next(blocks, None)
            if block is None:
                return ""
            text, at = block, 0
        return text[at]

    following()
    at += 1  # of the '['
    while (char := following()) != "]" or number:
        if number:
            if char not in (",", "]"):
                said = f"is followed by {char!r}" if char else "is the last, and no ']' follows"
                raise ConfigurationError(f"{path}: record {number} {said}; write an array of objects")
            at += 1
            if char == "]":
                break
        number += 1
        place, char = f"{path}: record {number}", following()
        if char != "{":
            raise ConfigurationError(f"{place} begins with {char!r}, not an object; {WANTED}")
        with _parsing(place, "write an array of objects"):
            while True:
                try:
                    record, end = decoder.raw_decode(text, at)
                    break
                except json.JSONDecodeError:
                    # It may go on: as much again as is held, so that the time stays linear.
                    more, size = list[str](), len(text) - at
                    while sum(map(len, more)) <= size and (block := next(blocks, None)) is not None:
                        more.append(block)
                    if not more:
                        raise
                    text, at = text[at:] + "".join(more), 0
            _check_characters(text[at:end], record)
        at = end
        yield place, record
    at += not number
    if char := following():
        raise ConfigurationError(f"{path}: {char!r} follows the array; write one array of objects")


def _text_blocks(path: Path) -> Iterator[str]:
    """The text of a file, without the mark of its byte order."""
    decoder, start, mark = codecs.getincrementaldecoder("utf-8")(), 0, "\ufeff"
    with path.open("rb") as file:
        while True:
            block, held = file.read(BLOCK_BYTES), len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                byte = f"byte {start - held + error.start} (0x{error.object[error.start]:02x})"
                raise _no_text(path, byte) from error
            if text:
                yield text.removeprefix(mark)
                mark = ""
            if not block:
                return
            start += len(block)


@contextmanager
def _parsing(place: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ConfigurationError(f"{place} has half a character ({half}): repair it") from error
    except RecursionError as error:
        raise ConfigurationError(f"{place} is nested too deep to be read: repair or remove it") from error
    except ValueError as error:
        raise ConfigurationError(f"{place} is not JSON ({error}); {remedy}") from error


def _check_characters(text: str, record: Any) -> None:
    if "\\u" in text:  # an escape may write half of a pair, which no text has and no tokenizer takes
        json.dumps(record, ensure_ascii=False).encode()


def _table_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise Unsupported(f"{path} is a parquet file: pip install pyarrow, or write jsonl") from error
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            columns = [name for name in names if name in COLUMNS]
            if not columns:
                raise ConfigurationError(
                    f"{path} has none of the columns that are read, only {', '.join(names)}; {WANTED}"
                )
            batches = table.iter_batches(batch_size=256, columns=columns)
            for row, record in enumerate(record for batch in batches for record in batch.to_pylist()):
                yield f"{path}: row {row}", record
    except pyarrow.ArrowException as error:
        raise ConfigurationError(f"{path} is not a readable parquet file: {error}; write it again") from error
