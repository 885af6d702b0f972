"""Facts about this machine: memory with its cgroup limits, disks, GPUs and their NUMA nodes, WSL2. Sizes are bytes.

They are read from /proc, /sys, the file system and NVML, which the driver brings: listing GPUs starts no CUDA context
and works where torch cannot use them, which is when a list with reasons is needed most. So torch is imported only where
it is asked: `vb --version` answers at once.
"""

import ctypes
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from vblackwell.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

RAM_BACKED = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # by the magic number of statfs


def choose_cpu_kernels() -> None:
    """Let MKL choose its vector functions while one thread asks; before anything is computed on the CPU.

    MKL (2024.2, in torch 2.11 to 2.13) stores the type of an Intel CPU twice at its first call of exp, cos and the
    like: as detected, then as its tables count it. A thread that comes between the two stores computes its share by
    another function, to 11 bits with AVX-512: one process in some hundred had other cosines than all others.
    """
    import torch

    torch.zeros(1, device="cpu").cos()


@dataclass(frozen=True)
class MemoryFacts:
    """RAM that this process may use."""

    total_bytes: int  # of the machine, or of the tightest cgroup where that is less
    available_bytes: int  # what can still be taken without swapping or being killed
    limited_by: str  # 'machine' or the cgroup directory whose limit is the tighter one


@dataclass(frozen=True)
class DiskFacts:
    path: Path
    free_bytes: int
    file_system: str

    @property
    def ram_backed(self) -> bool:
        """Whether files there are RAM in disguise (tmpfs)."""
        return self.file_system in RAM_BACKED.values()


@dataclass(frozen=True)
class GPUFacts:
    """One NVIDIA GPU as its driver describes it. ``numa_node`` is None where the system does not tell."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]
    pci_bus_id: str
    driver_version: str
    cuda_version: tuple[int, int]
    numa_node: int | None


def memory_facts(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> MemoryFacts:
    """RAM of the machine, cut to what the cgroups (v1 or v2) of this process allow."""
    machine = psutil.virtual_memory()
    facts = MemoryFacts(machine.total, machine.available, "machine")
    for folder, limit, usage in _cgroup_limits(proc, cgroup_root):
        available = max(0, limit - usage)
        tightest = str(folder) if available < facts.available_bytes else facts.limited_by
        facts = MemoryFacts(min(facts.total_bytes, limit), min(facts.available_bytes, available), tightest)
    return facts


def _cgroup_limits(proc: Path, root: Path) -> Iterator[tuple[Path, int, int]]:
    """(directory, limit, usage without reclaimable page cache) of this process's memory cgroups and their parents."""
    for line in (_text(proc / "self/cgroup") or "").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.lstrip("/")
        for level in (folder, *folder.parents):
            limit, usage = _text(level / names[0]), _text(level / names[1])
            if limit and usage and limit.strip() != "max":
                cache = re.search(rf"^{names[2]} (\d+)$", _text(level / "memory.stat") or "", re.MULTILINE)
                yield level, int(limit), max(0, int(usage) - (int(cache[1]) if cache else 0))
            if level == base:
                break


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def disk_facts(path: str | os.PathLike[str]) -> DiskFacts:
    """Free space (for this user) and file system of a ``path``; raises ConfigurationError where there is none."""
    try:
        free, place = psutil.disk_usage(os.fspath(path)).free, Path(path).resolve()
    except OSError as error:
        wrong = f"disk path {os.fspath(path)}: {error.strerror}"
        raise ConfigurationError(f"{wrong}; give an existing directory on a disk") from error
    buffer = (ctypes.c_long * 64)()
    ctypes.CDLL(None).statfs(os.fsencode(place), buffer)
    system = RAM_BACKED.get(buffer[0] & 0xFFFFFFFF)  # what is mounted outside a chroot is in no table
    if system is None:
        mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
        system = next((mounts[at] for at in map(str, (place, *place.parents)) if at in mounts), "unknown")
    return DiskFacts(Path(path), free, system)


def is_wsl() -> bool:
    """Whether this Linux is WSL (its RAM limit, pinned memory and Windows mounts need care)."""
    return "microsoft" in (_text(Path("/proc/version")) or "").lower()


def numa_node_cpus(node: int, sys: Path = Path("/sys")) -> set[int]:
    """CPUs of a NUMA node; empty where the system does not tell."""
    parts = (_text(sys / f"devices/system/node/node{node}/cpulist") or "").strip().split(",")
    ranges = (part.partition("-") for part in parts if part)
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def numa_node_count(sys: Path = Path("/sys")) -> int:
    """Number of NUMA nodes with memory; 1 where the system does not tell."""
    return max(1, len(list((sys / "devices/system/node").glob("node[0-9]*"))))


