"""Triton kernels of sampling.py: ``_least_key`` finds what a row may draw, ``_best`` the best token in a part of the
row, ``_first`` in all of it.

No row is sorted. Logits become integers of the same order (``ordered``). One pass over the row keeps the four largest
of every lane's words; the least key that stays is found by bisection over these, in registers, counting (top_k) or
adding probabilities (top_p), in a fixed order. What a lane has dropped is not larger than its fourth: only where that
lies above the answer the bisection goes on over the whole row, some 30 passes of it.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.pointwise.sampling_reference import GROUP, LANES, MAX_UNIFORM

NO_TOKEN, SPOILED = tl.constexpr(-1), tl.constexpr(-2)
_MAX_UNIFORM: tl.constexpr = tl.constexpr(MAX_UNIFORM)
_PROGRAMS = 1024  # some for each multiprocessor, where the rows alone are fewer
CUT_LANES, CUT_WARPS = 4096, 16  # 120 registers a thread hold the largest words and their probabilities
PER_LANE: tl.constexpr = tl.constexpr(4)  # words that are held
MIN_KEY: tl.constexpr = tl.constexpr(-(1 << 31))  # below any logit's


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
    return tl.where(column < WORDS, ordered(scaled(logits, column, temperature, WORDS)), MIN_KEY)


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
def _count_largest(largest, least):
    a, b, c, d = largest
    held = (a >= least).to(tl.int32) + (b >= least).to(tl.int32) + (c >= least).to(tl.int32) + (d >= least).to(tl.int32)
    return tl.sum(held, 0)


@triton.jit
def _mass_largest(largest, masses, above):
    a, b, c, d = largest
    held = tl.where(a > above, masses[0], 0.0) + tl.where(b > above, masses[1], 0.0)
    held += tl.where(c > above, masses[2], 0.0) + tl.where(d > above, masses[3], 0.0)
    return tl.sum(held, 0)


@triton.jit
def _least_key(logits_ptr, temperature_ptr, cuts, least_ptr, stride, WORDS: tl.constexpr, LANES: tl.constexpr):
    """``cuts``: where top_k, top_p and min_p are."""
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)
    top_k, top_p, min_p = tl.load(cuts[0] + row), tl.load(cuts[1] + row), tl.load(cuts[2] + row)
    lane = tl.arange(0, LANES)
    a = tl.full([LANES], MIN_KEY, tl.int32)
    b, c, d = a, a, a
    for start in tl.range(0, WORDS, LANES, num_stages=3):
        x = _keys(logits, start + lane, temperature, WORDS)
        a, x = tl.maximum(a, x), tl.minimum(a, x)
        b, x = tl.maximum(b, x), tl.minimum(b, x)
        c, x = tl.maximum(c, x), tl.minimum(c, x)
        d = tl.maximum(d, x)
    largest = (a, b, c, d)
    top_key = tl.max(a, 0)
    top = _value(top_key)
    # No word above this is missing among the largest.
    dropped = tl.full([], MIN_KEY, tl.int64)
    if WORDS > PER_LANE * LANES:
        dropped = tl.max(d, 0).to(tl.int64)
    low = tl.full([], MIN_KEY, tl.int64)
    if (top_k > 0) & (top_k < WORDS) & (greedy == 0):
        high = top_key.to(tl.int64) + 1
        while high - low > 1:  # top_k keys or more from low on, fewer from high on
            middle = (low + high) >> 1
            enough = _count_largest(largest, middle.to(tl.int32)) >= top_k
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        if dropped > low:
            high = top_key.to(tl.int64) + 1
            while high - low > 1:
                middle = (low + high) >> 1
                enough = _count(logits, middle.to(tl.int32), temperature, WORDS, LANES) >= top_k
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    least = low
    if (top_p < 1) & (greedy == 0):
        # nothing is drawn of a row whose top is not finite
        base = tl.where((top != top) | (top == float("inf")) | (top == float("-inf")), 0.0, top)
        of_a, of_b = tl.exp(_value(a) - base), tl.exp(_value(b) - base)
        masses = (of_a, of_b, tl.exp(_value(c) - base), tl.exp(_value(d) - base))
        low = tl.maximum(low - 1, tl.full([], MIN_KEY, tl.int64))
        if dropped > low:
            wanted = top_p * _mass(logits, low.to(tl.int32), base, temperature, WORDS, LANES)
        else:
            wanted = top_p * _mass_largest(largest, masses, low.to(tl.int32))
        # Keys above low have the probability, those above high do not.
        high = top_key.to(tl.int64)
        known = tl.maximum(low, dropped)
        if _mass_largest(largest, masses, known.to(tl.int32)) >= wanted:
            low = known
            while high - low > 1:
                middle = (low + high) >> 1
                short = _mass_largest(largest, masses, middle.to(tl.int32)) < wanted
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
    tl.store(least_ptr + row, tl.where(greedy, MIN_KEY, least).to(tl.int32))


def least_keys(logits_BV: Tensor, temperature_B: Tensor, *cuts: Tensor) -> Tensor:
    """The least `ordered` number, (B,) int32, of each row's scaled logits that may be drawn; words are contiguous."""
    rows, words = logits_BV.shape
    least_B = torch.empty(rows, dtype=torch.int32, device=logits_BV.device)
    lanes = min(CUT_LANES, triton.next_power_of_2(words))
    tensors, stride = (logits_BV, temperature_B, cuts, least_B), logits_BV.stride(0)
    _least_key[(rows,)](*tensors, stride, words, lanes, num_warps=CUT_WARPS)
    return least_B


