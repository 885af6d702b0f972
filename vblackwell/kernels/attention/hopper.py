"""Forward kernel of op.py for Hopper, in Gluon: specialised warps, any bounds, boolean and 16-bit additive masks.

One warp brings tiles through the copy engine into rings of shared memory; two groups of four warps, each with 64
queries, compute: one is at its exponentials while the other has the tensor cores (Shah et al., FlashAttention-3,
arXiv:2407.08608), and within a group the product of probabilities and values is queued after the next scores. Gluon
lets waits be placed by hand. It has no interpreter: forward.py is what the CPU tests.
"""
# What @gluon.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportInvalidTypeForm=false

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vblackwell.kernels.attention import device as attention_device
from vblackwell.kernels.attention.blocks import mask_strides
from vblackwell.kernels.attention.plan import AttentionPlan, padded_head

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
# Tiles of an additive mask on their way or in use; more would not fit next to heads of 128.
MASK_STAGES: gl.constexpr = gl.constexpr(2)
# Numbers for which a kernel compiled anew for a 1 or a multiple of 16 would be no faster.
NUMBERS = (
    "stride_mb", "stride_mn", "stride_mask_row", "stride_mask_col", "list_batch", "list_head", "list_width", "q_len",
    "k_len", "offset", "left", "right",
)  # fmt: skip
_column_tiles = gluon.jit(attention_device.column_tiles.fn)
_place_in_order = gluon.jit(attention_device.place_in_order.fn)
_visible = gluon.jit(attention_device.visible.fn)

# fmt: off

@gluon.jit
def _tile(
    step, listed, edges, whole_first, whole_end, end, MASK: gl.constexpr, HAS_LEFT: gl.constexpr,
):
    """The tile of keys of a step: on edges first (of a mask ``listed``, else from the right), then the whole ones."""
    if MASK != 0:
        return gl.where(step < edges, listed, whole_first + (step - edges))
    elif HAS_LEFT:
        left = whole_first - 1 - (step - (end - whole_end))
        tile = gl.where(step < end - whole_end, end - 1 - step, left)
        return gl.where(step < edges, tile, whole_end - 1 - (step - edges))
    else:
        return end - 1 - step


