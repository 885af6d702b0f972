"""``vb doctor``: what this machine has, how fast it is, and what is missing for what."""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

import torch

from vblackwell.kernels.optimizer import cpu
from vblackwell.machine import facts
from vblackwell.machine.device import has_bf16
from vblackwell.machine.rates import keep_disk, keep_rates
from vblackwell.offload.measure import (
    as_rates,
    cpu_matmul_gflops,
    disk_gbps,
    gpu_rates,
    host_adamw_gparams,
    host_copy_gbps,
)
from vblackwell.planner.predictions import kept_predictions, prediction_lines
from vblackwell.units import GiB, format_bytes


def doctor(json: bool = False, disk_path: str = ".", predictions: bool = False) -> int:
    """Run ``vb doctor``, in about ten seconds; progress goes to standard error. ``predictions``: print how far plans
    were from what runs here measured, and look at nothing. Raises ConfigurationError: ``disk_path`` does not exist."""
    if predictions:
        kept = kept_predictions()
        print(dumps(kept, indent=2) if json else "\n".join(prediction_lines(kept)))
        return 0
    memory, disk, gpus = facts.memory_facts(), facts.disk_facts(Path(disk_path)), facts.list_gpus()
    reason = facts.why_no_cuda(gpus)
    if reason is None:
        gpus = facts.in_cuda_order(gpus)  # what is measured is CUDA's first
    rates: dict[str, Any] = {}
    measured: list[tuple[str, str, Callable[[], Any]]] = [
        ("RAM", "host_copy_gbps", host_copy_gbps),
        ("matrix product on the CPU", "cpu_matmul_gflops", cpu_matmul_gflops),
        ("AdamW on the CPU", "cpu_adamw_gparams", host_adamw_gparams),
        (f"disk at {disk_path}", "disk_gbps", lambda: disk_gbps(disk_path)),
    ]
    if reason is None:
        measured.append(("GPU and its links", "gpu", lambda: gpu_rates(torch.device("cuda", 0))))
    for number, (what, key, measure) in enumerate(measured, 1):
        print(f"measuring {number}/{len(measured)}: {what}", file=sys.stderr, flush=True)
        rates[key] = measure()
    keep_disk(disk_path, rates["disk_gbps"])  # plans go by it, and by the GPU's
    if "gpu" in rates:
        keep_rates(torch.cuda.get_device_name(0), as_rates(rates["gpu"], rates["disk_gbps"]))
    software = {"python": platform.python_version(), "torch": torch.__version__, "torch_cuda": torch.version.cuda}
    found = {
        "software": software | {"system": platform.platform(), "wsl": facts.is_wsl()},
        "cpu": {"cores": len(os.sched_getaffinity(0)), "torch_threads": torch.get_num_threads()},
        "memory": asdict(memory),
        "disk": {"path": str(disk.path.resolve()), "free_bytes": disk.free_bytes, "file_system": disk.file_system},
        "gpus": [asdict(gpu) for gpu in gpus],
        "gpu_refused": reason,
        "rates": rates,
        "advice": advice(memory, disk, gpus, reason, wsl=facts.is_wsl(), why_not=cpu.why_not()),
    }
    print(dumps(found, indent=2) if json else "\n".join(lines_of(found)))
    return 0


