"""FP4 linear against cuBLAS bf16: first that it is right, then how long it takes.

``python benchmarks/bench_fp4.py --check --bench --out results.csv`` on a CUDA GPU. Times are medians of CUDA-graph
replays over 24 layers whose weights exceed the L2 many times, the same count for every system, all systems of a shape
and number of rows in turns; ratios are to cuBLAS bf16 in the same run. ``--peers``
adds other people's 4-bit linears (lib/kernels), ``--do-bench`` a second time by ``triton.testing.do_bench``, which
launches one layer at a time from Python after the L2 was emptied. ``--shapes``, ``--rows`` and ``--seconds`` fit a run
to the time there is.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional

from benchmarks.lib.kernels.fp4_layers import LAYERS, Tiled, ampere, layers_of, plans_of, run_plan
from benchmarks.lib.kernels.fp4_peers import Peer, choose
from benchmarks.lib.kernels.fp4_report import print_table, write_rows
from benchmarks.lib.kernels.graph_timing import Replay, graph_of, turns_us
from benchmarks.lib.kernels.green_context import green_stream
from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import layout, mma_plan, reference, w4a8
from vblackwell.kernels.fp4 import norm as fp4_norm
from vblackwell.kernels.fp4.linear import fp4_linear, fp4_linear_dx
from vblackwell.kernels.pointwise.rows import rms_norm
from vblackwell.kernels.runtime import tuning as cache
from vblackwell.numerics.formats import FORMATS

SHAPES = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))
ROWS = (1, 4, 16, 64, 128, 256, 1024, 4096, 8192)
CHECK_SHAPES = ((40, 136), (200, 1000), (1056, 4096), (512, 14336), (9000, 520))
CHECK_ROWS = (1, 3, 4, 8, 13, 16, 33, 64, 100, 256, 300)
Call = Callable[[torch.Tensor], torch.Tensor]


def error_over_bound(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """Largest error over 4 * 2^-24 * sqrt(K) * sum |w||x|; NaN counts as infinite."""
    exact = x.double() @ w.double().t()
    bound = 4 * 2**-24 * x.shape[1] ** 0.5 * (x.double().abs() @ w.double().abs().t()) + 1e-30
    ratio = ((y.double() - exact).abs() / bound).max().item()
    return ratio if ratio == ratio else float("inf")


def check() -> None:
    """fp32 outputs against float64 on odd and even shapes, twice for equal bits; rounded outputs against cuBLAS's own
    error.
    """
    torch.manual_seed(0)
    worst = {"dequantize": 0.0, "MmaPlan": 0.0, "WgmmaPlan": 0.0, "rounded, over cuBLAS": 0.0}
    for (n, k), format in itertools.product(CHECK_SHAPES, ("nvfp4", "mxfp4")):
        form = FORMATS[format]
        codes = torch.randint(0, 256, form.codes_shape(n, k), dtype=torch.uint8, device="cuda")
        low, high = (0, 127) if format == "nvfp4" else (115, 132)
        scales = torch.randint(low, high, form.scales_shape(n, k), dtype=torch.uint8, device="cuda")
        scale = torch.tensor(0.37 if format == "nvfp4" else 1.0, device="cuda")
        w = reference.dequantize(codes, scales, scale, format, n, k)
        tiled = layout.to_tiled(codes, scales, scale, format, n, k)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            same = torch.equal(fp4_launch.run_dequantize(tiled, n, k, dtype), w.to(dtype))
            worst["dequantize"] = max(worst["dequantize"], 0.0 if same else float("inf"))
        dtype = torch.bfloat16 if format == "nvfp4" else torch.float16
        for m in CHECK_ROWS:
            x = torch.randn(m, k, device="cuda").to(dtype)
            for plan in plans_of(m, n, k):
                y, again = (run_plan(plan, x, tiled, n, torch.float32) for _ in range(2))
                ratio = error_over_bound(y, x, w) if torch.equal(y, again) else float("inf")
                if ratio > 1:
                    print("WRONG", plan, n, k, format, m, dtype, ratio, "repeats", torch.equal(y, again))
                name = type(plan).__name__
                worst[name] = max(worst[name], ratio)
            if format == "mxfp4" and k % 8 == 0:  # its weights are exact in bf16, so cuBLAS sums the same numbers
                xb = x.bfloat16()
                exact = xb.double() @ w.double().t()
                ours = fp4_linear(xb, *tiled, None, "mxfp4-tiled", "none", n, k)
                theirs = xb @ w.bfloat16().t()
                error = (ours.double() - exact).norm() / (theirs.double() - exact).norm()
                worst["rounded, over cuBLAS"] = max(worst["rounded, over cuBLAS"], error.item())
    print("check (errors over the bound, 1 is the limit; over cuBLAS, 1.1):", worst)
    if max(worst["dequantize"], worst["MmaPlan"], worst["WgmmaPlan"]) > 1 or worst["rounded, over cuBLAS"] > 1.1:
        raise SystemExit("the check failed: no times are printed for wrong results")


def _normed(x: torch.Tensor, gain: torch.Tensor, linear: Call) -> torch.Tensor:
    return linear(rms_norm(x, gain, 1e-5))


def systems(
    m: int, n: int, k: int, packed: list[Tiled], dense: list[torch.Tensor]
) -> Iterator[tuple[str, str, list[Callable[[], object]]]]:
    """(system, what it is compared with, calls)."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    yield "cublas bf16", "", [functools.partial(functional.linear, x, w) for w in dense]
    linear = functools.partial(fp4_linear, format="nvfp4-tiled", activation="none", n=n, k=k)
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
        run = functools.partial(fp4_norm.fp4_norm_linear, format="nvfp4-tiled", activation="none", n=n, k=k)
        fused = [functools.partial(run, x, gain, 1e-5, *w, None) for w in packed]
        yield "fp4_norm_linear nvfp4", "rms_norm, fp4_linear nvfp4", fused
    if m >= 1024:
        tops = [w4a8.row_tops(w[1], n, k) for w in packed]
        run = functools.partial(w4a8.fp4_linear_w4a8, activation="none", n=n, k=k)
        calls = [functools.partial(run, x, *w, top, None) for w, top in zip(packed, tops, strict=True)]
        yield "fp4_linear_w4a8 mxfp4", "cublas bf16", calls
    if m == 4096:
        dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        yield "cublas bf16 dX", "", [functools.partial(torch.matmul, dy, w) for w in dense]
        back = functools.partial(fp4_linear_dx, format="nvfp4-tiled", n=n, k=k)
        yield "fp4_linear_dx nvfp4", "cublas bf16 dX", [functools.partial(back, dy, *w) for w in packed]


