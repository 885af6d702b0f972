"""The own forward by several plans, checked and then timed beside the others; ``bench_attention.py --forwards SECONDS`` calls it.

First every plan runs every case once, in many processes, which compiles it: its output is compared with float64 on one head (`WORST` is
the most that is right) and computed twice, which must give the same bits. Then those that are right are replayed from CUDA graphs in
turns with what they are measured against: FlexAttention with its block mask given, PyTorch's flash and cuDNN. A line is printed when it
is known, and all again at the end; what fails says so and costs its own line. There are about as many plans and cases as processes.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from attention_plans import PROCESSES, leaves_of, plan_of, say
from attention_report import WORST
from graph_timing import Replay, graph_of, turns_us
from torch import Tensor

from vblackwell.kernels.attention import launch as attention_launch
from vblackwell.kernels.attention.op import bounds
from vblackwell.kernels.attention.plan import SPECIALIZED, AttentionPlan, padded_head, plan_for
from vblackwell.nn.attention.backends import BACKENDS, Variant

Fields = tuple[int, ...]
# In the order of their worth: a run may be cut short.
CASES = (
    "additive S=4k", "boolean random S=4k", "boolean padding S=4k", "boolean documents S=8k", "causal 128 S=8k", "causal 64 S=8k",
)  # fmt: skip
# Beside the shipped plan of the Triton forward and the one with specialised warps:
# rows, columns, warps, stages, copy engine, registers, specialized, together, ahead
PLANS: dict[str, tuple[Fields, ...]] = {
    "additive": ((128, 64, 8, 3, 1, 0, 0, 16, 1),),
    "boolean": ((128, 64, 8, 3, 1, 0, 0, 16, 1),),
    "none": ((128, 128, 4, 2, 1, 168, 1),),
}


class Case:
    """Inputs of a case and what is asked of the kernels."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.q, self.k, self.v = (x.detach() for x in leaves_of(*case["shape"]))
        self.variant = Variant(**{name: value for name, value in case.items() if name in Variant._fields})
        mask = self.variant.mask
        batch, heads, _, length, self.head = case["shape"]
        self.options = attention_launch.Options(
            None if mask is None else mask[(None,) * (4 - mask.dim())], None, None, None, None, length, length, self.head**-0.5,
            *bounds(self.variant.causal, self.variant.window), False, 0.0, 0.0,
        )  # fmt: skip
        self.work = 4 * batch * heads * length**2 * self.head * (0.5 if self.variant.causal else 1.0)

    def forward(self, fields: Fields) -> Tensor:
        with attention_launch.use_plans(forward=plan_of(fields)):
            return attention_launch.forward(self.q, self.k, self.v, self.options)[0]

    def error(self, fields: Fields) -> float:
        """Relative error of the last batch's last head; inf for NaN or bits that differ from run to run."""
        q, k, v = (x[-1:, -1:].double() for x in (self.q, self.k, self.v))
        mask = self.options.mask
        if mask is not None:
            mask = mask[-1:, -1:]
            mask = mask.double() if mask.is_floating_point() else mask
        exact = BACKENDS["math"].run(q, k, v, self.variant._replace(mask=mask))
        got, again = self.forward(fields), self.forward(fields)
        error = ((got[-1:, -1:].double() - exact).norm() / exact.norm()).item()
        return error if bool(got.isfinite().all()) and torch.equal(got, again) else float("inf")

    def plans(self) -> list[Fields]:
        """The shipped plan of the Triton forward, the one with specialised warps, and others."""
        kind = self.options.mask_kind
        most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        width = max(64, padded_head(self.head))
        found = [fields_of(plan_for("forward", self.head, 2, most, kind)), fields_of(SPECIALIZED[width])]
        found += [fields_of(plan_of(fields)) for fields in PLANS[kind]]
        return list(dict.fromkeys(found))

    def others(self) -> dict[str, Callable[[], object]]:
        """What it is measured against."""
        if self.variant.mask is None and self.variant.window is None:
            return {name: functools.partial(self.run, name) for name in ("flash", "cudnn")}
        return {"flex": self.flex}

    def run(self, system: str) -> Tensor:
        return BACKENDS[system].run(self.q, self.k, self.v, self.variant)

    @functools.cached_property
    def blocks(self) -> Any:
        from flex_peer import block_mask

        return block_mask(self.q, self.k, self.variant)

    def flex(self) -> Tensor:
        from flex_peer import flex

        return flex(self.q, self.k, self.v, self.variant, self.blocks)


