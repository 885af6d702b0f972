"""Quick rates of this machine, about a second each and good to about a tenth, for `vb doctor` and plans.

What disturbs the host's time for an operator makes it longer, never shorter, and lasts for seconds: so it is sampled
between all other measurements, and the quicker steps count (`HostSamples`). So is AdamW on the CPU during copies
(`TogetherSamples`), as both work in the same memory and slow each other down.
"""

import copy
import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from vblackwell.errors import ConfigurationError, DiskError
from vblackwell.kernels.optimizer import cpu
from vblackwell.kernels.optimizer.adamw import AdamWStep
from vblackwell.kernels.optimizer.cpu import States, Sum, Update, update_threads
from vblackwell.machine.facts import gpu_bytes_left, memory_facts
from vblackwell.machine.rates import Rates, keep_together, kept_together
from vblackwell.memory.cache.stack import create_vgpu_stack
from vblackwell.memory.disk import DiskLevel
from vblackwell.memory.host import map_slab
from vblackwell.memory.level import Transfer
from vblackwell.offload.engine import stream
from vblackwell.offload.layout.lanes import CPU_UPDATE_BYTES
from vblackwell.offload.layout.placement import StreamingOptions
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.storage.initialize import ModelSource
from vblackwell.trace.work import LOOP
from vblackwell.units import MiB

COPY_BYTES, QUICK_COPY_BYTES = 256 * MiB, 32 * MiB
LINEAR_SECONDS = 0.05  # of a product on the CPU that is so slow
ATTENTION_SHAPE = 2, 4, 256, 64  # (B, N, S, H)
DISK_BYTES = 128 * MiB
DISK_PIECE_BYTES = 8 * MiB
DISK_SECONDS = 4.0  # each way: a slow disk is measured once
ADAMW_PARAMETERS = 8 * MiB
ADAMW_HELD_BYTES = 16  # a parameter: itself, its gradient, two moments
ISSUED_LAYERS, STEPS_ISSUED = 64, 15  # some milliseconds each: one hiccup of the machine does not count
OPERATORS_OF_A_LAYER = 6  # product and ReLU; ReLU's gradient, two products and a sum
REPEATS = 3
WARM_SECONDS = 0.1  # of steps that issue, before any counts: threads and caches are not yet as they stay
QUICK = 0.2  # of the steps of all samples: so many are not disturbed, whatever the others are
GROUPS_STREAMED, MATRICES_OF_A_LAYER, WIDTH_OF_A_LAYER = 12, 9, 64
GROUP_LEVELS = 64 * MiB, 64 * MiB
GROUP_WEIGHTS = GROUPS_STREAMED * MATRICES_OF_A_LAYER * WIDTH_OF_A_LAYER**2  # half of the bytes of 2-byte weights
CPU_ELEMENTS = 48 << 20  # as a group of some size: 1.2 GiB of states, more than any cache
FEW_ELEMENTS = 16 << 20  # where RAM is short
# A parameter: of an update two fp32 and two of 2 bytes, twice, and a gradient; of sums at that time 8.
MEASURED_BYTES = 34
LINK_BYTES, COPIES = 64 * MiB, 4
MEMORY_SHARE = 10  # no buffer of a measurement takes more than this part of what the process may still take of the GPU
LINK_TURNS = 3  # a sample, 6 ms each on the reference machine, where two found 46 and 47 of the 50 GB/s steps have
TOGETHER_SECONDS = 0.15  # a dozen updates on the reference machine
SAMPLES = 3
ADD_TURNS = 5
LOOP_PARAMETERS, LOOP_WIDTH = 64, 64


Action = Callable[[], Any]


def seconds_of(action: Action, finish: Action = lambda: None, limit_seconds: float = math.inf) -> float:
    """Median time of ``action`` and ``finish``, after a first that does not count; none begins after the limit."""
    total = _seconds(action, finish)
    found: list[float] = []
    while len(found) < REPEATS and not (found and total > limit_seconds):
        found.append(_seconds(action, finish))
        total += found[-1]
    return statistics.median(found)


def steps_seconds(action: Action, finish: Action) -> list[float]:
    """Times of `STEPS_ISSUED` times ``action`` and ``finish``, after `WARM_SECONDS` of them that do not count."""
    warm = _seconds(action, finish)
    while warm <= WARM_SECONDS:
        warm += _seconds(action, finish)
    return [_seconds(action, finish) for _ in range(STEPS_ISSUED)]


def _seconds(action: Action, finish: Action = lambda: None) -> float:
    began = time.perf_counter()
    action()
    finish()
    return time.perf_counter() - began


