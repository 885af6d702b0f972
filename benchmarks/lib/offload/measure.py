"""The process of one system: builds it, trains, measures. Started by bench_offload.py, a fork for each case.

What it has to say goes to standard output as lines that begin with ``@ `` and hold JSON; anything else is other
people's chatter. The loop is that of a careful user, for every system: tokens come from pinned memory and are sent one
step before they are needed, a loss is read while the next step runs, both on a separate stream. Step times are the
intervals between events on the computing stream after each step (on a CPU: between the moments at which the calls
return). Work that runs on after the step (updates under the next forward) is in the next interval; the *drained* rate
covers all measured steps between two moments at which nothing at all was under way. The rate is that of the median
step; of steps of which some clip and others do not, that of all of them.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import psutil
import torch

from benchmarks.lib.child_process import MemoryWatch, answer, say
from benchmarks.lib.offload.case import Case, Result
from benchmarks.lib.offload.data import token_batches
from benchmarks.lib.offload.loop import Clock, Feed
from benchmarks.lib.offload.systems import System, attention_kernels
from vblackwell.machine.device import cap_process, make_deterministic, use_expandable_segments
from vblackwell.train.trainer import send_back

# What slow steps leave of the warm-up: pages of host memory come for ten seconds, and weights get what steps leave of
# the GPU after five of them.
WARM_SECONDS, WARM_STEPS = 12.0, 6


def builder_of(system: str) -> Callable[[Case, torch.device], System]:
    """The function that builds a system. Others' packages are imported only where they are asked for."""
    if system in ("fsdp2", "deepspeed"):
        from benchmarks.lib.offload import peers as module
    else:
        from benchmarks.lib.offload import systems as module
    return getattr(module, f"build_{system}")


