"""What transforms of torch.func (grad, vjp, jacrev, vmap, ...) see of offloaded parameters.

A transform wraps its inputs in C++, past ``__torch_function__``: of an offloaded parameter it would wrap the
placeholder, and compute with NaN. So the functions that wrap are given a check, once a process; there is no other place
at which a parameter is seen.

What a transform saves for its own backward it keeps by reference, and allows no `saved_tensors_hooks`: a parameter that
is saved itself (a norm's weight) would be a placeholder again by then. So inside one, modules compute with views, which
keep the loaded bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
import torch._functorch.eager_transforms as eager_transforms
import torch._functorch.vmap as vmap
from torch import nn

from vblackwell.errors import Unsupported
from vblackwell.offload.layout.groups import Slot
from vblackwell.offload.parameters import OffloadedParameter, engine_and_slot

# torch imports them by name; torch 2.11 to 2.13 have all three.
_WRAPPING = (
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_functional_tensor"),
    (vmap, "_add_batch_dim"),
)


@cache
def refuse_wrapping() -> None:
    """From now on, transforms of functions of offloaded parameters themselves raise `Unsupported`."""
    for module, name in _WRAPPING:
        wrap = getattr(module, name, None)
        if wrap is not None:
            setattr(module, name, _checked(wrap))


def _checked(wrap: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wrap)
    def check(tensor: Any, *args: Any) -> Any:
        if type(tensor) is OffloadedParameter:
            raise Unsupported(
                f"torch.func cannot transform a function of the offloaded parameter {tensor._vb_slot.name!r} itself: "
                "release(model) first, "
                "or transform a function of the inputs alone"
            )
        return wrap(tensor, *args)

    return check


@contextmanager
def computing_with_views(module: nn.Module, slots: Collection[Slot]) -> Iterator[None]:
    """Inside, the parameters of ``slots``, which are in use, are views of themselves in ``module``, as
    `functional_call` would have it.
    """
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    wanted = set(slots)
    try:
        for inner in module.modules():
            params: dict[str, Any] = inner._parameters
            for name, param in params.items():
                if param is None:
                    continue
                found = engine_and_slot(param)
                if found is not None and found[1] in wanted:
                    replaced.append((params, name, param))
                    params[name] = param.view_as(param)
        yield
    finally:
        for params, name, param in replaced:
            params[name] = param
