"""Triton kernels of rms_norm.py. Import it only where they run: triton takes half a second.

A program normalises a few whole rows at a time, held in registers, while the next are on their way to shared memory, so
that the HBM never waits for a reduction. Bytes a row of D in type of size e: forward 2 D e (with a residual 4 D e),
backward 3 D e (4 D e). Rows of more than 8192 elements spill some registers in backward.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.runtime.registry import on_device

# Partial sums of the weight's gradient: programs for two on each multiprocessor of an H200, whatever the GPU, so that
# the order of additions is a function of the shape.
BACKWARD_PROGRAMS = 264
# Of the forward, where no sum depends on it: four on each, which is what their registers allow.
FORWARD_PROGRAMS = 528
# Elements that one program holds at a time; rows shorter than this are taken several at once.
TILE = 4096
# Most pipeline stages: rows of one less are on their way or being read.
FORWARD_STAGES, BACKWARD_STAGES = 3, 4
SUM_COLUMNS = 16
# Longest row whose weight the forward keeps in registers.
WEIGHT_KEPT: tl.constexpr = tl.constexpr(8192)


@triton.jit
def _forward(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, scale_ptr, rows, eps,
    TILES: tl.constexpr, D: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    if BLOCK <= WEIGHT_KEPT:
        weight = tl.load(weight_ptr + column, column < D, other=0.0)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        # Programs stride over the rows, so that those that run at a time read side by side.
        row = (tile * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        x = tl.load(x_ptr + at, mask, other=0.0)
        if HAS_RESIDUAL:
            total = x.to(tl.float32) + tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
            x = total.to(x.dtype)
            tl.store(total_ptr + at, x, mask)
        x = x.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
        if BLOCK > WEIGHT_KEPT:
            weight = tl.load(weight_ptr + column, column < D, other=0.0)
        y = x * scale[:, None] * weight.to(tl.float32)[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask)
        tl.store(scale_ptr + row, scale, row < rows)


@triton.jit
def _backward(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, scale_ptr, dx_ptr, partial_ptr, rows,
    TILES: tl.constexpr, D: tl.constexpr, HAS_DTOTAL: tl.constexpr, WITH_WEIGHT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):  # the next rows are on their way while these are reduced
        row = (program * TILES + tile) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * D + column[None, :]
        x = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, row < rows, other=0.0)
        normed = x * scale[:, None]
        if WITH_WEIGHT:
            dweight += dy * normed
        dy = dy * weight[None, :]
        dx = (dy - normed * (tl.sum(dy * normed, 1) / D)[:, None]) * scale[:, None]
        if HAS_DTOTAL:
            dx += tl.load(dtotal_ptr + at, mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask)
    if WITH_WEIGHT:
        tl.store(partial_ptr + program * D + column, tl.sum(dweight, 0), inside)


@triton.jit
def _sum(partial_ptr, out_ptr, rows, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * D + column[None, :]
    part = tl.load(partial_ptr + at, (row < rows)[:, None] & (column < D)[None, :], other=0.0)
    tl.store(out_ptr + column, tl.sum(part, 0).to(out_ptr.dtype.element_ty), column < D)


def tiles_of(tiles: int, most: int) -> tuple[int, int]:
    """(tiles a program takes, programs): at most ``most`` programs, and few different counts, as each is compiled anew."""
    each = max(1, -(-tiles // most))
    step = 1 << max(0, each.bit_length() - 3)
    each = -(-each // step) * step
    return each, -(-tiles // each)


def stages_of(row_bytes: int, most: int, programs: int, shared_bytes: int) -> int:
    """Pipeline stages of loops whose tiles take ``row_bytes``, if ``programs`` share a multiprocessor's
    ``shared_bytes``: at least two sets of rows on their way, or no pipeline, as one set would wait in registers.
    """
    sets = next((sets for sets in range(most - 1, 1, -1) if programs * sets * row_bytes <= shared_bytes), None)
    if sets is None and 2 * row_bytes <= shared_bytes:
        sets = 2
    return 1 if sets is None else sets + 1


@functools.lru_cache
def shared_bytes_of(device: torch.device) -> int:
    """Shared memory that programs on a multiprocessor may take; without a GPU that of a small one, an RTX 3070."""
    if device.type != "cuda":
        return 96 << 10
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - (3 << 10)


def forward_stages(width: int, x_bytes: int, weight_bytes: int, has_residual: bool, shared_bytes: int) -> int:
    """Pipeline stages of the forward, of elements' bytes. A weight that is not kept is fetched ahead as well."""
    rows, block, _ = tile_of(width)
    weights = block * weight_bytes if block > WEIGHT_KEPT.value else 0
    return stages_of((2 if has_residual else 1) * rows * block * x_bytes + weights, FORWARD_STAGES, 4, shared_bytes)


