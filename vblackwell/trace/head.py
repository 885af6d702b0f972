"""Which module of a model is its head: the last one called that has weights of its own. Where it begins, logits and loss begin."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_MOST_KNOWN = 64
_known: dict[Any, str] = {}


def last_module_with_weights(
    model: nn.Module, make_batch: Callable[[], Any], loss: Callable[[nn.Module, Any], Any]
) -> nn.Module | None:  # fmt: skip
    """The module of parameters of its own that the forward calls last; None where the model has none.

    It takes a forward to know, so models of one class whose modules have the same names and classes are asked once.
    """
    modules = dict(model.named_modules())
    remembered = getattr(loss, "__closure__", loss) is None  # what a closure holds would be kept with it
    key = type(model), loss, tuple((name, type(module)) for name, module in modules.items())
    if remembered and key in _known:
        return modules[_known[key]]
    last: list[str] = []

    def note(name: str) -> Callable[[nn.Module, Any], None]:
        def called(module: nn.Module, inputs: Any) -> None:
            last[:] = [name]

        return called

    handles = [
        module.register_forward_pre_hook(note(name))
        for name, module in modules.items()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # Reentrant checkpointing says it; no gradient is wanted here.
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            loss(model, make_batch())
    finally:
        for handle in handles:
            handle.remove()
    if not last:
        return None
    while len(_known) >= _MOST_KNOWN:
        del _known[next(iter(_known))]
    if remembered:
        _known[key] = last[0]
    return modules[last[0]]
