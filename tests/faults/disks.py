"""Disks that are full, fail, or do half of what was asked."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial

from tests.faults.case import Case, Try
from tests.faults.kills import calls_of, with_action
from tests.faults.lab import Lab, Place, ends_as_undisturbed, has_fired, is_clean, is_done_or_refused
from tests.faults.mounts import no_mounts, small_ext4, small_tmpfs
from tests.faults.shim import Rule

HOLDS = "exit 2 and one line, or no harm; resumed without the fault: the same bits as undisturbed"
SPILL = "(deleted)"  # the spill file has no name
# Where a run writes, by the text that the paths have in common.
SITES = {
    "checkpoint": "/checkpoints",
    "export": "run/final",
    "metrics": "metrics.jsonl",
    "TensorBoard": "run/tensorboard",
    "settings": "run/settings",
    "report": "run/report",
    "lock": "run/.lock",
    "cache": "/cache/vblackwell",
    "spill": SPILL,
}
CHANGES = "create,write,fsync,rename,mkdir,allocate,truncate,lock"


def few_of_each(lab: Lab, text: str, kinds: str) -> Iterator[tuple[str, Rule]]:
    """Of the calls of one kind on one file: the first and the last."""
    found = list(calls_of(lab, text, kinds))
    totals = Counter(label.split()[0] + label.split()[-1] for label, _ in found)
    seen: Counter[str] = Counter()
    for label, rule in found:
        key = label.split()[0] + label.split()[-1]
        seen[key] += 1
        if seen[key] in (1, totals[key]):
            yield label, rule


def refused(place: Place, rules: list[Rule], site: str) -> None:
    """The run meets the fault, and goes on later."""
    environment = {"XDG_CACHE_HOME": str(place.folder / "cache")} if site == "cache" else {}
    ended = place.vb(*place.training(tensorboard=site == "TensorBoard"), rules=rules, **environment)
    has_fired(ended, rules)
    is_done_or_refused(ended)
    ends_as_undisturbed(place, **environment)


def full(lab: Lab, seed: int) -> Iterator[Try]:
    """The disk is full from one call on, and stays so to the end of the command."""
    for site, text in SITES.items():
        for label, rule in few_of_each(lab, text, "create,write,fsync,mkdir,allocate"):
            rules = [with_action(rule, f"errno={errno.ENOSPC}", onwards=True)]
            yield Try(f"{site}: {label}", partial(refused, rules=rules, site=site))


def failing(lab: Lab, seed: int) -> Iterator[Try]:
    for site, text in SITES.items():
        for label, rule in few_of_each(lab, text, CHANGES):
            number = errno.ENOLCK if rule.kinds == "lock" and seed % 2 else errno.EIO
            yield Try(f"{site}: {label}", partial(refused, rules=[with_action(rule, f"errno={number}")], site=site))


def failing_syncs(lab: Lab, seed: int) -> Iterator[Try]:
    """A sync that failed lost data, even if the next one succeeds."""
    for number in (errno.EIO, errno.EDQUOT, errno.ENOSPC):
        for label, rule in list(calls_of(lab, "run/", "fsync"))[:: 1 if number == errno.EIO else 3]:
            rules = [with_action(rule, f"errno={number}")]
            yield Try(f"{errno.errorcode[number]} {label}", partial(refused, rules=rules, site="run"))


def failing_reads(lab: Lab, seed: int) -> Iterator[Try]:
    for label, rule in few_of_each(lab, SPILL, "read"):
        yield Try(f"spill: {label}", partial(refused, rules=[with_action(rule, f"errno={errno.EIO}")], site="spill"))
    for name in ("corpus.py", "tokens.bin", "tokenizer.json"):
        rule = Rule("read", name, 1, f"errno={errno.EIO}")
        yield Try(name, partial(refused, rules=[rule], site="cache"))
    for name in ("manifest.json", "trainer.json", "model.safetensors", "optimizer.safetensors", "settings.json"):
        yield Try(f"resumed from: {name}", partial(_resumed, rule=Rule("read", name, 1, f"errno={errno.EIO}")))


def _resumed(place: Place, rule: Rule) -> None:
    """A file of the run that is resumed cannot be read, this time."""
    place.copy_run(place.lab.stopped)
    refused(place, [rule], "run")


def short(lab: Lab, seed: int) -> Iterator[Try]:
    """Every read and every write does half of what it was asked for."""

    def halves(place: Place, rule: Rule, tensorboard: bool) -> None:
        environment = {"XDG_CACHE_HOME": str(place.folder / "cache")}
        ended = place.vb(*place.training(tensorboard=tensorboard), rules=[rule], **environment)
        has_fired(ended, [rule])
        assert ended.code == 0, ended
        is_clean(ended)
        ends_as_undisturbed(place, **environment)

    for kinds in ("read", "write"):
        for site, text in SITES.items():
            if kinds == "write" or site == "spill":
                action = partial(halves, rule=Rule(kinds, text, "1+", "short"), tensorboard=site == "TensorBoard")
                if site not in ("export", "settings", "report", "lock") or kinds == "write":
                    yield Try(f"{kinds} {site}", action)
    yield Try("read corpus", partial(halves, rule=Rule("read", "corpus.py", "1+", "short"), tensorboard=False))


def really_full(lab: Lab, seed: int) -> Iterator[Try]:
    """The run folder on file systems from far too small to nearly large enough."""

    def on_small(place: Place, kilobytes: int, kind: str) -> None:
        disk = place.folder / "disk"
        with small_tmpfs(disk, f"size={kilobytes}k") if kind == "tmpfs" else small_ext4(disk, kilobytes << 10):
            place.run.symlink_to(disk)
            ended = place.vb(*place.training(tensorboard=True))
            is_done_or_refused(ended)
            shutil.copytree(disk, place.folder / "saved", ignore=shutil.ignore_patterns("lost+found"))
        place.run.unlink()
        (place.folder / "saved").rename(place.run)
        ends_as_undisturbed(place)

    for kilobytes in (64, 600, 1500, 2200, 3000, 17_000, 18_000, 19_500, 21_000):
        yield Try(f"tmpfs of {kilobytes} KiB", partial(on_small, kilobytes=kilobytes, kind="tmpfs"))
        yield Try(f"ext4 of {kilobytes} KiB", partial(on_small, kilobytes=max(kilobytes, 512), kind="ext4"))


def really_full_midway(lab: Lab, seed: int) -> Iterator[Try]:
    """Others fill the disk after a given step; when they make room again, the run goes on."""

    def fill(place: Place, after: int, tensorboard: bool) -> None:
        disk = place.folder / "disk"
        with small_ext4(disk, 40 << 20):
            place.run.symlink_to(disk)
            rules = [Rule("write", "metrics.jsonl", after, "pause")]
            child = place.start(*place.training(tensorboard=tensorboard), rules=rules)
            place.wait_until_paused(child)
            with (disk / "others").open("wb", buffering=0) as others:
                for size in (1 << 20, 1 << 12):
                    try:
                        while others.write(bytes(size)):
                            pass
                    except OSError as error:
                        assert error.errno == errno.ENOSPC
            place.go_on(child)
            is_done_or_refused(place.end(child))
            (disk / "others").unlink()
            ends_as_undisturbed(place)

    for after in range(1, 7):
        for tensorboard in (False, True):
            what = " with TensorBoard" if tensorboard else ""
            yield Try(f"after step {after}{what}", partial(fill, after=after, tensorboard=tensorboard))


def really_full_spill(lab: Lab, seed: int) -> Iterator[Try]:
    def on_small(place: Place, kilobytes: int) -> None:
        with small_ext4(place.folder / "disk", kilobytes << 10) as disk:
            is_done_or_refused(place.vb(*place.training("--disk-path", str(disk))))
        ends_as_undisturbed(place)

    for kilobytes in (512, 800, 1000, 1200, 1600, 9000):
        yield Try(f"ext4 of {kilobytes} KiB", partial(on_small, kilobytes=kilobytes))


def without_inodes(lab: Lab, seed: int) -> Iterator[Try]:
    def few(place: Place, inodes: int) -> None:
        disk = place.folder / "disk"
        with small_tmpfs(disk, "size=64m", f"nr_inodes={inodes}"):
            place.run.symlink_to(disk)
            is_done_or_refused(place.vb(*place.training(tensorboard=True)))
            shutil.copytree(disk, place.folder / "saved", ignore=shutil.ignore_patterns("lost+found"))
        place.run.unlink()
        (place.folder / "saved").rename(place.run)
        ends_as_undisturbed(place)

    for inodes in (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 28, 34):
        yield Try(f"{inodes} inodes", partial(few, inodes=inodes))


def elsewhere(lab: Lab, seed: int) -> Iterator[Try]:
    """What the other commands write: a packed folder, numbers, a page."""

    def written(place: Place, words: tuple[str, ...], target: str, number: int, code: int) -> None:
        place.copy_run(place.lab.finished)
        rule = Rule("write,create,mkdir", target, number, f"errno={code}")
        ended = place.vb(*words, rules=[rule])
        has_fired(ended, [rule])
        is_done_or_refused(ended)
        left = [] if ended.code == 0 else [path for path in place.folder.rglob(f"{target}*") if path.is_dir()]
        assert not left, f"half-written: {left}"

    packing = ("quantize", "--model", "run", "--out", "packed", "--scale-search", "max", "--device", "cpu")
    page = ("estimate", "tiny", "--gpu-memory", "8GiB", "--no-advice", "--html", "page.html")
    for code in (errno.ENOSPC, errno.EIO, errno.EROFS):
        for number in (1, 2, 3, 6):
            label = f"{errno.errorcode[code]} call {number}"
            yield Try(f"quantize {label}", partial(written, words=packing, target="packed", number=number, code=code))
        yield Try(f"estimate --html {code}", partial(written, words=page, target="page.html", number=1, code=code))


CASES = [
    Case(
        "full-disk",
        "ENOSPC from one call on, in checkpoint, export, metrics, TensorBoard, settings, report, lock, cache, spill",
        HOLDS,
        full,
        1,
    ),
    Case(
        "failing-disk",
        "EIO at one create, write, fsync, rename, mkdir, allocate, truncate or lock, in the same places",
        HOLDS,
        failing,
        1,
    ),
    Case(
        "failing-sync", "an fsync that fails with EIO, EDQUOT or ENOSPC, everywhere in a run", HOLDS, failing_syncs, 1
    ),
    Case(
        "failing-read",
        "EIO in a read of spill, corpus, cache, and of the checkpoint that is resumed",
        HOLDS,
        failing_reads,
        1,
    ),
    Case(
        "short-calls", "every read or write of a file does half of what was asked", "exit 0 and the same bits", short, 1
    ),
    Case("small-disk", "run folder on a tmpfs or ext4 of 64 KiB to 21 MiB", HOLDS, really_full, 1, no_mounts),
    Case(
        "filled-disk",
        "others fill the run's disk after a step, and make room later",
        HOLDS,
        really_full_midway,
        1,
        no_mounts,
    ),
    Case("small-spill-disk", "spill file on an ext4 of 0.5 to 9 MiB", HOLDS, really_full_spill, 1, no_mounts),
    Case("no-inodes", "run folder on a file system with 1 to 34 inodes", HOLDS, without_inodes, 1, no_mounts),
    Case(
        "full-disk-of-other-commands",
        "ENOSPC, EIO, EROFS under vb quantize and vb estimate --html",
        "exit 2 and one line, or no harm; nothing half-written",
        elsewhere,
        1,
    ),
]
