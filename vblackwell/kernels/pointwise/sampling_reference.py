"""sampling.py in plain torch. Legend: B rows, V vocabulary, C counters."""

import torch
from torch import Tensor

GROUP = 4096  # columns that share 1,024 Philox counters, four words each
LANES = GROUP // 4
MAX_UNIFORM = 1.0 - 2.0**-24  # the largest fp32 below 1, so that no exponential is infinite
_MASK = 0xFFFFFFFF


def sample_reference(
    logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, temperature_B: Tensor, cuts: list[Tensor]
) -> Tensor:
    """``sample_tokens`` in plain torch, on any device; ``cuts``: top_k, top_p and min_p of each row, or nothing."""
    wide_BV = logits_BV.float()
    spoiled_B = ~(wide_BV < float("inf")).all(-1)
    greedy_B = temperature_B <= 0
    scaled_BV = wide_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    noise_BV = gumbel(seeds_B, positions_B, wide_BV.shape[1])
    scores_BV = scaled_BV + torch.where(greedy_B[:, None], 0.0, noise_BV)
    if cuts:
        kept_BV = kept_tokens(scaled_BV, *cuts) | greedy_B[:, None]
        scores_BV = scores_BV.masked_fill(~kept_BV, float("-inf"))
    best_B = scores_BV.amax(-1, keepdim=True)
    column_V = torch.arange(wide_BV.shape[1], device=wide_BV.device)
    tokens_B = torch.where(scores_BV == best_B, column_V, wide_BV.shape[1]).amin(-1)  # the first of equals
    return torch.where(spoiled_B | (best_B[:, 0] == float("-inf")), -1, tokens_B)


def kept_tokens(scaled_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """Which tokens may be drawn, (B, V) boolean, from logits that are divided by the temperature."""
    vocabulary = scaled_BV.shape[1]
    ranked_BV = scaled_BV.double().sort(-1, descending=True).values
    top_k_B = torch.where((top_k_B <= 0) | (top_k_B > vocabulary), vocabulary, top_k_B).long()
    least_B = ranked_BV.gather(-1, top_k_B[:, None] - 1)
    mass_BV = (ranked_BV - ranked_BV[:, :1]).exp().masked_fill(ranked_BV < least_B, 0.0)
    before_BV = mass_BV.cumsum(-1) - mass_BV  # of what is likelier: the token that crosses top_p stays
    inside_BV = (before_BV < top_p_B.double()[:, None] * mass_BV.sum(-1, keepdim=True)) | (top_p_B >= 1)[:, None]
    inside_BV[:, 0] = True
    crossing_B = ranked_BV.masked_fill(~inside_BV, float("inf")).amin(-1, keepdim=True)
    share_B = ranked_BV[:, :1] + min_p_B.double().log()[:, None]
    return scaled_BV >= torch.maximum(torch.maximum(least_B, crossing_B), share_B)


def gumbel(seeds_B: Tensor, positions_B: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise (B, V) fp32 of rows with these seeds and positions."""
    groups = -(-vocabulary // GROUP)
    lanes = min(LANES, vocabulary)  # of a short row only the first words of some counters are used
    counter_C = torch.arange(groups * lanes, device=seeds_B.device)
    positions_B1, zero_C = positions_B[:, None], counter_C * 0
    words = philox(seeds_B[:, None], counter_C, zero_C, positions_B1, positions_B1 >> 32)
    # columns of a group: 1,024 of the first word, then of the second: neighbours in memory are the kernel's neighbours
    words_BV = torch.stack([word.reshape(-1, groups, lanes) for word in words], dim=2).flatten(1)[:, :vocabulary]
    uniform_BV = ((words_BV.float() + 0.5) * 2.0**-32).clamp(max=MAX_UNIFORM)
    return -exponential(uniform_BV).log()


def exponential(u: Tensor) -> Tensor:
    """``-log(1 - u)``; below 1/32, where draws are won, by a series of five terms, 5e-9 from the value."""
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return torch.where(u < 2.0**-5, series, -(1.0 - u).log())


def philox(key: Tensor, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words, as int64, of Philox 4x32-10 for a 64-bit key and four 32-bit words of a counter, all int64."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*(x & _MASK for x in counter), key)[:4]
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        left, right = c0, c2
        c0 = _high(0xCD9E8D57, right) ^ c1 ^ k0
        c2 = _high(0xD2511F53, left) ^ c3 ^ k1
        c1, c3 = (0xCD9E8D57 * right) & _MASK, (0xD2511F53 * left) & _MASK  # wraps in 64 bits, the low half is right
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _high(factor: int, x: Tensor) -> Tensor:
    """The upper half of a 64-bit product of 32-bit numbers, in halves because int64 has a sign."""
    return (factor * (x >> 16) + ((factor * (x & 0xFFFF)) >> 16)) >> 16
