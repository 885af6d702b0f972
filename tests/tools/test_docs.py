"""``vb docs`` prints the pages, what cites one names its topic, and ``vb --version`` answers without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import vblackwell
from vblackwell import cli
from vblackwell.tools import docs

ROOT = Path(__file__).parents[2]


def test_each_page_is_listed_with_its_title_and_printed(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["docs"]) == 0
    listed = capsys.readouterr().out
    files = {path.stem: path for path in (ROOT / "docs").glob("*.md")} | {"changelog": ROOT / "CHANGELOG.md"}
    assert {line.split()[0] for line in listed.split("\n\n")[0].splitlines()} == set(files)
    for topic, path in files.items():
        text = path.read_text(encoding="utf-8")
        assert text.splitlines()[0].lstrip("# ") in listed
        assert cli.main(["docs", topic]) == 0
        assert capsys.readouterr().out == text


def test_an_unknown_topic_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["docs", "ofload"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "'ofload' is not known" in said.err and "did you mean 'offload'?" in said.err


def test_a_package_without_its_pages_says_so(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(docs, "_PACKAGE", tmp_path / "vblackwell")
    assert cli.main(["docs"]) == 2
    assert "install vblackwell from its wheel" in capsys.readouterr().err


def test_what_the_package_says_of_its_pages_can_be_typed():
    """Errors, help and docstrings name topics; comments, and the journal, which is not installed, are for the sources'
    readers.
    """
    named = set()
    for path in (ROOT / "vblackwell").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "docs" in text and path != Path(docs.__file__):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    assert not re.search(r"\bdocs/(?!journal/)[\w-]+\.md", node.value), f"{path}: {node.value}"
                    named.update(re.findall(r"`vb docs ([\w-]+)`", node.value))
    assert {"models", "numerics"} <= named <= set(docs.pages())


PROGRAM = """
import sys, time
from vblackwell import cli
assert cli.main(sys.argv[1:]) == 0
assert time.process_time() < 0.3, time.process_time()  # of the whole process: others may keep it waiting
assert "torch" not in sys.modules and "jsonargparse" not in sys.modules
"""


def test_the_version_is_one_line_at_once():
    words = [sys.executable, "-c", PROGRAM, "--version"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    python = ".".join(map(str, sys.version_info[:3]))
    start = f"vblackwell {vblackwell.__version__}, Python {python}, torch {metadata.version('torch')}, "
    assert done.stdout.startswith(start) and done.stdout.count("\n") == 1
    assert docs.version(vblackwell.__version__) + "\n" == done.stdout


def test_the_version_names_the_gpus(monkeypatch: pytest.MonkeyPatch):
    from vblackwell.machine import facts

    gpu = facts.GPUFacts(0, "NVIDIA H200", 1, 1, (9, 0), "0000:18:00.0", "580", (13, 0), None)
    monkeypatch.setattr(facts, "list_gpus", lambda: [gpu, gpu])
    assert docs.version(vblackwell.__version__).endswith(", NVIDIA H200, NVIDIA H200")
    monkeypatch.setattr(facts, "list_gpus", list)
    assert docs.version(vblackwell.__version__).endswith(", no GPU")
