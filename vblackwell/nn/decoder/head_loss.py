"""The loss computed inside the output layer's own call, so that logits never exist whole.

A head is called with a `HiddenWithTargets` instead of a tensor. ``nn.Linear`` passes it to
``torch.nn.functional.linear``, which hands the call to ``__torch_function__``, and that answers with the loss. The head
stays a plain ``nn.Linear``, and is called as one: hooks that load its weight run, a parametrised weight is used, its
gradient arrives where it always does. A subclass of ``nn.Linear`` with ``targets`` in its forward would do as well, but
whatever treats plain linears specially would have to learn of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from vblackwell.errors import Unsupported
from vblackwell.kernels.pointwise.cross_entropy import linear_cross_entropy


class HiddenWithTargets:
    """Hidden states for a linear head that is to answer with the cross entropy of its logits.

    Args:
        hidden: (..., D).
        targets: (...), the word that belongs to each position.
        options: of `linear_cross_entropy`.
    """

    def __init__(self, hidden: Tensor, targets: Tensor, **options: Any) -> None:
        self.hidden = hidden
        self.targets = targets
        self.options = options

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        if func is not functional.linear or not isinstance(args[0], cls):
            raise Unsupported(
                f"{getattr(func, '__name__', func)} on hidden states with targets: only a linear head takes them; call it with the "
                "hidden states alone and compute the loss from its logits"
            )
        given, weight_VD, *bias_V = args
        bias = bias_V[0] if bias_V else (kwargs or {}).get("bias")
        return linear_cross_entropy(given.hidden, weight_VD, given.targets, bias, **given.options)


def takes_targets(head: nn.Module) -> bool:
    """Whether ``head`` may be called with `HiddenWithTargets`: it computes as ``nn.Linear`` does, and not in slices or packed."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
