"""Weights in two parts: how long replacing linears takes, and the fused linear over cuBLAS bf16.

    python benchmarks/bench_two_part.py --start      # 62 linears of 36 M parameters, anywhere
    python benchmarks/bench_two_part.py --linear     # on a CUDA GPU

``--linear``: medians of CUDA-graph replays in turns over 24 layers of 8192x8192, far beyond L2, and ratios to cuBLAS in
the same run. Every row is printed as it comes, all are appended to `benchmarks/results/two_part.csv`; the exit code is
1 where a floor is missed.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lib.kernels.graph_timing import alternating_us
from benchmarks.lib.results import RESULTS, append_csv, tell, told_machine
from vblackwell.kernels.fp4 import layout
from vblackwell.kernels.fp4.linear import fp4_linear
from vblackwell.kernels.fp4.two_part import two_part_linear
from vblackwell.nn.convert.linears import enable_vb_optimization

LAYERS = 24


Row = dict[str, str | bool]


def tell_row(what: str, measured: str, floor: str, met: bool) -> Row:
    """A row, told as soon as it is known."""
    tell(f"{what}  {measured}  [{floor}: {'met' if met else 'MISSED'}]")
    return {"what": what, "measured": measured, "floor": floor, "met": met}


def compiled(calls: Sequence[Callable[[], object]]) -> None:
    """Call each once, several at a time: kernels are compiled at their first launch, which leaves Python to others
    meanwhile.
    """
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda call: call(), calls))
    torch.cuda.synchronize()


def deep_model(device: str) -> nn.Sequential:
    """62 linears, 36 M parameters."""
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(762, 762) for _ in range(62)))


def start_row(device: str) -> Row:
    model = deep_model(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    began = time.perf_counter()
    enable_vb_optimization(model, mode="training")
    took = time.perf_counter() - began
    began = time.perf_counter()
    with torch.no_grad():
        model(torch.randn(4, 762, device=device)).sum().item()
    first = time.perf_counter() - began
    text = f"{1000 * took:.1f} ms, first forward {1000 * first:.0f} ms"
    return tell_row(f"start of 62 layers, {parameters / 1e6:.0f} M parameters", text, "1 s", took < 1)


def random_parts(n: int, k: int, device: str = "cuda") -> tuple[Tensor, ...]:
    """Random parts in tiles: any coarse codes, fine ones that fit them."""
    codes_shape, scales_shape = layout.shapes(layout.TILED_PARTS, n, k)
    codes = torch.randint(0, 256, codes_shape, dtype=torch.uint8, device=device)
    fine = torch.randint(0, 256, codes_shape, dtype=torch.uint8, device=device) | 0x22
    scales = torch.randint(96, 144, scales_shape, dtype=torch.uint8, device=device)
    return codes, fine, scales, torch.tensor(2.0**-7, device=device)


def linear_rows(n: int, k: int, counts: list[int]) -> Iterator[Row]:
    parts = [random_parts(n, k) for _ in range(LAYERS)]
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    ours_of = functools.partial(two_part_linear, format=layout.TILED_PARTS, activation="none", n=n, k=k)
    coarse_of = functools.partial(fp4_linear, format=layout.tiled_name("nvfp4"), activation="none", n=n, k=k)
    first = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for m in counts]
    compiled([functools.partial(ours_of, x, *parts[0], None) for x in first])
    compiled([functools.partial(coarse_of, x, parts[0][0], *parts[0][2:], None) for x in first])
    for m, x in zip(counts, first, strict=True):
        bf16, ours, coarse = alternating_us(
            [
                [functools.partial(functional.linear, x, w) for w in dense],
                [functools.partial(ours_of, x, *w, None) for w in parts],
                [functools.partial(coarse_of, x, w[0], w[2], w[3], None) for w in parts],
            ],
            9,
        )
        text = f"{bf16 / ours:.3f} x ({ours:.2f} us; bf16 {bf16:.2f}, coarse alone {coarse:.2f})"
        yield tell_row(f"two-part linear {n}x{k}, M={m}", text, "1.5 x", bf16 / ours >= 1.5 or m > 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name in ("start", "linear"):
        add(f"--{name}", action="store_true")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="of --start")
    add("--shape", default="8192x8192", help="NxK of --linear")
    add(
        "--rows",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[1, 2, 4, 8, 16, 64],
        help="of --linear",
    )
    args = parser.parse_args()
    about, rows = told_machine(), list[Row]()
    if args.linear:
        n, k = (int(size) for size in args.shape.split("x"))
        rows += linear_rows(n, k, args.rows)
    if args.start:
        rows.append(start_row(args.device))
    append_csv(RESULTS / "two_part.csv", [{**about, **row} for row in rows])
    raise SystemExit(not all(row["met"] for row in rows))


if __name__ == "__main__":
    main()
