"""What fp4_plans.py times beside plans of the fused kernels where there are a thousand rows and more: ways around a library's matmul."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from bench_fp4 import LAYERS, Tiled, random_tiled

from vblackwell.kernels import fp4_chunks, fp4_cuda, w4a8
from vblackwell.kernels.fp4 import fp4_linear, fp4_linear_dx

CHUNKS = [fp4_chunks.ChunkPlan(*way) for way in itertools.product((2, 4, 8), (8, 16, 20))]
DEQUANTIZES = [fp4_cuda.DequantizePlan(*way) for way in itertools.product((False, True), (False, True))]
PREPARES = [
    fp4_cuda.PreparePlan(tiles, rows_first, passing)
    for tiles, rows_first, passing in itertools.product((1, 2, 4), (False, True), (False, True))
]


def parts(m: int, n: int, k: int, x: torch.Tensor, packed: list[Tiled]) -> dict[str, list[Callable[[], object]]]:
    """The ops, by name, and what w4a8 is made of, for many rows."""
    if m < 1024:
        return {}
    op = functools.partial(fp4_linear, format="nvfp4-tiled", activation="none", n=n, k=k)
    found: dict[str, list[Callable[[], object]]] = {"op": [functools.partial(op, x, *w, None) for w in packed]}
    tops = [w4a8.row_tops_for_w4a8(w[1], n, k) for w in packed]
    op = functools.partial(w4a8.fp4_linear_w4a8, activation="none", n=n, k=k)
    found["w4a8"] = [functools.partial(op, x, *w, top, None) for w, top in zip(packed, tops, strict=True)]
    prepare = functools.partial(fp4_cuda.run_prepare_e4m3, x, n=n, k=k)
    found["w4a8: operands"] = [functools.partial(prepare, *w, row_top=top) for w, top in zip(packed, tops, strict=True)]
    one_row = functools.partial(fp4_cuda.run_prepare_e4m3, x[:1], n=n, k=k)
    found["w4a8: weight"] = [functools.partial(one_row, *w, row_top=top) for w, top in zip(packed, tops, strict=True)]
    narrow = random_tiled(32, k)
    top = w4a8.row_tops_for_w4a8(narrow[1], 32, k)
    rows: Callable[[], object] = functools.partial(fp4_cuda.run_prepare_e4m3, x, *narrow, row_top=top, n=32, k=k)
    found["w4a8: rows"] = [rows] * LAYERS
    ready = [prepare(*w, row_top=top) for w, top in zip(packed, tops, strict=True)]
    found["w4a8: matmul"] = [functools.partial(w4a8.multiply_rows, *operands) for operands in ready]
    for plan in PREPARES:
        found[f"w4a8 {plan}"] = [
            functools.partial(_w4a8, x, w, top, n, k, plan) for w, top in zip(packed, tops, strict=True)
        ]
    if n * k >= 1 << 25:  # else a chunk is too small for a round of tiles
        for plan in CHUNKS:
            run = functools.partial(fp4_chunks.linear_w4a8, plan, x)
            found[f"FP8 {plan}"] = [
                functools.partial(run, *w, row_top=top, n=n) for w, top in zip(packed, tops, strict=True)
            ]
    for plan in DEQUANTIZES:
        found[str(plan)] = [functools.partial(_whole, torch.nn.functional.linear, x, w, n, k, plan) for w in packed]
    for plan in CHUNKS:
        run = functools.partial(fp4_chunks.linear, plan, x, bias=None, n=n)
        found[str(plan)] = [functools.partial(_tiled, run, w) for w in packed]
    return found


def dx_parts(
    m: int, n: int, k: int, packed: list[Tiled], dense: list[torch.Tensor]
) -> dict[str, list[Callable[[], object]]]:
    """The gradient of x: cuBLAS, the op, and the weight in chunks, for many rows."""
    if m < 4096:
        return {}
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    found: dict[str, list[Callable[[], object]]] = {
        "dX cuBLAS": [functools.partial(torch.matmul, dy, w) for w in dense]
    }
    op = functools.partial(fp4_linear_dx, dy, format="nvfp4-tiled", n=n, k=k)
    found["dX op"] = [functools.partial(_tiled, op, w) for w in packed]
    for plan in DEQUANTIZES:
        found[f"dX {plan}"] = [functools.partial(_whole, torch.matmul, dy, w, n, k, plan) for w in packed]
    for plan in CHUNKS:
        run = functools.partial(fp4_chunks.linear_dx, plan, dy, n=n, k=k)
        found[f"dX {plan}"] = [functools.partial(_tiled, run, w) for w in packed]
    return found


def _tiled(run: Callable[..., torch.Tensor], weight: Tiled) -> torch.Tensor:
    codes, block_scales, tensor_scale = weight
    return run(codes=codes, block_scales=block_scales, tensor_scale=tensor_scale)


def _whole(
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weight: Tiled,
    n: int,
    k: int,
    plan: fp4_cuda.DequantizePlan,
) -> torch.Tensor:
    w = torch.empty(n, k, dtype=x.dtype, device=x.device)
    fp4_cuda.dequantize_into(w, *weight, plan=plan)
    return multiply(x, w)


def _w4a8(x: torch.Tensor, weight: Tiled, row_top: torch.Tensor, n: int, k: int, plan: fp4_cuda.PreparePlan) -> object:
    return w4a8.multiply_rows(*fp4_cuda.run_prepare_e4m3(x, *weight, row_top, n, k, plan))


def drop_wrong(systems: dict[str, list[Callable[[], object]]]) -> dict[str, str]:
    """Takes plans that fail, do not repeat bit for bit or disagree with their op out of ``systems``; why, by name."""
    results: dict[str, torch.Tensor] = {}
    wrong: dict[str, str] = {}
    for name, calls in systems.items():
        kind = name.split("(")[0].replace("DequantizePlan", "ChunkPlan")
        kind = {"op": "ChunkPlan", "dX op": "dX ChunkPlan", "w4a8": "FP8 ChunkPlan"}.get(kind, kind)
        if "Plan" not in kind:
            continue
        try:
            first, second = (call() for call in (calls[-1], calls[-1]))
        except RuntimeError as error:
            wrong[name] = f"failed: {error}".splitlines()[0][:160]
            continue
        assert isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        reference = results.setdefault(kind, first).float()
        far = float((first.float() - reference).norm() / reference.norm())
        if not torch.equal(first, second):
            wrong[name] = "does not repeat"
        elif not far <= (0.0 if kind.startswith("w4a8") else 2e-3):  # one rounding of sums in another order
            wrong[name] = f"differs by {far:.2g}"
    for name in wrong:
        del systems[name]
    return wrong


def jobs_of(cell: tuple[int, int, int]) -> list[tuple[tuple[str, ...], dict[str, int]]]:
    """What `parts` and `dx_parts` run of this package, beside the plans of the fused kernels."""
    if cell[0] < 1024:
        return []
    found: list[tuple[tuple[str, ...], dict[str, int]]] = [
        (fp4_cuda.DEQUANTIZE_FILES, fp4_cuda.dequantize_macros(torch.bfloat16, plan=plan)) for plan in DEQUANTIZES
    ]
    found.append((fp4_cuda.DEQUANTIZE_FILES, fp4_cuda.dequantize_macros(torch.bfloat16, True)))
    found.append((fp4_cuda.E4M3_FILES, fp4_cuda.PREPARE.macros(False, cell[2], True)))
    return found + [(fp4_cuda.E4M3_FILES, plan.macros(False, cell[2])) for plan in (fp4_cuda.PREPARE, *PREPARES)]
