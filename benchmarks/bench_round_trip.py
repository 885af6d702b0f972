"""The straight-through rounding of weights (numerics/round_trip.py) beside the same in fp64, on one thread.

``python benchmarks/bench_round_trip.py``: a 4096 x 4096 matrix, as fp32 and bf16 weights, to bf16. First that both give the same bits,
then the process's own time over runs that take turns: medians, and the best, which other programs disturb least. ``--device
cuda`` times on a GPU, by events.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from vblackwell.numerics.formats import FORMATS, Format
from vblackwell.numerics.packed import tiles
from vblackwell.numerics.round_trip import max_tensor_scale, round_trip
from vblackwell.numerics.rounding import decode_elements, decode_scales, max_scale, round_elements

TILE_ELEMENTS = 1 << 18  # about 12 MiB of fp64 temporaries


def round_trip_fp64(w_NK: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """What `round_trip` computes, from the encoder's own functions."""
    (n, k), block = w_NK.shape, form.block_of(w_NK.shape[1])
    low, high = torch.aminmax(w_NK)
    tensor_scale = max_tensor_scale(torch.maximum(low.abs(), high.abs()).to(torch.float32), form)
    out = torch.empty(n, k, dtype=dtype, device=w_NK.device)
    for rows, columns in tiles(n, k, block, TILE_ELEMENTS):
        w_BE = w_NK[rows, columns].to(torch.float64).view(-1, block)
        scale_B = decode_scales(max_scale(w_BE.abs().amax(1), tensor_scale, form), form)
        codes_BE = round_elements(w_BE, scale_B.to(torch.float64) * tensor_scale.to(torch.float64), form)
        values = decode_elements(codes_BE, form).to(torch.float32).mul_(scale_B.unsqueeze(-1)).mul_(tensor_scale)
        out[rows, columns] = values.view(rows.stop - rows.start, -1)
    return out


def seconds(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        began = time.process_time()
        call()
        return time.process_time() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {args.size} x {args.size} on {args.device}")
    print("weights    format     fp64 ms    fp32 ms    ratio    of the best")
    torch.manual_seed(0)
    fp32 = torch.randn(args.size, args.size, device=args.device)
    for w in (fp32, fp32.bfloat16()):
        for form in FORMATS.values():
            calls = [lambda f=f, w=w, form=form: f(w, form, torch.bfloat16) for f in (round_trip_fp64, round_trip)]
            if not torch.equal(*(call().view(torch.int16) for call in calls)):
                raise SystemExit(f"{form.name}: the bits differ, so no times are printed")
            times = list(zip(*([seconds(call, args.device) for call in calls] for _ in range(args.runs)), strict=True))
            slow, fast = (1000 * statistics.median(each) for each in times)
            name, best = str(w.dtype).removeprefix("torch."), min(times[0]) / min(times[1])
            print(f"{name:<10} {form.name:<8} {slow:>9.1f} {fast:>10.1f} {slow / fast:>8.2f} {best:>14.2f}", flush=True)


if __name__ == "__main__":
    main()
