"""Facts about machines, from made-up /proc and /sys trees and from this one."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vblackwell import HardwareDetector, VGPUStack
from vblackwell.errors import ConfigurationError
from vblackwell.machine import facts as hardware
from vblackwell.machine.device import choose_device
from vblackwell.machine.facts import GPUFacts
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.units import GiB, MiB

GPU = GPUFacts(0, "NVIDIA H200", 141 * GiB, 140 * GiB, (9, 0), "00000000:18:00.0", "570.10", (12, 8), 0)


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_memory_without_cgroups(tmp_path: Path):
    facts = hardware.memory_facts(tmp_path, tmp_path)
    assert facts.total_bytes == psutil.virtual_memory().total and facts.limited_by == "machine"
    assert 0 < facts.available_bytes <= facts.total_bytes


def test_cgroup_v2_limits_of_the_group_and_its_parents(tmp_path: Path):
    write(tmp_path / "self/cgroup", "0::/jobs/mine")
    write(tmp_path / "fs/jobs/mine/memory.max", "max")
    write(tmp_path / "fs/jobs/mine/memory.current", 10 * MiB)
    write(tmp_path / "fs/jobs/memory.max", 300 * MiB)
    write(tmp_path / "fs/jobs/memory.current", 120 * MiB)
    write(tmp_path / "fs/jobs/memory.stat", f"anon 5\ninactive_file {20 * MiB}\nother 7")
    facts = hardware.memory_facts(tmp_path, tmp_path / "fs")
    assert facts.total_bytes == 300 * MiB
    assert facts.available_bytes == 200 * MiB  # what the page cache holds can be taken back
    assert facts.limited_by == str(tmp_path / "fs/jobs")


def test_cgroup_v1_limits(tmp_path: Path):
    write(tmp_path / "self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n0::/")
    write(tmp_path / "fs/memory/x/memory.limit_in_bytes", 100 * MiB)
    write(tmp_path / "fs/memory/x/memory.usage_in_bytes", 40 * MiB)
    write(tmp_path / "fs/memory/x/memory.stat", f"inactive_file 1\ntotal_inactive_file {10 * MiB}")
    write(tmp_path / "fs/memory/memory.limit_in_bytes", 2**63 - 4096)  # no limit, as v1 writes it
    write(tmp_path / "fs/memory/memory.usage_in_bytes", 1)
    facts = hardware.memory_facts(tmp_path, tmp_path / "fs")
    assert (facts.total_bytes, facts.available_bytes) == (100 * MiB, 70 * MiB)


def test_disks(monkeypatch: pytest.MonkeyPatch):
    facts = hardware.disk_facts("/proc")
    assert facts.file_system == "proc" and not facts.ram_backed
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])  # as in a chroot
    assert hardware.disk_facts("/proc").file_system == "unknown"
    if os.path.isdir("/dev/shm"):
        assert hardware.disk_facts("/dev/shm").ram_backed
    with pytest.raises(ConfigurationError, match="/no/such/place: No such file"):
        hardware.disk_facts("/no/such/place")


def test_numa(tmp_path: Path):
    write(tmp_path / "devices/system/node/node0/cpulist", "0-3,8")
    write(tmp_path / "devices/system/node/node1/cpulist", "4-7")
    write(tmp_path / "bus/pci/devices/0000:18:00.0/numa_node", 1)
    write(tmp_path / "bus/pci/devices/0000:19:00.0/numa_node", -1)
    assert hardware.numa_node_count(tmp_path) == 2
    assert hardware.numa_node_cpus(0, tmp_path) == {0, 1, 2, 3, 8}
    assert hardware.numa_node_cpus(7, tmp_path) == set()
    assert hardware.numa_node_of_pci("00000000:18:00.0", tmp_path) == 1
    assert hardware.numa_node_of_pci("0000:19:00.0", tmp_path) is None
    assert hardware.numa_node_of_pci("0000:20:00.0", tmp_path) is None


def test_why_no_cuda_names_found_needed_and_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.why_no_cuda([]) == "no NVIDIA GPU, or no NVIDIA driver, was found"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built without CUDA: install a CUDA build" in str(hardware.why_no_cuda([GPU]))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    reason = str(hardware.why_no_cuda([GPU]))
    assert "NVIDIA H200 with driver 570.10, which supports CUDA 12.8" in reason and "needs CUDA 13.0" in reason
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES hides it" in str(hardware.why_no_cuda([GPU]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "CUDA did not start" in str(hardware.why_no_cuda([GPU]))


def test_why_no_cuda_asks_torch_first(monkeypatch: pytest.MonkeyPatch):
    """Where torch works, nothing that the driver says about itself matters,
    but the GPU may be too old for its kernels.
    """
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90a", "compute_90"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert "found Old (sm_75), but torch" in str(hardware.why_no_cuda([]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert hardware.why_no_cuda([]) is None


def test_this_machine():
    assert HardwareDetector().l2_cache_size > 0 and hardware.memory_facts().total_bytes > 0
    assert isinstance(hardware.is_wsl(), bool)


@pytest.mark.gpu
def test_nvml_and_torch_agree():
    gpus, properties = hardware.list_gpus(), torch.cuda.get_device_properties(0)
    assert hardware.why_no_cuda(gpus) is None and len(gpus) >= torch.cuda.device_count()
    assert gpus[0].compute_capability == (properties.major, properties.minor)
    assert HardwareDetector().l2_cache_size > MiB and gpus[0].total_bytes >= properties.total_memory * 0.95
    assert hardware.numa_node_of_pci(hardware.pci_of_cuda(torch.device("cuda", 0))) in (None, *range(16))


def test_what_torch_may_still_take_of_a_gpu_keeps_to_the_cap(monkeypatch):
    def left(free: int, allocated: int, reserved: int, fraction: float) -> int:
        answers = {
            "memory_allocated": allocated, "memory_reserved": reserved, "get_per_process_memory_fraction": fraction,
            "mem_get_info": (free, 8 * GiB), "get_device_properties": SimpleNamespace(total_memory=8 * GiB),
        }  # fmt: skip
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
        return hardware.gpu_bytes_left(torch.device("cuda", 0))

    assert left(6 * GiB, 1 * GiB, 1 * GiB, 1.0) == 6 * GiB
    assert left(6 * GiB, 1 * GiB, 2 * GiB, 1.0) == 7 * GiB, "what the allocator holds and nobody uses is there, too"
    assert left(6 * GiB, 1 * GiB, 2 * GiB, 0.25) == 1 * GiB
    assert left(6 * GiB, 1 * GiB, 2 * GiB, 0.1) == 0


class FirstCallMeetsDetection(TorchDispatchMode):
    """What MKL on an Intel CPU does once in some hundred processes: at the first call of a vector function that torch
    shares out among threads, the second thread's half is computed by a function of 11 bits."""

    VECTOR_FUNCTIONS = frozenset({"cos", "sin", "exp", "exp_", "log", "log_", "erfinv_", "tanh"})
    GRAIN = 2048  # elements from which torch shares such a call out

    def __init__(self) -> None:
        super().__init__()
        self._detected = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.VECTOR_FUNCTIONS and not self._detected:
            self._detected = True
            if found.numel() > self.GRAIN:
                found.view(-1)[found.numel() // 2 :].mul_(1 + 2**-12)
        return found


@pytest.mark.parametrize("start", ["command", "stack"])
def test_a_step_has_the_same_bits_whatever_the_first_vector_function_meets(start: str):
    tokens_BS = torch.randint(0, 64, (2, 129), generator=torch.Generator().manual_seed(0))
    shape = DecoderConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2, max_position=128
    )

    def gradients() -> list[torch.Tensor]:
        if start == "command":
            choose_device("cpu", lambda text: None)
        else:
            VGPUStack({"levels": [{"device": "cpu", "capacity_mb": 1}]}).close()
        model = Decoder(shape, seed=0, device="cpu")
        model(tokens_BS[:, :-1], tokens_BS[:, 1:]).backward()
        return [param.grad for param in model.parameters() if param.grad is not None]

    usual = gradients()
    with FirstCallMeetsDetection():
        odd = gradients()
    assert usual and all(map(torch.equal, usual, odd))


