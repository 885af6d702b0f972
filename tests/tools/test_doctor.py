"""What vb doctor advises."""

from __future__ import annotations

import torch

from vblackwell.machine.facts import DiskFacts, GPUFacts, MemoryFacts
from vblackwell.tools.doctor import advice
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
    assert "slow" in "\n".join(advice(plenty, DiskFacts(tmp_path, 100 * GiB, "9p"), [gpu()], "x", wsl=False))
