"""Forward kernel of attention.py for Hopper, where nothing but causality restricts who sees whom: specialised warps, in Gluon.

One warp brings tiles of keys and values through the copy engine into rings of shared memory; two groups of four warps, each with 64
queries, compute. While one group is at its exponentials the other has the tensor cores (Shah et al., FlashAttention-3,
arXiv:2407.08608), and within a group the product of probabilities and values is queued behind the next scores. Tiles are walked from the
last to the first, so that those on the diagonal come first. Triton's own compiler serialises softmax and products in a
program; Gluon (triton.experimental) lets waits be placed by hand. It has no interpreter: attention_forward.py is what the CPU tests.
"""
# What @gluon.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false

from __future__ import annotations

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

from vblackwell.kernels.attention_plan import AttentionPlan, padded_head

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)

# fmt: off

@gluon.jit
def _produce(
    q, k, v, q_tiles, k_ring, v_ring, q_ready, k_ready, k_free, v_ready, v_free, row0, head, kv_head, batch, end,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):
    mbarrier.expect(q_ready, 2 * q.block_type.nbytes)
    tma.async_copy_global_to_shared(q, [batch, head, row0, 0], q_ready, q_tiles.index(0))
    tma.async_copy_global_to_shared(q, [batch, head, row0 + ROWS, 0], q_ready, q_tiles.index(1))
    for step in range(0, end):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        start = (end - 1 - step) * COLUMNS
        mbarrier.wait(k_free.index(slot), phase ^ 1)
        mbarrier.expect(k_ready.index(slot), k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [batch, kv_head, start, 0], k_ready.index(slot), k_ring.index(slot))
        mbarrier.wait(v_free.index(slot), phase ^ 1)
        mbarrier.expect(v_ready.index(slot), v.block_type.nbytes)
        tma.async_copy_global_to_shared(v, [batch, kv_head, start, 0], v_ready.index(slot), v_ring.index(slot))


