"""The estimator against real runs: bytes that torch and the driver count, and the limit at which a run really fails.

    python benchmarks/bench_estimate.py --cases 100 --jobs 8 --limit 150 --boundary 12 --timed 8
    python benchmarks/bench_estimate.py --random 30 --seed 7                              # what vb train was promised
    python benchmarks/bench_estimate.py --cases 10 --tiny --device cpu                    # without a GPU

Cases are drawn from a grid with a seed (lib/estimate/cases.py). Each is predicted in a process that sees no GPU, then
runs two real steps in a separate process, several at a time. With a GPU its rates are measured first, for the step
times that are predicted; timed cases run before the others, each alone. A case that fails is a row with its error, and
the exit code is then 1. The tables are printed also when time is over or the run is stopped (SIGTERM).
--random draws commands instead, of `vb train --vgpu-auto`, one after the other (lib/estimate/planned.py).
"""

from __future__ import annotations

import os

# Before torch is loaded: asking whether there is a GPU must not start CUDA in the parent, and forks must find no
# threads.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import random
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.lib.child_process import until_stopped
from benchmarks.lib.estimate.cases import FAMILIES, Case, boundary_cases, draw
from benchmarks.lib.estimate.measure import boundary, measure
from benchmarks.lib.estimate.models import build
from benchmarks.lib.estimate.planned import draw_runs, measure_run, planned_lines, planned_rows
from benchmarks.lib.estimate.pool import Pool, Task, cuda_in_a_fork, rates_here
from benchmarks.lib.estimate.predict import predict_without_gpu
from benchmarks.lib.estimate.report import (
    boundary_lines,
    case_lines,
    claim_bytes,
    rows_of,
    step_lines,
    summary_lines,
    verdict_lines,
)
from benchmarks.lib.results import RESULTS, append_csv, machine
from vblackwell.machine.facts import list_gpus
from vblackwell.units import GiB

# transformers imports these where they are installed, no case needs them, and the import of one (torchao) starts CUDA
# in the parent: then no fork can.
NOT_NEEDED = ("torchao", "bitsandbytes", "liger_kernel", "gemlite", "deepspeed", "flash_attn", "kernels")
# Boundaries beyond those that are asked for: some of the drawn cases cannot be predicted, some that can fail when they
# run.
SPARES_DRAWN, SPARES_RUN = 6, 2
TINY = {"language": (64, 2, 4), "resnet": (1, 1, 1, 1), "mlp": (64, 2, 0)}
Answers = dict[str, dict[str, Any]]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--cases", type=int, default=100)
    add("--seed", type=int, default=0)
    add("--random", type=int, default=0, metavar="N", help="N runs of vb train --vgpu-auto instead")
    add("--boundary", type=int, default=0, metavar="N", help="search the real limits of at least N more runs")
    add("--timed", type=int, default=0, metavar="N", help="time steps of N cases, each alone on the GPU")
    add("--jobs", type=int, default=8, help="cases at a time")
    add("--limit", type=float, default=600.0, metavar="SECONDS", help="for all measurements together")
    add("--case-limit", type=float, default=180.0, metavar="SECONDS", help="for one case")
    add("--capability", default="9.0", help="of the GPU that predictions are for")
    add("--gpu", default="H200", help="whose rates predicted step times go by, if none are measured")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="the same grid with toy sizes, for machines without a GPU; no CSV")
    add("--csv", type=Path, default=RESULTS / "estimate.csv", help="append there")
    return parser.parse_args(argv)


def shrunk(case: Case) -> Case:
    """A toy of the same kind."""
    size = TINY.get(case.family, TINY["language"])
    return replace(
        case, size=size, batch=2, seq=min(case.seq, 32), level0_bytes=GiB if case.stack else 0, expandable=False
    )


def drawn(args: argparse.Namespace) -> tuple[list[Case], list[Case]]:
    """Cases of the grid, and those whose boundary may be searched: more than are asked for, in the order of
    preference.
    """
    cases = draw(args.cases, args.seed)
    limits = boundary_cases(cases, args.boundary + SPARES_DRAWN) if args.boundary else []
    if args.tiny:
        cases, limits = [shrunk(case) for case in cases], [replace(shrunk(case), card_bytes=0) for case in limits]
    return cases, limits


def preload() -> None:
    """Import in the parent what every child needs: modules come with the first model of a family. No backward: it
    starts threads.
    """
    for name in NOT_NEEDED:
        sys.modules.setdefault(name, None)  # pyright: ignore[reportArgumentType] - how Python says that there is none
    import torch._dynamo  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401

    import vblackwell

    assert vblackwell.VGPUAdamW and vblackwell.create_vgpu_stack
    for case in draw(2 * len(FAMILIES)):
        build(shrunk(case))


def tell(text: str) -> None:
    print(text, flush=True)


def start_of_children(args: argparse.Namespace) -> str:
    """How children start: forks, if CUDA starts in one."""
    if args.device == "cpu":
        return "fork"
    answer = Pool(1, time.monotonic() + 60, 30.0).run([Task("cuda", cuda_in_a_fork, {})])["cuda"]
    start = "spawn" if "error" in answer else "fork"
    tell(f"CUDA in a fork: {answer}; cases start by {start}")
    return start


