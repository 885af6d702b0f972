"""Triton kernels of rows.py and cross_entropy.py, and their launches."""
# What @triton.jit makes of a function has no type.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.runtime.registry import empty_of
from vblackwell.kernels.runtime.triton_launch import launch

# -- RMSNorm -----------------------------------------------------------------------------------------------------------
# A program normalises a few whole rows at a time, held in registers, while the next are on their way to shared memory:
# the HBM never waits for a reduction. Bytes a row of D in type of size e: forward 2 D e (with a residual 4 D e),
# backward 3 D e (4 D e). Rows of more than 8192 elements spill some registers in backward.

# Partial sums of the weight's gradient: programs for two on each multiprocessor of an H200, whatever the GPU, so that
# the order of additions is a function of the shape.
BACKWARD_PROGRAMS = 264
# Of the forward, where no sum depends on it: four on each, which is what their registers allow.
FORWARD_PROGRAMS = 528
# Elements that one program holds at a time; rows shorter than this are taken several at once.
ROWS_TILE = 4096
# Most pipeline stages: rows of one less are on their way or being read.
FORWARD_STAGES, BACKWARD_STAGES = 3, 4
SUM_COLUMNS = 16
# Longest row whose weight the forward keeps in registers.
WEIGHT_KEPT: tl.constexpr = tl.constexpr(8192)


class Tile(NamedTuple):
    """What a program takes of rows of ``width``, padded to ``block``: ``tiles`` times ``rows``."""

    width: int
    rows: int
    block: int
    tiles: int
    stages: int


@triton.jit
def _rms_norm(x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, scale_ptr, rows, eps, TILE: tl.constexpr):
    column = tl.arange(0, TILE.block)
    if TILE.block <= WEIGHT_KEPT:
        weight = tl.load(weight_ptr + column, column < TILE.width, other=0.0)
    for tile in tl.range(0, TILE.tiles, num_stages=TILE.stages):
        # Programs stride over the rows, so that those that run at a time read side by side.
        row = (tile * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
        mask = (row < rows)[:, None] & (column < TILE.width)[None, :]
        at = row[:, None] * TILE.width + column[None, :]
        x = tl.load(x_ptr + at, mask, other=0.0)
        if residual_ptr is not None:
            total = x.to(tl.float32) + tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
            x = total.to(x.dtype)
            tl.store(total_ptr + at, x, mask)
        x = x.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / TILE.width + eps)
        if TILE.block > WEIGHT_KEPT:
            weight = tl.load(weight_ptr + column, column < TILE.width, other=0.0)
        y = x * scale[:, None] * weight.to(tl.float32)[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask)
        tl.store(scale_ptr + row, scale, row < rows)


@triton.jit
def _rms_norm_backward(dy_ptr, dtotal_ptr, x_ptr, weight_ptr, scale_ptr, dx_ptr, partial_ptr, rows, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE.block)
    inside = column < TILE.width
    weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(0, TILE.tiles, num_stages=TILE.stages):  # the next rows come while these are reduced
        row = (program * TILE.tiles + tile) * TILE.rows + tl.arange(0, TILE.rows)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * TILE.width + column[None, :]
        x = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, row < rows, other=0.0)
        normed = x * scale[:, None]
        if partial_ptr is not None:
            dweight += dy * normed
        dy = dy * weight[None, :]
        dx = (dy - normed * (tl.sum(dy * normed, 1) / TILE.width)[:, None]) * scale[:, None]
        if dtotal_ptr is not None:
            dx += tl.load(dtotal_ptr + at, mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask)
    if partial_ptr is not None:
        tl.store(partial_ptr + program * TILE.width + column, tl.sum(dweight, 0), inside)


