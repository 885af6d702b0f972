"""kernels/runtime/launch.py and what launches make of it: the first to read a weight as it is waits for who may have
written it.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.emulation import random_weight
from tests.kernels.fp4.test_two_part import random_parts
from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import layout, w4a8
from vblackwell.kernels.fp4.mma_plan import H200, MmaPlan, plan_mma
from vblackwell.kernels.fp4.two_part import plan_two_part
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan, plan_wgmma
from vblackwell.kernels.runtime import counters, launch, nvrtc
from vblackwell.kernels.runtime.launch import may_overlap


@pytest.fixture(autouse=True)
def capturing(monkeypatch):
    """Whether the stream is captured, in a list of one."""
    if torch.cuda.is_available():
        return [False]
    now = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])
    return now


def weight() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(64, dtype=torch.uint8), torch.ones(())


def test_only_the_first_read_of_what_was_written_waits():
    codes, scale = given = weight()
    assert [may_overlap(given) for _ in range(3)] == [False, True, True]
    scale.mul_(2)
    assert [may_overlap(given) for _ in range(2)] == [False, True]
    codes[3] = 7
    assert [may_overlap(given) for _ in range(2)] == [False, True]
    codes.data = codes.clone()  # another memory, and no other version
    assert [may_overlap(given) for _ in range(2)] == [False, True]
    assert not may_overlap((codes, scale.clone()))


def test_a_tensor_in_the_place_of_one_that_is_gone_is_another():
    codes, scale = weight()
    memory = codes.data_ptr()
    assert not may_overlap((codes, scale)) and may_overlap((codes, scale))
    buffer = codes.untyped_storage()
    known = len(launch._read)
    del codes
    again = torch.empty(0, dtype=torch.uint8).set_(buffer, 0, (64,))
    assert again.data_ptr() == memory and not may_overlap((again, scale))
    del again
    assert len(launch._read) < known, "what is gone is remembered"


def test_a_captured_launch_has_run_nothing(capturing):
    given = weight()
    capturing[0] = True
    assert not may_overlap(given) and not may_overlap(given)
    capturing[0] = False
    assert not may_overlap(given) and may_overlap(given)
    capturing[0] = True
    assert may_overlap(given)
    given[0].zero_()  # captured
    assert not may_overlap(given)


def test_tensors_that_hide_their_writes_are_waited_for():
    with torch.inference_mode():
        given = weight()
        assert not may_overlap(given) and not may_overlap(given)


class Driver:
    """A driver that takes everything and remembers the attributes of launches, and how a thread may behave while a
    graph is captured.
    """

    parameters = 0  # of a launch that are remembered

    def __init__(self) -> None:
        self.overlapped: list[bool] = []
        self.mode = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL, as threads begin
        self.loads: list[int] = []
        self.queued: list[tuple[int | None, list[int]]] = []  # stream and parameters of each launch
        self.grids: list[tuple[int, ...]] = []
        self.scratch: list[int] = []  # addresses that are not given back
        self.scratch_bytes = 0  # of the last of them

    def allocate(self, num_bytes: int, stream: int) -> int:
        self.scratch_bytes = num_bytes
        self.scratch.append(1 << 40)
        return self.scratch[-1]

    def cuThreadExchangeStreamCaptureMode(self, mode) -> int:  # noqa: N802
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuModuleLoadData(self, module, cubin) -> int:  # noqa: N802
        self.loads.append(self.mode)
        return 0

    def cuGetErrorString(self, result, text) -> int:  # noqa: N802
        return 0

    def cuModuleGetFunction(self, function, module, entry) -> int:  # noqa: N802
        return 0

    def cuFuncSetAttribute(self, function, attribute, value) -> int:  # noqa: N802
        assert self.mode == 2, "a capture would end"
        return 0

    def cuLaunchKernelEx(self, config, function, pointers, extra) -> int:  # noqa: N802
        found = ctypes.cast(config, ctypes.POINTER(launch.Launch)).contents
        self.overlapped.append(found.count == 1)
        self.grids.append(tuple(found.grid))
        at = ctypes.cast(pointers, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
        self.queued.append((found.stream, [at[place].contents.value for place in range(self.parameters)]))
        return 0


def forget_prepared() -> None:
    for prepared in (fp4_launch.prepare_mma, fp4_launch.prepare_wgmma, fp4_launch._dequantize):
        prepared.cache_clear()


@pytest.fixture
def driver(monkeypatch, capturing):
    """A Hopper GPU of which nothing runs; tensors are the CPU's."""
    found = Driver()
    monkeypatch.setattr(launch, "driver", lambda: found)
    monkeypatch.setattr(launch, "waiting_driver", lambda: found)
    monkeypatch.setattr(launch, "cached_cubin", lambda files, macros, arch: b"")
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(fp4_launch, "gpu_of", lambda device: H200)
    properties = SimpleNamespace(multi_processor_count=132)
    for name, value in {
        "get_device_capability": lambda device: (9, 0),
        "get_device_properties": lambda device: properties,
        "device": lambda device: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of the CPU
    monkeypatch.setattr(launch, "raw_stream", lambda device_index: 0)
    monkeypatch.setattr(launch, "allocate", found.allocate)
    monkeypatch.setattr(launch, "free", found.scratch.remove)
    forget_prepared()
    return found


def test_a_call_without_memory_has_read_no_weight(driver, monkeypatch):
    """The next one is the first, and begins when the kernel that wrote the weight has ended."""
    weight = random_weight("mxfp4", 64, 128)[1]
    x, plan = torch.randn(64, 128).bfloat16(), plan_wgmma(64, 64, 128, H200)

    def full(num_bytes: int, stream: int) -> int:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(launch, "allocate", full)
        fp4_launch.run_wgmma(plan, x, weight, None, "none", 64)
    assert driver.overlapped == []
    fp4_launch.run_wgmma(plan, x, weight, None, "none", 64)
    assert driver.overlapped[0] is False


def test_every_kernel_that_loads_a_weight_early_minds_who_wrote_it(driver, monkeypatch):
    zeros = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(counters, "zeroed", lambda count, device: nullcontext((zeros, zeros, 0)))
    n, k = 64, 128
    x = torch.randn(3, k).bfloat16()
    coarse, two = random_weight("mxfp4", n, k)[1], layout.parts_to_tiled(*random_parts(n, k)[1], n, k)
    top = w4a8.row_tops(coarse[1], n, k)
    runs = {
        "fp4_mma": (coarse, lambda: fp4_launch.run_mma(plan_mma(3, n, k, H200), x, coarse, None, "none", n)),
        "fp4_wgmma": (coarse, lambda: fp4_launch.run_wgmma(plan_wgmma(64, n, k, H200), x, coarse, None, "none", n)),
        "fp4_dequantize": (coarse, lambda: fp4_launch.run_dequantize(coarse, n, k, torch.bfloat16)),
        "prepare_e4m3": ((*coarse, top), lambda: w4a8.run_prepare_e4m3(x, (*coarse, top), n, k)),
        "w4a8_head": ((*coarse, top), lambda: w4a8.run_w4a8(w4a8.of_width(256), x, (*coarse, top), None, "none", n, k)),
        "fp4_mma, two parts": (two, lambda: fp4_launch.run_mma(plan_two_part(3, n, k, H200), x, two, None, "none", n)),
        "fp4_dequantize, two parts": (two, lambda: fp4_launch.run_dequantize(two, n, k, torch.bfloat16)),
    }
    early = set()
    for path in nvrtc.KERNELS.glob("*/cuda/*.cu"):  # what a kernel loads before its first wait
        for part in path.read_text().split('extern "C" __global__')[1:]:
            name = next(name for name in re.findall(r"(\w+)\(", part) if not name.startswith("__"))
            before = part.partition(") {\n")[2].partition("wait_for_previous")[0]
            if re.search(r"\b(codes|scales|row_top)\b", before):
                early.add(name)
    early.remove("w4a8")  # begins when its head has waited
    assert {"fp4_mma", "w4a8_head"} < early <= set(runs)
    for name, (tensors, run) in runs.items():
        for tensor in tensors:
            launch._read.clear()
            counts = []
            for _ in range(3):
                driver.overlapped.clear()
                run()
                counts.append(driver.overlapped.count(False))
                if len(counts) == 2:
                    tensor.copy_(tensor.clone())
            assert counts == [1, 0, 1], (name, counts)


def test_a_call_queues_its_own_tensors_on_the_stream_and_the_gpu_at_hand(driver, monkeypatch):
    """What is kept between calls is of the shape alone, whichever threads make them."""
    n, k = 64, 128
    driver.parameters = 6  # x, three of the weight, bias and y, which come first
    weights = [random_weight("mxfp4", n, k, seed)[1] for seed in range(4)]
    rows = [torch.randn(3, k).bfloat16() for _ in weights]
    bias, plan = torch.zeros(n, dtype=torch.bfloat16), plan_mma(3, n, k, H200)
    kept = list[torch.Tensor]()  # outputs, whose addresses would be given out again

    def call(place: int) -> tuple[int, ...]:
        y = fp4_launch.run_mma(plan, rows[place], weights[place], bias, "none", n)
        kept.append(y)
        return tuple(tensor.data_ptr() for tensor in (rows[place], *weights[place], bias, y))

    wanted = [call(0)]
    with ThreadPoolExecutor(4) as pool:
        wanted += pool.map(call, [0, 1, 2, 3] * 50)
    assert sorted(tuple(values) for _, values in driver.queued) == sorted(wanted)
    assert fp4_launch.prepare_mma.cache_info().misses == 1
    monkeypatch.setattr(launch, "raw_stream", lambda device_index: 7)
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext(here.append(None)))
    here = [1]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: here[-1], raising=False)
    call(0)
    assert driver.queued[-1][0] == 7 and entered == [torch.device("cpu")]
    call(0)
    assert len(entered) == 1, "the GPU was current"


