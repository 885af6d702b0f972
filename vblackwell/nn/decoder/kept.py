"""Checkpointing that keeps what is dear to compute and cheap to hold, instead of computing the whole block again.

A choice between "save everything" and "save the block's input". Outputs of chosen operations are held from the forward to the backward
(torch's selective checkpointing); in the second pass they are taken instead of being computed. What each costs and saves, a block
and token, in elements and multiply-adds, with model width D, key-value width K, feed-forward width F, sequence S:

==============  ==================  =============================  =========================================
name            held                not computed again             2.70B shape, 16k tokens: held a block, saved
==============  ==================  =============================  =========================================
'attention'     D                   S * D (causal)                 84 MB
'projections'   D + 2 K             D * (D + 2 K)                  252 MB
'gates'         2 F                 2 * D * F                      453 MB
==============  ==================  =============================  =========================================

It works inside the function that is checkpointed, so it goes with any checkpoint that calls that function once more in backward. On
the CPU, where linears run one by one, only 'attention' is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.attention import op as _attention_op  # noqa: F401 - registers the own kernel's op
from vblackwell.kernels.pointwise import shared_input

NAMES = ("attention", "projections", "gates")
_aten: Any = torch.ops.aten
_own: Any = torch.ops.vblackwell
_ATTENTION = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _own.attention.default,
}


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple.

    Raises:
        ConfigurationError: one of them is not known.
    """
    found = tuple(names)
    for name in found:
        if name not in NAMES:
            raise ConfigurationError(f"kept activations {name!r} are not known: choose among {', '.join(NAMES)}")
    return found


class Keeping:
    """``function``, called once in the forward; once more in backward it is ``again``, and what was kept is taken.

    Make a new one for each checkpoint.

    Args:
        function: what is checkpointed.
        names: what to keep, of `NAMES`.
        again: what computes the same, or at least all that backward reads, in the second pass; default: ``function``.
    """

    def __init__(
        self, function: Callable[..., Any], names: tuple[str, ...], again: Callable[..., Any] | None = None
    ) -> None:
        self._next = function
        self._again = again or function
        self._contexts = list(create_selective_checkpoint_contexts(_policy(names))) if names else None

    def __call__(self, *args: Any) -> Any:
        function, self._next = self._next, self._again
        if self._contexts is None:
            return function(*args)
        if not self._contexts:
            raise Unsupported(
                "a second backward through a graph with kept activations: they were given up in the first"
            )
        with self._contexts.pop(0):
            return function(*args)


def _policy(names: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    linears: Any = shared_input._linears._opoverload

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operation in _ATTENTION and "attention" in names
        if operation is linears:  # of one input: three are queries, keys and values, two are gate and up
            keep = ("projections" if len(args[1]) == 3 else "gates") in names
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