def quick(times: list[float]) -> float:
    """The time that `QUICK` of ``times`` stay below."""
    return sorted(times)[int(QUICK * len(times))]


class HostSamples:
    """What the host takes, in seconds by the quicker steps of all samples, to ``issue`` an operator of a training step,
    one of an optimizer's ``loop`` over its parameters, and to ``read`` one number of a device that is idle.
    """

    issue = loop = read = math.inf

    def __init__(self, device: torch.device) -> None:
        finish = _finish(device)
        small = (torch.zeros(LOOP_WIDTH, LOOP_WIDTH, device=device) for _ in range(LOOP_PARAMETERS))
        params = [torch.nn.Parameter(each) for each in small]
        for param in params:
            param.grad = torch.zeros_like(param)
        self._actions = [
            (_issuing_step(device), finish),
            (torch.optim.AdamW(params, foreach=False).step, finish),  # which goes through them one by one
            (torch.ones((), device=device).item, lambda: None),
        ]
        self._times: list[list[float]] = [[], [], []]

    def take(self) -> None:
        """Once more, about a third of a second."""
        for times, action in zip(self._times, self._actions, strict=True):
            times += steps_seconds(*action)
        issued, looped, self.read = map(quick, self._times)
        self.issue = issued / (ISSUED_LAYERS * OPERATORS_OF_A_LAYER)
        self.loop = looped / (LOOP_PARAMETERS * LOOP)


def host_copy_gbps(num_bytes: int = COPY_BYTES) -> float:
    """RAM to RAM, counting the bytes once."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    return num_bytes / seconds_of(lambda: target.copy_(source)) / 1e9


def cpu_matmul_gflops(size: int = 1024) -> float:
    """fp32 matrix product of ``size`` cubed, in GFLOP/s."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / seconds_of(lambda: a @ b) / 1e9


def cpu_linear_gflops(dtype: torch.dtype, size: int) -> float:
    """The three products of a linear layer's forward and backward on ``size`` rows, ``size`` wide, in GFLOP/s. Their
    operands lie differently: where a CPU has no instructions for ``dtype``, one may take ten times as long.
    """
    x, w, dy = (torch.randn(size, size, dtype=dtype) for _ in range(3))
    products: tuple[Action, ...] = (lambda: x @ w.t(), lambda: dy @ w, lambda: dy.t() @ x)
    seconds = sum(seconds_of(product, limit_seconds=LINEAR_SECONDS) for product in products)
    return 2 * len(products) * size**3 / seconds / 1e9


