"""Triton kernels of paged.py.

A program takes a tile of rows, which are the query heads that share a key head, query after query, and walks over tiles
of their keys by forward.py's online softmax, begun anew for each chunk. Requests of one query, which memory bounds,
spread their chunks over programs, and a second kernel merges them; of the others a program merges as it goes. Both
merge by the same operations in the same order, so neither that nor the number of programs is to be seen in a bit.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.attention.device import Form, Head, Pages, Rows, column_tiles
from vblackwell.kernels.attention.forward import merged, walk
from vblackwell.kernels.attention.plan import CHUNK, AttentionPlan, padded_head, paged_plans
from vblackwell.kernels.runtime.registry import on_device
from vblackwell.kernels.runtime.triton_launch import layout, queue

# Programs of single queries for each multiprocessor, where there are as many chunks: enough that they end together.
_PROGRAMS = 16


class How(NamedTuple):
    """What else the kernels are compiled for."""

    single: bool  # requests of one query; else the others
    tiles: int  # of keys, in a chunk
    searched: int  # requests, up to a power of two


@triton.jit
def _request_of(starts_ptr, requests, FORM: tl.constexpr, HOW: tl.constexpr):
    """Request and tile of a program; the last tiles first, as they see most keys. A request has a tile for each that
    begins in it, were the rows of all cut without regard to requests, and one more: it may be empty."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    each = tl.arange(0, HOW.searched)
    first = tl.load(starts_ptr + each, each < requests, other=0) * FORM.group // FORM.rows + each
    request = tl.sum(((first <= tile) & (each < requests)).to(tl.int32), 0) - 1
    return request, tile - (tl.load(starts_ptr + request) * FORM.group // FORM.rows + request)


@triton.jit
def _averages(sums, masses):
    return sums * (1.0 / tl.where(masses == 0.0, 1.0, masses))[:, None]


@triton.jit
def _head_of(q_len, k_len, numbers):
    left, scale, softcap = numbers
    return Head(q_len, k_len, k_len - q_len, left, 0, scale, softcap, 0.0, 0, 0.0, 0, 0, 0, 0)


@triton.jit
def _chunks_of(runs, HOW: tl.constexpr):
    return runs[0][0] // HOW.tiles, tl.cdiv(runs[2][1], HOW.tiles)


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    parts,
    starts_ptr,
    table_ptr,
    lengths_ptr,
    strides,
    sizes,
    numbers,
    FORM: tl.constexpr,
    HOW: tl.constexpr,
):
    """``parts``: sums (requests, key heads, chunks, group, head), tops and masses of chunks of single queries;
    ``strides``: of queries, pages, output and table; ``sizes``: requests, chunks of the longest, keys of a page."""
    requests, chunks, page = sizes
    q_strides, page_strides, out_strides, table_stride = strides
    kv_head = tl.program_id(1)
    if HOW.single:
        request, tile = tl.program_id(0), 0
    else:
        request, tile = _request_of(starts_ptr, requests, FORM, HOW)
    q_start, k_len = tl.load(starts_ptr + request).to(tl.int64), tl.load(lengths_ptr + request)
    q_len = (tl.load(starts_ptr + request + 1) - q_start).to(tl.int32)
    row0 = tile * FORM.rows
    if HOW.single:
        if q_len != 1:
            return
    else:
        if (q_len == 1) | (row0 >= q_len * FORM.group):
            return
    ROWS: tl.constexpr = FORM.rows
    D: tl.constexpr = FORM.width
    row, d = row0 + tl.arange(0, ROWS), tl.arange(0, D)
    inside = (row < q_len * FORM.group)[:, None] & (d < FORM.head)[None, :]
    token, which = q_start + row // FORM.group, kv_head * FORM.group + row % FORM.group
    q = tl.load(q_ptr + (token * q_strides[0] + which * q_strides[1])[:, None] + d[None, :], inside, other=0.0)
    head = _head_of(q_len, k_len, numbers)
    pages = Pages(table_ptr + request.to(tl.int64) * table_stride, page, page_strides[0])
    k = Rows(k_ptr + kv_head.to(tl.int64) * page_strides[2], page_strides[1], 0, kv_head, k_len)
    v = Rows(v_ptr + kv_head.to(tl.int64) * page_strides[2], page_strides[1], 0, kv_head, k_len)
    runs = column_tiles(row0 // FORM.group, head, FORM)
    acc, sums = tl.zeros([ROWS, D], tl.float32), tl.zeros([ROWS, D], tl.float32)
    top, tops = tl.full([ROWS], float("-inf"), tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
    total, masses = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    state = (acc, top, total, (sums, tops, masses))
    if HOW.single:
        first, end = _chunks_of(runs, HOW)
        for chunk in range(first + tl.program_id(2), end, tl.num_programs(2)):
            found = state
            for part in tl.static_range(3):
                if FORM.key_runs[part]:
                    begin, stop = runs[part]
                    run = (tl.maximum(begin, chunk * HOW.tiles), tl.minimum(stop, (chunk + 1) * HOW.tiles))
                    found = walk(*found, q, k, v, run, pages, row0, head, FORM, part != 1)
            sums_ptr, tops_ptr, masses_ptr = parts
            place = ((request.to(tl.int64) * tl.num_programs(1) + kv_head) * chunks + chunk) * FORM.group + row
            tl.store(tops_ptr + place, found[1], row < FORM.group)
            tl.store(masses_ptr + place, found[2], row < FORM.group)
            tl.store(sums_ptr + place[:, None] * FORM.head + d[None, :], found[0], inside)
    else:
        for part in tl.static_range(3):
            if FORM.key_runs[part]:
                state = walk(*state, q, k, v, runs[part], pages, row0, head, FORM, part != 1)
        acc, top, total, earlier = state
        sums, tops, masses = earlier
        sums, tops, masses = merged(sums, tops, masses, acc, top, total)
        at = out_ptr + (token * out_strides[0] + which * out_strides[1])[:, None] + d[None, :]
        tl.store(at, _averages(sums, masses).to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _merge_chunks(
    out_ptr, parts, starts_ptr, lengths_ptr, strides, chunks, numbers, FORM: tl.constexpr, HOW: tl.constexpr
):
    """One head of a request of one query."""
    sums_ptr, tops_ptr, masses_ptr = parts
    request, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_start, k_len = tl.load(starts_ptr + request).to(tl.int64), tl.load(lengths_ptr + request)
    if tl.load(starts_ptr + request + 1) - q_start != 1:
        return
    first, end = _chunks_of(column_tiles(0, _head_of(1, k_len, numbers), FORM), HOW)
    D: tl.constexpr = FORM.width
    one, d = tl.arange(0, 1), tl.arange(0, D)
    inside = (one == 0)[:, None] & (d < FORM.head)[None, :]
    kv_head = request * (tl.num_programs(1) // FORM.group) + which // FORM.group
    sums = tl.zeros([1, D], tl.float32)
    tops = tl.full([1], float("-inf"), tl.float32)
    masses = tl.zeros([1], tl.float32)
    for chunk in tl.range(first, end, num_stages=4):
        place = (kv_head * chunks + chunk) * FORM.group + which % FORM.group + one
        acc = tl.load(sums_ptr + place[:, None] * FORM.head + d[None, :], inside, other=0.0)
        sums, tops, masses = merged(sums, tops, masses, acc, tl.load(tops_ptr + place), tl.load(masses_ptr + place))
    at = out_ptr + q_start * strides[0] + which * strides[1] + one[:, None] + d[None, :]
    tl.store(at, _averages(sums, masses).to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _store_rows(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, strides, P, K: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr
):
    """One row's keys and values; ``SIZE``: heads and width, each up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    k_strides, v_strides, page_strides = strides
    head, d = tl.arange(0, SIZE[0])[:, None], tl.arange(0, SIZE[1])[None, :]
    inside = (head < K) & (d < H)
    to = slot // P * page_strides[0] + slot % P * page_strides[1] + head * page_strides[2] + d
    keys = tl.load(k_ptr + row * k_strides[0] + head * k_strides[1] + d, inside)
    values = tl.load(v_ptr + row * v_strides[0] + head * v_strides[1] + d, inside)
    tl.store(keys_ptr + to, keys, inside)
    tl.store(values_ptr + to, values, inside)


def form_of(
    plan: AttentionPlan, how: How, group: int, head: int, page: int, window: bool, softcap: bool, precision: str
) -> Form:
    """What `_attend` is compiled for."""
    return Form(
        mask=0,
        has_left=window,
        has_right=True,
        bottom_right=True,
        softcap=softcap,
        alibi=False,
        dropout=False,
        varlen=True,
        group=group,
        head=head,
        width=padded_head(head),
        rows=plan.rows,
        columns=plan.columns,
        precision=precision,
        stages=plan.stages,
        tma=False,
        ends=False,
        even=False,
        paged=True,
        page=page,
        chunk=0 if how.single else how.tiles,
    )


def _plans(q: Tensor) -> tuple[tuple[AttentionPlan, AttentionPlan], int, int]:
    """Plans of requests of one query and of others, keys of a chunk, and multiprocessors."""
    if not q.is_cuda:  # the interpreter: small enough that short lengths have several chunks
        return (AttentionPlan(32, 32, 4, 1), AttentionPlan(32, 32, 4, 1)), 64, 1
    properties = torch.cuda.get_device_properties(q.device)
    plans = paged_plans(q.shape[2], q.element_size(), properties.shared_memory_per_block_optin)
    return plans, CHUNK, properties.multi_processor_count


def attend(  # type: ignore[no-untyped-def]
    q_SNH, key_pages, value_pages, starts, table, lengths, max_q: int, left: int | None, scale: float, softcap: float
) -> Tensor:
    """As `paged_attention`, of arguments that were checked."""
    q = q_SNH if q_SNH.stride(2) == 1 else q_SNH.contiguous()
    table, starts, lengths = table.contiguous(), starts.contiguous(), lengths.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    (rows, heads, width), (page, kv_heads), requests = q.shape, key_pages.shape[1:3], lengths.shape[0]
    group = heads // kv_heads
    plans, chunk, multiprocessors = _plans(q)
    chunks = triton.cdiv(table.shape[1] * page, chunk)
    splits = min(chunks, triton.cdiv(_PROGRAMS * multiprocessors, requests * kv_heads))
    of_all = requests * kv_heads * chunks * group
    sums = torch.empty((of_all, width), dtype=torch.float32, device=q.device)
    parts = (sums, *torch.empty((2, of_all), dtype=torch.float32, device=q.device))
    strides = (q.stride()[:2], key_pages.stride()[:3], out.stride()[:2], table.stride(0))
    numbers = (left or 0, float(scale), float(softcap))  # an int would be compiled for
    tensors = (q, key_pages, value_pages, out, parts, starts, table, lengths)
    layouts = tuple(map(layout, (q, key_pages, value_pages, starts, table, lengths)))
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    with on_device(q):
        for single in (True, False)[: 1 if max_q == 1 else 2]:
            plan = plans[0 if single else 1]
            how = How(single, chunk // plan.columns, triton.next_power_of_2(requests))
            cut = page if page % plan.columns and table.shape[1] > 1 else 0  # of tiles
            form = form_of(plan, how, group, width, cut, left is not None, softcap > 0, precision)
            tiles = requests if single else rows * group // plan.rows + requests
            grid = (tiles, kv_heads, splits if single else 1)
            key = (q.device, form, how, kv_heads, requests, chunks, page, strides, numbers, *layouts)
            arguments = (*tensors, strides, (requests, chunks, page), numbers, form, how)
            queue(_attend, key, grid, arguments, num_warps=plan.warps, num_stages=plan.stages)
            if single:
                arguments = (out, parts, starts, lengths, strides[2], chunks, numbers, form, how)
                queue(_merge_chunks, key, (requests, heads, 1), arguments, num_warps=1)
    return out


def store(k_SKH: Tensor, v_SKH: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """As `store_pages`, of arguments that were checked."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k_SKH, v_SKH))
    heads, width = k.shape[1:]
    size = (triton.next_power_of_2(heads), triton.next_power_of_2(width))
    strides = (k.stride()[:2], v.stride()[:2], key_pages.stride()[:3])
    with on_device(k):
        tensors, numbers = (k, v, key_pages, value_pages, slots.contiguous()), (strides, key_pages.shape[1])
        key = (k.device, heads, width, *numbers, *map(layout, tensors))
        queue(_store_rows, key, (k.shape[0], 1, 1), (*tensors, *numbers, heads, width, size), num_warps=4)
