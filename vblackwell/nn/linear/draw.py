"""First values of layers that stand in for ``nn.Linear``."""

from __future__ import annotations

import math

from torch import Tensor, nn


def draw_as_linear(weight: Tensor | None, bias: Tensor | None, in_features: int) -> None:
    """Draw (N, in_features) and (N,) as ``nn.Linear.reset_parameters`` does, in the same order of draws; None is left out."""
    if weight is not None:
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(in_features)
        nn.init.uniform_(bias, -bound, bound)