def numa_node_of_pci(pci_bus_id: str, sys: Path = Path("/sys")) -> int | None:
    """The NUMA node that a PCI device hangs on; None where the system does not tell."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    text = _text(sys / f"bus/pci/devices/{domain[-4:].zfill(4)}:{rest}/numa_node")
    return int(text) if text is not None and int(text) >= 0 else None


def pci_of_cuda(device: "torch.device") -> str:
    """The place of a CUDA device as /sys has it, e.g. '0000:18:00.0'."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def list_gpus() -> list[GPUFacts]:
    """All NVIDIA GPUs that the driver shows, by PCI bus, usable or not; none without a driver. One that it cannot
    describe is warned of, and a driver that does not answer."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        code: int = getattr(error, "value", -1)  # which its __new__ sets
        if code not in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            said = f"no GPU is seen, for the NVIDIA driver does not answer ({error})"
            warnings.warn(f"{said}: run nvidia-smi, and mend or restart what it names", stacklevel=2)
        return []
    try:
        driver, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2()
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                memory, place = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetPciInfo(handle).busId
                name, (major, minor) = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetCudaComputeCapability(handle)
            except nvml.NVMLError as error:
                warnings.warn(f"GPU {index} is left out: the NVIDIA driver says {error} of it", stacklevel=2)
                continue
            what = (index, name, int(memory.total), int(memory.free), (major, minor), place)
            found.append(GPUFacts(*what, driver, (cuda // 1000, cuda % 1000 // 10), numa_node_of_pci(place)))
        return found
    finally:
        nvml.nvmlShutdown()


def in_cuda_order(gpus: list[GPUFacts]) -> list[GPUFacts]:
    """``gpus`` numbered and ordered as CUDA does here; those that CUDA_VISIBLE_DEVICES hides are left out."""
    import torch

    at = {gpu.pci_bus_id.lower()[-len("0000:18:00.0") :]: gpu for gpu in gpus}
    places = [pci_of_cuda(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return [replace(at[place], index=index) for index, place in enumerate(places) if place in at]


def gpu_bytes_left(device: "torch.device") -> int:
    """What torch may still allocate on a GPU: what is free there, cut to the cap of this process."""
    import torch

    allocated, total = torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    free = torch.cuda.mem_get_info(device)[0]
    return max(0, min(free + torch.cuda.memory_reserved(device) - allocated, cap - allocated))


def hides_gpus() -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves this process no GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1")


def why_no_cuda(gpus: list[GPUFacts] | None = None) -> str | None:
    """None where torch can use a GPU; else one sentence: what was found, what is needed, and the remedy."""
    import torch

    if torch.version.cuda is not None and torch.cuda.is_available():  # with kernels for the first GPU?
        arches = [int(arch[3:].rstrip("af")) for arch in torch.cuda.get_arch_list() if arch.startswith("sm_")]
        major, minor = torch.cuda.get_device_capability(0)
        if not arches or major * 10 + minor >= min(arches):
            return None
        return (
            f"found {torch.cuda.get_device_name(0)} (sm_{major}{minor}), but torch {torch.__version__} has kernels from"
            f" sm_{min(arches)} on only: install an older torch"
        )
    gpus = list_gpus() if gpus is None else gpus
    if not gpus:
        return "no NVIDIA GPU, or no NVIDIA driver, was found"
    found = f"found {gpus[0].name} with driver {gpus[0].driver_version}"
    if torch.version.cuda is None:
        return f"{found}, but this torch {torch.__version__} was built without CUDA: install a CUDA build of torch"
    if gpus[0].cuda_version[0] < int(torch.version.cuda.split(".")[0]):
        have = ".".join(map(str, gpus[0].cuda_version))
        return (
            f"{found}, which supports CUDA {have}; this torch {torch.__version__} needs CUDA {torch.version.cuda}: "
            f"update the driver, or install a torch built for CUDA {have}"
        )
    if hides_gpus():
        return f"{found}, but CUDA_VISIBLE_DEVICES hides it: unset the variable"
    return f"{found}, but CUDA did not start: run nvidia-smi, and look for a driver update that awaits a restart"


@dataclass(eq=False)
class HardwareDetector:
    """Facts that kernels and planners ask for, by attribute."""

    device_index: int = 0

    @property
    def l2_cache_size(self) -> int:
        """Bytes of the GPU's L2 cache (starts CUDA); of a CPU core's where torch can use no GPU."""
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_properties(self.device_index).L2_cache_size
        text = (_text(Path("/sys/devices/system/cpu/cpu0/cache/index2/size")) or "0").strip()
        return int(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
