"""Quick rates of this machine, about a second each: what `vb doctor` prints beside the facts.

Medians of a few repetitions after a warm-up; good to about a tenth. Serious comparisons belong in benchmarks/.

The host's time for an operator is another matter: within minutes it was measured with 19 and with 26 us on one machine,
while its cores ran a loop in Python equally fast. What disturbs it (memory that a process before gave back, neighbours,
where the system puts threads) makes it longer, never shorter, and lasts for seconds: so it is looked at again and again
between all other measurements, and the quicker steps of all looks count (`HostLooks`). So is AdamW on the CPU beside
copies (`TogetherSamples`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from vblackwell.errors import ConfigurationError, DiskError
from vblackwell.machine.rates import ADDS_PER_UPDATE, GROUP_ISSUES, Rates
from vblackwell.memory.cache.stack import create_vgpu_stack
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.host_rates import (
    LOOP_PARAMETERS,
    HostUpdate,
    TogetherSamples,
    adds_per_update,
    duplex_rate,
    looping_optimizer,
    measured_bytes,
    updating,
)
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.trace.work import LOOP
from vblackwell.units import MiB

COPY_BYTES, QUICK_COPY_BYTES = 256 * MiB, 32 * MiB
ADAMW_BYTES = 28  # a parameter that AdamW on a CPU, bound by its memory, reads and writes
DISK_BYTES = 128 * MiB
DISK_PIECE_BYTES = 8 * MiB
DISK_SECONDS = 4.0  # each way: a slow disk is measured once
ADAMW_PARAMETERS = 8 * MiB
ADAMW_HELD_BYTES = 16  # a parameter: itself, its gradient, two moments
ISSUED_LAYERS, STEPS_ISSUED = 64, 15  # some milliseconds each: one hiccup of the machine does not count
OPERATORS_OF_A_LAYER = 6  # product and ReLU; ReLU's gradient, two products and a sum
REPEATS = 3
WARM_SECONDS = 0.1  # of steps that issue, before any counts: threads and caches settle
QUICK = 0.2  # of the steps of all looks: so many are not disturbed, whatever the others are
GROUPS_STREAMED, MATRICES_OF_A_LAYER, WIDTH_OF_A_LAYER = 12, 9, 64
GROUP_LEVELS = 64 * MiB, 64 * MiB
GROUP_WEIGHTS = (
    GROUPS_STREAMED * MATRICES_OF_A_LAYER * WIDTH_OF_A_LAYER**2
)  # bytes: half of what weights of 2 bytes take


def seconds_of(
    action: Callable[[], Any], finish: Callable[[], Any] = lambda: None, repeats: int = REPEATS, limit_seconds: float = math.inf
) -> float:  # fmt: skip
    """Median wall time of ``action`` followed by ``finish``, after one unmeasured call; after ``limit_seconds`` no
    further one is begun.
    """
    first = time.perf_counter()
    action()
    finish()
    found = []
    for _ in range(repeats):
        if found and time.perf_counter() - first > limit_seconds:
            break
        began = time.perf_counter()
        action()
        finish()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def steps_seconds(action: Callable[[], Any], finish: Callable[[], Any]) -> list[float]:
    """Wall times of `STEPS_ISSUED` times ``action`` followed by ``finish``, after `WARM_SECONDS` of them that do not
    count.
    """
    began = time.perf_counter()
    while True:
        action()
        finish()
        if time.perf_counter() - began > WARM_SECONDS:
            break
    found = []
    for _ in range(STEPS_ISSUED):
        began = time.perf_counter()
        action()
        finish()
        found.append(time.perf_counter() - began)
    return found


def quick(times: list[float]) -> float:
    """The time that `QUICK` of ``times`` stay below."""
    return sorted(times)[int(QUICK * len(times))]


class HostLooks:
    """What the host takes to issue operators, looked at again and again while other things are measured."""

    def __init__(self, device: torch.device) -> None:
        self._finish, self._issue, self._loop = _finish(device), _issuing_step(device), looping_optimizer(device)
        self._number = torch.ones((), device=device)
        self._issued: list[float] = []
        self._read: list[float] = []
        self._looped: list[float] = []

    def look(self) -> None:
        """Once more, about a third of a second."""
        self._issued += steps_seconds(self._issue, self._finish)
        self._looped += steps_seconds(self._loop, self._finish)
        self._read += steps_seconds(self._number.item, lambda: None)

    @property
    def issue(self) -> float:
        """Seconds of an operator of a training step, as `issue_seconds`, by the quicker steps of all looks."""
        return quick(self._issued) / (ISSUED_LAYERS * OPERATORS_OF_A_LAYER)

    @property
    def loop(self) -> float:
        """Likewise of an operator of an optimizer's loop over its parameters, in the same unit."""
        return quick(self._looped) / (LOOP_PARAMETERS * LOOP)

    @property
    def read(self) -> float:
        """Seconds in which the host reads one number of a device that has nothing else to do."""
        return quick(self._read)


