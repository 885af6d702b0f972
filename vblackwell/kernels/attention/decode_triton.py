"""Triton kernels of decode.py: one that attends to a part of the cache, one that joins the parts.

Keys and values of a few dozen positions go through tensor cores against the queries that share them, padded to 16 rows.
How many parts there are depends on sizes alone, so a graph holds for every length; parts beyond it read nothing.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.runtime.registry import on_device

# Positions that a program holds in registers, by bytes of a number: what compiles without spills up to heads of 256.
KEYS = {2: 32, 4: 16}
_PROGRAMS = 528  # four for each multiprocessor of the largest GPU that this was made for
_MAX_PARTS = 32
_LOG2_E = math.log2(math.e)


class Size(NamedTuple):
    """What `_attend` is compiled for."""

    kv_heads: int
    group: int  # queries that share a key head
    head: int
    wide: int  # ``head`` padded
    parts: int
    keys: int  # of a tile


@triton.jit
def _attend(q_ptr, keys_ptr, values_ptr, position_ptr, sum_ptr, top_ptr, mass_ptr, scale, strides, SIZE: tl.constexpr):
    """One part of the positions for the queries of one key head: weighted sum of values, top score, sum of weights."""
    b, k, part = tl.program_id(0).to(tl.int64) // SIZE.kv_heads, tl.program_id(0) % SIZE.kv_heads, tl.program_id(1)
    length = tl.load(position_ptr).to(tl.int32) + 1
    blocks = tl.cdiv(tl.cdiv(length, SIZE.keys), SIZE.parts)
    begin = part * blocks * SIZE.keys
    end = tl.minimum(length, begin + blocks * SIZE.keys)
    g, h, t = tl.arange(0, 16), tl.arange(0, SIZE.wide), tl.arange(0, SIZE.keys)
    row = (b * SIZE.kv_heads + k) * SIZE.group + g
    whole = (g < SIZE.group)[:, None] & (h < SIZE.head)[None, :]
    q = tl.load(q_ptr + row[:, None] * SIZE.head + h[None, :], whole, other=0.0)
    top = tl.full((16,), float("-inf"), tl.float32)
    mass = tl.zeros((16,), tl.float32)
    WIDE: tl.constexpr = SIZE.wide
    total = tl.zeros((16, WIDE), tl.float32)
    cache = b * strides[0] + k * strides[1]
    for start in range(begin, end, SIZE.keys):
        at = start + t
        inside = (at < end)[:, None] & (h < SIZE.head)[None, :]
        places = cache + at.to(tl.int64)[:, None] * strides[2] + h[None, :]
        keys = tl.load(keys_ptr + places, inside, other=0.0)
        values = tl.load(values_ptr + places, inside, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where((at < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        mass = mass * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = higher
    place = row * SIZE.parts + part
    tl.store(top_ptr + place, top, g < SIZE.group)
    tl.store(mass_ptr + place, mass, g < SIZE.group)
    tl.store(sum_ptr + place[:, None] * SIZE.head + h[None, :], total, whole)


@triton.jit
def _join(
    sum_ptr, top_ptr, mass_ptr, out_ptr, H: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, MANY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    p, h = tl.arange(0, MANY), tl.arange(0, WIDE)
    top = tl.load(top_ptr + row * PARTS + p, p < PARTS, other=float("-inf"))
    mass = tl.load(mass_ptr + row * PARTS + p, p < PARTS, other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    inside = (p < PARTS)[:, None] & (h < H)[None, :]
    sums = tl.load(sum_ptr + (row * PARTS + p)[:, None] * H + h[None, :], inside, other=0.0)
    y = tl.sum(sums * weight[:, None], 0) / tl.sum(mass * weight, 0)
    tl.store(out_ptr + row * H + h, y.to(out_ptr.dtype.element_ty), h < H)


def parts_of(rows: int, kv_heads: int, positions: int, keys: int) -> int:
    """Into how many parts the positions of a cache are cut."""
    return max(1, min(_MAX_PARTS, -(-_PROGRAMS // (rows * kv_heads)), -(-positions // keys)))


def attend(q_BNH: Tensor, keys_BKTH: Tensor, values_BKTH: Tensor, position_1: Tensor) -> Tensor:
    """As `decode_attention`."""
    q = q_BNH.contiguous()
    (batch, heads, width), (kv_heads, positions) = q.shape, keys_BKTH.shape[1:3]
    assert keys_BKTH.stride() == values_BKTH.stride() and keys_BKTH.stride(-1) == 1
    keys, wide = KEYS[q.dtype.itemsize], max(16, triton.next_power_of_2(width))
    parts = parts_of(batch, kv_heads, positions, keys)
    sums = torch.empty((batch * heads, parts, width), dtype=torch.float32, device=q.device)
    tops, masses = torch.empty((2, batch * heads, parts), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    many, scale = triton.next_power_of_2(parts), _LOG2_E / math.sqrt(width)
    tensors, strides = (q, keys_BKTH, values_BKTH, position_1, sums, tops, masses), keys_BKTH.stride()[:3]
    size = Size(kv_heads, heads // kv_heads, width, wide, parts, keys)
    with on_device(q):
        _attend[(batch * kv_heads, parts)](*tensors, scale, strides, size, num_warps=4)
        _join[(batch * heads,)](sums, tops, masses, out, width, wide, parts, many, num_warps=2)
    return out
