"""One token from each row of logits by the Gumbel-max trick, without waiting for the device.

The token is the argmax of ``logits / temperature + g`` with g drawn from the Gumbel distribution (Maddison, Tarlow and
Minka, arXiv:1411.0030), which follows the softmax without computing it. The noise comes from Philox 4x32-10 (Salmon et
al., SC 2011), keyed by the row's seed and counted by the row's position and the column: equal seeds, positions and
logits give equal tokens in any batch. Triton kernels on CUDA and torch elsewhere draw the same numbers and can differ
only where two tokens tie within the last bits of a logarithm.

Legend: B rows, V vocabulary, C counters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise.sampling_reference import sample_reference
from vblackwell.kernels.runtime.registry import DTYPES, on_device, register_op, runs_triton


def sample_tokens(
    logits_BV: Tensor, seeds_B: Tensor | int, positions_B: Tensor | int = 0, *, temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0, top_p: Tensor | float = 1.0, min_p: Tensor | float = 0.0,
) -> Tensor:  # fmt: skip
    """The tokens (B,) int64; -1 for a row that has NaN or +inf, or nothing but -inf.

    What may be drawn is cut by ``top_k``, ``top_p`` (Holtzman et al., arXiv:1904.09751) and ``min_p`` (Nguyen et al.,
    arXiv:2407.01082), each on what the one before left; tokens as likely as the last one kept are kept too. Each
    setting is a number, or a tensor (B,) on the logits' device, whose values are not read: that would wait for it.

    Args:
        logits_BV: bf16, fp16 or fp32; -inf for tokens that must not be drawn.
        seeds_B: of each request, any 63-bit number.
        positions_B: how many tokens each request has drawn before; with the same seed it gives another draw.
        temperature: logits are divided by it; 0 takes the likeliest token, of equals the first.
        top_k: draw from this many of the likeliest; 0: from all.
        top_p: draw from the fewest likeliest with this probability; above 0 and up to 1: from all.
        min_p: draw from tokens with at least this share of the likeliest's probability; 0: from all.

    Raises ConfigurationError for a shape or type that does not fit, or a number outside its range.
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
        return _sample_tokens(logits_BV, seeds_B, positions_B, temperature_B, *(cuts or (None, None, None)))
    return sample_reference(logits_BV, seeds_B, positions_B, temperature_B, cuts)


def _check(
    logits_BV: Tensor, temperature: Tensor | float, top_k: Tensor | int, top_p: Tensor | float, min_p: Tensor | float
) -> None:
    if logits_BV.dim() != 2 or logits_BV.shape[1] < 1 or logits_BV.dtype not in DTYPES:
        raise ConfigurationError(
            f"sampling from logits of {tuple(logits_BV.shape)} {logits_BV.dtype}: "
            "give (rows, vocabulary) of bfloat16, float16 or float32"
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


@register_op(lambda logits_BV, seeds_B, *rest: torch.empty_like(seeds_B))
def _sample_tokens(
    logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, temperature_B: Tensor, top_k_B: Tensor | None,
    top_p_B: Tensor | None, min_p_B: Tensor | None,
) -> Tensor:  # fmt: skip
    from vblackwell.kernels.pointwise import sampling_triton

    cuts = None if top_k_B is None or top_p_B is None or min_p_B is None else (top_k_B, top_p_B, min_p_B)
    with on_device(logits_BV):
        return sampling_triton.sample(logits_BV, seeds_B, positions_B, temperature_B, cuts)
