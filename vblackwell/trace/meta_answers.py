"""Operators on meta tensors, answered from what the same question gave before.

Many of torch's shape rules are Python and take a third of a millisecond a call, hundreds of times in a model of thirty
equal layers; an answer depends on shapes, strides, dtypes and plain arguments alone. Kept are only answers that are
new, dense tensors in separate memory, or the first argument changed in place; every other operator (views, what reads
values, what touches tensors with bytes) runs as always.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vblackwell.trace.cuda_on_meta import META

_TENSORS = {Tensor, torch.nn.Parameter}
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_Recipe = Callable[[Any], Any]


@dataclass(slots=True)
class Known:
    """A call that was seen before: how to answer it (None: it must be asked again), and what a caller notes of it;
    ``is_view``: it gives a view and takes nothing."""

    recipe: _Recipe | None
    notes: dict[Any, Any] = field(default_factory=dict)
    is_view: bool = False


@dataclass(slots=True)
class Calls:
    """Of one operator, by their arguments. ``lists``: it changes lists in place."""

    func: Any  # kept, as it is found by its id: an operator's own hash is Python
    name: str  # without its overload
    is_aten: bool
    lists: bool
    known: dict[Any, Known] = field(default_factory=dict)


class MetaAnswers:
    """Calls operators, and remembers; ``known``: of the last call, None where its arguments do not say everything."""

    def __init__(self) -> None:
        self._calls: dict[int, Calls] = {}
        self.known: Known | None = None

    def of(self, func: Any) -> Calls:
        """What is known of operator ``func``."""
        calls = self._calls.get(id(func))
        if calls is None:
            name = func.__name__.partition(".")[0]
            calls = Calls(func, name, func.namespace == "aten", name.startswith("_foreach") and name.endswith("_"))
            self._calls[id(func)] = calls
        return calls

    def call(self, calls: Calls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.known, func = None, calls.func
        if not calls.is_aten:
            return func(*args, **kwargs)
        if calls.lists and all(each.is_meta for each in tree_leaves(args) if isinstance(each, Tensor)):
            return None  # values alone change, and scalars differ from step to step
        try:
            key = tuple([_key(each) for each in args])
            if kwargs:
                key = key, *[(name, _key(value)) for name, value in kwargs.items()]
        except TypeError:  # an argument that is not plain
            return func(*args, **kwargs)
        known = self.known = calls.known.get(key)
        if known is not None:
            return func(*args, **kwargs) if known.recipe is None else known.recipe(args)
        out = func(*args, **kwargs)
        self.known = calls.known[key] = Known(_recipe(func, args, kwargs, out))
        return out


def _key(value: Any) -> Any:
    kind = type(value)
    if kind in _TENSORS:
        dtype = value.dtype
        if not value.is_meta or dtype.is_complex:
            raise TypeError
        return value.shape, value.stride(), value.storage_offset(), dtype
    if kind in _PLAIN:
        return kind, value  # 1, 1.0 and True are equal, and not the same to an operator
    if isinstance(value, (list, tuple)):
        return tuple([_key(each) for each in value])
    raise TypeError


def _recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Recipe | None:
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [each.alias_info is not None and each.alias_info.is_write for each in arguments]
    if any(written):  # nothing happens to a tensor without bytes, and the first argument comes back
        in_place = written[0] and func.__name__.partition(".")[0].endswith("_")
        is_plain = not kwargs and in_place and torch.Tag.inplace_view not in func.tags
        return (lambda args: args[0]) if is_plain and out is args[0] and isinstance(out, Tensor) else None
    if any(each.alias_info is not None for each in (*arguments, *returns)):
        return None  # a view
    taken = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
    if type(out) is Tensor:
        return _new(out, taken)
    if type(out) in (list, tuple) and out and all(type(each) is Tensor for each in out):
        parts = [_new(each, taken) for each in out]
        if len({each.untyped_storage()._cdata for each in out}) == len(out) and None not in parts:
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
