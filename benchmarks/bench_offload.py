"""Offloaded training compared with plain PyTorch and with other people's offloading: speed, memory, losses, in one run.

    python benchmarks/bench_offload.py                                   # 2.70B, sequence 2048, batch 8, one H200
    python benchmarks/bench_offload.py --max-grad-norm none,1,1e-3       # clips never, in one of ten steps, in each
    python benchmarks/bench_offload.py --shape 6.7B --systems held,lines --max-grad-norm none,1e9 --batch 4
    python benchmarks/bench_offload.py --random 12 --seed 7              # plain and the three lines, on drawn cases
    python benchmarks/bench_offload.py --shape tiny --device cpu --seq 32 --batch 2 --cap 512KiB

Every system trains the same decoder (transformers' Llama, or our Decoder, which computes the same) from the same
weights, on the same tokens (lib/offload/data.py), at the same learning rates, in a separate process.
lib/offload/measure.py says what a step's time is. Prints progress, then a table and the ratios with their floors and
aims, and appends to benchmarks/results/offload.csv.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.child_process import run_child
from benchmarks.lib.offload.case import PEAK, SHAPES, SYSTEMS, Case, Recipe, Result
from benchmarks.lib.offload.draw import Draw, draw_lines, draws
from benchmarks.lib.offload.report import ratio_lines, row_of, table_lines
from benchmarks.lib.results import RESULTS, append_csv, read_csv, seconds_since_start, tell, told_machine
from vblackwell.machine.facts import list_gpus
from vblackwell.units import parse_bytes

CHILD = Path(__file__).parent / "lib/offload/measure.py"


def limits(text: str) -> list[float | None]:
    return [None if each == "none" else float(each) for each in text.split(",")]


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--systems", type=names, default=["plain", "lines"], help=", ".join(SYSTEMS))
    add("--shape", choices=tuple(SHAPES), default="2.70B")
    add("--layers", type=int, default=None, help="so many of the shape's: a slice of what RAM cannot hold")
    add("--seq", type=int, default=2048, help="tokens in a sequence")
    add("--batch", type=int, default=8, help="sequences in a forward")
    add("--accumulation", type=int, default=1, help="forwards and backwards in a step")
    add("--steps", type=int, default=10, help="measured steps")
    add("--warmup", type=int, default=12, help="steps before them, fewer where they are slow, 3 at most of plain")
    said = "a number, or none; default 1.0, which of 16,384 tokens one of ten steps exceeds, of drawn cases 1e9, which"
    said += " none does; several: the three lines have each, others the first"
    add("--max-grad-norm", type=limits, default=None, metavar="L[,L]", help=said)
    add("--bad-every", type=int, default=10, metavar="N", help="of N batches one has a large gradient; 0: none has")
    add("--cap", type=parse_bytes, default=parse_bytes("8GiB"), help="GPU memory of the capped systems")
    add("--capped", type=names, default=["streamed", "lines"], help="systems that must obey the cap")
    add("--host-memory", type=parse_bytes, default=None, help="of our level 1; default 0.9 of the free RAM; lines: 7/8")
    add("--disk-memory", type=parse_bytes, default=0, help="of our disk level, for streamed")
    add("--disk-path", default=None)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--seed", type=int, default=0, help="of weights and tokens, and of the draw")
    add("--random", type=int, default=0, metavar="N", help="draw N models, tokens a step and caps")
    add("--only", type=names, default=None, metavar="K,L", help="of the draws these, from 1 on: the rest another time")
    add("--learning-rate", type=float, default=1e-4, help="reached after 20 steps")
    add("--recipe", type=Recipe.parse, default=Recipe(), help="for ours: update=device,undo=false,...")
    add("--deterministic", action="store_true", help="deterministic kernels: slower, bits comparable")
    add("--limit", type=float, default=400.0, help="seconds that a system may take, set-up included")
    add("--csv", type=Path, default=RESULTS / "offload.csv", help="append there")
    args = parser.parse_args(argv)
    for name in [*args.systems, *args.capped]:
        if name not in SYSTEMS:
            parser.error(f"system {name!r} is none of {', '.join(SYSTEMS)}")
    if not set(args.only or ()) <= {str(number + 1) for number in range(args.random)}:
        parser.error(f"--only: of {args.random} draws, {','.join(args.only)} are not all from 1 to {args.random}")
    if args.accumulation > 1 and "deepspeed" in args.systems and not args.random:
        parser.error("--accumulation: DeepSpeed's engine is not asked for it here")
    if args.random and len(args.max_grad_norm or []) > 1:
        parser.error("--max-grad-norm: drawn cases have one limit")
    if not all(limit is None or limit > 0 for limit in args.max_grad_norm or []) or args.bad_every < 0:
        parser.error("--max-grad-norm and --bad-every: give numbers above 0")
    if args.max_grad_norm is None:
        args.max_grad_norm = [1e9 if args.random else 1.0]
    return args


def case_of(system: str, args: argparse.Namespace, limit: float | None) -> Case:
    """What a system is to do, under a ``limit`` of the gradients' norm."""
    same = ("shape", "seq", "batch", "warmup", "steps", "learning_rate", "seed", "device", "disk_path")
    values = {name: getattr(args, name) for name in (*same, "deterministic", "recipe", "accumulation")}
    if system == "plain":  # nothing comes in the background
        values["warmup"] = min(3, args.warmup)
    return Case(
        system,
        **values,
        cap_bytes=args.cap if system in args.capped else None,
        host_bytes=args.host_memory,
        disk_bytes=args.disk_memory,
        max_grad_norm=limit,
        bad_every=args.bad_every or None,
        drawn=args.layers and replace(SHAPES[args.shape], num_layers=args.layers),
    )


