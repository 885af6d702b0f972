"""The texts of one HTTP request in the engine, and their events in the loop of HTTP, which never waits for it."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vblackwell.errors import ConfigurationError, Unsupported, VBError
from vblackwell.serve import request as ask
from vblackwell.serve.http.answer import Answer, Piece
from vblackwell.serve.http.metrics import Metrics
from vblackwell.serve.http.refusal import Refusal


@dataclass(frozen=True)
class Limits:
    """Of one request: bytes of its body, seconds in which that must have come, and in which it must be answered. A
    stream says every ``keep_alive_seconds`` that it lives, as clients give up without."""

    body_bytes: int = 8 << 20
    body_seconds: float = 60.0
    seconds: float = 1800.0
    keep_alive_seconds: float = 10.0


class Running:
    """Made in the loop of HTTP, which takes the pieces; ``metrics`` count what comes."""

    def __init__(self, engine: Any, answers: Sequence[Answer], limits: Limits, metrics: Metrics) -> None:
        self.answers = answers
        self._engine, self._limits, self._metrics, self._numbers = engine, limits, metrics, dict[int, int]()
        self._events, self._came = deque[tuple[Answer, ask.Event]](), asyncio.Event()
        self._loop, self._begun = asyncio.get_running_loop(), time.monotonic()
        self._waits = True  # for the first new token

    def start(self, prompt: str) -> None:
        """Hand all texts to the engine, or none; raises Refusal. ``prompt``: the field that they are from."""
        try:
            for answer in self.answers:
                self._numbers[answer.index] = self._submit(answer)
        except VBError as error:
            self.cancel()
            raise refused(error, prompt) from error

    def _submit(self, answer: Answer) -> int:
        hear = partial(self._hear, answer)
        try:
            return self._engine.submit(answer.request, hear)
        except ask.RequestTooLong as error:
            room = error.limit - len(answer.request.tokens)
            if not answer.open_ended or room < 1:
                raise
            answer.request = replace(answer.request, max_new_tokens=room)  # as many as there is memory for
            return self._engine.submit(answer.request, hear)

    def _hear(self, answer: Answer, event: ask.Event) -> None:
        """In the engine's thread. The loop is woken once for all that came since it last looked,
        and may have gone on to other clients."""
        if isinstance(event, ask.Done):
            self._metrics.count(event)
        self._events.append((answer, event))
        if len(self._events) == 1:
            with suppress(RuntimeError):  # the loop may have ended
                self._loop.call_soon_threadsafe(self._came.set)

    def cancel(self) -> None:
        """End what has not ended."""
        while self._numbers:
            self._engine.cancel(self._numbers.popitem()[1])

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Pieces of all texts, those that came at the same time together; none where none came for a while. Raises
        Refusal."""
        yield [piece for answer in self.answers if (piece := answer.begin()) is not None]
        while any(answer.done is None for answer in self.answers):
            spent = time.monotonic() - self._begun
            if spent > self._limits.seconds:
                raise Refusal(408, f"the answer takes more than {self._limits.seconds:g} s", code="timeout")
            try:
                async with asyncio.timeout(min(self._limits.keep_alive_seconds, self._limits.seconds - spent + 0.01)):
                    await self._came.wait()
            except TimeoutError:
                yield []
                continue
            self._came.clear()
            found = list[Piece | None]()
            while self._events:
                found.append(self._taken(*self._events.popleft()))
            if told := [piece for piece in found if piece is not None]:
                yield told

    def _taken(self, answer: Answer, event: ask.Event) -> Piece | None:
        if isinstance(event, ask.Done):
            self._numbers.pop(answer.index, None)
            return self._end(answer, event)
        if self._waits and isinstance(event, ask.Token) and not event.of_prompt:
            self._waits = False
            self._metrics.first_token(time.monotonic() - self._begun)
        piece = answer.add(event)
        if answer.over and answer.index in self._numbers:
            self._engine.cancel(self._numbers.pop(answer.index))
        return piece

    def _end(self, answer: Answer, done: ask.Done) -> Piece:
        if done.reason == "error" or (done.reason == "cancelled" and not answer.over):
            answer.done = done
            raise refused(done.error or ask.EngineClosed("the server is closing"))
        return answer.end(done)


def refused(error: VBError, prompt: str | None = None) -> Refusal:
    """What the client is told of an error of the engine; ``prompt``: the field that the text is from."""
    match error:
        case ask.Busy():
            refusal = Refusal(429, str(error), code="queue_full")
            refusal.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
            return refusal
        case ask.UnknownModel():
            return Refusal(404, str(error), "model", "model_not_found")
        case ask.RequestTooLong():
            return Refusal(400, str(error), prompt, "context_length_exceeded")
        case ask.EngineClosed():
            return Refusal(503, str(error))
        case Unsupported():
            return Refusal(422, str(error), code="unsupported_parameter")
        case ConfigurationError():
            named = {"tokens": prompt, "logit_bias": "logit_bias"}  # which the engine's errors begin with
            return Refusal(400, str(error), named.get(str(error).partition(":")[0]))
    return Refusal(500, str(error))
