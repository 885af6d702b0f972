"""Activation checkpointing that leaves no trace: a block is computed again in backward exactly as the first time.

``torch.utils.checkpoint`` (non-reentrant) restores the random generators but not buffers, so a BatchNorm under it
counts every batch twice. Here the second pass runs on copies of the buffers as they were before the first; the module's
own are swapped out, not written back: that would invalidate what autograd saved.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

InputHooks = Callable[[], AbstractContextManager[Any]]

_FUNCTION = "_gradient_checkpointing_func"  # where transformers' modules hold what checkpoints them
# The hooks of this thread that get what is saved for backward, or None.
top_hooks: Callable[[bool], Any] = getattr(torch._C, "_autograd")._top_saved_tensors_default_hooks  # noqa: B009
_input_hooks: ContextVar[InputHooks] = ContextVar("input_hooks", default=nullcontext)


def checkpoint(function: Callable[..., Any], *args: Any, modules: tuple[nn.Module, ...] | None = None) -> Any:
    """``function(*args)``, keeping only ``args`` for backward, where the rest is computed again.

    ``modules`` are those whose buffers it may write; by default ``function`` itself if it is a module.
    """
    if modules is None:
        modules = (function,) if isinstance(function, nn.Module) else ()
    contexts = nullcontext(), _BuffersReplaced(modules)
    with _input_hooks.get()():
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=lambda: contexts)


@contextmanager
def inputs_saved_under(hooks: InputHooks, model: nn.Module | None = None) -> Iterator[None]:
    """Inside, every `checkpoint` of this thread saves its inputs under ``hooks()``, a new context for each.

    So do modules of ``model`` that checkpoint as transformers' do, but not those that call ``torch.utils.checkpoint``.
    """
    modules = () if model is None else model.modules()
    own = {module: module.__dict__[_FUNCTION] for module in modules if _FUNCTION in module.__dict__}
    outer = _input_hooks.get()
    _input_hooks.set(hooks)

    def under(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with hooks():
            return function(*args, **kwargs)

    try:
        for module, function in own.items():
            module.__dict__[_FUNCTION] = partial(under, function)
        yield
    finally:
        for module, function in own.items():
            module.__dict__[_FUNCTION] = function
        _input_hooks.set(outer)


def saving_an_input() -> AbstractContextManager[Any]:
    """What `inputs_saved_under` says, for a layer that keeps its input itself in place of a `checkpoint`."""
    return _input_hooks.get()()


@contextmanager
def second_pass_under(context: Callable[[], AbstractContextManager[Any]], module: nn.Module) -> Iterator[None]:
    """Inside, a checkpoint that ``module``, one of transformers', makes of its forward alone runs the second pass under
    ``context()``: since 5.23 the module's hooks run in the first pass only.
    """
    own: Any = vars(module).get(_FUNCTION)
    own = getattr(own, "_vb_own", own)  # another thread is inside: whoever leaves puts back what was there at first

    def again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if torch._C._current_graph_task_id() == -1 else context():
            return function(*args, **kwargs)

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls_hooks = hasattr(getattr(function, "func", function), "__self__")  # the module's own __call__, as before
        return own(function if calls_hooks else partial(again, function), *args, **kwargs)

    run._vb_own = own  # type: ignore[attr-defined]
    if own is not None:
        vars(module)[_FUNCTION] = run
    try:
        yield
    finally:
        if own is not None:
            vars(module)[_FUNCTION] = own


class _BuffersReplaced:
    """Inside, fresh copies of the buffers as they were when this was made are in their places; entered by every
    backward of a kept graph. Places that share a buffer share a copy."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self._current: dict[tuple[nn.Module, str], Tensor | None] = {}
        self._before: dict[tuple[nn.Module, str], Tensor] = {}
        copies: dict[int, Tensor] = {}
        for root in modules:
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        self._before[module, name] = copies.setdefault(id(buffer), buffer.detach().clone())

    def __enter__(self) -> None:
        fresh: dict[int, Tensor] = {}
        self._current = {(module, name): module._buffers[name] for module, name in self._before}
        for (module, name), copy in self._before.items():
            module._buffers[name] = fresh.setdefault(id(copy), copy.clone())

    def __exit__(self, *error: object) -> None:
        for (module, name), buffer in self._current.items():
            module._buffers[name] = buffer
        self._current.clear()
