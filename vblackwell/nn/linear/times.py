"""How long a linear of some shape takes at each precision on the device that is here: the cost that least time saves.

Measured when first asked for, once for each precision and shape, with drawn weights: speed does not depend on their
values. On a GPU a CUDA graph of one product with each of several weights is replayed, together larger than its caches,
because a token of generation reads every weight once, and because a single launch would be all that is timed. On a CPU
a product is timed by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from vblackwell.errors import ConfigurationError
from vblackwell.nn.linear.packed_weight import PlacedWeight, pack, place
from vblackwell.units import MiB

CACHE_BYTES = 256 * MiB  # more than any GPU's last cache
MAX_WEIGHTS = 512
REPEATS = 5


class LinearTimes:
    """Seconds of a product ``x W^T``: call it with 'bf16', 'two-part' or 'nvfp4' and the weight's shape (N, K).

    Args:
        device: where the model will compute.
        rows: of x, e.g. 1 for a token at a time.
        dtype: of x.

    Raises:
        ConfigurationError: fewer than one row.
    """

    def __init__(self, device: torch.device | str, rows: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
        if rows < 1:
            raise ConfigurationError(f"rows {rows!r}: a product has at least 1")
        self.device, self.rows, self.dtype = torch.device(device), rows, dtype
        self._known: dict[tuple[str, tuple[int, int]], float] = {}

    def __call__(self, precision: str, shape: tuple[int, int]) -> float:
        """Seconds; measured the first time."""
        if (precision, shape) not in self._known:
            self._known[precision, shape] = self._measured(precision, *shape)
        return self._known[precision, shape]

    @torch.no_grad()
    def _measured(self, precision: str, n: int, k: int) -> float:
        x = torch.randn(self.rows, k, dtype=self.dtype, device=self.device)
        weight = (torch.randn(n, k, device=self.device) * 0.02).to(self.dtype)
        if self.device.type != "cuda":
            return _seconds(self._products(x, weight, precision, 1)[0])
        calls = self._products(x, weight, precision, min(MAX_WEIGHTS, -(-CACHE_BYTES // (weight.nbytes // 4))))
        return _replayed(calls, self.device)

    def _products(self, x: Tensor, weight: Tensor, precision: str, count: int) -> list[Callable[[], Tensor]]:
        """With ``count`` weights, each in separate memory."""
        n, k = weight.shape
        if precision == "bf16":
            copies = [weight.clone() for _ in range(count)]
            return [lambda own=own: functional.linear(x, own) for own in copies]
        parts = place(pack(weight, precision, "drawn weight"))
        placed = [_copy(parts) for _ in range(count)]
        return [lambda own=own: own.linear(x, None, "none", n, k) for own in placed]


def _copy(parts: PlacedWeight) -> PlacedWeight:
    fine = None if parts.fine is None else parts.fine.clone()
    return replace(parts, codes=parts.codes.clone(), scales=parts.scales.clone(), fine=fine)


def _seconds(call: Callable[[], Tensor]) -> float:
    found = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def _replayed(calls: list[Callable[[], Tensor]], device: torch.device) -> float:
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # compiles kernels, and lets the graph read weights ahead (kernels/runtime/launch.py)
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        found = []
        for _ in range(REPEATS + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(found[1:])
