"""Weights in two parts: signal to noise, the fused linear beside cuBLAS bf16 and FP4 alone, and what training with them costs.

``python benchmarks/bench_two_part.py --format --start --constant --instructions`` anywhere: SQNR on Gaussian weights beside int8 by
rows, start-up of a model of 62 linears and 36 M parameters, gradients beside exact ones, and memory over 1,000 steps. On a CUDA GPU besides
``--check`` (the kernel against float64), ``--linear`` (medians of CUDA-graph replays in turns over 24 layers of 8192x8192, far beyond L2;
ratios to cuBLAS in the same run) and ``--overhead`` (training steps of a preset with and
without, bf16 compute and fp32 masters, interleaved, and what they consist of). Every row is printed as it comes, the table again at the
end; the exit code is 1 where a floor is missed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lib.kernels.graph_timing import alternating_us, graph_us
from benchmarks.lib.two_part_overhead import overhead_rows
from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import layout, mma_plan, two_part
from vblackwell.kernels.fp4.linear import fp4_linear
from vblackwell.kernels.fp4.two_part import OP, two_part_linear
from vblackwell.kernels.runtime import nvrtc
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.nn.convert.optimize import VBModelWrapper, enable_vb_optimization
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.decoder.presets import find_preset
from vblackwell.numerics import separation
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.sqnr import sqnr

LAYERS = 24
CHECK_SHAPES = ((40, 136), (200, 1000), (1056, 4096), (512, 14336), (8192, 8192))
CHECK_ROWS = (1, 2, 3, 5, 8, 13, 16)
Row = tuple[str, str, str, bool]  # what, measured, floor, whether it is met


class Rows(list[Row]):
    """The table, each row printed when it is known: a run that is cut short has told what it found."""

    def append(self, row: Row) -> None:
        super().append(row)
        print(f"[{time.perf_counter() - BEGAN:5.1f} s] {line_of(row)}", flush=True)


BEGAN = time.perf_counter()


def line_of(row: Row, width: int = 0) -> str:
    what, measured, floor, met = row
    return f"{what:{width}}  {measured}  [{floor}: {'met' if met else 'MISSED'}]"


def compiled(calls: Sequence[Callable[[], object]]) -> None:
    """Call each once, several at a time: kernels are compiled at their first launch, which leaves Python to others meanwhile."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda call: call(), calls))
    torch.cuda.synchronize()


def format_rows(rows: Rows) -> None:
    w_NK = torch.randn(2048, 4096, generator=torch.Generator().manual_seed(0))
    separated = separation.separate(w_NK)
    int8 = sqnr(w_NK, quantize(w_NK, "int8", "max").dequantize())
    both, coarse = sqnr(w_NK, separated.dequantize()), sqnr(w_NK, separated.coarse.dequantize())
    rows.append(
        ("SQNR coarse + fine", f"{both:.2f} dB at {8 * separated.nbytes / w_NK.numel():.2f} bits", "43 dB", both >= 43)
    )
    rows.append(("SQNR coarse alone, int8 by rows", f"{coarse:.2f} dB, {int8:.2f} dB", "below both", both > int8))
    kept = separation.training_scales(w_NK)
    straight = sqnr(w_NK, separation.round_to_parts(w_NK, kept, torch.bfloat16))
    rows.append(("SQNR in training, bf16, plain scales", f"{straight:.2f} dB", "43 dB", straight >= 43))


def deep_model(device: str) -> nn.Sequential:
    """62 linears, 36 M parameters."""
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(762, 762) for _ in range(62)))


def start_rows(rows: Rows, device: str) -> None:
    model = deep_model(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    began = time.perf_counter()
    enable_vb_optimization(model, mode="training")
    took = time.perf_counter() - began
    began = time.perf_counter()
    with torch.no_grad():
        model(torch.randn(4, 762, device=device)).sum().item()
    first = time.perf_counter() - began
    text = f"{1000 * took:.1f} ms, first forward {1000 * first:.0f} ms"
    rows.append((f"start of 62 layers, {parameters / 1e6:.0f} M parameters", text, "1 s", took < 1))


def gradient_rows(rows: Rows, device: str) -> None:
    torch.manual_seed(0)
    plain = Decoder(find_preset("tiny").decoder_config(512, 128), seed=0, device="cpu").to(device)
    twin = Decoder(find_preset("tiny").decoder_config(512, 128), seed=0, device="cpu").to(device)
    ours = enable_vb_optimization(twin, mode="training")
    tokens = torch.randint(0, 512, (8, 129), device=device)
    for model in (plain, ours):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    a, b = (torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]).double() for m in (plain, ours))
    cosine = float(functional.cosine_similarity(a, b, 0))
    rows.append(("gradient cosine, preset tiny in fp32", f"{cosine:.6f}", "0.999", cosine > 0.999))


