"""Which backend runs an op, and why the others do not.

An op keeps an ordered table of backends. Each states, for a request, the reasons why it refuses, or why another is faster; the first
without a reason runs. Asking for a backend by name (``use_backend``) runs that one, fast or not,
or raises with its reasons: nothing falls back silently.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, Unsupported

NO_FORWARD_MODE = "it has no forward-mode derivative: use reverse mode (backward, torch.func.vjp)"
Run = TypeVar("Run", bound=Callable[..., Any])
_CHOSEN: ContextVar[dict[str, str]] = ContextVar("vblackwell_backends", default={})  # noqa: B039 - never mutated


@dataclass(frozen=True)
class Request:
    """What a backend may look at before it agrees: nothing here needs the device.

    Attributes:
        device: of the activations.
        capability: CUDA compute capability, (0, 0) without one.
        dtype: of the activations.
        format: layout and format of the weight, for example 'nvfp4-tiled'.
        m: rows of activations.
        n: out features.
        k: in features.
    """

    device: torch.device
    capability: tuple[int, int]
    dtype: torch.dtype
    format: str
    m: int
    n: int
    k: int


def device_reasons(request: Request) -> list[str]:
    """Why kernels compiled here cannot run where ``request`` is."""
    if request.device.type != "cuda":
        return [f"the tensors are on {request.device}: it needs a CUDA GPU"]
    if request.capability < (8, 0):
        return [f"compute capability {request.capability[0]}.{request.capability[1]} is below 8.0"]
    return []


@dataclass(frozen=True)
class Backend(Generic[Run]):
    """One way to run an op.

    Attributes:
        name: what ``use_backend`` calls it.
        reasons: maps a request to the reasons against it; empty means it runs.
        run: the implementation.
        forward_mode: torch can differentiate it forward (`torch.func.jvp`), because it is made of torch's own operators.
        slower: maps a request to the reasons why a later backend is faster; who asks for this one by name gets it all the same.
    """

    name: str
    reasons: Callable[[Request], list[str]]
    run: Run
    forward_mode: bool = False
    slower: Callable[[Request], list[str]] = lambda request: []


@functools.lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of ``device``; (0, 0) if it is no CUDA device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def request_of(x_MK: Tensor, format: str, n: int, k: int) -> Request:
    """The request that ``x_MK`` (any leading shape, last dimension K) makes."""
    m = x_MK.numel() // k if k else 0
    return Request(x_MK.device, capability(x_MK.device), x_MK.dtype, format, m, n, k)


@contextlib.contextmanager
def use_backend(op: str, name: str) -> Iterator[None]:
    """Inside, ``op`` runs on backend ``name`` or raises. For measurements, tests and people who know better."""
    token = _CHOSEN.set({**_CHOSEN.get(), op: name})
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def chosen(op: str) -> str | None:
    """The backend that `use_backend` asks for here, if any."""
    return _CHOSEN.get().get(op)


def computes_at_once() -> bool:
    """Whether tensors are numbers now: nobody traces or transforms (torch.func), who must see ops and knows the rules of those alone."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]


def differentiating_forward() -> bool:
    """Whether forward-mode differentiation is on. What no rule covers gets no tangent there, which reads as a derivative of zero."""
    return torch.autograd.forward_ad._current_level >= 0  # noqa: SLF001


def refuse_forward_mode(op: str) -> None:
    """What an op without a choice of backends says where `choose` would refuse.

    Raises:
        Unsupported: forward-mode differentiation is on.
    """
    if differentiating_forward():
        raise Unsupported(f"{op}: {NO_FORWARD_MODE}")


def explain(table: tuple[Backend[Run], ...], request: Request) -> dict[str, list[str]]:
    """Each backend's reasons against ``request``, in order of preference."""
    return {backend.name: [*_reasons(backend, request), *backend.slower(request)] for backend in table}


def _reasons(backend: Backend[Run], request: Request) -> list[str]:
    reasons = backend.reasons(request)
    if differentiating_forward() and not backend.forward_mode:
        reasons = [*reasons, NO_FORWARD_MODE]
    return reasons


def choose(op: str, table: tuple[Backend[Run], ...], request: Request) -> Backend[Run]:
    """The backend that runs ``request``.

    Raises:
        ConfigurationError: the name asked for is not a backend of this op.
        Unsupported: the backend asked for refuses, or all do; the message has every reason.
    """
    wanted = _CHOSEN.get().get(op)
    if wanted is None:
        for backend in table:
            if not _reasons(backend, request) and not backend.slower(request):
                return backend
        refusals = explain(table, request)
        raise Unsupported(f"no backend of {op} takes {request}: {_sentence(refusals)}")
    for backend in table:
        if backend.name == wanted:
            if reasons := _reasons(backend, request):
                raise Unsupported(f"backend {wanted!r} of {op} refuses: {'; '.join(reasons)}")
            return backend
    raise ConfigurationError(f"{op} has no backend {wanted!r}: choose one of {', '.join(b.name for b in table)}")


def _sentence(refusals: dict[str, list[str]]) -> str:
    return " | ".join(f"{name}: {'; '.join(reasons)}" for name, reasons in refusals.items())
