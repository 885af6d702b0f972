"""FP4 linears against cuBLAS bf16 and other people's 4-bit linears: first that they are right, then how long they take.

    python benchmarks/bench_fp4.py --out results.csv        # a list of shapes and rows, on a CUDA GPU
    python benchmarks/bench_fp4.py --random 30 --seed 7     # cases that nobody has tuned for; --skip K goes on after K
    python benchmarks/bench_fp4.py --pack                   # what packing takes; --host: what calls cost the host
    python benchmarks/bench_fp4.py --sms 46,108             # what other GPUs run, on as many multiprocessors
    python benchmarks/bench_fp4.py --model                  # packing a Llama of 6.7B, and decoding with it
    python benchmarks/bench_fp4.py --start cpu              # replacing 62 linears of 36 M parameters, anywhere

Times are medians of CUDA-graph replays over layers whose weights exceed the L2 many times, as many for every system,
all systems of a shape and number of rows in turns; ratios are to cuBLAS bf16 in the same run. A product is checked
against float64 before it is timed; the exit code is 1 where one is wrong. ``--shapes``, ``--rows`` and ``--seconds``
fit a run to the time there is.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.nn import functional

from benchmarks.lib.kernels.fp4_draw import Product, case_line, draws, linear_sources, summary
from benchmarks.lib.kernels.fp4_layers import (
    FORMAT,
    LAYERS,
    Source,
    Tiled,
    ampere,
    compile_for,
    error_over_bound,
    layers_of,
    run_plan,
    sources,
)
from benchmarks.lib.kernels.fp4_models import bench_models
from benchmarks.lib.kernels.fp4_packing import print_packing
from benchmarks.lib.kernels.fp4_peers import Peer, choose
from benchmarks.lib.kernels.graph_timing import Replay, graph_of, host_us, turns_us
from benchmarks.lib.kernels.green_context import green_stream
from benchmarks.lib.results import RESULTS, append_csv, goal_header, seconds_since_start, tell, told_machine
from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import mma_plan, w4a8
from vblackwell.kernels.fp4 import norm as fp4_norm
from vblackwell.kernels.fp4.linear import fp4_linear, fp4_linear_dx
from vblackwell.kernels.fp4.two_part import two_part_linear
from vblackwell.kernels.pointwise.rows import rms_norm
from vblackwell.nn.convert.linears import enable_vb_optimization
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.packed_linear import PlacedWeight

SHAPES = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))
ROWS = (1, 4, 16, 64, 128, 256, 1024, 4096, 8192)
Row = dict[str, object]
Call = Callable[[torch.Tensor], torch.Tensor]


def _normed(x: torch.Tensor, gain: torch.Tensor, linear: Call) -> torch.Tensor:
    return linear(rms_norm(x, gain, 1e-5))


def systems(
    m: int, n: int, k: int, packed: list[Tiled], dense: list[torch.Tensor]
) -> Iterator[tuple[str, str, list[Callable[[], object]]]]:
    """(system, what it is compared with, calls)."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    yield "cublas bf16", "", [functools.partial(functional.linear, x, w) for w in dense]
    linear = functools.partial(fp4_linear, format=FORMAT, activation="none", n=n, k=k)
    yield "fp4_linear nvfp4", "cublas bf16", [functools.partial(linear, x, *w, None) for w in packed]
    if m <= fp4_norm.MAX_ROWS:
        gain = torch.randn(k, device="cuda", dtype=torch.bfloat16)
        yield (
            "rms_norm, cublas bf16",
            "",
            [functools.partial(_normed, x, gain, functools.partial(functional.linear, weight=w)) for w in dense],
        )
        apart = [functools.partial(_normed, x, gain, lambda x, w=w: linear(x, *w, None)) for w in packed]
        yield "rms_norm, fp4_linear nvfp4", "rms_norm, cublas bf16", apart
        run = functools.partial(fp4_norm.fp4_norm_linear, format=FORMAT, activation="none", n=n, k=k)
        fused = [functools.partial(run, x, gain, 1e-5, *w, None) for w in packed]
        yield "fp4_norm_linear nvfp4", "rms_norm, fp4_linear nvfp4", fused
        run = functools.partial(two_part_linear, format=FORMAT, activation="none", n=n, k=k)
        fine = (torch.randint_like(codes, 256) | 0x22 for codes, _, _ in packed)  # that fit any coarse code
        calls = [functools.partial(run, x, w[0], part, *w[1:], None) for w, part in zip(packed, fine, strict=True)]
        yield "two_part_linear nvfp4", "cublas bf16", calls
    if m >= 1024:
        tops = [w4a8.row_tops(w[1], n, k) for w in packed]
        run = functools.partial(w4a8.fp4_linear_w4a8, activation="none", n=n, k=k)
        calls = [functools.partial(run, x, *w, top, None) for w, top in zip(packed, tops, strict=True)]
        yield "fp4_linear_w4a8 mxfp4", "cublas bf16", calls
    if m == 4096:
        dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        yield "cublas bf16 dX", "", [functools.partial(torch.matmul, dy, w) for w in dense]
        back = functools.partial(fp4_linear_dx, format=FORMAT, n=n, k=k)
        yield "fp4_linear_dx nvfp4", "cublas bf16 dX", [functools.partial(back, dy, *w) for w in packed]


