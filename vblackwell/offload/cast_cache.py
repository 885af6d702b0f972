"""Autocast's cache of cast weights is off in the forward of every model that is in a stack.

The cache is keyed by parameter and would hold the casts of every streamed layer until the autocast context ends
(`used_parameters` turns it off). It is off for resident models too, since it changes bits: a weight that is used twice
is cast once, and its gradients are summed in the narrow type, not in fp32; and a step inside the context does not reach
the next forward. Where bytes live must change neither.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from vblackwell.offload.hooks import SiteHook


class UncachedForward:
    """Hooks that turn the cache off while the forward of ``model`` runs.

    Inside torch.compile, which caches no casts, they do nothing. torch calls no hook after a KeyboardInterrupt: then
    the cache is on again when the autocast context has ended.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entered = threading.local()
        self._handles = [
            model.register_forward_pre_hook(SiteHook(self._enter), prepend=True),
            model.register_forward_hook(SiteHook(self._leave), always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._entered.__dict__.setdefault("before", []).append(torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        before: list[bool] = [] if torch.compiler.is_compiling() else self._entered.__dict__.get("before", [])
        if before:  # not so where the way in failed: `_leave` is called even then
            torch.set_autocast_cache_enabled(before.pop())

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
