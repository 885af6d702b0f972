"""Which bytes a training step allocates, and when: the real module, loss and optimizer, run for two steps on tensors without bytes.

Every operator's outputs are seen below autograd; a storage begins with the first tensor on it and ends when the last reference to it goes,
whoever held it: the model, autograd's saved tensors, the optimizer. So checkpointing, tied weights, frozen weights and views cost
what they cost. Two steps, because optimizers allocate states in the first and autograd keeps gradients of the first alive into the second.

What no operator's output shows, memory that a CUDA kernel takes and gives back inside one call, is added by `vblackwell.trace.workspace`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vblackwell.errors import Unsupported, VBError
from vblackwell.trace.cuda_on_meta import META, cuda_on_meta
from vblackwell.trace.flex_on_meta import forget_tuning
from vblackwell.trace.head import last_module_with_weights
from vblackwell.trace.meta_answers import Answering
from vblackwell.trace.recorder import Recorder
from vblackwell.trace.tiles import NUM_SMS
from vblackwell.trace.trainable import refuse_frozen
from vblackwell.trace.work import Work

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
    num_sms: int = NUM_SMS,
    steps: int = 2,
) -> Trace:
    """Run ``steps`` training steps of ``model`` without bytes, and say what they allocate on the GPU.

    Args:
        model: any module, wherever it is; it is not changed unless it is on meta, where it ends with a gradient of no bytes.
        make_batch: called once a step; what it makes on device 'cuda' counts.
        loss: (model, batch) to a scalar.
        make_optimizer: parameters to an optimizer; None: forward and backward only.
        autocast: dtype of an autocast region around the loss.
        capability: of the GPU; decides cuBLAS's workspace. num_sms: its multiprocessors.

    Raises:
        Untraceable: something needs a tensor's values, or an operator has no shape rule; the message carries torch's words.
        ConfigurationError: nothing of the model is to be trained.
    """
    model = on_meta(model)
    recorder = Recorder(capability, num_sms)
    try:
        with cuda_on_meta(autocast, capability, recorder.called) as masquerade:
            masquerade.item_read = recorder.read
            _record(recorder, masquerade, model, make_batch, loss, make_optimizer, steps)
    except VBError:
        raise
    except Exception as error:  # anything may come out of a stranger's model; all of it means the same here
        refuse_frozen(model)  # whose loss needs no gradient, unless the batch asks for one
        raise Untraceable(
            f"{type(model).__name__} cannot be traced on tensors without bytes, in phase {recorder.phase!r} of step {recorder.step + 1}: "
            f"{_brief(error)}"
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
    recorder = Recorder(capability, counts_work=True)
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
    recorder: Recorder,
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


def _see_weights(recorder: Recorder, model: nn.Module) -> None:
    recorder.enter_phase("setup")
    with torch._C.DisableTorchFunction():
        for tensor in [*model.parameters(), *model.buffers()]:
            recorder.see(tensor, "weights")


def _one_step(
    recorder: Recorder, masquerade: Any, model: nn.Module, make_batch: Any, loss: Loss, optimizer: Any
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


def _enter_loss(recorder: Recorder, inputs: Sequence[Any]) -> None:
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