def cpu_attention_gflops(dtype: torch.dtype) -> float:
    """Causal attention's two products forward and five backward, `ATTENTION_SHAPE`, in GFLOP/s."""
    q, k, v = (torch.randn(ATTENTION_SHAPE, dtype=dtype, requires_grad=True) for _ in range(3))

    def step() -> None:
        scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    batch, heads, length, width = ATTENTION_SHAPE
    return 7 * batch * heads * length**2 * width / seconds_of(step, limit_seconds=LINEAR_SECONDS) / 1e9


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """A square product of ``size`` or, where memory is short, of as many multiples of 256 as fit, in TFLOP/s."""
    num_bytes = measured_bytes(device, size * size * dtype.itemsize)
    size = max(256, math.isqrt(num_bytes // dtype.itemsize) // 256 * 256)
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / seconds_of(lambda: a @ a, _finish(device)) / 1e12


def host_adamw_gparams() -> float:
    """AdamW on the CPU as runs have it, in 1e9 parameters a second."""
    update = HostUpdate()
    return update.count / seconds_of(update) / 1e9


def adamw_gparams(device: torch.device, count: int = ADAMW_PARAMETERS) -> float:
    """torch's fused AdamW in fp32 on ``count`` parameters, in 1e9 parameters a second."""
    param = torch.nn.Parameter(torch.zeros(count, device=device))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    return count / seconds_of(optimizer.step, _finish(device)) / 1e9


def disk_gbps(path: str) -> dict[str, float | str]:
    """Write and read rate of a disk level at ``path``, or why it cannot be one. What is written is gone afterwards."""
    try:
        with closing(DiskLevel(path, DISK_BYTES)) as level:
            extents = [level.allocate(DISK_PIECE_BYTES) for _ in range(DISK_BYTES // DISK_PIECE_BYTES)]
            # Not zeros: some disks and file systems keep those for free.
            piece = torch.randint(0, 256, (DISK_PIECE_BYTES,), dtype=torch.uint8)
            pieces = [torch.empty_like(piece) for _ in extents]

            def rate(move: Callable[[Any, torch.Tensor], Transfer], memory: list[torch.Tensor]) -> float:
                def move_all() -> None:
                    for transfer in list(map(move, extents, memory)):
                        transfer.wait()

                return DISK_BYTES / seconds_of(move_all, limit_seconds=DISK_SECONDS) / 1e9

            return {"write": rate(level.write, [piece] * len(extents)), "read": rate(level.read, pieces)}
    except (ConfigurationError, DiskError) as error:
        return {"refused": str(error)}


def gpu_rates(device: torch.device) -> dict[str, float]:
    """What `as_rates` reads and ``vb doctor`` shows, in sizes that a cap allows."""
    num_bytes = measured_bytes(device, ADAMW_PARAMETERS * ADAMW_HELD_BYTES)
    samples, update = HostSamples(device), HostUpdate()
    together = TogetherSamples(update, device)
    found = _copy_rates(device)
    samples.take()
    together.take()
    half = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    for name, dtype, width in (("half", half, 8192), ("fp32", torch.float32, 4096)):
        found[f"matmul_{name}_tflops"] = matmul_tflops(device, dtype, width)
        samples.take()
    found["adamw_gparams"] = adamw_gparams(device, num_bytes // ADAMW_HELD_BYTES)
    together.take()
    added = adds_per_update(update)
    samples.take()
    with updating(update):
        busy = issue_seconds(device)
    samples.take()
    groups = {place: group_seconds(device, place) for place in ("device", "host")}
    samples.take()
    together.take()
    link, cpu = together.found
    keep_together(torch.cuda.get_device_name(device), update_threads(), link, cpu)
    return found | {
        "both_ways_gbps": link / 1e9,
        "cpu_adamw_during_copies_gparams": cpu / 1e9,
        "adds_per_update": added,
        "issue_us": samples.issue * 1e6,
        "issue_during_updates_us": busy * 1e6,
        "issue_of_loop_us": samples.loop * 1e6,
        "read_us": samples.read * 1e6,
        "streamed_group_us": groups["device"] * 1e6,
        "streamed_host_group_us": groups["host"] * 1e6,
    }


def _copy_rates(device: torch.device) -> dict[str, float]:
    size, finish = measured_bytes(device, COPY_BYTES), _finish(device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there, also_there = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return {
        "host_to_gpu_gbps": size / seconds_of(lambda: there.copy_(host, non_blocking=True), finish) / 1e9,
        "gpu_to_host_gbps": size / seconds_of(lambda: host.copy_(there, non_blocking=True), finish) / 1e9,
        "memory_gbps": 2 * size / seconds_of(lambda: also_there.copy_(there), finish) / 1e9,
    }


def issue_seconds(device: torch.device) -> float:
    """What the host takes to issue an operator of a training step, in small layers that leave the device nothing."""
    times = steps_seconds(_issuing_step(device), _finish(device))
    return statistics.median(times) / (ISSUED_LAYERS * OPERATORS_OF_A_LAYER)


def _issuing_step(device: torch.device) -> Action:
    parts = (part for _ in range(ISSUED_LAYERS) for part in (torch.nn.Linear(64, 64), torch.nn.ReLU()))
    layers = torch.nn.Sequential(*parts).to(device)
    x = torch.zeros(64, 64, device=device)

    def step() -> None:
        layers(x).sum().backward()
        layers.zero_grad(set_to_none=True)

    return step


def group_seconds(device: torch.device, update: str = "device") -> float:
    """Seconds that the host takes for a streamed layer group's forward, backward and update, in addition to operators.
    The groups leave links and device nothing to do.
    """
    width = WIDTH_OF_A_LAYER
    with torch.random.fork_rng(devices=[]):  # layers of as many matrices as a transformer's block has, and no more
        linears = [torch.nn.Linear(width, width, bias=False) for _ in range(GROUPS_STREAMED * MATRICES_OF_A_LAYER)]
    parts = [linears[index::GROUPS_STREAMED] for index in range(GROUPS_STREAMED)]
    streamed = torch.nn.Sequential(*(torch.nn.Sequential(*part) for part in parts))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain = copy.deepcopy(streamed).to(device, dtype)
    x = torch.zeros(width, width, device=device, dtype=dtype)
    with create_vgpu_stack(*GROUP_LEVELS, 0, device=device, cap_process=False) as stack:
        names = tuple(name for name, _ in streamed.named_children())
        options = StreamingOptions(dtype, names, update, weight_bytes=GROUP_WEIGHTS)
        with closing(stream(streamed, stack, "model", options, ModelSource(streamed, None))) as engine:
            optimizer = VGPUAdamW(streamed.parameters(), update_in_backward=True, undo=False)

            def step_plain() -> None:
                plain(x).sum().backward()
                plain.zero_grad(set_to_none=True)

            def step_streamed() -> None:
                streamed(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            step_streamed()  # compiles AdamW, and learns the order of the groups
            finish = _finish(device)
            times = [quick(steps_seconds(step, finish)) for step in (step_plain, step_streamed)]
            engine.finish()
    return max(0.0, times[1] - times[0]) / GROUPS_STREAMED


def cpu_rates() -> Rates:
    """What the simulation of a step takes of a machine without a GPU, whose level 0 is RAM: some tenths of a second."""
    copied = host_copy_gbps(QUICK_COPY_BYTES) * 1e9
    flops, half = cpu_linear_gflops(torch.float32, 512) * 1e9, cpu_linear_gflops(torch.bfloat16, 256) * 1e9
    attention = {dtype: cpu_attention_gflops(dtype) * 1e9 for dtype in (torch.bfloat16, torch.float32)}
    memory, link, issue = 2 * copied, (copied, copied, copied / 2, copied / 2), issue_seconds(torch.device("cpu"))
    return Rates(
        half,
        flops,
        memory,
        *link,
        memory / CPU_UPDATE_BYTES,
        issue,
        source="products and copies on this CPU",
        product_share=1.0,  # products of a model's own sizes are what was measured
        attention_half_share=attention[torch.bfloat16] / half,
        attention_fp32_share=attention[torch.float32] / flops,
    )


def as_rates(gpu: dict[str, float], disk: dict[str, Any] | None = None) -> Rates:
    """What the simulation of a step takes of `gpu_rates`, and of `disk_gbps` where the disk can be used."""
    of_disk = {} if disk is None or "refused" in disk else {f"disk_{way}": disk[way] * 1e9 for way in ("read", "write")}
    issue, both = gpu["issue_us"], gpu["both_ways_gbps"] * 1e9
    return Rates(
        matmul_half=gpu["matmul_half_tflops"] * 1e12,
        matmul_fp32=gpu["matmul_fp32_tflops"] * 1e12,
        memory=gpu["memory_gbps"] * 1e9,
        up=gpu["host_to_gpu_gbps"] * 1e9,
        down=gpu["gpu_to_host_gbps"] * 1e9,
        up_both=both,
        down_both=both,
        cpu_adamw=gpu["cpu_adamw_during_copies_gparams"] * 1e9,
        issue_seconds=issue / 1e6,
        group_issues=max(1.0, gpu["streamed_group_us"] / issue),
        home_group_issues=max(1.0, gpu["streamed_host_group_us"] / issue),
        busy_issues=max(1.0, gpu["issue_during_updates_us"] / issue),
        loop_issues=gpu["issue_of_loop_us"] / issue,
        read_issues=gpu["read_us"] / issue,
        adds_per_update=gpu["adds_per_update"],
        source="measured here by vb doctor",
        **of_disk,
    )


def _finish(device: torch.device) -> Action:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


# -- AdamW on the host, alone and during copies ------------------------------------------------------------------------


def update_elements() -> int:
    """Of a measured update."""
    return CPU_ELEMENTS if memory_facts().available_bytes // 16 >= CPU_ELEMENTS * MEASURED_BYTES else FEW_ELEMENTS


class HostUpdate:
    """AdamW on the host for ``count`` parameters in bf16, in memory as a level's; calling it is one step, which writes
    into shadows, as updates do that can be rolled back.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = update_elements() if count is None else count
        sizes = [2 * self.count, 2 * self.count, 4 * self.count, 4 * self.count]
        memory = map_slab(2 * sum(sizes) + sizes[0])
        *both, gradient = memory[: 2 * sum(sizes) + sizes[0]].split([*sizes, *sizes, sizes[0]])
        types = (torch.bfloat16, torch.int16, torch.float32, torch.float32)
        both = [part.view(dtype) for part, dtype in zip(both, types * 2, strict=True)]
        self._old, self._new = States(*both[:4]), States(*both[4:])
        self._gradient = gradient.view(torch.bfloat16)
        self._numbers = AdamWStep(lr=0.0, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0, step=1)

    def __call__(self) -> None:
        self._old, self._new = self._new, self._old
        cpu.update([Update(self._new, self._old, self._gradient, None, self._numbers)])


def adds_per_update(update: HostUpdate) -> float:
    """Gradients of a second micro-batch that the host adds up while ``update`` does one parameter: the median."""
    sizes = [4 * update.count, 2 * update.count, 2 * update.count]
    total, first, addend = map_slab(sum(sizes))[: sum(sizes)].split(sizes)
    work = Sum(total.view(torch.float32), first.view(torch.bfloat16), addend.view(torch.bfloat16))
    ratios = [_seconds(update) / _seconds(lambda: cpu.add_up([work])) for _ in range(1 + ADD_TURNS)]
    return statistics.median(ratios[1:])  # the first compiles


@functools.cache
def rates_together(device: torch.device) -> tuple[float, float]:
    """A GPU's link while it copies both ways, bytes/s each way, and AdamW on the host beside such copies, parameters/s.
    Measured once a day on a machine, 0.8 s."""
    known_as = torch.cuda.get_device_name(device), update_threads()
    if (kept := kept_together(*known_as)) is not None:
        return kept
    samples = TogetherSamples(HostUpdate(), device)
    for _ in range(SAMPLES):
        samples.take()
    keep_together(*known_as, *samples.found)
    return samples.found


class TogetherSamples:
    """Of a GPU's link both ways, without updates, which the simulation knows to slow it down, and of AdamW on the host
    beside such copies.
    """

    def __init__(self, update: HostUpdate, device: torch.device) -> None:
        self._update, self._copies = update, _BothWays(device)
        self._update()  # compiled, and memory's pages there
        self.links = [self._copies.rate_after(self._copies.queue(COPIES))]  # bytes/s each way
        self.cpus: list[float] = []  # parameters/s

    def take(self) -> None:
        """One more sample, `TOGETHER_SECONDS`."""
        self.links += [self._copies.rate_after(self._copies.queue(COPIES)) for _ in range(LINK_TURNS)]
        done = self._copies.queue(max(COPIES, round(TOGETHER_SECONDS * max(self.links) / self._copies.num_bytes)))
        began, updates = time.perf_counter(), 0
        while not all(each.query() for each in done):
            self._update()
            updates += 1
        self.cpus.append(updates * self._update.count / (time.perf_counter() - began))

    @property
    def found(self) -> tuple[float, float]:
        """The best of the link, which nothing makes faster, and the median of AdamW: a disturbance passes in a
        second.
        """
        return max(self.links), statistics.median_high(self.cpus)


def measured_bytes(device: torch.device, wanted: int) -> int:
    """The size of a buffer on ``device`` to measure with: ``wanted``, or less where memory is short or capped."""
    return min(wanted, max(MiB, gpu_bytes_left(device) // MEMORY_SHARE // MiB * MiB))


class _BothWays:
    """Copies between a GPU and pinned memory, on a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = measured_bytes(device, LINK_BYTES)
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]
        there = [torch.empty(self.num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        here = [torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.pairs = [(there[0], here[0]), (here[1], there[1])]
        torch.cuda.synchronize(device)

    def queue(self, count: int) -> list[torch.cuda.Event]:
        """Starts ``count`` copies each way: the events after the last of each."""
        self.count = count
        self.begun = self._record()
        for _ in range(count):
            for way, (target, source) in zip(self.streams, self.pairs, strict=True):
                with torch.cuda.stream(way):
                    target.copy_(source, non_blocking=True)
        return self._record()

    def _record(self) -> list[torch.cuda.Event]:
        """An event after what each stream has queued."""
        events = [torch.cuda.Event(enable_timing=True) for _ in self.streams]
        for way, event in zip(self.streams, events, strict=True):
            event.record(way)
        return events

    def rate_after(self, done: list[torch.cuda.Event]) -> float:
        """Waits for what `queue` started: bytes/s of the slower direction."""
        for event in done:
            event.synchronize()
        milliseconds = max(begun.elapsed_time(end) for begun, end in zip(self.begun, done, strict=True))
        return self.count * self.num_bytes / (milliseconds / 1e3)


@contextmanager
def updating(update: HostUpdate) -> Iterator[None]:
    """``update`` runs with the runtime's threads, again and again, until the block ends; raises what it failed with."""
    enough = threading.Event()

    def run() -> None:
        while not enough.is_set():
            update()

    update()  # the first makes threads, and touches the memory
    with ThreadPoolExecutor(1, thread_name_prefix="measured-updates") as thread:
        task = thread.submit(run)
        try:
            yield
        finally:
            enough.set()
            task.result()
