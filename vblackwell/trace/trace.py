"""Which bytes a training step allocates, and when: the real module, loss and optimizer, run without bytes.

Every operator's outputs are seen below autograd, so checkpointing, tied weights, frozen weights and views cost what
they cost. Two steps, because optimizers allocate states in the first and autograd keeps gradients of the first alive
into the second. What no output shows is added by `vblackwell.trace.workspace`.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from vblackwell.errors import ConfigurationError, Unsupported, VBError
from vblackwell.machine.gpus import NUM_SMS
from vblackwell.trace.causal_lm import plain_batches
from vblackwell.trace.cuda_on_meta import META, CudaOnMeta, cuda_on_meta
from vblackwell.trace.layers import Layers, Recording, equal_layers, few_of, lengthened
from vblackwell.trace.recorder import Recorder
from vblackwell.trace.work import Work

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits_and_loss", "workspace")

Loss = Callable[[nn.Module, Any], Tensor]
MakeBatch = Callable[[], Any]


class Untraceable(Unsupported):
    """A model, loss or optimizer that cannot run without bytes, e.g. one that branches on a tensor's values."""


@dataclass(frozen=True)
class Trace:
    """Storages in the order of their birth, and the order of births and deaths.

    Attributes:
        sizes: bytes of each storage, as asked for (before any rounding); categories: of each, of `CATEGORIES`.
        events: ``i`` where storage i is allocated, ``~i`` where it is freed.
        marks: (event, step, phase) where 'setup', 'forward', 'loss', 'loss_backward', 'backward' or 'optimizer' begins.
        num_parameters: elements of all parameters, tied ones once; trainable: those with gradients.
        work: what the operators of the last step ask of a GPU.
    """

    sizes: tuple[int, ...]
    categories: tuple[str, ...]
    events: tuple[int, ...]
    marks: tuple[tuple[int, int, str], ...]
    num_parameters: int
    trainable: int
    work: tuple[Work, ...] = ()

    def total(self, category: str) -> int:
        """Bytes of all storages of ``category``, whether or not they lived at the same time."""
        return sum(size for size, of in zip(self.sizes, self.categories, strict=True) if of == category)

    def peak(self, sizes: Sequence[int]) -> int:
        """Most bytes alive at one time, were the storages of these ``sizes``."""
        changes = (sizes[event] if event >= 0 else -sizes[~event] for event in self.events)
        return max(accumulate(changes, initial=0))

    def born_in(self, phase: str) -> set[int]:
        """Numbers of the storages that are allocated in ``phase`` of any step."""
        ends = [index for index, _, _ in self.marks[1:]] + [len(self.events)]
        return {
            event
            for (start, _, of), end in zip(self.marks, ends, strict=True)
            if of == phase
            for event in self.events[start:end]
            if event >= 0
        }

    def without(self, storages: Iterable[int]) -> "Trace":
        """The trace without these storages, and without phases and work, which it would no longer say."""
        gone = {event for index in storages for event in (index, ~index)}
        return replace(self, events=tuple(each for each in self.events if each not in gone), marks=(), work=())


def peak_with_gradients(trace: Trace, widened: float, held: bool = False) -> int:
    """Most bytes of activations, logits, workspace and gradients, ``widened`` times as wide as they were traced, at one
    time. ``held``: earlier micro-batches' gradients are there all the time."""
    steps = 1 + max((step for _, step, _ in trace.marks), default=0)
    width = {"weights": 0, "optimizer": 0, "gradients": 0 if held else widened}
    sizes = [int(size * width.get(of, 1)) for size, of in zip(trace.sizes, trace.categories, strict=True)]
    return (int(trace.total("gradients") * widened / steps) if held else 0) + trace.peak(sizes)


def on_meta(model: nn.Module) -> nn.Module:
    """``model`` if all of it is on meta, else a copy there, without bytes. Raises Untraceable where it refuses."""
    parameters, buffers = list(model.parameters()), list(model.buffers())
    if all(tensor.is_meta for tensor in (*parameters, *buffers)):
        return model
    memo: dict[int, Any] = {id(each): torch.empty_like(each, device=META) for each in (*parameters, *buffers)}
    memo |= {id(each): nn.Parameter(memo[id(each)], each.requires_grad) for each in parameters}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # a module's own __deepcopy__ may raise anything
        said = f"{type(model).__name__} cannot be copied ({brief(error)}): build it on device='meta'"
        raise Untraceable(said) from error


