"""Calls of tools in what a model writes. Models differ in the form; two are known, and both are read as they come, so
that arguments are told while they are written.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from vblackwell.serve.http.text import overlap


@dataclass(frozen=True)
class CallPart:
    """More of the call number ``index``: its first part has ``id`` and ``name``; ``arguments`` are part of a text of
    JSON."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


OPEN, CLOSE, PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_KEY = re.compile(r'\s*\{\s*"([^"]*)"')
_KEYS = {"name", "arguments", "parameters", "type", "id"}  # with which a call in bare JSON begins


class ToolCalls:
    """Tells calls of tools from other text. Two forms are known: JSON between ``<tool_call>`` and ``</tool_call>``
    (Hermes, Qwen), anywhere; and an answer that is JSON with a name and parameters (Llama 3), several joined by ';'.
    JSON that names none of the tools is text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names, self.count, self.ended = frozenset(names), 0, 0  # calls begun, and those whose arguments are whole
        self._state, self._text, self._tagged = self._begin, "", False
        self._depth, self._quoted, self._escaped = 0, False, False

    def add(self, text: str) -> list[str | CallPart]:
        """What ``text`` adds: text to be shown, and parts of calls."""
        self._text += text
        found = list[str | CallPart]()
        state = None
        while state is not self._state:  # until a state waits for more text
            state = self._state
            found += self._state()
        return found

    def end(self) -> list[str | CallPart]:
        """What was held back."""
        found, left = list[str | CallPart](), self._text
        if self._state == self._call:  # an unfinished call that has not been told of is text
            found.append((OPEN if self._tagged else "") + left)
        elif self._state in (self._begin, self._said) and left and not (self.count and left.isspace()):
            found.append(left)
        self._text = ""
        return found

    def _begin(self) -> Iterator[str | CallPart]:
        """Nothing but white space so far, or between two calls in bare JSON."""
        rest = self._text.lstrip().removeprefix(";" if self.count else "").lstrip()
        if PYTHON.startswith(rest):  # it may come, or rest is empty
            return
        rest = rest.removeprefix(PYTHON).lstrip()
        if rest.startswith("{"):
            self._text, self._tagged, self._state = rest, False, self._call
        elif rest:
            self._state = self._said
        yield from ()

    def _said(self) -> Iterator[str | CallPart]:
        """Text, in which a tag may come; white space before one belongs to it."""
        before, tag, after = self._text.partition(OPEN)
        if tag:
            self._text, self._tagged, self._state = after, True, self._call
            shown = before.rstrip()
        else:
            held = overlap(before, OPEN)
            shown = before[: len(before) - held].rstrip()
            self._text = before[len(shown) :]
        if shown:
            yield shown

    def _call(self) -> Iterator[str | CallPart]:
        """JSON of a call, of which nothing has been told."""
        head = _HEAD.match(self._text)
        name = None if head is None else _string(head[1])
        if head is not None and name in self._names:
            yield self._part("", name)
            self._text, self._depth, self._quoted, self._escaped = self._text[head.end() :], 0, False, False
            self._state = self._arguments
            return
        key = _KEY.match(self._text)
        if not self._tagged and key is not None and key[1] not in _KEYS:
            self._state = self._said
            return
        whole, size = _object(self._text) if "}" in self._text else (None, 0)
        inside, tag, after = self._text.partition(CLOSE) if self._tagged else ("", "", "")
        if whole is None and not tag:
            return
        name = None if whole is None else whole.get("name")
        given = None if whole is None else whole.get("arguments", whole.get("parameters"))
        if isinstance(name, str) and name in self._names and isinstance(given, dict | str):
            yield self._part(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False), name)
            self._text, self._state, self.ended = self._text[size - 1 :], self._after, self.count
        elif self._tagged and not tag:  # JSON, but no call: its end tells where text goes on
            return
        else:
            yield f"{OPEN}{inside}{CLOSE}" if tag else self._text[:size]
            self._text, self._state = after if tag else self._text[size:], self._said

    def _arguments(self) -> Iterator[str | CallPart]:
        """The object of arguments, told as it comes."""
        for place, letter in enumerate(self._text):
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            else:
                self._quoted = letter == '"'
                self._depth += (letter in "{[") - (letter in "}]")
                if self._depth == 0:
                    yield self._part(self._text[: place + 1])
                    self._text, self._state, self.ended = self._text[place + 1 :], self._after, self.count
                    return
        if self._text:
            yield self._part(self._text)
            self._text = ""

    def _after(self) -> Iterator[str | CallPart]:
        """What closes a call."""
        if self._tagged:
            _, tag, after = self._text.partition(CLOSE)
            if tag:
                self._text, self._state = after, self._said
        else:
            _, brace, after = self._text.partition("}")
            if brace:
                self._text, self._state = after, self._begin
        yield from ()

    def _part(self, arguments: str, name: str | None = None) -> CallPart:
        self.count += name is not None
        made = None if name is None else f"call_{secrets.token_hex(12)}"
        return CallPart(self.count - 1, arguments, made, name)


def form_of(template: str) -> str | None:
    """In which form a chat template asks for calls: ``tagged`` or ``bare``; None: in none that is read here."""
    source = template.replace('\\"', '"')
    if "tools" not in source or '"name"' not in source or "<function=" in source:
        return None
    return "tagged" if OPEN in source else "bare" if '"parameters"' in source else None


def _string(text: str) -> str | None:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _object(text: str) -> tuple[dict[str, Any] | None, int]:
    """The JSON object that ``text`` begins with, and where it ends."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, 0
    return (value, end) if isinstance(value, dict) else (None, 0)