def peer_layers(
    peers: tuple[Peer, ...], w: torch.Tensor, seconds: float
) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """Layers of the peers that can be had, each within so many seconds, and why the others cannot, by name."""
    layers: dict[str, list[Call]] = {}
    reasons: dict[str, str] = {}
    for peer in peers:
        reason = peer.why_not()
        if reason is None:
            try:
                with at_most(seconds):
                    layers[peer.name] = peer.layers(w, LAYERS)
            except Exception as error:  # whatever another package raises is its line of the table
                reason = failure(error)
            if gpu_is_lost():
                raise PeerLostGpu(peer.name, reason or "its layers were made, and no later call succeeds")
        if reason is not None:
            reasons[peer.name] = reason
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


class PeerLostGpu(Exception):
    """A peer made the GPU refuse all further work of this process: its name, why."""


def gpu_is_lost() -> bool:
    """Whether no later call of this process can succeed, as after a write to memory that there is not."""
    try:
        _ = torch.cuda.is_initialized() and torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {error}".splitlines()[0][:160]


def do_bench_us(call: Callable[[], object]) -> float:
    """Triton's own measurement of one call: the median, with the L2 emptied before each and Python's launch in it."""
    from triton.testing import do_bench

    return 1000 * float(do_bench(call, warmup=5, rep=20, return_mode="median"))  # pyright: ignore[reportArgumentType]


