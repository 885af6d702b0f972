"""Which bytes a training step allocates, and when: the real module, loss and optimizer, run for two steps on tensors without bytes.

Every operator's outputs are seen below autograd; a storage begins with the first tensor on it and ends when the last reference to it goes,
whoever held it: the model, autograd's saved tensors, the optimizer. So checkpointing, tied weights, frozen weights and views cost
what they cost. Two steps, because optimizers allocate states in the first and autograd keeps gradients of the first alive into the second.

What no operator's output shows, memory that a CUDA kernel takes and gives back inside one call, is added by `vblackwell.plan.workspace`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vblackwell.errors import Unsupported, VBError
from vblackwell.plan.accumulation import summed_in_place
from vblackwell.plan.cuda_on_meta import META, cuda_on_meta
from vblackwell.plan.flex_on_meta import forget_tuning, is_tuning
from vblackwell.plan.head import last_module_with_weights
from vblackwell.plan.meta_answers import Answering, MetaAnswers
from vblackwell.plan.trainable import refuse_frozen
from vblackwell.plan.work import VIEW, Work, host_work, module_issues, work_of
from vblackwell.plan.workspace import (
    BEHIND_OUTPUTS,
    CUBLAS,
    CUBLAS_BYTES,
    CUBLASLT_BYTES,
    behind_each_output,
    workspace_bytes,
)

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits_and_loss", "workspace")
PHASES = ("setup", "forward", "loss", "loss_backward", "backward", "optimizer")

Loss = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Untraceable(Unsupported):
    """A model, loss or optimizer that cannot run on tensors without bytes, e.g. one that branches on a tensor's values."""


@dataclass(frozen=True)
class Trace:
    """Storages in the order of their birth, and the order of births and deaths.

    Attributes:
        sizes: bytes of each storage, as asked for (before any rounding).
        categories: of each storage, of `CATEGORIES`.
        events: ``i`` where storage i is allocated, ``~i`` where it is freed.
        marks: (index into ``events``, step, phase of `PHASES`) where a phase begins.
        num_parameters: elements of all parameters, tied ones once; trainable: those with gradients.
        work: what the operators of the last step ask of a GPU.
        optional: storages that only a first run on a machine takes: buffers of autotuners.
    """

    sizes: tuple[int, ...]
    categories: tuple[str, ...]
    events: tuple[int, ...]
    marks: tuple[tuple[int, int, str], ...]
    num_parameters: int
    trainable: int
    work: tuple[Work, ...] = ()
    optional: tuple[int, ...] = ()

    def total(self, category: str) -> int:
        """Bytes of all storages of ``category``, whether or not they lived at the same time."""
        return sum(size for size, of in zip(self.sizes, self.categories, strict=True) if of == category)

    def later_run(self) -> Trace:
        """Without what only a first run takes."""
        left_out = {event for index in self.optional for event in (index, ~index)}
        return replace(self, events=tuple(each for each in self.events if each not in left_out), marks=(), optional=())


