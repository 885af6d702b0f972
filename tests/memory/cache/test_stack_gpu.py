"""The stack with real GPU memory. ``python3 -m pytest -q tests/memory -m "gpu or multi_gpu"`` runs these and the
levels'.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

from tests.delay import set_transfer_delay
from tests.memory.conftest import random_bytes
from vblackwell import VGPUStack, quantize
from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.memory.level import Level
from vblackwell.units import MiB

pytestmark = pytest.mark.gpu


@pytest.fixture
def stack(make_level: Callable[..., Level]):
    """8 MiB of GPU, 16 of host, 64 of disk."""
    stack = VGPUStack([make_level("cuda:0", 8 * MiB), make_level("host", 16 * MiB), make_level("disk", 64 * MiB)])
    yield stack
    stack.close()


def test_the_dict_of_the_documentation(disk_path: str):
    levels = [
        {"capacity_mb": 8, "device": "cuda:0", "speed_gbps": 2000},
        {"capacity_mb": 16, "device": "cpu", "speed_gbps": 50},
        {"capacity_mb": 64, "device": "ssd", "speed_gbps": 7, "path": disk_path},
    ]
    with VGPUStack({"levels": levels}) as stack:
        assert [level.name for level in stack.levels] == ["cuda:0", "cpu", "ssd"]
        stack.register("ffn", torch.arange(1000), priority=5)
        value = stack.access("ffn")
        assert value.device == torch.device("cuda", 0) and torch.equal(value.cpu(), torch.arange(1000))
    with pytest.raises(ConfigurationError, match="does not fit on cuda:0 with"):
        VGPUStack({"levels": [{"capacity_mb": "900GiB", "device": "cuda:0"}]})
    with pytest.raises(ConfigurationError, match="torch sees"):
        VGPUStack({"levels": [{"capacity_mb": 1, "device": "cuda:77"}]})


def test_demotion_frees_what_it_says(stack: VGPUStack):
    before = torch.cuda.memory_allocated(0)
    stack.register("a", random_bytes(4 * MiB), priority=9)
    assert torch.cuda.memory_allocated(0) == before + 4 * MiB
    for level, held in ((1, 0), (0, 4), (2, 0), (0, 4)):
        stack.move("a", level)
        assert torch.cuda.memory_allocated(0) == before + held * MiB, level
        assert stack.levels[0].used_bytes == held * MiB
    assert torch.equal(stack.access("a").cpu(), random_bytes(4 * MiB))
    stack.remove("a")
    assert torch.cuda.memory_allocated(0) == before


def test_eviction_keeps_level_0_under_its_cap(stack: VGPUStack):
    before = torch.cuda.memory_allocated(0)
    sources = {f"k{i}": random_bytes(MiB + 1000 * i, seed=i) for i in range(40)}
    torch.cuda.reset_peak_memory_stats(0)
    for key, source in sources.items():
        stack.register(key, source, priority=7)
    rng = random.Random(0)
    for _ in range(300):
        key = rng.choice(list(sources))
        assert torch.equal(stack.access(key).cpu(), sources[key]), key
    assert stack.get_stats()["levels"][0]["evictions"] > 50
    # what is resident; beyond the cap at most the value handed out last, the one that replaces it, and one served in
    # place
    assert torch.cuda.max_memory_allocated(0) - before <= 8 * MiB + 3 * (MiB + 40_000)


def test_from_gpu_tensors_on_any_stream(stack: VGPUStack):
    """A tensor that is still being computed is copied when it is finished,
    and what access returns can be read anywhere.
    """
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for priority in (9, 5, 1):
                source = torch.zeros(MiB, device="cuda:0")
                torch.cuda._sleep(50_000_000)
                source += priority
                stack.register("a", source, priority=priority)
                source.zero_()
                assert float(stack.access("a").sum()) == priority * MiB
            stack.update("a", torch.full((MiB,), 3.0, device="cuda:0"))
            assert float(stack.access("a").mean()) == 3


def test_a_side_stream_reads_what_was_evicted_meanwhile(stack: VGPUStack):
    """The allocator must not hand the bytes on while a kernel on another stream still reads them."""
    side = torch.cuda.Stream()
    stack.register("a", torch.ones(MiB), priority=5)
    stack.access("a")
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        total = stack.access("a").sum()
    stack.move("a", 1)  # nobody holds the tensor any more, but the kernel has not run yet
    noise = [torch.full((MiB,), 9.0, device="cuda:0") for _ in range(4)]
    side.synchronize()
    assert float(total) == MiB and len(noise) == 4


def test_prefetch_overlaps_and_delivers(stack: VGPUStack, no_delay_left: None):
    sources = {f"k{i}": random_bytes(MiB, seed=i) for i in range(20)}
    for key, source in sources.items():
        stack.register(key, source, priority=5)
    set_transfer_delay(lambda kind: torch.cuda._sleep(5_000_000) if kind == "stream" else None)
    for _ in range(3):
        for i in range(20):
            stack.prefetch([f"k{(i + j) % 20}" for j in (1, 2)])
            assert torch.equal(stack.access(f"k{i}").cpu(), sources[f"k{i}"])


def test_packed_tensors_come_to_the_gpu(stack: VGPUStack):
    packed = quantize(torch.randn(256, 512), "nvfp4")
    stack.register("w", packed, priority=1)
    value = stack.access("w")
    assert value.device.type == "cuda" and torch.equal(value.dequantize().cpu(), packed.dequantize())


def test_taking_over_a_gpu_tensor(stack: VGPUStack):
    tensor = torch.arange(MiB // 4, device="cuda:0")
    before, address = torch.cuda.memory_allocated(0), tensor.data_ptr()
    stack.register("a", tensor, priority=9, take=True)
    assert torch.cuda.memory_allocated(0) == before and stack.access("a").data_ptr() == address
    del tensor
    stack.move("a", 1)
    assert torch.cuda.memory_allocated(0) == before - 2 * MiB
    assert torch.equal(stack.access("a").cpu(), torch.arange(MiB // 4))


def test_reservations_stream(stack: VGPUStack):
    """As the offload engine does: host to a ring on the GPU and back, counted, with events only."""
    ring, host = stack.reserve("ring", 4 * MiB, 0), stack.reserve("host", 4 * MiB, 1)
    source = random_bytes(4 * MiB)
    stack.write(host, source).wait()
    view = ring.view()
    assert view is not None and view.is_cuda
    stack.read(host, view).wait_on(torch.cuda.current_stream())
    view += 1
    stack.write(host, view).wait()
    out = torch.zeros_like(source)
    stack.read(host, out).wait()
    assert torch.equal(out, source + 1)
    links = {(link["source"], link["destination"]): link for link in stack.get_stats()["links"]}
    assert links["cpu", "cuda:0"]["bytes"] == 4 * MiB and links["cpu", "cuda:0"]["seconds"] > 0
    assert links["cuda:0", "cpu"]["bytes"] == 4 * MiB
    with pytest.raises(InsufficientMemory):
        stack.reserve("more", 5 * MiB, 0)


def test_threads_on_their_own_streams(stack: VGPUStack):
    sources = {f"k{i}": random_bytes(MiB, seed=i).cuda() for i in range(24)}
    for key, source in sources.items():
        stack.register(key, source, priority=5)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(60):
                    key = rng.choice(list(sources))
                    if rng.random() < 0.3:
                        stack.prefetch(rng.sample(list(sources), 2))
                    assert torch.equal(stack.access(key), sources[key]), key
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.multi_gpu
def test_a_neighbouring_gpu_as_level_1(make_level: Callable[..., Level]):
    stack = VGPUStack([make_level("cuda:0", 4 * MiB), make_level("cuda:1", 8 * MiB), make_level("host", 32 * MiB)])
    sources = {f"k{i}": random_bytes(MiB, seed=i) for i in range(20)}
    for key, source in sources.items():
        stack.register(key, source, priority=7)
    assert [level.used_bytes for level in stack.levels] == [4 * MiB, 8 * MiB, 8 * MiB]
    rng = random.Random(0)
    for _ in range(200):
        key = rng.choice(list(sources))
        value = stack.access(key)
        assert value.device == torch.device("cuda", 0) and torch.equal(value.cpu(), sources[key])
        del value
    links = {(link["source"], link["destination"]): link["bytes"] for link in stack.get_stats()["links"]}
    assert links["cuda:1", "cuda:0"] > 0 and links["cuda:0", "cuda:1"] > 0
    before = torch.cuda.memory_allocated(1)
    gone = next(key for key in stack if stack.level_of(key) == 1)
    stack.move(gone, 2)
    assert torch.cuda.memory_allocated(1) == before - MiB
    stack.close()
