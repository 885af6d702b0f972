"""``make sanitize``: compute-sanitizer's memcheck, racecheck and synccheck over small shapes of every kernel
(sanitized.py).

Prints the errors that a tool reports, and last a table: errors of each kernel by tool, and the seconds that it took.
Exits with 1 if there are any, or if a kernel of the selection was not launched; with 2 where there is no GPU or no
compute-sanitizer.

Some reports of racecheck are false (`FALSE_REPORTS`, docs/reliability.md): those of named lines, as long as it reports
the same of a kernel that has nothing but their barriers, and nothing of one with the same accesses and barriers that it
understands (false_reports.cu).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("racecheck", "memcheck", "synccheck")  # the slowest first
OPTIONS = {"memcheck": ["--report-api-errors", "no"], "racecheck": [], "synccheck": []}
ERRORS = 9  # exit status of compute-sanitizer where its tool found some
# Cases that share a process, whose start takes longer than most of them.
ALONE = ("attention_hopper", "attention", "fp4_mma", "fp4_wgmma")
SHOWN = 20  # reports of a tool
REDUCED = "reduced"  # the case that false reports are held against
RACES = ("handed_over_in_a_race", "counted_in_a_race")  # of it: these must be seen


@dataclass(frozen=True)
class Report:
    """One error. ``case``: during which; ``places``: the (kernel or function inlined into it, file, line) that it
    names.
    """

    text: str
    case: str
    places: tuple[tuple[str, str, int], ...]

    def kernel(self, kernels: Sequence[str]) -> str:
        """Which of the case's ``kernels`` it is about, as far as it says: an inlined function is taken for the first
        one's.
        """
        named = [name for name, _, _ in self.places if name in kernels]
        return (named or list(kernels) or ["(no kernel)"])[0]


@dataclass(frozen=True)
class FalseReport:
    """Reports that are none, of lines whose accesses are kept apart in a way that racecheck does not understand.

    Attributes:
        case: during which. begins: how its text begins. lines: by file, what its lines have in them.
        reported, held: kernels of false_reports.cu: the same barriers, and the same accesses with barriers that it
            understands.
    """

    case: str
    begins: str
    lines: dict[str, str]
    reported: str
    held: str

    def matches(self, report: Report) -> bool:
        return (
            report.case == self.case
            and report.text.startswith(self.begins)
            and bool(report.places)
            and all(line in self.numbers(file) for _, file, line in report.places)
        )

    def numbers(self, file: str) -> set[int]:
        """Of the lines of ``file`` that are meant."""
        if file not in self.lines:
            return set()
        (path,) = (ROOT / "vblackwell/kernels").rglob(file)
        return {at for at, line in enumerate(path.read_text().splitlines(), 1) if re.search(self.lines[file], line)}


FALSE_REPORTS = (
    FalseReport(
        "attention_hopper",
        "Error: Race reported",
        {"hopper.py": r"^def attend_hopper\(|^\s+gl\.warp_specialize\("},
        "handed_over_beside_part",
        "handed_over_by_whole",
    ),
    FalseReport(
        "many_rows",
        "Error: Race reported",
        {"w4a8.cu": r"units\[c\] = |tokens\[m\] = |upper = tokens\[g\]|unit = units\["},
        "counted_by_one_lane",
        "counted_by_all_lanes",
    ),
    FalseReport(
        "fp4_mma",
        "Potential invalid __shared__ read",
        {
            "ptx.cuh": r"ld\.shared::cluster|\"=f\"\(v\.x\), .*\(remote\)",
            "fp4_mma.cu": r"load_remote\(",
            "norm_rows.cuh": r"load_remote\(",
        },
        "peer_that_waits_for_mail",
        "peer_that_meets",
    ),
)


@dataclass
class Found:
    """What one run said. ``total``: errors by its own count."""

    reports: list[Report] = field(default_factory=list)
    total: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    failure: str = ""


def read(text: str, status: int) -> Found:
    """What a sanitizer, or a run without one, printed."""
    found = Found(seconds={name: float(took) for name, took in re.findall(r"^case (\w+) took ([\d.]+) s$", text, re.M)})
    counts = re.findall(r"ERROR SUMMARY: (\d+) error|\((\d+) errors?, \d+ warnings?\)", text)
    found.total = sum(int(plain or races) for plain, races in counts)
    before = 0
    for case in [*re.finditer(r"^case (\w+) took .*$", text, re.M), None]:
        part = text[before : len(text) if case is None else case.start()]
        before = 0 if case is None else case.end()
        for block in re.findall(r"^={9} (?! )(.*\n(?:={9}  +.*\n?)*)", part, re.M):
            if re.match(r"(COMPUTE-SANITIZER|Warning|Info|.* SUMMARY|Internal|This |Target|$)", block):
                continue
            places = re.findall(r"\bat (?:void )?([\w:]+)[^+\n]*\+0x[0-9a-f]+(?: in (?:.*/)?([\w.]+):(\d+))?", block)
            if places:
                named = tuple((name, file, int(line or 0)) for name, file, line in places)
                found.reports.append(Report(block, "" if case is None else case[1], named))
    if "all cases ran" not in text:
        found.failure = f"the cases did not end (status {status})"
    elif found.total > len(found.reports):
        found.failure = f"{found.total} errors, of which {len(found.reports)} were understood"
    elif status not in ((0,) if not found.total else (ERRORS,)):
        found.failure = f"exit status {status} with {found.total} errors"
    return found


def sanitizer() -> str | None:
    """Where compute-sanitizer is."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")


