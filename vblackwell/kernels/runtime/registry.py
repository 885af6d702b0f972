"""Which backend runs an op, and why the others do not: the one registry of all kernels.

An op keeps an ordered table of backends. Each states, for a request, why it refuses, or why another is faster; the
first without a reason runs. Asking for one by name (``use_backend``) runs that one or raises with its reasons: nothing
falls back silently. Row-wise ops have two backends, whose choice `runs_triton` makes: ``triton`` on CUDA, ``torch``
everywhere else, the plain expression with autograd's own backward, so that a model on the CPU keeps its bits.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._device import DeviceContext

from vblackwell.errors import ConfigurationError, Unsupported

NO_FORWARD_MODE = "it has no forward-mode derivative: use reverse mode (backward, torch.func.vjp)"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LONGEST_ROW = 1 << 16  # fp32 values of a row are held in registers by one block: a quarter of a multiprocessor's
AnyRequest = TypeVar("AnyRequest")
Run = TypeVar("Run", bound=Callable[..., Any])
# By name here, because every call of an op asks them, and each attribute on the way costs.
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_function_mode_at = torch._C._get_function_stack_at
_jit_trace = torch._C._get_tracing_state
_profiles = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
_any_autocast, _grad_enabled = torch._C._is_any_autocast_enabled, torch.is_grad_enabled
_transform = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
_guards = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
_tensor_guards: Any = getattr(_guards, "TensorGuards", None)
_PLAIN = (Tensor, torch.nn.Parameter)
_NO_GUARD = nullcontext()  # of the device that is current: to enter one costs more than a launch
_CHOSEN: ContextVar[dict[str, str]] = ContextVar("vblackwell_backends", default={})  # noqa: B039 - never mutated


class Request(NamedTuple):
    """What the backends of a product or of a row-wise op may look at; ``device`` and ``dtype`` of the activations."""

    device: torch.device
    capability: tuple[int, int]  # CUDA's, (0, 0) without one
    dtype: torch.dtype
    format: str  # layout and format of the weight, for example 'nvfp4-tiled'; the op's name where there is none
    m: int  # rows of activations
    n: int  # out features, or elements of a row
    k: int  # in features


def accept(request: Any) -> list[str]:
    return []


@dataclass(frozen=True, eq=False)
class Backend(Generic[AnyRequest, Run]):
    """One way to run an op."""

    name: str  # what ``use_backend`` calls it
    reasons: Callable[[AnyRequest], Iterable[str]]  # against a request; empty means it runs
    run: Run
    forward_mode: bool = False  # torch can differentiate it forward (`torch.func.jvp`): it is of torch's own operators
    slower: Callable[[AnyRequest], list[str]] = accept  # why a later one is faster; asked for by name it runs

    def refusals(self, request: AnyRequest) -> list[str]:
        forward = differentiating_forward() and not self.forward_mode
        return [*self.reasons(request), *([NO_FORWARD_MODE] if forward else [])]

    def accepts(self, request: AnyRequest) -> bool:
        """Whether there is no reason against it; of a generator none but the first is made."""
        for _ in self.reasons(request):
            return False
        return self.forward_mode or not differentiating_forward()


def choose(
    op: str, table: Sequence[Backend[AnyRequest, Run]], request: AnyRequest, name: str | None = None
) -> Backend[AnyRequest, Run]:
    """The first backend of ``table`` that takes ``request``; or ``name``; or what `use_backend` says, but not under
    ``torch.compile``, which cannot read context variables while tracing.

    Raises:
        ConfigurationError: the name asked for is not a backend of this op.
        Unsupported: the backend asked for refuses, or all do, with every reason.
    """
    if name is None and not is_compiling():
        name = asked_for(op)
    if name is None:
        for backend in table:
            if backend.accepts(request) and not backend.slower(request):
                return backend
        said = " | ".join(f"{name}: {'; '.join(reasons)}" for name, reasons in explain(table, request).items())
        raise Unsupported(f"no backend of {op} takes {request}: {said}")
    for backend in table:
        if backend.name == name:
            if reasons := backend.refusals(request):
                raise Unsupported(f"backend {name!r} of {op} refuses: {'; '.join(reasons)}")
            return backend
    raise ConfigurationError(f"{op} has no backend {name!r}: choose one of {', '.join(b.name for b in table)}")


def explain(table: Sequence[Backend[AnyRequest, Run]], request: AnyRequest) -> dict[str, list[str]]:
    """Each backend's reasons against ``request``, in order of preference."""
    return {backend.name: [*backend.refusals(request), *backend.slower(request)] for backend in table}