def constant_rows(rows: Rows, device: str, steps: int) -> None:
    """Memory of a training run in its second half against its first: live tensors, and allocated bytes on a GPU."""
    torch.manual_seed(0)
    stack = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)).to(device)
    wrapper = VBModelWrapper(stack, mode="training")
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=1e-3)

    def held() -> tuple[int, int, int]:
        gc.collect()
        live = sum(o.nbytes for o in gc.get_objects() if issubclass(type(o), Tensor))
        cached = sum(row["cached_bytes"] for row in wrapper.get_all_stats().values())
        return live, cached, torch.cuda.memory_allocated() if device == "cuda" else 0

    readings = []
    for step in range(steps):
        x = torch.randn(32, 128, device=device)
        functional.mse_loss(wrapper(x), torch.tanh(x)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step in (steps // 2, steps - 1):
            readings.append(held())
    same = readings[0] == readings[1]
    text = f"{readings[0]} and {readings[1]} bytes (live, cached, allocated)"
    rows.append((f"memory at steps {steps // 2} and {steps}", text, "equal", same))


def instruction_rows(rows: Rows) -> None:
    """Instructions a weight in the inner loops for sm_90, both parts beside the coarse one alone; compiled here, without a GPU."""
    for m in (1, 8, 16):
        ours = two_part.plan_two_part(m, 8192, 8192, True)
        theirs = mma_plan.plan_mma(m, 8192, 8192, True, bulk=False)
        both = per_weight(two_part.FILES, ours.macros(), ours.tokens)
        coarse = per_weight(fp4_launch.MMA_FILES, theirs.macros(False), theirs.tokens)
        rows.append((f"instructions a weight, M={m}", f"{both:.2f}, coarse alone {coarse:.2f}", "5", both <= 5))


def per_weight(files: tuple[str, ...], macros: dict[str, int], tokens: int) -> float:
    """Of the shortest loop with matrix products: a lane's 64 weights of a window take eight of them for eight tokens."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(nvrtc.compile_cubin(files, macros, "sm_90a"))
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines() if re.search(r"/\*[0-9a-f]{4}\*/", line)]
    loops = []
    for line in lines:
        jump = re.search(r"/\*([0-9a-f]{4})\*/.*BRA[^0]*0x([0-9a-f]+)", line)
        if jump and int(jump[2], 16) < int(jump[1], 16):
            body = lines[int(jump[2], 16) // 16 : int(jump[1], 16) // 16 + 1]
            products = sum("HMMA" in each for each in body)
            if products:
                loops.append(len(body) / (64 * products / (8 * max(1, tokens // 8))))
    return min(loops)


def random_parts(n: int, k: int, device: str = "cuda") -> tuple[Tensor, ...]:
    """Random parts in tiles: any coarse codes, fine ones that fit them."""
    codes_shape, fine_shape, scales_shape = layout.parts_shapes(layout.TILED_PARTS, n, k)
    codes = torch.randint(0, 256, codes_shape, dtype=torch.uint8, device=device)
    fine = torch.randint(0, 256, fine_shape, dtype=torch.uint8, device=device) | 0x22  # speed does not depend on values
    scales = torch.randint(96, 144, scales_shape, dtype=torch.uint8, device=device)
    return codes, fine, scales, torch.tensor(2.0**-7, device=device)


def check_rows(rows: Rows) -> None:
    """Against float64 on real weights whose products of code and scale are rounded to bf16: what is left are fp32 sums."""
    worst, repeats, written_right = 0.0, True, True
    hopper = torch.cuda.get_device_capability()[0] == 9
    covers = list(itertools.product(CHECK_ROWS, (True, False) if hopper else (False,)))
    plans = {two_part.plan_two_part(m, n, k, clusters) for n, k in CHECK_SHAPES for m, clusters in covers}
    device = torch.device("cuda", torch.cuda.current_device())
    macros = {tuple(plan.macros(out32=True).items()) for plan in plans}
    entry = (two_part.FILES, "two_part_mma")
    compiled([functools.partial(nvrtc.kernel, *entry, dict(each), device) for each in macros])
    for n, k in CHECK_SHAPES:
        w_NK = torch.randn(n, k, device="cuda") * torch.logspace(-2, 1, n, device="cuda")[:, None]
        separated = separation.separate(w_NK)
        coarse = separated.coarse
        canonical = (coarse.codes, separated.fine, coarse.block_scales, coarse.tensor_scale)
        tiled = layout.parts_to_tiled(*canonical, n, k)
        exact_w = separated.dequantize(torch.float32)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            written_right &= torch.equal(two_part.run_dequantize(tiled, n, k, dtype), exact_w.to(dtype))
        one = torch.ones((), device="cuda")
        rounded = (
            separation.dequantize(*canonical[:3], one, n, k, torch.bfloat16).double() * coarse.tensor_scale.double()
        )
        for m, clusters in covers:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            plan = two_part.plan_two_part(m, n, k, clusters)
            y, again = (two_part.run_mma(plan, x, tiled, None, "none", n, torch.float32) for _ in range(2))
            repeats &= torch.equal(y, again)
            exact = x.double() @ rounded.t()
            bound = 4 * 2**-24 * k**0.5 * (x.double().abs() @ rounded.abs().t()) + 1e-30
            ratio = float(((y.double() - exact).abs() / bound).max())
            worst = max(worst, ratio if ratio == ratio else float("inf"))
    rows.append(("kernel's error over the bound of fp32 sums", f"{worst:.3f}", "1", worst <= 1))
    rows.append(
        (
            "weight written out is the oracle's; bits repeat",
            f"{written_right}, {repeats}",
            "True",
            written_right and repeats,
        )
    )


def linear_rows(rows: Rows, n: int, k: int, counts: list[int]) -> None:
    parts = [random_parts(n, k) for _ in range(LAYERS)]
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    ours_of = functools.partial(two_part_linear, format=layout.TILED_PARTS, activation="none", n=n, k=k)
    coarse_of = functools.partial(fp4_linear, format=layout.tiled_name("nvfp4"), activation="none", n=n, k=k)
    first = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for m in counts]
    compiled([functools.partial(ours_of, x, *parts[0], None) for x in first])
    compiled([functools.partial(coarse_of, x, parts[0][0], *parts[0][2:], None) for x in first])
    for m, x in zip(counts, first, strict=True):
        bf16, ours, coarse = alternating_us(
            [
                [functools.partial(functional.linear, x, w) for w in dense],
                [functools.partial(ours_of, x, *w, None) for w in parts],
                [functools.partial(coarse_of, x, w[0], w[2], w[3], None) for w in parts],
            ],
            9,
        )
        text = f"{bf16 / ours:.3f} x ({ours:.2f} us; bf16 {bf16:.2f}, coarse alone {coarse:.2f})"
        rows.append((f"two-part linear {n}x{k}, M={m}", text, "1.5 x", bf16 / ours >= 1.5 or m > 16))
        if m <= 16:
            with use_backend(OP, "dequantize"):
                slow = graph_us([functools.partial(call_parts, x, w, n, k) for w in parts[:4]], 5)
            print(f"M={m}: writing the weight out and cuBLAS {slow:.2f} us", flush=True)


def call_parts(x: Tensor, parts: tuple[Tensor, ...], n: int, k: int) -> Tensor:
    codes, fine, scales, scale = parts
    return two_part_linear(x, codes, fine, scales, scale, None, layout.TILED_PARTS, "none", n, k)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("format", "start", "constant", "instructions", "check", "linear", "overhead", "all"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of --start and --constant")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--shape", default="8192x8192", help="NxK of --linear")
    parser.add_argument("--rows", default="1,2,4,8,16,64", help="of --linear")
    parser.add_argument("--preset", default="large")
    parser.add_argument("--batch-sizes", default="8,16,32", help="of --overhead, sequences")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"torch {torch.__version__}, {machine}", flush=True)
    rows = Rows()
    n, k = (int(size) for size in args.shape.split("x"))
    batches = numbers(args.batch_sizes)
    parts = {  # the check first, then what only a GPU can tell
        "check": functools.partial(check_rows, rows),
        "linear": functools.partial(linear_rows, rows, n, k, numbers(args.rows)),
        "overhead": functools.partial(overhead_rows, rows.append, args.preset, batches, args.seq_length, args.rounds),
        "start": lambda: (start_rows(rows, args.device), gradient_rows(rows, args.device)),
        "constant": functools.partial(constant_rows, rows, args.device, args.steps),
        "format": functools.partial(format_rows, rows),
        "instructions": functools.partial(instruction_rows, rows),
    }
    for name, part in parts.items():
        if args.all or getattr(args, name):
            part()
            gc.collect()
    width = max((len(row[0]) for row in rows), default=0)
    print("\n".join(line_of(row, width) for row in rows))
    raise SystemExit(not all(met for *_, met in rows))


if __name__ == "__main__":
    main()
