"""Real processes on a miniature run: a decoder of 27 thousand parameters on a hundred kilobytes of Python."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.forks import Child, ForkServer

MINIATURE = [
    "--architecture", "{num_layers: 3, hidden_size: 32, intermediate_size: 64, num_heads: 2}", "--vocab-size", "300",
    "--seq-length", "32", "--batch-size", "4", "--learning-rate", "1e-2", "--device", "cpu", "--no-tensorboard",
    "--sample-tokens", "2", "--eval-sequences", "16",
]  # fmt: skip
# After whose first call a child may signal itself: a step is recorded; a checkpoint is committed.
RECORDED, COMMITTED = "vblackwell.train.metrics:MetricsLog.write", "vblackwell.train.run:write_checkpoint"
# Training state is 16 bytes a parameter, 430 KiB: far more than level 0, so that the run streams.
LEVELS = ["--fast-memory", "128KiB", "--host-memory", "512KiB", "--disk-memory", "8MiB"]


@dataclass(frozen=True)
class Result:
    """A command that has ended."""

    stdout: str
    stderr: str


@dataclass(frozen=True)
class Workplace:
    """Where a test's commands run: a folder on a disk, a small corpus, and what all tests of the session share."""

    folder: Path
    corpus: Path
    server: ForkServer
    shared_environment: dict[str, str]

    def environment(self) -> dict[str, str]:
        """Of a command that is started without the fork server."""
        return self.shared_environment | {"TMPDIR": str(self.folder)}

    def train_words(self, *words: str) -> list[str]:
        """The words of a miniature `vb train` on the corpus."""
        return ["train", *MINIATURE, "--data", str(self.corpus), "--disk-path", str(self.folder), *words]

    def start(
        self,
        *words: str,
        file_bytes: int | None = None,
        signal_after: tuple[str, list[int]] | None = None,
        **environment: str,
    ) -> Child:
        """Start ``vb`` and return at once. ``ForkServer.start`` explains the options;
        ``file_bytes`` is RLIMIT_FSIZE.
        """
        return self.server.start(
            list(words),
            self.folder,
            {"TMPDIR": str(self.folder), **environment},
            limits={} if file_bytes is None else {"RLIMIT_FSIZE": file_bytes},
            signal_after=signal_after,
        )

    def vb(self, *words: str, code: int = 0, file_bytes: int | None = None, **environment: str) -> Result:
        """Run ``vb`` to its end and check its exit code."""
        child = self.start(*words, file_bytes=file_bytes, **environment)
        found = child.wait()
        result = Result(child.stdout.read_text(encoding="utf-8"), child.stderr.read_text(encoding="utf-8"))
        assert found == code, f"exit {found}\n{result.stdout}\n{result.stderr}"
        return result


@pytest.fixture(scope="session")
def shared(
    forks: tuple[ForkServer, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ForkServer, dict[str, str]]:
    """Corpus, fork server and environment of the session."""
    corpus = tmp_path_factory.mktemp("shared") / "corpus.py"
    corpus.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return corpus, *forks


@pytest.fixture
def place(shared: tuple[Path, ForkServer, dict[str, str]], tmp_path: Path) -> Iterator[Workplace]:
    """A fresh folder for one test."""
    yield Workplace(tmp_path, *shared)
    shared[1].end_children()


@pytest.fixture(scope="session")
def finished(
    shared: tuple[Path, ForkServer, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Workplace, Path, str]:
    """A run of 24 steps that ended by itself: (workplace, run folder, its output). Not to be changed by tests."""
    place = Workplace(tmp_path_factory.mktemp("finished"), *shared)
    common = ["--max-steps", "24", "--checkpoint-every", "10", "--eval-every", "8", "--out", "run"]
    words = place.train_words(*LEVELS, *common)
    result = place.vb(*(word for word in words if word != "--no-tensorboard"))
    return place, place.folder / "run", result.stdout
