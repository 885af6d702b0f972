"""Documents out of text, jsonl and parquet files, one piece at a time: a corpus may be larger than RAM.

Order is that of the sorted relative paths, the same on every machine. Whatever cannot be read is an error with file
and place, but for files with foreign encodings of the default corpus, the Python standard library.
"""

import json
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vblackwell.errors import ConfigurationError
from vblackwell.units import MiB

PIECE_BYTES = 1 * MiB
TEXT_SUFFIXES = """
.txt .text .md .markdown .rst .tex .log .html .htm .xml .toml .yaml .yml .py .pyi .c .h .cc .cpp .hpp .cu .cuh
.java .js .ts .go .rs .rb .sh .jl .lua .php .pl .r .scala .swift .kt .sql .css .ini .cfg
"""
TEXT = frozenset(TEXT_SUFFIXES.split())
LINES = frozenset((".jsonl", ".ndjson"))
TABLE = frozenset((".parquet",))
LEGAL = frozenset(("license", "licence", "copying", "notice", "authors", "patents"))  # without an extension


class Piece(NamedTuple):
    text: str
    ends_document: bool


@dataclass(frozen=True)
class TextFiles:
    root: Path  # what the names are relative to
    files: tuple[Path, ...]
    name: str  # what messages call it
    left_out: tuple[Path, ...] = ()  # files of ``root`` that say who may use the others, and are no data

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def pieces(self) -> Iterator[Piece]:
        """Every document's text, in order; ConfigurationError, with the place, where it cannot be read."""
        for path in self.files:
            suffix = path.suffix.lower()
            reader = _read_lines if suffix in LINES else _read_table if suffix in TABLE else _read_text
            with reading(path):
                yield from reader(path)


def find_text(path: Path | None) -> TextFiles:
    """``path``, or all in that folder but LICENSE and such, and ``.`` or ``_`` names; None: the standard library's."""
    files, left_out = list[Path](), list[Path]()
    if path is None:  # the running Python's, about 28 MB, without generated tables, which teach hexadecimal numbers
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
        for parts, found in _below(root, "*.py"):
            with suppress(UnicodeDecodeError):
                if not skipped.intersection(parts):
                    found.read_bytes().decode("utf-8")
                    files.append(found)
        if not files:
            raise ConfigurationError(f"this Python has no sources under {root}: give --data PATH")
        return TextFiles(root, tuple(files), "the Python standard library")
    if not path.exists():
        raise ConfigurationError(f"{path}: no such file or folder of text; check the path")
    if path.is_file():
        _check_kind(path)
        return TextFiles(path.parent, (path,), str(path))
    for parts, found in _below(path, "*"):
        if found.is_file() and not any(part.startswith((".", "_")) for part in parts):
            (left_out if found.name.lower() in LEGAL else files).append(found)
    for found in files:
        _check_kind(found)
    if not files:
        raise ConfigurationError(f"{path}: the folder holds no files of data; give text, jsonl or parquet files")
    return TextFiles(path, tuple(files), str(path), tuple(left_out))


def _below(root: Path, pattern: str) -> list[tuple[tuple[str, ...], Path]]:
    """Matching paths under ``root``, in the order of their parts relative to it."""
    return sorted((path.relative_to(root).parts, path) for path in root.rglob(pattern))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(f"{path} cannot be read: {reason}; check the file and its permissions") from error


def _read_text(path: Path) -> Iterator[Piece]:
    held, start = b"", 0
    with path.open("rb") as file:
        while block := file.read(PIECE_BYTES):
            held += block
            cut = held.rfind(b"\n") + 1
            if not cut and len(held) >= 16 * PIECE_BYTES:
                cut = len(held) - 1
                while cut > len(held) - 4 and held[cut] & 0xC0 == 0x80:  # to where a UTF-8 character begins
                    cut -= 1
            if cut:
                yield Piece(_decode(held[:cut], path, start), ends_document=False)
                held, start = held[cut:], start + cut
    yield Piece(_decode(held, path, start), ends_document=True)


def _decode(data: bytes, path: Path, start: int, place: str = "") -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path}: {place}byte {start + error.start} (0x{data[error.start]:02x}) is not UTF-8; convert the file, "
            f"e.g. with `iconv -f latin1 -t utf-8`, or take it out"
        ) from error


def _read_lines(path: Path) -> Iterator[Piece]:
    for place, record in json_lines(path):
        value = record.get("text") if isinstance(record, dict) else None
        if not isinstance(value, str):
            remedy = 'write {"text": "..."}, or conversations (docs/models.md)'
            raise ConfigurationError(f"{place} has no string under 'text'; {remedy}")
        yield Piece(value, ends_document=True)


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each line of a jsonl file stands, for messages of errors, and what it holds; blank lines are left out."""
    start = 0
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = _decode(line, path, start, f"line {number}, ")
            start += len(line)
            if not text.strip():
                continue
            place = f"{path}: line {number}"
            try:
                record = json.loads(text)
                if "\\u" in text:  # an escape may write half of a pair, which no text has and no tokenizer takes
                    json.dumps(record, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(error.object[error.start]):04x}"
                raise ConfigurationError(f"{place} has half a character ({half}): repair it") from error
            except RecursionError as error:
                raise ConfigurationError(f"{place} is nested too deep to be read: repair or remove it") from error
            except ValueError as error:
                raise ConfigurationError(f"{place} is not JSON ({error}); write one object a line") from error
            yield place, record


def _read_table(path: Path) -> Iterator[Piece]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if "text" not in names:
                given = ", ".join(names)
                raise ConfigurationError(f"{path} has no column 'text', only {given}; rename the one to train on")
            kind = table.schema_arrow.field("text").type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise ConfigurationError(f"{path}: column 'text' holds {kind}, not strings; convert it")
            batches = table.iter_batches(batch_size=256, columns=["text"])
            for row, value in enumerate(value for batch in batches for value in batch.column(0).to_pylist()):
                if value is None:
                    remedy = "remove it or write an empty string"
                    raise ConfigurationError(f"{path}: row {row} has no text (null); {remedy}")
                yield Piece(value, ends_document=True)
    except pyarrow.ArrowException as error:
        raise ConfigurationError(f"{path} is not a readable parquet file: {error}; write it again") from error


def _check_kind(path: Path) -> None:
    if path.suffix.lower() not in TEXT | LINES | TABLE:
        kind = f"the extension {path.suffix!r}" if path.suffix else "a name without extension"
        known = "give text (.txt, .md, .py, ...), .jsonl or .parquet; rename or remove it"
        raise ConfigurationError(f"{path} has {kind}, which is not known: {known}")
