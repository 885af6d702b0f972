"""``vb chat``: a conversation in a terminal, with the engine of ``vb serve`` and without HTTP."""

import json
import queue
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vblackwell.errors import ConfigurationError
from vblackwell.folders.checked import check_utf8
from vblackwell.serve.http.answer import Answer
from vblackwell.serve.http.prepare import Preparation
from vblackwell.serve.http.refusal import Refusal
from vblackwell.serve.http.running import refused
from vblackwell.serve.http.wire import read_chat
from vblackwell.serve.opened import Opened, opened
from vblackwell.serve.request import Done, Event
from vblackwell.serve.sources import NAME

HELP = "Enter sends, Ctrl-C stops an answer, /clear begins anew, /quit or Ctrl-D ends."
# Of C0 and C1: they move cursors, name windows and fill clipboards.
_CONTROLS = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160)) if chr(number) not in "\n\t"}


def shown(text: str) -> str:
    """``text`` as a terminal may have it: a model's control characters as their numbers, but newline and tab."""
    return text.translate(_CONTROLS)


class Conversation:
    """What was said to ``model`` and by it; ``show`` is given its text as it comes, ``options`` are fields of a chat's
    body."""

    def __init__(
        self, ready: Opened, model: str, system: str | None, show: Callable[[str], None], **options: Any
    ) -> None:
        self._ready, self._model, self._show, self._options = ready, model, show, options
        self._prepare = Preparation(ready.fleet, ready.chats)
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list[dict[str, str]](self._first)

    def clear(self) -> None:
        """Forget what was said."""
        self.messages = list(self._first)

    def say(self, text: str) -> str:
        """The answer to ``text``, as far as it came where Ctrl-C stopped it. Raises Refusal; nothing was said then."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self._model, "messages": messages, **self._options}
        _, (answer,) = self._prepare(read_chat, json.dumps(body).encode())
        said = self._listen(answer)
        self.messages = [*messages, {"role": "assistant", "content": said}]
        return said

    def _listen(self, answer: Answer) -> str:
        events, parts, stopped = queue.SimpleQueue[Event](), list[str](), False
        number = self._ready.engine.submit(answer.request, events.put)
        while answer.done is None:
            try:
                event = events.get()
                if isinstance(event, Done) and event.reason in ("error", "cancelled") and not stopped:
                    answer.done = event
                    raise ConfigurationError("the engine is closed") if event.error is None else refused(event.error)
                piece = answer.end(event) if isinstance(event, Done) else answer.add(event)
                if piece is not None and piece.text:
                    parts.append(piece.text)
                    self._show(piece.text)
            except KeyboardInterrupt:
                stopped = True
                self._ready.engine.cancel(number)
        return "".join(parts)


def chat_command(
    model: str,
    budget: str | None = None,
    host_memory: str | None = None,
    system: str | None = None,
    temperature: float = 0.7,
    top_p: float = 1.0,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    device: torch.device | str = "cpu",
) -> int:
    """Talks until /quit or the end of standard input; 0. Raises VBError."""

    to_terminal = sys.stdout.isatty()

    def show(text: str) -> None:
        print(shown(text) if to_terminal else text, end="", flush=True)

    check_utf8("--system", system or "")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigurationError(f"--max-new-tokens {max_new_tokens}: give a whole number from 1 on")
    options = {"temperature": temperature, "top_p": top_p, "max_tokens": max_new_tokens, "seed": seed}
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - input() then edits lines and has those before
    folder, given = Path(model), model
    if "=" not in model and folder.is_dir() and not NAME.fullmatch(folder.resolve().name):  # nobody asks for it by name
        given = f"model={model}"
    with opened([given], budget, host_memory, device) as ready:
        (name,) = ready.fleet.models
        if name not in ready.chats:
            raise ConfigurationError(
                f"{model} has no chat template: use vb generate, or a model made for conversations"
            )
        limit = ready.fleet.models[name].position_limit
        if max_new_tokens is not None and limit is not None and 0 < limit <= max_new_tokens:
            raise ConfigurationError(f"--max-new-tokens {max_new_tokens}: {model} reads {limit} tokens: give fewer")
        talk = Conversation(ready, name, system, show, **options)
        if is_terminal:
            print(f"{name}. {HELP}", file=sys.stderr)
        while True:
            try:
                text = input("> " if is_terminal else "").strip()
            except EOFError:
                break
            except UnicodeDecodeError as error:
                raise ConfigurationError("standard input is not UTF-8 text") from error
            except KeyboardInterrupt:  # a line that was begun
                print()
                continue
            if text == "/quit":
                break
            if text == "/clear":
                talk.clear()
            elif text == "/help":
                print(HELP, file=sys.stderr)
            elif re.fullmatch("/[a-z]+", text):
                print(f"vb: no such command: {text}. {HELP}", file=sys.stderr)
            elif text:
                try:
                    check_utf8("the line", text)
                except ConfigurationError as error:
                    print(f"vb: {error}", file=sys.stderr)
                    continue
                try:
                    talk.say(text)
                    print()
                except Refusal as refusal:  # a text that is too long, say: the conversation stays
                    print(f"vb: {refusal}; /clear begins anew", file=sys.stderr)
    return 0
