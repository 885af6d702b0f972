"""Fused operators: first that they are right, then how long they take.

    python benchmarks/bench_ops.py [--peers]        # on a CUDA GPU

Times are medians of CUDA-graph replays on inputs larger than the L2; ratios are to the plain PyTorch expression, and
with ``--peers`` to ``torch.compile`` of it and to liger-kernel (where it can be imported), in the same run.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional

from benchmarks.lib.goal_line import goal_header, goal_line
from benchmarks.lib.kernels.graph_timing import graph_us, median_us
from vblackwell.kernels.pointwise.cross_entropy import linear_cross_entropy
from vblackwell.kernels.pointwise.rows import add_rms_norm, rms_norm, rotary, swiglu

BATCH, LENGTH, WIDTH, INNER, HEADS, HEAD = 8, 2048, 2560, 6912, 20, 128
TOKENS = BATCH * LENGTH
Function = Callable[..., Any]
Rows = list[dict[str, Any]]


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def time_us(call: Callable[[], object]) -> float:
    """Median time of ``call`` in us, replayed from a CUDA graph of eight: that a graph starts takes some us of
    its own.
    """
    return graph_us([call] * 8, 9)


def copy_rate() -> float:
    """Bytes a second that a kernel which does next to nothing moves, read and write."""
    x = torch.ones(1 << 29, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / (time_us(lambda: torch.add(x, 1.0, out=y)) * 1e-6)


def flat(outputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def both_ways(function: Function, inputs: tuple[torch.Tensor, ...]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Calls of the forward alone and of forward and backward, on leaves that want gradients."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    outputs = flat(function(*leaves))
    torch.manual_seed(1)
    gradients = [
        randn(*output.shape).to(output.dtype) if output.dim() else torch.ones_like(output) for output in outputs
    ]

    def forward() -> Any:
        with torch.no_grad():
            return function(*leaves)

    def both() -> Any:
        outputs = flat(function(*leaves))
        return outputs, torch.autograd.grad(outputs, wanted, gradients)

    return forward, both


# -- the ops -----------------------------------------------------------------------------------------------------------


def eager_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def eager_add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return eager_norm(total, weight), total


def eager_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def eager_rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x * cos + _half_turned(x) * sin for x in (q, k))


def eager_head(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy((hidden @ weight.t()).float(), targets)


def ligers() -> dict[str, Function]:
    """liger-kernel's functions by op; empty if it is not installed."""
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        print("liger-kernel is left out:", error)
        return {}
    return {
        "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, "llama", False),
        "add_rms_norm": lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-5, 0.0, "llama", False),
        "swiglu": lambda g, u: LigerSiLUMulFunction.apply(g, u),
        "rotary": lambda q, k, cos, sin: LigerRopeFunction.apply(q, k, cos[None], sin[None]),
        "linear+loss": lambda h, w, t: LigerFusedLinearCrossEntropyFunction.apply(h, w, t)[0],
    }


