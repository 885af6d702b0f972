"""One case in a separate process."""

from __future__ import annotations

import importlib
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any


def cases(package: str) -> dict[str, Any]:
    """The table of cases over the vblackwell that lies in the folder ``package``."""
    sys.path.insert(0, package)  # for as long as vblackwell is found: the folder has a package `tests`, too
    try:
        for name in ("runs", "offload", "modules"):
            importlib.import_module(f"tests.bits.{name}")
    finally:
        sys.path.remove(package)
    return importlib.import_module("tests.bits.case").CASES


def run_case(name: str, parent: str, package: str) -> tuple[dict[str, str], str | None, float]:
    """Hashes by name, what went wrong, and seconds."""
    table = cases(package)
    from tests.bits.hashes import digest

    folder = Path(parent, name)
    folder.mkdir()
    found: dict[str, str] = {}
    error, start = None, time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for part, value in table[name](folder):
                found[f"{name}/{part}"] = digest(value)
        except Exception:  # reported, and the start fails; other cases still run
            error = traceback.format_exc()
    shutil.rmtree(folder)
    return found, error, time.monotonic() - start
