"""Where a fault is tried: a fork server with the shim, a corpus, the undisturbed run,
and what every command owes its user.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xxhash

from tests.cli.conftest import LEVELS, MINIATURE
from tests.cli.forks import Child, ForkServer
from tests.faults.shim import KINDS, Call, Rule, build_shim, read_calls
from vblackwell.train.runfolder import holds_run

# Far more than any of these commands takes, on any machine: what has not ended then hangs.
HANGS_AFTER_SECONDS = 240
MEMORY_BYTES = 4 << 30  # of a command that may be led to take all there is (RLIMIT_DATA)
RUN = "run"
# Six steps, three checkpoints, of which the last one prunes the first.
STEPS = 6
TRAINING = [
    *(*LEVELS, "--max-steps", str(STEPS), "--out", RUN),
    *("--checkpoint-every", "2", "--keep-checkpoints", "2", "--eval-every", "2", "--eval-sequences", "4"),
    *("--sample-tokens", "0"),
]
COMPARED = ("step", "loss", "lr", "grad_norm", "val_loss")
# The machine's C compiler, which is no part of what is tried, and which every fresh cache asks for the same.
COMPILER = """#!/bin/sh
for word; do [ "$last" = -o ] && made=$word || asked="$asked $word"; last=$word; done
kept={folder}/$(printf %s "$asked" | cksum | tr " " -)
[ -n "$made" ] || exec {compiler} "$@"
[ -e "$kept" ] || {{ {compiler} "$@" && cp "$made" "$kept.$$" && mv "$kept.$$" "$kept"; exit; }}
cp "$kept" "$made"
"""


def keeping_compiler(folder: Path) -> Path:
    """A compiler that copies what it has compiled before, in ``folder``."""
    compiler, kept = folder / "cc", folder / "compiled"
    kept.mkdir()
    found = shutil.which("cc") or shutil.which("gcc")
    compiler.write_text(COMPILER.format(folder=shlex.quote(str(kept)), compiler=found), encoding="utf-8")
    compiler.chmod(0o755)
    return compiler


@dataclass(frozen=True)
class Numbers:
    """What a run computed: the bits of its weights, and every line of its metrics but for times and bytes."""

    weights: str
    metrics: tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str
    calls: list[Call]

    def __str__(self) -> str:
        return f"exit {self.code}\n{self.stdout[-400:]}\n{self.stderr[-1500:]}"


class Lab:
    """What the tries of one worker share. ``corpus`` is made if it is not there: workers of one campaign have one."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder, self.corpus = folder, corpus
        if not corpus.exists():
            corpus.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        self.shim = build_shim(folder)
        kept = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "COLUMNS")}
        self.environment = kept | {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "CC": str(keeping_compiler(folder)),
            "OMP_NUM_THREADS": "1",
            "LD_PRELOAD": str(self.shim),
            "HF_HUB_OFFLINE": "1",
        }
        self.server = ForkServer(
            folder, self.environment, "torch.utils.tensorboard", "tensorboard.compat.tensorflow_stub"
        )
        self._count = 0

    def place(self) -> Place:
        """A fresh folder."""
        self._count += 1
        folder = self.folder / f"try{self._count}"
        folder.mkdir()
        return Place(folder, self)

    def close(self) -> None:
        self.server.close()

    @cached_property
    def undisturbed(self) -> tuple[Numbers, list[Call]]:
        """The run without a fault, with all it has (TensorBoard, a separate cache): its numbers, and its calls."""
        place = self.place()
        rules = [Rule(",".join(KINDS), "/", "1+", "log")]
        ended = place.vb(*place.training(tensorboard=True), rules=rules, XDG_CACHE_HOME=str(place.folder / "cache"))
        assert ended.code == 0, ended
        return place.numbers(), ended.calls

    @cached_property
    def stopped(self) -> Path:
        """A run that was killed in its last step, with checkpoints of steps 2 and 4. To be copied."""
        place = self.place()
        ended = place.vb(*place.training(), rules=[Rule("write", "metrics.jsonl", 6, "kill")])
        assert ended.code == -signal.SIGKILL, ended
        return place.folder / RUN

    @cached_property
    def finished(self) -> Path:
        """A run that has ended. To be copied."""
        place = self.place()
        ended = place.vb(*place.training())
        assert ended.code == 0, ended
        return place.folder / RUN