@gluon.jit
def _produce(
    q, k, v, mask, q_tiles, k_ring, v_ring, mask_ring, q_ready, k_ready, k_free, v_ready, v_free, mask_ready, mask_free,
    items, row0, head, kv_head, batch, mask_batch, mask_head, steps, edges, whole_first, whole_end, end,
    MASK: gl.constexpr, HAS_LEFT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):
    mbarrier.expect(q_ready, 2 * q.block_type.nbytes)
    tma.async_copy_global_to_shared(q, [batch, head, row0, 0], q_ready, q_tiles.index(0))
    tma.async_copy_global_to_shared(q, [batch, head, row0 + ROWS, 0], q_ready, q_tiles.index(1))
    listed = whole_first
    if MASK != 0:
        listed = gl.load(items)
    for step in range(0, steps):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        start = _tile(step, listed, edges, whole_first, whole_end, end, MASK, HAS_LEFT) * COLUMNS
        if MASK != 0:
            listed = gl.load(items + gl.minimum(step + 1, edges))  # the list has a spare entry
        mbarrier.wait(k_free.index(slot), phase ^ 1)
        mbarrier.expect(k_ready.index(slot), k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [batch, kv_head, start, 0], k_ready.index(slot), k_ring.index(slot))
        if MASK == 2:  # noqa: SIM102 - one is decided while compiling
            if step < gl.maximum(edges, 1):
                mask_slot = step % MASK_STAGES
                ready = mask_ready.index(mask_slot)
                mbarrier.wait(mask_free.index(mask_slot), ((step // MASK_STAGES) & 1) ^ 1)
                mbarrier.expect(ready, 2 * mask.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    mask, [mask_batch, mask_head, row0, start], ready, mask_ring.index(2 * mask_slot)
                )
                tma.async_copy_global_to_shared(
                    mask, [mask_batch, mask_head, row0 + ROWS, start], ready, mask_ring.index(2 * mask_slot + 1)
                )
        mbarrier.wait(v_free.index(slot), phase ^ 1)
        mbarrier.expect(v_ready.index(slot), v.block_type.nbytes)
        tma.async_copy_global_to_shared(v, [batch, kv_head, start, 0], v_ready.index(slot), v_ring.index(slot))


@gluon.jit
def _words(mask, row, start, stride_row, stride_col, MASK: gl.constexpr, COLUMNS: gl.constexpr):
    """Two words of 64 bits of each row of a boolean mask (of 64 columns the second is the first again); else zeros."""
    first, second = 0, 0
    if MASK == 1:
        at = mask + (start // 64).to(gl.int64) * stride_col + row * stride_row
        first = gl.load(at)
        second = first
        if COLUMNS == 128:
            second = gl.load(at + stride_col)
    return first, second


@gluon.jit
def _hide(s, first, second, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """``hide`` of device.py: a thread's columns are 8 j + c and one more, so bits shifted by c are constant."""
    place = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SCORES)), 0)
    low = place & 6
    picked = gl.expand_dims(first.to(gl.int32), 1) >> low
    picked = gl.where((place & 32) == 0, picked, gl.expand_dims((first >> 32).to(gl.int32), 1) >> low)
    if COLUMNS == 128:
        other = gl.expand_dims(second.to(gl.int32), 1) >> low
        other = gl.where((place & 32) == 0, other, gl.expand_dims((second >> 32).to(gl.int32), 1) >> low)
        picked = gl.where((place & 64) == 0, picked, other)
    bit = (place * 0 + 1) << (place & 25)
    return gl.inline_asm_elementwise(
        "{ .reg .pred seen; .reg .b32 met; and.b32 met, $2, $3; "
        "setp.ne.b32 seen, met, 0; selp.f32 $0, $1, 0fFF800000, seen; }",
        "=f,f,r,r", [s, picked, bit], dtype=gl.float32, is_pure=True, pack=1,
    )


@gluon.jit
def _added(s, values, inverse_scale):
    """``s`` with a tile of an additive mask, in units of the products."""
    if values.dtype == gl.bfloat16:
        wide = gl.inline_asm_elementwise(
            "{ .reg .b32 low, high; shl.b32 low, $2, 16; and.b32 high, $2, 0xFFFF0000; "
            "mov.b32 $0, low; mov.b32 $1, high; }",
            "=f,=f,r", [values], dtype=gl.float32, is_pure=True, pack=2,
        )
    else:
        wide = values.to(gl.float32)
    return s + wide * inverse_scale


@gluon.jit
def _softmax(
    s, top, total, start, row, first, second, k_len, offset, left, right, factor, EDGES: gl.constexpr,
    MASK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ENDS: gl.constexpr, COLUMNS: gl.constexpr,
    SCORES: gl.constexpr,
):
    if EDGES:
        if MASK == 1:
            s = _hide(s, first, second, COLUMNS, SCORES)
        if MASK == 0 or ENDS or HAS_LEFT or HAS_RIGHT:
            col = gl.expand_dims(start + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SCORES)), 0)
            line = gl.expand_dims(row, 1)
            inside = _visible(line, col, k_len, offset, left, right, HAS_LEFT, HAS_RIGHT)
            s = gl.where(inside, s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * factor)
    base = new_top
    if EDGES:
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(s * factor - gl.expand_dims(base, 1))
    shrink = gl.exp2(top - base)
    total = total * shrink + gl.sum(p, 1)
    return p, new_top, total, shrink


