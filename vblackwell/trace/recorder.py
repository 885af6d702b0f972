"""What operators on tensors without bytes would allocate on a GPU, and when, as seen below autograd."""

import functools
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vblackwell.errors import InsufficientMemory
from vblackwell.machine.gpus import NUM_SMS
from vblackwell.trace.meta_answers import MetaAnswers
from vblackwell.trace.work import VIEW, Work, module_issues, work_of
from vblackwell.trace.workspace import CUBLAS, CUBLAS_BYTES, CUBLASLT_BYTES, workspace_bytes

KEPT = ("weights", "gradients", "optimizer")  # categories that a storage keeps once it has one
# References to a storage and to a tensor that only autograd's engine holds, while it calls a dispatch mode with it.
ENGINE_ALONE = (2, 4)


@functools.lru_cache(maxsize=1)
def _answers(capability: tuple[int, int], num_sms: int, default: torch.dtype) -> MetaAnswers:
    """What operators gave, kept from trace to trace; on a GPU, of which the notes are, under torch's default type."""
    return MetaAnswers()


@functools.cache
def _host_work(phase: str, issues: float) -> Work:
    return Work(phase, kind="host", issues=issues)


class Recorder(TorchDispatchMode):
    """Births, deaths, phases and work, on a GPU of that capability and so many multiprocessors; ``layer_of``: by the id
    of a weight, for `vblackwell.trace.layers`, to which layer all of that belongs."""

    def __init__(
        self,
        capability: tuple[int, int],
        num_sms: int = NUM_SMS,
        counts_work: bool = False,
        layer_of: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.capability, self.num_sms, self.counts_work, self.layer_of = capability, num_sms, counts_work, layer_of
        self.log = StorageLog()
        self.first: dict[str, int] = {}  # number of the first storage that a phase of this step may make
        self.category: dict[int, str] = {}
        self.marks: list[tuple[int, int, str]] = []
        self.work: list[Work] = []
        self.work_layers: list[int | None] = []
        self.reached: dict[nn.Module | None, tuple[int, int, int]] = {}  # events, storages, work at its first call
        self.head: nn.Module | None = None
        self.step = 0
        self.phase = "setup"
        self.answers = _answers(capability, num_sms, torch.get_default_dtype())
        self._cublas: set[str] = set()
        self._thread = threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answers torch's question for its compiler, which nothing here starts: an eighth of a trace's time."""
        return False

    def enter_phase(self, phase: str) -> None:
        self.phase = phase
        self.first[phase] = len(self.log.sizes)
        self.marks.append((len(self.log.events), self.step, phase))
        if phase != "backward":  # which goes on in the layer in which the loss's ended
            self.leave_layer()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            answers, log = self.answers, self.log
            calls = answers.of(func)
            out = answers.call(calls, args, kwargs or {})
            known, name = answers.known, calls.name
            in_lists = self.layer_of is not None and self._enter_layer(args)
            if known is not None and known.is_view and log.knows(out):
                self._note_issues(VIEW)
                return out
            leaves = (out,) if type(out) is Tensor else tree_leaves(out)
            found = [each for each in leaves if isinstance(each, Tensor) and each.is_meta]
            workspace, after_outputs = 0, ()
            if found:
                noted = None if known is None else known.notes.get("workspace")
                if noted is None:
                    noted = workspace_bytes(name, args, found, self.capability, self.num_sms)
                    if known is not None:
                        known.notes["workspace"] = noted
                workspace, after_outputs = noted
            taken = self._birth(workspace) if workspace else None
            gives_known = bool(found) and name[-1] != "_" and all(map(log.knows, found))
            if gives_known:
                self._note_issues(VIEW)
                if known is not None and not (workspace or after_outputs or name in CUBLAS) and type(out) is Tensor:
                    known.is_view = True
            elif self.counts_work:
                self._note_work(func, args, kwargs, out)
            if name == "add" and func.__name__ == "add.Tensor" and (old := summed_in_place(args)) is not None:
                log.hand_over(old, found[0])
            for number, tensor in enumerate(found[::-1] if name == "native_dropout" else found):  # its mask first
                if in_lists:
                    log.layer = self._owner(args[0][number]) if len(args[0]) == len(found) else None
                log.see(tensor)
                if number < len(after_outputs) and after_outputs[number]:
                    log.free(self._birth(after_outputs[number]))
            if found and name in CUBLAS:
                # What cuBLAS keeps from the first product on: one handle a thread; autograd's backward is another.
                thread = "backward" if "backward" in self.phase else "forward"
                if thread not in self._cublas:
                    self._cublas.add(thread)
                    self._birth(CUBLAS_BYTES[self.capability[0] >= 9])
                if func.__name__ == "addmm.default" and thread == "forward" and "lt" not in self._cublas:
                    self._cublas.add("lt")
                    self._birth(CUBLASLT_BYTES)
            if taken is not None:  # a kernel holds it at the same time as its outputs
                log.free(taken)
            if in_lists:
                log.layer = None
            return out

    def leave_layer(self) -> None:
        """No operator of a layer runs: what dies is given to the layer that it belongs to."""
        self.log.layer, self.log.by_owner = None, True

    def _enter_layer(self, args: tuple[Any, ...]) -> bool:
        """The layer of an operator, by what it reads; whether it is one on an optimizer's lists, which is of all."""
        log, in_step, falls = self.log, self.phase in ("setup", "optimizer"), "backward" in self.phase
        if in_step and args and isinstance(args[0], (list, tuple)) and isinstance(next(iter(args[0]), None), Tensor):
            self.leave_layer()
            return True
        layer = None if in_step else log.layer  # an optimizer's loop goes through all layers again and again
        alive, owners = log.numbers, log.owners
        for each in args:
            for tensor in each if isinstance(each, (list, tuple)) else (each,):
                if isinstance(tensor, Tensor) and (number := alive.get(tensor.untyped_storage()._cdata)) is not None:
                    owner = owners[number]
                    if owner is not None and (layer is None or (owner < layer if falls else owner > layer)):
                        layer = owner
        if layer is not None:
            log.layer, log.by_owner = layer, False
        return False

    def _owner(self, tensor: Tensor) -> int | None:
        number = self.log.number_of(tensor)
        return None if number is None else self.log.owners[number]

    def _note_work(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """The same call is the same work: it follows from sizes, but for tensors that repeat parts of a storage."""
        notes = None if self.answers.known is None else self.answers.known.notes
        work = None if notes is None else notes.get(self.phase)
        if work is None:
            work = work_of(self.phase, func, args, kwargs, out, self.capability >= (8, 0), self.num_sms)
            if notes is not None and not any(map(_repeats, tree_leaves((args, kwargs, out)))):
                notes[self.phase] = work
        self._add_work(work)

    def _add_work(self, work: Work) -> None:
        self.work.append(work)
        self.work_layers.append(self.log.layer)

    def _note_issues(self, issues: float) -> None:
        """Work of the host alone."""
        if self.counts_work:
            self._add_work(_host_work(self.phase, issues))

    def called(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        self._note_issues(module_issues(type(module)))
        if self.phase != "forward" or not any(each is not None for each in module._parameters.values()):
            return
        self.head = module
        if module not in self.reached:
            self.reached[module] = len(self.log.events), len(self.log.sizes), len(self.work)
            values = [each for x in tree_leaves(inputs) for each in (x, *getattr(x, "__dict__", {}).values())]
            for tensor in islice((each for each in values if isinstance(each, Tensor) and each.requires_grad), 1):
                tensor.register_hook(partial(self._passed, module))

    called.ignores_output = True  # type: ignore[attr-defined] - layers are what they are without it

    def _passed(self, module: nn.Module, gradient: Tensor) -> None:
        if module is self.head and self.phase == "loss_backward":
            self.enter_phase("backward")

    def split_forward(self) -> None:
        """From its head on, the last module with weights that it calls, the forward made logits and loss."""
        if self.head in self.reached:
            event, self.first["loss"], done = self.reached[self.head]
            self.marks.append((event, self.step, "loss"))
            self.work[done:] = [replace(each, phase="loss") for each in self.work[done:]]

    def read(self) -> None:
        """Note that the host asks for a number that the GPU makes."""
        if self.counts_work:
            self._add_work(Work(self.phase, kind="read", issues=1.0))

    def see(self, tensor: Tensor, category: str | None = None) -> None:
        """Note the storage of ``tensor``, if it is new, and what it is for, if that is known."""
        index = self.log.see(tensor)
        if category and self.category.get(index) not in KEPT:
            self.category[index] = category

    def _birth(self, num_bytes: int) -> int:
        index = self.log.add(num_bytes)
        self.category[index] = "workspace"
        return index


def summed_in_place(args: Any) -> Tensor | None:
    """The gradient to which autograd's engine adds another in place on CUDA, where a value was used more than once.

    The engine does so if nobody else holds it; under a dispatch mode, or on meta, it makes a third tensor instead
    (`InputBuffer::accumulate`, `can_accumulate_inplace`): seen from here, an addition that no Python code asked for.
    """
    frame, depth = sys._getframe(2), 0
    while frame is not None and frame.f_code.co_name in ("_fn", "inner") and depth < 4:
        frame, depth = frame.f_back, depth + 1
    if frame is None or frame.f_code.co_name != "_engine_run_backward":
        return None
    if len(args) != 2 or args[0].shape != args[1].shape:
        return None
    old = args[0]  # of C++'s sum `old_var + var`
    held = torch._C._storage_Use_Count(old.untyped_storage()._cdata), old._use_count()
    dense = old.untyped_storage().nbytes() == old.numel() * old.element_size()
    return old if held <= ENGINE_ALONE and dense and not old._is_view() else None


def _repeats(value: Any) -> bool:
    """Whether ``value`` is a tensor with more elements than its part of a storage."""
    if not isinstance(value, Tensor) or not value.numel():
        return False
    return value.numel() > 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))


class StorageLog:
    """Storages in the order of their birth: bytes of each, and events, ``i`` where storage i is allocated, ``~i`` where
    it is freed: with the first tensor on it, and when the last reference to it goes. No tensor is kept alive.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.events: list[int] = []
        self.live_bytes = 0
        self.layer: int | None = None  # of the model, in which all of this happens
        self.by_owner = False  # what dies, dies in the layer that it belongs to
        self.event_layers: list[int | None] = []
        self.layers: list[int | None] = []  # of each storage, when it was born
        self.owners: list[int | None] = []  # the same, and of a gradient its parameter's
        self.numbers: dict[int, int] = {}  # of what is alive, by address
        self._watched: dict[int, Any] = {}  # weak references, by number

    def add(self, num_bytes: int) -> int:
        """A block of ``num_bytes`` that has no storage; its number."""
        index = len(self.sizes)
        self.sizes.append(num_bytes)
        self.events.append(index)
        for layers in (self.event_layers, self.layers, self.owners):
            layers.append(self.layer)
        self.live_bytes += num_bytes
        return index

    def free(self, index: int) -> None:
        self.events.append(~index)
        self.event_layers.append(self.owners[index] if self.by_owner else self.layer)
        self.live_bytes -= self.sizes[index]

    def see(self, tensor: Tensor) -> int:
        """The number of the storage of ``tensor``, which is noted if it is new."""
        storage = tensor.untyped_storage()
        known = self.numbers.get(storage._cdata)
        if known is not None:
            return known
        index = self.add(storage.nbytes())
        self._watch(storage, index)
        return index

    def hand_over(self, old: Tensor, new: Tensor) -> None:
        """Let ``new`` have the memory of ``old``, which nobody reads any more."""
        known = self.numbers.pop(old.untyped_storage()._cdata, None)
        if known is not None:
            self._watch(new.untyped_storage(), known)

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of the storage of ``tensor``, if it was seen."""
        return self.numbers.get(tensor.untyped_storage()._cdata)

    def knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.numbers

    def alive(self) -> set[int]:
        """Numbers of the storages that were seen and are still there."""
        return set(self.numbers.values())

    def forget_past(self) -> None:
        """Start again with what is alive now."""
        alive = [storage for number in self.numbers.values() if (storage := self._watched[number]()) is not None]
        for each in (self.numbers, self._watched, self.sizes, self.events, self.event_layers, self.layers, self.owners):
            each.clear()
        self.live_bytes = 0
        for storage in alive:
            self._watch(storage, self.add(storage.nbytes()))

    def _watch(self, storage: torch.UntypedStorage, index: int) -> None:
        address = storage._cdata
        self.numbers[address] = index
        self._watched[index] = weakref.ref(storage, lambda _: self._died(address, index))

    def _died(self, address: int, index: int) -> None:
        if self.numbers.get(address) == index:
            del self.numbers[address], self._watched[index]
            self.free(index)


class StoragesWithBytes(TorchDispatchMode):
    """Logs what operators make; raises InsufficientMemory with ``refusal`` where more than ``max_bytes`` live."""

    def __init__(self, max_bytes: int, refusal: str) -> None:
        super().__init__()
        self.log = StorageLog()
        self.max_bytes, self.refusal = max_bytes, refusal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.device.type != "meta":
                self.log.see(each)
        if self.log.live_bytes > self.max_bytes:
            needed = {"needed_bytes": self.log.live_bytes, "available_bytes": self.max_bytes}
            raise InsufficientMemory(self.refusal, **needed)
        return out
