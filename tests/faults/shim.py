"""Builds the library of faults with the system's C compiler, and spells its rules (shim.c says what they mean)."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
KINDS = ("open", "create", "write", "read", "fsync", "rename", "mkdir", "unlink", "allocate", "truncate", "lock")


@dataclass(frozen=True)
class Rule:
    """Do ``action`` at call number ``which`` ("3",
    or "3+" for all from there) of ``kinds`` on a path that contains ``text``.
    """

    kinds: str
    text: str
    which: int | str
    action: str

    def __str__(self) -> str:
        return f"{self.kinds}|{self.text}|{self.which}|{self.action}"


@dataclass(frozen=True)
class Call:
    """A line of the library's log: what a rule's action met."""

    action: str
    number: int
    kind: str
    path: str


def build_shim(folder: Path) -> Path:
    """The library, built in ``folder``."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("the faults need a C compiler: install gcc")
    library = folder / "shim.so"
    subprocess.run([compiler, "-Wall", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def read_calls(log: Path) -> list[Call]:
    """What a process with ``VB_FAULTS_LOG`` wrote down, in order."""
    if not log.exists():
        return []
    lines = (line.split(" ", 3) for line in log.read_text(errors="replace").splitlines())
    return [Call(action, int(number), kind, path) for action, number, kind, path in lines]