@dataclass(frozen=True)
class Place:
    """A folder in which one fault is tried."""

    folder: Path
    lab: Lab

    @property
    def run(self) -> Path:
        return self.folder / RUN

    def training(self, *words: str, tensorboard: bool = False) -> list[str]:
        """The words of the run, resumed where it has begun; those given come last, and win."""
        resumed = ["--resume"] if holds_run(self.run) else []
        base = [word for word in MINIATURE if word != "--no-tensorboard" or not tensorboard]
        where = ["--data", str(self.lab.corpus), "--disk-path", str(self.folder)]
        return ["train", *base, *where, *TRAINING, *resumed, *words]

    def start(
        self,
        *words: str,
        rules: Sequence[Rule] = (),
        limits: dict[str, int] | None = None,
        cgroup: Path | None = None,
        **environment: str | None,
    ) -> Child:
        """Start ``vb`` and return at once."""
        own: dict[str, str | None] = {"TMPDIR": str(self.folder)}
        if rules:
            own |= {"VB_FAULTS": ";".join(map(str, rules)), "VB_FAULTS_LOG": str(self._log)}
            self._log.unlink(missing_ok=True)
        return self.lab.server.start(list(words), self.folder, own | environment, limits, cgroup)

    @property
    def _log(self) -> Path:
        return self.folder / "calls.log"

    def end(self, child: Child) -> Ended:
        """Wait for a command; one that hangs is killed, and broke the contract."""
        code = child.wait(HANGS_AFTER_SECONDS)
        if code is None:
            child.signal(signal.SIGKILL)
            child.wait()
        said = (path.read_text(encoding="utf-8", errors="replace") for path in (child.stdout, child.stderr))
        ended = Ended(-1 if code is None else code, *said, read_calls(self._log))
        for path in (child.stdout, child.stderr):
            path.unlink()
        assert code is not None, f"hangs\n{ended}"
        return ended

    def wait_until_paused(self, child: Child) -> None:
        """Until a rule has stopped the command; one that ends without is an error."""
        while child.state != "T":
            assert child.alive, f"the command was not stopped\n{self.end(child)}"
            time.sleep(0.002)

    def go_on(self, child: Child) -> None:
        """Let a stopped command run."""
        child.signal(signal.SIGCONT)

    def vb(
        self,
        *words: str,
        rules: Sequence[Rule] = (),
        limits: dict[str, int] | None = None,
        cgroup: Path | None = None,
        **environment: str | None,
    ) -> Ended:
        """Run ``vb`` to its end."""
        return self.end(self.start(*words, rules=rules, limits=limits, cgroup=cgroup, **environment))

    def numbers(self) -> Numbers:
        """Of the finished run."""
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        weights = (self.run / "final/model.safetensors").read_bytes()
        return Numbers(xxhash.xxh3_128_hexdigest(weights), tuple(tuple(map(line.get, COMPARED)) for line in lines))

    def copy_run(self, run: Path) -> None:
        """``run`` as this place's run."""
        shutil.copytree(run, self.run, symlinks=True)


# -- the contract ------------------------------------------------------------------------------------------------------


def is_clean(ended: Ended) -> None:
    """Nobody sees our insides: no traceback, no internal error, no death by a fault of memory."""
    said = ended.stdout + ended.stderr
    assert "Traceback" not in said and "internal error" not in said, ended
    assert ended.code not in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, 1), ended


def is_refused(ended: Ended, *parts: str) -> None:
    """Exit code 2 and one clear line."""
    is_clean(ended)
    lines = ended.stderr.splitlines()
    assert ended.code == 2 and len(lines) == 1 and lines[0].startswith("vb: error: "), ended
    for part in parts:
        assert part in lines[0], f"{part!r} is not said\n{ended}"


def is_done_or_refused(ended: Ended) -> None:
    """The fault did no harm, or was refused."""
    is_clean(ended)
    if ended.code != 0:
        is_refused(ended)


def has_fired(ended: Ended, rules: Sequence[Rule]) -> None:
    """The fault was met: a try without one would show nothing."""
    actions = {rule.action.partition("=")[0] for rule in rules}
    assert actions <= {call.action for call in ended.calls}, f"the fault was not met\n{ended}"


def ends_as_undisturbed(place: Place, *words: str, **environment: str | None) -> None:
    """The run, resumed without the fault, has lost nothing and computes what it would have: the same bits."""
    again = place.vb(*place.training(*words), **environment)
    assert again.code == 0, f"resuming\n{again}"
    is_clean(again)
    is_undisturbed(place)


def is_undisturbed(place: Place) -> None:
    """The run has ended with the bits of the undisturbed one, and nothing half-written is left."""
    found, wanted = place.numbers(), place.lab.undisturbed[0]
    if found != wanted:
        lines = [
            f"{line}, not {other}" for line, other in zip(found.metrics, wanted.metrics, strict=False) if line != other
        ]
        weights = "same weights" if found.weights == wanted.weights else "other weights"
        raise AssertionError(f"{weights}, {len(found.metrics)} of {len(wanted.metrics)} steps; {COMPARED}: {lines}")
    left = [path for path in place.run.rglob("*.tmp")]
    assert not left, f"left over: {left}"
