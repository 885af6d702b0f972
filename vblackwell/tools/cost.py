"""What running something costs: milliseconds by the host's clock, bytes at the peak beyond what torch held before, and
what the time went into, by the profiler: kernels on CUDA, and what none fills; operators' own time on the CPU.
"""

import gc
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

WAITING = "waiting for the host"
_OTHER = "elementwise and reductions"
_PRODUCTS = r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitk"
_PRODUCTS += r"|::(mm|addmm|bmm|baddbmm|matmul|linear|mkldnn\w*linear\w*)$"
# The first that matches names the kind: names of operators (CPU) and of kernels (CUDA), ours and others', in small
# letters.
_KINDS = {
    "FP4 layers": r"fp4|w4a8",
    "attention": r"attention|flash|fmha|sdpa|attend|query_gradient|key_gradient",
    "optimizer": r"adam",
    "matrix products": _PRODUCTS,
    "autograd": r"^autograd::|backward\d+$",  # walking the graph; what its nodes call counts as itself
    "copies": r"memcpy|memset|::(copy_|_to_copy|to|clone|contiguous)$",
}
_MEMORY = "[memory]"  # what torch calls an allocation among its events


@dataclass(frozen=True)
class Bottleneck:
    """Where the time of one run went: ``shares`` by kind of work, largest first, which add up to 1; the kernel or
    operator that took most within the first kind, empty where that is ``WAITING``, and its share.
    """

    shares: dict[str, float]
    name: str
    name_share: float

    @property
    def kind(self) -> str:
        """What took most."""
        return next(iter(self.shares), "nothing")


@dataclass(frozen=True)
class Measured:
    """A run's median milliseconds, the most bytes that it allocated at a time, where its time went, and the bytes of
    the model's parameters and buffers, where one was named.
    """

    milliseconds: float
    peak_bytes: int
    bottleneck: Bottleneck
    weight_bytes: int = 0


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, packed ones as packed; what is shared counts once."""
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def measure(
    run: Callable[[], Any], device: torch.device, repeats: int = 5, warmup: int = 1, holder: nn.Module | None = None
) -> Measured:
    """Calls ``run`` ``warmup + repeats + 1`` times; the last call is the profiled one."""
    for _ in range(warmup):
        run()
    synchronize(device)
    on_cuda, before = device.type == "cuda", 0
    if on_cuda:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    milliseconds = time_of(run, device, repeats, warmup=0)
    peak_on_cuda = torch.cuda.max_memory_allocated(device) - before if on_cuda else 0
    spent, peak_on_cpu = _profiled(run, device)
    if on_cuda:
        spent[WAITING] = max(0.0, milliseconds - sum(spent.values()))
    held = 0 if holder is None else weight_bytes(holder)
    return Measured(milliseconds, peak_on_cuda if on_cuda else peak_on_cpu, bottleneck_of(spent), held)


def time_of(run: Callable[[], Any], device: torch.device, repeats: int = 5, warmup: int = 1) -> float:
    """Median milliseconds of ``repeats`` calls after ``warmup`` others."""
    for _ in range(warmup):
        run()
    synchronize(device)
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        synchronize(device)
        found.append((time.perf_counter() - began) * 1e3)
    return statistics.median(found)


def synchronize(device: torch.device) -> None:
    """Waits for what was queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _profiled(run: Callable[[], Any], device: torch.device) -> tuple[dict[str, float], int]:
    """Milliseconds by name of what ran on ``device``, and the most that the CPU's allocator gave out at a time."""
    on_cuda, collects = device.type == "cuda", gc.isenabled()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    gc.disable()  # what was there before, freed inside, would hide as much of what is allocated
    try:
        # acc_events: torch 2.10 to 2.12 warn that cycles after the first would be lost (pytorch/pytorch#180387)
        with profile(activities=activities, profile_memory=not on_cuda, acc_events=True) as profiler:
            run()
            synchronize(device)
    finally:
        if collects:
            gc.enable()
    records: Any = profiler.profiler  # read itself: torch's tables of it take seconds, and lack allocations
    # An annotation is a named stretch of a program, such as an optimizer's step, and no work itself.
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    events = [
        event
        for event in records.kineto_results.events()
        if event.device_type() == kind and not event.is_user_annotation()
    ]
    calls = [
        Call(event.start_thread_id(), event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.name() != _MEMORY
    ]
    spent: dict[str, float] = defaultdict(float)
    lengths = ((call.name, call.end - call.start) for call in calls) if on_cuda else own_times(calls).items()
    for name, nanoseconds in lengths:
        spent[name] += nanoseconds / 1e6
    return spent, peak_of((event.start_ns(), event.nbytes()) for event in events if event.name() == _MEMORY)


class Call(NamedTuple):
    """One operator's run on one thread, in any unit of time."""

    thread: int
    start: int
    end: int
    name: str


def own_times(calls: Iterable[Call]) -> dict[str, int]:
    """Time by name, less that of the calls inside."""
    found: dict[str, int] = defaultdict(int)
    open_calls: list[Call] = []
    for call in sorted(calls, key=lambda each: (each.thread, each.start, -each.end)):
        while open_calls and (open_calls[-1].thread != call.thread or open_calls[-1].end <= call.start):
            open_calls.pop()
        found[call.name] += call.end - call.start
        if open_calls:
            found[open_calls[-1].name] -= min(call.end, open_calls[-1].end) - call.start
        open_calls.append(call)
    return dict(found)


def peak_of(changes: Iterable[tuple[int, int]]) -> int:
    """The highest sum, at least 0, of (time, bytes taken or, negative, given back), in the order of their times."""
    ordered = sorted(changes, key=lambda change: change[0])
    return max(accumulate((num_bytes for _, num_bytes in ordered), initial=0))


def kind_of(name: str) -> str:
    """The kind of work that a kernel or operator of this name does."""
    if name == WAITING:
        return WAITING
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name.lower())), _OTHER)


def bottleneck_of(spent: dict[str, float]) -> Bottleneck:
    """Shares by kind of times by name."""
    kinds: dict[str, float] = defaultdict(float)
    for name, milliseconds in spent.items():
        kinds[kind_of(name)] += milliseconds
    total = sum(kinds.values()) or 1.0
    shares = {kind: kinds[kind] / total for kind in sorted(kinds, key=lambda kind: -kinds[kind])}
    first = next(iter(shares), WAITING)
    if first == WAITING:
        return Bottleneck(shares, "", 0.0)
    name = max((name for name in spent if kind_of(name) == first), key=lambda each: spent[each])
    return Bottleneck(shares, name[:60], spent[name] / total)
