"""What sampling.py may draw of a row, found by Triton: the least logit that top_k, top_p and min_p leave.

No row is sorted. Logits become integers of the same order (``ordered``). One pass over the row keeps the four largest of every
lane's words, `LANES` lanes wide. The least key that stays is then found by bisection over these, in registers, counting (top_k) or adding
probabilities (top_p). That is exact as long as no lane's fourth lies above the answer, since what a lane has dropped is not larger than its
fourth: 16,384 kept words nearly always hold the few hundred that count. Where they might not, the bisection goes on over the whole
row, some 30 passes of it. Sums are in a fixed order.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES, WARPS = 4096, 16  # 120 registers a thread hold the kept words and their probabilities
KEPT: tl.constexpr = tl.constexpr(4)
LEAST_KEY: tl.constexpr = tl.constexpr(-(1 << 31))  # below any logit's


@triton.jit
def scaled(logits, column, temperature, WORDS: tl.constexpr):
    """Logits over the temperature in fp32; -inf beyond the row; zero has one sign."""
    x = tl.load(logits + column, column < WORDS, other=float("-inf")).to(tl.float32)
    return x / temperature + 0.0


@triton.jit
def ordered(y):
    """An int32 that is ordered as ``y`` is."""
    bits = y.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The number whose `ordered` is ``key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _keys(logits, column, temperature, WORDS: tl.constexpr):
    return tl.where(column < WORDS, ordered(scaled(logits, column, temperature, WORDS)), LEAST_KEY)


@triton.jit
def _count(logits, least, temperature, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Words of the row from key ``least`` on."""
    count = 0
    for start in tl.range(0, WORDS, LANES, num_stages=3):
        key = _keys(logits, start + tl.arange(0, LANES), temperature, WORDS)
        count += tl.sum((key >= least).to(tl.int32), 0)
    return count


@triton.jit
def _mass(logits, above, top, temperature, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Sum of exp(y - top) over the row's keys above ``above``."""
    total = 0.0
    for start in tl.range(0, WORDS, LANES, num_stages=3):
        key = _keys(logits, start + tl.arange(0, LANES), temperature, WORDS)
        total += tl.sum(tl.where(key > above, tl.exp(_value(key) - top), 0.0), 0)
    return total


@triton.jit
def _count_kept(a, b, c, d, least):
    held = (a >= least).to(tl.int32) + (b >= least).to(tl.int32) + (c >= least).to(tl.int32) + (d >= least).to(tl.int32)
    return tl.sum(held, 0)


@triton.jit
def _mass_kept(a, b, c, d, of_a, of_b, of_c, of_d, above):
    held = tl.where(a > above, of_a, 0.0) + tl.where(b > above, of_b, 0.0)
    held += tl.where(c > above, of_c, 0.0) + tl.where(d > above, of_d, 0.0)
    return tl.sum(held, 0)


@triton.jit
def _least_key(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, least_ptr, stride, WORDS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    lane = tl.arange(0, LANES)
    a = tl.full([LANES], LEAST_KEY, tl.int32)
    b, c, d = a, a, a
    for start in tl.range(0, WORDS, LANES, num_stages=3):
        x = _keys(logits, start + lane, temperature, WORDS)
        a, x = tl.maximum(a, x), tl.minimum(a, x)
        b, x = tl.maximum(b, x), tl.minimum(b, x)
        c, x = tl.maximum(c, x), tl.minimum(c, x)
        d = tl.maximum(d, x)
    top_key = tl.max(a, 0)
    top = _value(top_key)
    # No word above this is missing among the kept ones.
    dropped = tl.full([], LEAST_KEY, tl.int64)
    if WORDS > KEPT * LANES:
        dropped = tl.max(d, 0).to(tl.int64)
    low = tl.full([], LEAST_KEY, tl.int64)
    if (top_k > 0) & (top_k < WORDS) & (greedy == 0):
        high = top_key.to(tl.int64) + 1
        while high - low > 1:  # top_k keys or more from low on, fewer from high on
            middle = (low + high) >> 1
            enough = _count_kept(a, b, c, d, middle.to(tl.int32)) >= top_k
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        if dropped > low:
            high = top_key.to(tl.int64) + 1
            while high - low > 1:
                middle = (low + high) >> 1
                enough = _count(logits, middle.to(tl.int32), temperature, WORDS, LANES) >= top_k
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    least = low
    if (top_p < 1) & (greedy == 0):
        base = tl.where(
            (top != top) | (top == float("inf")) | (top == float("-inf")), 0.0, top
        )  # of such a row nothing is drawn
        of_a, of_b = tl.exp(_value(a) - base), tl.exp(_value(b) - base)
        of_c, of_d = tl.exp(_value(c) - base), tl.exp(_value(d) - base)
        low = tl.maximum(low - 1, tl.full([], LEAST_KEY, tl.int64))
        if dropped > low:
            wanted = top_p * _mass(logits, low.to(tl.int32), base, temperature, WORDS, LANES)
        else:
            wanted = top_p * _mass_kept(a, b, c, d, of_a, of_b, of_c, of_d, low.to(tl.int32))
        # Keys above low have the probability, those above high do not.
        high = top_key.to(tl.int64)
        known = tl.maximum(low, dropped)
        if _mass_kept(a, b, c, d, of_a, of_b, of_c, of_d, known.to(tl.int32)) >= wanted:
            low = known
            while high - low > 1:
                middle = (low + high) >> 1
                short = _mass_kept(a, b, c, d, of_a, of_b, of_c, of_d, middle.to(tl.int32)) < wanted
                low, high = tl.where(short, low, middle), tl.where(short, middle, high)
        else:
            high = known
            while high - low > 1:
                middle = (low + high) >> 1
                short = _mass(logits, middle.to(tl.int32), base, temperature, WORDS, LANES) < wanted
                low, high = tl.where(short, low, middle), tl.where(short, middle, high)
        least = high
    if min_p > 0:
        least = tl.maximum(least, ordered(top + tl.log(min_p)).to(tl.int64))
    tl.store(least_ptr + row, tl.where(greedy, LEAST_KEY, least).to(tl.int32))


def least_keys(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> Tensor:  # fmt: skip
    """The least `ordered` number, (B,) int32, of each row's scaled logits that may be drawn; a row's words lie side by side."""
    rows, words = logits_BV.shape
    least_B = torch.empty(rows, dtype=torch.int32, device=logits_BV.device)
    lanes = min(LANES, triton.next_power_of_2(words))
    _least_key[(rows,)](
        logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, least_B, logits_BV.stride(0), WORDS=words, LANES=lanes, num_warps=WARPS
    )  # fmt: skip
    return least_B