@contextlib.contextmanager
def use_backend(op: str, name: str) -> Iterator[None]:
    """Inside, ``op`` runs on backend ``name`` or raises. For measurements and tests."""
    token = _CHOSEN.set({**_CHOSEN.get(), op: name})
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def asked_for(op: str) -> str | None:
    """The backend of ``op`` that `use_backend` names, if one does."""
    return _CHOSEN.get().get(op)


@functools.lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of ``device``; (0, 0) if it is no CUDA device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def cuda_reasons(request: Request) -> list[str]:
    return [] if request.device.type == "cuda" else [f"the tensors are on {request.device}: it needs a CUDA GPU"]


def capability_reasons(found: tuple[int, int]) -> list[str]:
    return [f"compute capability {found[0]}.{found[1]} is below 8.0"] if found < (8, 0) else []


def dtype_reasons(found: torch.dtype, accepted: Sequence[torch.dtype], what: str = "the tensors are") -> list[str]:
    if found in accepted:
        return []
    names = [str(dtype).removeprefix("torch.") for dtype in accepted]
    return [f"{what} {found}: it takes {', '.join(names[:-1])} and {names[-1]}"]


def triton_reasons(device: torch.device | str, found: tuple[int, int]) -> list[str]:
    """Why Triton's kernels cannot run on ``device`` of capability ``found``; on the CPU its interpreter may."""
    kind = device if isinstance(device, str) else device.type
    interprets = kind == "cpu" and os.environ.get("TRITON_INTERPRET", "0") == "1"  # set before triton is imported
    reasons = capability_reasons(found) if kind == "cuda" else []
    if kind != "cuda" and not interprets:
        reasons.append(f"the tensors are on {device}: it needs a CUDA GPU, or TRITON_INTERPRET=1")
    if importlib.util.find_spec("triton") is None:
        reasons.append("triton is not installed")
    return reasons


def computes_at_once() -> bool:
    """Whether nothing traces or transforms (torch.func), which must see ops and knows the rules of those alone."""
    return not (is_compiling() or _dispatch_modes() or _jit_trace() is not None or _transform() is not None)


def functions_are_seen() -> bool:
    """Whether a mode sees calls of torch's functions, other than that of a default device (torch.set_default_device),
    of which a thread has one at most: it changes what makes tensors of no others, and nothing else."""
    modes = _function_modes()
    return modes > 1 or (modes == 1 and type(_function_mode_at(0)) is not DeviceContext)


def differentiating_forward() -> bool:
    """Whether forward-mode differentiation is on: what no rule covers gets no tangent, which reads as a zero one."""
    return forward_ad._current_level >= 0  # noqa: SLF001


def runs_directly(*tensors: Tensor) -> bool:
    """Whether nothing but autograd has to do with an op on ``tensors``, nor are these other than they seem."""
    if not computes_at_once() or (_function_modes() and functions_are_seen()) or _profiles():
        return False
    if forward_ad._current_level >= 0:  # noqa: SLF001
        return False
    return all([type(x) in _PLAIN and not (x.is_neg() or x.is_meta) for x in tensors])


