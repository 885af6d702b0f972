"""Two short training steps for real, where a model cannot be traced without its bytes: what they allocated, as a trace.

On a GPU the allocator's own record tells every block. On the CPU storages are seen as operators make them, without what kernels take
inside, and attention and dropout may be computed otherwise than on a GPU. Both are capped: on a GPU by what is free there, on the CPU by
looking at the RAM first. Weights are drawn anew by the factory, and tokens at random.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vblackwell.errors import InsufficientMemory, VBError
from vblackwell.estimator import Run
from vblackwell.hardware import list_gpus, memory_facts, why_no_cuda
from vblackwell.plan.estimate import optimizer_named
from vblackwell.plan.trace import Trace, Untraceable
from vblackwell.units import format_bytes

STEPS = 2
RAM_A_PARAMETER = 20  # weights, gradients and two moments in fp32, and a gradient on its way
MOST_RECORDS = 1_000_000


@dataclass(frozen=True)
class Measured:
    """What two steps took: their events, the seconds of the second, and where that was."""

    trace: Trace
    step_seconds: float
    where: str


def measure_run(run: Run, batch_size: int, device: torch.device | None = None) -> Measured:
    """Train ``run`` for two steps with ``batch_size`` sequences.

    Args:
        device: None: the first GPU if it can be used, else the CPU.

    Raises:
        Untraceable: there is no way to make the model with bytes, or it fails with them too.
        InsufficientMemory: the machine has no room for it.
    """
    make = run.subject.make
    if make is None:
        raise Untraceable(f"{run.subject.name} has no factory, so that it cannot be made with its bytes and measured")
    if device is None:
        device = torch.device("cpu") if why_no_cuda(list_gpus()) else torch.device("cuda", 0)
    _check_ram(run, device)
    record = _on_gpu if device.type == "cuda" else _on_cpu
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU"
    try:
        with record(device) as recorded:
            model, seconds = _train(run, make, batch_size, device, recorded)
            parameters = list(model.parameters())
            counts = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
            recorded.close()
    except VBError:
        raise
    except torch.OutOfMemoryError as error:
        raise InsufficientMemory(
            f"{run.subject.name} cannot be traced, and measured it does not fit {where}: give a smaller --batch-size",
            needed_bytes=0, available_bytes=0,
        ) from error  # fmt: skip
    except Exception as error:  # a stranger's code may raise anything
        words = " ".join(str(error).split())[:200]
        raise Untraceable(
            f"{run.subject.name} cannot be traced, and fails when it is measured, too: {type(error).__name__}: {words}"
        ) from error
    return Measured(recorded.trace(*counts), seconds, where)


def _check_ram(run: Run, device: torch.device) -> None:
    count = sum(p.numel() for p in run.model().parameters())
    needed, free = count * (4 if device.type == "cuda" else RAM_A_PARAMETER), memory_facts().available_bytes
    if needed > free:
        raise InsufficientMemory(
            f"{run.subject.name} cannot be traced, and to measure it takes {format_bytes(needed)} of RAM where {format_bytes(free)} are "
            "free",
            needed_bytes=needed, available_bytes=free,
        )  # fmt: skip


def _train(
    run: Run, make: Callable[[], nn.Module], batch_size: int, device: torch.device, recorded: _Record
) -> tuple[nn.Module, float]:  # fmt: skip
    enter = recorded.enter
    model = run.prepared(make().to(torch.bfloat16 if run.precision == "bf16" else torch.float32)).to(device).train()
    recorded.see_weights(model)
    optimizer = optimizer_named(run.optimizer)(model.parameters())
    seconds = 0.0
    for step in range(STEPS):
        began = time.perf_counter()
        enter(step, "forward")
        tokens = torch.randint(0, run.subject.vocab_size, (batch_size, run.seq_length), device=device)
        batch = {"input_ids": tokens, "labels": tokens}
        with torch.autocast(device.type, torch.bfloat16, enabled=run.precision == "autocast"):
            loss = run.subject.loss(model, batch)
        enter(step, "backward")
        loss.backward()
        del loss
        enter(step, "optimizer")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    enter(STEPS - 1, "setup")
    return model, seconds


@dataclass
class _Record:
    """Sizes, events and phases as `Trace` has them; who kept what says what it was for."""

    sizes: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[int, int, str]] = field(default_factory=lambda: [(0, 0, "setup")])

    def enter(self, step: int, phase: str) -> None:
        """A phase begins."""
        self.marks.append((len(self.events), step, phase))

    def see_weights(self, model: nn.Module) -> None:
        """The model is made; a factory may have had its weights before, or have them from a file."""

    def close(self) -> None:
        """Nothing more happens."""

    def trace(self, num_parameters: int, trainable: int) -> Trace:
        """The record with a category for every storage."""
        return Trace(
            tuple(self.sizes), tuple(self._categories()), tuple(self.events), tuple(self.marks), num_parameters, trainable
        )  # fmt: skip

    def _categories(self) -> list[str]:
        """By the phase of birth: what backward leaves are gradients, what the optimizer leaves states, what is there before weights."""
        found = ["activations"] * len(self.sizes)
        ends = [begin for begin, _, _ in self.marks[1:]] + [len(self.events)]
        gone = {~event: position for position, event in enumerate(self.events) if event < 0}
        for (begin, _, phase), end in zip(self.marks, ends, strict=True):
            kept = {"setup": "weights", "backward": "gradients", "optimizer": "optimizer"}.get(phase)
            for event in self.events[begin:end]:
                if event >= 0 and kept is not None:
                    stays = gone.get(event, len(self.events)) >= end
                    found[event] = kept if stays else "workspace"
        return found


class _Storages(TorchDispatchMode):
    """Notes storages on the CPU as operators make them, until the last reference to them goes.

    Raises, out of an operator, InsufficientMemory: they hold more than was free when it began.
    """

    def __init__(self, record: _Record) -> None:
        super().__init__()
        self.record, self.live_bytes, self.most_bytes = record, 0, memory_facts().available_bytes
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self.see(each)
        return out

    def settle(self) -> None:
        """Forget what came and went so far: on a GPU's way a model is made, and brought to its type, in RAM."""
        alive = [storage for seen in self._alive.values() if (storage := seen()) is not None]
        self._alive.clear()
        self.record.sizes.clear()
        self.record.events.clear()
        self.live_bytes = 0
        for storage in alive:
            self._note(storage)

    def see(self, tensor: Tensor) -> None:
        """Note the storage of ``tensor``, if it is new."""
        self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            index = len(self.record.sizes)
            self.record.sizes.append(storage.nbytes())
            self.record.events.append(index)
            self._alive[key] = weakref.ref(storage, lambda _: self._death(key, index))
            self.live_bytes += storage.nbytes()
            if self.live_bytes > self.most_bytes:
                raise InsufficientMemory(
                    f"the model cannot be traced, and two steps of it take more than the {format_bytes(self.most_bytes)} of RAM that were "
                    "free: give a smaller --batch-size",
                    needed_bytes=self.live_bytes, available_bytes=self.most_bytes,
                )  # fmt: skip

    def _death(self, key: int, index: int) -> None:
        del self._alive[key]
        self.live_bytes -= self.record.sizes[index]
        self.record.events.append(~index)


