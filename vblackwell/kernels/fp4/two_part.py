"""Linear with a weight in two parts (numerics/separation.py) as a PyTorch op, and its plans: ``fp4_mma`` for up to 16
rows of bf16 on tiled parts, else as any packed weight. Windows hold 2176 bytes instead of 1152, so less of x fits.

``M`` rows, ``N`` out features, ``K`` in features.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4 import layout, linear, mma_plan
from vblackwell.kernels.fp4.launch import Given, Product, gpu_of, prepare_mma
from vblackwell.kernels.fp4.mma_plan import Gpu, MmaPlan, ceil_div, round_up, takes_bulk
from vblackwell.kernels.runtime.registry import Backend, Request, register_op

MAX_ROWS = 16
_WINDOW_BYTES = 2176
_LARGE = 1 << 25
# With and without clusters: shared memory of a block, x of it that is staged at a time without bulk copies, and windows
# that a warp has in flight.
MAX_SHARED_BYTES = {True: 227 * 1024, False: 99 * 1024}
_X_BYTES = {True: 80 * 1024, False: 24 * 1024}
_PREFETCH = {True: 4, False: 3}


@dataclass(frozen=True)
class TwoPartPlan(MmaPlan):
    """How ``fp4_mma`` covers a shape with PARTS; chunks may be any multiple of ``k_warps`` windows."""

    def __post_init__(self) -> None:
        if self.chunk % self.k_warps:
            raise ConfigurationError(f"chunks of {self.chunk} windows do not go to {self.k_warps} K warps alike")

    def macros(
        self, fp16: bool = False, out32: bool = False, norm: bool = False, unaligned: bool = False
    ) -> dict[str, int]:
        return super().macros(fp16, out32, norm, unaligned) | {"PARTS": 1}

    def shared_bytes(self, k: int, norm: bool = False) -> int:
        windows, count = self.chunks(k)
        staged = windows * self.tokens * 128 * min(2, count)
        if self.chunk:
            staged = self.x_stages * (self.tokens * (self.chunk * 128 + 16) + 16)  # and two barriers each
        ring = self.row_warps * self.k_warps * self.prefetch * _WINDOW_BYTES
        sent = self.tokens * 32 * self.row_warps * 4 if self.splits > 1 else 0
        return max(staged + ring, self.k_warps * self.tokens * (32 * self.row_warps + 4) * 4) + sent

    def fits(self, k: int, clusters: bool = True) -> bool:
        """Whether ``min_blocks`` of them fit a multiprocessor's shared memory, of which each takes a KB more."""
        return self.shared_bytes(k) <= (MAX_SHARED_BYTES[clusters] + 1024) // self.min_blocks - 1024