def refuse_frozen(model: nn.Module) -> None:
    """Raises ConfigurationError, with what to do, where no parameter has ``requires_grad``."""
    parameters = list(model.parameters())
    if not any(param.requires_grad for param in parameters):
        frozen = f"all of its {len(parameters)} parameters are frozen (requires_grad is False)"
        wrong = f"{type(model).__name__} has nothing to train: {frozen if parameters else 'it has no parameters'}"
        remedy = "requires_grad_(True) on what is to learn, or train adapters (vb train --model FOLDER --lora 16)"
        raise ConfigurationError(f"{wrong}; call {remedy}")


def trace_training(
    model: nn.Module,
    make_batch: MakeBatch,
    loss: Loss,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    *,
    autocast: torch.dtype | None = None,
    capability: tuple[int, int] = (8, 0),
    num_sms: int = NUM_SMS,
    steps: int = 2,
) -> Trace:
    """Run ``steps`` training steps of ``model`` without bytes, and say what they allocate on the GPU.

    Args:
        model: any module, wherever it is; it is not changed.
        make_batch: called once a step; what it makes on device 'cuda' counts. loss: (model, batch) to a scalar.
        make_optimizer: parameters to an optimizer; None: forward and backward only.
        autocast: dtype of an autocast region around the loss.
        capability, num_sms: of the GPU: decide cuBLAS's workspace, and how sums are divided.

    Raises Untraceable where something needs a tensor's values or an operator has no shape rule, in torch's words, and
    ConfigurationError where nothing of the model is to be trained.
    """
    model = on_meta(model)
    given: Any = make_batch, loss, make_optimizer, autocast, capability, num_sms, steps
    layers = equal_layers(model)
    found = None if layers is None else _lengthened(model, layers, lambda: _record(model, layers, *given))
    found = found or _record(model, None, *given)
    parameters = list(model.parameters())
    counts = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    births = tuple(found.sizes), tuple(found.categories)
    return Trace(*births, tuple(found.events), tuple(found.marks), *counts, tuple(found.work))


def _lengthened(model: nn.Module, layers: Layers, record: Callable[[], Recording]) -> Recording | None:
    few, one_more = few_of(model, layers)
    if few + one_more >= len(layers):
        return None

    def recorded(count: int) -> Recording:
        with layers.only_first(count):
            return record()

    try:
        return lengthened(recorded(few), recorded(one_more), len(layers) - few)
    except Untraceable:
        return None  # all of it is traced next, and says what is wrong


def _record(
    model: nn.Module,
    layers: Layers | None,
    make_batch: MakeBatch,
    loss: Loss,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    autocast: torch.dtype | None,
    capability: tuple[int, int],
    num_sms: int,
    steps: int,
) -> Recording:
    parameters = list(model.parameters())
    recorder = Recorder(capability, num_sms, layer_of=None if layers is None else layers.numbers())
    try:
        calls = register_module_forward_pre_hook(recorder.called)
        with calls, cuda_on_meta(autocast, capability) as cuda, plain_batches():
            recorder.enter_phase("setup")
            _see_weights(recorder, [*parameters, *model.buffers()])
            optimizer = make_optimizer(parameters) if make_optimizer else None
            _drop_gradients(parameters)
            for recorder.step in range(steps):
                recorder.counts_work = recorder.step == steps - 1
                with recorder:
                    _run_step(recorder, cuda, model, parameters, make_batch, loss, optimizer)
            recorder.enter_phase("setup")
            _drop_gradients(parameters)
            del optimizer  # its states end here, where it is seen
    except VBError:
        raise
    except Exception as error:  # anything may come out of a stranger's model; all of it means the same here
        refuse_frozen(model)  # whose loss needs no gradient, unless the batch asks for one
        where = f"in phase {recorder.phase!r} of step {recorder.step + 1}"
        said = f"{type(model).__name__} cannot be traced on tensors without bytes, {where}: {brief(error)}"
        raise Untraceable(said) from error
    return _recording(recorder)