class Run:
    """One built system and what is needed to train it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.watch = MemoryWatch(0.2)
        self.device = torch.device("cuda", 0) if case.device == "cuda" else torch.device("cpu")
        self.cuda = self.device.type == "cuda"
        self.gpu_used = 0
        if case.deterministic:
            make_deterministic(self.device)
        if self.cuda:
            torch.cuda.init()  # is no part of what building takes
            if case.system != "lines":  # whose stack asks for them, as a user's does
                use_expandable_segments()
            if case.cap_bytes is not None:
                cap_process(self.device, case.cap_bytes)
        began = time.perf_counter()
        self.system = builder_of(case.system)(case, self.device)
        self.synchronize()
        self.build_seconds = time.perf_counter() - began
        self.began = began if self.system.began is None else self.system.began
        say("phase", text=f"built in {self.build_seconds:.1f} s, {since_start():.1f} s after the process began")

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def drain(self) -> float:
        """Wait until nothing is under way; the time."""
        self.system.finish()
        self.synchronize()
        return time.perf_counter()

    def forget_peaks(self) -> None:
        """Peaks count from here."""
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        self.gpu_used = 0

    def step(self, ids_BS: torch.Tensor, number: int) -> Callable[[], float]:
        """One step on tokens that are on the device; its loss, on the way to the host."""
        loss = send_back(self.system.step(ids_BS, self.case.rate_at(number), self.case.accumulation))
        if self.cuda:
            free, total = torch.cuda.mem_get_info(self.device)
            self.gpu_used = max(self.gpu_used, total - free)
        return loss

    def fill_memory(self, result: Result) -> None:
        """The columns about bytes."""
        level = self.system.stats()["levels"] if self.system.stats is not None else []
        host_levels = sum(each["peak_bytes"] for each in level[1:] if each["device"] == "cpu")
        result.level0_peak = level[0]["peak_bytes"] if level else None
        result.host_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        result.host_used = self.watch.growth()[1]
        if self.cuda:
            result.peak_reserved = torch.cuda.max_memory_reserved(self.device)
            result.peak_allocated = torch.cuda.max_memory_allocated(self.device)
            result.gpu_used = self.gpu_used
            result.pinned = host_levels + int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def since_start() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()


def links_of(system: System) -> dict[str, tuple[int, float]]:
    """Bytes and seconds so far, by 'source>destination'."""
    if system.stats is None:
        return {}
    found: dict[str, tuple[int, float]] = {}
    for link in system.stats()["links"]:
        name = f"{link['source']}>{link['destination']}"
        held = found.get(name, (0, 0.0))
        found[name] = (held[0] + link["bytes"], held[1] + link["seconds"])
    return found


def updates_of(system: System) -> tuple[int, float]:
    """Parameters that the CPU has updated so far, and the seconds in which it did."""
    found = {"parameters": 0, "seconds": 0.0} if system.stats is None else system.stats()["host_updates"]
    return found["parameters"], found["seconds"]


def stalls_of(system: System) -> float:
    """Seconds that the main thread has waited for bytes so far."""
    return 0.0 if system.stats is None else system.stats()["stall_seconds"]


def train(run: Run) -> Result:
    """The case's steps, measured after its warm-up, which ends sooner where that has taken long enough."""
    case, system = run.case, run.system
    batch, seq, warmup, steps = case.batch * case.accumulation, case.seq, case.warmup, case.steps
    batches = token_batches(case.decoder.vocab_size, batch, seq, warmup + steps, case.seed, case.bad_every)
    result = Result(case.system, tokens=batch * seq, build_seconds=run.build_seconds, notes=list(system.notes))
    result.max_grad_norm = case.max_grad_norm
    run.drain()
    run.forget_peaks()
    links: dict[str, tuple[int, float]] = {}
    updates = 0, 0.0
    stalls, clock, first = 0.0, Clock(run.device), warmup  # the number of the first measured step
    begun = warm = time.perf_counter()
    waiting: list[tuple[Callable[[], float], Any]] = []

    def read_oldest() -> None:
        read, norm = waiting.pop(0)
        loss = read()
        norm = None if norm is None else float(norm)
        result.losses.append(loss)
        if norm is not None:
            result.grad_norms.append(norm)
        number = len(result.losses)
        if number == 1:
            result.first_step_seconds = time.perf_counter() - run.began
        say("step", step=number, of=warmup + steps, loss=loss, norm=norm, since_start=since_start())

    for number, ids_BS in enumerate(Feed(batches, run.device)):
        if number == 1:
            warm = time.perf_counter() + WARM_SECONDS * case.accumulation
        elif WARM_STEPS <= number < first and time.perf_counter() > warm and not case.ends_badly(number):
            first = number
        if number == first + steps:
            break
        if number == first:
            while waiting:
                read_oldest()
            begun = run.drain()
            links, stalls, clock = links_of(system), stalls_of(system), Clock(run.device)
            updates = updates_of(system)
            clock.mark()
        late = run.step(ids_BS, number)
        clock.mark()
        waiting.append((late, system.grad_norm()))
        while len(waiting) > 1 or (waiting and number == 0):
            read_oldest()
    ended = run.drain()
    while waiting:
        read_oldest()
    if first != warmup:
        result.notes.append(f"warmed up for {first} steps, {WARM_SECONDS * case.accumulation:.0f} s")
    if case.max_grad_norm is not None and result.grad_norms:
        clipped = sum(norm > case.max_grad_norm for norm in result.grad_norms[-steps:])
        result.clipped_share = clipped / steps
        result.notes.append(f"{clipped} of {steps} measured steps clipped")
    _fill_rates(result, clock.intervals(), ended - begun)
    for name, (num_bytes, seconds) in links_of(system).items():
        before = links.get(name, (0, 0.0))
        result.link_bytes[name] = (num_bytes - before[0]) / steps
        result.link_busy[name] = (seconds - before[1]) / (ended - begun)
    count, busy = (now - before for now, before in zip(updates_of(system), updates, strict=True))
    if count:
        each, share, rate = count / steps / 1e9, busy / (ended - begun), count / busy / 1e9
        result.notes.append(
            f"the CPU updates {each:.2f} G parameters a step, {share:.0%} of the time at {rate:.2f} G/s"
        )
    result.notes += filter(None, [system.about()])
    if system.stats is not None:
        result.stall_share = (stalls_of(system) - stalls) / (ended - begun)
    run.fill_memory(result)
    return result


def _fill_rates(result: Result, step_seconds: list[float], seconds: float) -> None:
    result.step_seconds = step_seconds
    typical = statistics.fmean if 0 < (result.clipped_share or 0) < 1 else statistics.median
    result.tokens_per_second = result.tokens / typical(result.step_seconds)
    result.drained_tokens_per_second = result.tokens * len(result.step_seconds) / seconds


def main(argument: str) -> None:
    case = Case.from_json(argument)
    run = Run(case)
    with attention_kernels(case):
        say("result", result=asdict(train(run)))
    run.watch.end()


if __name__ == "__main__":
    answer(main)
