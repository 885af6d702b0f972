"""Real processes on a miniature run: a decoder of 27 thousand parameters on a hundred kilobytes of Python."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

MINIATURE = [
    "--architecture", "{num_layers: 3, hidden_size: 32, intermediate_size: 64, num_heads: 2}", "--vocab-size", "300",
    "--seq-length", "32", "--batch-size", "4", "--learning-rate", "1e-2", "--device", "cpu", "--no-tensorboard",
    "--sample-tokens", "8",
]  # fmt: skip
# Training state is 16 bytes a parameter, 430 KiB: far more than level 0, so that the run streams.
LEVELS = ["--fast-memory", "128KiB", "--host-memory", "256KiB", "--disk-memory", "8MiB"]


@dataclass(frozen=True)
class Workplace:
    """Where a test's commands run: a folder on a disk, a small corpus, and a cache that all tests of the session share."""

    folder: Path
    corpus: Path
    cache: Path

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "COLUMNS")}
        return kept | {"XDG_CACHE_HOME": str(self.cache), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)} | extra

    def train_words(self, *words: str) -> list[str]:
        """The words of a miniature `vb train` on the corpus."""
        return ["train", *MINIATURE, "--data", str(self.corpus), "--disk-path", str(self.folder), *words]

    def vb(self, *words: str, code: int = 0, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run ``vb`` to its end and check its exit code."""
        result = subprocess.run(
            [sys.executable, "-m", "vblackwell", *words],
            capture_output=True, text=True, timeout=120, cwd=self.folder, env=self.environment(**extra),
        )  # fmt: skip
        assert result.returncode == code, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start ``vb`` and return at once."""
        return subprocess.Popen(
            [sys.executable, "-m", "vblackwell", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder, env=self.environment(),
        )  # fmt: skip


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(corpus, cache) of the session."""
    folder = tmp_path_factory.mktemp("shared")
    corpus = folder / "corpus.py"
    corpus.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return corpus, folder / "cache"


@pytest.fixture
def place(shared: tuple[Path, Path], tmp_path: Path) -> Workplace:
    """A fresh folder for one test."""
    return Workplace(tmp_path, *shared)


@pytest.fixture(scope="session")
def finished(shared: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Workplace, Path, str]:
    """A run of 24 steps that ended by itself: (workplace, run folder, its output). Not to be changed by tests."""
    place = Workplace(tmp_path_factory.mktemp("finished"), *shared)
    words = place.train_words(
        *LEVELS, "--max-steps", "24", "--checkpoint-every", "10", "--eval-every", "8", "--out", "run"
    )
    result = place.vb(*(word for word in words if word != "--no-tensorboard"))
    return place, place.folder / "run", result.stdout