def test_each_launch_of_a_tail_reads_rows_swizzled_for_its_tokens(driver):
    """Whole rounds in blocks of 128 tokens, then a tail of 64 with rows of its own, or of 128 with the same."""
    n, k = 128 * 140, 64  # 140 blocks of two groups for 132 multiprocessors: 132, and 16 of one group
    driver.parameters = 4  # rows, swizzled rows, M, K; or swizzled rows and the weight
    weight, x = random_weight("mxfp4", n, k)[1], torch.randn(128, k).bfloat16()
    at = [tensor.data_ptr() for tensor in weight]
    for tokens in (64, 128):
        plan = WgmmaPlan(128, 2, 1, 4, tail=WgmmaPlan(tokens, 1, 1, 4))
        driver.queued.clear()
        fp4_launch.run_wgmma(plan, x, weight, None, "none", n)
        *swizzles, whole, tail = [values for _, values in driver.queued]
        assert [(values[0], *values[2:]) for values in swizzles] == [(x.data_ptr(), 128, k)] * len({128, tokens})
        assert whole == [swizzles[0][1], *at] and tail == [swizzles[-1][1], *at]
        ends = {values[1] for values in swizzles}
        assert len(ends) == len(swizzles) and min(ends) == 1 << 40
        assert driver.scratch_bytes == 128 * k * 2 * len(swizzles) and not driver.scratch, "not given back"
        assert driver.grids[-2:] == [(132, 1, 1), (16, 1, 128 // tokens)]


def test_launches_that_follow_each_other_change_streams_together_and_leave_no_memory(driver, monkeypatch):
    n, k = 64, 128
    weight, x = random_weight("mxfp4", n, k)[1], torch.randn(64, k).bfloat16()
    run = lambda: fp4_launch.run_wgmma(plan_wgmma(64, n, k, H200), x, weight, None, "none", n)  # noqa: E731
    for stream in (0, 7, 7, 0):
        monkeypatch.setattr(launch, "raw_stream", lambda device_index, stream=stream: stream)
        run()
    assert [stream or 0 for stream, _ in driver.queued] == [0, 0, 7, 7, 7, 7, 0, 0]
    assert driver.overlapped == [False] + [True] * 7
    results = iter([0, 719])  # CUDA_ERROR_LAUNCH_FAILED
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *args: next(results))
    with pytest.raises(nvrtc.KernelError, match=r"launching fp4_wgmma .* on a grid of .*719"):
        run()
    assert not driver.scratch


def test_blocks_that_meet_in_global_memory_get_sums_and_counters(driver, monkeypatch):
    """70 features in 2 columns of blocks, 40 rows in 3: a counter for each of 6, on which 3 shares of K meet."""
    n, k, counted = 70, 1600, []
    now, stale = torch.zeros(6, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)

    def zeroed(count: int, device: torch.device) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor, int]]:
        counted.append(count)
        return nullcontext((now, stale, 5))

    monkeypatch.setattr(counters, "zeroed", zeroed)
    driver.parameters = 16  # all of them
    weight, x = random_weight("mxfp4", n, k)[1], torch.randn(40, k).bfloat16()
    y = fp4_launch.run_mma(MmaPlan(16, 2, 2, 1, 2, k_blocks=3), x, weight, None, "none", n)
    ((_, values),) = driver.queued
    assert values[:6] == [x.data_ptr(), *(tensor.data_ptr() for tensor in weight), 0, y.data_ptr()]
    assert values[6:9] == [40, n, k] and values[13:] == [now.data_ptr(), stale.data_ptr(), 5] and counted == [6]


