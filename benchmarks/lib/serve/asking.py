"""Requests of random tokens, and when their own came."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from unittest import mock

import torch

from vblackwell.errors import VBError
from vblackwell.generate.sampling import Sampling
from vblackwell.serve.engine import Engine
from vblackwell.serve.paged_model import PagedModel
from vblackwell.serve.request import Done, Event, Request

GREEDY = Sampling(temperature=0)
SKIPPED = 3  # tokens of each text before the rate is taken


class Late(VBError):
    """The time of the run is over."""


@dataclass
class Text:
    """A request on its way, with the seconds at which its tokens came."""

    request: Request
    asked: float = 0.0
    times: list[float] = field(default_factory=list)
    done: Done | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def hear(self, event: Event) -> None:
        if isinstance(event, Done):
            self.done = event
            self.ended.set()
        else:
            self.times.append(time.perf_counter())

    @property
    def first_s(self) -> float:
        """From the request to its first token."""
        return self.times[0] - self.asked

    @property
    def is_whole(self) -> bool:
        whole = self.done is not None and self.done.reason == "length"
        return whole and len(self.times) == self.request.max_new_tokens


def tokens(chosen: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(chosen.choices(range(vocab_size), k=count))


def submit(engine: Engine, request: Request) -> Text:
    text = Text(request, time.perf_counter())
    engine.submit(request, text.hear)
    return text


def wait(texts: Sequence[Text], seconds: float) -> None:
    """Until all are over; raises Late after ``seconds``."""
    end = time.perf_counter() + seconds
    for text in texts:
        if not text.ended.wait(max(0.0, end - time.perf_counter())):
            missing = sum(not each.ended.is_set() for each in texts)
            raise Late(f"{missing} of {len(texts)} texts were not over after {seconds:.0f} s")


def answers(engine: Engine, requests: Sequence[Request], seconds: float) -> list[Text]:
    """All at once; raises Late, or VBError where one is not answered in full."""
    texts = [submit(engine, request) for request in requests]
    wait(texts, seconds)
    for text in texts:
        if not text.is_whole:
            raise VBError(f"a text of {text.request.max_new_tokens} tokens ended after {len(text.times)}: {text.done}")
    return texts


def decode_rate(texts: Sequence[Text]) -> float:
    """Tokens a second while all are written."""
    begin = max(text.times[min(SKIPPED, len(text.times) - 2)] for text in texts)
    end = min(text.times[-1] for text in texts)
    count = sum(begin < moment <= end for text in texts for moment in text.times)
    if count < len(texts):
        raise VBError(f"{len(texts)} texts were never written at the same time: ask for longer ones")
    return count / (end - begin)


@dataclass
class Step:
    """A pass: when the host began it, how many texts it read one token of (0: others too), and the model's seconds."""

    began: float
    rows: int
    seconds: Callable[[], float]


@contextmanager
def steps_of(device: torch.device) -> Iterator[list[Step]]:
    """The passes that run inside; where the engine calls the model, its time is taken, on the GPU by events."""
    plain, steps = PagedModel.logits, list[Step]()

    def timed(self: PagedModel, shares: Any, *ahead: Any) -> Any:
        rows = len(shares) if all(len(share.tokens) == 1 for share in shares) else 0
        began = time.perf_counter()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            found = plain(self, shares, *ahead)
            end.record()
            steps.append(Step(began, rows, lambda: start.elapsed_time(end) / 1e3))
        else:
            found = plain(self, shares, *ahead)
            seconds = time.perf_counter() - began
            steps.append(Step(began, rows, lambda: seconds))
        return found

    with mock.patch.object(PagedModel, "logits", timed):
        yield steps
        if device.type == "cuda":
            torch.cuda.synchronize()


def step_medians(steps: Sequence[Step], rows: int) -> tuple[float, float]:
    """Seconds from step to step, and of the model in one, of those that write one token of ``rows`` texts each."""
    pairs = [(a, b) for a, b in zip(steps, steps[1:], strict=False) if a.rows == b.rows == rows][1:]
    if not pairs:
        raise VBError(f"no two steps after each other wrote {rows} texts: ask for longer ones")
    return median(b.began - a.began for a, b in pairs), median(a.seconds() for a, _ in pairs)