@triton.jit
def _gumbel(word):
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _MAX_UNIFORM)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.03125, series, -tl.log(1.0 - u)))


@triton.jit
def _best(
    logits_ptr, draw, least_ptr, score_ptr, token_ptr, stride, groups_each, WORDS: tl.constexpr, LANES: tl.constexpr
):
    """The best score of a part of the row and its token; all may be drawn where ``least_ptr`` is None. ``draw``: where
    seeds, positions and temperatures are.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    logits = logits_ptr + row.to(tl.int64) * stride
    seed, position, temperature = tl.load(draw[0] + row), tl.load(draw[1] + row), tl.load(draw[2] + row)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)
    least = tl.load(least_ptr + row) if least_ptr is not None else 0
    lane = tl.arange(0, LANES)
    zero = (lane * 0).to(tl.uint32)
    position_low, position_high = zero + position.to(tl.uint32), zero + (position >> 32).to(tl.uint32)
    best = tl.full([LANES], float("-inf"), tl.float32)
    token = tl.full([LANES], NO_TOKEN, tl.int32)
    spoiled = lane < 0
    for step in range(groups_each):
        group = part * groups_each + step
        words = tl.philox(seed, (group * LANES + lane).to(tl.uint32), zero, position_low, position_high)
        for place in tl.static_range(4):
            column = group * (4 * LANES) + lane + place * LANES
            y = scaled(logits, column, temperature, WORDS)
            spoiled = spoiled | (y != y) | (y == float("inf"))
            score = tl.where(greedy, y, y + _gumbel(words[place]))
            if least_ptr is not None:
                score = tl.where(ordered(y) >= least, score, float("-inf"))
            better = score > best
            best, token = tl.where(better, score, best), tl.where(better, column, token)
    highest = tl.max(best, 0)
    first = tl.min(tl.where(best == highest, token, 0x7FFFFFFF), 0)
    at = row * tl.num_programs(1) + part
    tl.store(score_ptr + at, highest)
    tl.store(token_ptr + at, tl.where(tl.max(spoiled.to(tl.int32), 0) == 1, SPOILED, first))


@triton.jit
def _first(score_ptr, token_ptr, out_ptr, parts, PARTS: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    score = tl.load(score_ptr + row * parts + part, part < parts, other=float("-inf"))
    token = tl.load(token_ptr + row * parts + part, part < parts, other=NO_TOKEN)
    highest = tl.max(score, 0)
    first = tl.min(tl.where((score == highest) & (token >= 0), token, 0x7FFFFFFF), 0)
    nothing = (tl.min(token, 0) == SPOILED) | (highest == float("-inf"))
    tl.store(out_ptr + row, tl.where(nothing, NO_TOKEN, first).to(tl.int64))


def sample(
    logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, temperature_B: Tensor, cuts: list[Tensor]
) -> Tensor:
    """``sample_tokens`` (B,) int64; ``cuts``: top_k (int32), top_p and min_p (fp32) of each row, or nothing."""
    logits_BV = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
    rows, words = logits_BV.shape
    device, stride = logits_BV.device, logits_BV.stride(0)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return tokens_B
    least_B = least_keys(logits_BV, temperature_B, *cuts) if cuts else None
    groups = triton.cdiv(words, GROUP)
    groups_each = triton.cdiv(groups, min(groups, max(1, _PROGRAMS // rows)))
    parts = triton.cdiv(groups, groups_each)
    scores_BP = torch.empty(rows, parts, dtype=torch.float32, device=device)
    found_BP = torch.empty(rows, parts, dtype=torch.int32, device=device)
    tensors = (logits_BV, (seeds_B, positions_B, temperature_B), least_B, scores_BP, found_BP)
    _best[(rows, parts)](*tensors, stride, groups_each, words, LANES, num_warps=4)
    _first[(rows,)](scores_BP, found_BP, tokens_B, parts, PARTS=triton.next_power_of_2(parts), num_warps=1)
    return tokens_B
