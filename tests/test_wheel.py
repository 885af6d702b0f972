"""A wheel that is built from the sources and installed elsewhere has every file that the package reads, and trains."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import vblackwell
from tests.cli.conftest import LEVELS, MINIATURE

ROOT = Path(__file__).parents[1]
# The installed command, which says first where its package is.
PROGRAM = """
import runpy, sys
import vblackwell
print(vblackwell.__file__, flush=True)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SOURCES = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "docs/*.md",
    "vblackwell",
)


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def vb(installed: Path, *words: str, cwd: Path) -> str:
    """What the installed command says, after the line that names its package's file."""
    found = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])  # with what it depends on
    where = {"PYTHONPATH": found, "XDG_CACHE_HOME": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
    return run(sys.executable, "-c", PROGRAM, installed / "bin" / "vb", *words, cwd=cwd, **where)


def tracked() -> list[str]:
    """The files that the wheel is made of, without what the build or a test leaves next to them; new ones too, which
    the index of a copy of the checkout may not know."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SOURCES, cwd=ROOT)
    return [name for name in names.rstrip("\0").split("\0") if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a wheel of the tracked files was installed into, with nothing else in it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        copy = folder / "sources" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
    # The installed setuptools builds it: nothing is asked of a registry.
    run(*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", "../dist", cwd=folder / "sources")
    (wheel,) = (folder / "dist").glob("vblackwell-*.whl")
    # Its dependencies are the ones of this environment: no registry is asked.
    run(*pip, "install", "--no-deps", "--no-index", "--no-compile", "--target", folder / "installed", wheel, cwd=folder)
    return folder / "installed"


def test_every_tracked_file_is_in_the_wheel(installed: Path):
    found = {path.relative_to(installed).as_posix() for path in (installed / "vblackwell").rglob("*") if path.is_file()}
    names = tracked()
    wanted = {name for name in names if name.startswith("vblackwell/")}
    pages = {
        f"vblackwell/docs/{Path(name).name}" for name in names if name.startswith("docs/") and name.count("/") == 1
    }
    assert {Path(name).suffix for name in wanted} >= {".py", ".cu", ".cuh", ".json", ".typed"}
    assert found == wanted | pages | {"vblackwell/docs/changelog.md"} and len(pages) > 9


def test_the_installed_command_prints_the_pages(installed: Path, tmp_path: Path):
    listed = vb(installed, "docs", cwd=tmp_path)
    topics = [line.split()[0] for line in listed.split("\n\n")[0].splitlines()[1:]]
    assert set(topics) == {path.stem for path in (ROOT / "docs").glob("*.md")} | {"changelog"}
    for topic, page in (("offload", ROOT / "docs/offload.md"), ("changelog", ROOT / "CHANGELOG.md")):
        assert vb(installed, "docs", topic, cwd=tmp_path).partition("\n")[2] == page.read_text(encoding="utf-8")


def test_the_metadata_is_the_packages_and_invents_no_address(installed: Path):
    (found,) = metadata.distributions(path=[str(installed)])
    assert found.version == vblackwell.__version__
    urls = dict(line.split(", ") for line in found.metadata.get_all("Project-URL"))
    assert {"Repository", "Documentation", "Changelog"} <= set(urls)
    assert all(url.split("/")[2].endswith(".invalid") for url in urls.values())  # RFC 2606: nobody's
    assert found.metadata["Description-Content-Type"] == "text/markdown"


def test_the_installed_package_trains(installed: Path, tmp_path: Path):
    corpus = tmp_path / "corpus.py"
    corpus.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    said = vb(
        installed,
        "train",
        *MINIATURE,
        *LEVELS,
        "--max-steps",
        "2",
        "--data",
        str(corpus),
        "--disk-path",
        str(tmp_path),
        "--out",
        "run",
        cwd=tmp_path,
    )
    assert Path(said.splitlines()[0]).is_relative_to(installed)
    steps = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line).get("step") for line in steps][-1] == 2
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