def _with_bulk_copies(m: int, n: int, k: int, gpu: Gpu) -> TwoPartPlan:
    """From three rows on: most blocks in one wave, to within 8, then the tallest up to 128 rows; x by 16 windows."""
    tokens, windows = max(4, 1 << (m - 1).bit_length()), k // 64
    best, row_warps, splits = (0, 0), 8, 1
    for its_splits, rows in itertools.product((1, 2), (1, 2, 3, 4, 6, 8)):
        blocks = ceil_div(n, 32 * rows) * its_splits
        merit = (blocks // 8, rows if rows <= 4 else -rows)
        if blocks <= gpu.processors and merit > best:
            best, row_warps, splits = merit, rows, its_splits
    warps = 16 if (splits == 2) == (tokens <= 8) or (tokens, n, k) == (16, 4096, 14336) else 12  # the last as timed
    k_warps = min(max(2, warps // row_warps), windows // splits)
    how = {"x_bytes": _X_BYTES[True], "chunk": round_up(min(16, windows // splits), k_warps), "x_stages": 3}
    return TwoPartPlan(tokens, row_warps, k_warps, splits, _PREFETCH[True], **how)


def _of_large_weights(n: int, windows: int, base: TwoPartPlan, gpu: Gpu) -> TwoPartPlan:
    """Plans for weights of 2^25 elements and more, among the fastest on an H200 (docs/journal/runs.md): up to 8 rows
    two blocks of 8 warps, of which one computes while the other's sums meet; from 9 on one block of 16 warps and long
    chunks of x, or all of it where blocks split K."""
    if base.tokens <= 8:
        shapes = [(rows, splits, ceil_div(n, 32 * rows) * splits) for splits in (1, 2) for rows in (1, 2, 4, 8)]
        if fitting := [(blocks // 8, *shape) for *shape, blocks in shapes if blocks <= 2 * gpu.processors]:
            _, rows, splits = max(fitting)
            how = {"prefetch": 4, "min_blocks": 2, "chunk": 8, "x_stages": 3}
            return replace(base, row_warps=rows, k_warps=8 // rows, splits=splits, **how)
    k_warps = max(1, 16 // base.row_warps)
    kind = replace(base, k_warps=k_warps, chunk=round_up(16, k_warps), x_stages=3, prefetch=3)
    whole = ceil_div(ceil_div(windows, base.splits), kind.chunk)
    at_once = replace(kind, x_stages=whole, prefetch=2)
    return at_once if base.splits > 1 and whole <= 4 and at_once.fits(64 * windows) else kind


def plan_two_part(m: int, n: int, k: int, gpu: Gpu) -> TwoPartPlan:
    """The plan for up to 16 rows, with or without clusters of blocks."""
    clusters = gpu.clusters
    if clusters and m > 2 and takes_bulk(k):
        found = _with_bulk_copies(m, n, k, gpu)
    else:
        base = mma_plan.plan_mma(m, n, k, gpu, bulk=False, one_block=True)
        shape = (base.tokens, base.row_warps, base.k_warps, base.splits)
        found = TwoPartPlan(*shape, min(_PREFETCH[clusters], base.prefetch), x_bytes=_X_BYTES[clusters])
    if clusters and n * k >= _LARGE and takes_bulk(k):
        large = _of_large_weights(n, k // 64, found, gpu)
        if large.fits(k):
            return large
    if found.chunk and not found.fits(k, clusters):
        found = replace(found, x_stages=2)
    return found


def _mma_reasons(request: Request) -> list[str]:
    reasons = linear.linear_reasons(request)
    if request.dtype != torch.bfloat16:
        reasons.append(f"activations are {request.dtype}: it takes bfloat16")
    if request.m > MAX_ROWS:
        reasons.append(f"{request.m} rows: above {MAX_ROWS} writing the weight out is faster")
    return reasons


def _mma(request: Request, given: Given) -> Product:
    return prepare_mma(plan_two_part(request.m, request.n, request.k, gpu_of(given.device)), given)


LINEAR = (Backend("mma", _mma_reasons, _mma), *linear.BY_WHOLE_WEIGHT)


def _check(codes: Tensor, fine: Tensor, format: str) -> None:
    if format not in layout.PARTS_LAYOUTS:
        raise ConfigurationError(f"no weight in two parts has the layout {format!r}: {', '.join(layout.PARTS_LAYOUTS)}")
    if fine.shape != codes.shape or fine.device != codes.device:
        found = f"fine codes {tuple(fine.shape)} on {fine.device}"
        raise ConfigurationError(f"{found} next to coarse codes {tuple(codes.shape)} on {codes.device}")


@register_op(linear.fake_gradient, autocast="keep", direct=True)
def two_part_linear_dx(
    dy_MN: Tensor, codes: Tensor, fine: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int
) -> Tensor:
    """``dY W``: (..., N) -> (..., K), the gradient of ``two_part_linear`` (without activation) in its input."""
    _check(codes, fine, format)
    return linear.input_gradient(dy_MN, (codes, fine, block_scales, tensor_scale), format, n, k)


@linear.packed_linear(4, two_part_linear_dx)
def two_part_linear(
    x_MK: Tensor,
    codes: Tensor,
    fine: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    bias: Tensor | None,
    format: str,
    activation: str,
    n: int,
    k: int,
) -> Tensor:
    """``activation(x W^T + bias)`` with ``W`` the sum of its parts: those of a `PackedTensor` (format 'nvfp4') or of
    ``layout.parts_to_tiled`` ('nvfp4-tiled'); the rest, and what is raised, as for ``fp4_linear``."""
    _check(codes, fine, format)
    weight = (codes, fine, block_scales, tensor_scale)
    return linear.run_rows("two_part_linear", LINEAR, x_MK, format, n, k, weight, bias, activation)