@gluon.jit
def _consume(
    which: gl.constexpr, q_tiles, k_ring, v_ring, mask_ring, q_ready, k_ready, k_free, v_ready, v_free, mask_ready,
    mask_free, mask, items, out, lse, stride_o, stride_mask_row, stride_mask_col, row0, steps, edges, whole_first,
    whole_end, end, q_len, k_len, offset, left, right, scale, MASK: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, ENDS: gl.constexpr, H: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    LINE: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACC: gl.constexpr = gl.SliceLayout(1, SUMS)
    dtype: gl.constexpr = k_ring.dtype
    row0 += which * ROWS
    row = row0 + gl.arange(0, ROWS, layout=LINE)
    factor = scale * LOG2E
    inverse_scale = 1.0 / scale
    acc = gl.zeros([ROWS, D], gl.float32, SUMS)
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, SCORES)
    top = gl.full([ROWS], float("-inf"), gl.float32, LINE)
    total = gl.zeros([ROWS], gl.float32, LINE)
    mbarrier.wait(q_ready, 0)
    q = q_tiles.index(which).reshape([ROWS, D])
    if steps > 0:
        listed = whole_first
        if MASK != 0:
            listed = gl.load(items)
        start = _tile(0, listed, edges, whole_first, whole_end, end, MASK, HAS_LEFT) * COLUMNS
        first, second = _words(mask, row, start, stride_mask_row, stride_mask_col, MASK, COLUMNS)
        if MASK != 0:
            listed = gl.load(items + gl.minimum(1, edges))
        mbarrier.wait(k_ready.index(0), 0)
        s = warpgroup_mma(q, k_ring.index(0).reshape([COLUMNS, D]).permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_free.index(0), count=1)
        if MASK == 2:
            mbarrier.wait(mask_ready.index(0), 0)
            s = _added(s, mask_ring.index(which).reshape([ROWS, COLUMNS]).load(SCORES), inverse_scale)
            mbarrier.arrive(mask_free.index(0), count=1)
        p, top, total, shrink = _softmax(
            s, top, total, start, row, first, second, k_len, offset, left, right, factor, True, MASK, HAS_LEFT,
            HAS_RIGHT, ENDS, COLUMNS, SCORES,
        )
        operand = gl.convert_layout(p.to(dtype), LEFT)
        edge_steps = gl.maximum(edges, 1)
        for step in range(1, edge_steps):
            start = _tile(step, listed, edges, whole_first, whole_end, end, MASK, HAS_LEFT) * COLUMNS
            first, second = _words(mask, row, start, stride_mask_row, stride_mask_col, MASK, COLUMNS)
            if MASK != 0:
                listed = gl.load(items + gl.minimum(step + 1, edges))
            acc, operand, top, total = _step(
                which, step, True, acc, operand, top, total, q, zero, k_ring, v_ring, mask_ring, k_ready, k_free,
                v_ready, v_free, mask_ready, mask_free, start, row, first, second, k_len, offset, left, right, factor,
                inverse_scale, MASK, HAS_LEFT, HAS_RIGHT, ENDS, D, ROWS, COLUMNS, STAGES, SCORES, LEFT,
                ACC,
            )
        for step in range(edge_steps, steps):
            acc, operand, top, total = _step(
                which, step, False, acc, operand, top, total, q, zero, k_ring, v_ring, mask_ring, k_ready, k_free,
                v_ready, v_free, mask_ready, mask_free, 0, row, 0, 0, k_len, offset, left, right, factor, inverse_scale,
                MASK, HAS_LEFT, HAS_RIGHT, ENDS, D, ROWS, COLUMNS, STAGES, SCORES, LEFT, ACC,
            )
        last = steps - 1
        mbarrier.wait(v_ready.index(last % STAGES), (last // STAGES) & 1)
        acc = warpgroup_mma(operand, v_ring.index(last % STAGES).reshape([COLUMNS, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    empty = total == 0.0
    rest = gl.convert_layout(1.0 / gl.where(empty, 1.0, total), ACC)
    acc = acc * gl.expand_dims(rest, 1)
    gl.store(lse + row, gl.where(empty, float("inf"), top + gl.log2(gl.where(empty, 1.0, total))), mask=row < q_len)
    line = row0 + gl.arange(0, ROWS, layout=ACC)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
    at = out + row0.to(gl.int64) * stride_o + (gl.expand_dims(line - row0, 1) * stride_o + gl.expand_dims(d, 0))
    gl.store(at, acc.to(dtype), mask=gl.expand_dims(line < q_len, 1) & gl.expand_dims(d < H, 0))


@gluon.jit
def _step(
    which: gl.constexpr, step, EDGES: gl.constexpr, acc, operand, top, total, q, zero, k_ring, v_ring, mask_ring,
    k_ready, k_free, v_ready, v_free, mask_ready, mask_free, start, row, first, second, k_len, offset, left, right,
    factor, inverse_scale, MASK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ENDS: gl.constexpr,
    D: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, LEFT: gl.constexpr, ACC: gl.constexpr,
):
    slot = step % STAGES
    before = (step - 1) % STAGES
    mbarrier.wait(k_ready.index(slot), (step // STAGES) & 1)
    s = warpgroup_mma(q, k_ring.index(slot).reshape([COLUMNS, D]).permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), ((step - 1) // STAGES) & 1)
    acc = warpgroup_mma(operand, v_ring.index(before).reshape([COLUMNS, D]), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_free.index(slot), count=1)
    if MASK == 2 and EDGES:
        mask_slot = step % MASK_STAGES
        mbarrier.wait(mask_ready.index(mask_slot), (step // MASK_STAGES) & 1)
        values = mask_ring.index(2 * mask_slot + which).reshape([ROWS, COLUMNS]).load(SCORES)
        s = _added(s, values, inverse_scale)
        mbarrier.arrive(mask_free.index(mask_slot), count=1)
    p, top, total, shrink = _softmax(
        s, top, total, start, row, first, second, k_len, offset, left, right, factor, EDGES, MASK, HAS_LEFT, HAS_RIGHT,
        ENDS, COLUMNS, SCORES,
    )
    following = gl.convert_layout(p.to(k_ring.dtype), LEFT)
    # named as a dependency so that the exponentials are asked for before the wait, under the running product
    acc, operand, following = warpgroup_mma_wait(0, deps=(acc, operand, following))
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, ACC), 1)
    return acc, following, top, total


@gluon.jit(do_not_specialize=NUMBERS)
def attend_hopper(
    q, k, v, mask, items_ptr, counts_ptr, order_ptr, out_ptr, lse_ptr, stride_ob, stride_on, stride_o, stride_lb,
    stride_ln, stride_mb, stride_mn, stride_mask_row, stride_mask_col, list_batch, list_head, list_width, q_len, k_len,
    offset, left, right, scale, GROUP: gl.constexpr, MASK: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, ENDS: gl.constexpr, H: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):
    q_tile = gl.program_id(0)
    head = gl.program_id(1)
    batch = gl.program_id(2)
    if MASK != 0:
        q_tile, head, batch = _place_in_order(order_ptr, list_batch, list_head, 1)
    elif HAS_RIGHT:
        q_tile = gl.num_programs(0) - 1 - q_tile
    row0 = q_tile * (2 * ROWS)
    items = items_ptr
    mask_batch, mask_head = 0, 0
    if MASK != 0:
        line = (batch * list_batch + head * list_head) * gl.num_programs(0) + q_tile
        items += line.to(gl.int64) * list_width
        run = gl.load(counts_ptr + line * 2)
        edges = gl.load(counts_ptr + line * 2 + 1)
        whole_first = gl.load(items)
        items += run
        steps = run + edges
        whole_end, end = 0, 0
        mask_batch, mask_head = gl.where(list_batch > 0, batch, 0), head * list_head  # one list of a dimension of 1
        if MASK == 1:
            mask += batch.to(gl.int64) * stride_mb + head.to(gl.int64) * stride_mn
    else:
        begins, ends = _column_tiles(row0, k_len, offset, left, right, HAS_LEFT, HAS_RIGHT, 2 * ROWS, COLUMNS)
        whole_first, whole_end, end = ends
        edges = whole_first - begins[0] + end - whole_end
        steps = end - begins[0]
    dtype: gl.constexpr = q.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], q.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, COLUMNS, D], k.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, COLUMNS, D], v.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=2)
        mbarrier.init(v_ready.index(slot), count=1)
        mbarrier.init(v_free.index(slot), count=2)
    mask_ring, mask_ready, mask_free = k_ring, k_ready, k_free  # nobody touches these for a mask without tiles
    if MASK == 2:
        mask_ring = gl.allocate_shared_memory(mask.dtype, [2 * MASK_STAGES, 1, 1, ROWS, COLUMNS], mask.layout)
        mask_ready = gl.allocate_shared_memory(gl.int64, [MASK_STAGES, 1], mbarrier.MBarrierLayout())
        mask_free = gl.allocate_shared_memory(gl.int64, [MASK_STAGES, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(MASK_STAGES):
            mbarrier.init(mask_ready.index(slot), count=1)
            mbarrier.init(mask_free.index(slot), count=2)
    fence_async_shared()
    out = out_ptr + batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_on
    lse = lse_ptr + batch.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_ln
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, q_tiles, k_ring, v_ring, mask_ring, q_ready, k_ready, k_free, v_ready, v_free, mask_ready,
                    mask_free, mask, items, out, lse, stride_o, stride_mask_row, stride_mask_col, row0, steps, edges,
                    whole_first, whole_end, end, q_len, k_len, offset, left, right, scale, MASK, HAS_LEFT, HAS_RIGHT,
                    ENDS, H, D, ROWS, COLUMNS, STAGES,
                ),
            ),
            (
                _consume,
                (
                    1, q_tiles, k_ring, v_ring, mask_ring, q_ready, k_ready, k_free, v_ready, v_free, mask_ready,
                    mask_free, mask, items, out, lse, stride_o, stride_mask_row, stride_mask_col, row0, steps, edges,
                    whole_first, whole_end, end, q_len, k_len, offset, left, right, scale, MASK, HAS_LEFT, HAS_RIGHT,
                    ENDS, H, D, ROWS, COLUMNS, STAGES,
                ),
            ),
            (
                _produce,
                (
                    q, k, v, mask, q_tiles, k_ring, v_ring, mask_ring, q_ready, k_ready, k_free, v_ready, v_free,
                    mask_ready, mask_free, items, row0, head, head // GROUP, batch, mask_batch, mask_head, steps, edges,
                    whole_first, whole_end, end, MASK, HAS_LEFT, ROWS, COLUMNS, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )

# fmt: on


def descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Tiles of ``rows`` of a (B, N, S, H) tensor, or of an additive mask (1 or B, 1 or N, S, T)."""
    block = [1, 1, rows, width]
    # A dimension of 1 is never stepped along, but its stride must be a multiple of 16 bytes.
    strides = [stride if size > 1 else 8 for size, stride in zip(x.shape[:3], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, _layout(rows, width, x.dtype))


@functools.lru_cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(
        [1, 1, rows, width], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    )


def launch(call: Any, plan: AttentionPlan, out: Tensor, lse: Tensor) -> None:
    """Write ``out`` and the log2-sum-exps of launch.py's ``call``, which was found to fit."""
    q, k, v, options = call.q, call.k, call.v, call.options
    mask, lists = call.read_mask(by_column=False), call.lists(plan, by_column=False)
    rows, width = plan.rows // 2, padded_head(call.head)
    kind = 0 if mask is None else 1 if mask.dtype == torch.int64 else 2
    given: Any = out if mask is None else descriptor(mask, rows, plan.columns) if kind == 2 else mask
    listed: Any = (lse, lse, lse) if lists is None else (lists.items, lists.counts, lists.order)
    steps = (0, 0, 0) if lists is None else (lists.list_batch, lists.list_head, lists.items.shape[1])
    attend_hopper[(triton.cdiv(q.shape[2], plan.rows), q.shape[1], q.shape[0])](
        descriptor(q, rows, width), descriptor(k, plan.columns, width), descriptor(v, plan.columns, width), given,
        *listed, out, lse, *out.stride()[:3], *lse.stride()[:2],
        *((0, 0, 0, 0) if mask is None else mask_strides(mask)), *steps, q.shape[2], k.shape[2], call.offset,
        options.left or 0, options.right or 0, options.scale, GROUP=q.shape[1] // k.shape[1], MASK=kind,
        HAS_LEFT=options.left is not None, HAS_RIGHT=options.right is not None, ENDS=call.open_ended(plan),
        H=call.head, D=width, ROWS=rows, COLUMNS=plan.columns, STAGES=plan.stages, num_warps=plan.warps,
        maxnreg=plan.registers,
    )  # fmt: skip
