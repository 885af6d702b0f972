"""SIGTERM and SIGINT in every phase of a run, once and twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from tests.faults.case import Case, Try
from tests.faults.kills import calls_of, with_action
from tests.faults.lab import HANGS_AFTER_SECONDS, Lab, Place, ends_as_undisturbed, has_fired, is_clean
from tests.faults.shim import Rule

PHASES = {
    "start": ("run/.lock", "create,lock,write"),
    "settings": ("run/settings", "write,rename"),
    "tokenizing": ("/cache/vblackwell", "mkdir,write,fsync,rename"),
    "reading data": ("corpus.py", "read"),
    "step": ("(deleted)", "read,write"),
    "between steps": ("metrics.jsonl", "write"),
    "checkpoint": ("/checkpoints", "mkdir,create,write,fsync,rename,unlink"),
    "export": ("run/final", "mkdir,create,write,fsync,rename"),
    "report": ("run/report", "write,rename"),
}
NUMBERS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


def stopped(place: Place, rules: list[Rule], codes: Sequence[int], phase: str) -> None:
    environment = {"XDG_CACHE_HOME": str(place.folder / "cache")} if phase in ("tokenizing", "reading data") else {}
    ended = place.vb(*place.training(), rules=rules, **environment)
    has_fired(ended, rules)
    assert ended.code in codes, f"none of {codes}\n{ended}"
    is_clean(ended)
    assert len(ended.stderr.splitlines()) <= 1, ended
    ends_as_undisturbed(place, **environment)


def _moments(lab: Lab, phase: str, count: int) -> list[tuple[str, Rule]]:
    text, kinds = PHASES[phase]
    found = list(calls_of(lab, text, kinds))
    return found[:: max(1, len(found) // count)][:count]


def once(lab: Lab, seed: int) -> Iterator[Try]:
    for phase in PHASES:
        for label, rule in _moments(lab, phase, 5):
            for name, number in NUMBERS.items():
                # In its last phases a run ends as it would have: there is nothing left to stop.
                codes = (
                    (128 + number, 0)
                    if phase in ("export", "report", "checkpoint", "between steps")
                    else (128 + number,)
                )
                rules = [with_action(rule, f"signal={int(number)}")]
                yield Try(f"{name} at {phase}: {label}", partial(stopped, rules=rules, codes=codes, phase=phase))


def twice(lab: Lab, seed: int) -> Iterator[Try]:
    """The same signal, or the other, at this call and at the next of the kind."""
    for phase in PHASES:
        for label, rule in _moments(lab, phase, 2):
            for first, one in NUMBERS.items():
                for second, two in NUMBERS.items():
                    # The second is not always met: the first may have ended the command before it.
                    later = Rule(rule.kinds, rule.text, int(rule.which) + 1, f"signal={int(two)}")
                    rules, codes = [with_action(rule, f"signal={int(one)}"), later], tuple({128 + one, 128 + two, 0})
                    act = partial(stopped, rules=rules, codes=codes, phase=phase)
                    yield Try(f"{first} then {second} at {phase}: {label}", act)


def starting(lab: Lab, seed: int) -> Iterator[Try]:
    """While Python imports the command: a separate process, as users start it."""

    def signalled(place: Place, name: str, number: int) -> None:
        log = place.folder / "log"
        environment = lab.environment | {
            "VB_FAULTS": str(Rule("open", name, 1, f"signal={number}")),
            "VB_FAULTS_LOG": str(log),
            "TMPDIR": str(place.folder),
        }
        done = subprocess.run(
            [sys.executable, "-m", "vblackwell", *place.training()],
            cwd=place.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANGS_AFTER_SECONDS,
        )
        assert log.exists(), "the signal was not met"
        assert done.returncode in (-number, 128 + number), f"exit {done.returncode}\n{done.stderr}"
        assert "Traceback" not in done.stderr and "internal error" not in done.stderr, done.stderr
        ends_as_undisturbed(place)

    for name in ("vblackwell/train/config", "vblackwell/train/run", "vblackwell/train/trainer"):
        for number in NUMBERS.values():
            yield Try(f"{number.name} at {name}", partial(signalled, name=name, number=int(number)))


CASES = [
    Case(
        "signal",
        "SIGTERM or SIGINT at start, settings, tokenizing, reading data, step, between steps, checkpoint, export, "
        "report",
        "exit 143 or 130 (0 where the run was ending anyway); resumed: the same bits as undisturbed",
        once,
        1,
    ),
    Case(
        "two-signals",
        "two signals, each SIGTERM or SIGINT, at calls that follow each other, in the same phases",
        "exit 143 or 130, no traceback; resumed: the same bits as undisturbed",
        twice,
        1,
    ),
    Case(
        "signal-while-importing",
        "SIGTERM or SIGINT while Python imports the command",
        "ended by the signal, no traceback; the run starts afterwards",
        starting,
        0,
    ),
]
