"""AdamW with moments of 8 bits: their formats, and the update in plain torch, to the bits of `cuda/adamw8.cu`.

A block of 256 elements shares an fp32 scale, its largest value over the largest code. Codes are small floating-point numbers,
because moments of one block spread over decades and their relative error is what an update sees:

- m: a sign, three exponent and four mantissa bits, nearest step 2^-4, largest over smallest 1984. Below that a moment is zero now and then.
- sqrt(v), not v: half the exponent range for the same numbers, and the divisor is what is kept. Three exponent and five mantissa
  bits, step 2^-5, largest over smallest 4032. What is not zero is never kept as zero: a divisor too small would be an update
  too large, one too large is an update too small.

Both are rounded at random, with a probability that makes the mean right. A moving average with beta2 = 0.999 moves by a few parts in ten
thousand a step: rounded to nearest, steps of three per cent would hold it where it is for ever.

Without a remainder the bf16 weight is rounded at random as well. The random bits are a function of seed, step and the element's index
(Philox 2x32, seven rounds; Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011): cutting a parameter into
pieces, or updating it on another device, changes nothing.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vblackwell.kernels.optimizer.adamw_cpu import BLOCK, AdamWStep, block_sums, join, keep_nan, split

SCALE_BLOCK = 256  # elements that share a scale
MOST1, MOST2 = 124.0, 126.0  # largest values of codes of 3 + 4 and 3 + 5 bits
SMALLEST = 2.0**-100  # a block whose largest moment is smaller keeps zeros: the reciprocal of its scale might overflow
_CHUNK = 1 << 18  # elements at a time, a multiple of BLOCK
_LOW = 0xFFFFFFFF


def counter_words(seed: int, step: int) -> tuple[int, int]:
    """(key, salt) of a step's random bits, 32 bits each: splitmix64 (Steele et al., OOPSLA 2014) of both numbers."""
    mixed = 0
    for value in (seed, step):
        mixed = (mixed ^ value) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        mixed ^= mixed >> 31
    return mixed & _LOW, mixed >> 32


def random_words(first: int, n: int, key: int, salt: int) -> tuple[Tensor, Tensor]:
    """Two (n,) int64 tensors of 32 random bits each, for elements ``first`` and following of a parameter."""
    index = torch.arange(first, first + n)
    low, high = index & _LOW, (index >> 32) ^ salt
    for _ in range(7):
        product = low * 0xD256D193  # wraps in 64 bits; both halves are right
        low, high = ((product >> 32) & _LOW) ^ key ^ high, product & _LOW
        key = key + 0x9E3779B9 & _LOW
    return low, high


@functools.cache
def _values(mantissa: int, count: int) -> Tensor:
    """fp32 value of each of ``count`` codes: from 1 on fp32's own bits cut short, below it even steps."""
    codes = torch.arange(count)
    normal = ((codes + (126 << mantissa)) << (23 - mantissa)).int().view(torch.float32)
    return torch.where(codes >> mantissa > 0, normal, codes / 2**mantissa)


def _encoded(values: Tensor, random: Tensor, mantissa: int) -> Tensor:
    """int32 codes of ``values`` >= 0, rounded by ``random`` of 23 - mantissa bits."""
    shift = 23 - mantissa
    normal = ((values.view(torch.int32) + random) >> shift) - (126 << mantissa)
    even = (((values + 1).view(torch.int32) + random) >> shift) - (127 << mantissa)
    return torch.where(values >= 1, normal, even)


def decode_moments(codes1: Tensor, scales1: Tensor, codes2: Tensor, scales2: Tensor) -> tuple[Tensor, Tensor]:
    """(m, sqrt(v)) in fp32; all (n,) and (ceil(n / 256),)."""
    n = len(codes1)
    by1, by2 = (scales.repeat_interleave(SCALE_BLOCK)[:n] for scales in (scales1, scales2))
    values1, values2 = _values(4, 128).to(codes1.device), _values(5, 256).to(codes1.device)
    magnitude = values1[(codes1 & 127).int()] * by1
    return torch.where(codes1 >= 128, -magnitude, magnitude), values2[codes2.int()] * by2


