"""Levels and the stack: bandwidth against the machine's limit in the same run, and hits of a workload.

    python benchmarks/bench_stack.py [--disk-path DIR] [--quick]

Limits are the plainest code that can do the same: a copy between a tensor pinned by torch and the GPU, `Tensor.copy_`
in RAM, a loop of `preadv`/`pwritev` over eight threads with O_DIRECT and without checksums. Ours and the limit
alternate, and the ratio is that of the medians, because machines drift. Every transfer's bytes are compared once before
it is timed. Runs without a GPU too; results are appended to `benchmarks/results/stack.csv`.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vblackwell import VGPUStack
from vblackwell.machine.facts import list_gpus
from vblackwell.machine.limits import default_disk_path
from vblackwell.memory.cache.config import LevelConfig
from vblackwell.memory.disk import DiskLevel, ScratchFile, memory_at
from vblackwell.memory.host import HostLevel, map_slab
from vblackwell.memory.level import Level, Transfer
from vblackwell.units import GiB, MiB, format_bytes

CSV = Path(__file__).parent / "results" / "stack.csv"
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if CUDA else "cpu")
PIECE, THREADS = 8 * MiB, 8


@dataclass
class Result:
    """One line of the table. ``ratio`` is to the limit or to the plain run; ``target`` is what was promised for it."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


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
    ratio = best / mine
    target = f">= {floor:.0%}" if floor else ""
    return Result(
        name, num_bytes / mine / 1e9, "GB/s", num_bytes / best / 1e9, ratio, target, ratio >= floor if floor else None
    )


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

        def many(start: Callable[[], Any], repeat: int = repeat) -> Callable[[], None]:
            def run() -> None:
                for transfer in [start() for _ in range(repeat)]:
                    if isinstance(transfer, Transfer):
                        transfer.wait()
                torch.cuda.synchronize()

            return run

        up = (
            many(lambda e=extent, g=gpu: host.read(e, g)),
            many(lambda g=gpu, p=pinned: g.copy_(p, non_blocking=True)),
        )
        down = (
            many(lambda e=extent, g=gpu: host.write(e, g)),
            many(lambda g=gpu, p=pinned: p.copy_(g, non_blocking=True)),
        )
        for direction, (ours, limit) in (("host to GPU", up), ("GPU to host", down)):
            name = f"{direction}, {format_bytes(size)}"
            results.append(bandwidth(name, size * repeat, ours, limit, rounds, floor))
        host.free(extent)
    host.close()
    return results


class PlainDisk:
    """The limit of the disk: eight threads, 8 MiB a call, O_DIRECT, nothing else."""

    def __init__(self, path: str, size: int) -> None:
        self.file = ScratchFile(path, size)
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
    source = slab.clone()
    disk.write(extent, slab).wait()
    slab.zero_()
    disk.read(extent, slab).wait()
    assert torch.equal(slab, source), "the disk changed bytes"
    plain.buffer.copy_(source)
    name = f"{format_bytes(size)}{'' if plain.file.direct else ', no O_DIRECT here'}"
    write = bandwidth(
        f"slab to disk, {name}",
        size,
        lambda: disk.write(extent, slab).wait(),
        lambda: plain.run(os.pwritev),
        rounds,
        0.85,
    )
    read = bandwidth(
        f"disk to slab, {name}",
        size,
        lambda: disk.read(extent, slab).wait(),
        lambda: plain.run(os.preadv),
        rounds,
        0.85,
    )
    for each in (plain, disk, host):
        each.close()
    return [write, read]


# The stack itself.


def make_stack(path: str, *sizes: int, **settings: Any) -> VGPUStack:
    """Fast memory, RAM and disk of these sizes."""
    devices = ("cuda:0" if CUDA else "arena", "cpu", "ssd")
    levels = [
        LevelConfig(device, size, path=path if device == "ssd" else None)
        for device, size in zip(devices, sizes, strict=False)
    ]
    return VGPUStack(levels, **settings)


def access_all(stack: VGPUStack, keys: list[str]) -> None:
    """One after another, letting go of each."""
    for key in keys:
        stack.access(key)


def hit_rate(stack: VGPUStack) -> float:
    level = stack.get_stats()["levels"][0]
    return 100 * level["hits"] / max(1, level["hits"] + level["misses"])


def workload_small(path: str) -> list[Result]:
    """20 tensors of 1 MiB over 10, 50 and 200 MiB, accessed round and round."""
    results = []
    for policy in ("lru", "next_use"):
        with make_stack(path, 10 * MiB, 50 * MiB, 200 * MiB, policy=policy) as stack:
            tensors = {f"k{i}": torch.randn(MiB // 4) for i in range(20)}
            for key, tensor in tensors.items():
                stack.register(key, tensor, priority=7)
            for key, tensor in tensors.items():
                assert torch.equal(stack.access(key).cpu(), tensor)
            seconds = seconds_of(lambda stack=stack, keys=list(tensors) * 10: access_all(stack, keys))
            results.append(Result(f"20 x 1 MiB over 10/50/200 MiB, {policy}", 200 / seconds, "accesses/s"))
            results.append(Result(f"20 x 1 MiB, {policy}, hits", hit_rate(stack), "%"))
    return results


# Reporting.


def machine() -> dict[str, Any]:
    gpus = list_gpus() if CUDA else []
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpus[0].name if gpus else "none",
        "driver": gpus[0].driver_version if gpus else "",
        "torch": torch.__version__,
        "cpus": len(os.sched_getaffinity(0)),
    }


def show(results: list[Result], about: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in about.items() if value))
    print(f"{'':52}{'value':>12} {'unit':<11}{'limit':>9}{'ratio':>8}  target")
    for r in results:
        limit = f"{r.limit:.4g}" if r.limit is not None else ""
        ratio = f"{r.ratio:.3f}" if r.ratio is not None else ""
        verdict = "" if r.met is None else "  met" if r.met else "  MISSED"
        print(f"{r.name:52}{r.value:>12.4g} {r.unit:<11}{limit:>9}{ratio:>8}  {r.target}{verdict}")


def append(results: list[Result], about: dict[str, Any]) -> None:
    CSV.parent.mkdir(exist_ok=True)
    rows = [about | asdict(result) for result in results]
    fresh = not CSV.exists()
    with CSV.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


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
    about = machine()
    show(results, about)
    if not args.quick:
        append(results, about)


if __name__ == "__main__":
    main()
