"""Attention: the own kernels and the dispatcher, PyTorch's backends, and attention written out.

    python benchmarks/bench_attention.py [--quick]        # on a CUDA GPU

Times (medians of CUDA-graph replays, bf16, forward and backward apart), the own kernel's error against float64, ratios
in the same run with their floors and aims, and peak memory. What the own kernel makes of a mask (bits, tile lists) is
counted. ``--tune`` keeps the times on this machine, for the dispatcher to choose by.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lib.kernels.attention_report import TIMES, Rows, goals, ratios, runnable
from benchmarks.lib.kernels.graph_timing import alternating_us, graph_us
from benchmarks.lib.results import append_csv, machine, seconds_since_start, tell
from vblackwell.kernels.runtime import tuning
from vblackwell.nn.attention import backends as dispatcher
from vblackwell.nn.attention.backends import BACKENDS, Variant


def time_us(call: Callable[[], object]) -> float:
    """Median time of ``call`` in us, replayed from a CUDA graph."""
    return graph_us([call], 7)


def leaves_of(batch: int, heads: int, kv_heads: int, length: int, head: int) -> list[Tensor]:
    """Queries, keys and values (B, N, S, H) as views of (B, S, N, H), which is how projections give them."""
    return [
        torch.randn(batch, length, n, head, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def documents(length: int, count: int) -> Tensor:
    """True within documents of different lengths (1, 1, S, S), as packed training wants."""
    ends = torch.randint(1, length, (count - 1,), generator=torch.Generator().manual_seed(1)).sort().values
    place = torch.bucketize(torch.arange(length), ends, right=True).cuda()
    return (place[:, None] == place[None, :])[None, None]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    """(batch, heads, key heads, length, head), variant and goal of each case; those with masks first."""
    random = torch.rand(1, 1, 4096, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    padded = torch.arange(4096, device="cuda")[None] < torch.tensor([[4096], [3000], [2100], [1111]], device="cuda")
    found: dict[str, dict[str, Any]] = {
        "boolean random S=4k": {"shape": (4, 16, 16, 4096, 128), "mask": random > 0.5},
        "boolean documents S=8k": {"shape": (2, 16, 16, 8192, 128), "mask": documents(8192, 8)},
        "boolean padding S=4k": {"shape": (4, 16, 16, 4096, 128), "mask": padded[:, None, None]},
        "additive S=4k": {"shape": (4, 16, 16, 4096, 128), "mask": (random - 0.5).bfloat16()},
        "window 1k causal S=8k": {"shape": (2, 16, 16, 8192, 128), "causal": True, "window": 1024},
    }
    for head, heads in ((128, 16), (64, 32)):
        for batch, length in ((4, 4096), (2, 8192), (1, 16384)):
            found[f"causal {head} S={length >> 10}k"] = {"shape": (batch, heads, heads, length, head), "causal": True}
    found["full 128 S=8k"] = {"shape": (2, 16, 16, 8192, 128)}
    found["grouped causal 128 S=8k"] = {"shape": (2, 32, 8, 8192, 128), "causal": True}
    if not quick:
        found["causal 96 S=8k"] = {"shape": (2, 16, 16, 8192, 96), "causal": True}
        found["causal 256 S=4k"] = {"shape": (2, 8, 8, 4096, 256), "causal": True}
    return found


def variant_of(case: dict[str, Any]) -> Variant:
    return Variant(**{name: value for name, value in case.items() if name in Variant._fields})


def runner(name: str, leaves: list[Tensor], variant: Variant) -> Callable[[], Tensor]:
    q, k, v = leaves
    if name == "dispatcher":
        return lambda: dispatcher.attention(*leaves, variant)[0]
    return lambda: BACKENDS[name].run(q, k, v, variant)


def time_both(call: Callable[[], Tensor], leaves: list[Tensor]) -> tuple[float, float, float, float]:
    """us of forward, backward and both, and extra MB of both at their peak.

    The forward is inference's. Backward is what both take beyond a forward with gradients, for which a dispatcher may
    run another backend than for one without.
    """
    dout = torch.randn_like(call())
    extra = extra_mb(call, leaves, dout)
    with torch.no_grad():
        forward = time_us(call)
    both = time_us(lambda: torch.autograd.grad(call(), leaves, dout))
    return forward, both - time_us(call), both, extra


def extra_mb(call: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> float:
    """MB that forward and backward take at their peak, beyond what is held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(call(), leaves, dout)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def dispatcher_over(best: str, key: str, leaves: list[Tensor], variant: Variant) -> float:
    """How many times as long ``best`` takes as the dispatcher, in turns, because two timings of one kernel differ by
    some percent.
    """
    calls = [runner(system, leaves, variant) for system in ("dispatcher", best)]
    if key == "forward_us":
        with torch.no_grad():
            mine, other = alternating_us([[call] for call in calls], 9)
        return other / mine
    dout = torch.randn_like(leaves[0])
    both = alternating_us([[lambda call=call: torch.autograd.grad(call(), leaves, dout)] for call in calls], 9)
    if key == "both_us":
        return both[1] / both[0]
    forward = alternating_us([[call] for call in calls], 9)
    return (both[1] - forward[1]) / (both[0] - forward[0])