@dataclass
class _Recorder(TorchDispatchMode):
    """Births, deaths and phases; it keeps no tensor alive."""

    capability: tuple[int, int]
    sizes: list[int] = field(default_factory=list)
    born_in: list[str] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[int, int, str]] = field(default_factory=list)
    category: dict[int, str] = field(default_factory=dict)
    work: list[Work] = field(default_factory=list)
    optional: list[int] = field(default_factory=list)
    counts_work: bool = False
    step: int = 0
    phase: str = "setup"

    def __post_init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[int, Any]] = {}
        self._cublas: set[str] = set()
        self.answers = MetaAnswers()

    def enter_phase(self, phase: str) -> None:
        self.phase = phase
        self.marks.append((len(self.events), self.step, phase))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            out = self.answers.call(func, args, kwargs or {})
            if type(out) is Tensor:
                found = [out] if out.is_meta else []
            else:
                found = [each for each in tree_leaves(out) if isinstance(each, Tensor) and each.is_meta]
            name = func.__name__
            late = name.partition(".")[0] in BEHIND_OUTPUTS
            taken = self._workspace(name, args) if found and not late else None
            if self.counts_work:
                is_view = bool(found) and not name.partition(".")[0].endswith("_") and all(map(self._knows, found))
                work = work_of(self.phase, func, args, kwargs, out, is_view, self.capability >= (8, 0))
                self.work.append(host_work(self.phase, VIEW) if work is None else work)
            if name == "add.Tensor" and (old := summed_in_place(args)) is not None:
                self._take_over(found[0], old)
            behind = behind_each_output(name, args) if found else ()
            for number, tensor in enumerate(
                found[::-1] if name == "native_dropout.default" else found
            ):  # its mask first
                self.see(tensor)
                if number < len(behind) and behind[number]:
                    self.events.append(~self._birth(behind[number], "workspace"))
            if name.partition(".")[0] in CUBLAS:
                self._cublas_workspace(name)
            taken = self._workspace(name, args) if found and late else taken
            if taken is not None:  # a kernel takes it beside its outputs
                self.events.append(~taken)
            return out

    def called(self, module: nn.Module) -> None:
        """Note a call of ``module``."""
        if self.counts_work:
            self.work.append(host_work(self.phase, module_issues(module)))

    def _knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._alive

    def _workspace(self, name: str, args: Any) -> int | None:
        num_bytes = workspace_bytes(name, args)
        return self._birth(num_bytes, "workspace") if num_bytes else None

    def _cublas_workspace(self, name: str) -> None:
        """What cuBLAS keeps from the first product on: one handle a thread, and autograd's backward has its own."""
        thread = "backward" if "backward" in self.phase else "forward"
        if thread not in self._cublas:
            self._cublas.add(thread)
            self._birth(CUBLAS_BYTES[self.capability[0] >= 9], "workspace")
        if name == "addmm.default" and thread == "forward" and "lt" not in self._cublas:
            self._cublas.add("lt")
            self._birth(CUBLASLT_BYTES, "workspace")

    def _birth(self, num_bytes: int, category: str | None) -> int:
        index = len(self.sizes)
        self.sizes.append(num_bytes)
        self.born_in.append(self.phase)
        self.events.append(index)
        if category:
            self.category[index] = category
        if is_tuning():
            self.optional.append(index)
        return index

    def see(self, tensor: Tensor, category: str | None = None) -> None:
        """Note the storage of ``tensor``, if it is new, and what it is for, if that is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            index = self._alive[key][0]
        else:
            index = self._birth(storage.nbytes(), None)
            self._alive[key] = (index, weakref.ref(storage, lambda _: self._death(key, index)))
        if category and self.category.get(index) not in ("weights", "gradients", "optimizer"):
            self.category[index] = category

    def _take_over(self, tensor: Tensor, old: Tensor) -> None:
        """Let ``tensor`` have the memory of ``old``, which nobody reads any more."""
        former, storage = old.untyped_storage()._cdata, tensor.untyped_storage()
        if former in self._alive:
            key, index = storage._cdata, self._alive.pop(former)[0]
            self._alive[key] = (index, weakref.ref(storage, lambda _: self._death(key, index)))

    def _death(self, key: int, index: int) -> None:
        if self._alive.get(key, (None,))[0] == index:
            del self._alive[key]
            self.events.append(~index)

    def alive(self) -> set[int]:
        return {index for index, _ in self._alive.values()}


def on_meta(model: nn.Module) -> nn.Module:
    """``model`` itself if all of it is on meta, else a copy there; no bytes are copied.

    Raises:
        Untraceable: the module refuses to be copied.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.is_meta for tensor in tensors):
        return model
    memo: dict[int, Any] = {}
    for tensor in tensors:
        empty = torch.empty_like(tensor, device=META)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # a module's own __deepcopy__ may raise anything
        raise Untraceable(
            f"{type(model).__name__} cannot be copied ({_brief(error)}): build it on device='meta'"
        ) from error


def trace_training(
    model: nn.Module,
    make_batch: Callable[[], Any],
    loss: Loss,
    make_optimizer: MakeOptimizer | None,
    *,
    autocast: torch.dtype | None = None,
    capability: tuple[int, int] = (8, 0),
    steps: int = 2,
) -> Trace:
    """Run ``steps`` training steps of ``model`` without bytes, and say what they allocate on the GPU.

    Args:
        model: any module, wherever it is; it is not changed unless it is on meta, where it ends with a gradient of no bytes.
        make_batch: called once a step; what it makes on device 'cuda' counts.
        loss: (model, batch) to a scalar.
        make_optimizer: parameters to an optimizer; None: forward and backward only.
        autocast: dtype of an autocast region around the loss.
        capability: of the GPU; decides cuBLAS's workspace.

    Raises:
        Untraceable: something needs a tensor's values, or an operator has no shape rule; the message carries torch's words.
        ConfigurationError: nothing of the model is to be trained.
    """
    refuse_frozen(model)
    model = on_meta(model)
    recorder = _Recorder(capability)
    try:
        with cuda_on_meta(autocast, capability, recorder.called) as masquerade:
            _record(recorder, masquerade, model, make_batch, loss, make_optimizer, steps)
    except VBError:
        raise
    except Exception as error:  # anything may come out of a stranger's model; all of it means the same here
        raise Untraceable(
            f"{type(model).__name__} cannot be traced in phase {recorder.phase!r} of step {recorder.step + 1}: {_brief(error)}; "
            "a model that reads values of its tensors has to be measured in a short run instead"
        ) from error
    parameters = list(model.parameters())
    return Trace(
        sizes=tuple(recorder.sizes),
        categories=tuple(recorder.category.get(i, "workspace") for i in range(len(recorder.sizes))),
        events=tuple(recorder.events),
        marks=tuple(recorder.marks),
        num_parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        work=tuple(recorder.work),
        optional=tuple(recorder.optional),
    )