class Driver:
    """As much of nvidia-ml-py as `list_gpus` asks: three GPUs, of which the second is lost."""

    class NVMLError(Exception):
        pass

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlSystemGetDriverVersion": "580.1", "nvmlSystemGetCudaDriverVersion_v2": 13000, "nvmlDeviceGetCount": 3,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=8 * GiB, free=7 * GiB),
            "nvmlDeviceGetCudaComputeCapability": (8, 6),
        }  # fmt: skip
        by_handle = {
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda index: self._of(index) or f"GPU number {index}",
            "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(busId=f"00000000:0{index + 1}:00.0"),
        }
        return by_handle.get(name) or (lambda *args: answers.get(name))

    def _of(self, index: int) -> None:
        if index == 1:
            raise self.NVMLError("GPU is lost")


def test_a_gpu_that_the_driver_cannot_describe_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    with pytest.warns(UserWarning, match="GPU 1 is left out: the NVIDIA driver says GPU is lost"):
        gpus = hardware.list_gpus()
    assert [(gpu.index, gpu.name, gpu.cuda_version, gpu.free_bytes) for gpu in gpus] == [
        (0, "GPU number 0", (13, 0), 7 * GiB),
        (2, "GPU number 2", (13, 0), 7 * GiB),
    ]


@pytest.mark.parametrize("code", [12, 9, 18])  # no library, no driver, a library of another driver
def test_without_a_driver_there_is_no_gpu(code, monkeypatch):
    def refuse() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    if code == 18:
        with pytest.warns(UserWarning, match="does not answer .*version mismatch.*nvidia-smi"):
            assert hardware.list_gpus() == []
    else:
        assert hardware.list_gpus() == []


def test_gpus_are_numbered_as_cuda_numbers_them(monkeypatch):
    """CUDA_VISIBLE_DEVICES=2,0 of three: doctor's GPU 0 is the one that it measures."""
    driver = [
        replace(GPU, index=index, name=f"number {index}", pci_bus_id=f"00000000:{index}A:00.0") for index in range(3)
    ]
    shown = [SimpleNamespace(pci_domain_id=0, pci_bus_id=16 * index + 10, pci_device_id=0) for index in (2, 0)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(shown))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: shown[device.index])
    assert [(gpu.index, gpu.name) for gpu in hardware.in_cuda_order(driver)] == [(0, "number 2"), (1, "number 0")]
