"""NVML through ctypes: what the NVIDIA driver says about its GPUs, without CUDA and without a dependency.

Only `hardware` uses this. No driver, or one without GPUs, is an empty list: that is a fact about the machine, not an
error. Why not `nvidia-smi`: it takes half a second and is missing from many containers.
"""

from __future__ import annotations

import ctypes
from typing import Any

_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Pci(ctypes.Structure):
    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]


def query_gpus() -> list[dict[str, Any]]:
    """The fields of `hardware.GPUFacts` but its NUMA node, a dict per GPU."""
    nvml = _load()
    if nvml is None or nvml.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        return [gpu for index in range(count.value) if (gpu := _query(nvml, index))]
    finally:
        nvml.nvmlShutdown()


def _load() -> Any:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _query(nvml: Any, index: int) -> dict[str, Any] | None:
    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return None  # e.g. fallen off the bus
    name, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(80)
    memory, pci, cuda = _Memory(), _Pci(), ctypes.c_int()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetName(handle, name, 96)
    nvml.nvmlSystemGetDriverVersion(driver, 80)
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return {
        "index": index,
        "name": name.value.decode(),
        "total_bytes": memory.total,
        "free_bytes": memory.free,
        "compute_capability": (major.value, minor.value),
        "pci_bus_id": pci.bus_id.decode(),
        "driver_version": driver.value.decode(),
        "cuda_version": (cuda.value // 1000, cuda.value % 1000 // 10),
    }
