"""What operators on tensors without bytes would allocate on a GPU, and when: births and deaths of storages, seen below autograd.

A storage begins with the first tensor on it and ends when the last reference to it goes, whoever held it. Workspaces, which no output
shows, are added by `vblackwell.trace.workspace`, and what the operators ask of a GPU is noted by `vblackwell.trace.work`. What follows from
an operator and its arguments' shapes is computed once for all calls that have the same.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vblackwell.trace.accumulation import summed_in_place
from vblackwell.trace.flex_on_meta import is_tuning
from vblackwell.trace.meta_answers import MetaAnswers
from vblackwell.trace.tiles import NUM_SMS
from vblackwell.trace.work import VIEW, Work, host_work, module_issues, read_work, work_of
from vblackwell.trace.workspace import (
    BEHIND_OUTPUTS,
    CUBLAS,
    CUBLAS_BYTES,
    CUBLASLT_BYTES,
    behind_each_output,
    workspace_bytes,
)


@dataclass(frozen=True)
class _Facts:
    """Of a call of an operator: bytes of its workspace and behind each output, and what kind it is."""

    workspace: int
    behind: tuple[int, ...]
    late: bool
    is_dropout: bool
    is_product: bool


def _facts(name: str, args: Any, num_sms: int) -> _Facts:
    base = name.partition(".")[0]
    return _Facts(
        workspace_bytes(name, args, num_sms), behind_each_output(name, args), base in BEHIND_OUTPUTS, name == "native_dropout.default",
        base in CUBLAS,
    )  # fmt: skip


def _on_meta_among(out: Any) -> list[Tensor]:
    if type(out) is Tensor:
        return [out] if out.is_meta else []
    return [] if out is None else [each for each in tree_leaves(out) if isinstance(each, Tensor) and each.is_meta]


def _repeats(value: Any) -> bool:
    """Whether ``value`` is a tensor with more elements than its part of a storage."""
    if not isinstance(value, Tensor) or not value.numel():
        return False
    return value.numel() > 1 + sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )


@dataclass
class Recorder(TorchDispatchMode):
    """Births, deaths and phases; it keeps no tensor alive. ``num_sms``: multiprocessors of the GPU."""

    capability: tuple[int, int]
    num_sms: int = NUM_SMS
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's question whether calls are to be kept from its compiler, which nothing here starts: an eighth of a trace's time."""
        return False

    def enter_phase(self, phase: str) -> None:
        self.phase = phase
        self.marks.append((len(self.events), self.step, phase))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            out = self.answers.call(func, args, kwargs or {})
            found = _on_meta_among(out)
            of = self._facts_of(func, args) if found else None
            taken = self._workspace(of) if of is not None and not of.late else None
            if self.counts_work:
                is_view = (
                    bool(found) and not func.__name__.partition(".")[0].endswith("_") and all(map(self._knows, found))
                )
                self.work.append(self._work_of(func, args, kwargs, out, is_view))
            if func.__name__ == "add.Tensor" and (old := summed_in_place(args)) is not None:
                self._take_over(found[0], old)
            if of is None:
                return out
            for number, tensor in enumerate(found[::-1] if of.is_dropout else found):  # its mask first
                self.see(tensor)
                if number < len(of.behind) and of.behind[number]:
                    self.events.append(~self._birth(of.behind[number], "workspace"))
            if of.is_product:
                self._cublas_workspace(func.__name__)
            taken = self._workspace(of) if of.late else taken
            if taken is not None:  # a kernel takes it beside its outputs
                self.events.append(~taken)
            return out

    def _facts_of(self, func: Any, args: Any) -> _Facts:
        known = self.answers.known
        found = None if known is None else known.notes.get("facts")
        if found is None:
            found = _facts(func.__name__, args, self.num_sms)
            if known is not None:
                known.notes["facts"] = found
        return found

    def _work_of(self, func: Any, args: Any, kwargs: Any, out: Any, is_view: bool) -> Work:
        """The same call is the same work: it follows from sizes, but for storages of which a tensor repeats parts."""
        if is_view:
            return host_work(self.phase, VIEW)
        known = self.answers.known
        found = None if known is None else known.notes.get(self.phase)
        if found is None:
            made = work_of(self.phase, func, args, kwargs, out, is_view, self.capability >= (8, 0), self.num_sms)
            found = host_work(self.phase, VIEW) if made is None else made
            if known is not None and not any(map(_repeats, tree_leaves((args, kwargs, out)))):
                known.notes[self.phase] = found
        return found

    def called(self, module: nn.Module) -> None:
        """Note a call of ``module``."""
        if self.counts_work:
            self.work.append(host_work(self.phase, module_issues(module)))

    def read(self) -> None:
        """Note that the host asks for a number that the GPU makes."""
        if self.counts_work:
            self.work.append(read_work(self.phase))

    def _knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._alive

    def _workspace(self, of: _Facts) -> int | None:
        return self._birth(of.workspace, "workspace") if of.workspace else None

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