def host_copy_gbps() -> float:
    """RAM to RAM, counting the bytes once."""
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.empty(COPY_BYTES, dtype=torch.uint8)
    return COPY_BYTES / seconds_of(lambda: target.copy_(source)) / 1e9


def cpu_matmul_gflops(size: int = 1024) -> float:
    """fp32 matrix product of ``size`` cubed, in GFLOP/s."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / seconds_of(lambda: a @ b) / 1e9


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """A square product of ``size`` or, where memory is short, of as many multiples of 256 as there is room for, in
    TFLOP/s.
    """
    room = measured_bytes(device, size * size * dtype.itemsize)
    size = max(256, math.isqrt(room // dtype.itemsize) // 256 * 256)
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / seconds_of(lambda: a @ a, _finish(device)) / 1e12


def adamw_gparams(device: torch.device, count: int = ADAMW_PARAMETERS) -> float:
    """Fused AdamW in fp32 on ``count`` parameters, in 1e9 parameters a second."""
    param = torch.nn.Parameter(torch.zeros(count, device=device))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    return count / seconds_of(optimizer.step, _finish(device)) / 1e9


def disk_gbps(path: str) -> dict[str, float | str]:
    """Write and read rate of a disk level at ``path``, or why it cannot be one. What is written is gone afterwards."""
    from vblackwell.memory.disk import DiskLevel

    try:
        level = DiskLevel(path, DISK_BYTES)
    except (ConfigurationError, DiskError) as error:
        return {"refused": str(error)}
    try:
        extents = [level.allocate(DISK_PIECE_BYTES) for _ in range(DISK_BYTES // DISK_PIECE_BYTES)]
        # Not zeros: some disks and file systems keep those for free.
        piece = torch.randint(0, 256, (DISK_PIECE_BYTES,), dtype=torch.uint8)
        pieces = [torch.empty_like(piece) for _ in extents]

        def write() -> None:
            for transfer in [level.write(extent, piece) for extent in extents]:
                transfer.wait()

        def read() -> None:
            for transfer in [level.read(extent, out) for extent, out in zip(extents, pieces, strict=True)]:
                transfer.wait()

        ways = {"write": write, "read": read}
        return {way: DISK_BYTES / seconds_of(do, limit_seconds=DISK_SECONDS) / 1e9 for way, do in ways.items()}
    except DiskError as error:
        return {"refused": str(error)}
    finally:
        level.close()


def is_measured_in_full(device: torch.device) -> bool:
    """Whether `gpu_rates` has room for the sizes that its rates are meant for: 2.5 GiB."""
    return measured_bytes(device, COPY_BYTES) == COPY_BYTES


def gpu_rates(device: torch.device) -> dict[str, float]:
    """Links alone and both at once, memory, matrix products, AdamW on it and on the CPU during copies, and the issue of
    operators.

    Sizes follow what the process may still take of the GPU: a cap holds while rates are measured, too.
    """
    room = measured_bytes(device, ADAMW_PARAMETERS * ADAMW_HELD_BYTES)
    looks, update = HostLooks(device), HostUpdate()
    together = TogetherSamples(update, device)
    found = _copy_rates(device)
    looks.look()
    together.take()
    half = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    for name, dtype, width in (("half", half, 8192), ("fp32", torch.float32, 4096)):
        found[f"matmul_{name}_tflops"] = matmul_tflops(device, dtype, width)
        looks.look()
    found["adamw_gparams"] = adamw_gparams(device, room // ADAMW_HELD_BYTES)
    together.take()
    added = adds_per_update(update)
    looks.look()
    with updating(update):
        busy = issue_seconds(device)
    looks.look()
    groups = {place: group_seconds(device, place) for place in ("level0", "home")}
    looks.look()
    together.take()
    return found | {
        "cpu_adamw_beside_copies_gparams": together.rates[1] / 1e9,
        "adds_per_update": added,
        "issue_us": looks.issue * 1e6,
        "issue_beside_updates_us": busy * 1e6,
        "issue_of_loop_us": looks.loop * 1e6,
        "read_us": looks.read * 1e6,
        "streamed_group_us": groups["level0"] * 1e6,
        "streamed_home_group_us": groups["home"] * 1e6,
    }


def _copy_rates(device: torch.device) -> dict[str, float]:
    size, finish = measured_bytes(device, COPY_BYTES), _finish(device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there, also_there = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return {
        "host_to_gpu_gbps": size / seconds_of(lambda: there.copy_(host, non_blocking=True), finish) / 1e9,
        "gpu_to_host_gbps": size / seconds_of(lambda: host.copy_(there, non_blocking=True), finish) / 1e9,
        "both_ways_gbps": duplex_rate(device) / 1e9,
        "memory_gbps": 2 * size / seconds_of(lambda: also_there.copy_(there), finish) / 1e9,
    }


def issue_seconds(device: torch.device) -> float:
    """What the host takes to issue one operator of a training step just now, in small layers that leave the device
    nothing to do.
    """
    times = steps_seconds(_issuing_step(device), _finish(device))
    return statistics.median(times) / (ISSUED_LAYERS * OPERATORS_OF_A_LAYER)


def _issuing_step(device: torch.device) -> Callable[[], None]:
    layers = torch.nn.Sequential(
        *(part for _ in range(ISSUED_LAYERS) for part in (torch.nn.Linear(64, 64), torch.nn.ReLU()))
    )
    layers.to(device)
    x = torch.zeros(64, 64, device=device)

    def step() -> None:
        layers(x).sum().backward()
        layers.zero_grad(set_to_none=True)

    return step


def group_seconds(device: torch.device, update: str = "level0", passes: int = 1) -> float:
    """What the host takes for a layer group that streams, beside its operators: forward and backward, in the last of
    ``passes`` the update.

    Of groups so small that links and device have nothing to do, against the same model where it lives; seconds a pass.
    A step waits for the host where the groups of a model are small.
    """
    with torch.random.fork_rng(devices=[]):
        plain, streamed = _Layers(), _Layers()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain.to(device, dtype)
    x = torch.zeros(WIDTH_OF_A_LAYER, WIDTH_OF_A_LAYER, device=device, dtype=dtype)
    with create_vgpu_stack(*GROUP_LEVELS, 0, device=device) as stack:
        enable_vgpu_stack_optimization(
            streamed, stack, placement="streamed", update=update, compute_dtype=dtype, weight_bytes=GROUP_WEIGHTS
        )  # fmt: skip
        engine = offload_of(streamed)
        assert engine is not None, "it was just put into the stack"
        with closing(engine):
            optimizer = VGPUAdamW(streamed.parameters(), update_in_backward=True, undo=False, accumulation_steps=passes)

            def step_plain() -> None:
                for _ in range(passes):
                    plain(x).sum().backward()
                plain.zero_grad(set_to_none=True)

            def step_streamed() -> None:
                for _ in range(passes):
                    streamed(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            step_streamed()  # compiles AdamW, and learns the order of the groups
            finish = _finish(device)
            times = [quick(steps_seconds(step, finish)) for step in (step_plain, step_streamed)]
            engine.finish()
    return max(0.0, times[1] - times[0]) / (GROUPS_STREAMED * passes)


class _Layers(torch.nn.Module):
    """Layers of as many matrices as a transformer's block has, and nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH_OF_A_LAYER
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(MATRICES_OF_A_LAYER)))
            for _ in range(GROUPS_STREAMED)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def cpu_rates() -> Rates:
    """What the simulation of a step takes of a machine without a GPU, whose level 0 is RAM: a tenth of a second."""
    source = torch.ones(QUICK_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = QUICK_COPY_BYTES / seconds_of(lambda: target.copy_(source))
    flops = cpu_matmul_gflops(512) * 1e9
    return Rates(
        matmul_half=flops, matmul_fp32=flops, memory=2 * copied, up=copied, down=copied, up_both=copied / 2, down_both=copied / 2,
        cpu_adamw=2 * copied / ADAMW_BYTES, issue_seconds=issue_seconds(torch.device("cpu")), source="products and copies on this CPU",
    )  # fmt: skip


def as_rates(gpu: dict[str, float], disk: dict[str, Any] | None = None) -> Rates:
    """What the simulation of a step takes of `gpu_rates`, and of `disk_gbps` where the disk can be used."""
    of_disk = {} if disk is None or "refused" in disk else {f"disk_{way}": disk[way] * 1e9 for way in ("read", "write")}
    return Rates(
        matmul_half=gpu["matmul_half_tflops"] * 1e12,
        matmul_fp32=gpu["matmul_fp32_tflops"] * 1e12,
        memory=gpu["memory_gbps"] * 1e9,
        up=gpu["host_to_gpu_gbps"] * 1e9,
        down=gpu["gpu_to_host_gbps"] * 1e9,
        up_both=gpu["both_ways_gbps"] * 1e9,
        down_both=gpu["both_ways_gbps"] * 1e9,
        cpu_adamw=gpu["cpu_adamw_beside_copies_gparams"] * 1e9,
        issue_seconds=gpu["issue_us"] / 1e6,
        group_issues=_issues(gpu, "streamed_group_us"),
        home_group_issues=_issues(gpu, "streamed_home_group_us"),
        busy_issues=max(1.0, gpu.get("issue_beside_updates_us", gpu["issue_us"]) / gpu["issue_us"]),
        loop_issues=gpu.get("issue_of_loop_us", gpu["issue_us"]) / gpu["issue_us"],
        read_issues=gpu.get("read_us", gpu["issue_us"]) / gpu["issue_us"],
        adds_per_update=gpu.get("adds_per_update", ADDS_PER_UPDATE),
        source="measured here by vb doctor",
        **of_disk,
    )


def _issues(gpu: dict[str, float], name: str) -> float:
    """A time of `gpu_rates` in operators; what is usual where it was not measured."""
    return max(1.0, gpu[name] / gpu["issue_us"]) if name in gpu else GROUP_ISSUES


def _finish(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
