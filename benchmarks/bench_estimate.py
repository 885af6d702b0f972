"""The estimator against real runs: bytes that torch and the driver count, and the limit at which a run really fails.

    python benchmarks/bench_estimate.py predict --out predicted.json.gz                  # CPU only
    python benchmarks/bench_estimate.py measure --predicted predicted.json.gz --out measured.json.gz --boundary 12
    python benchmarks/bench_estimate.py report --predicted predicted.json.gz --measured measured.json.gz
    python benchmarks/bench_estimate.py all --cases 100 --jobs 8 --limit 150 --boundary 12 --timed 8 --folder results-here
    python benchmarks/bench_estimate.py all --cases 10 --tiny --device cpu               # the plumbing, without a GPU

Cases are drawn from a grid with a fixed seed (lib/estimate). Each runs two real steps in a process of its own, several abreast. With a
GPU `all` measures its rates first, for the step times that it predicts; timed cases run before the others, each alone. A case that fails is
a row with its error. Files are written as answers come; the tables are printed also when time is over or the run is stopped (SIGTERM).
"""

from __future__ import annotations

import os

# Before torch is loaded: asking whether there is a GPU must not start CUDA in the parent, and forks must find no threads.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import gzip
import json
import platform
import random
import signal
import statistics
import sys
import time
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.lib.estimate.cases import FAMILIES, Case, boundary_cases, draw
from benchmarks.lib.estimate.measure import boundary, measure, time_twice
from benchmarks.lib.estimate.models import build
from benchmarks.lib.estimate.pool import Pool, Task, cuda_in_a_fork, rates_here
from benchmarks.lib.estimate.predict import predict_without_gpu
from benchmarks.lib.estimate.report import (
    append_csv,
    boundary_lines,
    case_lines,
    case_of,
    claim_bytes,
    rows_of,
    step_lines,
    summary_lines,
    verdict_lines,
)
from vblackwell.machine.facts import list_gpus
from vblackwell.units import GiB

RESULTS = Path(__file__).parent / "results" / "estimate.csv"
# transformers imports these where they are installed, no case needs them, and the import of one (torchao) asks for the GPU's capability: it
# starts CUDA in the parent, and then no fork can.
NOT_NEEDED = ("torchao", "bitsandbytes", "liger_kernel", "gemlite", "deepspeed", "flash_attn", "kernels")
SAVE_SECONDS = 15.0  # between files on the way
# Boundaries beyond those that are asked for: some of the drawn cases cannot be predicted, some of those that can fail when they run.
SPARES_DRAWN, SPARES_RUN = 6, 2
TINY = {"language": (64, 2, 4), "resnet": (1, 1, 1, 1), "mlp": (64, 2, 0)}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("predict", "measure", "report", "all"))
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--only", default="", help="numbers of cases, comma-separated, instead of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--boundary", type=int, default=0, metavar="N", help="search the real limits of at least N more runs"
    )
    parser.add_argument(
        "--timed", type=int, default=0, metavar="N", help="time steps of N cases, each alone on the GPU"
    )
    parser.add_argument("--tracker", type=int, default=0, metavar="N", help="also ask torch's MemTracker about N cases")
    parser.add_argument("--jobs", type=int, default=8, help="cases abreast")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for all measurements together")
    parser.add_argument("--case-limit", type=float, default=60.0, metavar="SECONDS", help="for one case")
    parser.add_argument(
        "--gpu-bytes", type=int, default=0, help="that cases abreast may share; 0: four fifths of the GPU's"
    )
    parser.add_argument("--start", choices=("auto", "fork", "spawn"), default="auto", help="of the cases' processes")
    parser.add_argument("--capability", default="9.0", help="of the GPU that predictions are for")
    parser.add_argument("--gpu", default="H200", help="whose rates predicted step times go by")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same grid with toy sizes, for machines without a GPU")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where `all` leaves its files")
    parser.add_argument("--predicted", type=Path, default=None)
    parser.add_argument("--measured", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--csv", type=Path, default=None, help=f"append there instead of {RESULTS.parent.name}/{RESULTS.name}"
    )
    return parser.parse_args(argv)


