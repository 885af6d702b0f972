"""Times of the attention kernels' plans on this GPU; bench_attention.py calls it.

Plans are compiled by many processes at once, each running one small, so that the timing process finds them in Triton's
cache.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.lib.kernels.graph_timing import graph_us
from vblackwell.kernels.attention import launch as attention_launch
from vblackwell.kernels.attention.op import bounds
from vblackwell.kernels.attention.plan import AttentionPlan

STARTED = time.perf_counter()
# Said, because inductor else names another folder when it first compiles, and what other processes prepared is not
# found from then on.
os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
PROCESSES = 14


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f}s]", *words, flush=True)


def time_us(call: Callable[[], object]) -> float:
    """Median time of ``call`` in us, replayed from a CUDA graph."""
    return graph_us([call], 7)


def leaves_of(batch: int, heads: int, kv_heads: int, length: int, head: int) -> list[Tensor]:
    """Queries, keys and values (B, N, S, H) as views of (B, S, N, H), which is how projections give them."""
    return [
        torch.randn(batch, length, n, head, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


# rows, columns, warps, stages, copy engine, registers; the shipped plan first. Behind it those that, by their registers
# and shared memory, put two or more programs on a multiprocessor, so that one computes products while another is at its
# exponentials (docs/journal/attention.md).
SWEEP = {
    (128, "forward"): (
        (128, 128, 8, 2, 1), (128, 64, 8, 2, 1, 128), (64, 64, 4, 2, 1), (64, 64, 4, 3, 1), (128, 32, 8, 3, 1),
        (128, 64, 8, 3, 1),
        (128, 128, 8, 3, 1), (64, 128, 4, 2, 1), (128, 128, 8, 2, 0), (128, 64, 8, 4, 1),
    ),
    (64, "forward"): (
        (128, 128, 8, 3, 1), (128, 128, 8, 2, 1, 128), (128, 64, 8, 3, 1), (128, 64, 8, 2, 1), (128, 64, 4, 3, 1),
        (64, 128, 4, 2, 1),
        (64, 64, 4, 3, 1), (128, 128, 8, 2, 1),
    ),
    (128, "dq"): (
        (128, 64, 8, 3, 1), (64, 64, 4, 2, 1), (128, 32, 8, 2, 1, 128), (64, 32, 4, 2, 1), (128, 64, 8, 2, 1),
        (64, 128, 4, 2, 1),
        (128, 64, 8, 3, 0),
    ),
    (128, "dkv"): (
        (64, 128, 8, 3, 1), (64, 64, 4, 2, 1), (32, 64, 4, 2, 1), (32, 128, 8, 3, 1), (64, 128, 8, 2, 1),
        (64, 64, 8, 3, 1),
        (64, 128, 8, 3, 0),
    ),
    (64, "dq"): (
        (128, 64, 8, 3, 1), (64, 64, 4, 3, 1), (64, 64, 4, 2, 1), (128, 32, 8, 3, 1), (64, 128, 4, 2, 1),
        (128, 64, 4, 2, 1),
        (128, 128, 8, 2, 1),
    ),
    (64, "dkv"): (
        (64, 128, 8, 3, 1), (64, 64, 4, 2, 1), (128, 64, 4, 2, 1), (64, 128, 8, 2, 1, 128), (64, 64, 4, 3, 1),
        (64, 128, 4, 2, 1),
        (128, 128, 8, 2, 1),
    ),
}  # fmt: skip


def plan_of(fields: tuple[int, ...]) -> AttentionPlan:
    """The plan of (rows, columns, warps, stages, copy engine, registers); the last may be left out."""
    rows, columns, warps, stages, tma, registers = (*fields, 0)[:6]
    return AttentionPlan(rows, columns, warps, stages, bool(tma), registers)


def compile_plan(head: int, kernel: str, fields: tuple[int, ...]) -> str:
    """Compile a plan's kernel by running it small; "" or why it cannot run. In a process of its own."""
    try:
        q, k, v = (x.detach() for x in leaves_of(1, 16, 16, 512, head))
        options = attention_launch.Options(
            None, None, None, None, None, 512, 512, head**-0.5, *bounds(True, None), False, 0.0, 0.0
        )
        with attention_launch.use_plans(**{kernel: plan_of(fields)}):
            out, lse = attention_launch.forward(q, k, v, options)
            attention_launch.backward(out, q, k, v, out, lse, options)
            torch.cuda.synchronize()
    except Exception as error:
        return f"{error!r:.120}"
    return ""


def time_plan(head: int, kernel: str, plan: AttentionPlan) -> float:
    """us of the forward or of the whole backward with one kernel by ``plan``."""
    q, k, v = (x.detach() for x in leaves_of(2, 2048 // head, 2048 // head, 8192, head))
    options = attention_launch.Options(
        None, None, None, None, None, 8192, 8192, head**-0.5, *bounds(True, None), False, 0.0, 0.0
    )
    out, lse = attention_launch.forward(q, k, v, options)
    with attention_launch.use_plans(**{kernel: plan}):
        if kernel == "forward":
            return time_us(lambda: attention_launch.forward(q, k, v, options))
        return time_us(lambda: attention_launch.backward(out, q, k, v, out, lse, options))


def sweep(seconds: float) -> list[str]:
    """Times of plans at causal S = 8k, a kernel at a time, the others as they are."""
    jobs = [(head, kernel, fields) for (head, kernel), plans in SWEEP.items() for fields in plans]
    with concurrent.futures.ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        failures = list(pool.map(compile_plan, *zip(*jobs, strict=True)))
    say("compiled", len(jobs), "plans")
    until, lines = time.perf_counter() + seconds, []
    times: dict[tuple[int, str], dict[tuple[int, ...], float]] = {case: {} for case in SWEEP}
    for (head, kernel, fields), failure in zip(jobs, failures, strict=True):
        if failure or time.perf_counter() > until:
            lines.append(f"{head} {kernel} {fields}: {failure or 'no time left'}")
            continue
        try:
            us = time_plan(head, kernel, plan_of(fields))
        except Exception as error:
            lines.append(f"{head} {kernel} {fields}: {error!r:.120}")
            continue
        times[head, kernel][fields] = us
        work = 4 * 2 * 2048 * 8192**2 * 0.5 * (1 if kernel == "forward" else 2.5)
        lines.append(f"{head} {kernel:8} {fields!s:28} {us:9.1f} us  {work / us / 1e6:6.0f} TFLOP/s")
        say(lines[-1])
    return [*lines, "", *best_of(times)]


def best_of(times: dict[tuple[int, str], dict[tuple[int, ...], float]]) -> list[str]:
    """A line a kernel: the shipped plan, the fastest, and what it gains (of the whole backward, for its two
    kernels).
    """
    lines = []
    for (head, kernel), found in times.items():
        shipped = SWEEP[head, kernel][0]
        if shipped in found:
            best = min(found, key=lambda fields: found[fields])
            gain = found[shipped] / found[best]
            lines.append(
                f"best {head:3} {kernel:8} shipped {shipped!s:24} fastest {best!s:28} {gain:.3f} times as fast"
            )
    return lines
