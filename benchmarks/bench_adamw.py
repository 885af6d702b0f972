"""The AdamW kernel's share of HBM bandwidth and the cost of a launch; first that its bits are the CPU's.

    python benchmarks/bench_adamw.py

Medians, times by CUDA events, next to a copy inside the GPU (read and write counted) in the same run.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from vblackwell.kernels.optimizer.adamw import BLOCK, AdamWStep, adamw_piece, square_sums
from vblackwell.kernels.optimizer.adamw8 import SCALE_BLOCK, adamw8_piece
from vblackwell.kernels.optimizer.adamw_cpu import torch_order

NUMBERS = AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 7)


def seconds(call: Callable[[], object], repeats: int = 15) -> float:
    """Median time of ``call`` on the GPU."""
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def piece(n: int, narrow: bool, device: str = "cuda") -> list[torch.Tensor | None]:
    """Weight, remainder, exp_avg, exp_avg_sq and gradient."""
    generator = torch.Generator(device).manual_seed(0)
    normal = [torch.randn(n, generator=generator, device=device) for _ in range(4)]
    weight, remainder = normal[0], None
    if narrow:
        weight = normal[0].bfloat16()
        remainder = torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16, device=device, generator=generator)
    return [weight, remainder, normal[1], normal[2].square_(), normal[3].bfloat16() if narrow else normal[3]]


def replay(tensors: list[torch.Tensor | None], n: int, with_sums: bool) -> Callable[[], object]:
    """A graph that updates ``tensors`` in pieces of n elements."""
    cut = [itertools.repeat(None) if tensor is None else tensor.split(n) for tensor in tensors]
    sums = torch.empty(n // BLOCK, device="cuda") if with_sums else None
    graph = torch.cuda.CUDAGraph()
    adamw_piece(*next(zip(*cut, strict=False)), NUMBERS, square_sums=sums)  # compiled before the capture
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for parts in zip(*cut, strict=False):
            adamw_piece(*parts, NUMBERS, square_sums=sums)
    return graph.replay


def check() -> None:
    tensors = piece((1 << 20) + 5, True)
    on_cpu = [None if tensor is None else tensor.cpu() for tensor in tensors]
    adamw_piece(*tensors, NUMBERS)  # pyright: ignore[reportArgumentType]
    adamw_piece(*on_cpu, NUMBERS)  # pyright: ignore[reportArgumentType]
    for mine, its in zip(tensors, on_cpu, strict=True):
        assert mine is its or torch.equal(mine.cpu(), its)  # pyright: ignore[reportOptionalMemberAccess]


def main() -> None:
    check()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CPU {torch.backends.cpu.get_cpu_capability()}, {torch_order()}"
    )
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * source.numel() / seconds(lambda: target.copy_(source))
    print(f"copy {copy / 1e12:.2f} TB/s")
    print(f"{1 << 26} elements in pieces, one after the other, from a graph")
    print("weight     piece     sums  us a piece   TB/s   of copy   G parameters/s")
    for narrow, size in ((True, 26), (False, 28)):
        tensors = piece(1 << 26, narrow)
        for n, with_sums in itertools.product((1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 26), (False, True)):
            took = seconds(replay(tensors, n, with_sums))
            rate, count = (size << 26) / took, (1 << 26) // n
            print(
                f"{'bf16' if narrow else 'fp32'}  {n:>10}  {'yes' if with_sums else 'no':>6}  {took / count * 1e6:9.1f}  {rate / 1e12:5.2f}"
                f"  {rate / copy:7.0%}  {(1 << 26) / took / 1e9:10.1f}"
            )
    tensors = piece(1 << 26, True)
    sums = torch.empty((1 << 26) // BLOCK, device="cuda")
    took = seconds(lambda: square_sums(tensors[4], sums))  # pyright: ignore[reportArgumentType]
    print(f"square_sums of bf16: {(2 << 26) / took / 1e12:.2f} TB/s")
    for narrow in (True, False):  # with a remainder, and bf16 rounded at random
        n = 1 << 26
        codes, scales = (
            torch.zeros(2, n, dtype=torch.uint8, device="cuda"),
            torch.zeros(2, n // SCALE_BLOCK, device="cuda"),
        )
        states = codes[0], scales[0], codes[1], scales[1]
        remainder = tensors[1] if narrow else None
        took = seconds(
            lambda r=remainder, s=states: adamw8_piece(tensors[0], r, *s, tensors[4], NUMBERS, seed=0, offset=0)
        )  # pyright: ignore
        size = 14 + 1 / 16 if narrow else 10 + 1 / 16
        rate = n * size / took
        print(
            f"8-bit moments, {'with' if narrow else 'without'} remainder: {rate / 1e12:.2f} TB/s, {rate / copy:.0%} of copy, "
            f"{n / took / 1e9:.1f} G parameters/s"
        )
    small = piece(BLOCK, True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        adamw_piece(*small, NUMBERS)  # pyright: ignore[reportArgumentType]
    print(f"a call takes the CPU {(time.perf_counter() - start) / 500 * 1e6:.1f} us")


if __name__ == "__main__":
    main()