def fields_of(plan: AttentionPlan) -> Fields:
    numbers = (plan.rows, plan.columns, plan.warps, plan.stages, plan.tma, plan.registers, plan.specialized)
    return (*map(int, numbers), plan.together, int(plan.ahead))


def wanted_cases(only: str = "") -> dict[str, dict[str, Any]]:
    """`CASES`, or those of the quick ones whose name has ``only``."""
    from bench_attention import cases

    found = cases(True)
    return {name: found[name] for name in (CASES if not only else found) if only in name}


def check_one(name: str, fields: Fields) -> str:
    """Compile by running once; "" or what is wrong. In a process of its own."""
    try:
        torch.manual_seed(0)
        case = Case(wanted_cases(name)[name])
        error = case.error(fields)
        torch.cuda.empty_cache()  # there are many processes
        return "" if error <= WORST else f"WRONG: error {error:.3g}"
    except Exception as failure:
        return f"cannot run: {failure!r:.160}"


def check(wanted: dict[str, dict[str, Any]]) -> dict[tuple[str, Fields], str]:
    """`check_one` of every plan and case, a line each."""
    plans = {name: Case(case).plans() for name, case in wanted.items()}
    torch.cuda.empty_cache()
    jobs = [(name, fields) for name, found in plans.items() for fields in found]
    found = {}
    with concurrent.futures.ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(check_one, *job): job for job in jobs}
        for done in concurrent.futures.as_completed(running):
            job = running[done]
            found[job] = repr(done.exception())[:160] if done.exception() is not None else done.result()
            say(*job, found[job] or "right")
    return found


def time_case(name: str, case: Case, checked: dict[tuple[str, Fields], str], rounds: int) -> list[str]:
    """Lines of a case: us of every plan that is right, and how many times as long the others take."""
    lines: list[str] = []
    graphs: dict[str, Replay] = {}
    calls: dict[str, Callable[[], object]] = {}
    for fields in case.plans():
        said = "special " * fields[6] + str(fields)
        if wrong := checked.get((name, fields), ""):
            lines.append(f"{name:24} {said:44} {wrong}")
        else:
            calls[said] = functools.partial(case.forward, fields)
    for system, call in {**calls, **case.others()}.items():
        try:
            graphs[system] = graph_of([call] * 2)
        except Exception as failure:
            lines.append(f"{name:24} {system:44} cannot run: {failure!r:.100}")
            torch.cuda.synchronize()  # where a kernel has broken the context this fails, and nothing else could run
    times = {system: us / 2 for system, us in zip(graphs, turns_us(list(graphs.values()), rounds), strict=True)}
    others = [system for system in times if system not in calls]
    for system, us in times.items():
        over = "  ".join(f"over {other} {times[other] / us:.3f}" for other in others) if system in calls else ""
        lines.append(f"{name:24} {system:44} {us:8.1f} us {case.work / us / 1e6:5.0f} TFLOP/s  {over}")
    for line in lines:
        say(line)
    return lines


def time_all(seconds: float, only: str) -> None:
    """The whole table, or of cases whose name has ``only``; no case is begun later than ``seconds`` from now."""
    wanted = wanted_cases(only)
    until = time.perf_counter() + seconds
    lines: list[str] = []
    checked = check(wanted)
    try:
        for name, case in wanted.items():
            if time.perf_counter() > until:
                lines.append(f"{name}: no time left")
                continue
            try:
                lines += time_case(name, Case(case), checked, 9)
            except Exception as failure:
                lines.append(f"{name} failed: {failure!r:.160}")
                torch.cuda.synchronize()  # a broken context: the table so far is printed, and this is raised
            torch.cuda.empty_cache()
    finally:
        print("\n".join(lines))