def backward_stages(width: int, x_bytes: int, has_dtotal: bool, shared_bytes: int) -> int:
    """The same of the backward. Scales of very many short rows count; others' are within what `shared_bytes_of` leaves."""
    rows, block, _ = tile_of(width)
    scales = 4 * rows if rows > 128 else 0
    return stages_of((3 if has_dtotal else 2) * rows * block * x_bytes + scales, BACKWARD_STAGES, 2, shared_bytes)


def tile_of(width: int) -> tuple[int, int, int]:
    """(rows at a time, padded width, warps) of a program for rows of ``width``."""
    block = 1 << max(0, width - 1).bit_length()
    rows = max(1, TILE // block)
    return rows, block, max(4, min(32, rows * block // 512))


def forward(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, x + residual, 1 / rms of each row)``; without a residual the second is empty."""
    width, rows = x.shape[-1], x.shape[:-1].numel()
    x_RD = x.contiguous()
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight_D.dtype), device=x.device)
    total = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    scale_R = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        at_once, block, warps = tile_of(width)
        tiles_each, programs = tiles_of(-(-rows // at_once), FORWARD_PROGRAMS)
        shared = shared_bytes_of(x.device)
        stages = forward_stages(width, x.element_size(), weight_D.element_size(), residual is not None, shared)
        with on_device(y):
            _forward[(programs,)](
                x_RD, x_RD if residual is None else residual.contiguous(), weight_D.contiguous(), y, total, scale_R, rows, eps,
                TILES=tiles_each, D=width, HAS_RESIDUAL=residual is not None, ROWS=at_once, BLOCK=block,
                STAGES=stages, num_warps=warps,
            )  # fmt: skip
    return y, total, scale_R


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight_D: Tensor,
    scale_R: Tensor,
    with_weight: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(dx + dtotal, dweight)``; the second is empty without ``with_weight``, the first ``out`` (contiguous) if given."""
    width, rows = x.shape[-1], x.shape[:-1].numel()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    at_once, block, warps = tile_of(width)
    tiles_each, programs = tiles_of(-(-rows // at_once), BACKWARD_PROGRAMS)
    partial = torch.empty((programs if with_weight else 0, width), dtype=torch.float32, device=x.device)
    if rows:
        dy = dy.contiguous()
        with on_device(dx):
            _backward[(programs,)](
                dy, dy if dtotal is None else dtotal.contiguous(), x.contiguous(), weight_D.contiguous(), scale_R, dx, partial,
                rows, TILES=tiles_each, D=width, HAS_DTOTAL=dtotal is not None, WITH_WEIGHT=with_weight, ROWS=at_once, BLOCK=block,
                STAGES=backward_stages(width, x.element_size(), dtotal is not None, shared_bytes_of(x.device)),
                num_warps=warps if block <= TILE else 32,
            )  # fmt: skip
    if not with_weight:
        return dx, weight_D.new_empty(0)
    if not rows:
        return dx, torch.zeros_like(weight_D, memory_format=torch.contiguous_format)
    # Filled by the sums alone: zeroing it first would be one more launch, compared with some 75 us for 16384 rows of
    # 2560 on an H200.
    dweight_D = torch.empty_like(weight_D, memory_format=torch.contiguous_format)
    with on_device(dx):
        _sum[(triton.cdiv(width, SUM_COLUMNS),)](
            partial, dweight_D, programs,
            D=width, ROWS=triton.next_power_of_2(programs), COLUMNS=SUM_COLUMNS, num_warps=4,
        )  # fmt: skip
    return dx, dweight_D
