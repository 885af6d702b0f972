"""How a function becomes a PyTorch op of ours: forward, fake, backward and the rule of autocast, registered once.

Under autocast an op's input is cast to its dtype, nothing else is, and inside there is no autocast. torch's own
`register_autocast` casts every floating tensor to one dtype fixed when the op is registered: scales and biases would
lose bits. Without any rule autocast would reach through an op into its implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("vblackwell", "FRAGMENT")  # registrations live as long as it does
_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


def register_op(
    fake: Callable[..., Any],
    *,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    autocast: Literal["cast", "keep"] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Make the decorated function the op ``vblackwell::<its name>``, without leading underscores, which mutates
    nothing.

    Args:
        fake: the result without its numbers, of the same arguments.
        save, backward: as for `torch.library.register_autograd`; without ``backward`` the op has no derivative.
        autocast: 'cast': the first argument, if it is bf16, fp16 or fp32, is cast to autocast's dtype; 'keep': it is
            taken as it is given, as an op of backward takes it; None: no rule.
    """

    def register(run: Callable[..., Any]) -> Any:
        name = run.__name__.lstrip("_")
        op = torch.library.custom_op(f"vblackwell::{name}", run, mutates_args=())  # type: ignore[attr-defined]
        op.register_fake(fake)
        if backward is not None:
            op.register_autograd(backward, setup_context=save)
        if autocast is not None:
            register_autocast(op, autocast == "cast")
        return op

    return register


def register_autocast(op: Any, cast_input: bool = True) -> None:
    """Give the custom op ``op`` the rule of this module: ``cast_input`` is 'cast', otherwise 'keep'."""
    overload, name = op._opoverload, op._name
    excluded = torch._C.DispatchKeySet(_KEYS["cpu"]) | torch._C.DispatchKeySet(_KEYS["cuda"])

    def kernel(x: Tensor, *rest: Any) -> Any:
        if cast_input and x.is_floating_point() and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return overload(x, *rest)

    for key in _KEYS.values():
        _LIBRARY.impl(name, kernel, key.name)


def empty_of(x: Tensor) -> Tensor:
    """An empty tensor in the strides of ``x``, but for adjacent elements in the last dimension."""
    return torch.empty_like(x) if x.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