def op_cases(vocabulary: int) -> dict[str, dict[str, Any]]:
    """Each op: ours, the plain expression, inputs, and the fewest elements (bf16) that forward and backward move."""
    td, ti, tq = TOKENS * WIDTH, TOKENS * INNER, TOKENS * HEADS * HEAD
    angles = torch.randn(LENGTH, HEAD // 2, device="cuda").repeat(1, 2)
    heads = [randn(BATCH, LENGTH, HEADS, HEAD).transpose(1, 2) for _ in range(2)]
    targets = torch.randint(vocabulary, (TOKENS,), device="cuda")
    weight = randn(WIDTH)
    tables = (angles.cos(), angles.sin())
    return {
        "rms_norm": {
            "ours": lambda x, w: rms_norm(x, w, 1e-5), "eager": eager_norm,
            "inputs": (randn(TOKENS, WIDTH), weight), "elements": (2 * td, 5 * td),
        },
        "add_rms_norm": {
            "ours": lambda x, r, w: add_rms_norm(x, r, w, 1e-5), "eager": eager_add_norm,
            "inputs": (randn(TOKENS, WIDTH), randn(TOKENS, WIDTH), weight), "elements": (4 * td, 8 * td),
        },
        "swiglu": {
            "ours": swiglu, "eager": eager_swiglu,
            "inputs": (randn(TOKENS, INNER), randn(TOKENS, INNER)), "elements": (3 * ti, 8 * ti),
        },
        "rotary": {
            "ours": lambda q, k: rotary(q, k, *tables),
            "eager": lambda q, k: eager_rotary(q, k, *(table.bfloat16() for table in tables)),
            "liger": lambda f: lambda q, k: f(q, k, *(table.bfloat16() for table in tables)),
            "inputs": tuple(heads), "elements": (4 * tq, 8 * tq),
        },
        "linear+loss": {
            "ours": linear_cross_entropy, "eager": eager_head,
            "inputs": (randn(TOKENS, WIDTH), randn(vocabulary, WIDTH, scale=0.02), targets), "elements": None,
        },
    }  # fmt: skip


def error_of(function: Function, case: dict[str, Any], exact: tuple[torch.Tensor, ...]) -> float:
    """Largest relative RMS error of outputs and gradients; NaN counts as infinite."""
    _, both = both_ways(function, case["inputs"])
    outputs, gradients = both()
    worst = 0.0
    for got, right in zip((*outputs, *gradients), exact, strict=True):
        error = ((got.double() - right).norm() / right.norm()).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def exact_of(case: dict[str, Any], sample: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Outputs and gradients of the plain expression in float64 on the first ``sample`` of the batch, and that smaller
    case.
    """
    inputs = tuple(x[:sample].clone() if x.shape[0] in (TOKENS, BATCH) else x for x in case["inputs"])
    small = {**case, "inputs": inputs}
    _, both = both_ways(
        case.get("exact", case["eager"]), tuple(x.double() if x.is_floating_point() else x for x in inputs)
    )
    outputs, gradients = both()
    return (*outputs, *gradients), small


def bench_ops(vocabulary: int, peers: bool) -> Rows:
    rate, rows, others = copy_rate(), [], ligers() if peers else {}
    print(f"HBM copy {rate / 1e12:.2f} TB/s")
    for name, case in op_cases(vocabulary).items():
        functions = {"ours": case["ours"], "eager": case["eager"]}
        if peers and name != "linear+loss":  # its logits stay whole
            functions["compile"] = torch.compile(case["eager"])
        if name in others:
            functions["liger"] = case["liger"](others[name]) if "liger" in case else others[name]
        sample = 1 if name == "rotary" else 512
        again = [
            torch.cat([x.flatten() for x in flat(both_ways(case["ours"], case["inputs"])[1]()[1])]) for _ in range(2)
        ]
        repeats = torch.equal(*again)
        del again
        for system, function in functions.items():
            try:
                row = {"op": name, "system": system}
                row["error"] = _checked(function, case, sample)
                forward, both = both_ways(function, case["inputs"])
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                both()
                row["extra_mb"] = (torch.cuda.max_memory_allocated() - before) >> 20
                # liger's loss waits for the GPU, which no graph can; milliseconds hide what the host takes.
                timed = (lambda call: median_us(call, 7)) if name == "linear+loss" else time_us
                row["forward_us"], row["both_us"] = timed(forward), timed(both)
            except Exception as error:  # another system's failure must not hide ours
                if system == "ours":
                    raise
                print(f"{name}: {system} failed: {error!r:.200}")
                continue
            if case["elements"]:
                times = (row["forward_us"], row["both_us"] - row["forward_us"])
                elements = (case["elements"][0], case["elements"][1] - case["elements"][0])
                row["hbm_forward"], row["hbm_backward"] = (
                    count * 2 / (us * 1e-6) / rate for count, us in zip(elements, times, strict=True)
                )
            rows.append(row)
        ours = next(row for row in rows if row["op"] == name and row["system"] == "ours")
        for row in rows:
            if row["op"] == name:
                row["ours_faster"] = row["both_us"] / ours["both_us"]
                print_row({**row, "repeats": repeats if row["system"] == "ours" else ""})
        torch.cuda.empty_cache()
    return rows


def goals(rows: Rows) -> list[str]:
    """Lines that compare ours with the floors and aims."""
    lines = [goal_header()]
    for op in dict.fromkeys(row["op"] for row in rows if "op" in row):
        systems = {row["system"]: row for row in rows if row.get("op") == op}
        ours = systems["ours"]
        if "hbm_forward" in ours:
            lines.append(goal_line(f"{op}: forward, share of the HBM rate", ours["hbm_forward"], 0.8, 0.9))
            lines.append(goal_line(f"{op}: backward, share of the HBM rate", ours["hbm_backward"], 0.8, 0.9))
            peers = [row["both_us"] for system, row in systems.items() if system in ("compile", "liger")]
            if peers:
                lines.append(
                    goal_line(f"{op}: over the better of compile and liger", min(peers) / ours["both_us"], 0.98, 1.0)
                )
        elif "eager" in systems:
            memory = systems["eager"]["extra_mb"] / max(1, ours["extra_mb"])
            lines.append(goal_line(f"{op}: peak memory, unfused over ours", memory, 8, 20))
            lines.append(
                goal_line(f"{op}: time, unfused over ours", systems["eager"]["both_us"] / ours["both_us"], 0.95, 1.1)
            )
    return lines


def _checked(function: Function, case: dict[str, Any], sample: int) -> float:
    # In float64 our rotation is the plain expression, on tables that nobody rounded.
    exact = {**case, "exact": case["ours"]} if case["inputs"][0].dim() == 4 else case
    right, small = exact_of(exact, sample)
    return error_of(function, small, right)


def print_row(row: dict[str, Any]) -> None:
    print(
        "  ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="compare with torch.compile and liger-kernel too")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--out", type=Path, help="CSV to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    rows = bench_ops(arguments.vocabulary, arguments.peers)
    print("\n".join(goals(rows)))
    if arguments.out is not None:
        fields = list(dict.fromkeys(key for row in rows for key in row))
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
