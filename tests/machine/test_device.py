"""Which device and type a command computes on."""

from __future__ import annotations

import pytest
import torch

from vblackwell import cli
from vblackwell.errors import InsufficientMemory, Unsupported
from vblackwell.machine import device as machine
from vblackwell.machine.device import choose_precision, has_bf16, hold_cap
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
    monkeypatch.setattr(f"vblackwell.{module}.{command}_command", lambda device=None, **options: 0)
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
    assert choose_precision("auto", False, bf16=True) is None
    assert choose_precision("auto", True, bf16=True) is torch.bfloat16
    assert choose_precision("auto", True, bf16=False) is torch.float16
    assert choose_precision("fp16", False, bf16=True) is torch.float16
    for capability, has in (((7, 5), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has_bf16(torch.device("cuda", 0)) is has
    assert has_bf16(CPU)


# -- the cap of a process ----------------------------------------------------------------------------------------------


class FakeGPU:
    """What torch.cuda says of a GPU of 1,000 bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share, self.held, self.total_memory = 1.0, 0, 1000
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "get_device_properties", lambda device: self)
        monkeypatch.setattr(cuda, "memory_allocated", lambda device: self.held)
        monkeypatch.setattr(cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda device: self.share)
        monkeypatch.setattr(
            cuda, "set_per_process_memory_fraction", lambda share, device: setattr(self, "share", share)
        )


def test_caps_add_up_while_they_are_held(monkeypatch):
    gpu, device = FakeGPU(monkeypatch), torch.device("cuda", 0)
    first, second = hold_cap(device, 200), hold_cap(device, 300)
    assert gpu.share == 0.5
    first()
    first()  # once is enough
    assert gpu.share == 0.3
    second()
    assert gpu.share == 1.0
    gpu.share = 0.1  # what the user capped stays capped
    release = hold_cap(device, 200)
    assert gpu.share == 0.1
    release()
    assert gpu.share == 0.1


def test_a_cap_below_what_is_held_is_refused(monkeypatch):
    gpu, device = FakeGPU(monkeypatch), torch.device("cuda", 0)
    gpu.held = 500
    with pytest.raises(InsufficientMemory, match="caps this process at 300 B of cuda:0, and torch holds 500 B there"):
        hold_cap(device, 300)
    assert gpu.share == 1.0
    hold_cap(device, 600)()
    assert gpu.share == 1.0


@pytest.mark.parametrize("said", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "the program"])
def test_segments_are_expandable_unless_somebody_said_how_to_reserve(monkeypatch, said):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if said.startswith("PYTORCH"):
        monkeypatch.setenv(said, "max_split_size_mb:64")
    before = "garbage_collection_threshold:0.8" if said == "the program" else ""
    asked = []
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: before)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    monkeypatch.setattr(machine, "list_gpus", lambda: [])
    monkeypatch.setattr(machine, "why_no_cuda", lambda gpus: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    machine.choose_device("cuda", print)
    assert asked == ([] if said else ["expandable_segments:True"])
