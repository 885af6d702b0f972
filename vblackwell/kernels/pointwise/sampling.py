"""One token from each row of logits by the Gumbel-max trick, without waiting for the device.

The token is the argmax of ``logits / temperature + g`` with g drawn from the Gumbel distribution (Maddison, Tarlow and Minka,
arXiv:1411.0030), which follows the softmax without computing it. The noise comes from Philox 4x32-10 (Salmon et al., SC 2011), keyed by the
row's seed and counted by the row's position and the column: it knows nothing of the batch, so equal seeds, positions and logits
give equal tokens in any batch, with any neighbours.

What may be drawn is cut before, in this order and each on what the one before left: ``top_k`` likeliest, the fewest likeliest with
probability ``top_p`` (Holtzman et al., arXiv:1904.09751), at least ``min_p`` of the likeliest's probability (Nguyen et al.,
arXiv:2407.01082). Tokens as likely as the last one kept are kept too. All four settings may differ from row to row.

On CUDA Triton kernels (sampling_triton.py; what is cut: sampling_cut_triton.py), elsewhere torch; the two draw the same numbers and can
differ only where two tokens tie within the last bits of a logarithm.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.runtime.registry import DTYPES, on_device, runs_triton

GROUP = 4096  # columns that share 1,024 Philox counters, four words each
LANES = GROUP // 4
MOST_UNIFORM = 1.0 - 2.0**-24  # the largest fp32 below 1, so that no exponential is infinite
_MASK = 0xFFFFFFFF


def sample_tokens(
    logits_BV: Tensor, seeds_B: Tensor | int, positions_B: Tensor | int = 0, *, temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0, top_p: Tensor | float = 1.0, min_p: Tensor | float = 0.0,
) -> Tensor:  # fmt: skip
    """The tokens (B,) int64; -1 for a row that has NaN or +inf, or nothing but -inf.

    Args:
        logits_BV: bf16, fp16 or fp32; -inf for tokens that must not be drawn.
        seeds_B: of each request, any 63-bit number.
        positions_B: how many tokens each request has drawn before; with the same seed it gives another draw.
        temperature: logits are divided by it; 0 takes the likeliest token, of equals the first.
        top_k: draw from this many of the likeliest; 0: from all.
        top_p: draw from the fewest likeliest with this probability; above 0 and up to 1: from all.
        min_p: draw from tokens with at least this share of the likeliest's probability; 0: from all.

    Each setting is a number, or a tensor (B,) on the logits' device, whose values are not looked at: looking would wait for it.

    Raises:
        ConfigurationError: a shape or type that does not fit, or a number outside its range.
    """
    _check(logits_BV, temperature, top_k, top_p, min_p)
    device, rows = logits_BV.device, logits_BV.shape[0]
    plain = all(not isinstance(x, Tensor) for x in (top_k, top_p, min_p)) and (top_k, top_p, min_p) == (0, 1.0, 0.0)
    seeds_B, positions_B = (_row(x, "seeds and positions", rows, torch.int64, device) for x in (seeds_B, positions_B))
    temperature_B = _row(temperature, "temperature", rows, torch.float32, device)
    cuts: tuple[Tensor, Tensor, Tensor] | None = None
    if not plain:
        cuts = (
            _row(top_k, "top_k", rows, torch.int32, device), _row(top_p, "top_p", rows, torch.float32, device),
            _row(min_p, "min_p", rows, torch.float32, device),
        )  # fmt: skip
    logits_BV = logits_BV.detach()
    if runs_triton("sampling", logits_BV, 0):
        return _sample(logits_BV, seeds_B, positions_B, temperature_B, *(cuts or (None, None, None)))
    return sample_reference(logits_BV, seeds_B, positions_B, temperature_B, cuts)


def _check(
    logits_BV: Tensor, temperature: Tensor | float, top_k: Tensor | int, top_p: Tensor | float, min_p: Tensor | float
) -> None:
    if logits_BV.dim() != 2 or logits_BV.shape[1] < 1 or logits_BV.dtype not in DTYPES:
        raise ConfigurationError(
            f"sampling from logits of {tuple(logits_BV.shape)} {logits_BV.dtype}: give (rows, vocabulary) of bfloat16, float16 or float32"
        )
    if not isinstance(temperature, Tensor) and not 0 <= temperature < float("inf"):
        raise ConfigurationError(f"temperature {temperature}: give 0 for the likeliest token, or e.g. 0.8")
    if not isinstance(top_k, Tensor) and top_k < 0:
        raise ConfigurationError(f"top_k {top_k}: give a number of tokens, or 0 for all")
    if not isinstance(top_p, Tensor) and not 0 < top_p <= 1:
        raise ConfigurationError(f"top_p {top_p}: give a probability above 0 and up to 1")
    if not isinstance(min_p, Tensor) and not 0 <= min_p <= 1:
        raise ConfigurationError(f"min_p {min_p}: give a share of the likeliest token's probability from 0 to 1")


def _row(value: Tensor | float, name: str, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        if dtype == torch.int32:  # a top_k beyond the vocabulary means all, whatever its size
            value = min(value, (1 << 31) - 1)
        return torch.full((rows,), value, dtype=dtype, device=device)
    if value.shape != (rows,) or value.device != device:
        raise ConfigurationError(
            f"sampling: {name} of {tuple(value.shape)} on {value.device}: give a number, or ({rows},) on {device}"
        )
    return value.to(dtype).contiguous()


@torch.library.custom_op("vblackwell::sample_tokens", mutates_args=())
def _sample(
    logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, temperature_B: Tensor, top_k_B: Tensor | None,
    top_p_B: Tensor | None, min_p_B: Tensor | None,
) -> Tensor:  # fmt: skip
    from vblackwell.kernels.pointwise import sampling_triton

    cuts = None if top_k_B is None or top_p_B is None or min_p_B is None else (top_k_B, top_p_B, min_p_B)
    with on_device(logits_BV):
        return sampling_triton.sample(logits_BV, seeds_B, positions_B, temperature_B, cuts)


@_sample.register_fake
def _(logits_BV, seeds_B, positions_B, temperature_B, top_k_B, top_p_B, min_p_B):  # type: ignore[no-untyped-def]
    return torch.empty_like(seeds_B)


def sample_reference(
    logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, temperature_B: Tensor,
    cuts: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """``sample_tokens`` in plain torch, on any device; ``cuts`` are top_k, top_p and min_p of each row."""
    wide_BV = logits_BV.float()
    spoiled_B = ~(wide_BV < float("inf")).all(-1)
    greedy_B = temperature_B <= 0
    scaled_BV = wide_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    noise_BV = gumbel(seeds_B, positions_B, wide_BV.shape[1])
    scores_BV = scaled_BV + torch.where(greedy_B[:, None], 0.0, noise_BV)
    if cuts is not None:
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
    # columns of a group: 1,024 of the first word, then of the second, so that neighbours in memory are neighbours in the kernel
    words_BV = torch.stack([word.reshape(-1, groups, lanes) for word in words], dim=2).flatten(1)[:, :vocabulary]
    uniform_BV = ((words_BV.float() + 0.5) * 2.0**-32).clamp(max=MOST_UNIFORM)
    return -exponential(uniform_BV).log()


def exponential(u: Tensor) -> Tensor:
    """``-log(1 - u)``; small u, which win, keep all their digits: below 1/32 a series of five terms, 5e-9 from the value."""
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
