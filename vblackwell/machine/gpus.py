"""GPUs by name: what `--gpu` knows where there is none. Drivers report a little less than these nominal capacities."""

import re
from dataclasses import dataclass

from vblackwell.errors import ConfigurationError, likeness
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

    @property
    def sold_gb(self) -> int:
        """The memory that the card is sold with, in GB."""
        return round(self.total_bytes / (10**9 if self.total_bytes % GiB else GiB))


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
RTX 3060 Ti       8  8.6  38   32.4  16.2   448 4      0
RTX 3070          8  8.6  46   40.6  20.3   448 4      0
RTX 3070 Ti       8  8.6  48   43.5  21.7   608 4      0
RTX 3080         10  8.6  68   59.5  29.8   760 4      0
RTX 3080 Ti      12  8.6  80   68.2  34.1   912 4      0
RTX 3090         24  8.6  82   71.0  35.6   936 4  56.25
A10              24  8.6  72  125.0  31.2   600 4      0
A40              48  8.6  84  149.7  37.4   696 4  56.25
A6000            48  8.6  84  154.8  38.7   768 4  56.25
RTX 4060          8  8.9  24   30.2  15.1   272 3      0
RTX 4060 Ti 8GB   8  8.9  34   44.0  22.1   288 3      0
RTX 4060 Ti 16GB 16  8.9  34   44.0  22.1   288 3      0
RTX 4070         12  8.9  46   58.3  29.1   504 4      0
RTX 4070 Super   12  8.9  56   71.0  35.5   504 4      0
RTX 4070 Ti      12  8.9  60   80.2  40.1   504 4      0
RTX 4080         16  8.9  76   97.5  48.7   717 4      0
RTX 4090         24  8.9 128  165.2  82.6  1008 4      0
L4               24  8.9  58  121.0  30.3   300 4      0
L40S             48  8.9 142  362.0  91.6   864 4      0
H100             80  9.0 132  989.0  67.0  3350 5    450
H200            141  9.0 132  989.0  67.0  4800 5    450
B200            180 10.0 148 2250.0  80.0  8000 5    900
RTX 5070         12 12.0  48   61.7  30.9   672 5      0
RTX 5070 Ti      16 12.0  70   87.9  43.9   896 5      0
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

# What vendors and drivers add to a name, and no other card has instead; 'Ti', 'Super', 'Laptop' and 'NVL' do make one.
_MAKERS = "nvidia|geforce|tesla|quadro|rtx|gtx|gpu|graphics|card|pcie|sxm[2-9]?|hbm[23]e?"


def _read_name(text: str) -> tuple[frozenset[str], int | None]:
    """What tells a card from others, and its memory in GB where that is said: 'rtx4060ti 16gb' -> {4060, ti}, 16."""
    text = re.sub(r"[-_/()\s]+", " ", text.lower())
    text = re.sub(r"(?<=\d)(?=ti\b|super\b|ti ?super\b)|(?<=\dti)(?=super\b)|(?<=[rg]tx)(?=[a\d])", " ", text)
    said = re.search(r"\b(\d+) ?g(?:i?b)?\b", text) or re.search(r"(?<=\d )(\d{2,3})$", text)
    rest = text if said is None else text[: said.start()] + text[said.end() :]
    words = frozenset(word for word in rest.split() if not re.fullmatch(_MAKERS, word))
    return words, None if said is None else int(said[1])


def _spellings(gpu: KnownGPU) -> list[str]:
    """The card's name and its memory without spaces, with and without its series."""
    name = re.sub(r" |\d+GB$", "", gpu.name).lower()
    return [f"{each}{gpu.sold_gb}gb" for each in (name, name.removeprefix("rtx").removeprefix("gtx"))]


def _matching(name: str) -> tuple[list[KnownGPU], list[KnownGPU]]:
    """The cards of that ``name`` whatever their memory, and those of them with the memory that it says."""
    words, size = _read_name(name)
    alike = [gpu for gpu in GPUS.values() if _read_name(gpu.name)[0] == words]
    if not alike:  # without any spaces, as in 'a10080gb'
        spelled = re.sub(r"\W", "", name.lower())
        alike = [gpu for gpu in GPUS.values() if spelled in _spellings(gpu)]
        size = None
    return alike, [gpu for gpu in alike if size in (None, gpu.sold_gb)]


def known_as(name: str) -> KnownGPU | None:
    """The one card that people or a driver call ``name``, e.g. 'rtx4070' or 'NVIDIA H100 80GB HBM3'; None where there
    is none, or the memory tells two apart that ``name`` does not."""
    found = _matching(name)[1]
    return found[0] if len(found) == 1 else None


def find_gpu(name: str) -> KnownGPU:
    """As `known_as`; where that is None ConfigurationError, with the names that could be meant."""
    if (card := known_as(name)) is not None:
        return card
    alike, found = _matching(name)
    names = " or ".join(repr(gpu.name) for gpu in alike)
    if found:
        raise ConfigurationError(f"GPU {name!r} is sold with different memory: give {names}")
    if alike:
        sizes = " or ".join(f"{gpu.sold_gb} GB" for gpu in alike)
        advice = f"give {names}, or --gpu-memory of another"
        raise ConfigurationError(f"GPU {name!r}: the table has this card with {sizes}: {advice}")
    words = "".join(sorted(_read_name(name)[0]))
    by_words = {"".join(sorted(_read_name(each)[0])): each for each in GPUS}
    number = re.search(r"\d{2,}", words)
    near = sorted(by_words, key=lambda each: (number is None or number[0] not in each, -likeness(words, each)))
    choice = ", ".join(repr(by_words[each]) for each in near[:3])
    advice = "vb estimate --list shows all, and --gpu-memory alone plans for any other"
    raise ConfigurationError(f"GPU {name!r} is not in the table; the nearest: {choice}; {advice}")


# Of the offload runtime's kernels and streams: three streamed runs on an H200 had 828 MiB in all, plain ones 742-762.
RUNTIME_BYTES = 70 * MiB


def context_bytes(capability: tuple[int, int]) -> int:
    """What a CUDA context with torch's and cuBLAS's kernels takes outside the allocator: on an H200 (driver 580, CUDA
    13.0) 758 to 762 MiB; older architectures are assumed to be smaller by as much as their kernels' images are.
    """
    return (758 if capability[0] >= 9 else 620 if capability[0] >= 8 else 480) * MiB
