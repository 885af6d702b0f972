"""Documents out of text, jsonl, json and parquet files, one piece at a time: a corpus may be larger than RAM.

Order is that of the sorted relative paths, the same on every machine. Whatever cannot be read is an error with file
and place, but for files with foreign encodings of the default corpus, the Python standard library.
"""

import re
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vblackwell.data.records import PACKED, RECORDS, WANTED, compressed, decode_text, kind_of_value, reading, records
from vblackwell.errors import ConfigurationError, nearest_path
from vblackwell.units import MiB

PIECE_BYTES = 1 * MiB
TEXT_SUFFIXES = """
.txt .text .md .markdown .rst .tex .log .html .htm .xml .toml .yaml .yml .py .pyi .c .h .cc .cpp .hpp .cu .cuh
.java .js .ts .go .rs .rb .sh .jl .lua .php .pl .r .scala .swift .kt .sql .css .ini .cfg
"""
TEXT = frozenset(TEXT_SUFFIXES.split())
LEGAL = frozenset(("license", "licence", "copying", "notice", "authors", "patents"))  # without an extension
CARDS = frozenset(("readme.md", "dataset_infos.json", "dataset_info.json"))  # what a hub puts next to files of records


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
            reader = _read_texts if path.suffix.lower() in RECORDS else _read_text
            with reading(path):
                yield from reader(path)


def find_text(path: Path | None) -> TextFiles:
    """``path``, or all in that folder but LICENSE and such, a README.md next to files of records, and ``.`` or ``_``
    names; None: the standard library's. Raises ConfigurationError for no file of data, or of an unknown kind."""
    files = list[Path]()
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
    check_path(path)
    if path.is_file():
        return TextFiles(path.parent, (path,), str(path))
    for parts, found in _below(path, "*"):
        if found.is_file() and not any(part.startswith((".", "_")) for part in parts):
            files.append(found)
    cards = CARDS if any(found.suffix.lower() in RECORDS and found.name.lower() not in CARDS for found in files) else ()
    left_out = [found for found in files if found.name.lower() in LEGAL or found.name.lower() in cards]
    files = [found for found in files if found not in left_out]
    for found in files:
        _check_kind(found)
    if not files:
        raise ConfigurationError(f"{path}: the folder holds no files of data; give text, jsonl or parquet files")
    return TextFiles(path, tuple(files), str(path), tuple(left_out))


def check_path(path: Path) -> None:
    """Raises ConfigurationError where there is no ``path``, or it is a file of an unknown kind; opens nothing."""
    if path.is_file():
        _check_kind(path)
    if path.exists():
        return
    near = nearest_path(path)
    advice = f"check the path{near}"
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)) and path.suffix.lower() not in TEXT | RECORDS and not near:
        get = f"hf download {path} --repo-type dataset --local-dir {path.name}"
        advice += f"; a dataset of the Hugging Face hub is read as files: `{get}`, then --data {path.name}"
    raise ConfigurationError(f"{path}: no such file or folder of text; {advice}")


def _below(root: Path, pattern: str) -> list[tuple[tuple[str, ...], Path]]:
    """Matching paths under ``root``, in the order of their parts relative to it."""
    return sorted((path.relative_to(root).parts, path) for path in root.rglob(pattern))


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
                yield Piece(decode_text(held[:cut], path, start), ends_document=False)
                held, start = held[cut:], start + cut
    yield Piece(decode_text(held, path, start), ends_document=True)


def _read_texts(path: Path) -> Iterator[Piece]:
    for place, record in records(path):
        value = record.get("text")
        if not isinstance(value, str):
            raise ConfigurationError(f"{place} has no string under 'text', but {kind_of_value(value)}; {WANTED}")
        yield Piece(value, ends_document=True)


def _check_kind(path: Path) -> None:
    suffix = path.suffix.lower()
    if suffix in PACKED:
        raise compressed(path, suffix)
    if suffix not in TEXT | RECORDS:
        kind = f"the extension {path.suffix!r}" if path.suffix else "a name without extension"
        known = "give text (.txt, .md, .py, ...), .jsonl, .json or .parquet; rename or remove it"
        raise ConfigurationError(f"{path} has {kind}, which is not known: {known}")
