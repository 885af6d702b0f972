"""What vb doctor advises."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import torch

from vblackwell.machine import facts
from vblackwell.machine.facts import DiskFacts, GPUFacts, MemoryFacts
from vblackwell.tools import doctor as doctor_module
from vblackwell.tools.doctor import advice, doctor
from vblackwell.units import GiB, MiB


def gpu(index=0):
    return GPUFacts(index, f"GPU number {index}", 8 * GiB, 7 * GiB, (8, 6), "0000:01:00.0", "470.0", (11, 4), None)


CPU = torch.device("cpu")


def test_advice_names_what_is_missing(tmp_path):
    memory = MemoryFacts(2 * GiB, GiB, "/sys/fs/cgroup/box")
    said = advice(memory, DiskFacts(tmp_path, MiB, "tmpfs"), [], "no NVIDIA GPU was found", wsl=True)
    text = "\n".join(said)
    for part in (
        "no NVIDIA GPU",
        "/sys/fs/cgroup/box",
        "is tmpfs",
        "checkpoints need 12 bytes",
        ".wslconfig",
        "pinned memory",
    ):
        assert part in text
    plenty = MemoryFacts(64 * GiB, 60 * GiB, "machine")
    assert advice(plenty, DiskFacts(tmp_path, 100 * GiB, "ext4"), [], "x", wsl=False) == [
        "GPU: x. Training runs on the CPU."
    ]
    found = advice(plenty, DiskFacts(tmp_path, 100 * GiB, "ext4"), [], "x", wsl=False, why_not="no cc was found")
    assert found[1] == "AdamW on the CPU: PyTorch's operations, at half the speed or less: no cc was found."
    assert "slow" in "\n".join(advice(plenty, DiskFacts(tmp_path, 100 * GiB, "9p"), [gpu()], "x", wsl=False))


def test_gpus_have_the_numbers_that_cuda_gives_them(tmp_path, monkeypatch, capsys):
    """The driver has three, by PCI bus; CUDA_VISIBLE_DEVICES=2,0 shows two of them, the other way round."""
    driver = [replace(gpu(index), pci_bus_id=f"00000000:0{index}:00.0") for index in range(3)]
    shown = [SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in (2, 0)]
    monkeypatch.setattr(facts, "list_gpus", lambda: driver)
    monkeypatch.setattr(facts, "why_no_cuda", lambda gpus: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(shown))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: shown[device.index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU number 2")
    for name in (
        "host_copy_gbps",
        "cpu_matmul_gflops",
        "keep_disk",
        "keep_rates",
        "as_rates",
        "has_bf16",
        "host_adamw_gparams",
    ):
        monkeypatch.setattr(doctor_module, name, lambda *_: 1.0)
    for name in ("disk_gbps", "gpu_rates"):
        monkeypatch.setattr(doctor_module, name, lambda place: 1.0)
    doctor(True, str(tmp_path))
    found = json.loads(capsys.readouterr().out)["gpus"]
    assert [(each["index"], each["name"]) for each in found] == [(0, "GPU number 2"), (1, "GPU number 0")]
