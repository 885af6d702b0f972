"""Plans of the attention kernels on masks, and launches of RMSNorm, timed beside each other; bench_attention.py --masks calls it.

``--masks SECONDS --prepare`` compiles in many processes, ``--masks SECONDS`` then times: each plan's outputs and gradients are first
compared with float64 on one head (`WORST` is the most that is right), then the forward, or the whole backward with one kernel by that
plan, is replayed from CUDA graphs in turns with the others; the number behind is how many times as fast as the shipped plan it is. Then
shipped and best plans together beside FlexAttention, its block mask given, and RMSNorm's launches as shares of the HBM's copy
rate. The table is printed at the end.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from attention_plans import PROCESSES, leaves_of, plan_of, say
from bench_ops import copy_rate
from graph_timing import graph_of, turns_us
from torch import Tensor

from vblackwell.kernels import attention_launch, rms_norm_triton
from vblackwell.kernels.attention import bounds
from vblackwell.kernels.attention_plan import KERNELS, AttentionPlan, plan_for
from vblackwell.nn.attention_backends import BACKENDS, Variant

Fields = tuple[int, ...]
# Relative error of an output or gradient that is still right: bf16 rounds to 2^-9, and gradients cancel to a few times that.
WORST = 2e-2
CASES = ("boolean random", "boolean documents", "boolean padding", "additive", "causal 128 S=8k")
# rows, columns, warps, stages, copy engine, registers, specialized, together
PLANS: dict[str, tuple[Fields, ...]] = {
    "forward": (
        (128, 128, 8, 2, 1), (128, 64, 8, 2, 1, 128), (128, 64, 4, 2, 1), (128, 64, 8, 3, 1), (128, 64, 8, 4, 1), (64, 64, 4, 2, 1),
        (128, 64, 8, 2, 1, 128, 0, 64),
    ),
    "dq": (
        (128, 64, 8, 2, 1), (128, 64, 8, 3, 1), (128, 64, 8, 4, 1), (64, 64, 4, 2, 1), (128, 32, 8, 2, 1, 128),
        (128, 64, 8, 3, 1, 0, 0, 64),
    ),
    "dkv": (
        (64, 128, 8, 2, 1), (64, 128, 8, 3, 1), (64, 64, 4, 2, 1), (64, 64, 4, 3, 1), (32, 128, 8, 3, 1),
        (64, 128, 8, 3, 1, 0, 0, 64),
    ),
}  # fmt: skip
# (programs, stages) of RMSNorm's loops; the first is how it was: a program a row, and two sets of rows on their way
NORMS = {
    "forward": ((1 << 30, 1), (528, 3), (528, 4), (528, 5), (1056, 3), (1056, 4), (264, 6)),
    "backward": ((264, 3), (264, 4), (264, 5), (264, 6), (396, 4), (528, 3), (132, 6)),
}


class Case:
    """Inputs of a case and what is asked of the kernels."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.q, self.k, self.v = (x.detach() for x in leaves_of(*case["shape"]))
        self.variant = Variant(**{name: value for name, value in case.items() if name in Variant._fields})
        mask = self.variant.mask
        length, head = case["shape"][3:]
        self.options = attention_launch.Options(
            None if mask is None else mask[(None,) * (4 - mask.dim())], None, None, None, None, length, length, head**-0.5,
            *bounds(self.variant.causal, None), False, 0.0, 0.0,
        )  # fmt: skip
        self.dout = torch.randn_like(self.q)
        batch, heads, _, _, _ = case["shape"]
        self.work = 4 * batch * heads * length**2 * head * (0.5 if self.variant.causal else 1.0)

    @property
    def kind(self) -> str:
        return self.options.mask_kind

    def forward(self) -> tuple[Tensor, Tensor]:
        return attention_launch.forward(self.q, self.k, self.v, self.options)

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return attention_launch.backward(self.dout, self.q, self.k, self.v, out, lse, self.options)

    def exact(self) -> tuple[Tensor, ...]:
        """Output and gradients of the last batch's last head, in float64."""
        q, k, v, dout = (x[-1:, -1:].double() for x in (self.q, self.k, self.v, self.dout))
        mask = self.variant.mask
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())][-1:, -1:]
            mask = mask.double() if mask.is_floating_point() else mask
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = BACKENDS["math"].run(q, k, v, self.variant._replace(mask=mask))
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    def error(self, exact: tuple[Tensor, ...]) -> float:
        """The largest relative error of output and gradients by the plans in use; inf for NaN."""
        out, lse = self.forward()
        got = (out, *self.backward(out, lse))
        worst = max(((a[-1:, -1:].double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True))
        finite = all(bool(x.isfinite().all()) for x in got)
        return worst if finite and worst == worst else float("inf")


def wanted_cases() -> dict[str, dict[str, Any]]:
    from bench_attention import cases

    return {name: case for name, case in cases(True).items() if name.startswith(CASES)}


def shipped(kernel: str, kind: str) -> Fields:
    """The plan in use for head width 128 on this GPU, as fields."""
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    plan = plan_for(kernel, 128, 2, most, kind)
    return fields_of(plan)


def fields_of(plan: AttentionPlan) -> Fields:
    return (
        plan.rows,
        plan.columns,
        plan.warps,
        plan.stages,
        int(plan.tma),
        plan.registers,
        int(plan.specialized),
        plan.together,
    )


def plans_of(kernel: str, kind: str) -> list[Fields]:
    """The shipped plan, and the others."""
    first = shipped(kernel, kind)
    # What runs together is a matter of masks.
    others = [fields_of(plan_of(fields)) for fields in PLANS[kernel] if kind != "none" or len(fields) < 8]
    return [first, *(fields for fields in others if fields != first)]


def compile_one(name: str, kernel: str, fields: Fields) -> str:
    """Compile by running once; "" or why it cannot run. In a process of its own."""
    try:
        case = Case(wanted_cases()[name])
        with attention_launch.use_plans(**{kernel: plan_of(fields)}):
            out, lse = case.forward()
            if kernel != "forward":
                case.backward(out, lse)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{error!r:.120}"
    return ""


def compile_flex(name: str) -> str:
    case = Case(wanted_cases()[name])
    both, _ = flex_calls(case)
    both()
    torch.cuda.synchronize()
    return ""


def compile_norm(which: str, programs: int, stages: int) -> str:
    with norm_launch(which, programs, stages):
        norm_calls()[which]()
    torch.cuda.synchronize()
    return ""


def prepare() -> None:
    """Compile everything in many processes; what cannot run is said."""
    wanted = wanted_cases()
    kinds = {
        name: "additive" if "additive" in name else "boolean" if "mask" in case else "none"
        for name, case in wanted.items()
    }
    jobs: list[tuple[Callable[..., str], tuple[Any, ...]]] = [
        (compile_flex, (name,)) for name in wanted if kinds[name] != "none"
    ]
    jobs += [
        (compile_one, (name, kernel, fields))
        for kernel in reversed(KERNELS) for name in wanted for fields in plans_of(kernel, kinds[name])
    ]  # fmt: skip
    jobs += [(compile_norm, (which, *launch)) for which, launches in NORMS.items() for launch in launches]
    with concurrent.futures.ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for (_, words), done in [(job, pool.submit(job[0], *job[1])) for job in jobs]:
            failure = repr(done.exception()) if done.exception() is not None else done.result()
            if failure:
                say(*words, "cannot run:", failure[:160])
    say("compiled", len(jobs), "launches")


def flex_calls(case: Case) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward and backward, and the forward alone, of FlexAttention with its block mask given."""
    from vblackwell.nn.attention_flex import block_mask, flex

    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    blocks = block_mask(leaves[0], leaves[1], case.variant)

    def forward() -> Tensor:
        return flex(leaves[0], leaves[1], leaves[2], case.variant, blocks)

    def alone() -> Tensor:
        with torch.no_grad():
            return forward()

    return lambda: torch.autograd.grad(forward(), leaves, case.dout), alone


def time_case(name: str, case: Case, until: float) -> list[str]:
    """Lines of the table: plans of each kernel, those that are right timed in turns, then FlexAttention."""
    exact, lines, title = case.exact(), [], name.removeprefix("boolean ")
    best: dict[str, Fields] = {}
    # What the graphs of backwards read must live as long as they: a capture gives freed memory back to the driver.
    out, lse = case.forward()
    for kernel in KERNELS:
        calls: dict[Fields, torch.cuda.CUDAGraph] = {}
        for fields in plans_of(kernel, case.kind):
            if time.perf_counter() > until:
                return [*lines, f"{name}: no time left for {kernel} {fields}"]
            with attention_launch.use_plans(**{kernel: plan_of(fields)}):
                try:
                    error = case.error(exact)
                    if not error <= WORST:
                        lines.append(f"{title:16} {kernel:7} {fields!s:32} WRONG: error {error:.3g}")
                        continue
                    call = case.forward if kernel == "forward" else lambda: case.backward(out, lse)
                    calls[fields] = graph_of([call] * 2)
                except Exception as failure:
                    torch.cuda.synchronize()
                    lines.append(f"{title:16} {kernel:7} {fields!s:32} cannot run: {failure!r:.60}")
        if not calls:
            continue
        times = {fields: us / 2 for fields, us in zip(calls, turns_us(list(calls.values()), 5), strict=True)}
        first, best[kernel] = next(iter(times)), min(times, key=lambda fields: times[fields])
        for fields, us in times.items():
            rate = case.work * (1 if kernel == "forward" else 2.5) / us / 1e6
            said = " shipped" * (fields == shipped(kernel, case.kind)) + " BEST" * (fields == best[kernel])
            lines.append(
                f"{title:16} {kernel:7} {fields!s:32} {us:8.1f} us {rate:5.0f} TFLOP/s {times[first] / us:6.3f}{said}"
            )
        del calls
    lines += summary(name, case, best, until)
    for line in lines:
        say(line)
    torch.cuda.empty_cache()
    return lines


def summary(name: str, case: Case, best: dict[str, Fields], until: float) -> list[str]:
    """The shipped and the best plans together beside FlexAttention, in turns."""
    title = name.removeprefix("boolean ")
    out, lse = case.forward()
    graphs = {"shipped": (graph_of([case.forward]), graph_of([lambda: case.backward(out, lse)]))}
    with attention_launch.use_plans(**{kernel: plan_of(fields) for kernel, fields in best.items()}):
        graphs["best"] = (graph_of([case.forward]), graph_of([lambda: case.backward(out, lse)]))
    if case.kind != "none" and time.perf_counter() < until:
        try:
            both, alone = flex_calls(case)
            graphs["flex"] = (graph_of([alone]), graph_of([both]))
        except Exception as failure:
            torch.cuda.synchronize()
            say(name, "flex cannot run:", f"{failure!r:.120}")
    forward = dict(zip(graphs, turns_us([pair[0] for pair in graphs.values()], 5), strict=True))
    backward = dict(zip(graphs, turns_us([pair[1] for pair in graphs.values()], 5), strict=True))
    if "flex" in graphs:
        backward["flex"] -= forward["flex"]
    lines = []
    for system in graphs:
        over = ""
        if "flex" in graphs:
            over = f"  over flex {forward['flex'] / forward[system]:.3f} {backward['flex'] / backward[system]:.3f}"
        lines.append(
            f"{title:16} {system:7} forward {forward[system]:8.1f} us, backward {backward[system]:8.1f} us{over}"
        )
    return lines


@contextlib.contextmanager
def norm_launch(which: str, programs: int, stages: int) -> Iterator[None]:
    """Inside, RMSNorm's ``which`` runs by so many programs and at most so many stages."""
    names = (f"{which.upper()}_PROGRAMS", f"{which.upper()}_STAGES")
    kept = [getattr(rms_norm_triton, name) for name in names]
    for name, value in zip(names, (programs, stages), strict=True):
        setattr(rms_norm_triton, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, kept, strict=True):
            setattr(rms_norm_triton, name, value)


def norm_calls() -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Forward and backward of 16384 rows of 2560 in bf16."""
    torch.manual_seed(0)
    x, dy = (torch.randn(16384, 2560, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(2560, device="cuda").bfloat16()
    _, _, scale = rms_norm_triton.forward(x, None, weight, 1e-5)
    return {
        "forward": lambda: rms_norm_triton.forward(x, None, weight, 1e-5),
        "backward": lambda: rms_norm_triton.backward(dy, None, x, weight, scale, True),
    }


def time_norms() -> list[str]:
    """A line a launch of RMSNorm: us, and the share of the HBM's copy rate; first whether it gives what the others give."""
    rate = copy_rate() / 1e6  # bytes a us
    lines, calls = [], norm_calls()
    for which, launches in NORMS.items():
        graphs: dict[Fields, torch.cuda.CUDAGraph] = {}
        expected = calls[which]()
        for launch in launches:
            with norm_launch(which, *launch):
                got = calls[which]()
                # The weight's gradient alone depends on how rows are shared out: fp32 sums, rounded once to bf16.
                if not all(torch.allclose(a, b, rtol=2**-7, atol=1e-3) for a, b in zip(got, expected, strict=True)):
                    lines.append(f"rms_norm {which} {launch} WRONG")
                    continue
                graphs[launch] = graph_of([calls[which]] * 8)
        moved = (2 if which == "forward" else 3) * 16384 * 2560 * 2
        for launch, us in zip(graphs, turns_us(list(graphs.values()), 7), strict=True):
            lines.append(
                f"rms_norm {which:8} programs, stages {launch!s:18} {us / 8:7.2f} us  {moved / (us / 8) / rate:.3f} of the HBM rate"
            )
    return lines


def time_all(seconds: float) -> None:
    """The whole table; no plan is begun later than ``seconds`` from now."""
    until = time.perf_counter() + seconds
    norms, lines = time_norms(), []
    say("\n" + "\n".join(norms))
    for name, case in wanted_cases().items():
        lines += time_case(name, Case(case), until)
    print("\n".join([*lines, *norms]))
