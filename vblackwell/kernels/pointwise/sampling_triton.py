"""Triton kernels of sampling.py: ``_best`` finds the best token in a part of a row, ``_first`` in all of it.

What a row may draw is found before, by sampling_cut_triton.py.
"""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.pointwise.sampling import GROUP, LANES, MOST_UNIFORM
from vblackwell.kernels.pointwise.sampling_cut_triton import least_keys, ordered, scaled

NO_TOKEN, SPOILED = tl.constexpr(-1), tl.constexpr(-2)
_MOST: tl.constexpr = tl.constexpr(MOST_UNIFORM)
_PROGRAMS = 1024  # some for each multiprocessor, where the rows alone are fewer


@triton.jit
def _gumbel(word):
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _MOST)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.03125, series, -tl.log(1.0 - u)))


@triton.jit
def _better(
    best, token, spoiled, logits, column, word, temperature, greedy, least, WORDS: tl.constexpr, CUT: tl.constexpr
):
    y = scaled(logits, column, temperature, WORDS)
    spoiled = spoiled | (y != y) | (y == float("inf"))
    score = tl.where(greedy, y, y + _gumbel(word))
    if CUT:
        score = tl.where(ordered(y) >= least, score, float("-inf"))
    better = score > best
    return tl.where(better, score, best), tl.where(better, column, token), spoiled


@triton.jit
def _best(
    logits_ptr, seed_ptr, position_ptr, temperature_ptr, least_ptr, score_ptr, token_ptr, stride, groups_each,
    WORDS: tl.constexpr, CUT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    logits = logits_ptr + row.to(tl.int64) * stride
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)
    least = tl.load(least_ptr + row) if CUT else 0
    lane = tl.arange(0, LANES)
    zero = (lane * 0).to(tl.uint32)
    position_low, position_high = zero + position.to(tl.uint32), zero + (position >> 32).to(tl.uint32)
    best = tl.full([LANES], float("-inf"), tl.float32)
    token = tl.full([LANES], NO_TOKEN, tl.int32)
    spoiled = lane < 0
    for step in range(groups_each):
        group = part * groups_each + step
        a, b, c, d = tl.philox(seed, (group * LANES + lane).to(tl.uint32), zero, position_low, position_high)
        column = group * (4 * LANES) + lane
        best, token, spoiled = _better(best, token, spoiled, logits, column, a, temperature, greedy, least, WORDS, CUT)
        best, token, spoiled = _better(
            best, token, spoiled, logits, column + LANES, b, temperature, greedy, least, WORDS, CUT
        )
        best, token, spoiled = _better(
            best, token, spoiled, logits, column + 2 * LANES, c, temperature, greedy, least, WORDS, CUT
        )
        best, token, spoiled = _better(
            best, token, spoiled, logits, column + 3 * LANES, d, temperature, greedy, least, WORDS, CUT
        )
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
    logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, temperature_B: Tensor,
    cuts: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """``sample_tokens`` (B,) int64; ``cuts`` are top_k (int32), top_p and min_p (fp32) of each row."""
    logits_BV = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
    rows, words = logits_BV.shape
    device, stride = logits_BV.device, logits_BV.stride(0)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return tokens_B
    least_B = seeds_B if cuts is None else least_keys(logits_BV, temperature_B, *cuts)  # without cuts nobody reads it
    groups = triton.cdiv(words, GROUP)
    groups_each = triton.cdiv(groups, min(groups, max(1, _PROGRAMS // rows)))
    parts = triton.cdiv(groups, groups_each)
    scores_BP = torch.empty(rows, parts, dtype=torch.float32, device=device)
    found_BP = torch.empty(rows, parts, dtype=torch.int32, device=device)
    _best[(rows, parts)](
        logits_BV, seeds_B, positions_B, temperature_B, least_B, scores_BP, found_BP, stride, groups_each,
        WORDS=words, CUT=cuts is not None, LANES=LANES, num_warps=4,
    )  # fmt: skip
    _first[(rows,)](scores_BP, found_BP, tokens_B, parts, PARTS=triton.next_power_of_2(parts), num_warps=1)
    return tokens_B
