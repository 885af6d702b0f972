"""Levels and the stack: bandwidth against the machine's limit in the same run, and hits of a workload.

    python benchmarks/bench_stack.py [--disk-path DIR] [--quick]

Limits are the plainest code that can do the same: a copy between a tensor pinned by torch and the GPU, `Tensor.copy_`
in RAM, a loop of `preadv`/`pwritev` over eight threads with O_DIRECT and without checksums. Ours and the limit
alternate, and the ratio is that of the medians, because machines drift. Every transfer's bytes are compared once before
it is timed. Runs without a GPU too; results are appended to `benchmarks/results/stack.csv`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.lib.results import RESULTS, append_csv, told_machine
from vblackwell import VGPUStack, create_vgpu_stack
from vblackwell.machine.limits import default_disk_path
from vblackwell.memory.disk import DiskLevel, ScratchFile, memory_at
from vblackwell.memory.host import HostLevel, map_slab
from vblackwell.memory.level import Level, Transfer
from vblackwell.units import GiB, MiB, format_bytes

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if CUDA else "cpu")
PIECE, THREADS = 8 * MiB, 8


@dataclass
class Result:
    """One line of the table. ``ratio`` is to the limit; ``floor`` what it must reach."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    floor: float | None = None


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def alternate(ours: Callable[[], Any], limit: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median seconds of each, run in turns after one unmeasured turn."""
    ours()
    limit()
    pairs = [(seconds_of(ours), seconds_of(limit)) for _ in range(rounds)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def bandwidth(
    name: str, num_bytes: int, ours: Callable[[], Any], limit: Callable[[], Any], rounds: int, floor: float | None
) -> Result:
    mine, best = alternate(ours, limit, rounds)
    return Result(name, num_bytes / mine / 1e9, "GB/s", num_bytes / best / 1e9, best / mine, floor)


# Links between levels.


def check_bytes(level: Level, extent: Any, source: torch.Tensor, out: torch.Tensor) -> None:
    """No speed without correctness."""
    level.write(extent, source).wait()
    out.zero_()
    level.read(extent, out).wait()
    assert torch.equal(out, source), f"{level.name} changed bytes"


def bench_host_and_gpu(rounds: int) -> list[Result]:
    results = []
    host = HostLevel(GiB)
    for size in (MiB, 16 * MiB, 256 * MiB):
        extent = host.allocate(size)
        gpu = torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE)
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        check_bytes(host, extent, gpu, torch.empty_like(gpu))
        repeat = max(1, 64 * MiB // size)
        floor = 0.9 if size >= 16 * MiB else None

        def ours(move: Callable[..., Transfer], extent: Any = extent, gpu: Any = gpu, repeat: int = repeat) -> None:
            for transfer in [move(extent, gpu) for _ in range(repeat)]:
                transfer.wait()
            torch.cuda.synchronize()

        def limit(to: torch.Tensor, source: torch.Tensor, repeat: int = repeat) -> None:
            for _ in range(repeat):
                to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        up = partial(ours, host.read), partial(limit, gpu, pinned)
        down = partial(ours, host.write), partial(limit, pinned, gpu)
        for direction, pair in (("host to GPU", up), ("GPU to host", down)):
            results.append(bandwidth(f"{direction}, {format_bytes(size)}", size * repeat, *pair, rounds, floor))
        host.free(extent)
    host.close()
    return results


class PlainDisk:
    """The limit of the disk: eight threads, 8 MiB a call, O_DIRECT, nothing else."""

    def __init__(self, path: str, size: int) -> None:
        self.file = ScratchFile(path)
        self.file.reserve(size)
        self.buffer, self.size = map_slab(size), size
        self.pool = ThreadPoolExecutor(THREADS)

    def run(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        def piece(start: int) -> None:
            done, length = 0, min(PIECE, self.size - start)
            view = memory_at(self.buffer.data_ptr() + start, length)
            while done < length:
                done += call(self.file.fd, [view[done:]], start + done)

        list(self.pool.map(piece, range(0, self.size, PIECE)))

    def close(self) -> None:
        self.pool.shutdown()
        self.file.close()


def bench_disk(path: str, rounds: int, size: int) -> list[Result]:
    plain, disk, host = PlainDisk(path, size), DiskLevel(path, size), HostLevel(size)
    extent, slab = disk.allocate(size), host.view(host.allocate(size))
    slab.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    plain.buffer.copy_(slab)
    check_bytes(disk, extent, slab, plain.buffer)
    check_bytes(disk, extent, plain.buffer, slab)
    name = f"{format_bytes(size)}{'' if plain.file.direct else ', no O_DIRECT here'}"
    found = [
        bandwidth(
            f"{way}, {name}", size, lambda move=move: move(extent, slab).wait(), partial(plain.run, call), rounds, 0.85
        )
        for way, move, call in (("slab to disk", disk.write, os.pwritev), ("disk to slab", disk.read, os.preadv))
    ]
    for each in (plain, disk, host):
        each.close()
    return found


# The stack itself.


def access_all(stack: VGPUStack, keys: list[str]) -> None:
    """One after another, letting go of each."""
    for key in keys:
        stack.access(key)


def workload_small(path: str) -> list[Result]:
    """20 tensors of 1 MiB over 10, 50 and 200 MiB, accessed round and round."""
    results = []
    for policy in ("lru", "next_use"):
        with create_vgpu_stack(
            10 * MiB, 50 * MiB, 200 * MiB, path, device=DEVICE, policy=policy, cap_process=False
        ) as stack:
            tensors = {f"k{i}": torch.randn(MiB // 4) for i in range(20)}
            for key, tensor in tensors.items():
                stack.register(key, tensor, priority=7)
            for key, tensor in tensors.items():
                assert torch.equal(stack.access(key).cpu(), tensor)
            seconds = seconds_of(lambda stack=stack, keys=list(tensors) * 10: access_all(stack, keys))
            results.append(Result(f"20 x 1 MiB over 10/50/200 MiB, {policy}", 200 / seconds, "accesses/s"))
            level = stack.get_stats()["levels"][0]
            hits = 100 * level["hits"] / (level["hits"] + level["misses"])
            results.append(Result(f"20 x 1 MiB, {policy}, hits", hits, "%"))
    return results


# Reporting.


def show(results: list[Result]) -> None:
    print(f"{'':52}{'value':>12} {'unit':<11}{'limit':>9}{'ratio':>8}{'floor':>7}")
    for r in results:
        limit = "" if r.limit is None else f"{r.limit:>9.4g}{r.ratio:>8.3f}"
        verdict = "" if r.floor is None else f"{r.floor:>7.0%}  {'met' if (r.ratio or 0) >= r.floor else 'MISSED'}"
        print(f"{r.name:52}{r.value:>12.4g} {r.unit:<11}{limit}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--disk-path", default=None, help="directory on the disk to measure")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a smaller disk range; not for quoting")
    args = parser.parse_args()
    rounds, disk_bytes = (3, 128 * MiB) if args.quick else (9 if CUDA else 5, GiB)
    with tempfile.TemporaryDirectory(dir=args.disk_path or default_disk_path()) as path:
        parts: list[Callable[[], list[Result]]] = []
        if CUDA:
            parts.append(lambda: bench_host_and_gpu(rounds))
        parts += [lambda: bench_disk(path, min(rounds, 5), disk_bytes), lambda: workload_small(path)]
        results = []
        for part in parts:
            start = time.perf_counter()
            results += part()
            print(f"{results[-1].name}: measured in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    about = told_machine()
    show(results)
    if not args.quick:
        append_csv(RESULTS / "stack.csv", [about | asdict(result) for result in results])


if __name__ == "__main__":
    main()
