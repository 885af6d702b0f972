"""A parameter whose bytes are elsewhere: every read loads it, every write is carried to storage, nothing is ever stale.

A managed parameter keeps its identity and always shows the shape, dtype and device of its compute weight. While its
layer group is in use (inside the forward of a module that needs it) it is a plain `nn.Parameter` over the loaded
buffer, and costs nothing. Otherwise its class is `OffloadedParameter` and its data a single NaN seen through stride
zero: should any code get past the interception below, NaN is loud where old weights would be silent.

Swapping ``__class__`` is how torch itself turns lazy parameters into real ones. A tensor subclass for the model's whole
life would tax every operator call instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import nn

from vblackwell.errors import StaleTensor, Unsupported
from vblackwell.offload.gradient_proxy import DepartedGradient, departed_gradient
from vblackwell.offload.layout.groups import Slot

_T: Any = torch.Tensor
_FUNCTORCH: Any = getattr(torch._C, "_functorch")  # noqa: B009 (untyped)
_GRAD_GET = _T.grad.__get__
_GRAD_SET = _T.grad.__set__
_DATA_GET = _T.data.__get__
_DATA_SET = _T.data.__set__
_METADATA = frozenset(
    {
        getattr(_T, name).__get__
        for name in (
            "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "names", "itemsize", "nbytes",
            "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps",
            "is_ipu", "is_maia", "is_vulkan", "is_mtia", "is_xla", "is_sparse_csr", "retains_grad", "grad_fn", "output_nr",
            "_version", "name", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "grad_dtype",
        )
        if hasattr(getattr(_T, name, None), "__get__")
    }
    | {_T.requires_grad.__set__}
    | {
        getattr(_T, name)
        for name in (
            "size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed",
            "get_device", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "__hash__",
            "__len__", "ndimension", "is_inference", "is_shared", "is_pinned", "retain_grad",
        )
        if hasattr(_T, name)
    }
)  # fmt: skip
_TO_NUMPY = frozenset({_T.numpy, _T.__array__})
_NOT_MUTATING = {"requires_grad_", "share_memory_", "rename_"}


class Binding(Protocol):
    """What a managed parameter asks of the engine that holds its bytes."""

    def reading(self, slots: Iterable[Slot]) -> AbstractContextManager[None]:
        """Inside, the slots' parameters are plain and loaded, and tensors saved for backward are packed.

        What is written to them in place is written back at the end.
        """
        ...

    def packing(self) -> AbstractContextManager[None]:
        """Inside, tensors saved for backward are packed."""
        ...

    def aliases(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in a loaded buffer."""
        ...

    def overwrite(self, slot: Slot, source: torch.Tensor) -> bool:
        """Replace the bytes of a slot that level 0 cannot hold whole; False if it can, and nothing was done."""
        ...

    def has_gradient(self, slot: Slot) -> bool: ...

    def clear_gradient(self, slot: Slot) -> None: ...

    def export(self, slot: Slot) -> torch.Tensor | None:
        """While a state_dict is being made, or if level 0 cannot hold them whole: the slot's bytes on the CPU.
        Otherwise None.
        """
        ...