def load(path: Path) -> dict[str, Any]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def save(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as file:
        json.dump(values, file)
    print(f"written: {path.name}, {path.stat().st_size / 1e6:.1f} MB", flush=True)


def shrunk(case: Case) -> Case:
    """A toy of the same kind."""
    size = TINY.get(case.family, TINY["language"])
    return replace(
        case, size=size, batch=2, seq=min(case.seq, 32), level0_bytes=GiB if case.stack else 0, expandable=False
    )


def drawn(args: argparse.Namespace) -> tuple[list[Case], list[Case]]:
    """Cases of the grid, and those whose boundary may be searched: more than are asked for, in the order of preference."""
    cases = draw(args.cases, args.seed)
    limits = boundary_cases(cases, args.boundary + SPARES_DRAWN) if args.boundary else []
    if args.only:
        wanted = {int(part) for part in args.only.split(",")}
        cases = [case for case in cases if case.number in wanted]
    if args.tiny:
        cases, limits = [shrunk(case) for case in cases], [replace(shrunk(case), card_bytes=0) for case in limits]
    return cases, limits


def preload() -> None:
    """Import in the parent what every child needs: modules come with the first model of a family. No backward: its threads bar forks."""
    for name in NOT_NEEDED:
        sys.modules.setdefault(name, None)  # pyright: ignore[reportArgumentType] - which is how Python says that there is none
    started = _who_starts_cuda()
    import torch._dynamo  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401

    import vblackwell

    assert vblackwell.VGPUAdamW and vblackwell.create_vgpu_stack
    for case in draw(2 * len(FAMILIES)):
        build(shrunk(case))
    for stack in started:
        tell(f"CUDA was started in the parent, so children cannot be forks: {stack}")


def _who_starts_cuda() -> list[str]:
    """Filled, from here on, with the callers of what starts CUDA."""
    start, found = torch.cuda._lazy_init, list[str]()

    def noted() -> None:
        if not torch.cuda.is_initialized() and os.getpid() == parent:
            frames = [each for each in traceback.extract_stack()[:-1][::-1] if "importlib" not in each.filename]
            found.append(" < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames[:6]))
        start()

    parent = os.getpid()
    torch.cuda._lazy_init = noted
    return found


def about(args: argparse.Namespace) -> dict[str, Any]:
    gpus = list_gpus()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "gpu": gpus[0].name if gpus else "none",
        "driver": gpus[0].driver_version if gpus else "", "python": platform.python_version(), "torch": torch.__version__,
        "transformers": metadata.version("transformers"), "seed": args.seed, "rates": args.rates,
    }  # fmt: skip


def tell(text: str) -> None:
    print(text, flush=True)


def do_predict(args: argparse.Namespace) -> dict[str, Any]:
    cases, limits = drawn(args)
    major, minor = map(int, args.capability.split("."))
    bounded = {case.number for case in limits}
    tasks = [
        Task(
            case.name,
            predict_without_gpu,
            {
                "case": case,
                "capability": (major, minor),
                "with_cap": case.number in bounded,
                "gpu": args.gpu,
                "measured": args.rates,
            },
        )
        for case in dict.fromkeys([*cases, *limits])
    ]
    pool = Pool(max(1, min(args.jobs * 2, len(os.sched_getaffinity(0)))), time.monotonic() + 3600, 300.0)
    began = time.monotonic()
    found = pool.run(tasks, tell)
    failed = [f"{key}: {each['error']}" for key, each in found.items() if "error" in each]
    print(
        "\n".join([f"{len(found)} predicted in {time.monotonic() - began:.0f} s, {len(failed)} failed", *failed]),
        flush=True,
    )
    return {"about": about(args), "cases": {task.key: found[task.key] for task in tasks}}


def some(cases: list[Case], count: int) -> list[Case]:
    """So many of them, always the same: a stride would meet one family alone."""
    return random.Random(0).sample(cases, min(count, len(cases)))


class Stopped(BaseException):
    """Somebody ended the run: what there is will be told."""


def _stop(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice, and the tables are still to come
    raise Stopped


def start_of_children(args: argparse.Namespace) -> str:
    """How children start: forks, if CUDA starts in one."""
    if args.start != "auto" or args.device == "cpu":
        return "fork" if args.start == "auto" else args.start
    answer = Pool(1, time.monotonic() + 60, 30.0).run([Task("cuda", cuda_in_a_fork, {})])["cuda"]
    start = "spawn" if "error" in answer else "fork"
    tell(f"CUDA in a fork: {answer}; cases start by {start}")
    return start


def do_rates(args: argparse.Namespace) -> None:
    """Measure what step times go by, alone on the machine."""
    args.rates = None
    if args.device == "cpu" or args.timed == 0:
        return
    found = Pool(1, time.monotonic() + 60, 40.0, start=args.start).run([Task("rates", rates_here, {})])["rates"]
    tell(f"rates: {found}")
    args.rates = None if "error" in found else found


def do_measure(args: argparse.Namespace, predicted: dict[str, Any], path: Path) -> dict[str, Any]:
    began = time.monotonic()
    cases, limits = drawn(args)
    told, deadline = predicted["cases"], began + args.limit

    def need(case: Case) -> int:
        return told.get(case.name, {}).get("peak_p50", 16 * GiB)

    # Through a stack no step time is predicted here.
    plain = [case for case in cases if not case.stack]
    timed = {case.name for case in some(plain, args.timed)} if args.device == "cuda" else set()
    alone = [
        Task(case.name, measure, {"values": case.to_dict(), "device": args.device, "timed": True}, alone=True)
        for case in cases if case.name in timed
    ]  # fmt: skip
    tasks = [
        Task(case.name, measure, {"values": case.to_dict(), "device": args.device}, need(case))
        for case in cases if case.name not in timed
    ]  # fmt: skip
    tasks += [
        Task(f"tracker {case.name}", measure, {"values": case.to_dict(), "device": args.device, "tracker": True}, GiB)
        for case in some(plain, args.tracker)
    ]
    limited = [
        _boundary_task(case, told, args.device) for case in limits if "smallest_cap" in told.get(_key(case, told), {})
    ][: args.boundary + SPARES_RUN]
    gpus = list_gpus()
    shared = args.gpu_bytes or (gpus[0].total_bytes * 4 // 5 if gpus else 64 * GiB)
    found: dict[str, dict[str, Any]] = {}
    measured = {"about": about(args), "cases": found}
    last = time.monotonic()

    def tell_and_keep(text: str) -> None:
        nonlocal last
        tell(text)
        if time.monotonic() - last > SAVE_SECONDS:
            save(path, measured)
            last = time.monotonic()

    signal.signal(signal.SIGTERM, _stop)
    try:
        Pool(1, deadline, args.case_limit, start=args.start).run(alone, tell_and_keep, found)
        # Boundaries take longest, so they start among the first.
        Pool(args.jobs, deadline, args.case_limit, shared, args.start).run([*limited, *tasks], tell_and_keep, found)
        again = Pool(1, deadline, args.case_limit, start=args.start).run(alone, tell, {})
        for name, each in again.items():
            time_twice(found[name], each)
    except (Stopped, KeyboardInterrupt):
        tell("stopped: what follows is what there is")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # files and tables take a second or two
    failed = sum("error" in each for each in found.values())
    print(f"{len(found)} measured in {time.monotonic() - began:.0f} s, {failed} failed", flush=True)
    save(path, measured)
    return measured


def _key(case: Case, told: dict[str, Any]) -> str:
    """The key of a boundary's prediction; a card's batch is known by its prediction alone."""
    return (
        case.name
        if case.name in told
        else next((key for key in told if key.startswith(f"{case.number:03d} ")), case.name)
    )


def _boundary_task(case: Case, told: dict[str, Any], device: str) -> Task:
    key = _key(case, told)
    mine = told[key]
    chosen = case_of(mine)
    cap = mine["smallest_cap"]
    arguments = {"values": chosen.to_dict(), "device": device, "claim": claim_bytes(cap), "expected": cap}
    if chosen.card_bytes:
        arguments["card"] = chosen.card_bytes - mine["context"]
    return Task(f"boundary {key}", boundary, arguments, mine["peak_p99"])


def do_report(args: argparse.Namespace, predicted: dict[str, Any], measured: dict[str, Any]) -> int:
    """Print the tables; 1 where a case has no answer, however good the others are."""
    told, real = predicted["cases"], measured["cases"]
    contexts = [each["context"] for each in real.values() if each.get("context")]
    context = int(statistics.median(contexts)) if contexts else None
    wanted = {_key(case, told) for case in drawn(args)[0]}
    drawn_only = {key: each for key, each in told.items() if key in wanted or key in real or "error" in each}
    rows = rows_of(drawn_only, real, context)
    print(
        "\n".join(
            [
                *case_lines(rows),
                "",
                *step_lines(rows),
                *boundary_lines(told, real, context, args.boundary),
                "",
                *summary_lines(rows),
                "",
                *verdict_lines(rows),
            ]  # fmt: skip
        ),
        flush=True,
    )
    if not args.tiny:
        append_csv(args.csv or RESULTS, rows, measured["about"])
    return int(any(row["error"] for row in rows))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    if args.what != "report":
        preload()
    if args.what == "all":
        args.predicted, args.measured = (args.folder / f"{name}.json.gz" for name in ("predicted", "measured"))
    args.rates = None
    if args.what in ("measure", "all"):
        args.start = start_of_children(args)
    if args.what == "all":
        do_rates(args)
    if args.what in ("predict", "all"):
        predicted = do_predict(args)
        save(
            args.out if args.what == "predict" and args.out else args.predicted or Path("predicted.json.gz"), predicted
        )
    if args.what in ("measure", "all"):
        if args.predicted is None:
            raise SystemExit(
                "measure: give --predicted FILE, made by `predict` with the same --cases, --seed and --boundary"
            )
        path = args.out if args.what == "measure" and args.out else args.measured or Path("measured.json.gz")
        do_measure(args, load(args.predicted), path)
    if args.what in ("report", "all"):
        if args.predicted is None or args.measured is None:
            raise SystemExit("report: give --predicted FILE and --measured FILE")
        return do_report(args, load(args.predicted), load(args.measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