def measured_rates(args: argparse.Namespace, start: str) -> dict[str, Any] | None:
    """What step times go by, alone on the machine; None where nothing is timed or that fails."""
    if args.device == "cpu" or args.timed == 0:
        return None
    found = Pool(1, time.monotonic() + 60, 40.0, start=start).run([Task("rates", rates_here, {})])["rates"]
    tell(f"rates: {found}")
    return None if "error" in found else found


def predict_all(args: argparse.Namespace, rates: dict[str, Any] | None) -> Answers:
    """The estimate of every case, by its name."""
    cases, limits = drawn(args)
    major, minor = map(int, args.capability.split("."))
    bounded = {case.number for case in limits}
    same = {"capability": (major, minor), "gpu": args.gpu, "measured": rates}
    tasks = [
        Task(case.name, predict_without_gpu, {"case": case, "with_cap": case.number in bounded, **same})
        for case in dict.fromkeys([*cases, *limits])
    ]
    pool = Pool(max(1, min(args.jobs * 2, len(os.sched_getaffinity(0)))), time.monotonic() + 3600, 300.0)
    found = pool.run(tasks, tell)
    failed = [f"{key}: {each['error']}" for key, each in found.items() if "error" in each]
    print("\n".join([f"{len(found)} predicted, {len(failed)} failed", *failed]), flush=True)
    return {task.key: found[task.key] for task in tasks}


def measure_all(args: argparse.Namespace, told: Answers, start: str) -> Answers:
    """What each case took, by its name, and each boundary."""
    cases, limits = drawn(args)
    deadline = time.monotonic() + args.limit
    plain = [case for case in cases if not case.stack]  # through a stack no step time is predicted here
    count = min(args.timed, len(plain)) if args.device == "cuda" else 0
    timed = {case.name for case in random.Random(0).sample(plain, count)}  # a stride would meet one family alone
    alone, tasks = list[Task](), list[Task]()
    for case in cases:
        arguments = {"values": asdict(case), "device": args.device, "timed": case.name in timed}
        need = told[case.name].get("peak_p50", 16 * GiB)
        (alone if case.name in timed else tasks).append(Task(case.name, measure, arguments, need))
    limited = [
        _boundary_task(case.name, told[case.name], args.device) for case in limits if "smallest_cap" in told[case.name]
    ][: args.boundary + SPARES_RUN]
    gpus = list_gpus()
    shared = gpus[0].total_bytes * 4 // 5 if gpus else 64 * GiB  # cases share it
    found: Answers = {}
    with until_stopped():
        Pool(1, deadline, args.case_limit, start=start).run(alone, tell, found)
        # Boundaries take longest, so they start among the first.
        Pool(args.jobs, deadline, args.case_limit, shared, start).run([*limited, *tasks], tell, found)
    return found


def _boundary_task(name: str, told: dict[str, Any], device: str) -> Task:
    """Of the case that the prediction was for: a card's batch is known by that alone."""
    case, cap = told["case"], told["smallest_cap"]
    arguments = {"values": case, "device": device, "claim": claim_bytes(cap), "expected": cap}
    if case["card_bytes"]:
        arguments["card"] = case["card_bytes"] - told["context"]
    return Task(f"boundary {name}", boundary, arguments, told["peak_p99"])


def report(args: argparse.Namespace, told: Answers, real: Answers) -> int:
    """Print the tables; 1 where a case has no answer, however good the others are."""
    contexts = [each["context"] for each in real.values() if each.get("context")]
    context = int(statistics.median(contexts)) if contexts else None
    wanted = {case.name for case in drawn(args)[0]}
    rows = rows_of(
        {key: each for key, each in told.items() if key in wanted or key in real or "error" in each}, real, context
    )
    bounds = boundary_lines(told, real, context, args.boundary)
    parts = [[*case_lines(rows), ""], step_lines(rows), bounds, ["", *summary_lines(rows), ""], verdict_lines(rows)]
    print("\n".join(line for part in parts for line in part), flush=True)
    if not args.tiny:
        append_csv(args.csv, [{**machine(), **row} for row in rows])
    return int(any(row["error"] for row in rows))


def grade_plans(args: argparse.Namespace) -> int:
    """Each of the drawn commands alone on the machine, and by how much its plan was off; 1 where one failed."""
    runs, found = draw_runs(args.random, args.seed, on_gpu=args.device == "cuda"), Answers()
    deadline = time.monotonic() + args.limit
    with until_stopped():
        for run in runs:
            left = min(args.case_limit, deadline - time.monotonic())
            if left > 0:
                found[run.name] = measure_run(run, args.device, left)
                tell(f"{run.name}: {found[run.name].get('error', 'ok')}")
    rows = planned_rows(runs, found)
    print("\n".join(planned_lines(rows)), flush=True)
    if args.device == "cuda":
        append_csv(args.csv.with_name("planned.csv"), [{**machine(), **row} for row in rows])
    return int(any(row["error"] for row in rows))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.random:
        return grade_plans(args)
    torch.set_num_threads(1)
    preload()
    start = start_of_children(args)
    told = predict_all(args, measured_rates(args, start))
    return report(args, told, measure_all(args, told, start))


if __name__ == "__main__":
    sys.exit(main())
