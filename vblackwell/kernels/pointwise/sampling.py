"""One token from each row of logits by the Gumbel-max trick, without waiting for the device.

The token is the argmax of ``logits / temperature + g`` with g drawn from the Gumbel distribution (Maddison, Tarlow and
Minka, arXiv:1411.0030), which follows the softmax without computing it. The noise comes from Philox 4x32-10 (Salmon et
al., SC 2011), keyed by the row's seed and counted by the row's position and the column: equal seeds, positions and
logits give equal tokens in any batch. Triton kernels on CUDA and torch elsewhere draw the same numbers and can differ
only where two tokens tie within the last bits of a logarithm.

Legend: B rows, V vocabulary, C counters.
"""

from functools import partial

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise.sampling_reference import sample_reference
from vblackwell.kernels.runtime.registry import DTYPES, on_device, register_op, runs_triton


def sample_tokens(
    logits_BV: Tensor,
    seeds_B: Tensor | int,
    positions_B: Tensor | int = 0,
    *,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
) -> Tensor:
    """The tokens (B,) int64; -1 for a row that has NaN or +inf, or nothing but -inf.

    What may be drawn is cut by ``top_k``, ``top_p`` (Holtzman et al., arXiv:1904.09751) and ``min_p`` (Nguyen et al.,
    arXiv:2407.01082), each on what the one before left; tokens as likely as the last one kept are kept too. The
    caller has checked that the four are in their ranges; each may be of each row, (B,) on the logits' device.

    Args:
        logits_BV: bf16, fp16 or fp32; -inf for tokens that must not be drawn.
        seeds_B: of each request, any 63-bit number; a tensor's values are not read: that would wait for the device.
        positions_B: how many tokens each request has drawn before; with the same seed it gives another draw.
        temperature: logits are divided by it; 0 takes the likeliest token, of equals the first.
        top_k: draw from this many of the likeliest; 0: from all.
        top_p: draw from the fewest likeliest with this probability; above 0 and up to 1: from all.
        min_p: draw from tokens with at least this share of the likeliest's probability; 0: from all.

    Raises ConfigurationError for a shape or type that does not fit.
    """
    if logits_BV.dim() != 2 or logits_BV.shape[1] < 1 or logits_BV.dtype not in DTYPES:
        raise ConfigurationError(
            f"sampling from logits of {tuple(logits_BV.shape)} {logits_BV.dtype}: "
            "give (rows, vocabulary) of bfloat16, float16 or float32"
        )
    full = partial(torch.full, (logits_BV.shape[0],), device=logits_BV.device)
    seeds_B, positions_B = (
        _row(x, logits_BV) if isinstance(x, Tensor) else full(x, dtype=torch.int64) for x in (seeds_B, positions_B)
    )

    def each(value: Tensor | float, dtype: torch.dtype) -> Tensor:
        return _row(value, logits_BV, dtype) if isinstance(value, Tensor) else full(value, dtype=dtype)

    temperature_B, cuts = each(temperature, torch.float32), []
    if any(isinstance(x, Tensor) for x in (top_k, top_p, min_p)) or (top_k, top_p, min_p) != (0, 1.0, 0.0):
        most = min(top_k, (1 << 31) - 1) if isinstance(top_k, int) else top_k  # beyond the vocabulary it means all
        cuts = [each(most, torch.int32), *(each(x, torch.float32) for x in (top_p, min_p))]
    logits_BV = logits_BV.detach()
    if runs_triton("sampling", logits_BV, 0):
        return _sample_tokens(logits_BV, seeds_B, positions_B, temperature_B, cuts)
    return sample_reference(logits_BV, seeds_B, positions_B, temperature_B, cuts)


def _row(value: Tensor, logits_BV: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    if value.shape != logits_BV.shape[:1] or value.device != logits_BV.device:
        raise ConfigurationError(
            f"sampling: seeds, positions or settings of {tuple(value.shape)} on {value.device}: give a number, or"
            f" ({logits_BV.shape[0]},) on {logits_BV.device}"
        )
    return value.to(dtype).contiguous()


@register_op(lambda logits_BV, seeds_B, *rest: torch.empty_like(seeds_B))
def _sample_tokens(
    logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, temperature_B: Tensor, cuts: list[Tensor]
) -> Tensor:
    from vblackwell.kernels.pointwise import sampling_triton

    with on_device(logits_BV):
        return sampling_triton.sample(logits_BV, seeds_B, positions_B, temperature_B, cuts)
