"""Triton kernels launched again by what was compiled for them: to find out which from the arguments costs Triton 14 us
of the host with as many numbers as attention's kernels take, as much as the rest of a launch.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vblackwell.kernels.runtime.launch import outside_capture
from vblackwell.kernels.runtime.registry import comparison_with, on_device

_compiled: dict[tuple[Any, ...], Any] = {}
_launches: dict[tuple[Any, ...], "Launch"] = {}
MAX_KEYS = 4096  # lengths may be others in every call


def know_triton() -> None:
    """Compute in the background what names all that Triton compiles, a hash of Triton itself: 0.3 s, which a process's
    first launch would wait."""
    try:
        from triton.runtime import cache
    except ImportError:
        return
    compute = getattr(cache, "triton_key", None)
    if compute is not None:
        threading.Thread(target=_quietly, args=(compute,), daemon=True).start()


def _quietly(compute: Callable[[], object]) -> None:
    with suppress(Exception):  # which the first launch raises again
        compute()


class Launch(NamedTuple):
    """What launches alike have in common; none of their tensors."""

    plan: Any
    described: tuple[Any, ...]  # descriptors of tiles; None: of tensors that are given by address
    grid: tuple[int, int, int]
    strides: tuple[Any, ...]
    numbers: Any
    form: Any
    compiled: Any = None


def kept(name: str, key: tuple[Any, ...]) -> Launch | None:
    """What `keep` was given for the kernel ``name`` and ``key``, which holds what `queue` says."""
    return _launches.get((name, key))


def keep(name: str, key: tuple[Any, ...], launch: Launch, compiled: Any) -> None:
    """Have `kept` find ``launch``, for which ``compiled`` was; nothing was by the interpreter, and nothing is kept."""
    if compiled is not None:
        if len(_launches) >= MAX_KEYS:
            _launches.clear()
        _launches[name, key] = launch._replace(compiled=compiled)


class Last(NamedTuple):
    """The tensors that launches were given last, and what was kept for them: to compare takes a fifth of a key."""

    alike: Callable[..., bool]
    offsets: list[int]  # of their addresses from multiples of 16 bytes
    launches: tuple[Launch, ...]


_last: dict[tuple[Any, ...], Last] = {}


def recall(what: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Launch, ...] | None:
    """What `remember` was given for ``what``, if that was the last time, of tensors alike."""
    last = _last.get(what)
    if last is None or not last.alike(*tensors) or last.offsets != [x.data_ptr() % 16 for x in tensors]:
        return None
    return last.launches


def remember(what: tuple[Any, ...], tensors: list[Tensor], launches: Sequence[Launch | None]) -> None:
    """Have `recall` find what is `kept` for launches with ``tensors`` and ``what`` else decides, if all of it is."""
    alike, found = comparison_with(tensors), tuple([launch for launch in launches if launch is not None])
    if alike is None or len(found) < len(launches):
        return
    if len(_last) >= MAX_KEYS:
        _last.clear()
    _last[what] = Last(alike, [x.data_ptr() % 16 for x in tensors], found)


def describe(kind: Any, x: Tensor, strides: Sequence[int], block: list[int], *layout: Any) -> Any:
    """A descriptor, of class ``kind``, of tiles of tensors such as ``x``, for `described`."""
    made = kind(x, list(x.shape), list(strides), block, *layout)
    made.base = None
    return made


def described(descriptor: Any, x: Tensor) -> Any:
    """``descriptor`` of ``x``, without the checks, which the tensor that it was made of has passed."""
    made = object.__new__(type(descriptor))  # as copy.copy does it, in a fifth of its time
    made.__dict__ = {**descriptor.__dict__, "base": x}
    return made


def layout(x: Tensor | None) -> tuple[Any, ...] | None:
    """What Triton compiles anew for, of a tensor: its type, and whether its address is a multiple of 16 bytes."""
    return None if x is None else (x.dtype, x.stride(), x.data_ptr() % 16)


def queue(kernel: Any, key: tuple[Any, ...], grid: tuple[int, int, int], arguments: Any, **options: Any) -> Any:
    """Launch ``kernel`` on the current stream with ``arguments``, which are all of its parameters. Returns what was
    compiled, for callers that find it again by themselves; None from the interpreter.

    ``key`` holds the GPU and all that Triton compiles anew for: every number and constant (or what they follow from),
    the `layout` of every tensor, and ``options``, as num_warps, where these are not always the same.
    """
    if (compiled := _compiled.get((kernel, key))) is not None:
        compiled[grid](*arguments)
        return compiled
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    # To load it, which nobody may have done before: a call may choose another backend in a graph than outside.
    with outside_capture(torch.device("cuda"), "loading a Triton kernel") if capturing else nullcontext():
        compiled = kernel[grid](*arguments, **options)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_compiled) >= MAX_KEYS:
            _compiled.clear()
        _compiled[kernel, key] = compiled
    return compiled


def launch(
    kernel: Any, grid: tuple[int, int, int], tensors: Sequence[Tensor | None], numbers: tuple[Any, ...], warps: int
) -> None:
    """`queue` of a kernel whose parameters are ``tensors``, not None the first, and then ``numbers`` and constants, on
    the GPU of that tensor."""
    first = tensors[0]
    assert first is not None
    with on_device(first):
        key = (first.device, warps, numbers, *map(layout, tensors))
        queue(kernel, key, grid, (*tensors, *numbers), num_warps=warps)
