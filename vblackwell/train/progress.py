"""What a run says while it runs (a live line on a terminal, a few plain lines elsewhere), and requests to stop it."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vblackwell.memory.level import level_in_words
from vblackwell.train.metrics import StepRecord
from vblackwell.units import format_bytes, format_seconds

PLAIN_SECONDS = 5.0  # between lines that stay
LIVE_SECONDS = 0.25  # between those that are redrawn in place
SMOOTHING = 0.9  # of the step time that the time left is computed from


class Progress:
    """Receives messages and step records; says them as lines on standard output. ``live``, for a terminal: between the
    steps that stay (first, last, validated, skipped) the newest one's line is redrawn in place.
    """

    def __init__(self, live: bool = False) -> None:
        self._live, self._erase = live, ""
        self._step_seconds: float | None = None
        self._phase, self._phase_began, self._phase_said = "", 0.0, False
        self._last_line = -float("inf")

    def say(self, text: str) -> None:
        """One line that stays."""
        print(self._erase + text, flush=True)
        self._erase = ""

    def step(self, record: StepRecord, total_steps: int) -> None:
        before = self._step_seconds
        self._step_seconds = record.seconds if before is None else SMOOTHING * before + (1 - SMOOTHING) * record.seconds
        left, now = format_seconds(self._step_seconds * (total_steps - record.step)), time.monotonic()
        line = f"step {record.step}/{total_steps}  {describe(record)}  left {left}"
        notable = record.val_loss is not None or record.skipped or record.step == total_steps
        if not notable and now - self._last_line < (LIVE_SECONDS if self._live else PLAIN_SECONDS):
            return
        self._last_line = now
        if notable or not self._live:
            self.say(line)
        else:
            print(self._erase + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
            self._erase = "\r\x1b[2K"  # of a terminal's line

    def close(self) -> None:
        """The loop is over. Idempotent."""
        print(end=self._erase, flush=True)
        self._erase = ""

    def phase(self, text: str, share: float | None) -> None:
        """Something before the loop is going on; ``share`` of it (0 to 1) is done. Said once, if it takes long."""
        now = time.monotonic()
        if text != self._phase:
            self._phase, self._phase_began, self._phase_said = text, now, False
        if not self._phase_said and (share is None or now - self._phase_began > 1.0):  # seconds
            self._phase_said = True
            self.say(text)


def describe(record: StepRecord) -> str:
    """The numbers of a step on one line."""
    speed = sum(record.link_bytes.values()) / max(record.seconds, 1e-9) / 1e9
    parts = [
        "loss not finite" if record.loss is None else f"loss {record.loss:.4f}",
        "" if record.val_loss is None else f"val {record.val_loss:.4f}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        ", ".join(
            f"{level_in_words(label)} {format_bytes(size)}" for label, size in record.level_bytes.items() if size
        ),
        f"moved at {speed:.2f} GB/s" if speed >= 0.005 else "",
        f"waited {record.stall_seconds:.2f} s for it" if record.stall_seconds >= 0.005 else "",
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
