"""Layers of random weights in the tiled layout, what runs them in the FP4 benchmarks, and whether that is right."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import layout, mma_plan, reference, wgmma_plan
from vblackwell.kernels.fp4.mma_plan import Gpu, MmaPlan
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan
from vblackwell.kernels.runtime import nvrtc

LAYERS = 24  # more than fit an L2
FORMAT = "nvfp4-tiled"
CHECKED_ROWS, CHECKED_BANDS = 64, 8  # of x and of a weight, in float64
Tiled = tuple[Tensor, Tensor, Tensor]
Source = tuple[tuple[str, ...], tuple[tuple[str, int], ...]]  # files, macros


def random_tiled(n: int, k: int, device: str = "cuda") -> Tiled:
    """A weight of random codes and scales, made in the tiled layout; zero codes beyond its rows and columns."""
    codes_shape, scales_shape = layout.shapes(FORMAT, n, k)
    codes = torch.randint(0, 256, codes_shape, dtype=torch.uint8, device=device)
    scales = torch.randint(12, 18, scales_shape, dtype=torch.uint8, device=device) << 3  # powers of two: mxfp4 as well
    scale = torch.tensor(2.0**-7, device=device)
    if columns := k % layout.TILE_K:
        _clear_edge(codes[:, -1:], scales[:, -1:], scale, layout.TILE_N * len(codes), columns)
    if rows := n % layout.TILE_N:
        _clear_edge(codes[-1:], scales[-1:], scale, rows, k)
    return codes, scales, scale


def _clear_edge(codes: Tensor, scales: Tensor, scale: Tensor, n: int, k: int) -> None:
    """Zero what tiles hold beyond ``n`` rows and ``k`` columns."""
    packed, *scaled = layout.from_tiled(codes, scales, scale, FORMAT, n, k)
    packed[:, (k + 1) // 2 :] = 0
    if k % 2:
        packed[:, k // 2] &= 0x0F
    tiles = layout.to_tiled(packed, *scaled, "nvfp4", n, k)
    codes.copy_(tiles[0])
    scales.copy_(tiles[1])


def gpu() -> Gpu:
    """The one that benchmarks run on."""
    return fp4_launch.gpu_of(torch.device("cuda", 0))


def ampere(processors: int) -> Gpu:
    """So many multiprocessors of this GPU as one without clusters, bulk copies and wgmma, with all of its memory's
    rate."""
    return gpu()._replace(capability=(8, 0), processors=processors)


def sources(plan: MmaPlan | WgmmaPlan, m: int, n: int, k: int) -> list[Source]:
    """What a plan runs for rows of bf16."""
    if isinstance(plan, MmaPlan):
        return [(mma_plan.MMA_FILES, tuple(plan.macros(unaligned=k % 8 > 0).items()))]
    parts = wgmma_plan.launches(plan, m, n, gpu().processors)
    return [(wgmma_plan.WGMMA_FILES, tuple(rows.plan.macros(False).items())) for rows in parts]


def compile_for(source: Source) -> None:
    """Into the cache on disk, from which launches load; NVRTC leaves Python to others meanwhile."""
    files, macros = source
    nvrtc.cached_cubin(files, dict(macros), "sm_90a")


def run_plan(plan: MmaPlan | WgmmaPlan, x: Tensor, w: Tiled, n: int) -> Tensor:
    if isinstance(plan, MmaPlan):
        return fp4_launch.run_mma(plan, x, w, None, "none", n)
    return fp4_launch.run_wgmma(plan, x, w, None, "none", n)


def layers_of(n: int, k: int, count: int = LAYERS) -> tuple[list[Tiled], list[Tensor]]:
    """``count`` layers, each with separate memory; the packed ones have the same values, which take long to make."""
    first = random_tiled(n, k)
    packed = [first, *((first[0].clone(), first[1].clone(), first[2].clone()) for _ in range(count - 1))]
    return packed, [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def error_over_bound(y_MN: Tensor, x_MK: Tensor, w: Tiled, n: int, k: int) -> float:
    """Largest error of some rows and bands of ``y``, the last ones too, over its bound; infinite if any of ``y`` is not
    finite.

    The bound is one rounding of the result to bf16 and 2^-6 of what a sum of K such products has as its standard
    deviation: cuBLAS may round the partial sums of a split K to bf16, 2^-9 each, and an element that a wrong weight or
    row was added to is off by the whole deviation.
    """
    if not bool(y_MN.isfinite().all()):
        return float("inf")
    pick = random.Random(0)
    bands = -(-n // layout.TILE_N)
    rows = sorted({*pick.sample(range(len(x_MK)), min(CHECKED_ROWS, len(x_MK))), len(x_MK) - 1})
    worst, x = 0.0, x_MK[rows].double()
    for band in {*pick.sample(range(bands), min(CHECKED_BANDS, bands)), bands - 1}:
        first, end = band * layout.TILE_N, min((band + 1) * layout.TILE_N, n)
        tiles = (w[0][band : band + 1], w[1][band : band + 1], w[2])
        w_NK = reference.dequantize(*tiles, FORMAT, end - first, k).double()
        exact = x @ w_NK.t()
        deviation = x.norm(dim=1)[:, None] * w_NK.norm(dim=1) / k**0.5
        ratio = (y_MN[rows, first:end].double() - exact).abs() / (2**-8 * exact.abs() + 2**-6 * deviation + 1e-30)
        worst = max(worst, ratio.max().item())
    return worst
