"""Two short training steps for real, where a model cannot be traced without its bytes: what they allocated, as a trace.

On a GPU the allocator's own record tells every block. On the CPU storages are seen as operators make them, without what
kernels take inside, and attention and dropout may be computed otherwise than on a GPU. Both are capped by what is free.
Weights are drawn anew by the factory, and tokens at random.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vblackwell.errors import InsufficientMemory, VBError
from vblackwell.machine.facts import list_gpus, memory_facts, why_no_cuda
from vblackwell.nn.convert.training import checkpoint_layers
from vblackwell.planner.memory_estimate import OPTIMIZERS, Run
from vblackwell.trace.recorder import StorageLog, StoragesWithBytes
from vblackwell.trace.trace import Trace, Untraceable, brief
from vblackwell.units import format_bytes

STEPS = 2
RAM_A_PARAMETER = 20  # weights, gradients and two moments in fp32, and a gradient on its way
MAX_RECORDS = 1_000_000
LASTING = {"setup": "weights", "backward": "gradients", "optimizer": "optimizer"}  # what outlives its phase


@dataclass(frozen=True)
class Measured:
    """What two steps took: their events, the seconds of the second, and where that was."""

    trace: Trace
    step_seconds: float
    where: str


def measure_run(run: Run, batch_size: int, device: torch.device | None = None) -> Measured:
    """Train ``run`` for two steps with ``batch_size`` sequences, on the first GPU that can be used, else on the CPU.
    Raises Untraceable where it cannot be made with bytes, or fails with them too; InsufficientMemory."""
    name = run.spec.name
    if run.spec.make is None:
        raise Untraceable(f"{name} has no factory, so that it cannot be made with its bytes and measured")
    if device is None:
        device = torch.device("cpu") if why_no_cuda(list_gpus()) else torch.device("cuda", 0)
    is_gpu, free = device.type == "cuda", memory_facts().available_bytes
    needed = sum(p.numel() for p in run.model.parameters()) * (4 if is_gpu else RAM_A_PARAMETER)
    if needed > free:
        said = f"to measure it takes {format_bytes(needed)} of RAM where {format_bytes(free)} are free"
        raise InsufficientMemory(f"{name} cannot be traced, and {said}", needed_bytes=needed, available_bytes=free)
    where = torch.cuda.get_device_name(device) if is_gpu else "this machine's CPU"
    try:
        with _recorded(device, free) as record:
            model, seconds = _train(run, batch_size, device, record)
            parameters = list(model.parameters())
            counts = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
            record.update()
    except VBError:
        raise
    except torch.OutOfMemoryError as error:
        said = f"{name} cannot be traced, and measured it does not fit {where}: give a smaller --batch-size"
        raise InsufficientMemory(said) from error
    except Exception as error:  # a stranger's code may raise anything
        raise Untraceable(f"{name} cannot be traced, and fails when it is measured, too: {brief(error)}") from error
    log = record.log
    trace = Trace(tuple(log.sizes), _categories(log, record.marks), tuple(log.events), tuple(record.marks), *counts)
    return Measured(trace, seconds, where)


def _train(run: Run, batch_size: int, device: torch.device, record: "_Record") -> tuple[nn.Module, float]:
    assert run.spec.make is not None
    model = run.spec.make().to(run.dtype).to(device).train()
    if run.checkpointing:
        checkpoint_layers(model)
    if device.type == "cpu":  # a factory may have had its weights before, or have them from a file
        record.log.forget_past()
        for tensor in [*model.parameters(), *model.buffers()]:
            record.log.see(tensor)
    optimizer = OPTIMIZERS[run.optimizer](model.parameters())
    seconds = 0.0
    for step in range(STEPS):
        began = time.perf_counter()
        record.enter(step, "forward")
        tokens = torch.randint(0, run.spec.vocab_size, (batch_size, run.seq_length), device=device)
        batch = {"input_ids": tokens, "labels": tokens}
        with torch.autocast(device.type, torch.bfloat16, enabled=run.precision == "autocast"):
            loss = run.spec.loss(model, batch)
        record.enter(step, "backward")
        loss.backward()
        del loss
        record.enter(step, "optimizer")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    record.enter(STEPS - 1, "setup")
    return model, seconds


def _categories(log: StorageLog, marks: list[tuple[int, int, str]]) -> tuple[str, ...]:
    """By the phase of birth: what outlives it is `LASTING`, the rest of these phases workspace."""
    events = log.events
    found = ["activations"] * len(log.sizes)
    ends = [begin for begin, _, _ in marks[1:]] + [len(events)]
    freed_at = {~event: position for position, event in enumerate(events) if event < 0}
    for (begin, _, phase), end in zip(marks, ends, strict=True):
        for event in events[begin:end] if phase in LASTING else ():
            if event >= 0:
                found[event] = LASTING[phase] if freed_at.get(event, len(events)) >= end else "workspace"
    return tuple(found)


@dataclass
class _Record:
    """Storages, and where phases begin among their events, once ``update`` has logged what is new."""

    log: StorageLog
    update: Callable[[], None] = lambda: None
    marks: list[tuple[int, int, str]] = field(default_factory=lambda: [(0, 0, "setup")])

    def enter(self, step: int, phase: str) -> None:
        self.update()
        self.marks.append((len(self.log.events), step, phase))


@contextmanager
def _recorded(device: torch.device, free: int) -> Iterator[_Record]:
    if device.type == "cpu":
        wrong = "the model cannot be traced, and two steps of it take more than"
        refusal = f"{wrong} the {format_bytes(free)} of RAM that were free: give a smaller --batch-size"
        with StoragesWithBytes(free, refusal) as storages:
            yield _Record(storages.log)
        return
    log, blocks, read = StorageLog(), dict[int, int](), 0

    def update() -> None:
        nonlocal read
        torch.cuda.synchronize(device)
        snapshot: Any = torch.cuda.memory._snapshot(device)
        entries = snapshot["device_traces"][device.index]
        for entry in entries[read:]:
            if entry["action"] == "alloc":
                blocks[entry["addr"]] = log.add(entry["size"])
            elif entry["action"] == "free_completed" and entry["addr"] in blocks:
                log.free(blocks.pop(entry["addr"]))
        read = len(entries)

    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, 0.95 * free / total), device)
    torch.cuda.memory._record_memory_history(context=None, max_entries=MAX_RECORDS)  # pyright: ignore
    try:
        yield _Record(log, update)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.set_per_process_memory_fraction(1.0, device)
