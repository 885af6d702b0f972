"""Attention: what runs by default and the own kernel, over PyTorch's own choice and its backends, eager and graphed.

    python benchmarks/bench_attention.py                        # a list of cases, on a CUDA GPU
    python benchmarks/bench_attention.py --random 40 --seed 7   # cases that nobody has tuned for; --skip K goes on

Each case, in bf16, is a forward without gradients or a forward and backward. It is checked against float64 before it is
timed; the exit code is 1 where one is wrong. Eager: the least time of calls launched one after another, ours and plain
`scaled_dot_product_attention` in turns. Graphed: medians of CUDA-graph replays, of PyTorch's backends too. What ours
makes of a mask (bits, tile lists) is counted; PyTorch is given a mask of a window or of packed documents. Last come the
worst and the median ratios with their floors and aims. ``--tune`` keeps the times of the list for the dispatcher.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.lib.kernels.attention_case import Case, compile_ahead
from benchmarks.lib.kernels.attention_draw import Attention, Times, draws, summary
from benchmarks.lib.kernels.graph_timing import host_us
from benchmarks.lib.results import append_csv, goal_header, seconds_since_start, tell, told_machine
from vblackwell.kernels.runtime import tuning
from vblackwell.nn.attention import backends as dispatcher


def listed() -> list[Attention]:
    """Shapes that models have; those with masks first."""
    masked = Attention("boolean", 4, 16, 16, 4096, 4096, 128, False)
    causal = Attention("causal", 2, 16, 16, 8192, 8192, 128, False)
    found = [
        replace(masked, mask=(1, 1, 4096, 4096)),
        replace(masked, mask=(4, 1, 1, 4096)),
        replace(masked, kind="additive", mask=(1, 1, 4096, 4096)),
        replace(causal, kind="documents", batch=1, ends=(300, 1100, 1500, 3000, 3100, 4700, 6900, 8192)),
        replace(causal, kind="window", window=1024),
    ]
    for (head, heads), (batch, length) in itertools.product(((128, 16), (64, 32)), ((4, 4096), (2, 8192), (1, 16384))):
        found.append(Attention("causal", batch, heads, heads, length, length, head, False))
    found += [replace(causal, kind="plain"), replace(causal, heads=32, kv_heads=8), replace(causal, head=96)]
    found.append(Attention("causal", 2, 8, 8, 4096, 4096, 256, False))
    return [replace(case, gradient=gradient) for case in found for gradient in (False, True)]


def small() -> list[Attention]:
    """What takes the GPU less time than the host needs to call it."""
    plain = Attention("plain", 2, 16, 16, 512, 512, 64, False)
    masked = replace(plain, kind="boolean", queries=63, keys=257, mask=(1, 1, 63, 257))
    found = [plain, replace(plain, kind="causal"), replace(plain, kind="causal", heads=32, kv_heads=8)]
    found += [replace(plain, heads=32, kv_heads=8, queries=1), masked, replace(masked, kind="additive")]
    found += [replace(masked, heads=32, kv_heads=8), replace(plain, kind="window", window=64)]
    return [replace(case, gradient=gradient) for case in found for gradient in (False, True)]


def host(cases: Sequence[Attention]) -> None:
    """What an eager call costs the host, ours and PyTorch's own choice."""
    print("host us a call, least and median: ours, then PyTorch's choice")
    for case in cases:
        made = Case(case)
        steps = made.step(made.ours, made.inputs), made.step(made.theirs, made.leaves)
        print(*map(host_us, steps), case, sep="   ", flush=True)


def bench(cases: Sequence[Attention], arguments: argparse.Namespace) -> bool:
    """Whether every case was right, of those that there was time for."""
    about, found, right, done = told_machine(), list[Times](), True, arguments.skip
    compile_ahead(cases)
    tell("compiled")
    for case in cases:
        if seconds_since_start() > arguments.seconds:
            tell(f"{arguments.seconds:g} s are over: go on with --skip {done}")
            break
        done += 1
        try:
            made = Case(case)
            if (error := made.error_over_bound()) > 1:
                raise ArithmeticError(f"an error of {error:.2g} times the bound")
            times = made.measure(own=not arguments.random)
        except Exception as failure:  # the other cases run all the same
            right = False
            tell(f"{done}", f"WRONG, and not timed: {case}: {failure!r:.300}")
            continue
        found.append(times)
        tell(f"{done}", f"{case}: {times}; error {error:.2f} of its bound")
        if arguments.tune is not None and not case.ends:
            keep_times(made, times.graphed, arguments.tune)
        if arguments.out is not None:
            us = {"eager": times.eager, "eager_torch": times.eager_torch} | times.graphed
            row = {"seed": arguments.seed, "number": done, "case": str(case), "error_over_bound": error}
            row |= {f"{name}_us": value for name, value in us.items()}
            row |= zip(("eager_ratio", "graphed_ratio"), times.ratios, strict=True)
            append_csv(arguments.out, [about | row])
        del made
        torch.cuda.empty_cache()
    print("\n".join([goal_header(f"seed {arguments.seed}, cases {arguments.skip + 1} to {done}"), *summary(found)]))
    return right


def keep_times(case: Case, graphed: dict[str, float], path: Path) -> None:
    """Write the times of the dispatcher's backends for it, to ``path``, or where this machine's are."""
    request = case.request
    able = {name for name, reasons in dispatcher.attention_backends(request).items() if not reasons} - {"math"}
    times = {name: int(1000 * us) for name, us in graphed.items() if name in able}
    table = {dispatcher.shape_key(request): times, dispatcher.neighbours_key(request): times}
    tuning.store(dispatcher.KIND, torch.device("cuda", torch.cuda.current_device()), table, path if path.name else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--random", type=int, default=0, metavar="N", help="draw N cases")
    add("--seed", type=int, default=0, help="of the draw")
    add("--skip", type=int, default=0, metavar="K", help="the first K cases")
    add("--only", default="", help="cases whose description has this")
    add("--seconds", type=float, default=600.0, help="start no case later than this")
    add("--host", action="store_true", help="what small eager calls cost the host, and nothing else")
    add("--tune", nargs="?", type=Path, const=Path(), metavar="FILE", help="keep the times on this machine, or in FILE")
    add("--out", type=Path, help="CSV to append to")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    cases = draws(arguments.random, arguments.seed) if arguments.random else listed()
    wanted = [case for case in cases if arguments.only in str(case)][arguments.skip :]
    if arguments.host:
        return host(small())
    raise SystemExit(not bench(wanted, arguments))


if __name__ == "__main__":
    main()