def advice(
    memory: facts.MemoryFacts,
    disk: facts.DiskFacts,
    gpus: list[facts.GPUFacts],
    gpu_refused: str | None,
    *,
    wsl: bool,
    why_not: str = "",
) -> list[str]:
    """What is missing for what, a sentence each; empty where nothing is. ``why_not``: of `cpu.why_not`."""
    found = []
    if gpu_refused is not None:
        found.append(f"GPU: {gpu_refused}. Training runs on the CPU" + (" only with --device cpu." if gpus else "."))
    found += [f"GPU {gpu.index} ({gpu.name}) is not used: this version trains on one GPU." for gpu in gpus[1:]]
    if gpu_refused is None:
        if not has_bf16(torch.device("cuda", 0)):
            found.append("bf16: this GPU lacks it; --mixed-precision computes in fp16 with a loss scaler.")
        if importlib.util.find_spec("triton") is None:
            found.append("kernels: the triton package is missing; FP4 layers use plain torch.")
        elif not any(shutil.which(name) for name in ("gcc", "cc", "clang")):
            found.append("kernels: no C compiler was found, which Triton needs at its first use: install gcc.")
    if why_not:
        found.append(f"AdamW on the CPU: PyTorch's operations, at half the speed or less: {why_not}.")
    if memory.limited_by != "machine":
        found.append(
            f"RAM: the cgroup {memory.limited_by} limits it to {format_bytes(memory.total_bytes)}, "
            f"{format_bytes(memory.available_bytes)} of it free."
        )
    if disk.ram_backed:
        found.append(
            f"disk level: {disk.path} is {disk.file_system}, which is RAM: give --disk-path a folder on a disk."
        )
    elif disk.file_system.startswith(("9p", "nfs", "cifs", "fuse")):
        found.append(f"disk level: {disk.path} is {disk.file_system}, which is slow: give --disk-path a local disk.")
    if disk.free_bytes < GiB:
        found.append(
            f"disk: {format_bytes(disk.free_bytes)} are free at {disk.path}; checkpoints need 12 bytes a parameter."
        )
    if wsl:
        found += [
            "WSL2: Windows gives it half of the RAM unless .wslconfig says otherwise ([wsl2] memory=...); more RAM "
            "means a larger cpu level.",
            "WSL2: pinned memory is limited; where CUDA refuses it, copies are slower, and a warning says so.",
        ]
    if wsl and str(disk.path.resolve()).startswith("/mnt/"):
        found.append(
            f"WSL2: {disk.path} is on a Windows drive, which is slow from Linux: keep data and runs under your home."
        )
    return found


def lines_of(found: dict[str, Any]) -> list[str]:
    """The findings for people."""
    software, cpu, memory, disk, rates = (found[key] for key in ("software", "cpu", "memory", "disk", "rates"))
    rate = rates["disk_gbps"]
    disk_text = f"not usable as a disk level: {rate.get('refused')}"
    if "refused" not in rate:
        disk_text = f"O_DIRECT where possible: write {rate['write']:.2f} GB/s, read {rate['read']:.2f} GB/s"
    torch_build = f"CUDA {software['torch_cuda']}" if software["torch_cuda"] else "CPU build"
    lines = [
        f"system   {software['system']}{' (WSL)' if software['wsl'] else ''}, Python {software['python']}",
        f"torch    {software['torch']}, {torch_build}",
        f"CPU      {cpu['cores']} cores; matrix product {rates['cpu_matmul_gflops']:.0f} GFLOP/s in fp32, AdamW "
        f"{rates['cpu_adamw_gparams']:.2f} G parameters/s",
        f"RAM      {format_bytes(memory['available_bytes'])} free of {format_bytes(memory['total_bytes'])}; copy "
        f"{rates['host_copy_gbps']:.1f} GB/s",
        f"disk     {format_bytes(disk['free_bytes'])} free at {disk['path']} ({disk['file_system']}); {disk_text}",
    ]
    for gpu in found["gpus"]:
        memory = f"{format_bytes(gpu['free_bytes'])} free of {format_bytes(gpu['total_bytes'])}"
        lines.append(f"GPU {gpu['index']}    {gpu['name']}, {memory}, driver {gpu['driver_version']}")
    if "gpu" in rates:
        lines += [f"         {name.replace('_', ' ')}: {value:.1f}" for name, value in rates["gpu"].items()]
    if not found["gpus"]:
        lines.append("GPU      none")
    return [*lines, "", *(found["advice"] or ["Nothing is missing."])]
