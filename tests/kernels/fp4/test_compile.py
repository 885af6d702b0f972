"""Every plan the dispatcher can pick compiles for its GPUs and fits them: registers without spills, shared memory,
threads.
"""

import ctypes
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.emulation import A100
from tests.kernels.machine_code import resources, sass
from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import mma_plan, w4a8, wgmma_plan
from vblackwell.kernels.fp4.mma_plan import H200, Gpu, MmaPlan
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan
from vblackwell.kernels.runtime import launch, nvrtc
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear

SHAPES = (
    (256, 64),
    (832, 960),
    (20032, 576),
    (768, 3072),
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (8192, 8192),
    (28672, 8192),
)
SHARED_BYTES = dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_120"), 99 * 1024)  # an A100 has 163 KB
SHARED_BYTES |= dict.fromkeys(("sm_90a", "sm_100"), 227 * 1024)
UNUSED = [  # shapes of blocks that no rule takes: fewest and most K groups
    WgmmaPlan(32, 2, 2, 6, k_groups=2),
    WgmmaPlan(64, 1, 1, 8, k_groups=4),
    WgmmaPlan(64, 1, 2, 6, k_groups=3),
    WgmmaPlan(128, 2, 2, 6, k_groups=2),
    WgmmaPlan(64, 2, 4, 8, k_groups=2),
    WgmmaPlan(64, 1, 2, 16, k_groups=4, windows_per_step=2),
    WgmmaPlan(128, 2, 1, 8, windows_per_step=2),
]

pytestmark = pytest.mark.skipif(bool(nvrtc.why_not()), reason="nvidia-cuda-nvrtc is not installed")
# Plans differ in a few sizes: the last is compiled each time, all of them with what is slow (make test-all).
some_or_all = pytest.mark.parametrize(
    "chosen", [slice(-1, None), pytest.param(slice(None), marks=pytest.mark.slow)], ids=["the last", "all"]
)


# Each compute capability that there is a kernel for, by a GPU that has it (a B200 and an RTX 5090 are the last two).
GPUS = {
    "sm_80": A100,
    "sm_86": Gpu((8, 6), 46, 0.448e6),
    "sm_89": Gpu((8, 9), 128, 1.008e6),
    "sm_90a": H200,
    "sm_100": Gpu((10, 0), 148, 8e6),
    "sm_120": Gpu((12, 0), 170, 1.792e6),
}


# One is compiled for each time, all with what is slow.
one_arch_or_all = pytest.mark.parametrize(
    "arch", [arch if arch == "sm_90a" else pytest.param(arch, marks=pytest.mark.slow) for arch in GPUS]
)


@functools.cache
def plans(gpu: Gpu, bulk: bool = True, one_block: bool = False) -> list[MmaPlan]:
    """For rows up to the most that a rule gives ``fp4_mma``."""
    rows = (1, 2, 3, 4, 5, 8, 9, 16) + (() if one_block or gpu.clusters else (17, 32, 33, 64, 100, 256))
    return list(dict.fromkeys(mma_plan.plan_mma(m, n, k, gpu, bulk, one_block) for n, k in SHAPES for m in rows))