def test_a_kernel_is_loaded_outside_a_capture_and_by_one_thread(driver, monkeypatch):
    device, began = torch.device("cpu"), threading.Barrier(4)
    made = []

    def slow(files, macros, arch):
        made.append(files)
        time.sleep(0.02)  # in which another thread would begin the same
        return b""

    monkeypatch.setattr(launch, "cached_cubin", slow)

    def get(_):
        began.wait()
        return launch.kernel(("a.cu",), "a", {}, device)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(get, range(4)))
    assert len(made) == 1 and all(kernel is found[0] for kernel in found)
    assert driver.loads == [2] and driver.mode == 0, "relaxed while loading, and as before after it"
    found[0].launch((1, 1, 1), 32, 100_000, ())
    assert driver.mode == 0


def test_barriers_of_a_cluster_are_met_by_whole_warps():
    """`.aligned` says that all lanes execute it together: a warp that comes from a branch of some of them must be one
    again.
    """
    text = nvrtc.path_of("ptx.cuh").read_text()
    found = re.findall(r"DEVICE void \w+\(\) \{\n((?:(?!\n\}).)*barrier\.cluster(?:(?!\n\}).)*)\n\}", text, re.S)
    assert len(found) == 3 and all(body.strip().startswith("__syncwarp();") for body in found)
    assert text.count("barrier.cluster") == 4
    for path in nvrtc.KERNELS.glob("*/cuda/*"):
        assert "barrier.cluster" not in path.read_text() or path.name == "ptx.cuh", path


