"""Parameters that somebody else's saved-tensor hooks keep: handed on as what they are now, not as the objects that they are.

A managed parameter stands for its bytes only while its group is in use. torch's checkpointing keeps, in its second pass, the tensor itself
where no gradient is wanted (`torch.utils.checkpoint`, in ``_recomputation_hook``), so a frozen parameter would be a placeholder of
NaN by the time that backward reads it. A detached alias holds the loaded buffer instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


class _HandedOn:
    """The pack hook ``outer``, which gets parameters as detached tensors."""

    def __init__(self, outer: Callable[[torch.Tensor], Any]) -> None:
        self._outer = outer

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self._outer(tensor.detach() if isinstance(tensor, nn.Parameter) else tensor)


def handing_on(hooks: tuple[Callable[..., Any], Callable[..., Any]]) -> AbstractContextManager[Any] | None:
    """``hooks``, the active pair, as they were but for parameters; None if they are such a pair already."""
    pack, unpack = hooks
    if isinstance(pack, _HandedOn):
        return None
    return torch.autograd.graph.saved_tensors_hooks(_HandedOn(pack), unpack)
