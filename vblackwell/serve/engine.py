"""The engine: one thread that takes requests in, runs passes of the models that have some, and tells what came of it.

Any thread may submit and cancel; events come from the engine's thread, and what takes long in ``on_event`` holds all
texts up. A text that cannot go on (logits that are not finite, a grammar that raises, a listener that raises) ends
alone. Where a pass fails its texts are tried one by one, so that only those fail that fail by themselves.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, CorruptData, Unsupported, VBError, nearest
from vblackwell.serve.draw import Drawing, Drawn, draw, on_device, tell, why_no_token, why_not_told
from vblackwell.serve.paged_model import PagedModel, Share, block_bytes_of
from vblackwell.serve.pages import PagePool
from vblackwell.serve.pooling import add_rows, vector_of
from vblackwell.serve.request import (
    Busy,
    Done,
    EngineClosed,
    EngineState,
    Event,
    ModelState,
    Pooled,
    Request,
    RequestTooLong,
    ServingFleet,
    Token,
    UnknownModel,
)
from vblackwell.serve.row_tiles import products_in_threads
from vblackwell.serve.scheduler import Pass, Scheduler, Text

_log = logging.getLogger(__name__)
CACHE_BYTES = 256 << 20  # of keys and values, unless told
CPU_ROWS, GPU_ROWS = 64, 1024  # of a pass: a CPU is slow enough that fewer keep all texts moving
IDLE_S = 0.5  # between two looks for work that nobody announces
RETRY_S = (1.0, 60.0)  # least and most that a client is told to wait
Reason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class _Flight:
    """A pass that was launched: the texts that get a token of it, the tokens, and the logits that they are from; the
    vectors of those that are embedded."""

    drawing: Sequence[Text]
    drawn: Drawn | None
    logits_LV: Tensor
    pooled: Sequence[tuple[Text, Tensor]]


class Engine:
    """Answers requests for the models of ``fleet``; its thread runs until `close`.

    max_waiting: requests that have not begun; more are refused (Busy). max_running: texts of a model in one pass.
    max_rows: tokens of a pass, by default 64 on a CPU and 1024 on a GPU. cache_bytes: for keys and values of all
    models, by default 256 MiB. turn_s: how long a model goes on while another, which would have to be loaded, waits.

    Raises ConfigurationError where a value is out of range or the bytes hold no page; what ``fleet.reserve`` raises.
    """

    def __init__(
        self,
        fleet: ServingFleet,
        *,
        max_waiting: int = 256,
        max_running: int = 64,
        max_rows: int | None = None,
        cache_bytes: int = CACHE_BYTES,
        turn_s: float = 2.0,
    ) -> None:
        for name, value in (("max_waiting", max_waiting), ("max_running", max_running), ("max_rows", max_rows)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} {value}: give at least 1")
        if turn_s < 0:
            raise ConfigurationError(f"turn_s {turn_s}: give seconds, 0 or more")
        self._fleet, self._max_waiting = fleet, max_waiting
        models = [PagedModel(served) for served in fleet.models.values()]
        if not models:
            raise ConfigurationError("an engine without a model: give the fleet at least one")
        gpu = any(model.served.device.type == "cuda" for model in models)
        self._memory: Tensor | None = None
        total, block, sunk = 1, 0, None
        if any(model.paged for model in models):
            block = block_bytes_of(models)
            total = cache_bytes // block
            if total < 1:
                raise ConfigurationError(
                    f"cache_bytes {cache_bytes}: a page of keys and values takes {block}; give more"
                )
            self._memory = fleet.reserve(total * block)
            for model in models:
                if model.paged:
                    model.place(self._memory, block)
            sunk = fleet.reserve_ram(self._memory, block)
        self._pool, self._page_bytes = PagePool(total, sunk), block
        rows = max_rows or (GPU_ROWS if gpu else CPU_ROWS)
        self._scheduler = Scheduler(models, self._pool, max_rows=rows, max_running=max_running, turn_s=turn_s)
        self._change = threading.Condition()
        self._numbers = itertools.count(1)
        # Of other threads, under the condition's lock:
        self._incoming = list[Text]()
        self._cancelled = set[int]()
        self._orders = list[tuple[Callable[[], None], Future[None]]]()
        self._not_begun = set[int]()
        self._closing_at: float | None = None
        self._alive = True
        # Of the engine's thread:
        self._texts = dict[int, Text]()
        self._steps = self._tokens = 0
        self._last_step = self._last_end = time.monotonic()
        self._interval_s = RETRY_S[0]  # between two ends of texts, lately
        self._told_of_idle = ""
        self._thread = threading.Thread(target=self._run, name="vb serve engine", daemon=True)
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> int:
        """The number of a request that is on its way from now on. Raises UnknownModel, RequestTooLong, Busy,
        EngineClosed, Unsupported for what its model cannot do, ConfigurationError for tokens it does not have."""
        self._check(request)
        with self._change:
            if self._closing_at is not None or not self._alive:
                raise EngineClosed("the engine is closed and takes no more requests")
            if len(self._not_begun) >= self._max_waiting:
                wait_s = min(max(self._interval_s, RETRY_S[0]), RETRY_S[1])
                raise Busy(
                    f"{len(self._not_begun)} requests wait, and {self._max_waiting} may: try again in {wait_s:.0f} s",
                    retry_after_s=wait_s,
                )
            number = next(self._numbers)
            self._not_begun.add(number)
            self._incoming.append(Text(number, request, on_event, [*request.tokens], Drawing(request)))
            self._change.notify()
        return number

    def cancel(self, number: int) -> None:
        """The request ends with Done("cancelled") after the passes under way, two at the most, unless it is over; its
        pages are free then."""
        with self._change:
            self._cancelled.add(number)
            self._change.notify()

    def wake(self, model: str) -> Future[None]:
        """Bring a model's weights up between two passes. Raises UnknownModel; the rest comes with the result."""
        served = self._line(model).model.served
        return self._order(served.wake)

    def sleep(self, model: str) -> Future[None]:
        """Let a model's weights go. Raises UnknownModel; the result is Busy where it has requests."""
        line = self._line(model)
        weights = getattr(line.model.served, "weights", None)  # which adapters over one base share
        lines = self._scheduler.lines.values()
        alike = [each for each in lines if weights and getattr(each.model.served, "weights", None) is weights]

        def sleep() -> None:
            for each in alike or [line]:
                if count := len(each.waiting) + len(each.running):
                    said = f"{each.name} has {count} requests: let them end first"
                    raise Busy(said, retry_after_s=self._interval_s)
            line.model.served.sleep()

        return self._order(sleep)

    def state(self) -> EngineState:
        """How it stands now; numbers of one moment may be a step apart."""
        models = {}
        for name, line in self._scheduler.lines.items():
            with self._change:
                coming = sum(text.request.model == name for text in self._incoming)
            counts = len(line.waiting) + coming, len(line.running)
            models[name] = ModelState(line.model.served.state, *counts, line.model.paged, line.model.reason)
        age_s = time.monotonic() - self._last_step
        pool = self._pool
        pages = pool.used, pool.total, pool.sunk, pool.sunk_total, self._page_bytes
        return EngineState(models, *pages, self._steps, self._tokens, age_s, self._alive)

    def close(self, grace_s: float = 30.0) -> None:
        """Take no more requests, let those that came end for so many seconds, cancel the others, and give the pages
        back. Idempotent."""
        with self._change:
            if self._closing_at is None:
                self._closing_at = time.monotonic() + grace_s
            self._change.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _order(self, act: Callable[[], None]) -> "Future[None]":
        future = Future[None]()
        with self._change:
            if self._closing_at is not None or not self._alive:
                raise EngineClosed("the engine is closed")
            self._orders.append((act, future))
            self._change.notify()
        return future

    def _line(self, model: str) -> Any:
        lines = self._scheduler.lines
        if model not in lines:
            raise UnknownModel(f"no model {model!r} is served: choose one of {', '.join(lines)}{nearest(model, lines)}")
        return lines[model]

    def _check(self, request: Request) -> None:
        model: PagedModel = self._line(request.model).model
        vocabulary = _vocabulary(model)
        for what, tokens in (("tokens", request.tokens), ("logit_bias", request.logit_bias)):
            if outside := [token for token in tokens if not 0 <= token < vocabulary]:
                raise ConfigurationError(
                    f"{what}: {request.model} has no token {outside[0]}: give numbers from 0 to {vocabulary - 1}"
                )
        wanted, limit = len(request.tokens) + request.max_new_tokens, model.served.position_limit
        what = f"{len(request.tokens)} tokens and {request.max_new_tokens} new ones"
        not_read = request.max_new_tokens == 1  # the one that is drawn
        if limit is not None and 0 < limit < wanted - not_read:  # transformers has -1 for none
            raise RequestTooLong(f"{what}: {request.model} reads {limit}: ask for fewer", wanted=wanted, limit=limit)
        if not model.paged:
            if request.prompt_logprobs or request.pooling:
                what = "pooling" if request.pooling else "prompt_logprobs"
                raise Unsupported(f"{what}: {request.model} reads one text at a time, as {model.reason}")
            return
        held = model.positions * self._pool.total
        if wanted - (request.pooling is None) > held:  # a last token that is drawn is not read
            raise RequestTooLong(
                f"{what}: the pages for keys and values hold {held}: ask for fewer, or give more by --budget (of an "
                "Engine: cache_bytes)",
                wanted=wanted,
                limit=held + 1,
            )

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            device = next(iter(self._scheduler.lines.values())).model.served.device
            if device.type == "cuda":
                torch.cuda.set_device(device)
            while self._take_in():
                found = self._scheduler.next_pass()
                with self._change:
                    self._not_begun -= {text.number for text, _ in found.parts} if found else set()
                if found is not None:
                    self._step(found)
                self._last_step = time.monotonic()
        except BaseException as error:
            _log.exception("the engine ends")
            failed = VBError(f"the engine ended: {type(error).__name__}: {error}")
            self._stop(failed)
            raise
        self._stop(None)

    def _stop(self, error: VBError | None) -> None:
        with self._change:
            self._alive = False
            self._texts |= {text.number: text for text in self._incoming}
            orders, self._incoming, self._orders = self._orders, [], []
        for text in [*self._texts.values()]:
            self._tell(text, _done(text, "cancelled" if error is None else "error", error))
        for _, future in orders:
            if future.set_running_or_notify_cancel():
                future.set_exception(error or EngineClosed("the engine is closed"))
        self._texts.clear()
        for line in self._scheduler.lines.values():
            line.model.forget()
        if self._memory is not None:
            self._fleet.release(self._memory)
            self._memory = None

    def _take_in(self) -> bool:
        """Note what other threads want, waiting where there is nothing to do; False where all is over."""
        self._let_idle_sleep()
        for line in self._scheduler.lines.values():
            line.model.forget_unless_whole()
        with self._change:
            while not (self._texts or self._incoming or self._orders or self._closing_at is not None):
                self._cancelled.clear()  # of texts that are over
                self._change.wait(IDLE_S)
                self._last_step = time.monotonic()
                if not (self._incoming or self._orders):
                    break  # to let idle models sleep, which nobody who submits should wait for
            incoming, self._incoming = self._incoming, []
            cancelled, self._cancelled = self._cancelled, set()
            closing = self._closing_at
        if not self._texts:
            self._last_end = time.monotonic()  # what was idle is no time between two ends
        for text in incoming:
            self._texts[text.number] = text
            self._scheduler.add(text)
        for number in cancelled:
            if number in self._texts:
                self._end(self._texts[number], "cancelled")
        self._obey()
        return closing is None or (bool(self._texts) and time.monotonic() < closing)

    def _let_idle_sleep(self) -> None:
        """Models without texts, that is."""
        with self._change:
            busy = {text.request.model for text in self._incoming}
        busy |= {name for name, line in self._scheduler.lines.items() if line.waiting or line.running}
        try:
            self._fleet.sleep_idle(busy)
        except Exception as error:  # no text is to end for it; said once
            if str(error) != self._told_of_idle:
                _log.exception("idle models do not sleep")
                self._told_of_idle = str(error)

    def _obey(self) -> None:
        """What `wake` and `sleep` were called for, one after the other."""
        while True:
            with self._change:
                if not self._orders:
                    return
                act, future = self._orders.pop(0)
            if not future.set_running_or_notify_cancel():  # nobody waits for it any more
                continue
            try:
                act()
            except BaseException as error:
                future.set_exception(error)  # it is the caller's
                if not isinstance(error, Exception):
                    raise
            else:
                future.set_result(None)

    def _step(self, found: Pass) -> None:
        on_cpu = found.line.model.served.device.type == "cpu"
        with products_in_threads() if on_cpu else nullcontext():
            self._run_passes(found)

    def _run_passes(self, found: Pass) -> None:
        """A pass; and, where its tokens are all that the next one reads, that too before they are here, and so on."""
        flight, until = self._attempt(found), time.monotonic() + IDLE_S
        if flight is not None:
            self._scheduler.advance(found)
        while flight is not None:
            called = self._incoming or self._cancelled or self._orders
            last = min(until, self._closing_at or until)
            following = None if called or time.monotonic() > last else self._scheduler.following(found)
            coming = error = None
            if following is not None:
                try:
                    coming = self._launch(following, flight)
                except torch.AcceleratorError:
                    raise
                except Exception as raised:  # as in `_attempt`, once the tokens before it are told
                    error = raised
            self._land(flight)
            self._scheduler.begin_turn()
            if following is not None and error is None:
                self._scheduler.advance(following)
                found = following
            elif error is not None:
                self._failed(found, error)
            self._last_step, flight = time.monotonic(), coming

    def _attempt(self, found: Pass) -> "_Flight | None":
        try:
            return self._launch(found, None)
        except torch.AcceleratorError:  # the device is lost, for all texts to come
            raise
        except Exception as error:  # a pass can fail in any way that a device, a disk or foreign code can
            self._failed(found, error)
            return None

    def _launch(self, found: Pass, before: "_Flight | None") -> "_Flight":
        """Run a pass and draw its tokens, which are on their way then; ``before`` has the tokens that it reads, where
        they are not known yet."""
        model, shares = found.line.model, list[Share]()
        for text, count in found.parts:
            read = text.tokens[text.computed : text.computed + count] if before is None else [0]
            draws = text.request.pooling is None and (before is not None or count == text.left)
            wanted = count if text.tells_prompt else int(draws)
            shares.append(Share(read, text.computed, text.pages, wanted, found.of_prompts))
        model.served.touch()
        pooled = list[tuple[Text, Tensor]]()
        if any(text.request.pooling for text, _ in found.parts):
            with model.keeping_rows() as kept:
                logits_LV = model.logits(shares)
            pooled = _pooled(found, *kept)
        elif before is not None:
            logits_LV = model.logits(shares, before.drawn.tokens_L if before.drawn else None)
        elif model.paged:
            logits_LV = model.logits(shares)
        else:
            text, _ = found.parts[0]
            if text.step is None:
                text.step = model.step_of(len(text.tokens) + text.request.max_new_tokens)
            logits_LV = text.step(shares[0].tokens)
        drawing = list[Text]()
        rows, at = list[int](), 0
        for (text, count), share in zip(found.parts, shares, strict=True):
            if text.tells_prompt and share.wanted:
                self._tell_prompt(text, logits_LV[at : at + share.wanted])
            at += share.wanted
            if text.request.pooling is None and (before is not None or count == text.left):
                drawing.append(text)
                rows.append(at - 1)
        if rows != [*range(len(logits_LV))]:
            logits_LV = logits_LV[on_device(rows, torch.int64, logits_LV.device)]
        drawings = [text.drawing for text in drawing]
        drawn = draw(logits_LV, drawings, int(before is not None)) if drawing else None
        return _Flight(drawing, drawn, logits_LV, pooled)

    def _land(self, flight: "_Flight") -> None:
        """Wait for the tokens of a pass, and tell them."""
        self._steps += 1
        for text, pooled_D in flight.pooled:
            text.pooled_D = pooled_D
            if not text.left:
                self._end(text, "stop" if self._tell(text, Pooled(pooled_D)) else "cancelled")
        if flight.drawn is None:
            return
        tokens, told = flight.drawn.arrive()
        for row, (text, token) in enumerate(zip(flight.drawing, tokens, strict=True)):
            if text.number not in self._texts:  # it ended since, or its listener raised
                continue
            if row in flight.drawn.errors or token < 0:
                own_V = flight.logits_LV[row] if text.drawing.changes_logits else None
                self._fail(text, flight.drawn.errors.get(row) or why_no_token(own_V))
                continue
            self._next(text, token, *told.get(row, (None, ())))

    def _failed(self, found: Pass, error: Exception) -> None:
        if len(found.parts) > 1:
            for text, _ in found.parts:
                text.alone = True
            return
        text, _ = found.parts[0]
        if text.number not in self._texts:
            return
        _log.warning("a request to %s failed", found.line.name, exc_info=error)
        self._fail(text, error)

    def _next(self, text: Text, token: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> None:
        request = text.request
        text.tokens.append(token)
        text.drawing.note(token)
        self._tokens += 1
        try:
            over = request.constraint is not None and request.constraint.accept(token)
        except Exception as error:  # a grammar is foreign code: it ends its own text and no other
            self._fail(text, error)
            return
        if not self._tell(text, Token(token, logprob, top)):
            self._end(text, "cancelled")
        elif over or token in request.end_tokens:
            self._end(text, "stop")
        elif text.drawing.drawn >= request.max_new_tokens:
            self._end(text, "length")

    def _tell_prompt(self, text: Text, logits_LV: Tensor) -> None:
        """The prompt's tokens that these rows, from the next to be read on, say something of."""
        prompt = text.request.tokens
        if not text.told:
            self._tell_or_note(text, Token(prompt[0], of_prompt=True))
        first = text.computed + 1  # of which the first row speaks
        new = prompt[max(first, text.told) : first + len(logits_LV)]
        begin = max(first, text.told) - first
        told = tell(logits_LV[begin : begin + len(new)], new, text.request.logprobs or 0) if new else []
        if (error := why_not_told(told)) is not None:
            raise error
        for token, (own, top) in zip(new, told, strict=True):
            self._tell_or_note(text, Token(token, own, top, of_prompt=True))

    def _tell_or_note(self, text: Text, token: Token) -> None:
        text.told += 1
        if not self._tell(text, token):
            self.cancel(text.number)

    def _fail(self, text: Text, error: Exception) -> None:
        # Nobody else is to find what may be wrong; what others computed is, where numbers are.
        self._pool.forget(text.pages if isinstance(error, CorruptData) else text.pages[text.found :])
        name = type(error).__name__
        known = error if isinstance(error, VBError) else VBError(f"this request failed: {name}: {error}")
        self._end(text, "error", known)

    def _end(self, text: Text, reason: Reason, error: VBError | None = None) -> None:
        self._scheduler.remove(text)
        del self._texts[text.number]
        with self._change:
            self._not_begun.discard(text.number)
        now = time.monotonic()
        self._interval_s += 0.2 * (now - self._last_end - self._interval_s)
        self._last_end = now
        self._tell(text, _done(text, reason, error))

    def _tell(self, text: Text, event: Event) -> bool:
        """Whether the listener took it."""
        try:
            text.on_event(event)
        except Exception:  # the listener's own fault, which must not end other texts
            _log.exception("a listener of request %d raised; the request ends", text.number)
            return False
        return True


def _done(text: Text, reason: Reason, error: VBError | None) -> Done:
    return Done(reason, error, len(text.request.tokens), text.cached, text.drawing.drawn)


def _pooled(found: Pass, rows_SD: Tensor) -> list[tuple[Text, Tensor]]:
    """What is kept of the texts that a pass with these rows pools, and of those that it ends their vectors."""
    told, at = list[tuple[Text, Tensor]](), 0
    for text, count in found.parts:
        if (how := text.request.pooling) is not None:
            kept_D = add_rows(how, text.pooled_D, rows_SD[at : at + count])
            told.append((text, vector_of(how, kept_D, len(text.tokens)) if count == text.left else kept_D))
        at += count
    return told


def _vocabulary(model: PagedModel) -> int:
    config = model.served.module.config
    return (config.get_text_config() if hasattr(config, "get_text_config") else config).vocab_size
