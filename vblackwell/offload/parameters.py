"""A parameter whose bytes are elsewhere: every read loads it, every write is carried to storage, nothing is ever stale.

It keeps its identity and shows the shape, dtype and device of its compute weight. While its group is in use it is plain
and costs nothing; otherwise its class is `OffloadedParameter`, swapped as torch does with lazy parameters, and its data
a NaN of stride zero: should code get past the interception, NaN is loud where old weights would be silent.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
import torch._functorch.eager_transforms as eager_transforms
import torch._functorch.vmap as vmap
from torch import Tensor, nn

from vblackwell.errors import StaleTensor, Unsupported
from vblackwell.memory.transfer import no_inference_mode
from vblackwell.offload.layout.groups import Group, Slot

_T: Any = Tensor
_FUNCTORCH: Any = getattr(torch._C, "_functorch")  # noqa: B009 (untyped)
_DATA_GET, _DATA_SET = _T.data.__get__, _T.data.__set__


def _of_tensor(names: str) -> frozenset[Any]:
    """What ``__torch_function__`` gets for tensors' attributes and methods, of those that this torch has."""
    found = [getattr(_T, name) for name in names.split() if hasattr(_T, name)]
    return frozenset(each if callable(each) else each.__get__ for each in found)


_SHAPE = _of_tensor(
    "shape dtype device layout is_cuda is_cpu is_sparse is_sparse_csr is_meta ndim requires_grad is_leaf grad_fn nbytes"
    " itemsize size dim numel nelement element_size is_floating_point is_complex __len__ __hash__"
)
_METADATA = (
    _SHAPE
    | {_T.requires_grad.__set__}
    | _of_tensor(
        "names is_quantized is_nested is_mkldnn is_xpu is_mps is_ipu is_maia is_vulkan is_mtia is_xla retains_grad"
        " output_nr _version name _backward_hooks _post_accumulate_grad_hooks _base grad_dtype is_signed get_device"
        " register_hook register_post_accumulate_grad_hook requires_grad_ ndimension is_inference is_shared is_pinned"
        " retain_grad"
    )
)
_TO_NUMPY = frozenset({_T.numpy, _T.__array__})
_NOT_MUTATING = {"requires_grad_", "share_memory_", "rename_"}
_ITSELF = frozenset({_T.data.__get__, _T.detach, _T.detach_})  # a gradient is not part of a graph
_NORMS = frozenset({_T.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm})
_TWO = (2, "fro", None)  # how callers name the 2-norm


