"""Folders that are links, read-only or gone, and home folders that are missing, odd or not writable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

from tests.faults.case import Case, Try
from tests.faults.lab import (
    HANGS_AFTER_SECONDS,
    Ended,
    Lab,
    Place,
    ends_as_undisturbed,
    is_done_or_refused,
    is_refused,
    is_undisturbed,
)
from tests.faults.mounts import no_mounts, small_tmpfs


def links(lab: Lab, seed: int) -> Iterator[Try]:
    """A link to a folder elsewhere is followed; nothing replaces the link."""

    def linked(place: Place, name: str, target: str, exists: bool) -> None:
        other = place.folder / "elsewhere" / target
        (other if exists else other.parent).mkdir(parents=True)
        link = place.folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(other)
        ended = place.vb(*place.training())
        is_done_or_refused(ended)
        assert link.is_symlink(), "the link is gone"
        if ended.code == 0:
            is_undisturbed(place)
        else:
            assert not exists, f"a link to a folder is a folder\n{ended}"

    for name in ("run", "run/checkpoints", "run/final"):
        for exists in (True, False):
            yield Try(
                f"{name}, {'a folder' if exists else 'nothing'} there",
                partial(linked, name=name, target="t", exists=exists),
            )

    def looped(place: Place) -> None:
        (place.folder / "run").symlink_to(place.folder / "run")
        is_refused(place.vb(*place.training()))

    def dangling_data(place: Place) -> None:
        (place.folder / "data.txt").symlink_to("gone.txt")
        is_refused(place.vb(*place.training("--data", "data.txt")))

    yield Try("a link to itself", looped)
    yield Try("data that is a link to nothing", dangling_data)


def read_only(lab: Lab, seed: int) -> Iterator[Try]:
    def refused(place: Place, words: Callable[[str], list[str]], environment: Callable[[str], dict[str, str]]) -> None:
        with small_tmpfs(place.folder / "read-only", "size=1m", "ro") as folder:
            is_refused(place.vb(*place.training(*words(str(folder))), **environment(str(folder))))
        ends_as_undisturbed(place)

    none: Callable[[str], dict[str, str]] = lambda folder: {}  # noqa: E731
    kinds = {
        "--out": (lambda folder: ["--out", f"{folder}/run"], none),
        "--disk-path": (lambda folder: ["--disk-path", folder], none),
        "cache": (lambda folder: [], lambda folder: {"XDG_CACHE_HOME": f"{folder}/cache"}),
        "home": (lambda folder: [], lambda folder: {"XDG_CACHE_HOME": "", "HOME": folder}),
    }
    for name, (words, environment) in kinds.items():
        yield Try(name, partial(refused, words=words, environment=environment))

    def written_once(place: Place) -> None:
        """A run whose file system became read-only, as ext4 does after an error."""
        with small_tmpfs(place.folder / "disk", "size=64m") as disk:
            place.run.symlink_to(disk)
            first = place.vb(*place.training("--max-steps", "2"))
            assert first.code == 0, first
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            is_refused(place.vb(*place.training("--max-steps", "4")))
            subprocess.run(["mount", "-o", "remount,rw", disk], check=True)

    yield Try("a run, resumed", written_once)


def homes(lab: Lab, seed: int) -> Iterator[Try]:
    """No home, one that is not there, is a file, or has odd characters; a cache given as a relative path."""

    def tried(place: Place, environment: dict[str, str | None], must_run: bool) -> None:
        (place.folder / "a file").write_text("")
        values = {name: value and value.replace("FOLDER", str(place.folder)) for name, value in environment.items()}
        ended = place.vb(*place.training(), **values)
        is_done_or_refused(ended)
        assert ended.code == 0 or not must_run, ended
        ends_as_undisturbed(place)

    cases: dict[str, tuple[dict[str, str | None], bool]] = {
        "no HOME, no cache": ({"HOME": None, "XDG_CACHE_HOME": None}, False),
        "HOME is not there": ({"HOME": "FOLDER/gone", "XDG_CACHE_HOME": None}, False),
        "HOME is a file": ({"HOME": "FOLDER/a file", "XDG_CACHE_HOME": None}, False),
        "HOME with spaces": ({"HOME": "FOLDER/my  home dir ", "XDG_CACHE_HOME": None}, True),
        "HOME with quotes and newline": ({"HOME": "FOLDER/o'ho\nm\"e;$x", "XDG_CACHE_HOME": None}, True),
        "HOME in Greek": ({"HOME": "FOLDER/σπίτι", "XDG_CACHE_HOME": None}, True),
        "HOME in Greek, LC_ALL=C": ({"HOME": "FOLDER/σπίτι", "XDG_CACHE_HOME": None, "LC_ALL": "C"}, True),
        "relative cache": ({"XDG_CACHE_HOME": "cache", "HOME": "FOLDER"}, True),
        "cache is a file": ({"XDG_CACHE_HOME": "FOLDER/a file"}, False),
        "cache is /dev/null": ({"XDG_CACHE_HOME": "/dev/null"}, False),
        "cache in /proc": ({"XDG_CACHE_HOME": "/proc/cache"}, False),
        "no TMPDIR there": ({"TMPDIR": "FOLDER/gone"}, False),
    }
    for name, (environment, must_run) in cases.items():
        yield Try(name, partial(tried, environment=environment, must_run=must_run))


def out_names(lab: Lab, seed: int) -> Iterator[Try]:
    """Run folders whose names are odd: used as they are, or refused."""

    def named(place: Place, name: str) -> None:
        ended = place.vb(*place.training("--out", name))
        is_done_or_refused(ended)

    for name in (
        "a b",
        "-x",
        "o'ho",
        "σ",
        "x" * 255,
        "x" * 256,
        "a/" * 60 + "b",
        ".",
        "..",
        "/",
        "/dev/null",
        "/dev/full/x",
        "/proc/self/x",
        "/proc/self/fd",
        "new\nline",
        "run.tmp",
        "step-1",
        "nul\\",
        "~",
        "$HOME",
    ):
        if name not in ("/",):  # a run folder at the root would be the user's wish
            yield Try(repr(name[:20]), partial(named, name=name))


def streams(lab: Lab, seed: int) -> Iterator[Try]:
    """Where a command's words cannot go: a full device."""

    def to_full(place: Place, words: tuple[str, ...]) -> None:
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "vblackwell", *words],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                cwd=place.folder,
                env=lab.environment,
                timeout=HANGS_AFTER_SECONDS,
            )
        is_refused(Ended(done.returncode, "", done.stderr, []))

    for words in (
        ("--help",),
        ("--version",),
        ("estimate", "tiny", "--gpu-memory", "8GiB", "--no-advice"),
    ):
        yield Try(" ".join(words[:2]), partial(to_full, words=words))


CASES = [
    Case(
        "links",
        "the run folder, checkpoints/ or final/ are links: to a folder, to nothing, to themselves",
        "followed, and never replaced; or one line",
        links,
        1,
    ),
    Case(
        "read-only",
        "--out, --disk-path, cache, home on a read-only file system; a run's file system turned read-only",
        "exit 2 and one line",
        read_only,
        1,
        no_mounts,
    ),
    Case(
        "homes",
        "no HOME, not there, a file, with spaces, quotes, Greek; the cache a file, /dev/null, in /proc; no TMPDIR",
        "the same bits, or exit 2 and one line",
        homes,
        1,
    ),
    Case(
        "odd-names",
        "--out with spaces, dashes, 256 characters, in /proc, on devices, `.`",
        "used as it is, or one line",
        out_names,
        1,
    ),
    Case("full-output", "what a command says goes to /dev/full", "exit 2 and one line", streams, 0),
]