class _Seen(_Record):
    """The record of `_Storages`."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = _Storages(self)

    def see_weights(self, model: nn.Module) -> None:
        self.storages.settle()
        for tensor in [*model.parameters(), *model.buffers()]:
            self.storages.see(tensor)


@contextmanager
def _on_cpu(device: torch.device) -> Iterator[_Record]:
    record = _Seen()
    with record.storages:
        yield record


class _Blocks(_Record):
    """The record of a GPU's allocator, read at the end; phases are places in it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(marks=[])
        self.device, self._places = device, [(0, 0, "setup")]

    def enter(self, step: int, phase: str) -> None:
        self._places.append((len(self._entries()), step, phase))

    def _entries(self) -> list[Any]:
        torch.cuda.synchronize(self.device)
        snapshot: Any = torch.cuda.memory._snapshot(self.device)
        return [
            each
            for each in snapshot["device_traces"][self.device.index]
            if each["action"] in ("alloc", "free_completed")
        ]

    def close(self) -> None:
        alive: dict[int, int] = {}
        places = list(self._places)
        for position, entry in enumerate(self._entries()):
            while places and places[0][0] <= position:
                self.marks.append((len(self.events), *places.pop(0)[1:]))
            if entry["action"] == "alloc":
                alive[entry["addr"]] = len(self.sizes)
                self.events.append(len(self.sizes))
                self.sizes.append(entry["size"])
            elif entry["addr"] in alive:
                self.events.append(~alive.pop(entry["addr"]))
        self.marks += [(len(self.events), step, phase) for _, step, phase in places]


@contextmanager
def _on_gpu(device: torch.device) -> Iterator[_Record]:
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, 0.95 * free / total), device)
    torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_RECORDS)  # pyright: ignore
    try:
        yield _Blocks(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.set_per_process_memory_fraction(1.0, device)