@triton.jit
def _sum(partial_ptr, out_ptr, rows, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * D + column[None, :]
    part = tl.load(partial_ptr + at, (row < rows)[:, None] & (column < D)[None, :], other=0.0)
    tl.store(out_ptr + column, tl.sum(part, 0).to(out_ptr.dtype.element_ty), column < D)


def tiles_of(tiles: int, most: int) -> tuple[int, int]:
    """(tiles a program takes, programs): at most ``most`` programs, and few different counts: each is compiled."""
    each = max(1, -(-tiles // most))
    step = 1 << max(0, each.bit_length() - 3)
    each = -(-each // step) * step
    return each, -(-tiles // each)


def stages_of(row_bytes: int, most: int, programs: int, shared_bytes: int) -> int:
    """Pipeline stages of loops whose tiles take ``row_bytes``, if ``programs`` share a multiprocessor: at least two
    sets of rows on their way, or no pipeline, as one set would wait in registers."""
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
    """The same of the backward. Scales of very many short rows count; others are in what `shared_bytes_of` leaves."""
    rows, block, _ = tile_of(width)
    scales = 4 * rows if rows > 128 else 0
    return stages_of((3 if has_dtotal else 2) * rows * block * x_bytes + scales, BACKWARD_STAGES, 2, shared_bytes)


def tile_of(width: int) -> tuple[int, int, int]:
    """(rows at a time, padded width, warps) of a program for rows of ``width``."""
    block = 1 << max(0, width - 1).bit_length()
    rows = max(1, ROWS_TILE // block)
    return rows, block, max(4, min(32, rows * block // 512))


@functools.lru_cache(maxsize=1024)
def _forward_launch(
    device: torch.device, rows: int, width: int, x_bytes: int, weight_bytes: int, has_residual: bool
) -> tuple[Tile, int, int]:
    """(tile, programs, warps) of the forward, of elements' bytes."""
    at_once, block, warps = tile_of(width)
    tiles, programs = tiles_of(-(-rows // at_once), FORWARD_PROGRAMS)
    stages = forward_stages(width, x_bytes, weight_bytes, has_residual, shared_bytes_of(device))
    return Tile(width, at_once, block, tiles, stages), programs, warps


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    device: torch.device, rows: int, width: int, x_bytes: int, has_dtotal: bool
) -> tuple[Tile, int, int]:
    """The same of the backward."""
    at_once, block, warps = tile_of(width)
    tiles, programs = tiles_of(-(-rows // at_once), BACKWARD_PROGRAMS)
    stages = backward_stages(width, x_bytes, has_dtotal, shared_bytes_of(device))
    return Tile(width, at_once, block, tiles, stages), programs, warps if block <= ROWS_TILE else 32


def rms_norm(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, x + residual, 1 / rms of each row)``; without a residual the second is empty."""
    width, rows = x.shape[-1], x.shape[:-1].numel()
    x_RD = x.contiguous()
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight_D.dtype), device=x.device)
    total = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    scale_R = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        size, weight_size = x.element_size(), weight_D.element_size()
        tile, programs, warps = _forward_launch(x.device, rows, width, size, weight_size, residual is not None)
        added, weight_D = None if residual is None else residual.contiguous(), weight_D.contiguous()
        launch(_rms_norm, (programs, 1, 1), (x_RD, added, weight_D, y, total, scale_R), (rows, float(eps), tile), warps)
    return y, total, scale_R


def rms_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight_D: Tensor,
    scale_R: Tensor,
    with_weight: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(dx + dtotal, dweight)``; the second is empty without ``with_weight``; the first is ``out`` if given."""
    width, rows = x.shape[-1], x.shape[:-1].numel()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    tile, programs, warps = _backward_launch(x.device, rows, width, x.element_size(), dtotal is not None)
    partial = torch.empty((programs, width), dtype=torch.float32, device=x.device) if with_weight else None
    if rows:
        added = None if dtotal is None else dtotal.contiguous()
        tensors = (dy.contiguous(), added, x.contiguous(), weight_D.contiguous(), scale_R, dx, partial)
        launch(_rms_norm_backward, (programs, 1, 1), tensors, (rows, tile), warps)
    if partial is None:
        return dx, weight_D.new_empty(0)
    if not rows:
        return dx, torch.zeros_like(weight_D, memory_format=torch.contiguous_format)
    # Filled by the sums alone: zeroing it first would be one more launch, compared with some 75 us for 16384 rows of
    # 2560 on an H200.
    dweight_D = torch.empty_like(weight_D, memory_format=torch.contiguous_format)
    numbers = (programs, width, triton.next_power_of_2(programs), SUM_COLUMNS)
    launch(_sum, (triton.cdiv(width, SUM_COLUMNS), 1, 1), (partial, dweight_D), numbers, 4)
    return dx, dweight_D


# -- SwiGLU ------------------------------------------------------------------------------------------------------------

SWIGLU_BLOCK, SWIGLU_WARPS = 2048, 4
MAX_ROWS = 65535  # of one launch: CUDA's limit for the second dimension of a grid


@triton.jit
def _swiglu(gate_ptr, up_ptr, y_ptr, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _swiglu_backward(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, width, dy_stride, gate_stride, up_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dy = tl.load(dy_ptr + row * dy_stride + column, inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    # d silu / d gate = sigmoid + silu (1 - sigmoid)
    dgate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
    at = row * width + column
    tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), inside)
    tl.store(dup_ptr + at, (dy * silu).to(dup_ptr.dtype.element_ty), inside)
    if y_ptr is not None:
        tl.store(y_ptr + at, (silu * up).to(y_ptr.dtype.element_ty), inside)


def _launch(kernel: Any, tensors: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> None:
    """``kernel`` of rows of ``tensors``, of one shape, and of contiguous ``outputs``, `MAX_ROWS` at a time; one row if
    all are contiguous."""
    count, parts = tensors[0].numel(), [*tensors]
    if not count:
        return
    rows, width, strides = 1, count, [count] * len(tensors)
    if not all(tensor.is_contiguous() for tensor in tensors):
        flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
        parts = [tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in flat]
        (rows, width), strides = parts[0].shape, [tensor.stride(0) for tensor in parts]
    parts += [None if out is None else out.view(rows, width) for out in outputs]
    for start in range(0, rows, MAX_ROWS):
        now = min(MAX_ROWS, rows - start)
        grid = (triton.cdiv(width, SWIGLU_BLOCK), now, 1)
        some = parts if now == rows else [x if x is None else x[start : start + now] for x in parts]
        launch(kernel, grid, some, (width, *strides, SWIGLU_BLOCK), SWIGLU_WARPS)


def swiglu(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, contiguous: new, or ``out``, which may be a contiguous ``gate`` or ``up`` itself."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if out is None else out
    _launch(_swiglu, (gate, up), (y,))
    return y


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, with_product: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``(dgate, dup, product)``, contiguous; the product is empty unless asked for."""
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    y = torch.empty(gate.shape if with_product else (0,), dtype=gate.dtype, device=gate.device)
    _launch(_swiglu_backward, (dy, gate, up), (dgate, dup, y if with_product else None))
    return dgate, dup, y


def swiglu_backward_in_place(dy: Tensor, gate: Tensor, up: Tensor) -> None:
    """Turns the three, contiguous, into the product, dgate and dup: each element is read before it is written."""
    _launch(_swiglu_backward, (dy, gate, up), (gate, up, dy))


# -- rotary embedding --------------------------------------------------------------------------------------------------

ROTARY_TILE = 2048  # elements of one half that a program holds at a time


class Rotation(NamedTuple):
    """Of queries' and keys' heads what a program turns."""

    queries: int
    keys: int
    half: int  # elements of half a head
    block: int  # the same, padded
    heads: int  # that a program holds at a time
    inverse: bool


@triton.jit
def _halves(head_ptr, inside, HALF: tl.constexpr, BLOCK: tl.constexpr):
    at = head_ptr + tl.arange(0, BLOCK)
    return tl.load(at, inside, other=0.0).to(tl.float32), tl.load(at + HALF, inside, other=0.0).to(tl.float32)


@triton.jit
def _turn(in_ptr, out_ptr, in_strides, out_strides, b, s, cos, sin, inside, N: tl.constexpr, BY: tl.constexpr):
    cos1, cos2 = cos
    sin1, sin2 = sin
    HEADS: tl.constexpr = BY.heads
    h = tl.arange(0, BY.block)
    for first in tl.static_range(0, N, HEADS):
        n = first + tl.arange(0, HEADS)
        mask = (n < N)[:, None] & inside[None, :]
        at = in_ptr + b * in_strides[0] + s * in_strides[2] + n[:, None] * in_strides[1] + h[None, :]
        left = tl.load(at, mask, other=0.0).to(tl.float32)
        right = tl.load(at + BY.half, mask, other=0.0).to(tl.float32)
        if BY.inverse:
            new_left = left * cos1[None, :] + right * sin2[None, :]
            new_right = right * cos2[None, :] - left * sin1[None, :]
        else:
            new_left = left * cos1[None, :] - right * sin1[None, :]
            new_right = right * cos2[None, :] + left * sin2[None, :]
        to = out_ptr + b * out_strides[0] + s * out_strides[2] + n[:, None] * out_strides[1] + h[None, :]
        tl.store(to, new_left.to(out_ptr.dtype.element_ty), mask)
        tl.store(to + BY.half, new_right.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _rotate(q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, length, strides, BY: tl.constexpr):
    q_strides, k_strides, q_out_strides, k_out_strides, cos_strides, sin_strides = strides
    position = tl.program_id(0).to(tl.int64)
    b, s = position // length, position % length
    inside = tl.arange(0, BY.block) < BY.half
    cos = _halves(cos_ptr + b * cos_strides[0] + s * cos_strides[1], inside, BY.half, BY.block)
    sin = _halves(sin_ptr + b * sin_strides[0] + s * sin_strides[1], inside, BY.half, BY.block)
    _turn(q_ptr, q_out_ptr, q_strides, q_out_strides, b, s, cos, sin, inside, BY.queries, BY)
    _turn(k_ptr, k_out_ptr, k_strides, k_out_strides, b, s, cos, sin, inside, BY.keys, BY)


@triton.jit
def _store(
    q_ptr, k_ptr, v_ptr, out_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, position_ptr, strides, BY: tl.constexpr
):
    """One head of one row: a query, a key or a value."""
    N: tl.constexpr = BY.queries
    HALF: tl.constexpr = BY.half
    q_strides, k_strides, v_strides, cache_strides = strides
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(position_ptr)
    h = tl.arange(0, BY.block)
    inside = h < HALF
    if head >= N + BY.keys:
        at = v_ptr + b * v_strides[0] + (head - N - BY.keys) * v_strides[1] + h
        to = values_ptr + b * cache_strides[0] + (head - N - BY.keys) * cache_strides[1]
        to += position * cache_strides[2] + h
        tl.store(to, tl.load(at, inside), inside)
        tl.store(to + HALF, tl.load(at + HALF, inside), inside)
    else:
        cos1, cos2 = _halves(cos_ptr + position * (2 * HALF), inside, HALF, BY.block)
        sin1, sin2 = _halves(sin_ptr + position * (2 * HALF), inside, HALF, BY.block)
        if head < N:
            head_ptr = q_ptr + b * q_strides[0] + head * q_strides[1]
            to = out_ptr + (b * N + head) * (2 * HALF) + h
        else:
            head_ptr = k_ptr + b * k_strides[0] + (head - N) * k_strides[1]
            to = keys_ptr + b * cache_strides[0] + (head - N) * cache_strides[1] + position * cache_strides[2] + h
        left, right = _halves(head_ptr, inside, HALF, BY.block)
        tl.store(to, (left * cos1 - right * sin1).to(out_ptr.dtype.element_ty), inside)
        tl.store(to + HALF, (right * cos2 + left * sin2).to(out_ptr.dtype.element_ty), inside)


def rotate(q_BNSH: Tensor, k_BKSH: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated (``inverse``: by the transposed matrices), in the inputs' strides if dense."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BNSH, k_BKSH))
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    q_out, k_out = empty_of(q), empty_of(k)
    batch, heads, length, width = q.shape
    if q.numel() == 0 or k.numel() == 0:
        return q_out, k_out
    block = triton.next_power_of_2(width // 2)
    at_once = max(1, min(triton.next_power_of_2(max(heads, k.shape[1])), ROTARY_TILE // block))
    strides = [x.stride()[:3] for x in (q, k, q_out, k_out)]
    for table in (cos, sin):
        strides.append((table.stride(0) if table.dim() == 3 and table.shape[0] > 1 else 0, table.stride(-2)))
    tensors, by = (q, k, q_out, k_out, cos, sin), Rotation(heads, k.shape[1], width // 2, block, at_once, inverse)
    launch(_rotate, (batch * length, 1, 1), tensors, (length, tuple(strides), by), 4)
    return q_out, k_out


def store(
    q_BNH: Tensor,
    k_BKH: Tensor,
    v_BKH: Tensor,
    keys_BKTH: Tensor,
    values_BKTH: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    position_1: Tensor,
) -> Tensor:
    """As `store_rotated`."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BNH, k_BKH, v_BKH))
    assert keys_BKTH.stride() == values_BKTH.stride() and keys_BKTH.stride(-1) == 1
    batch, heads, width = q.shape
    out = torch.empty((batch, heads, width), dtype=q.dtype, device=q.device)
    tensors = (q, k, v, out, keys_BKTH, values_BKTH, cos_TH.contiguous(), sin_TH.contiguous(), position_1)
    strides = (*(x.stride()[:2] for x in (q, k, v)), keys_BKTH.stride()[:3])
    half = width // 2
    by = Rotation(heads, k.shape[1], half, triton.next_power_of_2(half), 1, False)
    launch(_store, (batch, heads + 2 * k.shape[1], 1), tensors, (strides, by), 1)
    return out


# -- cross entropy -----------------------------------------------------------------------------------------------------

LOSS_BLOCK, LOSS_WARPS = 4096, 8


@triton.jit
def _loss_and_gradient(
    logits_ptr,
    target_ptr,
    loss_ptr,
    stride,
    ignore_index,
    WORDS: tl.constexpr,
    GRADIENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(target_ptr + row)
    column = tl.arange(0, BLOCK)
    dtype = logits_ptr.dtype.element_ty
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENTS:
            for start in range(0, WORDS, BLOCK):
                tl.store(logits_ptr + start + column, tl.zeros([BLOCK], dtype), start + column < WORDS)
    else:
        # Read before anything is overwritten: the reductions below are barriers.
        known = (target >= 0) & (target < WORDS)
        at_target = tl.load(logits_ptr + target, known, other=float("nan")).to(tl.float32)
        highest = float("-inf")
        total = 0.0
        for start in range(0, WORDS, BLOCK):
            x = tl.load(logits_ptr + start + column, start + column < WORDS, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(highest, tl.max(x, 0))
            total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
            highest = higher
        lse = highest + tl.log(total)
        tl.store(loss_ptr + row, lse - at_target)
        if GRADIENTS:
            for start in range(0, WORDS, BLOCK):
                inside = start + column < WORDS
                x = tl.load(logits_ptr + start + column, inside, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(x - lse) - tl.where(start + column == target, 1.0, 0.0)
                tl.store(logits_ptr + start + column, gradient.to(dtype), inside)


@triton.jit
def _scale(x_ptr, factor_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < count, other=0.0).to(tl.float32)
    y = x * tl.load(factor_ptr).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), at < count)


def loss_and_gradient_(
    logits_CV: Tensor, targets_C: Tensor, loss_C: Tensor, ignore_index: int, gradients: bool
) -> None:
    """Writes the loss of each row, and with ``gradients`` its gradient over the logits; rows of adjacent elements."""
    rows, words = logits_CV.shape
    block = min(LOSS_BLOCK, triton.next_power_of_2(words))
    if rows:
        numbers = (logits_CV.stride(0), ignore_index, words, gradients, block)
        launch(_loss_and_gradient, (rows, 1, 1), (logits_CV, targets_C.contiguous(), loss_C), numbers, LOSS_WARPS)


def scale(x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """``x * factor`` (one element on the same device) with one rounding, contiguous, into ``out`` if given."""
    x = x.contiguous()
    y = torch.empty_like(x) if out is None else out
    count = x.numel()
    if count:
        launch(_scale, (triton.cdiv(count, 2048), 1, 1), (x, factor, y), (count, 2048), 4)
    return y
