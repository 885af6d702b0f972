"""What a run says while it runs (a live line on a terminal, a few plain lines elsewhere), and requests to stop it."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vblackwell.train.metrics import StepRecord
from vblackwell.units import format_bytes, format_seconds

PLAIN_SECONDS = 5.0
PHASE_SECONDS = 1.0  # what is shorter needs no line
SMOOTHING = 0.9  # of the step time that the time left is computed from


class Progress:
    """Receives messages and step records; says them as lines on standard output, for pipes, logs and CI."""

    def __init__(self) -> None:
        self._total_steps = 0
        self._step_seconds: float | None = None
        self._phase, self._phase_began, self._phase_said = "", 0.0, False
        self._last_line = -float("inf")

    def say(self, text: str) -> None:
        """One line that stays."""
        print(text, flush=True)

    def start(self, first_step: int, total_steps: int) -> None:
        """The loop begins after ``first_step`` finished steps."""
        self._total_steps = total_steps

    def step(self, record: StepRecord) -> None:
        left, now = self._time_left(record), time.monotonic()
        notable = record.val_loss is not None or record.skipped or record.step == self._total_steps
        if notable or now - self._last_line >= PLAIN_SECONDS:
            self._last_line = now
            self.say(f"step {record.step}/{self._total_steps}  {describe(record)}  left {left}")

    def close(self) -> None:
        """The loop is over. Idempotent."""
        sys.stdout.flush()

    def phase(self, text: str, share: float | None) -> None:
        """Something before the loop is going on; ``share`` of it (0 to 1) is done. Said once, if it takes long."""
        now = time.monotonic()
        if text != self._phase:
            self._phase, self._phase_began, self._phase_said = text, now, False
        if not self._phase_said and (share is None or now - self._phase_began > PHASE_SECONDS):
            self._phase_said = True
            self.say(text)

    def _time_left(self, record: StepRecord) -> str:
        before = self._step_seconds
        self._step_seconds = record.seconds if before is None else SMOOTHING * before + (1 - SMOOTHING) * record.seconds
        return format_seconds(self._step_seconds * (self._total_steps - record.step))


class RichProgress(Progress):
    """A bar, and under it the newest numbers, redrawn in place."""

    def __init__(self) -> None:
        super().__init__()
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar: Any = Bar(TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[left]}"))
        self._live: Any = Live(self._bar, refresh_per_second=4)
        self._task: Any = None
        self._val_loss: float | None = None

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, first_step: int, total_steps: int) -> None:
        super().start(first_step, total_steps)
        self._task = self._bar.add_task("train", total=total_steps, completed=first_step, left="")
        self._live.start()

    def step(self, record: StepRecord) -> None:
        from rich.console import Group
        from rich.text import Text

        if record.val_loss is not None:
            self._val_loss = record.val_loss
        self._bar.update(self._task, completed=record.step, left=f"{self._time_left(record)} left")
        self._live.update(Group(self._bar, Text(describe(record, self._val_loss))))
        if record.skipped:
            self.say(f"step {record.step}: {describe(record)}")

    def close(self) -> None:
        self._live.stop()


def describe(record: StepRecord, val_loss: float | None = None) -> str:
    """The numbers of a step on one line."""
    shown = record.val_loss if record.val_loss is not None else val_loss
    speed = sum(record.link_bytes.values()) / max(record.seconds, 1e-9) / 1e9
    parts = [
        "loss not finite" if record.loss is None else f"loss {record.loss:.4f}",
        "" if shown is None else f"val {shown:.4f}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        "memory " + " ".join(f"{label} {format_bytes(size)}" for label, size in record.level_bytes.items()),
        f"links {speed:.2f} GB/s",
        f"stalled {record.stall_seconds:.2f} s",
        "SKIPPED: weights untouched" if record.skipped else "",
    ]
    return "  ".join(filter(None, parts))


class Stopped(BaseException):
    """A stop request where nothing is lost by leaving; no ``Exception``, so that nothing takes it for an error."""


class StopRequest:
    """Whether the run was asked to stop. Inside ``with``, SIGTERM and SIGINT ask for a checkpoint; a second SIGINT
    leaves at once.

    A handler only notes the request, for the loop to see between micro-batches: raising would land in the middle of a
    step or of a checkpoint. While data is read there is no such state, and it raises.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[int, Any] = {}
        self._interrupts = False
        self._sigints = 0

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as shells report it: 143 for SIGTERM, 130 for SIGINT."""
        assert self.signal is not None
        return 128 + self.signal

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """While this lasts a request raises `Stopped`, between two operations of Python's."""
        self._interrupts = True
        try:
            if self.wanted:
                raise Stopped
            yield
        finally:
            self._interrupts = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._sigints += number == signal.SIGINT
        if self._sigints == 2:
            os._exit(128 + number)
        if self.signal is None:
            self.signal = signal.Signals(number)
            if self._interrupts:
                raise Stopped