def trace_forward(model: nn.Module, make_batch: MakeBatch, loss: Loss, capability: tuple[int, int]) -> tuple[Work, ...]:
    """What one forward without gradients asks of a GPU; arguments and errors as `trace_training`. Every operator is
    issued as one, without the host's time between them: decoding replays most of it as a graph.
    """
    model, given = on_meta(model), (make_batch, loss, capability)
    layers = equal_layers(model)
    found = None if layers is None else _lengthened(model, layers, lambda: _record_forward(model, layers, *given))
    work = (found or _record_forward(model, None, *given)).work
    return tuple(replace(each, issues=1.0) for each in work if each.kind != "host")


def _record_forward(
    model: nn.Module, layers: Layers | None, make_batch: MakeBatch, loss: Loss, capability: tuple[int, int]
) -> Recording:
    recorder = Recorder(capability, counts_work=True, layer_of=None if layers is None else layers.numbers())
    recorder.enter_phase("setup")
    _see_weights(recorder, [*model.parameters(), *model.buffers()])  # so that views of them are known
    recorder.enter_phase("forward")
    try:
        with cuda_on_meta(None, capability), plain_batches(), torch.no_grad(), recorder:
            loss(model, make_batch())
    except VBError:
        raise
    except Exception as error:  # as above
        raise Untraceable(f"{type(model).__name__} cannot be traced in its forward: {brief(error)}") from error
    return _recording(recorder)


def _recording(recorder: Recorder) -> Recording:
    log = recorder.log
    categories = [recorder.category.get(i, "workspace") for i in range(len(log.sizes))]
    events, layers = tuple(log.events), tuple(log.event_layers)  # which grow with what ends later
    return Recording(
        log.sizes, categories, events, recorder.marks, recorder.work, layers, log.layers, recorder.work_layers
    )


def brief(error: Exception) -> str:
    """Its class and the beginning of its words, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _see(recorder: Recorder, tensors: Iterable[Any], category: str) -> None:
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_meta:
                recorder.see(tensor, category)


def _see_weights(recorder: Recorder, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        recorder.log.layer = (recorder.layer_of or {}).get(id(tensor))
        _see(recorder, [tensor], "weights")
    recorder.log.layer = None


def _give_to_parameters(recorder: Recorder, parameters: Iterable[nn.Parameter]) -> None:
    """Let gradients belong to the layers of their parameters: one may be made where another layer's backward began."""
    if recorder.layer_of is not None:
        with torch._C.DisableTorchFunction():
            for parameter in parameters:
                number = None if parameter.grad is None else recorder.log.number_of(parameter.grad)
                if number is not None:
                    recorder.log.owners[number] = recorder.layer_of.get(id(parameter))


def _drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    with torch._C.DisableTorchFunction():
        for parameter in parameters:
            parameter.grad = None


def _run_step(
    recorder: Recorder,
    cuda: CudaOnMeta,
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    make_batch: MakeBatch,
    loss: Loss,
    optimizer: Any,
) -> None:
    first = recorder.first
    first.clear()
    recorder.reached.clear()
    recorder.enter_phase("forward")
    batch = make_batch()
    cuda.casts = {}
    value = loss(model, batch)
    recorder.leave_layer()
    cuda.casts = None
    recorder.split_forward()
    for index in recorder.log.alive():
        if index >= first["forward"]:
            kind = "logits_and_loss" if index >= first.get("loss", index + 1) else "activations"
            recorder.category.setdefault(index, kind)
    recorder.enter_phase("loss_backward")
    value.backward()
    _see(recorder, (parameter.grad for parameter in parameters), "gradients")
    _give_to_parameters(recorder, parameters)
    for index in range(first["loss_backward"], first.get("backward", len(recorder.log.sizes))):
        recorder.category.setdefault(index, "logits_and_loss")
    del value
    recorder.enter_phase("optimizer")
    if optimizer is None:
        _drop_gradients(parameters)
        return
    # What an optimizer reads (Adafactor: a norm) scales its step, and decides no size.
    cuda.item_read = recorder.read
    optimizer.step()
    recorder.leave_layer()
    cuda.item_read = None
    _see(recorder, tree_leaves(list(optimizer.state.values())), "optimizer")
    optimizer.zero_grad(set_to_none=True)
