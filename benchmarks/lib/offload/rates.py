"""Rates of the machine that the comparison refers to, in a process of their own, before anything else runs.

The link is measured as streaming uses it: pinned slabs of our own making (huge pages, one registration), copies of 64 MiB, both
directions at once for a second; and each direction alone. The matrix product is bf16, 8192 cubed. The CPU's AdamW runs with nothing
beside it. Prints a JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from vblackwell.memory.copying import copy_streams
from vblackwell.memory.slab import map_slab
from vblackwell.offload.host_rates import cpu_rate, rates_together
from vblackwell.units import GiB, MiB

PIECE = 64 * MiB
PASSES = 4  # over a slab, a measurement
ROUNDS = 5


def link_gbps(device: torch.device, *, inward: bool, outward: bool) -> float:
    """GB/s of each direction that runs, from the time in which all of them end."""
    size = GiB
    host = [map_slab(size, pin=True) for _ in range(2)]
    there = [torch.empty(PIECE, dtype=torch.uint8, device=device) for _ in range(4)]
    streams = copy_streams(device)

    def once() -> float:
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for number, start in enumerate([*range(0, size, PIECE)] * PASSES):
            if inward:
                with torch.cuda.stream(streams.h2d):
                    there[number % 2].copy_(host[0][start : start + PIECE], non_blocking=True)
            if outward:
                with torch.cuda.stream(streams.d2h):
                    host[1][start : start + PIECE].copy_(there[2 + number % 2], non_blocking=True)
        torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    return PASSES * size / statistics.median(once() for _ in range(ROUNDS)) / 1e9


def matmul_flops(device: torch.device, size: int = 8192) -> float:
    """FLOP/s of a bf16 matrix product on random data."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for number in range(ROUNDS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            torch.mm(a, b)
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(end) / 10e3)
    return 2 * size**3 / statistics.median(times)


def main() -> None:
    device = torch.device("cuda", 0)
    link, cpu = rates_together(device)
    found = {
        "h2d_gbps": link_gbps(device, inward=True, outward=False),
        "d2h_gbps": link_gbps(device, inward=False, outward=True),
        "duplex_gbps": link_gbps(device, inward=True, outward=True),
        "matmul_flops": matmul_flops(device),
        "adamw_gps": cpu_rate() / 1e9,
        # the link each way and AdamW while both are at work in the same host memory
        "shared_gbps": link / 1e9,
        "shared_adamw_gps": cpu / 1e9,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