def run_system(case: Case, limit_seconds: float, tell: Callable[[str], None]) -> Result:
    """The result of ``case``, with what went wrong, if something did."""
    result: Result | None = None
    failed, steps = "", 0

    def hear(event: dict[str, Any]) -> None:
        nonlocal result, failed, steps
        kind = event["kind"]
        if kind == "result":
            result = Result(**event["result"])
        elif kind == "failed":
            failed = event["error"]
        elif kind == "step":
            steps = event["step"]
            norm = "" if event["norm"] is None else f", norm {event['norm']:.3f}"
            tell(f"step {steps}/{event['of']}: loss {event['loss']:.5f}{norm}, {event['since_start']:.1f} s")
        else:
            tell(event["text"])

    code = run_child(CHILD, case.to_json(), limit_seconds, hear, tell)
    if code == 0 and result is not None:
        return result
    if code is None:
        where = f"stopped after step {steps}" if steps else "not up"
        status, error = f"{where} in {limit_seconds:.0f} s", ""
    else:
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        status, error = "failed", failed or ended
    tell(f"{status} {error}".strip())
    if result is not None:  # measured, and failed afterwards: the numbers stand, and say so
        return replace(result, notes=[*result.notes, f"afterwards: {status} {error}"])
    return Result(case.system, status, error)


def main(argv: list[str] | None = None) -> list[Result]:
    args = parse(argv)
    read_csv(args.csv)  # before minutes of measuring, whether rows can be added
    about = told_machine()
    results: list[Result] = []

    def run(case: Case) -> Result:
        tell(case.system, "starts")
        result = run_system(case, args.limit, functools.partial(tell, case.system))
        if result.tokens_per_second and result.peak_reserved is not None:  # at once: what comes later may fail
            share = 6 * case.decoder.num_parameters * result.tokens_per_second / PEAK
            tell(
                case.system,
                f"{result.tokens_per_second:,.0f} tokens/s ({share:.1%} of {PEAK / 1e12:.0f} TFLOP/s as 6PT), "
                f"{result.peak_reserved / 1e9:.2f} GB reserved",
            )
        results.append(result)
        append_csv(args.csv, [row_of(about, case, result)])
        return result

    if args.random:
        lines = run_draws(args, run)
    else:
        for system in args.systems:
            for limit in args.max_grad_norm if system == "lines" else args.max_grad_norm[:1]:
                run(case_of(system, args, limit))
        lines = [*table_lines(results), "", *ratio_lines(results, case_of("lines", args, None))]
    print("\n".join(lines), flush=True)
    print(f"rows appended to {args.csv}; {seconds_since_start():.0f} s in all", flush=True)
    return results


def run_draws(args: argparse.Namespace, run: Callable[[Case], Result]) -> list[str]:
    """Plain PyTorch and the three lines on drawn cases; what to print of them."""
    gpus = list_gpus() if args.device == "cuda" else []
    if args.device == "cuda" and not gpus:
        raise SystemExit("--random draws what a GPU can hold, and there is none: --device cpu draws tiny models")
    pairs: list[tuple[Draw, Result, Result]] = []
    for number, drawn in enumerate(draws(args.random, args.seed, gpus[0].total_bytes if gpus else None)):
        if args.only is not None and str(number + 1) not in args.only:
            continue
        print(f"draw {number + 1} of {args.random}: {drawn.name}", flush=True)
        asked = argparse.Namespace(**vars(args) | {"seq": drawn.seq, "batch": drawn.batch, "cap": drawn.cap_bytes})
        plain, ours = (
            run(
                replace(
                    case_of(system, asked, args.max_grad_norm[0]),
                    shape=f"drawn-{args.seed}-{number}",
                    drawn=drawn.shape,
                )
            )
            for system in ("plain", "lines")
        )
        pairs.append((drawn, plain, ours))
    return draw_lines(pairs)


if __name__ == "__main__":
    main()
