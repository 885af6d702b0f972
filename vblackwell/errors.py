"""What users see when something is refused or fails: what, where, how much and what to do.

The commands print it as one line and exit with code 2; a traceback appears only with ``--debug``. ``assert`` is for our
own invariants, these classes are for everything that a user, a disk or a machine can cause.
"""

import difflib
import re
from collections.abc import Collection, Iterable
from pathlib import Path


class VBError(Exception):
    """Parent of all errors raised on purpose. ``str(error)`` is a complete sentence for the user."""

    exit_code = 2


class ConfigurationError(VBError, ValueError):
    """A value, flag, key or combination that is refused; the message names the allowed range and a remedy."""


class FolderMismatch(ConfigurationError):
    """The tensors in a model's folder are not those of its config.json: ``missing`` are in no file, ``extra`` not in
    the model, ``misshapen`` of another shape or kind of type; nothing was loaded.
    """

    def __init__(self, message: str, *, missing: Iterable[str], extra: Iterable[str], misshapen: Iterable[str]) -> None:
        super().__init__(message)
        self.missing, self.extra, self.misshapen = tuple(missing), tuple(extra), tuple(misshapen)


class InsufficientMemory(VBError):
    """A level, or the stack as a whole, lacks room for ``needed_bytes``; nothing was moved or changed."""

    def __init__(self, message: str, *, needed_bytes: int = 0, available_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes


class DiskError(VBError, OSError):
    """A read or write on a disk level or checkpoint failed; the message has file, offset, size and the system's own."""


class CorruptData(VBError):
    """Bytes that came back differ from the bytes that were written (checksum, size or format)."""


class KeyClash(VBError, ValueError):
    """Two owners want the same key in one stack."""


class StaleTensor(VBError, RuntimeError):
    """Something was about to read or write bytes that have since changed owner or value."""


class StepAbandoned(VBError, RuntimeError):
    """An update was made final before its step, and the step did not come: the weights are between two steps."""


class Unsupported(VBError, NotImplementedError):
    """A combination that this version refuses; the message says why and what works instead."""


class UnknownKey(VBError, KeyError):
    """Nothing is registered under this key."""

    __str__ = Exception.__str__  # KeyError's own shows the text as Python would type it


_TYPED = (
    (r"\b(fast|host|disk)_memory\b(?: \(the capacit[^)]*\))?", r"--\1-memory"),
    (r"\b(update|placement|activations)='(\w+)'", r"--\1 \2"),
    (r"\bstates='(\w+)'", r"--optimizer-states \1"),
    (r"\bmasters='(\w+)'", r"--masters \1"),
    (r"a level below level 0: add a .* level to the stack", "RAM or disk: give --host-memory or --disk-memory"),
    (r"\bbelow level 0\b", "of RAM and disk"),
    (r"\bthe lower levels have", "they have"),
    (r"level 0 \(arena\)", "fast memory (RAM that stands for a GPU)"),
    (r"level 0 \((?:GPU|cuda:\d+)\)", "GPU memory"),
    (r"\blevel 0\b", "fast memory"),
)


def as_typed(text: str) -> str:
    """What the library says of its arguments and levels, with the flags and in the words of the command line."""
    for said, typed in _TYPED:
        text = re.sub(said, typed, text)
    return text


def likeness(one: str, other: str) -> float:
    """How alike two names are, from 0 to 1."""
    return difflib.SequenceMatcher(None, one, other).ratio()


def nearest(name: str, known: Iterable[str]) -> str:
    """``", did you mean 'lru'?"``-like ending for a sentence about an unknown ``name``; empty where nothing is near."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def nearest_path(path: Path) -> str:
    """The same for a ``path`` that is not there, among what its folder has; empty where that cannot be listed."""
    try:
        return nearest(path.name, [found.name for found in path.parent.iterdir()])
    except OSError:
        return ""


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Raises ConfigurationError, with the nearest, where ``name`` is none of ``known``."""
    if name not in known:
        choice = f"choose one of {', '.join(known)}{nearest(str(name), known)}"
        raise ConfigurationError(f"{what} {name!r} is not known: {choice}")