def check_usage(plan: MmaPlan, macros: dict[str, int], arch: str, folder: Path) -> None:
    """Registers for all threads, and no local memory but some addresses of 64 tokens, whose sums take half of the
    registers that 512 threads leave: read once a window, next to 64 products of 8 cycles each."""
    usage = resources(nvrtc.compile_cubin(mma_plan.MMA_FILES, macros, arch), folder)["fp4_mma"]
    words = 10 if plan.tokens == 64 and plan.threads * plan.min_blocks == 512 else 0
    assert usage["STACK"] <= 4 * words and usage["LOCAL"] == 0, (plan, usage)
    assert usage["REG"] * plan.threads * plan.min_blocks <= 65536, (plan, usage)


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[pytest.mark.slow] * (arch in ("sm_86", "sm_89"))) for arch in GPUS]
)
def test_plans_fit_their_gpus(arch):
    """Threads, blocks that meet, and shared memory, which need no compiler."""
    gpu = GPUS[arch]
    for plan in plans(gpu):
        assert plan.threads <= 1024 and plan.splits <= (8 if gpu.clusters else 1)
    for (n, k), m in itertools.product(SHAPES, (1, 3, 8, 16, 32, 64, 256)):
        assert mma_plan.plan_mma(m, n, k, gpu).shared_bytes(k) <= SHARED_BYTES[arch], (m, n, k)
    for (n, k), m, bulk in itertools.product(SHAPES, (1, 3, 8, 16), (False, True)):
        used = mma_plan.plan_mma(m, n, k, gpu, bulk, one_block=True).shared_bytes(k, norm=True)
        assert used <= SHARED_BYTES[arch], (arch, m, n, k, used)


@some_or_all
@one_arch_or_all
def test_mma(arch, chosen, tmp_path):
    for plan in plans(GPUS[arch])[chosen]:
        check_usage(plan, plan.macros(plan.tokens == 4), arch, tmp_path)


@some_or_all
@one_arch_or_all
def test_norm_on_the_way(arch, chosen, tmp_path):
    """Plans for up to 16 rows."""
    gpu = GPUS[arch]
    found = plans(gpu, False, True) + (plans(gpu, True, True) if gpu.clusters else [])
    for plan in found[chosen]:
        check_usage(plan, plan.macros(False, norm=True), arch, tmp_path)


@pytest.mark.parametrize(
    "width", [pytest.param(width, marks=[pytest.mark.slow] * (width != 192)) for width in w4a8.STEP_CYCLES]
)
def test_w4a8(width, tmp_path):
    """Words of local memory: one or two of a warp that decodes, once an item, and one at most, once a step, of one that
    multiplies.
    """
    plan, k = w4a8.of_width(width), {256: 4096, 224: 14336, 192: 1024}[width]
    assert plan.shared_bytes() <= SHARED_BYTES["sm_90a"]
    usage = resources(nvrtc.compile_cubin(w4a8.FILES, plan.macros(width == 224, k), "sm_90a"), tmp_path)
    assert usage["w4a8"]["REG"] * w4a8.THREADS <= 65536
    assert all(each["STACK"] <= 16 and each["LOCAL"] == 0 for each in usage.values()), usage
    lines = sass(tmp_path)
    at = [number for number, line in enumerate(lines) if "QGMMA" in line]
    assert len(at) == 8, "two halves of four, none by itself"
    loop = lines[at[0] : at[-1]]
    assert sum("FADD" in line for line in loop) == width // 4, (
        "a half's parts are added, and each sum stays in its register"
    )
    assert sum("LDL" in line for line in loop) <= 1 and not any("STL" in line for line in loop)


@some_or_all
def test_wgmma(chosen, tmp_path):
    shapes = [(m, n, k) for n, k in SHAPES for m in (9, 17, 33, 65, 100, 129, 200, 512, 1000, 1024)]
    every = {
        rows.plan
        for m, n, k in shapes
        for rows in wgmma_plan.launches(wgmma_plan.plan_wgmma(m, n, k, H200), m, n, H200.processors)
    }
    assert all(plan.shared_bytes() <= SHARED_BYTES["sm_90a"] for plan in every)
    for plan in [*UNUSED, *sorted(every, key=str)][chosen]:
        assert plan.shared_bytes() <= SHARED_BYTES["sm_90a"] // plan.min_blocks - 1024, plan
        cubin = nvrtc.compile_cubin(wgmma_plan.WGMMA_FILES, plan.macros(True), "sm_90a")
        usage = resources(cubin, tmp_path)["fp4_wgmma"]
        assert usage["STACK"] == usage["LOCAL"] == 0, (plan, usage)
        # what consumers take and the copying warpgroup keeps is no more than the block was given
        assert plan.registers * plan.consumers + wgmma_plan.COPY_REGISTERS <= usage["REG"] * (plan.consumers + 1), (
            plan,
            usage,
        )
        assert usage["REG"] * plan.threads * plan.min_blocks <= 65536, plan