def _scales(values: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Of ``values`` >= 0: each block's scale, and for each element what it is multiplied by to be a code's value."""
    n = len(values)
    padded = torch.zeros(-(-n // SCALE_BLOCK) * SCALE_BLOCK)
    padded[:n] = values
    largest = padded.view(-1, SCALE_BLOCK).amax(1)
    some = largest >= SMALLEST
    up = torch.where(some, torch.full((), most) / largest, 0.0)
    return torch.where(some, largest / torch.full((), most), 0.0), up.repeat_interleave(SCALE_BLOCK)[:n]


def encode_moments(
    m: Tensor, root_v: Tensor, random1: Tensor, random2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes and scales of m and of sqrt(v); ``random1`` of 19 and ``random2`` of 18 bits, int32."""
    scales1, up1 = _scales(m.abs(), MOST1)
    scales2, up2 = _scales(root_v, MOST2)
    codes1 = _encoded((m.abs() * up1).clamp(max=MOST1), random1, 4) + 128 * (m < 0)
    codes2 = _encoded((root_v * up2).clamp(max=MOST2), random2, 5)
    codes2 = torch.where((codes2 == 0) & (up2 > 0) & (root_v > 0), 1, codes2)
    return codes1.to(torch.uint8), scales1, codes2.to(torch.uint8), scales2


@torch.no_grad()
def piece(
    weight: Tensor,
    remainder: Tensor | None,
    codes1: Tensor,
    scales1: Tensor,
    codes2: Tensor,
    scales2: Tensor,
    gradient: Tensor,
    numbers: AdamWStep,
    previous: Tensor | None,
    factor: Tensor | None,
    sums: Tensor | None,
    counter: tuple[int, int],
    offset: int,
) -> None:
    """`adamw8_piece` on CPU tensors; ``counter`` is what `counter_words` gives."""
    for start in range(0, len(weight), _CHUNK):
        part = slice(start, start + _CHUNK)
        blocks = slice(start // SCALE_BLOCK, (start + _CHUNK) // SCALE_BLOCK)
        g = gradient[part].float()
        if previous is not None:
            g = previous[part].float() + g
        if sums is not None:
            block_sums(g, sums[start // BLOCK : (start + _CHUNK) // BLOCK])
        if factor is not None:
            g = g * factor
        states = codes1[part], scales1[blocks], codes2[part], scales2[blocks]
        _update(
            weight[part], None if remainder is None else remainder[part], states, g, numbers, counter, offset + start
        )


def _update(
    weight: Tensor,
    remainder: Tensor | None,
    states: tuple[Tensor, Tensor, Tensor, Tensor],
    g: Tensor,
    numbers: AdamWStep,
    counter: tuple[int, int],
    first: int,
) -> None:
    """Every line is one rounded operation of the kernel; scalars are fp32 tensors so that torch does not reorder them."""
    n = len(weight)
    decay, weight1, beta2, weight2, root, eps, minus_step_size = torch.tensor(numbers.words, dtype=torch.int32).view(
        torch.float32
    )
    m, root_v = decode_moments(*states)
    m = m + weight1 * (g - m)
    v = (root_v * root_v) * beta2 + (weight2 * g) * g
    root_v = (
        v.double().sqrt().float()
    )  # correctly rounded, which torch's fp32 square root is not where a vector library does it
    words = random_words(first, n, *counter)
    random1, random2 = (words[1] >> 13).int(), (((words[0] >> 16) << 2) | 2).int()
    for state, new in zip(states, encode_moments(m, root_v, random1, random2), strict=True):
        state.copy_(new)
    change = (minus_step_size * m) / (root_v / root + eps)
    if weight.dtype == torch.float32:
        weight.copy_(weight * decay + change)
    elif remainder is not None:
        scratch = torch.empty(n, dtype=torch.int32)
        bits = (join(weight, remainder, scratch) * decay + change).view(torch.int32)
        split(bits, weight, remainder, scratch)
    else:
        bits = (weight.float() * decay + change).view(torch.int32)
        weight.view(torch.int16).copy_((bits + (words[0] & 0xFFFF).int()) >> 16)
        keep_nan(bits, weight)
