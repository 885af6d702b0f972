"""What autocast means for an op of ours: its input is cast to autocast's dtype, nothing else is, and inside there is no autocast.

torch's own `register_autocast` casts every floating tensor to one dtype fixed when the op is registered: block scales, tensor scales and
biases would lose bits, and ``torch.autocast(dtype=...)`` would not be heard. Without any rule the products inside a pure torch backend
would be cast, because autocast reaches through an op into its implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("vblackwell", "FRAGMENT")  # registrations live as long as it does
_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


def register_autocast(op: Any, cast_input: bool = True) -> None:
    """Give the custom op ``op`` the rule above.

    Args:
        op: from `torch.library.custom_op`, whose first argument is the input.
        cast_input: whether that argument is cast, if it is bf16, fp16 or fp32; an op of backward takes what it is given.
    """
    overload, name = op._opoverload, op._name
    excluded = torch._C.DispatchKeySet(_KEYS["cpu"]) | torch._C.DispatchKeySet(_KEYS["cuda"])

    def kernel(x: Tensor, *rest: Any) -> Any:
        if cast_input and x.is_floating_point() and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return overload(x, *rest)

    for key in _KEYS.values():
        _LIBRARY.impl(name, kernel, key.name)
