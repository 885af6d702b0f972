"""GPUs by name: what `--gpu` knows where there is none. Drivers report a little less than these nominal capacities."""

import re
from dataclasses import dataclass

from vblackwell.errors import ConfigurationError, nearest
from vblackwell.units import GiB, MiB

NUM_SMS = 132  # multiprocessors of an H100 or H200, where no card is named


@dataclass(frozen=True)
class KnownGPU:
    """A card by its data sheet: memory, CUDA capability, multiprocessors, dense FLOP/s of its matrix units in bf16 (or
    fp16) summed in fp32, FLOP/s in fp32 outside them, bytes/s of memory, and each way of PCIe and of all NVLinks.
    """

    name: str
    total_bytes: int
    capability: tuple[int, int]
    num_sms: int
    half_flops: float
    fp32_flops: float
    memory_bytes_per_second: float
    link_bytes: float
    nvlink_bytes: float


# Memory, capability, multiprocessors, TFLOP/s in bf16 and fp32, GB/s, PCIe generation (x16; x8: one generation less),
# GB/s of NVLink each way: links of 25 GB/s (V100, A100, H100, H200), 14.06 (RTX 3090, A40, A6000) or 50 (B200).
_TABLE = """
GTX 1080 Ti      11  6.1  28   11.3  11.3   484 3      0
V100 16GB        16  7.0  80  112.0  14.0   900 3    150
V100 32GB        32  7.0  80  112.0  14.0   900 3    150
T4               16  7.5  40   65.0   8.1   320 3      0
RTX 2080 Ti      11  7.5  68   53.8  13.4   616 3     50
A100 40GB        40  8.0 108  312.0  19.5  1555 4    300
A100 80GB        80  8.0 108  312.0  19.5  2039 4    300
RTX 3060         12  8.6  28   25.3  12.7   360 4      0
RTX 3070          8  8.6  46   40.6  20.3   448 4      0
RTX 3080         10  8.6  68   59.5  29.8   760 4      0
RTX 3090         24  8.6  82   71.0  35.6   936 4  56.25
A10              24  8.6  72  125.0  31.2   600 4      0
A40              48  8.6  84  149.7  37.4   696 4  56.25
A6000            48  8.6  84  154.8  38.7   768 4  56.25
RTX 4060          8  8.9  24   30.2  15.1   272 3      0
RTX 4060 Ti 16GB 16  8.9  34   44.0  22.1   288 3      0
RTX 4070         12  8.9  46   58.3  29.1   504 4      0
RTX 4080         16  8.9  76   97.5  48.7   717 4      0
RTX 4090         24  8.9 128  165.2  82.6  1008 4      0
L4               24  8.9  58  121.0  30.3   300 4      0
L40S             48  8.9 142  362.0  91.6   864 4      0
H100             80  9.0 132  989.0  67.0  3350 5    450
H200            141  9.0 132  989.0  67.0  4800 5    450
B200            180 10.0 148 2250.0  80.0  8000 5    900
RTX 5070         12 12.0  48   61.7  30.9   672 5      0
RTX 5080         16 12.0  84  112.6  56.3   960 5      0
RTX 5090         32 12.0 170  209.5 104.8  1792 5      0
"""
_LINK_BYTES = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}


def _read(line: str) -> KnownGPU:
    name, size, capability, num_sms, half, fp32, memory, link, peer = line.rsplit(None, 8)
    major, minor = capability.split(".")
    unit = 10**9 if int(size) in (141, 180) else GiB  # in which H200 and B200 are sold, and the others
    which = (name.strip(), int(size) * unit, (int(major), int(minor)), int(num_sms))
    rates = (float(half) * 1e12, float(fp32) * 1e12, float(memory) * 1e9)
    return KnownGPU(*which, *rates, _LINK_BYTES[int(link)], float(peer) * 1e9)


GPUS: dict[str, KnownGPU] = {gpu.name: gpu for gpu in map(_read, _TABLE.strip().splitlines())}


def find_gpu(name: str) -> KnownGPU:
    """The card called ``name``, whatever its case and spaces; else ConfigurationError with the nearest name."""
    wanted = "".join(_words(name))
    for gpu in GPUS.values():
        if "".join(_words(gpu.name)) == wanted:
            return gpu
    numbers = re.findall(r"\d+", wanted)[:1]  # as in '4090ti'
    meant = [f"; did you mean {each!r}?" for each in GPUS if numbers and numbers[0] in each.split()]
    near = nearest(name, GPUS) or nearest(wanted.upper(), GPUS) or "".join(meant[:1])
    raise ConfigurationError(
        f"GPU {name!r} is not in the table{near}; known: {', '.join(GPUS)}; or give --gpu-memory alone"
    )


def _words(name: str) -> list[str]:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return [word for word in words if word not in ("nvidia", "geforce", "tesla")]


def known_as(driver_name: str) -> KnownGPU | None:
    """The card whose words are all in a driver's name, e.g. 'NVIDIA H100 80GB HBM3'; None where there is none."""
    words = set(_words(driver_name))
    found = [gpu for gpu in GPUS.values() if set(_words(gpu.name)) <= words]
    return max(found, key=lambda gpu: len(_words(gpu.name)), default=None)


# Of the offload runtime's kernels and streams: three streamed runs on an H200 had 828 MiB in all, plain ones 742-762.
RUNTIME_BYTES = 70 * MiB


def context_bytes(capability: tuple[int, int]) -> int:
    """What a CUDA context with torch's and cuBLAS's kernels takes outside the allocator: on an H200 (driver 580, CUDA
    13.0) 758 to 762 MiB; older architectures are assumed to be smaller by as much as their kernels' images are.
    """
    return (758 if capability[0] >= 9 else 620 if capability[0] >= 8 else 480) * MiB
