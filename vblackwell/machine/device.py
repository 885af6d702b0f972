"""Which device a command computes on, in which type, and what stops it before it begins.

A GPU that is there but cannot be used stops the command: training a day on the CPU because of an old driver is a
surprise nobody wants. bf16 has fp32's range and needs no loss scaling, so it is taken wherever the device multiplies in
it; fp16 with a scaler is for GPUs before Ampere.
"""

import os
from collections.abc import Callable, Mapping

import torch

from vblackwell.errors import InsufficientMemory, Unsupported
from vblackwell.machine.facts import choose_cpu_kernels, hides_gpus, list_gpus, why_no_cuda
from vblackwell.units import format_bytes


def refuse_distributed(environment: Mapping[str, str] = os.environ) -> None:
    """Raises Unsupported where a launcher started several processes."""
    size = environment.get("WORLD_SIZE", "1")
    if size.strip() not in ("", "1"):
        what = "this version trains in one process on one GPU"
        raise Unsupported(f"WORLD_SIZE is {size}: {what}; start `vb train` without a launcher, or unset it")


def choose_device(wanted: str, say: Callable[[str], None]) -> torch.device:
    """The device that ``--device wanted`` means on this machine; ``say`` is told which GPUs are left unused, and why.
    Raises Unsupported, with the reason and the remedy, where torch cannot use a GPU that is there or was asked for.
    """
    choose_cpu_kernels()
    if wanted == "cpu":
        return torch.device("cpu")
    gpus = list_gpus()
    known = gpus or torch.cuda.is_available()  # torch may know one that NVML does not describe
    if wanted == "auto" and (hides_gpus() or not known):
        if gpus:
            say(f"{gpus[0].name} is hidden by CUDA_VISIBLE_DEVICES: computing on the CPU")
        return torch.device("cpu")
    if reason := why_no_cuda(gpus):
        raise Unsupported(f"{reason}; or compute on the CPU with --device cpu")
    for index in range(1, torch.cuda.device_count()):
        say(f"GPU {index} ({torch.cuda.get_device_name(index)}) is not used: this version computes on one GPU")
    use_expandable_segments()
    return torch.device("cuda", 0)


def use_expandable_segments() -> None:
    """Let what torch reserves of a GPU grow by pages from now on, for as long as the process lives, unless the
    environment or the program has said how it is to be reserved.

    Of the fixed segments of a streamed step a sixth lies idle, and a large gradient may find no whole one under a cap.
    """
    said = getattr(torch._C, "_accelerator_getAllocatorSettings", str)()  # which not every torch has
    if not said and os.environ.keys().isdisjoint({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def make_deterministic(device: torch.device) -> None:
    """Ask torch for algorithms that give the same bits each time; before the first kernel runs."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def cap_process(device: torch.device, fast_memory: int) -> None:
    """Make torch refuse to hold more than ``fast_memory`` bytes of the GPU (the CUDA context is outside its count)."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, fast_memory / total), device)


_caps: dict[torch.device, dict[object, int]] = {}  # bytes of a GPU that each holder of a cap may take
_before: dict[torch.device, float] = {}  # torch's share of the GPU while nobody held one


def hold_cap(device: torch.device, num_bytes: int) -> Callable[[], None]:
    """Cap the process at ``num_bytes`` of ``device``, in addition to what others hold, until the result is called.
    Raises InsufficientMemory where torch holds more than that already.
    """
    total, caps, key = torch.cuda.get_device_properties(device).total_memory, _caps.setdefault(device, {}), object()
    torch.cuda.empty_cache()
    held, allowed = torch.cuda.memory_allocated(device), num_bytes + sum(caps.values())
    if held > allowed:
        raise InsufficientMemory(
            f"fast_memory caps this process at {format_bytes(allowed)} of {device}, and torch holds "
            f"{format_bytes(held)} there: free what is on the GPU, give more, or cap_process=False",
            needed_bytes=held,
            available_bytes=allowed,
        )
    if not caps:
        _before[device] = torch.cuda.get_per_process_memory_fraction(device)

    def apply() -> None:
        share = sum(caps.values()) / total if caps else 1.0
        torch.cuda.set_per_process_memory_fraction(min(share, _before[device]), device)

    def release() -> None:
        if caps.pop(key, None) is not None:
            apply()

    caps[key] = num_bytes
    apply()
    return release


def process_cap(device: torch.device) -> int | None:
    """Bytes of ``device`` that the holders of caps may take together; None where nobody holds one."""
    return sum(_caps.get(device, {}).values()) or None


def peak_gpu_bytes(device: torch.device) -> dict[str, int] | None:
    """The most that torch allocated, and reserved from the driver; None on the CPU, where torch does not count."""
    if device.type != "cuda":
        return None
    return {"allocated": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}


BF16_CAPABILITY = 8, 0


def has_bf16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY


def choose_precision(precision: str, mixed_precision: bool, *, bf16: bool) -> torch.dtype | None:
    """The compute type that both flags mean on a device that has ``bf16`` or not; None: the weights' own fp32; fp16
    needs loss scaling."""
    if precision == "auto":
        precision = ("bf16" if bf16 else "fp16") if mixed_precision else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
