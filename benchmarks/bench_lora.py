"""Adapters over a 4-bit base of 6.7B: ours in nvfp4, and bitsandbytes' nf4 with peft: same adapters, text and cap.

    python benchmarks/bench_lora.py                             # sequence 2048, batch 4, 50 steps under 16 GiB, one
    H200
    python benchmarks/bench_lora.py --placement streamed        # ours with the base in RAM
    python benchmarks/bench_lora.py --shape tiny --device cpu --dtype float32 --seq 32 --batch 2 --steps 6 --cap 64MiB

Writes a folder of random weights, trains in a process a system, prints losses in columns and the ratios with floor and
aim, and appends to benchmarks/results/lora.csv as results come. bitsandbytes must be importable.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_generate import FOLDER_CHILD, folder_for
from benchmarks.bench_offload import names
from benchmarks.lib.child_process import run_child
from benchmarks.lib.generate.case import INDEX
from benchmarks.lib.generate.case import Case as FolderCase
from benchmarks.lib.generate.lora_case import SHAPES, SYSTEMS, Case, Result
from benchmarks.lib.results import (
    GB,
    RESULTS,
    append_csv,
    goal_header,
    goal_line,
    read_csv,
    seconds_since_start,
    tell,
    told_machine,
)
from vblackwell.units import parse_bytes

CHILD = Path(__file__).parent / "lib/generate/lora_measure.py"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--systems", type=names, default=list(SYSTEMS), help=", ".join(SYSTEMS))
    add("--shape", choices=tuple(SHAPES), default="6.7B")
    add("--rank", type=int, default=16)
    add("--alpha", type=float, default=32.0)
    add("--batch", type=int, default=4)
    add("--seq", type=int, default=2048)
    add("--steps", type=int, default=50)
    add("--learning-rate", type=float, default=5e-4, help="reached after 5 steps")
    add("--cap", type=parse_bytes, default=parse_bytes("16GiB"), help="GPU memory of both")
    add("--host-memory", type=parse_bytes, default=parse_bytes("40GiB"), help="of our second level")
    add("--placement", choices=("auto", "resident", "streamed"), default="auto", help="of ours")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--folder", type=Path, default=None, help="where the weights are, or go and stay")
    add("--deadline", type=float, default=145.0, help="seconds for everything")
    add("--seed", type=int, default=0)
    add("--csv", type=Path, default=RESULTS / "lora.csv")
    return parser.parse_args(argv)


def curve_lines(results: list[Result]) -> list[str]:
    """Losses side by side."""
    ran = [result for result in results if result.losses]
    lines = ["step" + "".join(f"{result.system:>15}" for result in ran)] if ran else []
    steps = max((len(result.losses) for result in ran), default=0)
    for step in sorted({*range(0, steps, 5), steps - 1} if steps else ()):
        cells = (f"{result.losses[step]:>15.4f}" if step < len(result.losses) else f"{'':15}" for result in ran)
        lines.append(f"{step + 1:4}" + "".join(cells))
    return lines


def ratio_lines(results: list[Result]) -> list[str]:
    """Ours over bitsandbytes."""
    found = {result.system: result for result in results if result.tokens_per_second}
    lines = []
    for result in results:
        speed = "" if result.tokens_per_second is None else f"{result.tokens_per_second:,.0f} tokens/s"
        peaks = [value / GB for value in (result.peak_reserved, result.peak_allocated) if value is not None]
        memory = f", {peaks[0]:.2f} GB reserved, {peaks[1]:.2f} allocated" if peaks else ""
        lines.append(f"{result.system}: {result.status}; {speed}{memory}, {result.placement}")
    if len(found) < 2:
        return lines
    mine, theirs = found["ours"], found["bitsandbytes"]
    lines.append(goal_header())
    speed = (mine.tokens_per_second or 0.0) / (theirs.tokens_per_second or 1.0)
    lines.append(goal_line("LoRA over FP4, tokens/s over bitsandbytes + peft", speed, 1.1, 1.4))
    if mine.peak_reserved and theirs.peak_reserved:
        lines.append(
            goal_line("peak GPU memory, bitsandbytes over ours", theirs.peak_reserved / mine.peak_reserved, 1.0, 1.0)
        )
    return lines


def main(argv: list[str] | None = None) -> list[Result]:
    args = parse(argv)
    read_csv(args.csv)
    about = told_machine()
    num_bytes = SHAPES[args.shape].num_parameters * (2 if args.dtype == "bfloat16" else 4)
    (folder, stays), results = folder_for(args.folder, num_bytes), list[Result]()
    same = ("shape", "rank", "alpha", "batch", "seq", "steps", "learning_rate", "placement", "device", "dtype", "seed")
    asked = {name: getattr(args, name) for name in same}
    case = Case("", str(folder), **asked, rise_steps=5, cap_bytes=args.cap, host_bytes=args.host_memory)

    def run(script: Path, argument: str, system: str, hear: Any) -> None:
        def heard(event: dict[str, Any]) -> None:
            if event["kind"] == "result":
                hear(event["result"])
            else:
                tell(system, str(event.get("text") or event.get("rates") or event.get("error")))

        tell(system, "starts")
        left = args.deadline - seconds_since_start()
        run_child(script, argument, left, heard, functools.partial(tell, system))

    def keep(case: Case, values: dict[str, Any]) -> None:
        result = Result(**values)
        results.append(result)
        print("\n".join(ratio_lines([result])), flush=True)
        row = {name: value for name, value in asdict(case).items() if name != "folder"} | asdict(result)
        for name in ("step_seconds", "losses"):
            row[name] = " ".join(f"{value:.6g}" for value in row[name])
        row.pop("limit_seconds")
        append_csv(args.csv, [{**about, "parameters": case.sizes.num_parameters, **row}])

    try:
        what, where = (str(folder), args.shape, (1,), 1, 1, 0), (args.device, args.dtype, args.seed)
        writer = FolderCase("folder", *what, args.cap, args.host_memory, *where)
        if not (folder / INDEX).is_file():
            run(FOLDER_CHILD, writer.to_json(), "folder", None)
        for system in args.systems:
            left = args.deadline - seconds_since_start()
            later = len(args.systems) - args.systems.index(system)
            one = replace(case, system=system, limit_seconds=left / later - 4)  # the process begins and ends, too
            run(CHILD, one.to_json(), system, lambda values, one=one: keep(one, values))
    finally:
        print("\n".join(["", *curve_lines(results), "", *ratio_lines(results)]), flush=True)
        if not stays:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"rows appended to {args.csv}; {seconds_since_start():.0f} s in all", flush=True)
    return results


if __name__ == "__main__":
    main()