def peer_layers(
    peers: tuple[Peer, ...], w: torch.Tensor, count: int, seconds: float
) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """``count`` layers of each peer that can be had, within so many seconds, and why the others cannot, by name."""
    layers: dict[str, list[Call]] = {}
    reasons: dict[str, str] = {}
    for peer in peers:
        try:
            with at_most(seconds):
                layers[peer.name] = peer.layers(w, count)
        except Exception as error:  # whatever another package raises is its line of the table
            reasons[peer.name] = failure(error)
    return layers, reasons


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what has taken so long, and each second after: another package may tune its kernels for
    minutes.
    """

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"not done in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {error}".splitlines()[0][:160]


def bench(args: argparse.Namespace) -> bool:
    """Whether every product was right, of those that there was time for."""
    torch.cuda.init()  # plans ask the driver, which knows no GPU before
    about, rows, done = told_machine(), list[Row](), args.skip
    chosen = choose(args.peers)
    peers = tuple(peer for peer in chosen if peer.installed)
    for peer in chosen:
        if peer not in peers:
            tell(peer.name, "not installed, not compared with")
    listed = [Product(n, k, m) for (n, k), m in itertools.product(args.shapes, args.rows)]
    products = (draws(args.random, args.seed) if args.random else listed)[args.skip :]
    torch.manual_seed(args.seed)
    pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 4) - 2))
    try:
        wanted = dict.fromkeys(source for product in products for source in linear_sources(product))
        jobs = {source: pool.submit(compile_for, source) for source in wanted}
        for _, together in itertools.groupby(products, lambda product: product.weights):
            if seconds_since_start() > args.seconds:
                tell(f"{args.seconds:g} s are over: go on with --skip {done}")
                break
            found: list[Row] = []
            try:
                for row in measure(list(together), peers, jobs, args):
                    found.append(about | row | ({"seed": args.seed} if args.random else {}))
            finally:
                if args.out and found:
                    append_csv(args.out, found)
            done += len({row["m"] for row in found} - {""})
            rows += found
            torch.cuda.empty_cache()
    finally:
        pool.shutdown(cancel_futures=True)
    print("\n".join([goal_header(f"seed {args.seed}, cases {args.skip + 1} to {done}"), *summary(rows)]))
    return not any(str(row.get("note", "")).startswith("WRONG") for row in rows)


def measure(
    products: list[Product], peers: tuple[Peer, ...], jobs: dict[Source, Future[None]], args: argparse.Namespace
) -> Iterator[Row]:
    """Rows of the systems that multiply by the same weights; one without times where something did not run."""
    n, k, count = products[0].weights
    packed, dense = layers_of(n, k, count)
    theirs, reasons = peer_layers(peers, dense[0], count, args.peer_seconds)
    size: Row = {"n": n, "k": k, "layers": count}
    for name, reason in reasons.items():
        tell(f"{n} x {k}", f"{name} {reason}")
        yield size | {"m": "", "system": name, "note": reason}
    for product in products:
        for source in linear_sources(product):
            jobs[source].result()
        x = torch.randn(product.m, k, device="cuda", dtype=torch.bfloat16)
        call = functools.partial(fp4_linear, x, *packed[0], None, FORMAT, "none", n, k)
        if wrong := why_wrong(call, x, packed[0], n, k):
            tell(f"WRONG, and not timed: {product}: {wrong}")
            yield size | {"m": product.m, "system": "fp4_linear nvfp4", "note": f"WRONG: {wrong}"}
            continue
        compared = (
            (name, "cublas bf16", [functools.partial(layer, x) for layer in layers]) for name, layers in theirs.items()
        )
        ours = systems(product.m, n, k, packed, dense)
        every = itertools.chain(itertools.islice(ours, 2) if args.random else ours, compared)  # cuBLAS and fp4_linear
        rows = time_systems(every, set(theirs), 10 if product.m <= 256 else 8, args.peer_seconds)
        tell(case_line(product, rows))
        yield from (size | {"m": product.m} | row for row in rows)


def why_wrong(call: Callable[[], torch.Tensor], x: torch.Tensor, w: Tiled, n: int, k: int) -> str:
    """What is wrong with ``call``, a product of ``x`` and ``w``; nothing if it is right, and the same twice."""
    y, again = call(), call()
    if (error := error_over_bound(y, x, w, n, k)) > 1:
        return f"an error of {error:.2g} times the bound"
    return "" if torch.equal(y, again) else "not repeatable"


def _whole(x: torch.Tensor, w: Tiled, n: int, k: int) -> torch.Tensor:
    return functional.linear(x, fp4_launch.run_dequantize(w, n, k, x.dtype))


def bench_processors(args: argparse.Namespace) -> None:
    """What GPUs without wgmma run, on so many multiprocessors of this one (a Hopper) as they have, against cuBLAS there
    and the weight written out first. Tensor cores are Hopper's by mma instructions, memory and clocks are this GPU's.
    """
    told_machine()
    for wanted in args.sms:
        with green_stream(wanted) as (stream, processors):
            x, gpu = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), ampere(processors)
            cublas_us = turns_us([graph_of([functools.partial(torch.matmul, x, x)] * 2, stream)], 2)[0] / 2
            tera = 2 * 8192**3 / cublas_us / 1e6
            tell(f"{processors} multiprocessors", f"cuBLAS bf16 of 8192^3 does {tera:.0f} TFLOP/s")
            cells = itertools.product(args.shapes, args.rows)
            plans = {(n, k, m): mma_plan.plan_mma(m, n, k, gpu) for (n, k), m in cells}
            ahead = {source for (n, k, m), plan in plans.items() for source in sources(plan, m, n, k)}
            with ThreadPoolExecutor(max(1, (os.cpu_count() or 4) - 2)) as pool:
                list(pool.map(compile_for, ahead))
            for n, k in args.shapes:
                if seconds_since_start() > args.seconds:
                    tell(f"{n} x {k}", f"not run, {args.seconds:g} s are over")
                    continue
                packed, dense = layers_of(n, k)
                for m in args.rows:
                    x, plan = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), plans[n, k, m]
                    fused = [functools.partial(run_plan, plan, x, w, n) for w in packed]
                    if wrong := why_wrong(fused[0], x, packed[0], n, k):
                        raise SystemExit(f"WRONG, and not timed: {m} rows, {n} x {k}, {plan}: {wrong}")
                    whole = [functools.partial(_whole, x, w, n, k) for w in packed]
                    cublas = [functools.partial(functional.linear, x, w) for w in dense]
                    graphs = [graph_of(calls, stream) for calls in (cublas, fused, whole)]
                    theirs, ours, written = (us / LAYERS for us in turns_us(graphs, 4))
                    chosen = "fused" if mma_plan.mma_is_faster(m, n, k, gpu) else "whole"
                    tell(
                        f"{processors} multiprocessors, {m} rows, {n} x {k}",
                        f"cuBLAS {theirs:.2f} us, fused {theirs / ours:.3f} ({ours:.2f} us,"
                        f" {mma_plan.mma_us(plan, m, n, k, gpu):.2f} expected), whole {theirs / written:.3f}"
                        f" ({written:.2f} us); chosen {chosen}; {plan.tokens} tokens, {plan.row_warps} x {plan.k_warps}"
                        f" warps, {plan.k_blocks} K blocks",
                    )
                    del graphs
                del packed, dense


def time_systems(
    systems: Iterable[tuple[str, str, list[Callable[[], object]]]], theirs: set[str], rounds: int, seconds: float
) -> list[Row]:
    """A row for each of ``systems`` (name, what it is compared with, calls), replayed in turns.

    One of ``theirs`` may fail, or not be captured in so many seconds, and says why.

    Raises RuntimeError where another one failed; the message names it.
    """
    rows: list[Row] = []
    timed: list[tuple[str, str, int, Replay]] = []
    for system, other, calls in systems:
        rows.append({"system": system})
        try:
            with at_most(seconds) if system in theirs else contextlib.nullcontext():
                timed.append((system, other, len(calls), graph_of(calls)))
        except Exception as error:
            if system not in theirs:
                raise RuntimeError(f"{system} failed: {error}") from error
            rows[-1]["note"] = failure(error)
    found = turns_us([graph for *_, graph in timed], rounds)
    us = {system: whole / count for (system, _, count, _), whole in zip(timed, found, strict=True)}
    ratios = {system: us[other] / us[system] for system, other, *_ in timed if other}
    for row in rows:
        if (system := str(row["system"])) in us:
            row["us"], row["ratio"] = round(us[system], 2), round(ratios[system], 3) if system in ratios else ""
    return rows


def host_calls(n: int, k: int, packed: Tiled, dense: torch.Tensor) -> dict[str, Call]:
    rest = (*packed, None, "nvfp4-tiled", "none", n, k)
    module = FusedFP4Linear(k, n, False, device="meta")
    module.hold(PlacedWeight("nvfp4-tiled", *packed))
    return {
        "fp4_linear": lambda x: fp4_linear(x, *rest),
        "FusedFP4Linear": module,
        "torch.ops": lambda x: torch.ops.vblackwell.fp4_linear.default(x, *rest),
        "cuBLAS": lambda x: functional.linear(x, dense),
    }


def host(args: argparse.Namespace) -> None:
    """What an eager call costs the host: ours directly, as a module and as a registered op, and cuBLAS."""
    print("host us a call, least and median; then with gradients (forward alone)")
    for n, k in args.shapes:
        packed, dense = layers_of(n, k)
        for m, (name, call) in itertools.product(args.rows, host_calls(n, k, packed[0], dense[0]).items()):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            times = [host_us(functools.partial(call, each)) for each in (x, x.clone().requires_grad_())]
            print(f"{n}x{k} m={m:<5} {name:15s} {times[0]}  {times[1]}", flush=True)


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """'4096x4096,8192x8192' as pairs (N, K)."""
    pairs = [tuple(int(size) for size in word.split("x")) for word in text.split(",")]
    return [(pair[0], pair[1]) for pair in pairs]


def start(device: str) -> bool:
    """Whether 62 linears are replaced within a second; a row of results/two_part.csv."""
    with torch.device(device):
        model, x = nn.Sequential(*(nn.Linear(762, 762) for _ in range(62))), torch.randn(4, 762)
    about, began = told_machine(), time.perf_counter()
    enable_vb_optimization(model, mode="training")
    took, began = time.perf_counter() - began, time.perf_counter()
    with torch.no_grad():
        model(x).sum().item()
    measured = f"{1000 * took:.1f} ms, first forward {1000 * (time.perf_counter() - began):.0f} ms"
    row = {"what": "start of 62 layers, 36 M parameters", "measured": measured, "floor": "1 s", "met": took < 1}
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    append_csv(RESULTS / "two_part.csv", [about | row])
    return took < 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    add = parser.add_argument
    add("--random", type=int, default=0, metavar="N", help="draw N shapes and rows of x")
    add("--seed", type=int, default=0, help="of the draw")
    add("--skip", type=int, default=0, metavar="K", help="the first K cases")
    add("--peers", default="humming,torchao", help="none, or whose names begin with these")
    add("--peer-seconds", type=float, default=60.0, help="for a peer to make its layers, or to run some rows first")
    add("--host", action="store_true", help="what eager calls cost the host, and nothing else")
    add("--pack", action="store_true", help="what packing weights takes, by formats and searches, and nothing else")
    add("--model", action="store_true", help="pack a Llama of 6.7B and decode with it, and nothing else")
    add("--shapes", type=parse_shapes, default=list(SHAPES), help="NxK,NxK,..")
    add("--rows", type=numbers, default=list(ROWS))
    add("--sms", type=numbers, help="time what other GPUs run on so many multiprocessors, 46,108, and nothing else")
    add("--seconds", type=float, default=600.0, help="start no further shape after so many")
    add("--out", type=Path, default=None, help="CSV to append to")
    add("--start", choices=("cpu", "cuda"), help="time the start of a model in two parts there, and nothing else")
    args = parser.parse_args()
    if args.pack:
        for n, k in args.shapes:
            print_packing(n, k)
    elif args.model:
        told_machine()
        print("\n".join(bench_models()))
    elif args.host:
        host(args)
    elif args.sms:
        bench_processors(args)
    else:
        raise SystemExit(not (start(args.start) if args.start else bench(args)))


if __name__ == "__main__":
    main()