def test_sums_that_leave_an_instruction_no_registers_are_no_plan():
    """Of 120 a thread when the block starts; what its consumers take later does not count."""
    plan = wgmma_plan.WgmmaPlan(192, 1, 1, 6, k_groups=3)
    assert plan.registers >= plan.needed_registers and not plan.fits()
    with pytest.raises(nvrtc.KernelError, match="Insufficient registers"):
        nvrtc.compile_cubin(wgmma_plan.WGMMA_FILES, plan.macros(False), "sm_90a")
    assert wgmma_plan.WgmmaPlan(176, 1, 1, 6, k_groups=3).fits()


@one_arch_or_all
@pytest.mark.parametrize(
    ("out", "parts"),
    [(0, 1), *(pytest.param(*how, marks=pytest.mark.slow) for how in ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1)))],
)
def test_dequantize(out, parts, arch, tmp_path):
    jobs: list[tuple[tuple[str, ...], str, dict[str, int]]] = [
        (fp4_launch.DEQUANTIZE_FILES, "fp4_dequantize", {"FP16": 0, "OUT": out, "PARTS": parts})
    ]
    if (out, parts) == (0, 1) and arch not in ("sm_80", "sm_86"):  # E4M3 needs 8.9
        jobs.append((w4a8.E4M3_FILES, "prepare_e4m3", w4a8.prepare_macros(False, 1 << 14)))
    for files, entry, macros in jobs:
        usage = resources(nvrtc.compile_cubin(files, macros, arch), tmp_path)[entry]
        assert usage["STACK"] == usage["LOCAL"] == 0 and usage["REG"] * 256 <= 65536
        if arch == "sm_90a":  # the weight is asked for while the previous kernel runs
            lines = sass(tmp_path)
            loads = [place for place, line in enumerate(lines) if "LDG.E.NA" in line]
            assert len(loads) == 3 + 2 * macros.get("PARTS", 0) and loads[-1] < next(
                place for place, line in enumerate(lines) if "ACQBULK" in line
            )


def test_a_source_that_does_not_compile_shows_the_log():
    with pytest.raises(nvrtc.KernelError, match=r"fp4_mma.cu does not compile for sm_80[\s\S]*identifier"):
        nvrtc.compile_cubin(mma_plan.MMA_FILES, {"FP16": 0}, "sm_80")


class _Driver:
    """A driver whose calls fail until the thread is in the context of GPU 3."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current: int | None = None

    def cuDevicePrimaryCtxRetain(self, context: Any, index: int) -> int:
        self.calls.append(f"retain {index}")
        context._obj.value = 64 + index
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.current = context.value
        return 0

    def work(self) -> int:
        self.calls.append("work")
        return 0 if self.current == 67 else 201


def test_a_thread_without_a_context_gets_the_gpus(monkeypatch: pytest.MonkeyPatch):
    driver = _Driver()
    monkeypatch.setattr(launch, "driver", lambda: driver)
    monkeypatch.setattr(launch, "waiting_driver", lambda: driver)
    assert [launch.in_context(torch.device("cuda", 3), driver.work) for _ in range(2)] == [0, 0]
    assert driver.calls == ["work", "retain 3", "work", "work"], "asked for once, and only where it is missing"
    assert launch.in_context(torch.device("cuda", 3), lambda: 2) == 2, "other errors are the caller's"


@pytest.mark.gpu
def test_a_fresh_thread_loads_and_launches():
    """PyTorch's allocator serves it from what is cached, so no call of CUDA's runtime has given it a context."""
    layer = FusedFP4Linear(512, 256, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.quantize()
    x_MK = torch.randn(3, 512, device="cuda", dtype=torch.bfloat16)
    launch._kernels.clear()
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(layer, x_MK).result()
    assert torch.equal(there, layer(x_MK))