def systems_of(case: dict[str, Any], leaves: list[Tensor], variant: Variant, quick: bool) -> list[str]:
    """Ours, the others that accept, and last the dispatcher, which may be told what was measured of them."""
    reasons = dispatcher.attention_backends(dispatcher.request_of(leaves[0], leaves[1], leaves[2], variant))
    systems = ["triton", *(n for n in ("cudnn", "flash", "efficient") if not reasons[n])]
    if case["shape"][3] <= 4096 and not quick:
        systems.append("math")
    return [*systems, "dispatcher"]


def flops(case: dict[str, Any]) -> float:
    batch, heads, _, length, head = case["shape"]
    return 4 * batch * heads * length**2 * head * (0.5 if case.get("causal") else 1.0)


def bench(wanted: dict[str, dict[str, Any]], quick: bool, seconds: float, path: Path | None, keep: bool) -> Rows:
    """A row a case and system; ``path``, and with ``keep`` this machine's table, get the times by which the dispatcher
    chooses.
    """
    rows: Rows = []
    for number, (name, case) in enumerate(wanted.items()):
        if seconds and seconds_since_start() > seconds:
            tell(f"no time left for {', '.join([*wanted][number:])}")
            break
        rows += bench_case(name, case, quick, path, keep)
        torch.cuda.empty_cache()
        for line in goals([row for row in rows if row["case"] == name])[1:]:
            tell(line)
    return rows


def bench_case(name: str, case: dict[str, Any], quick: bool, path: Path | None, keep: bool) -> Rows:
    """A row a system that accepts, the dispatcher's last."""
    leaves, variant = leaves_of(*case["shape"]), variant_of(case)
    request, work = dispatcher.request_of(leaves[0], leaves[1], leaves[2], variant), flops(case)
    rows: Rows = []
    for system in systems_of(case, leaves, variant, quick):
        if system == "dispatcher":
            keep_times(request, runnable({row["system"]: row for row in rows}), path, keep)
        try:
            forward, backward, both, extra = time_both(runner(system, leaves, variant), leaves)
        except Exception as error:  # another system's failure must not hide ours
            if system in ("triton", "dispatcher"):
                raise
            tell(f"{name}: {system} failed: {error!r:.200}")
            continue
        rows.append(
            {
                "case": name,
                "system": system,
                "forward_us": forward,
                "backward_us": backward,
                "both_us": both,
                "extra_mb": extra,
                "forward_tflops": work / forward / 1e6,
                "backward_tflops": 2.5 * work / backward / 1e6,
                "chosen": dispatcher.choose_attention(request) if system == "dispatcher" else "",
                "chosen_forward": dispatcher.choose_attention(request._replace(gradient=False))
                if system == "dispatcher"
                else "",
                "over_forward": "",
                "over_backward": "",
                "over_both": "",
                "error": head_error(leaves, variant) if system == "triton" else "",
            }
        )
        print_row(rows[-1])
        torch.cuda.empty_cache()
    chosen, known = rows[-1], runnable({row["system"]: row for row in rows})
    for key in TIMES:
        best = min(known, key=lambda other, key=key, known=known: known[other][key])
        chosen["over_" + key.removesuffix("_us")] = dispatcher_over(best, key, leaves, variant)
    return rows


def keep_times(
    request: dispatcher.AttentionRequest, known: dict[str, dict[str, Any]], path: Path | None, keep: bool
) -> None:
    """Write a case's times, of training and of inference, for the dispatcher."""
    device = torch.device("cuda", torch.cuda.current_device())
    for gradient in (True, False):
        times = {name: int(row["both_us" if gradient else "forward_us"] * 1000) for name, row in known.items()}
        asked = request._replace(gradient=gradient)
        table = {dispatcher.shape_key(asked): times, dispatcher.neighbours_key(asked): times}
        if path is not None:
            tuning.store(dispatcher.KIND, device, table, path)
        if keep:
            tuning.store(dispatcher.KIND, device, table)


def print_row(row: dict[str, Any]) -> None:
    words = "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items() if v != "")
    tell(words)


def memory_line() -> str:
    """Peak extra memory at S = 16k against attention written out."""
    leaves = leaves_of(1, 4, 4, 16384, 128)
    extra = {}
    for system in ("triton", "math"):
        extra[system] = extra_mb(runner(system, leaves, Variant(causal=True)), leaves, torch.randn_like(leaves[0]))
        torch.cuda.empty_cache()
    return (
        f"peak memory S=16k, 4 heads: {extra['triton']:.0f} MB against {extra['math']:.0f} MB unfused: "
        f"1/{extra['math'] / extra['triton']:.0f} (floor 1/10, aim 1/50)"
    )


