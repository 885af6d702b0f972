"""What the engine hangs on modules, parameters and the stack: small callables that neither leak nor travel.

None of them may keep a model alive, and none may be carried into a deep copy or a pickle of a module, which is a plain
module.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from vblackwell.offload.layout.groups import Slot
from vblackwell.offload.parameters import engine_and_slot


class SiteHook:
    """A module hook that a deep copy of the module does not carry: the copy is a plain module."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call: Callable[..., None] | None = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> SiteHook:
        copied = SiteHook.__new__(SiteHook)
        copied._call = None
        return copied

    def __reduce__(self) -> Any:
        return _inert_hook, ()


def _inert_hook() -> SiteHook:
    hook = SiteHook.__new__(SiteHook)
    hook._call = None
    return hook


def group_key(engine: Any, group: Any) -> str:
    """The name under which users meet a group: ``'model/layers.3'``."""
    return f"{engine.name}/{group.name}"


def gradient_hook(engine: Any, slot: Slot) -> Callable[[torch.Tensor], None]:
    """Weak, because these hooks live in C++ where Python's collector does not see the cycle they would close."""
    engine_ref, slot_ref = weakref.ref(engine), weakref.ref(slot)

    def take(param: torch.Tensor) -> None:
        alive, place = engine_ref(), slot_ref()
        if alive is not None and place is not None:
            alive.take_gradient(place)

    return take


def prefetcher_of(engine: Any) -> Callable[[Any], bool]:
    """What the stack asks about keys it does not know: group names such as 'model/layers.3', and parameters."""
    engine_ref = weakref.ref(engine)

    def take(item: Any) -> bool:
        alive = engine_ref()
        if alive is None:
            return False
        if isinstance(item, torch.Tensor):
            found = engine_and_slot(item)
            group = found[1].group if found is not None and found[0] is alive else None
        else:
            group = next((group for group in alive.groups if group_key(alive, group) == item), None)
        if group is not None:
            alive.ask(group)
        return group is not None

    return take


class UncachedForward:
    """Hooks that turn autocast's cache of cast weights off while the forward of ``model``, which is in a stack, runs.

    The cache is keyed by parameter and would hold the casts of every streamed layer until the autocast context ends. It
    is off for resident models too, since it changes bits: a weight that is used twice is cast once, and its gradients
    are summed in the narrow type, not in fp32; and a step inside the context does not reach the next forward.

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
