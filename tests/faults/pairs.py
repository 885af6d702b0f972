"""Two processes on one folder: the first is stopped at a call while the second runs to its end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.faults.case import Case, Try
from tests.faults.kills import calls_of, with_action
from tests.faults.lab import Lab, Place, ends_as_undisturbed, is_refused, is_undisturbed
from tests.faults.shim import Rule


def on_one_run(lab: Lab, seed: int) -> Iterator[Try]:
    """One of them trains, the other is refused, in either order; neither harms the other's files."""

    def both(place: Place, rule: Rule, resume: bool) -> None:
        words = place.training()
        first = place.start(*words, rules=[rule])
        place.wait_until_paused(first)
        second = place.vb(*words, *(["--resume"] if resume else []))
        before = {path: path.read_bytes() for path in place.run.rglob("*") if path.is_file() and path.name != ".lock"}
        place.go_on(first)
        ended = place.end(first)
        if second.code == 0:  # the first had not taken the folder yet
            is_refused(ended)
            changed = [path for path, data in before.items() if not path.is_file() or path.read_bytes() != data]
            assert not changed, f"a finished run was changed: {changed}"
        else:
            is_refused(second, "holds no run" if resume and "holds no run" in second.stderr else "in use by process")
            assert ended.code == 0, ended
        is_undisturbed(place)

    moments = {"before anything": Rule("open,create", "corpus.py", 1, "pause")}
    for text, kinds in (
        ("run/.lock", "create,lock,write"),
        ("run/settings", "create,rename"),
        ("run/metrics", "create"),
        ("run/checkpoints", "lock,rename"),
        ("run/final", "lock,rename"),
    ):
        moments |= {
            f"{text} {label}": with_action(rule, "pause") for label, rule in list(calls_of(lab, text, kinds))[:3]
        }
    moments["in a step"] = Rule("read", "(deleted)", 20, "pause")
    for resume in (False, True):
        for label, rule in moments.items():
            yield Try(f"{'resuming, ' if resume else ''}{label}", partial(both, rule=rule, resume=resume))


def on_one_cache(lab: Lab, seed: int) -> Iterator[Try]:
    """Both build the same tokenizer and tokens; both runs are as undisturbed."""

    def both(place: Place, rule: Rule) -> None:
        cache = {"XDG_CACHE_HOME": str(place.folder / "cache")}
        first = place.start(*place.training(), rules=[rule], **cache)
        place.wait_until_paused(first)
        second = place.vb(*place.training("--out", "second"), **cache)
        assert second.code == 0, second
        place.go_on(first)
        ended = place.end(first)
        assert ended.code == 0, ended
        is_undisturbed(place)

    kinds = "mkdir,lock,create,write,fsync,rename"
    for label, rule in list(calls_of(lab, "/cache/vblackwell", kinds))[seed % 2 :: 2]:
        yield Try(label, partial(both, rule=with_action(rule, "pause")))


def on_one_packing(lab: Lab, seed: int) -> Iterator[Try]:
    """Two `vb quantize` into one new folder: one is written whole, and the model in it works."""

    def both(place: Place, rule: Rule) -> None:
        place.copy_run(lab.finished)
        words = ("quantize", "--model", "run", "--out", "packed", "--scale-search", "max", "--device", "cpu")
        first = place.start(*words, rules=[rule])
        place.wait_until_paused(first)
        second = place.vb(*words)
        place.go_on(first)
        ended = place.end(first)
        for one in (ended, second):
            if one.code != 0:
                is_refused(one)
        assert 0 in (ended.code, second.code), f"none was written\n{ended}\n{second}"
        text = place.vb("generate", "--model", "packed", "--prompt", "def", "--max-new-tokens", "2")
        assert text.code == 0, text

    for kinds, number in (("mkdir", 1), ("lock", 1), ("create", 1), ("create", 3), ("write", 4), ("rename", 1)):
        yield Try(f"{kinds} {number}", partial(both, rule=Rule(kinds, "packed", number, "pause")))


def on_a_killed_one(lab: Lab, seed: int) -> Iterator[Try]:
    """The holder of a folder is killed while others wait for it: the lock goes with it."""

    def killed(place: Place, number: int) -> None:
        first = place.start(*place.training(), rules=[Rule("write", "metrics.jsonl", number, "pause")])
        place.wait_until_paused(first)
        is_refused(place.vb(*place.training()), f"in use by process {first.pid}")
        first.signal(9)
        assert first.wait() == -9
        ends_as_undisturbed(place)

    for number in (1, 3, 5):
        yield Try(f"in step {number}", partial(killed, number=number))


CASES = [
    Case(
        "two-runs",
        "a second `vb train` on the same folder, new or resumed, while the first is stopped at one of its calls",
        "one trains to the same bits, the other is refused in one line; no file of a finished run changes",
        on_one_run,
        1,
    ),
    Case(
        "two-runs-one-cache",
        "a second run builds the same cache entries",
        "both end with the same bits",
        on_one_cache,
        1,
    ),
    Case(
        "two-packings",
        "a second `vb quantize` into the same folder",
        "one whole folder; the other the same, or one line",
        on_one_packing,
        1,
    ),
    Case(
        "killed-holder",
        "SIGKILL of the process that holds a run's folder",
        "the next one takes it: the same bits",
        on_a_killed_one,
        1,
    ),
]
