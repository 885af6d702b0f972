"""Writing with a model larger than the GPU's share: streamed, over FP4, resident, and accelerate's CPU offload, in one
run.

    python benchmarks/bench_generate.py                                     # 6.7B under 8 GiB, one H200
    python benchmarks/bench_generate.py --systems streamed,accelerate --batches 1
    python benchmarks/bench_generate.py --shape tiny --device cpu --cap 384KiB --host-memory 64MiB --prompt 16 --new 6

Writes a folder of random weights (in /dev/shm where it has room), then lets every system open it and write, each in a
separate process; 'streamed', 'streamed-fp4' and 'accelerate' under the same enforced cap. accelerate writes 6 tokens a
text, which is enough for its rate. Every row is printed and appended to benchmarks/results/generate.csv as it comes;
the table, with floors and aims, comes last.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_offload import names
from benchmarks.lib.child_process import run_child
from benchmarks.lib.generate.case import INDEX, SHAPES, SYSTEMS, Case, Loading, Point
from benchmarks.lib.generate.report import HEAD, line_of, loading_line, ratio_lines, row_of
from benchmarks.lib.results import RESULTS, append_csv, read_csv, seconds_since_start, tell, told_machine
from vblackwell.units import parse_bytes

CHILD = Path(__file__).parent / "lib/generate/measure.py"
FOLDER_CHILD = Path(__file__).parent / "lib/generate/folder.py"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--systems", type=names, default=[s for s in SYSTEMS if s != "folder"], help=", ".join(SYSTEMS[1:]))
    add("--shape", choices=tuple(SHAPES), default="6.7B")
    add("--batches", type=lambda text: tuple(map(int, text.split(","))), default=(1, 8, 32))
    add(
        "--batches-of",
        type=batches_of,
        default={"accelerate": (1, 8)},
        help="others for some: 'resident=1;accelerate=1,8'",
    )
    add("--accelerate-seconds", type=float, default=60.0, help="for accelerate, which is the slowest")
    add("--prompt", type=int, default=512, help="tokens")
    add("--new", type=int, default=64, help="tokens")
    add("--through-new", type=int, default=20, help="tokens with room for three layers; 0: none")
    add("--cap", type=parse_bytes, default=parse_bytes("8GiB"), help="GPU memory of the capped systems")
    add("--host-memory", type=parse_bytes, default=parse_bytes("60GiB"), help="of our second level, and accelerate's")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--folder", type=Path, default=None, help="where the weights are, or go and stay; default a temporary folder")
    add("--deadline", type=float, default=272.0, help="seconds for everything; what is late is left out")
    add("--seed", type=int, default=0)
    add("--csv", type=Path, default=RESULTS / "generate.csv")
    args = parser.parse_args(argv)
    for name in args.systems:
        if name not in SYSTEMS[1:]:
            parser.error(f"system {name!r} is none of {', '.join(SYSTEMS[1:])}")
    return args


def batches_of(text: str) -> dict[str, tuple[int, ...]]:
    """'resident=1;accelerate=1,8' as batches by system."""
    pairs = (part.split("=") for part in text.split(";"))
    return {system: tuple(map(int, batches.split(","))) for system, batches in pairs}


def place_for(num_bytes: int) -> Path:
    """A new folder in memory where that has room, else among the temporary files."""
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > num_bytes * 1.1
    return Path(tempfile.mkdtemp(prefix="vb-generate-", dir=shm if roomy else None))


def folder_for(given: Path | None, num_bytes: int) -> tuple[Path, bool]:
    """Where the weights go, and whether they stay there: a folder that was given, if they are there already or it has
    room.
    """
    if given is not None:
        above = next(path for path in (given, *given.parents) if path.is_dir())
        free = shutil.disk_usage(above).free
        if (given / INDEX).is_file() or free > num_bytes * 1.05:
            return given, True
        print(f"{above} has {free / 1e9:.1f} GB free, the weights take {num_bytes / 1e9:.1f}: elsewhere", flush=True)
    return place_for(num_bytes), False


class Run:
    """Processes one after the other, and what they said."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.about = args, told_machine()
        self.rates: dict[str, float] = {}
        self.points: list[Point] = []
        self.loadings: list[Loading] = []

    def start(self, case: Case) -> None:
        """One system, within what is left of the time."""
        left = self.args.deadline - seconds_since_start()
        if left < 5:
            tell(case.system, "no time is left")
            return
        tell(case.system, "starts")
        limit = min(left, self.args.accelerate_seconds) if case.system == "accelerate" else left
        run_child(
            FOLDER_CHILD if case.system == "folder" else CHILD,
            case.to_json(),
            limit,
            lambda event: self._hear(case, event),
            functools.partial(tell, case.system),
        )

    def _hear(self, case: Case, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "rates":
            self.rates = event["rates"]
            tell("rates", ", ".join(f"{name} {value:.1f}" for name, value in self.rates.items()))
        elif kind == "point":
            point = Point(**event["point"])
            self.points.append(point)
            tell(line_of(point))
            append_csv(self.args.csv, [row_of(self.about, case, self.rates, point)])
        elif kind == "loading":
            loading = Loading(**event["loading"])
            self.loadings.append(loading)
            tell(loading_line(loading))
            append_csv(self.args.csv, [row_of(self.about, case, self.rates, loading)])
        else:
            tell(case.system, event.get("text") or event["error"])


def main(argv: list[str] | None = None) -> Run:
    args = parse(argv)
    read_csv(args.csv)  # before minutes of measuring, whether rows can be added
    run = Run(args)
    print(f"{args.shape}, prompt {args.prompt}, new {args.new}; GB of 1e9 bytes\n{HEAD}", flush=True)
    num_bytes = SHAPES[args.shape].num_parameters * (2 if args.dtype == "bfloat16" else 4)
    folder, stays = folder_for(args.folder, num_bytes)
    what = (str(folder), args.shape, args.batches, args.prompt, args.new, args.through_new)
    case = Case("folder", *what, args.cap, args.host_memory, args.device, args.dtype, args.seed)
    try:
        for system in ["folder", *args.systems]:
            run.start(replace(case, system=system, batches=args.batches_of.get(system, args.batches)))
    finally:
        tell_all(run)
        if not stays:
            shutil.rmtree(folder, ignore_errors=True)
    return run


def tell_all(run: Run) -> None:
    """Print the table and the ratios."""
    lines = ["", HEAD, *map(line_of, run.points), "", *map(loading_line, run.loadings), ""]
    print("\n".join([*lines, *ratio_lines(run.points, run.loadings, run.rates)]), flush=True)
    print(f"rows appended to {run.args.csv}; {seconds_since_start():.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
