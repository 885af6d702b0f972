"""Triton kernels of rows.py and cross_entropy.py, and their launches."""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.runtime.registry import empty_of, on_device

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


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, scale_ptr, rows, eps, TILES: tl.constexpr, D: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
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
def _rms_norm_backward(
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
    """(tiles a program takes, programs): at most ``most`` programs, and few different counts: each is compiled."""
    each = max(1, -(-tiles // most))
    step = 1 << max(0, each.bit_length() - 3)
    each = -(-each // step) * step
    return each, -(-tiles // each)


def stages_of(row_bytes: int, most: int, programs: int, shared_bytes: int) -> int:
    """Pipeline stages of loops whose tiles take ``row_bytes``, if ``programs`` share a multiprocessor: at least two
    sets of rows on their way, or no pipeline, as one set would wait in registers.
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
    """The same of the backward. Scales of very many short rows count; others are in what `shared_bytes_of` leaves."""
    rows, block, _ = tile_of(width)
    scales = 4 * rows if rows > 128 else 0
    return stages_of((3 if has_dtotal else 2) * rows * block * x_bytes + scales, BACKWARD_STAGES, 2, shared_bytes)


def tile_of(width: int) -> tuple[int, int, int]:
    """(rows at a time, padded width, warps) of a program for rows of ``width``."""
    block = 1 << max(0, width - 1).bit_length()
    rows = max(1, ROWS_TILE // block)
    return rows, block, max(4, min(32, rows * block // 512))


def rms_norm(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
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
            _rms_norm[(programs,)](
                x_RD, x_RD if residual is None else residual.contiguous(), weight_D.contiguous(), y, total, scale_R,
                rows, eps, TILES=tiles_each, D=width, HAS_RESIDUAL=residual is not None, ROWS=at_once, BLOCK=block,
                STAGES=stages, num_warps=warps,
            )  # fmt: skip
    return y, total, scale_R


def rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight_D: Tensor, scale_R: Tensor, with_weight: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(dx + dtotal, dweight)``; the second is empty without ``with_weight``; the first is ``out`` if given."""
    width, rows = x.shape[-1], x.shape[:-1].numel()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    at_once, block, warps = tile_of(width)
    tiles_each, programs = tiles_of(-(-rows // at_once), BACKWARD_PROGRAMS)
    partial = torch.empty((programs if with_weight else 0, width), dtype=torch.float32, device=x.device)
    if rows:
        dy = dy.contiguous()
        with on_device(dx):
            _rms_norm_backward[(programs,)](
                dy, dy if dtotal is None else dtotal.contiguous(), x.contiguous(), weight_D.contiguous(), scale_R, dx,
                partial, rows, TILES=tiles_each, D=width, HAS_DTOTAL=dtotal is not None, WITH_WEIGHT=with_weight,
                ROWS=at_once, BLOCK=block,
                STAGES=backward_stages(width, x.element_size(), dtotal is not None, shared_bytes_of(x.device)),
                num_warps=warps if block <= ROWS_TILE else 32,
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
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, width, dy_stride, gate_stride, up_stride,
    WITH_PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    if WITH_PRODUCT:
        tl.store(y_ptr + at, (silu * up).to(y_ptr.dtype.element_ty), inside)


def _rows(*tensors: Tensor) -> tuple[list[Tensor], list[int], int, int]:
    """The tensors as rows of adjacent elements, their row strides, and (rows, width): one row if all are contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        count = tensors[0].numel()
        return list(tensors), [count] * len(tensors), 1 if count else 0, count
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    flat = [tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in flat]
    return flat, [tensor.stride(0) for tensor in flat], flat[0].shape[0], flat[0].shape[1]


def _part(start: int, rows: int, *tensors: Tensor) -> tuple[list[Tensor], int]:
    """At most `MAX_ROWS` rows of each from ``start`` on, and how many."""
    count = min(MAX_ROWS, rows - start)
    return list(tensors) if count == rows else [tensor[start : start + count] for tensor in tensors], count


def swiglu(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, contiguous: new, or ``out``, which may be a contiguous ``gate`` or ``up`` itself."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if out is None else out
    (gate, up), strides, rows, width = _rows(gate, up)
    if rows and width:
        y_RI = y.view(rows, width)
        with on_device(y):
            for start in range(0, rows, MAX_ROWS):
                (gate_RI, up_RI, out_RI), count = _part(start, rows, gate, up, y_RI)
                _swiglu[(triton.cdiv(width, SWIGLU_BLOCK), count)](
                    gate_RI, up_RI, out_RI, width, *strides, BLOCK=SWIGLU_BLOCK, num_warps=SWIGLU_WARPS
                )
    return y


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, with_product: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``(dgate, dup, product)``, contiguous; the product is empty unless asked for."""
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    y = torch.empty(gate.shape if with_product else (0,), dtype=gate.dtype, device=gate.device)
    (dy, gate, up), strides, rows, width = _rows(dy, gate, up)
    if rows and width:
        written = [out.view(rows, width) for out in ((dgate, dup, y) if with_product else (dgate, dup, dgate))]
        with on_device(y):
            for start in range(0, rows, MAX_ROWS):
                parts, count = _part(start, rows, dy, gate, up, *written)
                _swiglu_backward[(triton.cdiv(width, SWIGLU_BLOCK), count)](
                    *parts, width, *strides, WITH_PRODUCT=with_product, BLOCK=SWIGLU_BLOCK, num_warps=SWIGLU_WARPS
                )
    return dgate, dup, y


def swiglu_backward_in_place(dy: Tensor, gate: Tensor, up: Tensor) -> None:
    """Turns the three, contiguous, into the product, dgate and dup: each element is read before it is written."""
    count = dy.numel()
    if count:
        grid = (triton.cdiv(count, SWIGLU_BLOCK), 1)
        with on_device(dy):
            _swiglu_backward[grid](
                dy, gate, up, gate, up, dy, *(count,) * 4, WITH_PRODUCT=True, BLOCK=SWIGLU_BLOCK, num_warps=SWIGLU_WARPS
            )


# -- rotary embedding --------------------------------------------------------------------------------------------------

ROTARY_TILE = 2048  # elements of one half that a program holds at a time


@triton.jit
def _turn(
    in_ptr, out_ptr, b, s, in_b, in_n, in_s, out_b, out_n, out_s, cos1, cos2, sin1, sin2, inside,
    N: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, BLOCK)
    for first in tl.static_range(0, N, HEADS):
        n = first + tl.arange(0, HEADS)
        mask = (n < N)[:, None] & inside[None, :]
        at = in_ptr + b * in_b + s * in_s + n[:, None] * in_n + h[None, :]
        left = tl.load(at, mask, other=0.0).to(tl.float32)
        right = tl.load(at + HALF, mask, other=0.0).to(tl.float32)
        if INVERSE:
            new_left = left * cos1 + right * sin2
            new_right = right * cos2 - left * sin1
        else:
            new_left = left * cos1 - right * sin1
            new_right = right * cos2 + left * sin2
        to = out_ptr + b * out_b + s * out_s + n[:, None] * out_n + h[None, :]
        tl.store(to, new_left.to(out_ptr.dtype.element_ty), mask)
        tl.store(to + HALF, new_right.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _rotate(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, length, q_b, q_n, q_s, k_b, k_n, k_s, qo_b, qo_n, qo_s, ko_b,
    ko_n, ko_s, cos_b, cos_s, sin_b, sin_s, N: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64)
    b, s = position // length, position % length
    h = tl.arange(0, BLOCK)
    inside = h < HALF
    cos_at = cos_ptr + b * cos_b + s * cos_s + h
    sin_at = sin_ptr + b * sin_b + s * sin_s + h
    cos1 = tl.load(cos_at, inside, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_at + HALF, inside, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_at, inside, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_at + HALF, inside, other=0.0).to(tl.float32)[None, :]
    _turn(
        q_ptr, q_out_ptr, b, s, q_b, q_n, q_s, qo_b, qo_n, qo_s, cos1, cos2, sin1, sin2, inside, N, HALF, HEADS, BLOCK,
        INVERSE
    )  # fmt: skip
    _turn(
        k_ptr, k_out_ptr, b, s, k_b, k_n, k_s, ko_b, ko_n, ko_s, cos1, cos2, sin1, sin2, inside, K, HALF, HEADS, BLOCK,
        INVERSE
    )  # fmt: skip


@triton.jit
def _store(
    q_ptr, k_ptr, v_ptr, out_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, position_ptr, q_b, q_n, k_b, k_n, v_b, v_n,
    cache_b, cache_k, cache_t, N: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query, a key or a value."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(position_ptr)
    h = tl.arange(0, BLOCK)
    inside = h < HALF
    if head >= N + K:
        at = v_ptr + b * v_b + (head - N - K) * v_n + h
        to = values_ptr + b * cache_b + (head - N - K) * cache_k + position * cache_t + h
        tl.store(to, tl.load(at, inside), inside)
        tl.store(to + HALF, tl.load(at + HALF, inside), inside)
    else:
        table = position * (2 * HALF) + h
        cos1 = tl.load(cos_ptr + table, inside, other=0.0)
        cos2 = tl.load(cos_ptr + table + HALF, inside, other=0.0)
        sin1 = tl.load(sin_ptr + table, inside, other=0.0)
        sin2 = tl.load(sin_ptr + table + HALF, inside, other=0.0)
        if head < N:
            at = q_ptr + b * q_b + head * q_n + h
            to = out_ptr + (b * N + head) * (2 * HALF) + h
        else:
            at = k_ptr + b * k_b + (head - N) * k_n + h
            to = keys_ptr + b * cache_b + (head - N) * cache_k + position * cache_t + h
        left = tl.load(at, inside, other=0.0).to(tl.float32)
        right = tl.load(at + HALF, inside, other=0.0).to(tl.float32)
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
    tables = [
        (table.stride(0) if table.dim() == 3 and table.shape[0] > 1 else 0, table.stride(-2)) for table in (cos, sin)
    ]
    with on_device(q):
        _rotate[(batch * length,)](
            q, k, q_out, k_out, cos, sin, length,
            *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3], *tables[0], *tables[1],
            N=heads, K=k.shape[1], HALF=width // 2, HEADS=at_once, BLOCK=block, INVERSE=inverse, num_warps=4,
        )  # fmt: skip
    return q_out, k_out


def store(
    q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor, keys_BKTH: Tensor, values_BKTH: Tensor, cos_TH: Tensor, sin_TH: Tensor,
    position_1: Tensor,
) -> Tensor:  # fmt: skip
    """As `store_rotated`."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BNH, k_BKH, v_BKH))
    assert keys_BKTH.stride() == values_BKTH.stride() and keys_BKTH.stride(-1) == 1
    batch, heads, width = q.shape
    out = torch.empty((batch, heads, width), dtype=q.dtype, device=q.device)
    with on_device(q):
        _store[(batch, heads + 2 * k.shape[1])](
            q, k, v, out, keys_BKTH, values_BKTH, cos_TH.contiguous(), sin_TH.contiguous(), position_1,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *keys_BKTH.stride()[:3],
            N=heads, K=k.shape[1], HALF=width // 2, BLOCK=triton.next_power_of_2(width // 2), num_warps=1,
        )  # fmt: skip
    return out


# -- cross entropy -----------------------------------------------------------------------------------------------------

LOSS_BLOCK, LOSS_WARPS = 4096, 8


@triton.jit
def _loss_and_gradient(
    logits_ptr, target_ptr, loss_ptr, stride, ignore_index, z_loss,
    WORDS: tl.constexpr, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        tl.store(loss_ptr + row, lse - at_target + z_loss * lse * lse)
        if GRADIENTS:
            factor = 1.0 + 2.0 * z_loss * lse
            for start in range(0, WORDS, BLOCK):
                inside = start + column < WORDS
                x = tl.load(logits_ptr + start + column, inside, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(x - lse) * factor - tl.where(start + column == target, 1.0, 0.0)
                tl.store(logits_ptr + start + column, gradient.to(dtype), inside)


@triton.jit
def _scale(x_ptr, factor_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < count, other=0.0).to(tl.float32)
    y = x * tl.load(factor_ptr).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), at < count)


def loss_and_gradient_(
    logits_CV: Tensor, targets_C: Tensor, loss_C: Tensor, ignore_index: int, z_loss: float, gradients: bool
) -> None:
    """Writes the loss of each row, and with ``gradients`` its gradient over the logits; rows of adjacent elements."""
    rows, words = logits_CV.shape
    if rows:
        with on_device(logits_CV):
            _loss_and_gradient[(rows,)](
                logits_CV, targets_C.contiguous(), loss_C, logits_CV.stride(0), ignore_index, z_loss, WORDS=words,
                GRADIENTS=gradients, BLOCK=min(LOSS_BLOCK, triton.next_power_of_2(words)), num_warps=LOSS_WARPS,
            )  # fmt: skip


def scale(x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """``x * factor`` (one element on the same device) with one rounding, contiguous, into ``out`` if given."""
    x = x.contiguous()
    y = torch.empty_like(x) if out is None else out
    count = x.numel()
    if count:
        with on_device(x):
            _scale[(triton.cdiv(count, 2048),)](x, factor, y, count, BLOCK=2048, num_warps=4)
    return y
