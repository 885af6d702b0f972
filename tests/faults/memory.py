"""Memory that is not there: limits below what was asked for, and the kernel's out-of-memory killer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial

from tests.faults.case import Case, Try
from tests.faults.lab import Lab, Place, ends_as_undisturbed, has_fired, is_done_or_refused, is_refused
from tests.faults.mounts import memory_limit, no_cgroups
from tests.faults.shim import Rule

MIB = 1 << 20
# What each command asks for, and a limit far below it: a fork of the server is charged for what it writes alone.
ASKED = {
    "--host-memory 2GiB of 512 MiB": (["--host-memory", "2GiB"], 512),
    "--fast-memory 2GiB of 512 MiB": (["--fast-memory", "2GiB"], 512),
    "7b of 2 GiB": (
        ["--config", "7b", "--fast-memory", "256MiB", "--host-memory", "512MiB", "--disk-memory", "200GiB"],
        2048,
    ),
    "7b of 2 GiB, all in RAM": (["--config", "7b", "--disk-memory", "0"], 2048),
}

SMALL = ["--config", "small", "--fast-memory", "64MiB", "--host-memory", "128MiB", "--disk-memory", "16GiB"]


def _asking(place: Place, words: list[str]) -> list[str]:
    base = [
        *("train", "--data", str(place.lab.corpus), "--disk-path", str(place.folder), "--out", "run"),
        *("--vocab-size", "300", "--seq-length", "32", "--batch-size", "1", "--max-steps", "1", "--device", "cpu"),
        *("--no-tensorboard", "--sample-tokens", "0", "--eval-sequences", "1"),
    ]
    return [*base, *words]


def limits(lab: Lab, seed: int) -> Iterator[Try]:
    def asked(place: Place, words: list[str], megabytes: int) -> None:
        with memory_limit(megabytes * MIB) as group:
            ended = place.vb(*_asking(place, words), cgroup=group)
        assert ended.code != -signal.SIGKILL, f"killed without a word\n{ended}"
        is_refused(ended)
        assert not (place.run / "final").exists()

    for name, (words, megabytes) in ASKED.items():
        yield Try(name, partial(asked, words=words, megabytes=megabytes))


def beyond_the_machine(lab: Lab, seed: int) -> Iterator[Try]:
    """More than any machine has: refused where no cgroup can be made, too."""

    def asked(place: Place, words: list[str]) -> None:
        is_refused(place.vb(*_asking(place, words)))
        assert not place.run.exists()

    for flag in ("--fast-memory", "--host-memory", "--disk-memory"):
        for size in ("10TiB", "4000TiB", "1e30", "99999999999999999999999"):
            yield Try(f"{flag} {size}", partial(asked, words=[flag, size]))


def enough(lab: Lab, seed: int) -> Iterator[Try]:
    """A run within its cgroup's limit runs, and is not killed."""

    def within(place: Place, megabytes: int) -> None:
        with memory_limit(megabytes * MIB) as group:
            ended = place.vb(*place.training(), cgroup=group)
        assert ended.code != -signal.SIGKILL, f"killed without a word\n{ended}"
        is_done_or_refused(ended)
        ends_as_undisturbed(place)

    for megabytes in (300, 400, 600, 1000):
        yield Try(f"{megabytes} MiB", partial(within, megabytes=megabytes))

    def streamed(place: Place) -> None:
        with memory_limit(1 << 30) as group:
            ended = place.vb(*_asking(place, SMALL), cgroup=group)
        assert ended.code == 0, ended

    yield Try("1 GiB, with 629 MiB of states that stream through 192 MiB", streamed)


def killed(lab: Lab, seed: int) -> Iterator[Try]:
    """Something takes all memory in the middle of a run: the kernel's SIGKILL; then the run goes on."""

    def eaten(place: Place, rule: Rule) -> None:
        with memory_limit(900 * MIB) as group:
            ended = place.vb(*place.training(), rules=[rule], cgroup=group)
        assert ended.code == -signal.SIGKILL, ended
        has_fired(ended, [rule])
        ends_as_undisturbed(place)

    for kinds, text, number in (
        ("write", "metrics.jsonl", 1),
        ("write", "metrics.jsonl", 3),
        ("write", "metrics.jsonl", 6),
        ("read", "(deleted)", 60),
        ("read", "(deleted)", 200),
        ("write", "(deleted)", 150),
        ("write", "/checkpoints", 60),
        ("rename", "/checkpoints", 2),
        ("write", "run/final", 12),
    ):
        yield Try(f"{kinds} {number} of {text}", partial(eaten, rule=Rule(kinds, text, number, "eat")))


CASES = [
    Case(
        "memory-beyond-the-machine",
        "--fast-memory, --host-memory, --disk-memory of 10 TiB and more",
        "exit 2 and one line",
        beyond_the_machine,
        1,
    ),
    Case(
        "memory-limit",
        "a cgroup's memory limit below what was asked for: levels, a preset's model, 10 TiB",
        "exit 2 and one line, never killed",
        limits,
        1,
        no_cgroups,
    ),
    Case(
        "memory-that-suffices",
        "a cgroup's memory limit above what was asked for",
        "the same bits, or one line",
        enough,
        0,
        no_cgroups,
    ),
    Case(
        "out-of-memory-kill",
        "a cgroup's memory runs out at a drawn call: the kernel kills the run",
        "resumed: the same bits as undisturbed",
        killed,
        1,
        no_cgroups,
    ),
]
