"""Which memory autograd's engine adds gradients in, where a value was used more than once.

On CUDA the engine adds into the first gradient, if it holds the last reference to that; on meta, or under a dispatch mode, it makes a
third tensor. Seen from a mode it is an addition that no Python code asked for.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

ALONE = (2, 4)
"""References to a storage and to a tensor that only autograd's engine holds, while it calls a dispatch mode with it."""


def summed_in_place(args: Any) -> Tensor | None:
    """The gradient to which autograd's engine adds another, where nobody else holds it.

    C++ sees a mode, or tensors on meta, and makes a third one instead (`InputBuffer::accumulate`, `can_accumulate_inplace`).
    """
    frame, depth = sys._getframe(2), 0
    while frame is not None and frame.f_code.co_name in ("_fn", "inner") and depth < 4:
        frame, depth = frame.f_back, depth + 1
    if (
        frame is None
        or frame.f_code.co_name != "_engine_run_backward"
        or len(args) != 2
        or args[0].shape != args[1].shape
    ):
        return None
    old = args[0]  # of C++'s sum `old_var + var`
    held = torch._C._storage_Use_Count(old.untyped_storage()._cdata), old._use_count()
    dense = old.untyped_storage().nbytes() == old.numel() * old.element_size()
    return old if held <= ALONE and dense and not old._is_view() else None
