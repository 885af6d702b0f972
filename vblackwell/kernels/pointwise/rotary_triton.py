"""Triton kernels of rotary.py."""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.runtime.op import empty_of
from vblackwell.kernels.runtime.registry import on_device

# Elements of one half that a program holds at a time.
TILE = 2048


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
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, length,
    q_b, q_n, q_s, k_b, k_n, k_s, qo_b, qo_n, qo_s, ko_b, ko_n, ko_s, cos_b, cos_s, sin_b, sin_s,
    N: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, INVERSE: tl.constexpr,
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
        q_ptr, q_out_ptr, b, s, q_b, q_n, q_s, qo_b, qo_n, qo_s, cos1, cos2, sin1, sin2, inside, N, HALF, HEADS, BLOCK, INVERSE
    )  # fmt: skip
    _turn(
        k_ptr, k_out_ptr, b, s, k_b, k_n, k_s, ko_b, ko_n, ko_s, cos1, cos2, sin1, sin2, inside, K, HALF, HEADS, BLOCK, INVERSE
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
    """Queries and keys rotated (``inverse``: by the transposed matrices), in the inputs' strides where those are dense."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BNSH, k_BKSH))
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    q_out, k_out = empty_of(q), empty_of(k)
    batch, heads, length, width = q.shape
    if q.numel() == 0 or k.numel() == 0:
        return q_out, k_out
    block = triton.next_power_of_2(width // 2)
    at_once = max(1, min(triton.next_power_of_2(max(heads, k.shape[1])), TILE // block))
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
