"""docs/architecture.md names every package and only files that exist; so do the other pages, where they name files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vblackwell"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = {path.name for area in ("vblackwell", "tests", "benchmarks", "docs") for path in (ROOT / area).rglob("*.*")}


def test_every_package_has_a_line():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `(vblackwell/[\w/]+)` \|", page, re.MULTILINE))
    packages = {path.parent.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("__init__.py")} - {"vblackwell"}
    assert told == packages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path):
    """A path with a folder and a suffix, from the root or from the package; and a file's name alone, anywhere."""
    text = page.read_text(encoding="utf-8")
    code = re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|cu|cuh|csv|c))(?::[\w.]+)?`", text)
    words = re.findall(r"\b((?:tests|benchmarks|examples|docs)/[\w/-]+\.\w+)", text)
    for name in {*code, *words}:
        if "/" in name:
            assert any((root / name).is_file() for root in (ROOT, PACKAGE)), f"{page.name} names {name}"
        else:
            assert name in NAMES, f"{page.name} names {name}"
