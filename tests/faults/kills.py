"""SIGKILL: the process ends between any two calls, or half through a write."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial

from tests.faults.case import Case, Try
from tests.faults.lab import STEPS, Lab, Place, ends_as_undisturbed, has_fired
from tests.faults.shim import Rule

SAME = "the resumed run ends with the same weights and metrics, bit by bit; nothing half-written is left"


def calls_of(lab: Lab, text: str, kinds: str) -> Iterator[tuple[str, Rule]]:
    """(label, rule without its action) of every call of ``kinds`` on paths with ``text``, in the undisturbed run."""
    numbers: Counter[str] = Counter()
    for call in lab.undisturbed[1]:
        if call.kind in kinds.split(",") and text in call.path:
            numbers[call.kind] += 1
            name = call.path.rpartition("/")[2]
            yield f"{call.kind} {numbers[call.kind]} {name}", Rule(call.kind, text, numbers[call.kind], "")


def with_action(rule: Rule, action: str, onwards: bool = False) -> Rule:
    """``rule`` with what it does, once or from there on."""
    return Rule(rule.kinds, rule.text, f"{rule.which}+" if onwards else rule.which, action)


def killed(place: Place, rules: list[Rule], fresh_cache: bool = False) -> None:
    environment = {"XDG_CACHE_HOME": str(place.folder / "cache")} if fresh_cache else {}
    ended = place.vb(*place.training(tensorboard="tensorboard" in rules[0].text), rules=rules, **environment)
    assert ended.code == -signal.SIGKILL, ended
    has_fired(ended, rules)
    ends_as_undisturbed(place, **environment)


def in_checkpoints(lab: Lab, seed: int) -> Iterator[Try]:
    """Before every call of the last checkpoint, the pruning of the first included,
    and every twentieth of those before.
    """
    last = f"step-{STEPS:08d}"
    kinds = "write,rename,fsync,unlink,mkdir,allocate,lock"
    for label, rule in calls_of(lab, last, kinds):
        yield Try(f"last: {label}", partial(killed, rules=[with_action(rule, "kill")]))
    for label, rule in calls_of(lab, "step-00000002", "rename,unlink"):
        yield Try(f"first: {label}", partial(killed, rules=[with_action(rule, "kill")]))
    for label, rule in list(calls_of(lab, "/checkpoints", kinds))[seed % 20 :: 20]:
        yield Try(f"all: {label}", partial(killed, rules=[with_action(rule, "kill")]))


def in_writes(lab: Lab, seed: int) -> Iterator[Try]:
    """Half-way through every tenth write of checkpoints, every fourth of the export, and every one elsewhere."""
    for text, step in (
        ("/checkpoints", 10),
        ("run/final", 4),
        ("metrics.jsonl", 1),
        ("settings.json", 1),
        ("report.json", 1),
    ):
        for label, rule in list(calls_of(lab, text, "write"))[seed % step :: step]:
            yield Try(f"{text}: {label}", partial(killed, rules=[with_action(rule, "tear")]))


def elsewhere(lab: Lab, seed: int) -> Iterator[Try]:
    kinds = "write,rename,fsync,mkdir,allocate,lock,truncate,create"
    for text in ("run/final", "run/metrics", "run/settings", "run/report", "run/.lock"):
        for number, (label, rule) in enumerate(calls_of(lab, text, kinds)):
            if rule.kinds != "write" or number % 3 == 0:
                yield Try(label, partial(killed, rules=[with_action(rule, "kill")]))
    for label, rule in list(calls_of(lab, "run/tensorboard", "create,write"))[::7]:
        yield Try(label, partial(killed, rules=[with_action(rule, "kill")]))


def in_caches(lab: Lab, seed: int) -> Iterator[Try]:
    for label, rule in calls_of(lab, "/cache/vblackwell", "write,rename,fsync,mkdir,create,lock"):
        yield Try(label, partial(killed, rules=[with_action(rule, "kill")], fresh_cache=True))


def at_random(lab: Lab, seed: int) -> Iterator[Try]:
    """Three kills in a row inside steps, each at a drawn read or write of the spill file."""
    spilled = "(deleted)"  # the spill file has no name
    total = sum(call.kind in ("read", "write") and spilled in call.path for call in lab.undisturbed[1])

    def chain(place: Place, moments: list[int]) -> None:
        for number, moment in enumerate(moments):
            ended = place.vb(*place.training(), rules=[Rule("read,write", spilled, moment, "kill")])
            if ended.code == 0 and number:  # what was left of the run was shorter than that
                break
            assert ended.code == -signal.SIGKILL, ended
        ends_as_undisturbed(place)

    draw = random.Random(f"{seed} kills")
    for number in range(40):
        moments = [draw.randrange(1, total) for _ in range(3)]
        yield Try(f"chain {number} {moments}", partial(chain, moments=moments))


CASES = [
    Case(
        "kill-in-a-checkpoint",
        "SIGKILL before every write, rename, fsync, mkdir, unlink of a checkpoint",
        SAME,
        in_checkpoints,
        1,
    ),
    Case(
        "kill-in-a-write",
        "SIGKILL half-way through a write of checkpoints, export, metrics, settings, report",
        SAME,
        in_writes,
        1,
    ),
    Case(
        "kill-elsewhere",
        "SIGKILL before every call of export, metrics, settings, report, lock, TensorBoard",
        SAME,
        elsewhere,
        1,
    ),
    Case(
        "kill-in-the-caches",
        "SIGKILL before every call that writes tokenizer and tokens to the cache",
        SAME,
        in_caches,
        1,
    ),
    Case(
        "kill-at-random",
        "up to three SIGKILLs in a row inside steps, at drawn reads and writes of the spill file",
        SAME,
        at_random,
        1,
    ),
]
