"""Which device and type a command computes on."""

from __future__ import annotations

import pytest
import torch

from vblackwell import cli
from vblackwell.errors import Unsupported
from vblackwell.machine import device as machine
from vblackwell.machine.device import choose_precision
from vblackwell.machine.facts import GPUFacts
from vblackwell.units import GiB

CPU = torch.device("cpu")


def gpu(index=0):
    return GPUFacts(index, f"GPU number {index}", 8 * GiB, 7 * GiB, (8, 6), "0000:01:00.0", "470.0", (11, 4), None)


def test_a_gpu_that_torch_cannot_use_stops_the_run(monkeypatch):
    monkeypatch.setattr(machine, "list_gpus", lambda: [gpu()])
    monkeypatch.setattr(
        machine, "why_no_cuda", lambda gpus: f"found {gpus[0].name} with driver 470.0: update the driver"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(Unsupported, match="update the driver; or compute on the CPU with --device cpu"):
        machine.choose_device("auto", print)
    assert machine.choose_device("cpu", print) == CPU
    said = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.choose_device("auto", said.append) == CPU and "hidden" in said[0]
    monkeypatch.setattr(machine, "list_gpus", lambda: [])
    assert machine.choose_device("auto", print) == CPU
    monkeypatch.setattr(machine, "why_no_cuda", lambda gpus: "no NVIDIA GPU was found")
    with pytest.raises(Unsupported, match="no NVIDIA GPU"):
        machine.choose_device("cuda", print)


def test_a_gpu_that_nvml_does_not_describe_is_used(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "list_gpus", lambda: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "why_no_cuda", lambda gpus: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert machine.choose_device("auto", print) == torch.device("cuda", 0)


def test_unused_gpus_are_named(monkeypatch):
    monkeypatch.setattr(machine, "list_gpus", lambda: [gpu(0), gpu(1)])
    monkeypatch.setattr(machine, "why_no_cuda", lambda gpus: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")
    said = []
    assert machine.choose_device("auto", said.append) == torch.device("cuda", 0)
    assert said == ["GPU 1 (GPU number 1) is not used: this version computes on one GPU"]


@pytest.mark.parametrize(
    ("command", "module"), [("generate", "generate.command"), ("quantize", "tools.quantize"), ("bench", "tools.bench")]
)
def test_every_command_says_that_a_gpu_is_hidden(command, module, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(machine, "list_gpus", lambda: [gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(f"vblackwell.{module}.{command}_command", lambda **options: 0)
    monkeypatch.setattr("vblackwell.folders.checked.check_request", lambda *given, **options: None)
    monkeypatch.setattr("vblackwell.generate.load.resolve_model", lambda path: (path, []))
    model = [str(tmp_path)] if command == "bench" else ["--model", str(tmp_path)]
    out = ["--out", str(tmp_path / "out")] if command == "quantize" else []
    assert cli._dispatch([command, *model, *out]) == 0
    found = capsys.readouterr()
    assert found.out == "" and "GPU number 0 is hidden by CUDA_VISIBLE_DEVICES: computing on the CPU" in found.err


def test_launchers_are_refused():
    machine.refuse_distributed({})
    machine.refuse_distributed({"WORLD_SIZE": "1"})
    with pytest.raises(Unsupported, match="WORLD_SIZE is 4"):
        machine.refuse_distributed({"WORLD_SIZE": "4"})


def test_precision_by_device(monkeypatch):
    assert choose_precision("auto", False, CPU) is None
    assert choose_precision("auto", True, CPU) is torch.bfloat16
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_precision("auto", True, cuda) is torch.float16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert choose_precision("auto", True, cuda) is torch.bfloat16
    assert choose_precision("fp16", False, cuda) is torch.float16