def _is_mutating(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None or name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_") and name not in _NOT_MUTATING


def _flatten(value: Any) -> Iterator[Any]:
    """What is in lists, tuples and dicts, and children of these, which torch's tree functions take for leaves."""
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _flatten(item)
    else:
        yield value


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        mapped = [_map_tensors(item, change) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, dict):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    return change(value) if isinstance(value, Tensor) else value


def _guarded(func: Any, result: Any, binding: Any, is_alias: Callable[[Tensor], object]) -> Any:
    """What ``func`` gave, with every tensor for which ``is_alias`` holds made read-only, and every array."""
    if func in _TO_NUMPY:  # numpy would write through it, and nothing could see it
        result.flags.writeable = False

    def guard(tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or not is_alias(tensor):
            return tensor
        view = tensor.as_subclass(ReadOnlyView)
        view._vb_binding = binding
        return view

    return _map_tensors(result, guard)


_NOT_COMPILED = (
    "torch.compile would break its graph at every layer of a streamed model, to fetch the weights, and gain nothing: "
    "leave it out (accelerate=True fuses the operators of a causal model), or use placement='resident'"
)


def refuse_compiled(model: nn.Module) -> None:
    """Raises Unsupported where a module of ``model`` is compiled."""
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            raise Unsupported(f"{name or type(model).__name__} is compiled: {_NOT_COMPILED}")


def _refuse_compiling() -> None:
    """Raises Unsupported where torch.compile traces the caller. After a graph break what follows runs as Python: the
    user sees that error and no page of the tracer.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=_NOT_COMPILED)
        raise Unsupported(_NOT_COMPILED)


def _refuse_written_views(func: Any, args: Any, kwargs: Any) -> None:
    """Raises StaleTensor where ``func`` writes into a `ReadOnlyView`."""
    target = kwargs.get("out", args[0] if args else None)
    if _is_mutating(func, kwargs) and any(isinstance(item, ReadOnlyView) for item in _flatten(target)):
        raise StaleTensor(
            f"{getattr(func, '__name__', func)} on a view of an offloaded parameter would be lost: change the "
            "parameter itself (under torch.no_grad(), e.g. p.mul_(2)), or release(model) first"
        )


class ReadOnlyView(Tensor):
    """A view into a loaded weight that was handed out: a snapshot, valid while held; writing to it is refused."""

    _vb_binding: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = list(_flatten((args, kwargs)))
        _refuse_written_views(func, args, kwargs)
        for other in (OffloadedGradient, OffloadedParameter):  # whose bytes are elsewhere
            if any(type(item) is other for item in found):
                return other.__torch_function__(func, types, args, kwargs)
        views = [item for item in found if isinstance(item, ReadOnlyView)]
        binding = views[0]._vb_binding
        with torch._C.DisableTorchFunctionSubclass(), binding.packing():
            result = func(*args, **kwargs)
            storages = {view.untyped_storage()._cdata for view in views}
        return _guarded(func, result, binding, lambda tensor: tensor.untyped_storage()._cdata in storages)


class OffloadedParameter(nn.Parameter):
    """See the module's text. Never constructed: `Slot.param.__class__` is switched to and from this."""

    _vb_binding: Any  # the `Offload` that holds its bytes
    _vb_slot: Slot

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _refuse_compiling()
        if func in _INSTEAD:
            return _INSTEAD[func](*args)
        _refuse_written_views(func, args, kwargs)
        first = args[0] if args and type(args[0]) is OffloadedParameter else None
        if func is _T.detach and first is not None:
            exported = first._vb_binding.export(first._vb_slot)
            if exported is not None:
                return exported
        if func is _T.copy_ and first is not None and first._vb_binding.overwrite(first._vb_slot, args[1]):
            return first
        found = list(_flatten((args, kwargs)))
        if any(isinstance(item, OffloadedGradient) for item in found):
            return OffloadedGradient.__torch_function__(func, types, args, kwargs)
        managed = [item for item in found if type(item) is OffloadedParameter]
        if not managed:  # only plain ones are left: their group is in use further up
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        by_binding: dict[Any, list[Slot]] = {}
        for param in managed:
            by_binding.setdefault(param._vb_binding, []).append(param._vb_slot)
        with ExitStack() as stack:
            for binding, slots in by_binding.items():
                stack.enter_context(binding.reading(slots))
            if is_transformed() and not _is_mutating(func, kwargs):  # which saves what it is given: views keep bytes
                ours = set(map(id, managed))
                args, kwargs = _map_tensors((args, kwargs), lambda x: x.view_as(x) if id(x) in ours else x)
            result = func(*args, **kwargs)  # in-place writes show in the version counters, when `reading` ends
            for binding in by_binding:
                result = _guarded(func, result, binding, binding.weights.find)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with self._vb_binding.reading([self._vb_slot]):
            return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(_plain_copy(self), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(_plain_copy(self), self.requires_grad).__reduce_ex__(protocol)


class UsedParameter(nn.Parameter):
    """A parameter while its group is in use: plain, but for ``data``, whose writes autograd does not count. What that
    gives has a separate version counter, and is kept until the use ends, which asks it.
    """

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        with torch.inference_mode(False):  # there nothing would count
            alias = _DATA_GET(self)
        vars(self).setdefault("_vb_data", []).append(alias)
        return alias

    @data.setter
    def data(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _write_data(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        plain = nn.Parameter(_DATA_GET(self), self.requires_grad)
        plain.__class__ = vars(self)["_vb_slot"].plain_class
        return repr(plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)


@cache
def _used_class(plain_class: type) -> type:
    """`UsedParameter`, of a user's own child of `nn.Parameter` a child too."""
    if plain_class is nn.Parameter:
        return UsedParameter
    return type(plain_class.__name__, (UsedParameter, plain_class), {})


def is_transformed() -> bool:
    """Whether a transform of torch.func runs."""
    return _FUNCTORCH.peek_interpreter_stack() is not None


def engine_and_slot(param: Tensor) -> tuple[Any, Slot] | None:
    """The engine that holds ``param``'s bytes and its slot there; None for a plain parameter."""
    held = param.__dict__
    return (held["_vb_binding"], held["_vb_slot"]) if "_vb_binding" in held else None


def make_plain(param: Tensor, plain_class: type, data: Tensor) -> None:
    """Take ``param`` from its engine: of ``plain_class`` again, with ``data``."""
    for name in ("_vb_binding", "_vb_slot"):
        vars(param).pop(name, None)
    param.__class__ = plain_class
    with torch.inference_mode(False):
        param.data = data


def _plain_copy(param: OffloadedParameter) -> Tensor:
    exported = param._vb_binding.export(param._vb_slot)
    if exported is not None:
        return exported.to(param.device, copy=True)
    with param._vb_binding.reading([param._vb_slot]), torch.no_grad():
        return param.detach().clone(memory_format=torch.preserve_format)


def _write_data(param: OffloadedParameter | UsedParameter, value: Tensor) -> None:
    if value is not param:  # model.to(where it already is) assigns a parameter to itself
        raise Unsupported(
            f"replacing the data of the offloaded parameter {vars(param)['_vb_slot'].name!r} (as .to(), .half() "
            "or .cuda() do): release(model) first, or copy into it under torch.no_grad()"
        )


class SiteHook:
    """A module hook that does nothing in a deep copy or a pickle of the module: those are plain modules."""

    ignores_output = True  # and leaves the inputs as they are

    def __init__(self, call: Callable[..., None] = lambda *args: None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> Any:
        return SiteHook, ()


class BeforeForward(SiteHook):
    """A hook ahead of the forward of a streamed module; raises Unsupported under torch.compile."""

    def __call__(self, *args: Any) -> None:
        _refuse_compiling()
        self._call(*args)


class AfterForward(SiteHook):
    """A hook after the forward of a streamed module, called even where the one ahead of it refused torch.compile."""

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(*args)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` while its object is alive. C++ and the stack hold hooks out of the collector's sight: they keep
    nothing alive.
    """
    alive = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = alive()
        return None if found is None else found(*args)

    return call


# -- which parameters are in use ---------------------------------------------------------------------------------------


@contextmanager
def _unseen() -> Iterator[None]:
    """Inside, the caller's modes and transforms see no operators: selective checkpointing counts those of both passes,
    and loads differ; torch.func would wrap every tensor that is made; and none is born under inference mode.
    """
    torch_c: Any = torch._C
    with torch_c._DisableTorchDispatch(), torch_c._DisableFuncTorch(), no_inference_mode():
        yield


class UsedParameters:
    """Which parameters of one model are in use, and by how many. The lock of ``engine``, the `Offload` that the others
    ask for their bytes, is held while what is loaded changes.
    """

    def __init__(self, engine: Any, take_gradient: Callable[[Tensor], None]) -> None:
        self._engine, self._take_gradient = engine, take_gradient
        self._pins: dict[Slot, int] = {}
        self._seen_versions: dict[Slot, int] = {}
        self._placeholders: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self.hooks: dict[Slot, Any] = {}

    @contextmanager
    def using(self, slots: Iterable[Slot]) -> Iterator[None]:
        """Inside, the slots' groups are loaded, their parameters plain, and saved tensors packed."""
        engine, taken, groups = self._engine, list[Slot](), list[Group]()
        autocast_cache = torch.is_autocast_cache_enabled()
        try:
            parts = ((group, list(members)) for group, members in groupby(slots, attrgetter("group")))
            self.begin(parts, engine.step_control.acquire, taken, groups)
            # The cache is keyed by parameter and would hold the casts of every group until the context ends.
            torch.set_autocast_cache_enabled(False)
            with engine.packing():
                yield
        finally:
            torch.set_autocast_cache_enabled(autocast_cache)
            self.end(taken, groups)

    def begin(
        self,
        parts: Iterable[tuple[Group, list[Slot]]],
        pin: Callable[[Group], object],
        taken: list[Slot],
        groups: list[Group],
    ) -> None:
        """Use the slots of ``parts``, whose groups ``pin`` loads and pins; ``taken`` and ``groups`` get what has to be
        given to `end`, even where this raises."""
        with self._engine.lock, _unseen():
            for group, members in parts:
                pin(group)
                groups.append(group)
                self._pin(group, members, taken)

    def end(self, taken: list[Slot], groups: list[Group]) -> None:
        """The use of what `begin` took is over; what was written in place meanwhile is written back."""
        engine = self._engine
        with engine.lock, _unseen():
            written = False
            try:
                engine.write_back([slot for slot in taken if self._pins[slot] == 1 and self._was_written(slot)])
                written = True
            finally:
                for slot in taken:
                    self._pins[slot] -= 1
                    if self._pins[slot] == 0:
                        self.hide(slot)
                for group in groups:
                    engine.weights.unpin(group)
                    if not written and not engine.weights.is_pinned(group):
                        engine.weights.drop(group)  # what is read next is what is stored

    def _pin(self, group: Group, slots: list[Slot], taken: list[Slot]) -> None:
        """Each of ``slots`` is among the ``taken`` ones then."""
        for slot, view in zip(slots, group.views(self._engine.weights.buffer(group), slots), strict=True):
            param, pins = slot.param, self._pins.get(slot, 0)
            self._pins[slot] = pins + 1
            if pins == 0:
                param.__class__ = _used_class(slot.plain_class)
                _DATA_SET(param, view)
                if param.requires_grad and slot not in self.hooks:
                    self.hooks[slot] = param.register_post_accumulate_grad_hook(self._take_gradient)
                self._seen_versions[slot] = param._version
            taken.append(slot)

    def _was_written(self, slot: Slot) -> bool:
        """Whether the plain parameter, or what its ``data`` gave, was changed in place."""
        aliases = vars(slot.param).get("_vb_data", ())
        return slot.param._version != self._seen_versions[slot] or any(alias._version for alias in aliases)

    def hide(self, slot: Slot) -> None:
        shape, dtype, held = slot.shape, slot.dtype, vars(slot.param)
        held.pop("_vb_data", None)
        if (placeholder := self._placeholders.get((shape, dtype))) is None:
            filling = float("nan") if dtype.is_floating_point else 0
            single = torch.full((), filling, dtype=dtype, device=self._engine.device)
            placeholder = self._placeholders[shape, dtype] = single.expand(shape)
        _DATA_SET(slot.param, placeholder)
        slot.param.__class__ = OffloadedParameter
        held.update(_vb_binding=self._engine, _vb_slot=slot)


# -- what p.grad is ----------------------------------------------------------------------------------------------------


class OffloadedGradient(Tensor):
    """What ``p.grad`` is once a gradient has left level 0: shape, type and device, without values. What torch's
    ``clip_grad_norm_`` and ``zero_grad`` do to it happens in host memory, in the arithmetic of
    `vblackwell.clip_grad_norm_`. Anything else is refused: torch's own optimizers and scalers must not pass it by.
    """

    _vb_engine: Any
    _vb_slot: Slot

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, OffloadedGradient):
            said = {name: value for name, value in kwargs.items() if value is not None and value is not False}
            engine, slot, rest = first._vb_engine, first._vb_slot, (*args[1:], *said.values())
            if slot.param.__dict__.get("_vb_binding") is not engine or not engine.gradients.has(slot):
                raise Unsupported(
                    f"the gradient of {slot.name!r} was cleared, or its model released, since it was read: read p.grad "
                    "again after a backward"
                )
            if func in _ITSELF or (func is _T.requires_grad_ and rest == (False,)):
                return first
            with engine.lock:
                control = engine.step_control
                if func in _NORMS and len(rest) <= 1 and said.keys() <= {"p", "ord"} and (*rest, 2)[0] in _TWO:
                    return control.gradient_norm(slot)
                if func in (_T.mul_, _T.__imul__) and len(rest) == 1 and _is_scalar(rest[0]):
                    control.scale_gradients([slot], torch.as_tensor(rest[0]))
                    return first
                if func is _T.zero_ and not rest:
                    control.clear_gradients([slot], to_zero=True)
                    return first
                if func is _T.cpu and not rest:
                    return control.read_gradient(slot)
        known = [item._vb_slot.name for item in _flatten((args, kwargs)) if isinstance(item, OffloadedGradient)]
        raise Unsupported(
            f"{getattr(func, '__name__', func)} on the gradient of "
            f"{repr(known[0]) if known else 'an offloaded parameter'}, which has left level 0 for "
            "the optimizer: what is possible there is its global 2-norm (clip_grad_norm_ without norm_type and "
            "foreach), mul_ by a number, zero_, and cpu() for a copy of its values; to train use VGPUAdamW (its "
            "max_grad_norm, grad_norm and loss_scale), or release(model) first"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OffloadedGradient(of {self._vb_slot.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (type(value) is Tensor and value.dim() == 0)


def _read_gradient(param: OffloadedParameter) -> Tensor | None:
    """What ``p.grad`` is while offloaded: None only where there is no gradient, for None is what callers pass by."""
    if not param._vb_binding.gradients.has(param._vb_slot):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        view = Tensor._make_subclass(OffloadedGradient, param.data)
    view._vb_engine, view._vb_slot = param._vb_binding, param._vb_slot
    return view


def _write_gradient(param: OffloadedParameter, value: Any) -> None:
    if isinstance(value, OffloadedGradient) and value._vb_slot is param._vb_slot:
        return  # what `p.grad *= x` ends with
    if value is not None:
        raise Unsupported(
            f"setting the gradient of the offloaded parameter {param._vb_slot.name!r}: only None (to clear it) is "
            "possible"
        )
    with param._vb_binding.lock:
        param._vb_binding.step_control.clear_gradients([param._vb_slot])


_INSTEAD = {_T.grad.__get__: _read_gradient, _T.grad.__set__: _write_gradient, _DATA_SET: _write_data}


# -- transforms of torch.func ------------------------------------------------------------------------------------------


@cache
def refuse_wrapping() -> None:
    """From now on, transforms of functions of offloaded parameters themselves raise `Unsupported`: they wrap inputs in
    C++, past ``__torch_function__``, and would compute with the placeholder's NaN. torch imports these by name; torch
    2.11 to 2.13 have all three.
    """

    def check(wrap: Callable[..., Any], tensor: Any, *args: Any) -> Any:
        if type(tensor) is OffloadedParameter:
            raise Unsupported(
                f"torch.func cannot transform a function of the offloaded parameter {tensor._vb_slot.name!r} itself: "
                "release(model) first, or transform a function of the inputs alone"
            )
        return wrap(tensor, *args)

    grad = eager_transforms
    for module, name in ((grad, "_wrap_for_grad"), (grad, "_wrap_functional_tensor"), (vmap, "_add_batch_dim")):
        if (wrap := getattr(module, name, None)) is not None:
            setattr(module, name, partial(check, wrap))


@contextmanager
def computing_with_views(module: nn.Module, slots: Collection[Slot]) -> Iterator[None]:
    """Inside, the parameters of ``slots``, which are in use, are views of themselves in ``module``: a transform allows
    no `saved_tensors_hooks` and saves by reference, and a view keeps the loaded bytes, not the parameter.
    """
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    wanted = set(slots)
    try:
        for inner in module.modules():
            params: dict[str, Any] = inner._parameters
            for name, param in params.items():
                if param is not None and (found := engine_and_slot(param)) is not None and found[1] in wanted:
                    replaced.append((params, name, param))
                    params[name] = param.view_as(param)
        yield
    finally:
        for params, name, param in replaced:
            params[name] = param
