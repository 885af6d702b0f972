"""Layers of random weights in the tiled layout, and the plans by which benchmarks of the FP4 kernels run them."""

from __future__ import annotations

import torch

from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import layout, mma_plan, wgmma_plan
from vblackwell.kernels.fp4.mma_plan import Gpu, MmaPlan
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan

LAYERS = 24  # more than fit an L2
Tiled = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_tiled(n: int, k: int) -> Tiled:
    """A weight of random codes and scales, made in the tiled layout."""
    codes_shape, scales_shape = layout.shapes("nvfp4-tiled", n, k)
    codes = torch.randint(0, 256, codes_shape, dtype=torch.uint8, device="cuda")
    scales = torch.randint(12, 18, scales_shape, dtype=torch.uint8, device="cuda") << 3  # powers of two: mxfp4 as well
    return codes, scales, torch.tensor(2.0**-7, device="cuda")


def ampere(processors: int) -> Gpu:
    """So many multiprocessors of a Hopper GPU as one without clusters, bulk copies and wgmma, with all of its memory's
    rate."""
    return fp4_launch.gpu_of(torch.device("cuda", 0))._replace(capability=(8, 0), processors=processors)


def plans_of(m: int, n: int, k: int) -> list[MmaPlan | WgmmaPlan]:
    """Every plan that the dispatcher, or somebody who asks for a backend, may run for a shape on Hopper, and those of
    other GPUs with 46 and 108 multiprocessors."""
    plans, gpu = list[MmaPlan | WgmmaPlan](), fp4_launch.gpu_of(torch.device("cuda", 0))
    if m <= 16:
        plans.append(mma_plan.plan_mma(m, n, k, gpu))
    if m <= 256:
        plans += [mma_plan.plan_mma(m, n, k, ampere(processors)) for processors in (46, 108)]
    if m <= 1024 or wgmma_plan.wgmma_beats_dequantize(m, n, k, gpu):
        plans.append(wgmma_plan.plan_wgmma(m, n, k, gpu))
    return list(dict.fromkeys(plans))


def parts_of(plan: MmaPlan | WgmmaPlan, m: int, n: int) -> list[MmaPlan | WgmmaPlan]:
    """What the launches of a plan are compiled for."""
    if isinstance(plan, MmaPlan):
        return [plan]
    processors = fp4_launch.processors(torch.device("cuda", 0))
    return [rows.plan for rows in wgmma_plan.launches(plan, m, n, processors)]


def run_plan(
    plan: MmaPlan | WgmmaPlan, x: torch.Tensor, w: Tiled, n: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if isinstance(plan, MmaPlan):
        return fp4_launch.run_mma(plan, x, w, None, "none", n, dtype)
    return fp4_launch.run_wgmma(plan, x, w, None, "none", n, dtype)


def layers_of(n: int, k: int) -> tuple[list[Tiled], list[torch.Tensor]]:
    packed = [random_tiled(n, k) for _ in range(LAYERS)]
    return packed, [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
