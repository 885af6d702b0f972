"""Offloaded training beside plain PyTorch and beside other people's offloading: speed, memory, losses, in one run.

    python benchmarks/bench_offload.py                                   # 2.70B, sequence 2048, batch 8, one H200
    python benchmarks/bench_offload.py --max-grad-norm 1.0 --systems plain,resident,streamed
    python benchmarks/bench_offload.py --sweep 2048,4096,8192,16384,32768,65536 --cap 24GiB
    python benchmarks/bench_offload.py --shape tiny --device cpu --seq 32 --batch 2 --cap 512KiB
    python benchmarks/bench_offload.py --largest exact --disk-memory 52GB --disk-path .
    python benchmarks/bench_offload.py --largest 8bit --shape tiny --device cpu --cap 1MiB --host-memory 8MiB --disk-memory 4MiB

Every system trains the same decoder (transformers' Llama, or our Decoder, which computes the same) from the same weights, on the same
tokens (lib/offload/data.py says which), at the same learning rates, in a process of its own. lib/offload/measure.py says what a step's time
is. Prints progress, then a table and the ratios with their floors and aims, and appends to benchmarks/results/offload.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.lib.offload.case import SHAPES, SYSTEMS, Case, Recipe, Result
from benchmarks.lib.offload.process import REPO, run_system
from benchmarks.lib.offload.report import append_csv, largest_lines, ratio_lines, read_csv, row_of, table_lines
from benchmarks.lib.offload.sweep import Lanes, draw, sweep_lines
from vblackwell.machine.facts import list_gpus
from vblackwell.units import parse_bytes

RESULTS = Path(__file__).parent / "results"
IMAGES = REPO / "docs" / "images"
PACKAGES = ("torch", "triton", "transformers", "deepspeed")
DEFAULT_CAP = "8GiB"
# Of flags that were not given: for the comparison, and for the largest model.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "shape": ("2.70B", "70B"),
    "batch": (8, 2),
    "steps": (7, 2),
    "warmup": (3, 1),
    "limit": (400.0, 560.0),
    "disk_memory": (0, None),
}


def number_or_none(text: str) -> float | None:
    return None if text == "none" else float(text)


def size(text: str) -> int:
    return parse_bytes(text)


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--systems",
        type=names,
        default=[s for s in SYSTEMS if s not in ("enabled", "largest")],
        help=", ".join(SYSTEMS),
    )
    parser.add_argument(
        "--largest",
        choices=("exact", "8bit"),
        default=None,
        help="instead of the systems: as many blocks of the shape (default 70B's) as train here with fp32 or 8-bit states, 3 steps or "
        "more; weights are one block of normal numbers, repeated",
    )
    parser.add_argument("--masters", choices=("exact", "stochastic"), default="exact", help="of --largest 8bit")
    parser.add_argument("--layers", type=int, default=None, help="blocks of --largest, instead of as many as fit")
    parser.add_argument(
        "--reserve",
        type=size,
        default=parse_bytes("8GiB"),
        help="RAM that --largest leaves to others, unless --host-memory",
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default=None, help="default 2.70B")
    parser.add_argument("--seq", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=None, help="sequences in a step; default 8, of --largest 2")
    parser.add_argument(
        "--steps", type=int, default=None, help="measured steps, the median counts; default 7, of --largest 2"
    )
    parser.add_argument("--warmup", type=int, default=None, help="steps before them; default 3, of --largest 1")
    parser.add_argument("--max-grad-norm", type=number_or_none, default=None, help="a number, or none")
    parser.add_argument(
        "--cap",
        type=size,
        default=None,
        help=f"GPU memory of the capped systems; default {DEFAULT_CAP}, of --largest 0.95 of the GPU",
    )
    parser.add_argument("--capped", type=names, default=["streamed"], help="systems that must obey the cap")
    parser.add_argument("--host-memory", type=size, default=None, help="of our level 1; default 0.9 of the free RAM")
    parser.add_argument(
        "--disk-memory",
        type=size,
        default=None,
        help="of our disk level, for streamed; default 0, of --largest 0.9 of what is free",
    )
    parser.add_argument("--disk-path", default=None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="reached after 20 steps")
    parser.add_argument("--recipe", type=Recipe.parse, default=Recipe(), help="for ours: update=level0,undo=false,...")
    parser.add_argument("--deterministic", action="store_true", help="deterministic kernels: slower, bits comparable")
    parser.add_argument(
        "--limit",
        type=float,
        default=None,
        help="seconds that a system may take, set-up included; default 400, of --largest 560",
    )
    parser.add_argument("--trace", type=Path, default=None, help="folder for a profiler trace of each system")
    parser.add_argument("--sweep", default="", help="tokens a step, comma-separated: resident and streamed at each")
    parser.add_argument(
        "--rates", default=None, help="h2d,d2h,duplex GB/s and matmul TFLOP/s instead of measuring them"
    )
    parser.add_argument("--csv", type=Path, default=None, help="append there instead of benchmarks/results/")
    parser.add_argument("--image", type=Path, default=IMAGES / "offload_sweep.png", help="the sweep's plot")
    args = parser.parse_args(argv)
    for name in [*args.systems, *args.capped]:
        if name not in SYSTEMS:
            parser.error(f"system {name!r} is none of {', '.join(SYSTEMS)}")
    if args.largest and (args.max_grad_norm is not None or args.sweep):
        parser.error("--largest updates behind the backward with no way back: it neither clips nor sweeps")
    for name, (usual, largest) in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, largest if args.largest else usual)
    return args


def cases(args: argparse.Namespace) -> list[Case]:
    """What each system is to do."""
    if args.largest:
        from benchmarks.lib.offload.largest import largest_case

        return [largest_case(args, lambda text: print(text, flush=True))]
    cap = args.cap if args.cap is not None else parse_bytes(DEFAULT_CAP)
    wanted = ["resident", "streamed"] if args.sweep else args.systems
    points = tuple(int(part) for part in names(args.sweep))
    return [
        Case(
            system=system,
            shape=args.shape,
            seq=args.seq,
            batch=args.batch,
            warmup=args.warmup,
            steps=args.steps,
            max_grad_norm=args.max_grad_norm,
            learning_rate=args.learning_rate,
            seed=args.seed,
            device=args.device,
            cap_bytes=cap if system in args.capped else None,
            host_bytes=args.host_memory,
            disk_bytes=args.disk_memory,
            disk_path=args.disk_path,
            deterministic=args.deterministic,
            recipe=args.recipe,
            sweep_tokens=points,
            trace=str(args.trace / f"{system}.json.gz") if args.trace else None,
        )
        for system in wanted
    ]


def machine() -> dict[str, Any]:
    """What the numbers were measured on. Starts no CUDA here: the systems need the GPU to themselves."""
    gpus = list_gpus()
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpus[0].name if gpus else "none",
        "driver": gpus[0].driver_version if gpus else "",
        "cpus": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        **versions,
        "command": " ".join(["python", *map(_relative, sys.argv)]),
    }


def _relative(argument: str) -> str:
    """Commands are kept without this machine's folders."""
    if argument.startswith(str(REPO)):
        return os.path.relpath(argument, REPO)
    return Path(argument).name if argument.startswith("/") else argument