@gluon.jit
def _softmax(
    s, top, total, start, row, k_len, offset, right, factor, EDGES: gl.constexpr, HAS_RIGHT: gl.constexpr,
    COLUMNS: gl.constexpr, SCORES: gl.constexpr,
):
    if EDGES:
        col = start + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SCORES))
        inside = gl.expand_dims(col < k_len, 0) & (gl.expand_dims(row, 1) >= 0)
        if HAS_RIGHT:
            inside = inside & (gl.expand_dims(col, 0) <= gl.expand_dims(row, 1) + (offset + right))
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
    which: gl.constexpr, q_tiles, k_ring, v_ring, q_ready, k_ready, k_free, v_ready, v_free, out, lse, stride_o, row0,
    whole_end, end, q_len, k_len, offset, right, scale, HAS_RIGHT: gl.constexpr, H: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
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
    acc = gl.zeros([ROWS, D], gl.float32, SUMS)
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, SCORES)
    top = gl.full([ROWS], float("-inf"), gl.float32, LINE)
    total = gl.zeros([ROWS], gl.float32, LINE)
    mbarrier.wait(q_ready, 0)
    q = q_tiles.index(which).reshape([ROWS, D])
    steps = end
    if steps > 0:
        mbarrier.wait(k_ready.index(0), 0)
        s = warpgroup_mma(q, k_ring.index(0).reshape([COLUMNS, D]).permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_free.index(0), count=1)
        p, top, total, shrink = _softmax(
            s, top, total, (end - 1) * COLUMNS, row, k_len, offset, right, factor, True, HAS_RIGHT, COLUMNS, SCORES
        )
        left = gl.convert_layout(p.to(dtype), LEFT)
        edge_steps = gl.maximum(end - whole_end, 1)
        for step in range(1, edge_steps):
            acc, left, top, total = _step(
                step, True, acc, left, top, total, q, zero, k_ring, v_ring, k_ready, k_free, v_ready, v_free,
                (end - 1 - step) * COLUMNS, row, k_len, offset, right, factor, HAS_RIGHT, D, COLUMNS, STAGES, SCORES, LEFT,
                ACC,
            )
        for step in range(edge_steps, steps):
            acc, left, top, total = _step(
                step, False, acc, left, top, total, q, zero, k_ring, v_ring, k_ready, k_free, v_ready, v_free,
                (end - 1 - step) * COLUMNS, row, k_len, offset, right, factor, HAS_RIGHT, D, COLUMNS, STAGES, SCORES, LEFT,
                ACC,
            )
        last = steps - 1
        mbarrier.wait(v_ready.index(last % STAGES), (last // STAGES) & 1)
        acc = warpgroup_mma(left, v_ring.index(last % STAGES).reshape([COLUMNS, D]), acc, is_async=True)
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
    step, EDGES: gl.constexpr, acc, left, top, total, q, zero, k_ring, v_ring, k_ready, k_free, v_ready, v_free, start,
    row, k_len, offset, right, factor, HAS_RIGHT: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr, LEFT: gl.constexpr, ACC: gl.constexpr,
):
    slot = step % STAGES
    before = (step - 1) % STAGES
    mbarrier.wait(k_ready.index(slot), (step // STAGES) & 1)
    s = warpgroup_mma(q, k_ring.index(slot).reshape([COLUMNS, D]).permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), ((step - 1) // STAGES) & 1)
    acc = warpgroup_mma(left, v_ring.index(before).reshape([COLUMNS, D]), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_free.index(slot), count=1)
    p, top, total, shrink = _softmax(
        s, top, total, start, row, k_len, offset, right, factor, EDGES, HAS_RIGHT, COLUMNS, SCORES
    )
    following = gl.convert_layout(p.to(k_ring.dtype), LEFT)
    # named as a dependency so that the exponentials are asked for before the wait, under the running product
    acc, left, following = warpgroup_mma_wait(0, deps=(acc, left, following))
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, ACC), 1)
    return acc, following, top, total


@gluon.jit
def attend_hopper(
    q, k, v, out_ptr, lse_ptr, stride_ob, stride_on, stride_o, stride_lb, stride_ln, q_len, k_len, right, scale,
    GROUP: gl.constexpr, HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, H: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):
    q_tile = gl.program_id(0)
    if HAS_RIGHT:
        q_tile = gl.num_programs(0) - 1 - q_tile
    head = gl.program_id(1)
    batch = gl.program_id(2)
    row0 = q_tile * (2 * ROWS)
    offset = k_len - q_len if BOTTOM_RIGHT else 0
    end = gl.cdiv(k_len, COLUMNS)
    whole_end = k_len // COLUMNS
    if HAS_RIGHT:
        end = gl.minimum(end, gl.cdiv(gl.maximum(row0 + 2 * ROWS + offset + right, 0), COLUMNS))
        whole_end = gl.minimum(whole_end, gl.maximum(row0 + offset + right + 1, 0) // COLUMNS)
    whole_end = gl.minimum(whole_end, end)
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
    fence_async_shared()
    out = out_ptr + batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_on
    lse = lse_ptr + batch.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_ln
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, q_tiles, k_ring, v_ring, q_ready, k_ready, k_free, v_ready, v_free, out, lse, stride_o, row0,
                    whole_end, end, q_len, k_len, offset, right, scale, HAS_RIGHT, H, D, ROWS, COLUMNS, STAGES,
                ),
            ),
            (
                _consume,
                (
                    1, q_tiles, k_ring, v_ring, q_ready, k_ready, k_free, v_ready, v_free, out, lse, stride_o, row0,
                    whole_end, end, q_len, k_len, offset, right, scale, HAS_RIGHT, H, D, ROWS, COLUMNS, STAGES,
                ),
            ),
            (
                _produce,
                (
                    q, k, v, q_tiles, k_ring, v_ring, q_ready, k_ready, k_free, v_ready, v_free, row0, head, head // GROUP,
                    batch, end, ROWS, COLUMNS, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )

# fmt: on


def descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Tiles of ``rows`` of a (B, N, S, H) tensor."""
    block = [1, 1, rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, right: int | None, bottom_right: bool, scale: float,
    plan: AttentionPlan,
) -> None:  # fmt: skip
    """Write ``out`` and the log2-sum-exps; all (B, N, S, H) of strides that the copy engine takes, 16-bit, H up to 256."""
    rows, width = plan.rows // 2, padded_head(q.shape[3])
    attend_hopper[(triton.cdiv(q.shape[2], plan.rows), q.shape[1], q.shape[0])](
        descriptor(q, rows, width), descriptor(k, plan.columns, width), descriptor(v, plan.columns, width), out, lse,
        out.stride(0), out.stride(1), out.stride(2), lse.stride(0), lse.stride(1), q.shape[2], k.shape[2], right or 0, scale,
        GROUP=q.shape[1] // k.shape[1], HAS_RIGHT=right is not None, BOTTOM_RIGHT=bottom_right, H=q.shape[3], D=width, ROWS=rows,
        COLUMNS=plan.columns, STAGES=plan.stages, num_warps=plan.warps, maxnreg=plan.registers,
    )  # fmt: skip
