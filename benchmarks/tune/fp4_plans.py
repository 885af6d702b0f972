"""Every plausible plan of the fused FP4 kernels for a shape against cuBLAS bf16: where the rules of
kernels/fp4/wgmma_plan.py come from.

``python benchmarks/tune/fp4_plans.py --cells 16x4096x4096,64x4096x4096 --csv plans.csv`` on a Hopper GPU. A cell is M x
N x K. Plans are compiled in parallel, checked against float64 (a wrong or unrepeatable one is not timed), then timed as
in bench_fp4.py, by CUDA graphs of 24 layers. All plans are timed once, the best in turns with cuBLAS and what the rule
chooses today. Each cell is measured in a separate process: one in which a plan hangs is ended and named.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.child_process import ANSWER, answer, run_child, say
from benchmarks.lib.kernels.fp4_layers import (
    Source,
    Tiled,
    compile_for,
    error_over_bound,
    gpu,
    layers_of,
    run_plan,
    sources,
)
from benchmarks.lib.kernels.graph_timing import alternating_us, graph_us
from benchmarks.lib.results import seconds_since_start, tell
from benchmarks.tune.fp4_candidates import Plan, plans
from vblackwell.kernels.fp4 import wgmma_plan
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan
from vblackwell.kernels.runtime import nvrtc

Cell = tuple[int, int, int]
FINALISTS = 6  # plans of a cell that are timed in turns, next to the rule's
CELL_SECONDS = 60.0  # of a cell's process


def parse_cells(text: str) -> list[Cell]:
    sizes = [tuple(int(size) for size in word.split("x")) for word in text.split(",")]
    return [(size[0], size[1], size[2]) for size in sizes]


def cell_sources(m: int, n: int, k: int) -> list[Source]:
    """What the plans of a cell run."""
    return [source for plan in plans(m, n, k, gpu()) for source in sources(plan, m, n, k)]


def good(plan: Plan, x: torch.Tensor, tiled: Tiled, n: int) -> bool:
    """Whether outputs repeat and are near to float64's."""
    first, second = (run_plan(plan, x, tiled, n) for _ in range(2))
    return torch.equal(first, second) and error_over_bound(first, x, tiled, n, x.shape[1]) <= 1


def measure(cell: Cell, rounds: int) -> list[list[object]]:
    """Rows (stage, plan, us, cuBLAS us) of a cell: every right plan timed once, the best and the rule's in turns with
    cuBLAS.
    """
    m, n, k = cell
    packed, dense = layers_of(n, k)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    rows: list[list[object]] = []
    timed: list[tuple[float, int, Plan]] = []
    for place, plan in enumerate(plans(*cell, gpu())):
        try:
            say("plan", place=place)
            if not good(plan, x, packed[0], n):
                rows.append(["WRONG", repr(plan), "", ""])
                continue
            calls = [functools.partial(run_plan, plan, x, p, n) for p in packed]
            timed.append((graph_us(calls, 3), place, plan))
        except nvrtc.KernelError as error:
            rows.append([f"REFUSED: {error}".splitlines()[0][:120], repr(plan), "", ""])
    finalists = [plan for _, place, plan in sorted(timed, key=lambda one: one[:2]) if place > 0][:FINALISTS]
    finalists = [plan for _, place, plan in timed if place == 0] + finalists
    systems = [[functools.partial(torch.nn.functional.linear, x, d) for d in dense]]
    systems += [[functools.partial(run_plan, plan, x, p, n) for p in packed] for plan in finalists]
    cublas, *ours = alternating_us(systems, rounds)
    rows += [["once", repr(plan), round(us, 2), round(cublas, 2)] for us, _, plan in timed]
    rows += [["turns", repr(plan), round(us, 2), round(cublas, 2)] for plan, us in zip(finalists, ours, strict=True)]
    return rows


def sweep(cells: list[Cell], rounds: int, seconds: float, path: Path | None) -> None:
    rows = []
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 4) - 2)) as pool:
        wanted = dict.fromkeys(source for cell in cells for source in cell_sources(*cell))
        jobs = {source: pool.submit(compile_for, source) for source in wanted}

        for cell in cells:
            if seconds_since_start() > seconds:
                break
            for source in cell_sources(*cell):
                jobs[source].result()
            found, place = list[list[object]](), 0

            def hear(event: dict[str, Any]) -> None:
                nonlocal found, place
                found, place = event.get("rows", found), event.get("place", place)

            argument = json.dumps({"cell": cell, "rounds": rounds})
            if run_child(Path(__file__), argument, CELL_SECONDS, hear, print) is None:
                print(f"NEVER ENDED: {cell} {plans(*cell, gpu())[place]!r}")
                found = [["never ended", repr(plans(*cell, gpu())[place]), "", ""]]
            elif found:
                show(cell, found)
            rows.extend([*cell, *row] for row in found)
        if path:
            write(path, rows)
        for job in jobs.values():
            job.cancel()


def show(cell: Cell, rows: list[list[object]]) -> None:
    """The cell's ratios to cuBLAS, best first; plans that were wrong or refused in full."""
    today = plans(*cell, gpu())
    expected = {
        repr(plan): f"{wgmma_plan.predicted_us(plan, *cell, gpu()):.2f} expected" if isinstance(plan, WgmmaPlan) else ""
        for plan in today
    }
    rule = repr(today[0])
    turns = [(float(str(us)), float(str(cublas)), str(name)) for stage, name, us, cublas in rows if stage == "turns"]
    once = sum(stage == "once" for stage, *_ in rows)
    cublas_us = f"cuBLAS {turns[0][1]} us" if turns else "no plan was right"
    tell(f"{'x'.join(map(str, cell))}: {cublas_us}; {once} plans")
    for us, cublas, name in sorted(turns):
        print(f"   {cublas / us:.3f} {us:.2f} {expected[name]} {name}{', as the rule chooses' if name == rule else ''}")
    for stage, name, *_ in rows:
        if stage not in ("turns", "once"):
            print(f"   {stage} {name}")
    sys.stdout.flush()


def write(path: Path, rows: list[list[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["m", "n", "k", "stage", "plan", "us", "cublas"])
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--cells", type=parse_cells, required=True, help="MxNxK,MxNxK,..")
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=75.0, help="start no further cell after so many")
    add("--csv", type=Path, default=None)
    args = parser.parse_args()
    sweep(args.cells, args.rounds, args.seconds, args.csv)


def measured(argument: str) -> None:
    gc.freeze()  # capturing a graph may collect garbage
    job = json.loads(argument)
    say("rows", rows=measure(tuple(job["cell"]), job["rounds"]))


if __name__ == "__main__":
    if sys.argv[1:] == [ANSWER]:
        answer(measured)
    else:
        main()
