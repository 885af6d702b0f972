"""OpenAI's HTTP interface over the engine. The loop of HTTP never waits for the engine, and texts are read in worker
threads. Nothing of a request names a path or a hub id.
"""

import asyncio
import hmac
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import aclosing
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vblackwell.errors import VBError
from vblackwell.serve.http.metrics import Metrics
from vblackwell.serve.http.prepare import Chat, Preparation
from vblackwell.serve.http.refusal import Refusal
from vblackwell.serve.http.running import Limits, Running, refused
from vblackwell.serve.http.wire import Asked, Reply, event, read_chat, read_completion, read_embedding, read_json

PAGE = Path(__file__).with_name("chat.html")
# The page runs its own script and talks to this server alone.
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_log = logging.getLogger(__name__)
STALLED_SECONDS = 60.0  # without a step, an engine that has work is not well
Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """The application ``app`` for the models of ``fleet``; those that can chat are in ``chats``.

    ``api_keys``: one of them must come with each request, if there are any; ``admin_keys``: one of them, to load and
    unload models. ``hosts``: names by which the server is called, None for any: a page that a browser shows must not
    reach a server of this machine under a name of its own.
    """

    def __init__(
        self,
        engine: Any,
        fleet: Any,
        chats: Mapping[str, Chat],
        *,
        api_keys: Collection[str] = (),
        admin_keys: Collection[str] = (),
        hosts: Collection[str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._engine, self._fleet, self._prepare = engine, fleet, Preparation(fleet, chats)
        self._keys, self._admin_keys, self._hosts = tuple(api_keys), tuple(admin_keys), hosts
        self._limits, self._metrics, self._created = limits or Limits(), Metrics(), int(time.time())
        self.closing, self._running = False, WeakSet[Running]()
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        routes: list[tuple[str, str, Handler]] = [
            ("/", "GET", self._page),
            ("/health", "GET", self._health),
            ("/metrics", "GET", self._show_metrics),
            ("/v1/models", "GET", self._models),
            ("/v1/models/{name:path}", "GET", self._model),
            ("/v1/chat/completions", "POST", partial(self._answer, read_chat)),
            ("/v1/completions", "POST", partial(self._answer, read_completion)),
            ("/v1/embeddings", "POST", partial(self._answer, read_embedding)),
            ("/admin/load", "POST", partial(self._admin, "wake")),
            ("/admin/unload", "POST", partial(self._admin, "sleep")),
        ]
        for path, method, handle in routes:
            route: Any = _Route(partial(self._handled, path, handle))
            self.app.add_route(path, route, methods=[method])
        self.app.add_exception_handler(HTTPException, _no_route)
        around: Any = partial(_Watched, check=self._check_host, answered=self._metrics.answered)
        self.app.add_middleware(around)

    def close(self, grace_seconds: float) -> None:
        """Take no new request; the texts that are being written end, within so many seconds. Returns at once."""
        self.closing = True
        threading.Thread(target=self._engine.close, args=(grace_seconds,), daemon=True).start()

    def cancel(self) -> None:
        """End them now. In the loop of HTTP."""
        for running in [*self._running]:
            running.cancel()

    # -- what every request passes -------------------------------------------------------------------------------------

    async def _handled(self, route: str, handle: Handler, request: Request) -> Response:
        """The response of ``handle``, or what is said of its Refusal."""
        request.state.route = route
        try:
            return await handle(request)
        except Refusal as refusal:
            return JSONResponse(refusal.body, refusal.status, refusal.headers)
        except Exception as error:  # a fault of ours, which the client is told as such
            return JSONResponse(_failed(error).body, 500)

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host", "").lower()
        name, _, port = host.rpartition(":")
        if self._hosts is not None and (name if port.isdecimal() else host) not in self._hosts:
            raise Refusal(403, "this server goes by another name: `vb serve --host` says to whom it answers")

    def _check_key(self, request: Request, keys: Collection[str]) -> None:
        """Raises Refusal unless one of ``keys`` came with the request; each is compared, in constant time."""
        given = request.headers.get("authorization", "")
        given = given[7:].strip() if given[:7].lower() == "bearer " else ""
        raw = given.encode("latin-1")  # as which headers are read
        same = [hmac.compare_digest(raw, key.encode()) for key in keys]
        if not any(same):
            refusal = Refusal(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            raise refusal

    def _check_api_key(self, request: Request) -> None:
        if self._keys:
            self._check_key(request, (*self._keys, *self._admin_keys))

    async def _body(self, request: Request) -> bytes:
        """The body; raises Refusal for one that is no JSON, too large or too slow."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a page of another site cannot send unasked
            raise Refusal(415, "the header Content-Type: application/json is needed")
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise Refusal(415, f"Content-Encoding {coding[:50]!r}: send the body as it is")
        if self.closing:
            raise Refusal(503, "the server is closing")
        most, body = self._limits.body_bytes, bytearray()
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > most:
            raise Refusal(413, f"a body of {length[:20]} bytes is more than {most}")
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise Refusal(413, f"the body has more than {most} bytes")
        except TimeoutError as error:
            raise Refusal(408, f"the body did not come within {self._limits.body_seconds:g} s") from error
        except ClientDisconnect as error:
            raise Refusal(400, "the body ended early") from error
        return bytes(body)

    # -- texts ---------------------------------------------------------------------------------------------------------

    async def _answer(self, read: Callable[[dict[str, Any]], Asked], request: Request) -> Response:
        self._check_api_key(request)
        raw = await self._body(request)
        asked, answers = await run_in_threadpool(self._prepare, read, raw)
        running, reply = Running(self._engine, answers, self._limits, self._metrics), Reply(asked)
        self._running.add(running)
        running.start(asked.source)
        if asked.stream:
            return _Events(_events(reply, running), running)
        try:
            return await _unless_gone(request, _whole(reply, running))
        finally:
            running.cancel()

    # -- models, health, metrics ---------------------------------------------------------------------------------------

    def _described(self, name: str) -> dict[str, Any]:
        served = self._prepare.served(name)
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "vblackwell"}
        return about | {"state": served.state, "pinned": served.pinned, "max_model_len": served.position_limit}

    async def _models(self, request: Request) -> Response:
        self._check_api_key(request)
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self._fleet.models]})

    async def _model(self, request: Request) -> Response:
        self._check_api_key(request)
        return JSONResponse(self._described(request.path_params["name"]))

    async def _admin(self, order: str, request: Request) -> Response:
        """Wake a model or let it sleep, between two steps of the engine."""
        if not self._admin_keys:
            raise Refusal(403, "no admin key is set: start the server with --admin-key-file")
        self._check_key(request, self._admin_keys)
        name = read_json(await self._body(request)).get("model")
        self._prepare.served(name)
        try:
            await asyncio.wrap_future(getattr(self._engine, order)(name))
        except VBError as error:
            raise refused(error) from error
        return JSONResponse(self._described(str(name)))

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(_page(), headers={"Content-Security-Policy": PAGE_POLICY, "X-Frame-Options": "DENY"})

    async def _health(self, request: Request) -> Response:
        state = self._engine.state()
        busy = any(model.running or model.waiting for model in state.models.values())
        well = state.alive and not self.closing and not (busy and state.last_step_age_s > STALLED_SECONDS)
        return JSONResponse({"ok": well, "last_step_age_s": round(state.last_step_age_s, 3)}, 200 if well else 503)

    async def _show_metrics(self, request: Request) -> Response:
        self._check_api_key(request)
        lines = self._metrics.lines(self._engine.state())
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")


def _failed(error: Exception) -> Refusal:
    """What a client is told of an error that nobody expected; the log has where it came from."""
    _log.error("a request failed", exc_info=error)
    return Refusal(500, f"this server failed at the request: {type(error).__name__}; its log says more")


@cache
def _page() -> str:
    return PAGE.read_text(encoding="utf-8")


async def _whole(reply: Reply, running: Running) -> Response:
    pieces = [piece async for found in running.pieces() for piece in found]
    return JSONResponse(await run_in_threadpool(reply.whole, pieces, running.answers))


async def _events(reply: Reply, running: Running) -> AsyncIterator[str]:
    firsts = [reply.first(answer.index) for answer in running.answers]
    told = "".join(event(first) for first in firsts if first is not None)
    try:
        async with aclosing(running.pieces()) as pieces:
            async for found in pieces:
                told += "".join(event(chunk) for piece in found for chunk in reply.pieces(piece))
                yield told or ": still at it\n\n"  # a comment, which clients pass over
                told = ""
        if (last := reply.last(running.answers)) is not None:
            yield event(last)
    except Refusal as refusal:
        yield event(refusal.body)
    except Exception as error:  # as in `_handled`, after the status was sent
        yield event(_failed(error).body)
    yield "data: [DONE]\n\n"


class _Events(StreamingResponse):
    """A stream of events that ends its texts however it ends itself, also before it began."""

    def __init__(self, content: AsyncIterator[str], running: Running) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """What ``work`` returns; its end is not waited for once the client has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=499)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class _Watched:
    """Around ``app``: each request passes ``check``, and each answer is told to ``answered``, those without a route as
    well."""

    def __init__(self, app: ASGIApp, check: Callable[[Request], None], answered: Callable[[str, int], None]) -> None:
        self._app, self._check, self._answered = app, check, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        request.state.route = "none"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(request.state.route, message["status"])
            await send(message)

        try:
            self._check(request)
        except Refusal as refusal:
            await JSONResponse(refusal.body, refusal.status)(scope, receive, counted)
        else:
            await self._app(scope, receive, counted)


class _Route:
    """A handler as an application: the framework asks nothing about its arguments."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handle(Request(scope, receive, send))
        await response(scope, receive, send)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return JSONResponse(Refusal(error.status_code, said).body, error.status_code, error.headers)