@pytest.mark.gpu
def test_a_weight_that_was_just_written_is_read_as_it_is():
    n, k = 512, 1024
    tiled = [tuple(part.cuda() for part in random_weight("nvfp4", n, k, seed)[1]) for seed in range(2)]
    x = torch.randn(3, k, device="cuda").bfloat16()
    plan = plan_mma(3, n, k, fp4_launch.gpu_of(x.device))
    run = lambda weight: fp4_launch.run_mma(plan, x, weight, None, "none", n)  # noqa: E731
    wanted = [run(weight) for weight in tiled]
    changing = tuple(part.clone() for part in tiled[0])
    for at in [1, 0] * 50:
        for part, source in zip(changing, tiled[at], strict=True):
            part.copy_(source)
        assert torch.equal(run(changing), wanted[at])


@pytest.mark.gpu
def test_a_kernel_is_loaded_while_a_graph_is_captured():
    n, k = 70, 192
    tiled = tuple(part.cuda() for part in random_weight("nvfp4", n, k)[1])
    x = torch.randn(3, k, device="cuda").bfloat16()
    plan = plan_mma(3, n, k, fp4_launch.gpu_of(x.device))
    wanted = fp4_launch.run_mma(plan, x, tiled, None, "none", n)
    launch._kernels.clear()
    forget_prepared()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp4_launch.run_mma(plan, x, tiled, None, "none", n)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, wanted)
