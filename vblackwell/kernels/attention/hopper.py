"""Forward kernel of op.py for Hopper, in Gluon: specialised warps, any bounds, boolean and 16-bit additive masks.

One warp brings tiles through the copy engine into rings of shared memory; two groups of four warps, each with 64
queries, compute: one is at its exponentials while the other has the tensor cores (Shah et al., FlashAttention-3,
arXiv:2407.08608), and within a group the product of probabilities and values is queued after the next scores. Gluon
lets waits be placed by hand. It has no interpreter: forward.py is what the CPU tests.
"""
# What @gluon.jit makes of a function has no type.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false

from collections import namedtuple
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
from vblackwell.kernels.attention.device import LISTED, LOG2E
from vblackwell.kernels.attention.plan import AttentionPlan, padded_head
from vblackwell.kernels.runtime.triton_launch import Launch, describe, described, keep, queue

# Tiles of an additive mask on their way or in use; more would not fit next to heads of 128.
MASK_STAGES: gl.constexpr = gl.constexpr(2)
# Numbers for which a kernel compiled anew for a 1 or a multiple of 16 would be no faster.
NUMBERS = ("mask_batch", "mask_head", "mask_row", "mask_col", *LISTED, "q_len", "k_len", "offset", "left", "right")
_column_tiles = gluon.jit(attention_device.column_tiles.fn)
_place_in_order = gluon.jit(attention_device.place_in_order.fn)
_visible = gluon.jit(attention_device.visible.fn)
# Tiles in shared memory, and the barriers that say which have come and which may be written again.
Ring = namedtuple("Ring", "tiles ready free")
Shared = namedtuple("Shared", "q q_ready k v mask")  # two tiles of queries; the last three are rings
# Tiles of keys that a program visits: ``steps``, of them ``edges`` first; ``items`` of a mask's list.
Walk = namedtuple("Walk", "items steps edges whole_first whole_end end")
# What a program knows of its head and its mask, and where it writes.
Head = namedtuple("Head", "q_len k_len offset left right scale mask mask_row mask_col row0 out out_row lse")
# What a group of warps keeps: its queries, a zero for products to start at, the rows, and factors of scores.
Group = namedtuple("Group", "q zero row factor inverse_scale")


@gluon.jit
def _tile(step, listed, walk, FORM: gl.constexpr):
    """The tile of keys of a step: on edges first (of a mask ``listed``, else from the right), then the whole ones."""
    if FORM.mask != 0:
        return gl.where(step < walk.edges, listed, walk.whole_first + (step - walk.edges))
    elif FORM.has_left:
        on_right = walk.end - walk.whole_end
        left = walk.whole_first - 1 - (step - on_right)
        tile = gl.where(step < on_right, walk.end - 1 - step, left)
        return gl.where(step < walk.edges, tile, walk.whole_end - 1 - (step - walk.edges))
    else:
        return walk.end - 1 - step