def comparison_with(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """What tells of as many tensors whether they are like these, for half a microsecond, as torch.compile does: of
    their classes, dispatch keys (with those that modes and transforms of the thread set), types, devices, shapes and
    strides, and whether they want gradients. One tensor twice is not like two, and nested ones must not be asked
    about: they end the process. It keeps no tensor. None where this torch has no such function, which is private.
    """
    if _tensor_guards is None:
        return None
    return _tensor_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def refuse_forward_mode(op: str) -> None:
    """Raises Unsupported in forward-mode differentiation, for an op without a choice of backends."""
    if differentiating_forward():
        raise Unsupported(f"{op}: {NO_FORWARD_MODE}")


def _row_reasons(request: Request) -> list[str]:
    reasons = triton_reasons(request.device, request.capability) + dtype_reasons(request.dtype, DTYPES)
    if request.n > LONGEST_ROW:
        reasons.append(f"rows of {request.n} elements: it takes {LONGEST_ROW}")
    return reasons


_TRITON = Backend("triton", _row_reasons, lambda: True)
_TORCH = Backend("torch", accept, lambda: False, forward_mode=True)
# By device, because on the CPU the kernels run for tests alone, one element after the other.
_ROW_TABLES = {"cuda": (_TRITON, _TORCH), "cpu": (_TORCH, _TRITON)}


def runs_triton(op: str, x: Tensor, row: int) -> bool:
    """Whether ``op`` on ``x``, which holds ``row`` elements of a row at once (0: any number), runs as a Triton kernel.
    Raises Unsupported where ``use_backend`` asked for one that refuses; it is not asked under ``torch.compile``."""
    if is_compiling():
        return x.device.type == "cuda" and x.dtype in DTYPES and row <= LONGEST_ROW
    usual = asked_for(op) is None and not differentiating_forward()
    return (_usual_row_choice if usual else _row_choice)(op, x.device, capability(x.device), x.dtype, row)


def _row_choice(op: str, device: torch.device, found: tuple[int, int], dtype: torch.dtype, row: int) -> bool:
    request = Request(device, found, dtype, op, 1, row, row)
    return choose(op, _ROW_TABLES.get(device.type, (_TORCH,)), request).run()


_usual_row_choice = functools.lru_cache(maxsize=1024)(_row_choice)  # every call of an op asks


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Inside, launches go to the GPU that holds ``x``: Triton takes the current one, whatever its arguments are on."""
    elsewhere = x.is_cuda and torch.cuda.current_device() != x.device.index
    return torch.cuda.device(x.device) if elsewhere else _NO_GUARD


# Under autocast an op's input is cast to its dtype, nothing else is, and inside there is no autocast. torch's own
# `register_autocast` casts every floating tensor, scales and biases too. Without any rule autocast would reach through
# an op into its implementation.

_LIBRARY = torch.library.Library("vblackwell", "FRAGMENT")  # registrations live as long as it does
_KEYS = (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA)
_AUTOCAST_KEYS = torch._C.DispatchKeySet(_KEYS[0]) | torch._C.DispatchKeySet(_KEYS[1])


def _under_autocast(call: Callable[..., Any], cast: bool, x: Tensor, *rest: Any) -> Any:
    if cast and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
        return call(x, *rest)


def _is_plain(kind: type) -> bool:
    """Whether torch has no rule for arguments of a class, as for DTensors, fake tensors and symbolic numbers."""
    plain = kind is Tensor or issubclass(kind, (int, float, str, torch.dtype, type(None), list))
    if not plain and issubclass(kind, Tensor):
        rules = ("__torch_function__", "__torch_dispatch__")
        plain = all(getattr(kind, rule) == getattr(torch.nn.Parameter, rule) for rule in rules)
    return plain


class _TensorPlaces(dict[tuple[type, ...], tuple[int, ...] | None]):
    """Which arguments of these classes are tensors; None where one of them is not plain."""

    def __missing__(self, kinds: tuple[type, ...]) -> tuple[int, ...] | None:
        places = tuple(place for place, kind in enumerate(kinds) if issubclass(kind, Tensor))
        return self.setdefault(kinds, places if all(map(_is_plain, kinds)) else None)


_tensor_places = _TensorPlaces().__getitem__  # a function of C


def _direct(op: Any, run: Callable[..., Any], save: Any, backward: Any, autocast: str | None) -> Callable[..., Any]:
    """A function that gives what ``op`` gives: by ``run``, with one node of ``save`` and ``backward`` for autograd,
    where nothing but autograd and autocast has to do with the call (an op costs the host 27 us, with gradients 95)."""
    overload, signature = op._opoverload, inspect.signature(run)
    types = [str(each.type) for each in overload._schema.arguments]
    lists = any("List" in each and "Tensor" in each for each in types)
    assert types[0] == "Tensor" and not lists, "autograd sees no tensors in lists"
    count = len(types)

    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        save(ctx, args, output)
        return output

    rules = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    # Of an op without a derivative the op itself, whose own error a second backward gets. `Function.apply` would ask
    # once more whether there are transforms.
    function: Any = torch.autograd.Function
    node: Any = overload if backward is None else super(function, type(run.__name__, (function,), rules)).apply

    def compute(args: tuple[Any, ...]) -> Any:
        # What is not what it seems: classes with rules, tensors without memory, or ones that torch writes out first.
        if (places := _tensor_places(tuple(map(type, args)))) is None or args[0].is_meta:
            return overload(*args)
        function = run
        for place in places:
            tensor = args[place]
            if tensor.is_neg():
                return overload(*args)
            if tensor.requires_grad and _grad_enabled():
                function = node
        if autocast is not None and _any_autocast() and torch.is_autocast_enabled(args[0].device.type):
            return _under_autocast(function, autocast == "cast", *args)
        return function(*args)

    @functools.wraps(run)
    def call(*args: Any, **named: Any) -> Any:
        if is_compiling():
            return overload(*args, **named)
        if named or len(args) != count:
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            args = bound.args
        # What others see: modes, traces, transforms, profilers.
        if _dispatch_modes() or _jit_trace() is not None or _transform() is not None:
            return overload(*args)
        if _profiles() or forward_ad._current_level >= 0:  # noqa: SLF001
            return overload(*args)
        if _function_modes():
            if functions_are_seen() or _tensor_places(tuple(map(type, args))) is None:
                return overload(*args)
            with torch._C.DisableTorchFunction():  # inside an op there is no default device either
                return compute(args)
        return compute(args)

    return call


def register_op(
    fake: Callable[..., Any],
    *,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    autocast: Literal["cast", "keep"] | None = None,
    direct: bool = False,
) -> Callable[[Callable[..., Any]], Any]:
    """Make the decorated function the op ``vblackwell::<its name>``, without underscores in front, which mutates
    nothing; without ``backward`` and ``save`` (torch.library.register_autograd) it has no derivative.

    ``autocast``: the first argument, if it is bf16, fp16 or fp32, is cast to autocast's dtype ('cast') or taken as it
    is given, as in a backward ('keep'); None: no rule. ``direct``: give back a function that calls the decorated one
    itself where nothing has to see an op; no lists of tensors, the first argument one. Else, the op.
    """

    def register(run: Callable[..., Any]) -> Any:
        name = f"vblackwell::{run.__name__.lstrip('_')}"
        op = torch.library.custom_op(name, run, mutates_args=())  # type: ignore[attr-defined]
        op.register_fake(fake)
        if backward is not None:
            op.register_autograd(backward, setup_context=save)
        if autocast is not None:
            kernel = functools.partial(_under_autocast, op._opoverload, autocast == "cast")
            for key in _KEYS:
                _LIBRARY.impl(op._name, kernel, key.name)
        return _direct(op, run, save, backward, autocast) if direct else op

    return register


def empty_of(x: Tensor) -> Tensor:
    """An empty tensor in the strides of ``x``, but for adjacent elements in the last dimension."""
    return torch.empty_like(x) if x.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