def _is_mutating(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None or name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_") and name not in _NOT_MUTATING


def _flatten(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flatten(item)
    else:
        yield value


def _map_aliases(value: Any, binding: Binding, is_alias: Callable[[torch.Tensor], bool]) -> Any:
    """``value`` with every tensor for which ``is_alias`` holds made read-only."""
    if isinstance(value, (list, tuple)):
        mapped = [_map_aliases(item, binding, is_alias) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if type(value) is torch.Tensor and is_alias(value):
        view = value.as_subclass(ReadOnlyView)
        view._vb_binding = binding
        return view
    return value


def _with_views(value: Any, params: list[Any]) -> Any:
    """``value`` with views in place of ``params``, which are in use."""
    if isinstance(value, (list, tuple)):
        mapped = [_with_views(item, params) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, dict):
        return {key: _with_views(item, params) for key, item in value.items()}
    return value.view_as(value) if any(value is param for param in params) else value


def _sealed(func: Any, result: Any) -> Any:
    """An array that numpy would write through, past everybody who could see it, is read-only."""
    if func in _TO_NUMPY:
        result.flags.writeable = False
    return result


class ReadOnlyView(torch.Tensor):
    """A view into a loaded weight that was handed out. It stays valid while held; writing to it is refused.

    It is a snapshot: the bytes of the weight when it was read, not of later steps.
    """

    _vb_binding: Binding

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        views = [item for item in _flatten((args, kwargs)) if isinstance(item, ReadOnlyView)]
        target = kwargs.get("out", args[0] if args else None)
        if _is_mutating(func, kwargs) and any(isinstance(item, ReadOnlyView) for item in _flatten(target)):
            raise StaleTensor(
                f"{getattr(func, '__name__', func)} on a view of an offloaded parameter would be lost: change the "
                "parameter itself "
                "(under torch.no_grad(), e.g. p.mul_(2)), or release(model) first"
            )
        binding = views[0]._vb_binding
        with torch._C.DisableTorchFunctionSubclass(), binding.packing():
            result = func(*args, **kwargs)
            storages = {view.untyped_storage()._cdata for view in views}
        return _map_aliases(_sealed(func, result), binding, lambda tensor: tensor.untyped_storage()._cdata in storages)


class OffloadedParameter(nn.Parameter):
    """See the module's text. Never constructed: `Slot.param.__class__` is switched to and from this."""

    _vb_binding: Binding
    _vb_slot: Slot

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _GRAD_GET:
            return _read_gradient(args[0])
        if func == _GRAD_SET:
            return _write_gradient(args[0], args[1])
        if func == _DATA_SET:
            return _write_data(args[0], args[1])
        if func is _T.detach and type(args[0]) is OffloadedParameter:
            exported = args[0]._vb_binding.export(args[0]._vb_slot)
            if exported is not None:
                return exported
        if (
            func is _T.copy_
            and type(args[0]) is OffloadedParameter
            and args[0]._vb_binding.overwrite(args[0]._vb_slot, args[1])
        ):
            return args[0]
        found = list(_flatten((args, kwargs)))
        if any(isinstance(item, DepartedGradient) for item in found):
            return DepartedGradient.__torch_function__(func, types, args, kwargs)
        managed = [item for item in found if type(item) is OffloadedParameter]
        if not managed:  # only plain ones are left: their group is in use further up
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        by_binding: dict[Binding, list[Slot]] = {}
        for param in managed:
            by_binding.setdefault(param._vb_binding, []).append(param._vb_slot)
        with ExitStack() as stack:
            for binding, slots in by_binding.items():
                stack.enter_context(binding.reading(slots))
            if is_transformed() and not _is_mutating(func, kwargs):  # which saves what it is given (`transforms`)
                args, kwargs = _with_views(args, managed), _with_views(kwargs, managed)
            result = func(*args, **kwargs)  # in-place writes show in the version counters, when `reading` ends
            result = _sealed(func, result)
            for binding in by_binding:
                result = _map_aliases(result, binding, binding.aliases)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with self._vb_binding.reading([self._vb_slot]):
            return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(_plain_copy(self), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(_plain_copy(self), self.requires_grad).__reduce_ex__(protocol)


class UsedParameter(nn.Parameter):
    """A parameter while its group is in use: plain, but for ``data``, whose writes autograd does not count.

    What ``data`` gives has a version counter of its own; it is kept until the use ends, so that `written_through_data`
    can ask it.
    """

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        with torch.inference_mode(False):  # there nothing would count
            alias = _DATA_GET(self)
        attributes(self).setdefault("_vb_data", []).append(alias)
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _write_data(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        plain = nn.Parameter(_DATA_GET(self), self.requires_grad)
        plain.__class__ = attributes(self)["_vb_slot"].plain_class
        return repr(plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo[id(self)]


@cache
def _used_class(plain_class: type) -> type:
    """`UsedParameter`, of a user's own child of `nn.Parameter` a child too."""
    if plain_class is nn.Parameter:
        return UsedParameter
    return type(plain_class.__name__, (UsedParameter, plain_class), {})


def begin_use(param: torch.Tensor, plain_class: type, loaded: torch.Tensor) -> None:
    """Make ``param`` plain, over ``loaded``."""
    param.__class__ = _used_class(plain_class)
    with torch.inference_mode(False):
        _DATA_SET(param, loaded)


def end_use(param: torch.Tensor, placeholder: torch.Tensor, binding: Binding, slot: Slot) -> None:
    """Make ``param`` an `OffloadedParameter` that shows ``placeholder``."""
    attributes(param).pop("_vb_data", None)
    with torch.inference_mode(False):
        _DATA_SET(param, placeholder)
    param.__class__ = OffloadedParameter
    attributes(param).update(_vb_binding=binding, _vb_slot=slot)


def written_through_data(param: torch.Tensor) -> bool:
    """Whether what ``param.data`` gave during this use was changed in place."""
    return any(alias._version for alias in attributes(param).get("_vb_data", ()))


def is_transformed() -> bool:
    """Whether a transform of torch.func runs."""
    return _FUNCTORCH.peek_interpreter_stack() is not None


def engine_and_slot(param: torch.Tensor) -> tuple[Any, Slot] | None:
    """The engine that holds ``param``'s bytes and its slot there; None for a plain parameter."""
    binding = param.__dict__.get("_vb_binding")
    return None if binding is None else (binding, param.__dict__["_vb_slot"])


def forget_binding(param: torch.Tensor) -> None:
    """Make ``param`` a stranger to every engine; its class and data are the caller's business."""
    for name in ("_vb_binding", "_vb_slot"):
        attributes(param).pop(name, None)


def attributes(param: torch.Tensor) -> dict[str, Any]:
    """The instance attributes of a tensor, past every interception."""
    return cast(dict[str, Any], param.__dict__)


def _plain_copy(param: OffloadedParameter) -> torch.Tensor:
    exported = param._vb_binding.export(param._vb_slot)
    if exported is not None:
        return exported.to(param.device, copy=True)
    with param._vb_binding.reading([param._vb_slot]), torch.no_grad():
        return param.detach().clone(memory_format=torch.preserve_format)


def _read_gradient(param: OffloadedParameter) -> torch.Tensor | None:
    """What ``p.grad`` is while offloaded: None only where there is no gradient, for None is what callers pass by."""
    slot = param._vb_slot
    if not param._vb_binding.has_gradient(slot):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return departed_gradient(cast(Any, param._vb_binding), slot, param.data)


def _write_gradient(param: OffloadedParameter, value: Any) -> None:
    if isinstance(value, DepartedGradient) and value._vb_slot is param._vb_slot:
        return  # what `p.grad *= x` ends with
    if value is not None:
        raise Unsupported(
            f"setting the gradient of the offloaded parameter {param._vb_slot.name!r}: only None (to clear it) is "
            "possible"
        )
    param._vb_binding.clear_gradient(param._vb_slot)


def _write_data(param: OffloadedParameter | UsedParameter, value: torch.Tensor) -> None:
    if value is not param:  # model.to(where it already is) assigns a parameter to itself
        raise Unsupported(
            f"replacing the data of the offloaded parameter {attributes(param)['_vb_slot'].name!r} (as .to(), .half() "
            "or .cuda() do): "
            "release(model) first, or copy into it under torch.no_grad()"
        )