@gluon.jit
def _produce(q, k, v, mask, shared, walk, row0, place, mask_place, FORM: gl.constexpr):
    """``place``: batch, head and key head; ``mask_place``: batch and head of the mask."""
    ROWS: gl.constexpr = FORM.rows // 2
    batch, head, kv_head = place
    mbarrier.expect(shared.q_ready, 2 * q.block_type.nbytes)
    tma.async_copy_global_to_shared(q, [batch, head, row0, 0], shared.q_ready, shared.q.index(0))
    tma.async_copy_global_to_shared(q, [batch, head, row0 + ROWS, 0], shared.q_ready, shared.q.index(1))
    listed = walk.whole_first
    if FORM.mask != 0:
        listed = gl.load(walk.items)
    for step in range(0, walk.steps):
        slot = step % FORM.stages
        phase = (step // FORM.stages) & 1
        start = _tile(step, listed, walk, FORM) * FORM.columns
        if FORM.mask != 0:
            listed = gl.load(walk.items + gl.minimum(step + 1, walk.edges))  # the list has a spare entry
        k_ready = shared.k.ready.index(slot)
        mbarrier.wait(shared.k.free.index(slot), phase ^ 1)
        mbarrier.expect(k_ready, k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [batch, kv_head, start, 0], k_ready, shared.k.tiles.index(slot))
        if FORM.mask == 2:  # noqa: SIM102 - one is decided while compiling
            if step < gl.maximum(walk.edges, 1):
                mask_slot = step % MASK_STAGES
                ready = shared.mask.ready.index(mask_slot)
                mbarrier.wait(shared.mask.free.index(mask_slot), ((step // MASK_STAGES) & 1) ^ 1)
                mbarrier.expect(ready, 2 * mask.block_type.nbytes)
                corner = [mask_place[0], mask_place[1], row0, start]
                tma.async_copy_global_to_shared(mask, corner, ready, shared.mask.tiles.index(2 * mask_slot))
                corner = [mask_place[0], mask_place[1], row0 + ROWS, start]
                tma.async_copy_global_to_shared(mask, corner, ready, shared.mask.tiles.index(2 * mask_slot + 1))
        v_ready = shared.v.ready.index(slot)
        mbarrier.wait(shared.v.free.index(slot), phase ^ 1)
        mbarrier.expect(v_ready, v.block_type.nbytes)
        tma.async_copy_global_to_shared(v, [batch, kv_head, start, 0], v_ready, shared.v.tiles.index(slot))


@gluon.jit
def _words(head, row, start, FORM: gl.constexpr):
    """Two words of 64 bits of each row of a boolean mask (of 64 columns the second is the first again); else zeros."""
    first, second = 0, 0
    if FORM.mask == 1:
        at = head.mask + (start // 64).to(gl.int64) * head.mask_col + row * head.mask_row
        first = gl.load(at)
        second = first
        if FORM.columns == 128:
            second = gl.load(at + head.mask_col)
    return first, second


@gluon.jit
def _apply_bitmask(s, words, COLUMNS: gl.constexpr):
    """As device.py's: a thread's columns are 8 j + c and one more, so bits shifted by c are constant."""
    first, second = words
    place = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, s.type.layout)), 0)
    low = place & 6
    picked = gl.expand_dims(first.to(gl.int32), 1) >> low
    picked = gl.where((place & 32) == 0, picked, gl.expand_dims((first >> 32).to(gl.int32), 1) >> low)
    if COLUMNS == 128:
        other = gl.expand_dims(second.to(gl.int32), 1) >> low
        other = gl.where((place & 32) == 0, other, gl.expand_dims((second >> 32).to(gl.int32), 1) >> low)
        picked = gl.where((place & 64) == 0, picked, other)
    bit = (place * 0 + 1) << (place & 25)
    code: gl.constexpr = """{ .reg .pred seen; .reg .b32 met; and.b32 met, $2, $3;
        setp.ne.b32 seen, met, 0; selp.f32 $0, $1, 0fFF800000, seen; }"""
    return gl.inline_asm_elementwise(code, "=f,f,r,r", [s, picked, bit], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _added(s, values, inverse_scale):
    """``s`` with a tile of an additive mask, in units of the products."""
    if values.dtype == gl.bfloat16:
        code: gl.constexpr = """{ .reg .b32 low, high; shl.b32 low, $2, 16; and.b32 high, $2, 0xFFFF0000;
            mov.b32 $0, low; mov.b32 $1, high; }"""
        wide = gl.inline_asm_elementwise(code, "=f,=f,r", [values], dtype=gl.float32, is_pure=True, pack=2)
    else:
        wide = values.to(gl.float32)
    return s + wide * inverse_scale


@gluon.jit
def _softmax(s, top, total, start, words, head, group, FORM: gl.constexpr, EDGES: gl.constexpr):
    if EDGES:
        if FORM.mask == 1:
            s = _apply_bitmask(s, words, FORM.columns)
        if FORM.mask == 0 or FORM.ends or FORM.has_left or FORM.has_right:
            col = gl.expand_dims(start + gl.arange(0, FORM.columns, layout=gl.SliceLayout(0, s.type.layout)), 0)
            line = gl.expand_dims(group.row, 1)
            inside = _visible(line, col, head, FORM)
            s = gl.where(inside, s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * group.factor)
    base = new_top
    if EDGES:
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(s * group.factor - gl.expand_dims(base, 1))
    shrink = gl.exp2(top - base)
    total = total * shrink + gl.sum(p, 1)
    return p, new_top, total, shrink


@gluon.jit
def _products(group, tiles, FORM: gl.constexpr):
    """The scores of a tile of keys, under way."""
    keys = tiles.reshape([FORM.columns, FORM.width]).permute([1, 0])
    return warpgroup_mma(group.q, keys, group.zero, use_acc=False, is_async=True)


@gluon.jit
def _consume(which: gl.constexpr, shared, walk, head, FORM: gl.constexpr):
    ROWS: gl.constexpr = FORM.rows // 2
    COLUMNS: gl.constexpr = FORM.columns
    D: gl.constexpr = FORM.width
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    LINE: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACC: gl.constexpr = gl.SliceLayout(1, SUMS)
    dtype: gl.constexpr = shared.k.tiles.dtype
    row0 = head.row0 + which * ROWS
    row = row0 + gl.arange(0, ROWS, layout=LINE)
    factor = head.scale * LOG2E
    inverse_scale = 1.0 / head.scale
    acc = gl.zeros([ROWS, D], gl.float32, SUMS)
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, SCORES)
    top = gl.full([ROWS], float("-inf"), gl.float32, LINE)
    total = gl.zeros([ROWS], gl.float32, LINE)
    mbarrier.wait(shared.q_ready, 0)
    group = Group(shared.q.index(which).reshape([ROWS, D]), zero, row, factor, inverse_scale)
    if walk.steps > 0:
        listed = walk.whole_first
        if FORM.mask != 0:
            listed = gl.load(walk.items)
        start = _tile(0, listed, walk, FORM) * COLUMNS
        words = _words(head, row, start, FORM)
        if FORM.mask != 0:
            listed = gl.load(walk.items + gl.minimum(1, walk.edges))
        mbarrier.wait(shared.k.ready.index(0), 0)
        s = _products(group, shared.k.tiles.index(0), FORM)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(shared.k.free.index(0), count=1)
        if FORM.mask == 2:
            mbarrier.wait(shared.mask.ready.index(0), 0)
            s = _added(s, shared.mask.tiles.index(which).reshape([ROWS, COLUMNS]).load(SCORES), inverse_scale)
            mbarrier.arrive(shared.mask.free.index(0), count=1)
        p, top, total, shrink = _softmax(s, top, total, start, words, head, group, FORM, True)
        operand = gl.convert_layout(p.to(dtype), LEFT)
        state = (acc, top, total, operand)
        edge_steps = gl.maximum(walk.edges, 1)
        for step in range(1, edge_steps):
            start = _tile(step, listed, walk, FORM) * COLUMNS
            words = _words(head, row, start, FORM)
            if FORM.mask != 0:
                listed = gl.load(walk.items + gl.minimum(step + 1, walk.edges))
            state = _step(which, step, state, shared, start, words, head, group, FORM, True)
        for step in range(edge_steps, walk.steps):
            state = _step(which, step, state, shared, 0, (0, 0), head, group, FORM, False)
        acc, top, total, operand = state
        last = walk.steps - 1
        mbarrier.wait(shared.v.ready.index(last % FORM.stages), (last // FORM.stages) & 1)
        acc = warpgroup_mma(operand, shared.v.tiles.index(last % FORM.stages).reshape([COLUMNS, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    empty = total == 0.0
    rest = gl.convert_layout(1.0 / gl.where(empty, 1.0, total), ACC)
    acc = acc * gl.expand_dims(rest, 1)
    lse = gl.where(empty, float("inf"), top + gl.log2(gl.where(empty, 1.0, total)))
    gl.store(head.lse + row, lse, mask=row < head.q_len)
    line = row0 + gl.arange(0, ROWS, layout=ACC)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
    at = gl.expand_dims(line - row0, 1) * head.out_row + gl.expand_dims(d, 0)
    inside = gl.expand_dims(line < head.q_len, 1) & gl.expand_dims(d < FORM.head, 0)
    gl.store(head.out + row0.to(gl.int64) * head.out_row + at, acc.to(dtype), mask=inside)


@gluon.jit
def _step(which: gl.constexpr, step, state, shared, start, words, head, group, FORM: gl.constexpr, EDGES: gl.constexpr):
    acc, top, total, operand = state
    slot = step % FORM.stages
    before = (step - 1) % FORM.stages
    mbarrier.wait(shared.k.ready.index(slot), (step // FORM.stages) & 1)
    s = _products(group, shared.k.tiles.index(slot), FORM)
    mbarrier.wait(shared.v.ready.index(before), ((step - 1) // FORM.stages) & 1)
    values = shared.v.tiles.index(before).reshape([FORM.columns, FORM.width])
    acc = warpgroup_mma(operand, values, acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(shared.k.free.index(slot), count=1)
    if FORM.mask == 2 and EDGES:
        mask_slot = step % MASK_STAGES
        mbarrier.wait(shared.mask.ready.index(mask_slot), (step // MASK_STAGES) & 1)
        tile = shared.mask.tiles.index(2 * mask_slot + which).reshape([FORM.rows // 2, FORM.columns])
        s = _added(s, tile.load(s.type.layout), group.inverse_scale)
        mbarrier.arrive(shared.mask.free.index(mask_slot), count=1)
    p, top, total, shrink = _softmax(s, top, total, start, words, head, group, FORM, EDGES)
    following = gl.convert_layout(p.to(operand.dtype), operand.type.layout)
    # named as a dependency so that the exponentials are asked for before the wait, under the running product
    acc, operand, following = warpgroup_mma_wait(0, deps=(acc, operand, following))
    mbarrier.arrive(shared.v.free.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout)), 1)
    return acc, top, total, following


@gluon.jit
def _ring(tiles, STAGES: gl.constexpr):
    """A `Ring` of ``tiles``, which two groups read."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    return Ring(tiles, ready, free)


@gluon.jit(do_not_specialize=NUMBERS)
def attend_hopper(
    q,
    k,
    v,
    mask,
    items_ptr,
    counts_ptr,
    order_ptr,
    out_ptr,
    lse_ptr,
    out_strides,
    lse_strides,
    mask_batch,
    mask_head,
    mask_row,
    mask_col,
    list_batch,
    list_head,
    list_width,
    q_len,
    k_len,
    offset,
    left,
    right,
    scale,
    FORM: gl.constexpr,
):
    """Two groups of half of the form's rows; ``mask``: a descriptor, or words, whose four strides these are."""
    ROWS: gl.constexpr = FORM.rows // 2
    tile, which, batch = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if FORM.mask != 0:
        tile, which, batch = _place_in_order(order_ptr, list_batch, list_head, 1)
    elif FORM.has_right:
        tile = gl.num_programs(0) - 1 - tile
    row0 = tile * FORM.rows
    mask_place = (0, 0)
    if FORM.mask != 0:
        line = (batch * list_batch + which * list_head) * gl.num_programs(0) + tile
        items = items_ptr + line.to(gl.int64) * list_width
        run = gl.load(counts_ptr + line * 2)
        edges = gl.load(counts_ptr + line * 2 + 1)
        walk = Walk(items + run, run + edges, edges, gl.load(items), 0, 0)
        mask_place = (gl.where(list_batch > 0, batch, 0), which * list_head)  # one list of a dimension of 1
        if FORM.mask == 1:
            mask += batch.to(gl.int64) * mask_batch + which.to(gl.int64) * mask_head
    out = out_ptr + batch.to(gl.int64) * out_strides[0] + which.to(gl.int64) * out_strides[1]
    lse = lse_ptr + batch.to(gl.int64) * lse_strides[0] + which.to(gl.int64) * lse_strides[1]
    words = mask if FORM.mask == 1 else items_ptr  # descriptors are the producer's
    head = Head(q_len, k_len, offset, left, right, scale, words, mask_row, mask_col, row0, out, out_strides[2], lse)
    if FORM.mask == 0:
        left_edge, whole, right_edge = _column_tiles(row0, head, FORM)
        first, end = left_edge[0], right_edge[1]
        walk = Walk(items_ptr, end - first, whole[0] - first + end - whole[1], whole[0], whole[1], end)
    dtype: gl.constexpr = q.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, FORM.width], q.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [FORM.stages, 1, 1, FORM.columns, FORM.width], k.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [FORM.stages, 1, 1, FORM.columns, FORM.width], v.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    k_ring, v_ring = _ring(k_tiles, FORM.stages), _ring(v_tiles, FORM.stages)
    mask_ring = k_ring  # nobody touches it for a mask without tiles
    if FORM.mask == 2:
        mask_tiles = gl.allocate_shared_memory(mask.dtype, [2 * MASK_STAGES, 1, 1, ROWS, FORM.columns], mask.layout)
        mask_ring = _ring(mask_tiles, MASK_STAGES)
    fence_async_shared()
    shared = Shared(q_tiles, q_ready, k_ring, v_ring, mask_ring)
    place = (batch, which, which // FORM.group)
    gl.warp_specialize(
        [
            (_consume, (0, shared, walk, head, FORM)),
            (_consume, (1, shared, walk, head, FORM)),
            (_produce, (q, k, v, mask, shared, walk, row0, place, mask_place, FORM)),
        ],
        [4, 1],
        [240, 24],
    )


def _tiles(x: Tensor, rows: int, width: int) -> Any:
    """A descriptor of ``rows`` of a (B, N, S, H) tensor, or of an additive mask (1 or B, 1 or N, S, T)."""
    # A dimension of 1 is never stepped along, but its stride must be a multiple of 16 bytes.
    strides = [stride if size > 1 else 8 for size, stride in zip(x.shape[:3], x.stride(), strict=False)]
    block, kind = [1, 1, rows, width], gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return describe(TensorDescriptor, x, [*strides, 1], block, gl.NVMMASharedLayout.get_default_for(block, kind))


def launch(call: Any, plan: AttentionPlan, known: Launch | None, out: Tensor, lse: Tensor) -> None:
    """Write ``out`` and the log2-sum-exps of launch.py's ``call``, which was found to fit; ``known`` is kept for it."""
    q, k, v = call.q, call.k, call.v
    mask, lists = call.read_mask(by_column=False), call.lists(plan, by_column=False)
    listed = (lse, lse, lse) if lists is None else (lists.items, lists.counts, lists.order)
    places = (0, 0, 0) if lists is None else lists.places
    tiled = (q, k, v) if call.mask_kind != "additive" else (q, k, v, mask)
    ready = known or _plan_launch(call, plan, tiled, out, lse, mask)
    tiles = [described(tile, x) for tile, x in zip(ready.described, tiled, strict=True)]
    given = (out if mask is None else mask,) if len(tiled) == 3 else ()
    arguments = (*tiles, *given, *listed, out, lse, *ready.strides, *places, *ready.numbers, ready.form)
    if known is not None:
        known.compiled[known.grid](*arguments)
        return
    limits = {"num_warps": plan.warps, "maxnreg": plan.registers}
    keep("forward", call.key, ready, queue(attend_hopper, (plan, *call.key), ready.grid, arguments, **limits))


def _plan_launch(call: Any, plan: AttentionPlan, tiled: Any, out: Tensor, lse: Tensor, mask: Tensor | None) -> Launch:
    q, k, options, width = call.q, call.k, call.options, padded_head(call.head)
    sizes = ((plan.rows // 2, width), (plan.columns, width), (plan.columns, width), (plan.rows // 2, plan.columns))
    return Launch(
        plan,
        tuple(_tiles(x, *size) for x, size in zip(tiled, sizes, strict=False)),
        (triton.cdiv(q.shape[2], plan.rows), q.shape[1], q.shape[0]),
        (out.stride()[:3], lse.stride()[:2], *((0, 0, 0, 0) if mask is None else mask_strides(mask))),
        (q.shape[2], k.shape[2], call.offset, options.left or 0, options.right or 0, options.scale),
        call.form(plan, tma=True)._replace(bottom_right=False),  # the offset says it
    )
