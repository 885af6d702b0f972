"""Plans of the attention kernels on masks, and launches of RMSNorm, timed beside each other; bench_attention.py --masks calls it.

``--masks SECONDS --prepare`` compiles in many processes, ``--masks SECONDS`` then times: each plan's outputs (of the backward, gradients)
are first compared with float64 on one head (`WORST` is the most that is right), and computed twice, which must give the same bits.
Then the forward, or the whole backward with one kernel by that plan, is replayed from CUDA graphs in turns with the others; the number
behind is how many times as fast as the shipped plan it is. Then shipped and best plans together beside FlexAttention, its block mask
given. Forwards of all cases come first, then backwards, then RMSNorm's launches as shares of the HBM's copy rate. A line is printed
when it is known, and all again at the end; what fails says so and costs its own line.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
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
CASES = ("additive", "boolean random", "boolean padding", "boolean documents", "causal 128 S=8k")
# rows, columns, warps, stages, copy engine, registers, specialized, together, ahead
PLANS: dict[str, tuple[Fields, ...]] = {
    "forward": (
        (128, 64, 8, 3, 1, 0, 0, 16, 1), (128, 64, 8, 3, 1), (128, 64, 4, 2, 1), (128, 64, 8, 2, 1, 0, 0, 16, 1),
        (128, 64, 8, 4, 1, 0, 0, 16, 1), (128, 128, 8, 2, 1),
        (128, 64, 8, 3, 1, 0, 0, 64, 1), (64, 64, 4, 2, 1, 0, 0, 16, 1),
    ),
    "dq": ((128, 64, 8, 3, 1), (128, 64, 8, 4, 1), (128, 64, 8, 3, 1, 0, 0, 64)),
    "dkv": ((64, 128, 8, 3, 1), (64, 64, 4, 2, 1), (64, 64, 4, 3, 1), (64, 128, 8, 3, 1, 0, 0, 64)),
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

    @functools.cached_property
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

    def error(self, kernel: str) -> float:
        """The largest relative error of what ``kernel`` is for, by the plans in use; inf for NaN or bits that differ from run to run."""

        def run() -> tuple[Tensor, ...]:
            out, lse = self.forward()
            return (out, lse) if kernel == "forward" else self.backward(out, lse)

        got, again = run(), run()
        exact = self.exact[:1] if kernel == "forward" else self.exact[1:]
        worst = max(((a[-1:, -1:].double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=False))
        finite = all(bool(x.isfinite().all()) for x in got)
        same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        return worst if finite and same and worst == worst else float("inf")


def wanted_cases() -> dict[str, dict[str, Any]]:
    from bench_attention import cases

    found = cases(True)
    return {name: found[name] for start in CASES for name in found if name.startswith(start)}


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
        int(plan.ahead),
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
        for kernel in KERNELS for name in wanted for fields in plans_of(kernel, kinds[name])
        if "documents" not in name  # the kernels are those of random masks
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


def time_kernel(name: str, case: Case, kernel: str, until: float) -> tuple[list[str], Fields | None]:
    """Lines of the table: plans of a kernel, those that are right timed in turns; and the fastest."""
    lines, title = [], name.removeprefix("boolean ")
    calls: dict[Fields, torch.cuda.CUDAGraph] = {}

    def line(fields: Fields, *words: object) -> None:
        lines.append(f"{title:16} {kernel:7} {fields!s:36} {' '.join(map(str, words))}")
        say(lines[-1])

    # What the graphs of backwards read must live as long as they: a capture gives freed memory back to the driver.
    out, lse = case.forward()
    for fields in plans_of(kernel, case.kind):
        if time.perf_counter() > until:
            line(fields, "no time left")
            break
        with attention_launch.use_plans(**{kernel: plan_of(fields)}):
            try:
                error = case.error(kernel)
                if not error <= WORST:
                    line(fields, f"WRONG: error {error:.3g}")
                    continue
                call = case.forward if kernel == "forward" else lambda: case.backward(out, lse)
                calls[fields] = graph_of([call] * 2)
                say(f"{title} {kernel} {fields} error {error:.2e}, alone {turns_us([calls[fields]], 3)[0] / 2:.1f} us")
            except Exception as failure:
                line(fields, f"cannot run: {failure!r:.60}")
                torch.cuda.synchronize()  # where a kernel has broken the context this fails, and nothing else could run
    if not calls:
        return lines, None
    times = {fields: us / 2 for fields, us in zip(calls, turns_us(list(calls.values()), 5), strict=True)}
    first, best = next(iter(times)), min(times, key=lambda fields: times[fields])
    for fields, us in times.items():
        rate = case.work * (1 if kernel == "forward" else 2.5) / us / 1e6
        said = " shipped" * (fields == shipped(kernel, case.kind)) + " BEST" * (fields == best)
        line(fields, f"{us:8.1f} us {rate:5.0f} TFLOP/s {times[first] / us:6.3f}{said}")
    return lines, best


def summary(name: str, case: Case, best: dict[str, Fields], direction: str) -> list[str]:
    """The shipped and the best plans together beside FlexAttention, in turns, ``direction`` being forward or backward."""
    title, back = name.removeprefix("boolean "), direction == "backward"
    out, lse = case.forward()

    def own() -> object:
        return case.backward(out, lse) if back else case.forward()

    graphs = {"shipped": graph_of([own])}
    with attention_launch.use_plans(**{kernel: plan_of(fields) for kernel, fields in best.items()}):
        graphs["best"] = graph_of([own])
    if case.kind != "none":
        try:
            both, alone = flex_calls(case)
            graphs["flex"] = graph_of([alone])
            if back:
                graphs["flex both"] = graph_of([both])
        except Exception as failure:
            say(name, "flex cannot run:", f"{failure!r:.120}")
            torch.cuda.synchronize()
    times = dict(zip(graphs, turns_us(list(graphs.values()), 5), strict=True))
    if "flex both" in times:
        times["flex"] = times.pop("flex both") - times["flex"]
    elif back:
        times.pop("flex", None)
    lines = []
    for system, us in times.items():
        over = f"  flex takes {times['flex'] / us:.3f} times as long" if "flex" in times else ""
        lines.append(f"{title:16} {direction:8} {system:7} {us:8.1f} us{over}")
        say(lines[-1])
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
            say(lines[-1])
    return lines


def time_all(seconds: float) -> None:
    """The whole table; no plan, summary or RMSNorm is begun later than ``seconds`` from now."""
    until = time.perf_counter() + seconds
    lines: list[str] = []
    cases: dict[str, Case] = {}

    def tried(what: str, call: Callable[[], None]) -> None:
        """``call``, whose failure is a line: what can still run comes next."""
        if time.perf_counter() > until:
            lines.append(f"{what}: no time left")
            say(lines[-1])
            return
        try:
            call()
        except Exception as failure:
            lines.append(f"{what} failed: {failure!r:.160}")
            say(lines[-1])
            torch.cuda.synchronize()  # a broken context: the table so far is printed, and this is raised

    def direction(name: str, which: str) -> None:
        best: dict[str, Fields] = {}
        for kernel in KERNELS if which == "forward" else KERNELS[::-1]:
            if (kernel == "forward") == (which == "forward"):
                found, fastest = time_kernel(name, cases[name], kernel, until)
                lines.extend(found)
                best |= {} if fastest is None else {kernel: fastest}
        torch.cuda.empty_cache()
        lines.extend(summary(name, cases[name], best, which))
        torch.cuda.empty_cache()

    try:
        for name, case in wanted_cases().items():
            cases[name] = Case(case)
        for which in ("forward", "backward"):
            for name in cases:
                tried(f"{name} {which}", functools.partial(direction, name, which))
        tried("rms_norm", lambda: lines.extend(time_norms()))
    finally:
        print("\n".join(lines))