def run(tool: str | None, names: Iterable[str], log: Path) -> Found:
    """The cases ``names`` under ``tool``, or as they are."""
    command = [sys.executable, "-m", "tests.kernels.sanitized", *names]
    if tool is not None:
        command = [
            *(str(sanitizer()), "--tool", tool, "--error-exitcode", str(ERRORS)),
            *("--print-limit", "1000", "--launch-timeout", "120", "--target-processes", "application-only"),
            *("--show-backtrace", "no"),
            *OPTIONS[tool],
            *command,
        ]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "VBLACKWELL_LINE_INFO": "1"}
    if tool == "memcheck":  # an allocation a tensor: what reads beyond one does not end in another
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with log.open("w") as out:
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
    return read(log.read_text(errors="replace"), status)


def groups(names: Iterable[str]) -> list[list[str]]:
    """Cases by process."""
    names = list(names)
    rest = [name for name in names if name not in ALONE]
    return [*([name] for name in ALONE if name in names), rest[::2], rest[1::2]]


def verdict(reports: Iterable[Report]) -> tuple[list[Report], list[str], list[str]]:
    """racecheck's errors that stand, what is said of the others, and what is wrong with its word on
    false_reports.cu.
    """
    reports = list(reports)
    seen = Counter(report.places[0][0] for report in reports if report.case == REDUCED)
    standing, said = [report for report in reports if report.case != REDUCED], []
    for rule in FALSE_REPORTS:
        false = [report for report in standing if rule.matches(report)]
        if false and seen[rule.reported] and not seen[rule.held]:
            standing = [report for report in standing if report not in false]
            said.append(
                f"racecheck, {rule.case}: {len(false)} reports are false; of the same barriers it reports "
                f"{seen[rule.reported]} ({rule.reported}), of barriers that it understands none ({rule.held})"
            )
    missed = [f"racecheck: sees no race in {name}, which is one" for name in RACES if not seen[name]]
    return standing, said, missed


def table(
    kernels: dict[str, list[str]], errors: dict[str, Counter[str]], seconds: dict[tuple[str, str], float]
) -> list[str]:
    """A line a case and kernel: errors by tool, and the case's seconds under all."""
    lines = [f"{'case':18} {'kernel':24} " + " ".join(f"{tool:>10}" for tool in TOOLS) + "    seconds"]
    for case, names in kernels.items():
        took = sum(seconds.get((tool, case), 0.0) for tool in TOOLS)
        for name in names:
            counts = " ".join(f"{errors[tool][name]:10}" for tool in TOOLS)
            lines.append(f"{case:18} {name:24} {counts} {took:10.1f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--logs", type=Path, default=None, help="folder that the tools' output is kept in")
    parser.add_argument("--cases", nargs="*", default=None, help="these alone")
    arguments = parser.parse_args()
    import torch

    from tests.kernels.sanitized import CASES

    if not torch.cuda.is_available() or sanitizer() is None:
        print("make sanitize needs a CUDA GPU and compute-sanitizer (of the CUDA toolkit) on the path", file=sys.stderr)
        return 2
    hopper = torch.cuda.get_device_capability() == (9, 0)
    names = [name for name, case in CASES.items() if hopper or not case.hopper]
    names = names if arguments.cases is None else [name for name in names if name in arguments.cases]
    for name in sorted(set(CASES) - set(names)):
        print(f"left out: {name}{' (needs a Hopper GPU)' if CASES[name].hopper and not hopper else ''}")
    folder = arguments.logs or Path(tempfile.mkdtemp(prefix="sanitize-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    parts = {f"{tool}-{at}": (tool, part) for tool in TOOLS for at, part in enumerate(groups(names)) if part}
    for tool, part in parts.values():  # of no kernel of ours, and only racecheck is asked about it
        if tool != "racecheck" and REDUCED in part:
            part.remove(REDUCED)
    failures, reports, seconds = [], {tool: list[Report]() for tool in TOOLS}, dict[tuple[str, str], float]()
    with ThreadPoolExecutor(8) as pool:
        # Once without a tool: whatever is compiled is in the caches then, for all.
        plain = list(
            pool.map(lambda at: run(None, groups(names)[at], folder / f"plain-{at}"), range(len(groups(names))))
        )
        failures += [
            f"without a tool: {found.failure}, see {folder}/plain-{at}"
            for at, found in enumerate(plain)
            if found.failure
        ]
        print(f"compiled and run without a tool in {time.monotonic() - began:.0f} s", flush=True)
        if not failures:
            ran = pool.map(lambda key: run(*parts[key], folder / key), parts)
            for key, found in zip(parts, ran, strict=True):
                tool = parts[key][0]
                reports[tool] += found.reports
                seconds |= {(tool, name): took for name, took in found.seconds.items()}
                failures += [f"{tool}: {found.failure}, see {folder / key}"] if found.failure else []
    reports["racecheck"], said, missed = verdict(reports["racecheck"])
    failures += missed if REDUCED in names and not failures else []
    kernels = {name: [kernel.rpartition(".")[2] for kernel in CASES[name].kernels] for name in names}
    errors = {tool: Counter(report.kernel(kernels.get(report.case, ())) for report in reports[tool]) for tool in TOOLS}
    for tool in TOOLS:
        for report in reports[tool][:SHOWN]:
            print(f"{tool}, {report.case}: {report.text.rstrip()}")
    known = {kernel for listed in kernels.values() for kernel in listed}
    others = sorted({kernel for counted in errors.values() for kernel in counted} - known)
    print("\n".join(table(kernels | ({"others": others} if others else {}), errors, seconds)))
    print("\n".join([*said, *failures]))
    total = sum(counted.total() for counted in errors.values())
    print(
        f"{total} errors, {len(failures)} failures, {time.monotonic() - began:.0f} s; the tools' output is in {folder}"
    )
    return int(bool(total or failures))


if __name__ == "__main__":
    sys.exit(main())
