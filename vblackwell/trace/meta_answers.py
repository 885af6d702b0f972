"""Operators on meta tensors, answered from what the same question gave before.

Many of torch's shape rules are Python and take a third of a millisecond a call; a model of thirty equal layers asks
each of them hundreds of times. An answer depends on shapes, strides, dtypes and plain arguments alone, so it is worked
out once for each. Kept are only answers that are new, dense tensors of their own, or the first argument changed in
place and otherwise as it was; every other operator (views, what reads values, what touches tensors with bytes) runs as
always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
_PLAIN_ARGUMENTS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_Recipe = Callable[[Any], Any]


class Known:
    """A call that was seen before: how to answer it (None: it must be asked again), and what a caller notes of it."""

    __slots__ = ("recipe", "notes")

    def __init__(self, recipe: _Recipe | None) -> None:
        self.recipe, self.notes = recipe, dict[Any, Any]()


class MetaAnswers:
    """Calls operators, and remembers. ``known`` is of the last call, the same for all calls with the same operator,
    shapes, strides, offsets, types and values of other arguments; None where these do not say everything.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}
        self.known: Known | None = None

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)``."""
        self.known = None
        if func.namespace != "aten":
            return func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        if name.startswith("_foreach") and name.endswith("_") and _without_bytes(args):
            return None  # values alone change, and scalars differ from step to step
        try:
            key = (func, *map(_key, args), *[(name, _key(value)) for name, value in kwargs.items()])
        except TypeError:  # an argument that is not plain
            return func(*args, **kwargs)
        known = self._known.get(key)
        if known is None:
            out = func(*args, **kwargs)
            known = self._known[key] = Known(_recipe(func, args, kwargs, out))
        else:
            out = func(*args, **kwargs) if known.recipe is None else known.recipe(args)
        self.known = known
        return out


class Answering(TorchDispatchMode):
    """All operators inside are answered by ``answers``."""

    def __init__(self, answers: MetaAnswers) -> None:
        super().__init__()
        self.answers = answers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self.answers.call(func, args, kwargs or {})


def _without_bytes(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    return all(map(_without_bytes, value)) if isinstance(value, (list, tuple)) else True


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = value.dtype
        if not value.is_meta or type(value) not in (Tensor, torch.nn.Parameter) or dtype.is_complex:
            raise TypeError
        return value.shape, value.stride(), value.storage_offset(), dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, _PLAIN_ARGUMENTS):
        return type(value), value  # 1, 1.0 and True are equal, and not the same to an operator
    raise TypeError


def _recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Recipe | None:
    """How to answer again; None where it must be asked."""
    schema = func._schema
    written = [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments]
    if any(written):
        return _in_place(func, args, kwargs, written, out)
    if any(each.alias_info is not None for each in (*schema.arguments, *schema.returns)):
        return None  # a view
    taken = {each.untyped_storage()._cdata for each in _tensors((args, tuple(kwargs.values())))}
    if type(out) is Tensor:
        return _new(out, taken)
    if type(out) in (list, tuple) and out:
        parts = [_new(each, taken) for each in out if type(each) is Tensor]
        storages = {each.untyped_storage()._cdata for each in out if type(each) is Tensor}
        if len(parts) == len(out) == len(storages) and None not in parts:
            kind = type(out)
            return lambda args: kind(part(args) for part in parts if part is not None)
    return None


def _new(out: Tensor, taken: set[int]) -> _Recipe | None:
    storage = out.untyped_storage()
    last = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True))
    dense = storage.nbytes() == (last if out.numel() else 0) * out.element_size()
    if not out.is_meta or out.storage_offset() or not dense or out.dtype.is_complex or storage._cdata in taken:
        return None
    shape, stride, dtype = tuple(out.shape), out.stride(), out.dtype
    return lambda args: torch.empty_strided(shape, stride, dtype=dtype, device=META)


# What these change is not their bytes.
_NOT_VALUES = set(
    [
        "resize_",
        "resize_as_",
        "set_",
        "detach_",
        "squeeze_",
        "unsqueeze_",
        "transpose_",
        "t_",
        "swapaxes_",
        "swapdims_",
        "as_strided_",
    ]
)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: Any, written: list[bool], out: Any) -> _Recipe | None:
    """Nothing happens to a tensor without bytes, and the first argument comes back."""
    name = func.__name__.partition(".")[0]
    if kwargs or not written[0] or not name.endswith("_") or name in _NOT_VALUES:
        return None
    if out is args[0] and isinstance(out, Tensor):
        return lambda args: args[0]
    return None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value for each in _tensors(part)] if isinstance(value, (list, tuple)) else []