def measured_rates(args: argparse.Namespace) -> dict[str, float]:
    """Of the link and of matrix products; empty without a GPU."""
    if args.rates:
        values = [float(part) for part in args.rates.split(",")]
        if len(values) not in (4, 5):
            raise SystemExit(
                "--rates: give four numbers, h2d,d2h,duplex in GB/s and matmul in TFLOP/s, and perhaps a fifth: G parameters/s of the "
                "CPU's AdamW"
            )
        names_of_rates = ("h2d_gbps", "d2h_gbps", "duplex_gbps", "matmul_flops", "adamw_gps")
        return dict(zip(names_of_rates, [*values[:3], values[3] * 1e12, *values[4:]], strict=False))
    if args.device == "cpu":
        return {}
    script = Path(__file__).parent / "lib/offload/rates.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=200)
    if done.returncode:
        raise SystemExit(f"the machine's rates could not be measured:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> list[Result]:
    args = parse(argv)
    name = "offload_sweep.csv" if args.sweep else "offload_largest.csv" if args.largest else "offload.csv"
    target = args.csv or RESULTS / name
    read_csv(target)  # before minutes of measuring, whether rows can be added
    began, about = time.monotonic(), machine()
    print(", ".join(f"{key} {value}" for key, value in about.items() if value), flush=True)
    rates = {} if args.largest else measured_rates(args)
    if rates:
        print("rates: " + ", ".join(f"{name} {value:.4g}" for name, value in rates.items()), flush=True)
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
    results, rows = [], []
    for case in cases(args):

        def tell(text: str, system: str = case.system) -> None:
            print(f"[{time.monotonic() - began:6.1f} s] {system}: {text}", flush=True)

        tell("starts")
        found = run_system(case, args.limit, tell)
        results += found
        for result in found:  # at once: what comes later may fail
            if result.tokens_per_second and result.peak_reserved is not None:
                tell(f"{result.tokens_per_second:,.0f} tokens/s, {result.peak_reserved / 1e9:.2f} GB reserved")
        rows += [row_of(about, case, result, rates) for result in found]
    if args.sweep:
        shape = SHAPES[args.shape]
        lanes = Lanes.of(args.recipe, rates, shape)
        lines = sweep_lines(results, shape, lanes, args.seq)
        lines.append(f"plot: {draw(results, shape, rates, lanes, args.image, about, args.seq)}")
    elif args.largest:
        lines = largest_lines(results)
    else:
        lines = [*table_lines(results), "", *ratio_lines(results, rates, clipped=args.max_grad_norm is not None)]
    print("\n".join(lines), flush=True)
    append_csv(target, rows)
    print(f"rows appended to {target}; {time.monotonic() - began:.0f} s in all", flush=True)
    return results


if __name__ == "__main__":
    main()
