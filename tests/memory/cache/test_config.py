"""What users write, and what is refused: one sentence with what, where, how much and what to do."""

from __future__ import annotations

import pytest
import torch

from tests.memory.conftest import NullLevel
from vblackwell import VGPULevel, VGPUStack, create_vgpu_stack, quantize
from vblackwell.errors import ConfigurationError, InsufficientMemory, UnknownKey
from vblackwell.machine.facts import MemoryFacts, memory_facts
from vblackwell.memory.cache import stack as stack_module
from vblackwell.memory.cache.config import LevelConfig, parse_capacity, parse_levels
from vblackwell.memory.disk import DiskLevel
from vblackwell.memory.host import HostLevel
from vblackwell.memory.level import DeviceLevel
from vblackwell.units import GiB, KiB, MiB


def test_the_dict_of_the_documentation(disk_path: str):
    levels = [
        {"capacity_mb": 1.5, "device": "cpu", "speed_gbps": 50},
        {"capacity_mb": "16MiB", "device": "cpu", "speed_gbps": 50},
        {"capacity_mb": 64, "device": "ssd", "speed_gbps": 7, "path": disk_path},
    ]
    with VGPUStack({"levels": levels}, policy="next_use", promotion="gradual") as stack:
        assert [type(level) for level in stack.levels] == [DeviceLevel, HostLevel, DiskLevel]
        assert [level.capacity_bytes for level in stack.levels] == [3 * MiB // 2, 16 * MiB, 64 * MiB]
        assert [level.name for level in stack.levels] == ["arena", "cpu", "ssd"]
        assert stack.level0_device == torch.device("cpu")
        assert (stack.policy, stack.promotion) == ("next_use", "gradual")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, MiB), (0.5, MiB // 2), ("2000", 2000 * MiB), ("8GiB", 8 * GiB), ("1.5", 3 * MiB // 2), ("512 KiB", 512 * KiB)],
)
def test_capacities(value, expected):
    assert parse_capacity(value) == expected


CPU = {"capacity_mb": 1, "device": "cpu"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs a list of 'levels'"),
        ({"levels": []}, "needs a list of 'levels'"),
        ({"level": [CPU]}, "'level', which is not supported .*did you mean 'levels'"),
        ({"levels": [CPU], "node": 0}, "stack config has the key 'node', which is not supported"),
        ({"levels": [{**CPU, "node": 0}]}, "level 0 has the key 'node', which is not supported"),
        ({"levels": [{**CPU, "codec": "lossless"}]}, "level 0 has the key 'codec', which is not supported"),
        ({"levels": [{**CPU, "capacity_md": 1}]}, "did you mean 'capacity_mb'"),
        ({"levels": [{"device": "cpu"}]}, "level 0 lacks 'capacity_mb'"),
        ({"levels": ["cpu"]}, "level 0 must be a dict"),
        ({"levels": [{**CPU, "device": "cpuu"}]}, "device 'cpuu' must be one of .* did you mean 'cpu'"),
        ({"levels": [{**CPU, "capacity_mb": -1}]}, "capacity_mb -1 must be a number of MiB > 0"),
        ({"levels": [{**CPU, "capacity_mb": float("nan")}]}, "capacity_mb nan must be"),
        ({"levels": [{**CPU, "capacity_mb": "a lot"}]}, "capacity_mb 'a lot' is not a size"),
        ({"levels": [{**CPU, "capacity_mb": 0.001}]}, "too small: give it 4 KiB or more"),
        ({"levels": [{**CPU, "path": "/tmp"}]}, "only an ssd level has a path"),
        ({"levels": [{**CPU, "speed_gbps": 0}]}, "speed_gbps 0.0 of level cpu must be a number > 0"),
        ({"levels": [{**CPU, "speed_gbps": 5}, {**CPU, "speed_gbps": 50}]}, "from the fastest to the slowest"),
    ],
)
def test_refused_configs(config, message):
    with pytest.raises(ConfigurationError, match=message):
        VGPUStack(config)


