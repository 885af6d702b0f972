"""What packing a weight takes, and rounding it straight through: a table of formats by ways, after a check against the
oracle's bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.lib.kernels.graph_timing import median_us
from vblackwell.kernels.fp4 import encode
from vblackwell.nn.linear.packed_linear import place
from vblackwell.numerics import fp4
from vblackwell.numerics.formats import FORMATS
from vblackwell.numerics.packed import PackedTensor
from vblackwell.numerics.round_trip import round_trip

ROWS_CHECKED = 64


def launches(call: Callable[[], object]) -> int:
    """Kernels, copies and fills of one call."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


def wall_ms(call: Callable[[], object], repeats: int = 7) -> float:
    """The median of the host's time, until the device is done."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return sorted(times)[repeats // 2]


def check(w_NK: Tensor) -> None:
    """Raises SystemExit where a GPU's bytes are not the oracle's, of some rows."""
    w_NK = w_NK[:ROWS_CHECKED].contiguous()
    for name, form in FORMATS.items():
        for search in ("mse", "max"):
            found, expected = encode.quantize(w_NK, name, search), fp4.quantize(w_NK.cpu(), name, search)
            for part, tensor in expected.tensors().items():
                if not torch.equal(found.tensors()[part].cpu(), tensor):
                    raise SystemExit(f"{name} {search}: {part} differs from the oracle: no times for wrong results")
        if not torch.equal(encode.round_trip(w_NK, form, w_NK.dtype).cpu(), round_trip(w_NK.cpu(), form, w_NK.dtype)):
            raise SystemExit(f"{name}: rounded values differ from the oracle: no times for wrong results")


def print_packing(n: int, k: int) -> None:
    """Times of a bf16 weight (n, k): host's ms of packing, and of packing and laying out in tiles; us of straight
    through on the device; with launches."""
    w_NK = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
    check(w_NK)
    print(f"packing {n}x{k} bf16: ms (launches)")
    print(f"{'format':>9} {'mse':>16} {'max':>16} {'mse and layout':>16} {'straight through':>20}")
    for name in (*FORMATS, "two-part"):
        calls: list[Callable[[], object]] = [partial(_packed, w_NK, name, search) for search in ("mse", "max")]
        calls.append(lambda name=name: place(_packed(w_NK, name, "mse")))
        cells = [f"{wall_ms(call):.3f} ({launches(call)})" for call in calls]
        through = ""
        if name in FORMATS:
            rounded = partial(encode.round_trip, w_NK, FORMATS[name], w_NK.dtype)
            through = f"{median_us(rounded, 20):.1f} us ({launches(rounded)})"
        print(f"{name:>9} {cells[0]:>16} {cells[1]:>16} {cells[2]:>16} {through:>20}")


def _packed(w_NK: Tensor, name: str, search: str) -> PackedTensor:
    return encode.separate(w_NK, search) if name == "two-part" else encode.quantize(w_NK, name, search)
