"""What the engine hangs on modules, parameters and the stack: small callables that neither leak nor travel.

None of them may keep a model alive, and none may be carried into a deep copy or a pickle of a module, which is a plain module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vblackwell.offload.layout.groups import Slot
from vblackwell.offload.parameters import engine_and_slot
from vblackwell.offload.sparse import group_key

if TYPE_CHECKING:
    from vblackwell.offload.engine import Offload


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


def gradient_hook(engine: Offload, slot: Slot) -> Callable[[torch.Tensor], None]:
    """Weak, because these hooks live in C++ where Python's collector does not see the cycle they would close."""
    engine_ref, slot_ref = weakref.ref(engine), weakref.ref(slot)

    def take(param: torch.Tensor) -> None:
        alive, place = engine_ref(), slot_ref()
        if alive is not None and place is not None:
            alive.take_gradient(place)

    return take


def prefetcher_of(engine: Offload) -> Callable[[Any], bool]:
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
