"""The loop: micro-batches, one optimizer step, numbers, and now and then a validation loss and a checkpoint.

It stops only where the state is whole: a step that is interrupted is undone (its gradients dropped, data position and
generators put back), and a resumed run repeats it bit by bit. So is one that runs out of the GPU's memory, begun again
with half the sequences in a forward, as many a step; but once the optimizer has begun to change weights, an error is an
error.
"""

import base64
import functools
import math
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from vblackwell.data.corpus import Dataset
from vblackwell.errors import CorruptData, DiskError, InsufficientMemory, VBError
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.train.config import TrainConfig
from vblackwell.train.metrics import StepRecord, finite_or_none, level_labels, link_bytes
from vblackwell.train.progress import Progress, StopRequest


class TrainingDiverged(VBError):
    """Too many steps in a row, or all of a run, were not finite; the weights are those before the first of them."""


MIN_SCALE, MAX_SCALE = 1.0, 2.0**24


@dataclass(frozen=True)
class Schedule:
    """Learning rates of a run: up to ``peak`` in ``warmup_steps`` (the first is above zero), down to ``floor``."""

    peak: float
    floor: float
    warmup_steps: int
    total_steps: int

    def learning_rate(self, step: int) -> float:
        """The rate of step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        falling_steps = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / falling_steps)
        return self.floor + (self.peak - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def default_warmup_steps(total_steps: int) -> int:
    """A twentieth of the run, at most 1000."""
    return min(1000, total_steps // 20)


@dataclass
class LossScaler:
    """The scale of the next fp16 step: doubled after ``growth_interval`` finite steps in a row, halved at an overflow;
    a power of two, so that scaling is exact. (torch's `GradScaler` reads `p.grad`, which is None while offloaded.)
    """

    scale: float = 2.0**16
    growth_interval: int = 200
    finite_steps: int = 0

    def update(self, *, overflowed: bool) -> None:
        self.finite_steps = 0 if overflowed else self.finite_steps + 1
        if overflowed:
            self.scale = max(MIN_SCALE, self.scale / 2)
        elif self.finite_steps >= self.growth_interval:
            self.scale, self.finite_steps = min(MAX_SCALE, self.scale * 2), 0

    @property
    def exhausted(self) -> bool:
        """Whether overflow can no longer be blamed on the scale."""
        return self.scale <= MIN_SCALE


@dataclass
class Parts:
    """What a run is made of. ``loss``, by default the model, is called with what ``data`` gives, and returns the mean;
    ``validation``: held-out windows.
    """

    model: nn.Module
    optimizer: VGPUAdamW
    stack: VGPUStack
    data: Dataset
    validation: Dataset
    schedule: Schedule
    scaler: LossScaler | None
    device: torch.device
    loss: Callable[..., torch.Tensor] | None = None


@dataclass
class TrainerState:
    """What a run needs between two optimizer steps, next to its weights, to go on with the same bits.
    ``data_position``: windows consumed; ``skipped``: steps that were not finite and changed no weight; ``micro_batch``:
    sequences in a forward, 0 as the settings say; ``unrecorded``: the last step, if its line is not yet in
    metrics.jsonl as it should be.
    """

    step: int = 0
    data_position: int = 0
    skipped_in_a_row: int = 0
    scaler: LossScaler | None = None
    rng: dict[str, Any] = field(default_factory=dict)
    micro_batch: int = 0
    skipped: int = 0
    unrecorded: StepRecord | None = None

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "TrainerState":
        """The reverse of `dataclasses.asdict`. Raises CorruptData: a key is missing."""
        try:
            values = {name: found[name] for name in cls.__dataclass_fields__}
        except KeyError as error:
            raise CorruptData(f"trainer.json has no {error.args[0]!r}: it was written by another version") from None
        for name, kind in (("scaler", LossScaler), ("unrecorded", StepRecord)):
            values[name] = None if values[name] is None else kind(**values[name])
        return cls(**values)


class Trainer:
    """Runs ``config.max_steps`` steps, or until a stop request. ``record`` is called with each step's record,
    ``checkpoint`` with the state where one is due; ``step_context`` wraps every step.
    """

    def __init__(
        self,
        config: TrainConfig,
        parts: Parts,
        progress: Progress,
        stop: StopRequest,
        record: Callable[[StepRecord], None],
        checkpoint: Callable[[TrainerState], None],
        step_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        assert config.max_steps is not None
        self.config, self.parts, self.total_steps = config, parts, config.max_steps
        self.now = TrainerState(micro_batch=config.batch_size)  # without generators and scaler
        self._loss = parts.loss or parts.model
        self._held: dict[str, int] = {}  # the most in the step, by level
        self._progress, self._stop = progress, stop
        self._record, self._checkpoint, self._step_context = record, checkpoint, step_context

    def state(self) -> TrainerState:
        """Where the run stands; valid between steps."""
        scaler = self.parts.scaler
        return replace(self.now, scaler=scaler and replace(scaler), rng=capture_rng(self.parts.device))

    def restore(self, state: TrainerState) -> None:
        """Go on from ``state``; weights and optimizer states are restored by the caller."""
        self.now = replace(state)
        if self.parts.scaler is not None and state.scaler is not None:
            self.parts.scaler = replace(state.scaler)
        self._take_micro_batches_of(state.micro_batch or self.config.batch_size)
        restore_rng(state.rng, self.parts.device)

    @property
    def accumulation_steps(self) -> int:
        """Forwards in a step."""
        return self.config.batch_size * self.config.accumulation_steps // self.now.micro_batch

    def _take_micro_batches_of(self, sequences: int) -> None:
        self.now.micro_batch = sequences
        self.parts.optimizer.accumulation_steps = self.accumulation_steps

    def run(self) -> None:
        """Train until the last step or a stop request. Raises TrainingDiverged, DiskError."""
        saved_step = self.now.step
        if self.now.unrecorded is not None:
            self._finish(self.now.unrecorded)
        while self.now.step < self.total_steps and not self._stop.wanted:
            with self._step_context():
                record = self._one_step()
            if record is None:
                break
            self._finish(record)
            if self._due(self.config.checkpoint_every):
                self._checkpoint(self.state())
                saved_step = self.now.step
        if self._stop.wanted and self.now.step != saved_step:
            self._checkpoint(self.state())
        if self.now.step == self.total_steps == self.now.skipped:
            raise TrainingDiverged(
                f"none of the {self.now.step} steps had a loss and gradients that are finite: nothing was learnt, and "
                "nothing is exported; lower --learning-rate, or look at the data"
            )

    def _finish(self, record: StepRecord) -> None:
        """Validate if that is due, and record the step; where that is interrupted or fails a resumed run does it.
        Raises DiskError, which says whether a checkpoint of the step could be written, or TrainingDiverged.
        """
        due = self._due(self.config.eval_every) or self.now.step in (1, self.total_steps)
        if due and record.val_loss is None:
            record = replace(record, val_loss=self.validate())
        try:
            self._record(record)
        except DiskError as error:  # the run cannot go on; its last step is kept, if that can be
            self.now.unrecorded, outcome = record, f"Step {self.now.step} is in a checkpoint"
            try:
                self._checkpoint(self.state())
            except DiskError as second:
                outcome = f"No checkpoint of step {self.now.step} could be written either: {second}"
            raise DiskError(f"{error}. {outcome}") from error
        self._progress.step(record, self.total_steps)
        self.now.unrecorded = record if due and record.val_loss is None and self._stop.wanted else None
        if self.now.skipped_in_a_row >= self.config.max_skipped_steps:
            raise TrainingDiverged(
                f"{self.now.skipped_in_a_row} steps in a row up to step {record.step} had a loss or gradients that "
                "were not finite; the weights were left as they were before: lower --learning-rate, or look at the data"
            )

    def _due(self, every: int) -> bool:
        return every > 0 and self.now.step % every == 0

    def _one_step(self) -> StepRecord | None:
        """One optimizer step; None if it was interrupted and undone."""
        parts = self.parts
        began, before, start = time.perf_counter(), parts.stack.get_stats(), self.state()
        learning_rate = parts.schedule.learning_rate(self.now.step)
        for group in parts.optimizer.param_groups:
            group["lr"] = learning_rate
        while (losses := self._forward_and_backward()) is None:
            self._begin_again_smaller(start)
        if len(losses) < self.accumulation_steps:
            parts.optimizer.zero_grad()
            self.restore(start)
            return None
        loss = sum(read() for read in losses)
        skipped = not self._update(loss)
        self.now.step += 1
        self.now.skipped += skipped
        seconds, stats = time.perf_counter() - began, parts.stack.get_stats()
        self._note_held(stats)
        return StepRecord(
            step=self.now.step,
            loss=finite_or_none(loss),
            lr=learning_rate,
            grad_norm=finite_or_none(parts.optimizer.grad_norm) if math.isfinite(loss) else None,
            tokens_per_second=self.config.tokens_per_step / seconds,
            level_bytes=self._held,
            link_bytes=link_bytes(stats, before),
            stall_seconds=stats["stall_seconds"] - before["stall_seconds"],
            seconds=seconds,
            skipped=skipped,
        )

    def _forward_and_backward(self) -> list[Callable[[], float]] | None:
        """Each micro-batch's share of the loss, fewer if a stop is wanted; None where memory ran out and half fits."""
        parts, losses = self.parts, list[Callable[[], float]]()
        parts.optimizer.loss_scale = 1.0 if parts.scaler is None else parts.scaler.scale
        parts.model.train()
        self._held = {}
        try:
            while len(losses) < self.accumulation_steps and not self._stop.wanted:
                losses.append(self._one_micro_batch())
            return losses
        except (torch.OutOfMemoryError, InsufficientMemory) as error:
            # Raised by the device's allocator, perhaps to a level of the stack whose own count had space.
            refused = any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__cause__))
            if not refused or self.now.micro_batch == 1:
                raise
        return None  # the error is gone here, and with it what its frames held

    def _one_micro_batch(self) -> Callable[[], float]:
        parts, count = self.parts, self.accumulation_steps
        batch = parts.data.batch(np.arange(self.now.data_position, self.now.data_position + self.now.micro_batch))
        self.now.data_position += self.now.micro_batch
        sent = [send(numbers_BS, parts.device) for numbers_BS in batch]
        loss = self._loss(*(arrived() for arrived in sent))
        late = send_back(loss.detach() / count)  # on its way before backward fills the queues
        self._note_held(parts.stack.get_stats())  # level 0 is empty at the end
        (loss * (parts.optimizer.loss_scale / count)).backward()
        return late

    def _note_held(self, stats: dict[str, Any]) -> None:
        for label, level in zip(level_labels(stats), stats["levels"], strict=True):
            self._held[label] = max(level["used_bytes"], self._held.get(label, 0))

    def _begin_again_smaller(self, start: TrainerState) -> None:
        parts, before = self.parts, self.now.micro_batch
        parts.optimizer.zero_grad()
        self.restore(start)
        if parts.device.type == "cuda":
            torch.cuda.empty_cache()
        self._take_micro_batches_of(half_of(before, before * self.accumulation_steps))
        again = f"{self.now.micro_batch}, {self.accumulation_steps} forwards a step"
        self._progress.say(
            f"step {self.now.step + 1}: out of memory with {before} sequences in a forward; begun again with {again}, "
            f"the same {self.config.tokens_per_step:,} tokens"
        )

    def _update(self, loss: float) -> bool:
        """Let the step happen unless something is not finite; whether it happened."""
        optimizer, scaler, finite, tolerated = self.parts.optimizer, self.parts.scaler, math.isfinite(loss), False
        if finite:
            optimizer.step()
            finite = not optimizer.skipped
            if scaler is not None:  # overflow is how it finds its scale, and no sign of divergence
                tolerated = not finite and not scaler.exhausted
                scaler.update(overflowed=not finite)
        optimizer.zero_grad()
        if not tolerated:
            self.now.skipped_in_a_row = 0 if finite else self.now.skipped_in_a_row + 1
        return finite

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss over the first held-out sequences, the same for every batch size, without a random draw; None if it
        was interrupted or is not finite.
        """
        parts, total = self.parts, 0.0
        count = min(self.config.eval_sequences, len(parts.validation))
        parts.model.eval()
        for start in range(0, count, self.now.micro_batch):
            if self._stop.wanted:
                return None
            batch = parts.validation.batch(np.arange(start, min(start + self.now.micro_batch, count)))
            total += float(self._loss(*(numbers_BS.to(parts.device) for numbers_BS in batch))) * len(batch[0])
        return finite_or_none(total / count)


def half_of(micro_batch: int, sequences: int) -> int:
    """The most sequences in a forward, at most half of ``micro_batch``, that divide the ``sequences`` of a step."""
    return next(size for size in range(micro_batch // 2, 0, -1) if sequences % size == 0)


def capture_rng(device: torch.device) -> dict[str, Any]:
    """The generators that a forward may draw from, as JSON values."""
    version, numbers, gauss = random.getstate()
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    encoded = {name: base64.b64encode(state.numpy().tobytes()).decode("ascii") for name, state in states.items()}
    return {"python": [version, list(numbers), gauss]} | encoded


def restore_rng(captured: dict[str, Any], device: torch.device) -> None:
    """Put generators back; the GPU's not on a machine without one, where its numbers cannot be continued."""

    def decoded(name: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(captured[name])), dtype=torch.uint8)

    version, numbers, gauss = captured["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(decoded("torch"))
    if device.type == "cuda" and "cuda" in captured:
        torch.cuda.set_rng_state(decoded("cuda"), device)


_side_stream = functools.cache(torch.cuda.Stream)  # of a device


def send(tensor: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
    """Sends ``tensor`` to ``device`` on a separate stream, past the queue of streamed weights (15 ms a step:
    docs/journal/offload.md). What is returned gives it, for what the current stream queues from then on.
    """
    if device.type != "cuda":
        return lambda: tensor
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    with torch.cuda.stream(_side_stream(device)):
        sent = pinned.to(device, non_blocking=True)
        event = _side_stream(device).record_event()

    def arrived() -> torch.Tensor:
        stream = torch.cuda.current_stream(sent.device)
        stream.wait_event(event)
        sent.record_stream(stream)
        return sent

    return arrived


def send_back(value: torch.Tensor) -> Callable[[], float]:
    """Sends a one-element tensor to the host, on the stream of `send`. What is returned reads it, and waits for nothing
    that was queued after what computes it.
    """
    value = value.detach()
    if not value.is_cuda:
        return lambda: float(value)
    stream = _side_stream(value.device)
    stream.wait_stream(torch.cuda.current_stream(value.device))
    with torch.cuda.stream(stream):
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        value.record_stream(stream)
        event = stream.record_event()

    def read() -> float:
        event.synchronize()
        return float(host)

    return read