@torch.no_grad()
def head_error(leaves: list[Tensor], variant: Variant) -> float:
    """Relative error, at a case's own size, of what the own forward makes of the last head of the last batch."""
    q, k, v = (x[-1:, -1:].double() for x in leaves)
    mask = variant.mask
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())][-1:, -1:]
        mask = mask.double() if mask.is_floating_point() else mask
    exact = BACKENDS["math"].run(q, k, v, variant._replace(mask=mask))
    return ((runner("triton", leaves, variant)()[-1:, -1:].double() - exact).norm() / exact.norm()).item()


def host_us(call: Callable[[], object]) -> float:
    """us of the host, least of 1,000 calls; the GPU is idle when one begins."""
    found = []
    for _ in range(1000):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - start)
    return min(found) / 1000


def host_table() -> list[str]:
    """The host's time of an eager call, of the dispatcher and of PyTorch's own choice, which is given the mask that it
    needs: a forward for inference, one with gradients, and that with its backward."""
    seen = torch.rand(63, 257, device="cuda") > 0.5
    seen[:, 0] = True
    band = torch.ones(512, 512, device="cuda", dtype=torch.bool).tril().triu(-63)
    found: dict[str, tuple[tuple[int, int, int, int], Variant, Tensor | None]] = {
        "plain": ((16, 16, 512, 512), Variant(), None),
        "causal": ((16, 16, 512, 512), Variant(causal=True), None),
        "grouped causal": ((32, 8, 512, 512), Variant(causal=True), None),
        "one query": ((32, 8, 1, 512), Variant(), None),
        "boolean 63 x 257": ((16, 16, 63, 257), Variant(seen), seen),
        "additive 63 x 257": ((16, 16, 63, 257), Variant(seen.bfloat16()), seen.bfloat16()),
        "grouped boolean": ((32, 8, 63, 257), Variant(seen), seen),
        "window 64": ((16, 16, 512, 512), Variant(causal=True, window=64), band),
        "window 64, own kernel": ((16, 16, 512, 512), Variant(causal=True, window=64), band),
        "boolean, own kernel": ((16, 16, 63, 257), Variant(seen), seen),
    }
    lines = [
        "| host us: ours / PyTorch's choice | chosen | inference | with gradients | and backward |",
        "|---" * 5 + "|",
    ]
    for name, ((heads, kv_heads, queries, keys), variant, mask) in found.items():
        shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
        leaves = [torch.randn(2, m, n, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for n, m in shapes]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        backend, grouped = "triton" if "own" in name else "auto", {"enable_gqa": heads != kv_heads}
        causal, dout = variant.causal and mask is None, torch.randn_like(leaves[0])
        runs: list[Callable[[], Tensor]] = [
            lambda leaves=leaves, how=variant, backend=backend: dispatcher.attention(*leaves, how, backend)[0],
            lambda leaves=leaves, mask=mask, causal=causal, grouped=grouped: functional.scaled_dot_product_attention(
                *leaves, mask, is_causal=causal, **grouped
            ),
        ]
        cells = []
        with torch.no_grad():
            chosen = dispatcher.attention(*leaves, variant, backend)[1]
            cells.append(" / ".join(f"{host_us(run):.1f}" for run in runs))
        cells.append(" / ".join(f"{host_us(run):.1f}" for run in runs))
        steps = [lambda run=run, leaves=leaves, dout=dout: torch.autograd.grad(run(), leaves, dout) for run in runs]
        cells.append(" / ".join(f"{host_us(step):.1f}" for step in steps))
        lines.append(f"| {name} | {chosen} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer cases")
    add("--only", default="", help="cases whose name has this")
    add("--seconds", type=float, default=0.0, help="start no case later than this")
    add(
        "--tune",
        action="store_true",
        help="keep the times of a case's systems on this machine before its dispatcher is timed",
    )
    add("--table", type=Path, help="JSON file of times for the dispatcher, to ship in vblackwell/kernels/tuned")
    add("--out", type=Path, help="CSV to append to")
    add("--host", action="store_true", help="the host's time of an eager call alone")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tell(f"{torch.cuda.get_device_name()} {torch.__version__}")
    if arguments.host:
        print("\n".join(host_table()))
        return
    wanted = {name: case for name, case in cases(arguments.quick).items() if arguments.only in name}
    rows = bench(wanted, arguments.quick, arguments.seconds, arguments.table, arguments.tune)
    lines = [*ratios(rows), "", *goals(rows), memory_line()]
    if arguments.out is not None:
        append_csv(arguments.out, [{**machine(), **row} for row in rows])
    print("\n".join(lines))


if __name__ == "__main__":
    main()