def bench(args: argparse.Namespace) -> None:
    rows: list[dict[str, object]] = []
    machine = cache.machine(torch.device("cuda", 0))
    left_out = dict(word.split("=", 1) for word in args.without)
    peers, began = tuple(peer for peer in choose(args.peers) if peer.name not in left_out), time.monotonic()
    for n, k in args.shapes:
        if time.monotonic() - began > args.seconds:
            print(f"{n}x{k}: not run, {args.seconds:g} s are over")
            continue
        packed, dense = layers_of(n, k)
        theirs, reasons = peer_layers(peers, dense[0], args.peer_seconds)
        for name, reason in (left_out | reasons).items():
            rows.append({"n": n, "k": k, "m": "", "system": name, "note": reason, **machine})
        for m in args.rows:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            compared = (
                (name, "cublas bf16", [functools.partial(layer, x) for layer in layers])
                for name, layers in theirs.items()
            )
            every = itertools.chain(systems(m, n, k, packed, dense), compared)
            rounds = 10 if m <= 256 else 8
            for row in time_systems(every, set(theirs), rounds, args.do_bench, args.peer_seconds):
                rows.append({"n": n, "k": k, "m": m, **row, **machine})
        del packed, dense, theirs
        torch.cuda.empty_cache()
        if args.out:
            write_rows(args.out, rows)
    print_table(rows, args.shapes)


def _whole(x: torch.Tensor, w: Tiled, n: int, k: int) -> torch.Tensor:
    return functional.linear(x, fp4_launch.run_dequantize(w, n, k, x.dtype))


def bench_processors(args: argparse.Namespace) -> None:
    """What GPUs without wgmma run, on so many multiprocessors of this one (a Hopper) as they have, against cuBLAS there
    and the weight written out first. Tensor cores are Hopper's by mma instructions, memory and clocks are this GPU's.
    """
    began = time.monotonic()
    for wanted in args.sms:
        with green_stream(wanted) as (stream, processors):
            x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
            graph = graph_of([functools.partial(torch.matmul, x, x)] * 2, stream)
            tera = 2 * 2 * 8192**3 / turns_us([graph], 2)[0] / 1e6
            print(
                f"{processors} multiprocessors for {wanted}: cuBLAS bf16 of 8192^3 does {tera:.0f} TFLOP/s", flush=True
            )
            del x, graph
            for n, k in args.shapes:
                if time.monotonic() - began > args.seconds:
                    print(f"{n}x{k}: not run, {args.seconds:g} s are over")
                    continue
                packed, dense = layers_of(n, k)
                for m in args.rows:
                    x, gpu = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), ampere(processors)
                    plan = mma_plan.plan_mma(m, n, k, gpu)
                    fused = [functools.partial(run_plan, plan, x, w, n) for w in packed]
                    whole = [functools.partial(_whole, x, w, n, k) for w in packed]
                    cublas = [functools.partial(functional.linear, x, w) for w in dense]
                    wanted_MN = whole[0]()
                    if not (fused[0]() - wanted_MN).norm() <= 2**-7 * wanted_MN.norm():  # each rounds sums to bf16
                        raise SystemExit(f"{plan} is wrong at {m}x{n}x{k}: no times are printed for wrong results")
                    graphs = [graph_of(calls, stream) for calls in (cublas, fused, whole)]
                    theirs, ours, written = (us / LAYERS for us in turns_us(graphs, 4))
                    chosen = "fused" if mma_plan.mma_is_faster(m, n, k, gpu) else "whole"
                    print(
                        f"{processors} {m}x{n}x{k}: cuBLAS {theirs:.2f} us, fused {theirs / ours:.3f} ({ours:.2f} us,"
                        f" {mma_plan.mma_us(plan, m, n, k, gpu):.2f} expected), whole {theirs / written:.3f}"
                        f" ({written:.2f} us); chosen {chosen}; {plan.tokens} tokens, {plan.row_warps} x {plan.k_warps}"
                        f" warps, {plan.k_blocks} K blocks",
                        flush=True,
                    )
                    del graphs
                del packed, dense


