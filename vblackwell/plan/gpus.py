"""GPUs by name: what `--gpu` knows where there is none. Capacities as the driver reports them are a little below the nominal ones here."""

from __future__ import annotations

from dataclasses import dataclass

from vblackwell.errors import ConfigurationError, nearest
from vblackwell.units import GiB, MiB


@dataclass(frozen=True)
class KnownGPU:
    """A card: nominal bytes of memory and CUDA compute capability."""

    name: str
    total_bytes: int
    capability: tuple[int, int]


_TABLE = """
GTX 1080 Ti      11  6.1
V100 16GB        16  7.0
V100 32GB        32  7.0
T4               16  7.5
RTX 2080 Ti      11  7.5
A100 40GB        40  8.0
A100 80GB        80  8.0
RTX 3060         12  8.6
RTX 3070          8  8.6
RTX 3080         10  8.6
RTX 3090         24  8.6
A10              24  8.6
A40              48  8.6
A6000            48  8.6
RTX 4060          8  8.9
RTX 4060 Ti 16GB 16  8.9
RTX 4070         12  8.9
RTX 4080         16  8.9
RTX 4090         24  8.9
L4               24  8.9
L40S             48  8.9
H100             80  9.0
H200            141  9.0
B200            180 10.0
RTX 5070         12 12.0
RTX 5080         16 12.0
RTX 5090         32 12.0
"""


def _read(line: str) -> KnownGPU:
    name, size, capability = line.rsplit(None, 2)
    major, minor = capability.split(".")
    # H200 and B200 are sold in units of 10^9 bytes, the others in 2^30.
    unit = 10**9 if int(size) in (141, 180) else GiB
    return KnownGPU(name.strip(), int(size) * unit, (int(major), int(minor)))


GPUS: dict[str, KnownGPU] = {gpu.name: gpu for gpu in map(_read, _TABLE.strip().splitlines())}


def find_gpu(name: str) -> KnownGPU:
    """The card called ``name``, whatever its case, spaces and vendor words.

    Raises:
        ConfigurationError: no such card; the message has the nearest name.
    """
    wanted = _plain(name)
    for gpu in GPUS.values():
        if _plain(gpu.name) == wanted:
            return gpu
    near = nearest(name, GPUS) or nearest(wanted.upper(), GPUS)
    raise ConfigurationError(
        f"GPU {name!r} is not in the table{near}; known: {', '.join(GPUS)}; or give --gpu-memory alone"
    )


def _plain(name: str) -> str:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla"))


def context_bytes(capability: tuple[int, int]) -> int:
    """What a CUDA context with torch's and cuBLAS's kernels is assumed to take outside the allocator; grows with the architecture."""
    for major, size in ((9, 550), (8, 450)):
        if capability[0] >= major:
            return size * MiB
    return 350 * MiB
