"""``vb serve``: listens, opens models, answers, and ends cleanly."""

import asyncio
import math
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.serve.opened import CLOSING_SECONDS, opened

try:
    import uvicorn

    from vblackwell.serve.http.connection import Connection
    from vblackwell.serve.http.server import Server
except ImportError as error:
    raise Unsupported(f"vb serve needs {error.name}: pip install 'vblackwell[serve]'") from error

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_WORDS_SECONDS = 5  # for clients to take what was written when the engine has closed
SWITCH_S = 0.0005  # that HTTP may keep Python from the engine, whose steps take some ms


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything is loaded; raises ConfigurationError where it cannot."""
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"--port {port}: give a number from 1 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"--host {host} --port {port}: {reason}; give another --port or --host") from error


def read_keys(path: str | None, flag: str) -> list[str]:
    """The keys in a file, a line each; raises ConfigurationError for a file without any, or that others may read."""
    if path is None:
        return []
    try:
        file = Path(path)
        keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        mode = file.stat().st_mode
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{flag} {path} is no text: write a key a line") from error
    if not keys:
        raise ConfigurationError(f"{flag} {path} has no key: write one a line, e.g. by openssl rand -hex 32")
    if mode & 0o007:
        raise ConfigurationError(f"{flag} {path} is open to everybody: chmod 600 {path}")
    return keys


class Listener(uvicorn.Server):
    """HTTP on ``listening``, until SIGINT or SIGTERM; then ``server`` takes nothing new, and what is being written may
    end within ``grace_seconds``, or at once where a second signal comes."""

    def __init__(self, server: Server, listening: socket.socket, grace_seconds: float = CLOSING_SECONDS) -> None:
        super().__init__(
            uvicorn.Config(
                server.app,
                loop="asyncio",
                http=Connection,
                ws="none",
                lifespan="off",
                log_level="critical",  # the server itself logs what fails in it
                access_log=False,
                server_header=False,
                # clients that do not read hear nothing of the end, and are not waited for longer
                timeout_graceful_shutdown=math.ceil(grace_seconds) + LAST_WORDS_SECONDS,
            )
        )
        self._server, self._listening, self._grace_seconds = server, listening, grace_seconds
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            await super().serve(sockets or [self._listening])
        finally:
            sys.setswitchinterval(interval)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """The engine ends the texts, so that clients hear why; it is waited for in a thread."""
        if not self.should_exit:
            self.should_exit = True
            self._server.close(self._grace_seconds)
        elif self._loop is not None:
            with suppress(RuntimeError):  # the loop may have ended
                self._loop.call_soon_threadsafe(self._server.cancel)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As the parent's, but that a signal which ended the server is not raised again, and that the handlers stay:
        models are given back after the last answer. See `signals_kept`."""
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                signal.signal(each, self.handle_exit)
        yield


@contextmanager
def signals_kept() -> Iterator[None]:
    """The handlers of SIGINT and SIGTERM are afterwards what they were."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for each, handler in before.items():
                signal.signal(each, handler)


def serve_command(
    models: list[str],
    budget: str | None = None,
    host_memory: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key_file: str | None = None,
    admin_key_file: str | None = None,
    pin: str | None = None,
    keep_alive: float | None = None,
    device: torch.device | str = "cpu",
) -> int:
    """Answers until SIGINT or SIGTERM; 0. Raises VBError."""
    keys, admin_keys = read_keys(api_key_file, "--api-key-file"), read_keys(admin_key_file, "--admin-key-file")
    local = host in ("localhost", "127.0.0.1", "::1")
    if not local and not keys:
        raise ConfigurationError(f"--host {host} serves whoever reaches this machine: give --api-key-file as well")
    with ExitStack() as cleanup:
        cleanup.enter_context(signals_kept())
        listening = cleanup.enter_context(listen(host, port))
        pinned = [name.strip() for name in (pin or "").split(",") if name.strip()]
        ready = cleanup.enter_context(opened(models, budget, host_memory, device, pinned, keep_alive))
        server = Server(
            ready.engine,
            ready.fleet,
            ready.chats,
            api_keys=keys,
            admin_keys=admin_keys,
            hosts=LOOPBACK if local else None,
        )
        at = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        print(f"{', '.join(ready.fleet.models)} at {at}/v1, a page to chat at {at}/", flush=True)
        asyncio.run(Listener(server, listening).serve())
        print("vb: closing", file=sys.stderr)
    return 0