def time_systems(
    systems: Iterable[tuple[str, str, list[Callable[[], object]]]],
    theirs: set[str],
    rounds: int,
    also_do_bench: bool,
    seconds: float,
) -> list[dict[str, object]]:
    """A row for each of ``systems`` (name, what it is compared with, calls), replayed in turns.

    One of ``theirs`` may fail, or not be captured in so many seconds, and says why.

    Raises:
        PeerLostGpu: one of ``theirs`` failed such that the process cannot go on.
        RuntimeError: another one failed; the message names it.
    """
    rows: list[dict[str, object]] = []
    graphs: dict[str, Replay] = {}
    counts: dict[str, int] = {}
    others: dict[str, str] = {}
    for system, other, calls in systems:
        row: dict[str, object] = {"system": system}
        rows.append(row)
        try:
            with at_most(seconds) if system in theirs else contextlib.nullcontext():
                graph = graph_of(calls)
            if also_do_bench:
                row["do_bench_us"] = round(do_bench_us(calls[0]), 2)
        except Exception as error:
            if system not in theirs:
                raise RuntimeError(f"{system} failed: {error}") from error
            row["note"] = failure(error)
            if gpu_is_lost():
                raise PeerLostGpu(system, row["note"]) from error
            continue
        graphs[system], counts[system], others[system] = graph, len(calls), other
    replays = dict(zip(graphs, turns_us(list(graphs.values()), rounds), strict=True))
    times = {system: us / counts[system] for system, us in replays.items()}
    for row in rows:
        system = str(row["system"])
        if system in times:
            row["us"] = round(times[system], 2)
            row["ratio"] = round(times[others[system]] / times[system], 3) if others[system] else ""
    return rows


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """'4096x4096,8192x8192' as pairs (N, K)."""
    pairs = [tuple(int(size) for size in word.split("x")) for word in text.split(",")]
    return [(pair[0], pair[1]) for pair in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    add = parser.add_argument
    add("--check", action="store_true")
    add("--bench", action="store_true")
    add("--peers", default="none", help="all, none, or names like humming,torchao")
    add(
        "--peer-seconds",
        type=float,
        default=60.0,
        help="for a peer to make its layers, or to run a number of rows first",
    )
    add("--do-bench", action="store_true", help="also by triton.testing.do_bench")
    add("--shapes", type=parse_shapes, default=list(SHAPES), help="NxK,NxK,..")
    add("--rows", type=numbers, default=list(ROWS))
    add(
        "--sms",
        type=numbers,
        default=[],
        help="time what other GPUs run on so many multiprocessors of this one: 46,108",
    )
    add("--seconds", type=float, default=600.0, help="start no further shape after so many")
    add("--out", type=Path, default=None)
    add("--without", action="append", default=[], metavar="PEER=WHY", help="leave it out, and say why")
    args = parser.parse_args()
    print(cache.machine(torch.device("cuda", 0)))
    if args.check:
        check()
    if args.sms:
        bench_processors(args)
    if args.bench:
        try:
            bench(args)
        except PeerLostGpu as lost:  # nothing more runs in this process: begin again, without that peer
            name, why = lost.args
            print(f"{name}: {why}; once more without it", flush=True)
            os.execv(sys.executable, [*sys.orig_argv, "--without", f"{name}={why}"])


if __name__ == "__main__":
    main()
