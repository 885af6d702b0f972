"""How the next token is chosen, and reading it without holding the device up. The draw (kernels/pointwise/sampling.py)
stays on the logits' device; seed, number of the draw and logits alone decide it, so a request writes the same text in
any batch, and on every device whose logits agree. Legend: B rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.kernels.pointwise.sampling import sample_tokens


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. ``temperature`` divides the logits, 0 takes the likeliest token, of equals the
    first. What may be drawn is cut, each on what the one before left, to the ``top_k`` likeliest tokens (0: all), to
    the fewest likeliest that together have the probability ``top_p`` (1: all), and to those with at least the share
    ``min_p`` of the likeliest's probability (0: all). Raises ConfigurationError: a value outside its range."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, holds, advice in (
            ("temperature", 0 <= self.temperature < float("inf"), "give 0 for the likeliest token, or e.g. 0.8"),
            ("top_k", self.top_k >= 0, "give a number of tokens, or 0 for all"),
            ("top_p", 0 < self.top_p <= 1, "give a probability above 0 and up to 1"),
            ("min_p", 0 <= self.min_p <= 1, "give a share of the likeliest token's probability from 0 to 1"),
        ):
            if not holds:
                raise ConfigurationError(f"{name} {getattr(self, name)}: {advice}")


def sample(logits_BV: Tensor, sampling: Sampling, seeds_B: Tensor | int, positions_B: Tensor | int) -> Tensor:
    """The next tokens (B,) int64 on the device, which is not waited for, after ``positions_B`` draws of each request;
    -1 for a row without a token to draw. -inf in ``logits_BV`` is never drawn."""
    logits_BV = logits_BV.float() if logits_BV.dtype == torch.float64 else logits_BV
    return sample_tokens(logits_BV, seeds_B, positions_B, **vars(sampling))


class Arrival:
    """A tensor, tokens for example, on its way to the host. What the device is given after this is not waited for."""

    def __init__(self, given: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._here = given
        if given.is_cuda:
            self._here = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
            self._here.copy_(given, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(given.device))

    def tensor(self) -> Tensor:
        """It, on the host, once it is here."""
        if self._event is not None:
            self._event.synchronize()
        return self._here

    def numbers(self) -> list[int]:
        """The tokens, once they are here; raises CorruptData where a row's logits were not finite."""
        numbers = self.tensor().tolist()
        if min(numbers, default=0) < 0:
            raise CorruptData(
                "the model's logits are not finite: its weights are damaged or overflow in this type; try fp32"
            )
        return numbers
