"""One token from one row of logits.

Drawn on the CPU in fp32 from the caller's generator: the same seed gives the same text on every device whose logits agree.

Legend: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, CorruptData


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: draw from this many of the likeliest tokens; 0: from all.
        top_p: draw from the fewest likeliest tokens that together have this probability; 1: from all.

    Raises:
        ConfigurationError: a value outside its range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigurationError(f"temperature {self.temperature}: give 0 for the likeliest token, or e.g. 0.8")
        if self.top_k < 0:
            raise ConfigurationError(f"top_k {self.top_k}: give a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p {self.top_p}: give a probability above 0 and up to 1")


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The distribution (V,) that a token is drawn from, fp32 on the CPU; ``sampling.temperature`` is positive."""
    scaled_V = logits_V.float().cpu() / sampling.temperature
    if 0 < sampling.top_k < scaled_V.numel():
        least = scaled_V.topk(sampling.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < least, float("-inf"))
    chances_V = scaled_V.softmax(-1)
    if sampling.top_p < 1:
        ranked_V, order_V = chances_V.sort(descending=True, stable=True)
        before_V = ranked_V.cumsum(-1) - ranked_V  # probability of what is likelier: the token that crosses top_p stays
        chances_V = chances_V.scatter(0, order_V, ranked_V.masked_fill(before_V >= sampling.top_p, 0.0))
    return chances_V / chances_V.sum()


def sample(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token.

    Raises:
        CorruptData: the logits are not finite.
    """
    if not torch.isfinite(logits_V).all():
        raise CorruptData(
            "the model's logits are not finite: its weights are damaged or overflow in this type; try fp32"
        )
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(probabilities(logits_V, sampling), 1, generator=generator))
