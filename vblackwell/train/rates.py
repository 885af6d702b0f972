"""Quick rates of this machine, about a second each: what `vb doctor` prints beside the facts.

Medians of a few repetitions after a warm-up; good to about a tenth. Serious comparisons belong in benchmarks/.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vblackwell.errors import ConfigurationError, DiskError
from vblackwell.units import MiB

COPY_BYTES = 256 * MiB
DISK_BYTES = 128 * MiB
DISK_PIECE_BYTES = 8 * MiB
ADAMW_PARAMETERS = 8 * MiB
REPEATS = 3


def seconds_of(action: Callable[[], Any], finish: Callable[[], Any] = lambda: None) -> float:
    """Median wall time of ``action`` followed by ``finish``, after one unmeasured call."""
    action()
    finish()
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        finish()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def host_copy_gbps() -> float:
    """RAM to RAM, counting the bytes once."""
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.empty(COPY_BYTES, dtype=torch.uint8)
    return COPY_BYTES / seconds_of(lambda: target.copy_(source)) / 1e9


def cpu_matmul_gflops(size: int = 1024) -> float:
    """fp32 matrix product of ``size`` cubed, in GFLOP/s."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / seconds_of(lambda: a @ b) / 1e9


def adamw_gparams(device: torch.device) -> float:
    """Fused AdamW in fp32, in 1e9 parameters a second."""
    param = torch.nn.Parameter(torch.zeros(ADAMW_PARAMETERS, device=device))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    return ADAMW_PARAMETERS / seconds_of(optimizer.step, _finish(device)) / 1e9


def disk_gbps(path: str) -> dict[str, float | str]:
    """Write and read rate of a disk level at ``path``, or why it cannot be one. What is written is gone afterwards."""
    from vblackwell.memory.disk import DiskLevel

    try:
        level = DiskLevel(path, DISK_BYTES)
    except (ConfigurationError, DiskError) as error:
        return {"refused": str(error)}
    try:
        extents = [level.allocate(DISK_PIECE_BYTES) for _ in range(DISK_BYTES // DISK_PIECE_BYTES)]
        # Not zeros: some disks and file systems keep those for free.
        piece = torch.randint(0, 256, (DISK_PIECE_BYTES,), dtype=torch.uint8)
        pieces = [torch.empty_like(piece) for _ in extents]

        def write() -> None:
            for transfer in [level.write(extent, piece) for extent in extents]:
                transfer.wait()

        def read() -> None:
            for transfer in [level.read(extent, out) for extent, out in zip(extents, pieces, strict=True)]:
                transfer.wait()

        return {"write": DISK_BYTES / seconds_of(write) / 1e9, "read": DISK_BYTES / seconds_of(read) / 1e9}
    except DiskError as error:
        return {"refused": str(error)}
    finally:
        level.close()


def gpu_rates(device: torch.device) -> dict[str, float]:
    """Links, memory, bf16 matrix product and AdamW of a GPU."""
    finish = _finish(device)
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there, also_there = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    size = 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return {
        "host_to_gpu_gbps": COPY_BYTES / seconds_of(lambda: there.copy_(host, non_blocking=True), finish) / 1e9,
        "gpu_to_host_gbps": COPY_BYTES / seconds_of(lambda: host.copy_(there, non_blocking=True), finish) / 1e9,
        "memory_gbps": 2 * COPY_BYTES / seconds_of(lambda: also_there.copy_(there), finish) / 1e9,
        "matmul_bf16_tflops": 2 * size**3 / seconds_of(lambda: a @ a, finish) / 1e12,
        "adamw_gparams": adamw_gparams(device),
    }


def _finish(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