def trace_forward(
    model: nn.Module, make_batch: Callable[[], Any], loss: Loss, capability: tuple[int, int] = (8, 0)
) -> tuple[Work, ...]:
    """What one forward without gradients asks of a GPU; arguments and errors as `trace_training`.

    Every operator is issued as one, and the host's time between them is left out: decoding replays most of it as a graph.
    """
    model = on_meta(model)
    recorder = _Recorder(capability, counts_work=True)
    _see_weights(recorder, model)  # so that views of them are known
    recorder.enter_phase("forward")
    try:
        with cuda_on_meta(None, capability), torch.no_grad(), recorder:
            loss(model, make_batch())
    except VBError:
        raise
    except Exception as error:  # as above
        raise Untraceable(f"{type(model).__name__} cannot be traced in its forward: {_brief(error)}") from error
    return tuple(replace(each, issues=1.0) for each in recorder.work if each.kind != "host")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _record(
    recorder: _Recorder,
    masquerade: Any,
    model: nn.Module,
    make_batch: Any,
    loss: Loss,
    make_optimizer: MakeOptimizer | None,
    steps: int,
) -> None:
    _see_weights(recorder, model)
    optimizer = make_optimizer(model.parameters()) if make_optimizer else None
    with Answering(recorder.answers):
        head = last_module_with_weights(model, make_batch, loss)
    handle = (
        head.register_forward_pre_hook(lambda module, inputs: _enter_loss(recorder, inputs))
        if head is not None
        else None
    )
    model.zero_grad(set_to_none=True)
    forget_tuning()
    for recorder.step in range(steps):
        recorder.counts_work = recorder.step == steps - 1
        with recorder:
            _one_step(recorder, masquerade, model, make_batch, loss, optimizer)
    recorder.enter_phase("setup")
    model.zero_grad(set_to_none=True)
    if handle is not None:
        handle.remove()


def _see_weights(recorder: _Recorder, model: nn.Module) -> None:
    recorder.enter_phase("setup")
    with torch._C.DisableTorchFunction():
        for tensor in [*model.parameters(), *model.buffers()]:
            recorder.see(tensor, "weights")


def _one_step(
    recorder: _Recorder, masquerade: Any, model: nn.Module, make_batch: Any, loss: Loss, optimizer: Any
) -> None:
    recorder.enter_phase("forward")
    batch = make_batch()
    masquerade.cache_casts = True
    value = loss(model, batch)
    masquerade.drop_casts()
    masquerade.cache_casts = False
    for index in recorder.alive():
        kind = {"forward": "activations", "loss": "logits_and_loss"}.get(recorder.born_in[index])
        if kind:
            recorder.category.setdefault(index, kind)
    recorder.enter_phase("loss_backward")
    born = len(recorder.sizes)
    value.backward()
    with torch._C.DisableTorchFunction():
        for parameter in model.parameters():
            if parameter.grad is not None:
                recorder.see(parameter.grad, "gradients")
    for index in range(born, len(recorder.sizes)):
        if recorder.born_in[index] == "loss_backward":
            recorder.category.setdefault(index, "logits_and_loss")
    del value
    recorder.enter_phase("optimizer")
    if optimizer is not None:
        masquerade.items_are_one = (
            True  # what an optimizer reads (Adafactor: a norm) scales its step, and decides no size
        )
        optimizer.step()
        masquerade.items_are_one = False
        with torch._C.DisableTorchFunction():
            for tensor in tree_leaves([state for state in optimizer.state.values()]):
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    recorder.see(tensor, "optimizer")
        optimizer.zero_grad(set_to_none=True)
    else:
        model.zero_grad(set_to_none=True)


def _enter_loss(recorder: _Recorder, inputs: Sequence[Any]) -> None:
    """Called before the head: from here on what the forward makes is logits and loss, until backward has passed the head again."""
    if recorder.phase != "forward":
        return
    recorder.enter_phase("loss")
    held = [
        vars(each).values() if hasattr(each, "__dict__") and not isinstance(each, Tensor) else [each]
        for each in tree_leaves(inputs)
    ]
    for tensor in (each for values in held for each in values):
        if isinstance(tensor, Tensor) and tensor.requires_grad:

            def past(gradient: Tensor) -> None:
                if recorder.phase == "loss_backward":
                    recorder.enter_phase("backward")

            tensor.register_hook(past)
            return