def test_level_zero_is_addressable(disk_path: str):
    for level in (LevelConfig("ssd", MiB, path=disk_path), NullLevel(MiB)):
        with pytest.raises(ConfigurationError, match="level 0 cannot be"):
            VGPUStack([level])


def test_unknown_policies_and_promotions():
    with pytest.raises(ConfigurationError, match=r"policy 'lrv' must be one of lru, next_use; did you mean 'lru'"):
        VGPUStack({"levels": [CPU]}, policy="lrv")
    with pytest.raises(ConfigurationError, match="promotion 'sudden' must be one of direct, gradual"):
        VGPUStack({"levels": [CPU]}, promotion="sudden")


def test_more_ram_than_there_is_is_refused_with_both_numbers():
    with pytest.raises(
        ConfigurationError, match=r"a cpu level of 1.00 TiB does not fit: \d.* GiB of \d.* GiB RAM are available"
    ):
        VGPUStack([LevelConfig("arena", MiB), LevelConfig("cpu", 1024 * GiB)])
    HostLevel(memory_facts().available_bytes // 2).close()  # slabs are mapped as they are needed


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why there is no GPU")
def test_a_gpu_that_torch_cannot_use_is_refused_with_the_reason():
    with pytest.raises(ConfigurationError, match="level cuda:0 is not possible: .* use 'cpu' as level 0"):
        VGPUStack({"levels": [{"capacity_mb": 1, "device": "cuda:0"}]})


def test_levels_made_before_a_refused_one_are_closed(monkeypatch: pytest.MonkeyPatch):
    closed = []
    monkeypatch.setattr(DeviceLevel, "close", lambda self: closed.append(self.name))
    with pytest.raises(ConfigurationError):
        VGPUStack([LevelConfig("arena", MiB), LevelConfig("ssd", MiB, path="/nowhere/at/all")])
    assert closed == ["arena"]


# A stack for this machine.


def test_create_vgpu_stack_probes_the_machine(disk_path: str, monkeypatch: pytest.MonkeyPatch):
    facts = memory_facts()
    monkeypatch.setattr(stack_module, "memory_facts", lambda: facts)  # others take and free memory meanwhile
    with create_vgpu_stack(disk_path=disk_path) as stack:
        assert [level.name for level in stack.levels][-2:] == ["cpu", "ssd"]
        assert all(level.capacity_bytes > 0 for level in stack.levels)
        assert stack.levels[1].capacity_bytes < facts.available_bytes
        stack.register("ffn", torch.ones(1000), priority=5)
        assert torch.equal(stack.access("ffn").cpu(), torch.ones(1000))


def test_create_vgpu_stack_takes_sizes(disk_path: str):
    with create_vgpu_stack("2MiB", 4 * MiB, "1GiB", disk_path, policy="next_use") as stack:
        assert [level.capacity_bytes for level in stack.levels] == [2 * MiB, 4 * MiB, GiB]
    with create_vgpu_stack("2MiB", "4MiB", 0) as stack:
        assert len(stack.levels) == 2
    with pytest.raises(ConfigurationError, match="leaves no level 0"):
        create_vgpu_stack(0, "4MiB", 0)


@pytest.mark.gpu
def test_fast_memory_caps_all_that_torch_takes_of_a_gpu():
    device, size = torch.device("cuda", 0), GiB
    before = torch.cuda.get_per_process_memory_fraction(device)

    def take() -> None:
        torch.empty(size, dtype=torch.uint8, device=device)

    take()
    torch.cuda.empty_cache()
    cap = torch.cuda.memory_reserved(device) + size // 2
    with create_vgpu_stack(cap, "4MiB", 0, device=device), pytest.raises(torch.OutOfMemoryError):
        take()
    with create_vgpu_stack(cap, "4MiB", 0, device=device, cap_process=False):
        take()
    assert torch.cuda.get_per_process_memory_fraction(device) == before
    take()


# One level by itself.


@pytest.mark.parametrize(("number", "device"), [(0, "cpu"), (1, "cpu"), (2, "ssd")])
def test_a_single_level(number: int, device: str, disk_path: str):
    level = VGPULevel(number, 1, device, 50, path=disk_path if device == "ssd" else None)
    tensor = torch.arange(1000)
    level.put("a", tensor)
    level.put("empty", torch.zeros(0, 3))
    level.put("packed", quantize(torch.ones(16, 32), "nvfp4"))
    tensor.zero_()
    assert torch.equal(level.get("a"), torch.arange(1000)) and level.get("empty").shape == (0, 3)
    assert torch.equal(level.get("packed").dequantize(), torch.ones(16, 32))
    level.get("a").zero_()
    assert torch.equal(level.get("a"), torch.arange(1000))  # what get returns is a copy
    used = level.used_bytes
    with pytest.raises(InsufficientMemory):
        level.put("a", torch.zeros(MiB))
    assert torch.equal(level.get("a"), torch.arange(1000)) and level.used_bytes == used
    level.put("a", torch.ones(2))
    assert torch.equal(level.get("a"), torch.ones(2)) and "a" in level
    for key in ("a", "empty", "packed"):
        level.remove(key)
    with pytest.raises(UnknownKey):
        level.get("a")
    assert (level.used_bytes, level.capacity_bytes) == (0, MiB) and level.peak_bytes >= used
    level.close()


def test_parse_levels_keeps_speeds_for_planners():
    [level] = parse_levels({"levels": [{**CPU, "speed_gbps": 2000}]})
    assert level == LevelConfig("cpu", MiB, 2000.0, None)


# The size of a host level that nobody chose.


def facts_of(available_bytes: int) -> MemoryFacts:
    return MemoryFacts(64 * GiB, available_bytes, "machine")


def test_a_measured_host_level_follows_the_ram_that_is_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_module, "memory_facts", lambda: facts_of(128 * MiB))
    with create_vgpu_stack(16 * MiB, None, 0, device="cpu") as stack:
        arena, host = stack.levels
        assert host.capacity_bytes == (128 - 16) * MiB * 7 // 8  # and not all of it with the arena's
        first = stack.reserve("first", 8 * MiB, 1)  # in a slab of 64 MiB
        stack.register("key", torch.zeros(4 * MiB, dtype=torch.uint8), priority=10)
        monkeypatch.setattr(stack_module, "memory_facts", lambda: facts_of(60 * MiB))  # slab and key are used memory
        stack.measure_host_memory()
        assert arena.used_bytes == 4 * MiB and host.capacity_bytes == (60 + 64 - 12) * MiB * 7 // 8
        monkeypatch.setattr(stack_module, "memory_facts", lambda: facts_of(0))
        stack.unreserve(first)
        second = stack.reserve("second", 60 * MiB, 1)
        stack.measure_host_memory()
        assert host.capacity_bytes == second.num_bytes  # what is in use stays
        with pytest.raises(InsufficientMemory):
            stack.reserve("third", 1, 1)
    stack.measure_host_memory()  # of a closed one nothing


def test_a_host_level_of_a_chosen_size_keeps_it(monkeypatch: pytest.MonkeyPatch):
    with create_vgpu_stack(MiB, 8 * MiB, 0, device="cpu") as stack:
        monkeypatch.setattr(stack_module, "memory_facts", lambda: facts_of(GiB))
        stack.measure_host_memory()
        assert stack.levels[1].capacity_bytes == 8 * MiB


def test_a_cap_above_the_free_ram_leaves_a_host_level_half_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_module, "memory_facts", lambda: facts_of(GiB))
    with create_vgpu_stack(GiB, None, 0, device="cpu") as stack:
        assert stack.levels[1].capacity_bytes == GiB // 2 * 7 // 8
