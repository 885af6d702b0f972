"""Conversations out of jsonl files: four ways to write them down, recognised by their keys, made into one.

========  =====================================================================  ===========================================
kind      a line                                                                 becomes
========  =====================================================================  ===========================================
messages  {"messages": [{"role": "user", "content": "..."}, ...]}                itself
sharegpt  {"conversations": [{"from": "human", "value": "..."}, ...]}            human: user; gpt: assistant
alpaca    {"instruction": "...", "input": "...", "output": "..."}                user: instruction, a blank line and input;
                                                                                 assistant: output
text      {"text": "..."}                                                        no conversation: plain text
========  =====================================================================  ===========================================

The first line decides, and every other must be of its kind. A line that cannot be used is an error with file and line: a trainer that
skips bad lines trains on something else than it was given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vblackwell.data.documents import LINES, Source, parse_line
from vblackwell.errors import ConfigurationError, nearest

KINDS = {"messages": "messages", "conversations": "sharegpt", "instruction": "alpaca"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
ANSWER = "assistant"
_UNREAD = ("tools", "functions", "history")  # what other trainers put into the prompt
_WEIGHTS = ("weight", "train", "training")  # by which others leave answers out

Message = dict[str, str]


class Conversation(NamedTuple):
    """Messages with 'role' and 'content', at least one of them an answer; and where they stand, for messages of errors."""

    messages: list[Message]
    place: str


def chat_kind(source: Source) -> str | None:
    """'messages', 'sharegpt' or 'alpaca', by the first line of the first file; None where that is not a conversation's."""
    path = source.files[0]
    if path.suffix.lower() not in LINES:
        return None
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError, RecursionError):
        return None  # whoever reads the file says what is wrong
    return _kind_of(first)


def _kind_of(record: Any) -> str | None:
    found = [kind for key, kind in KINDS.items() if isinstance(record, dict) and key in record]
    return found[0] if found else None


def conversations(source: Source, kind: str) -> Iterator[Conversation]:
    """Every line of every file, in order.

    Raises:
        ConfigurationError: a line that is no JSON, of another kind, or without roles, text or an answer; a file of another type. With
            file and line.
    """
    for path in source.files:
        if path.suffix.lower() not in LINES:
            raise ConfigurationError(
                f"{path} is no .jsonl, and {source.files[0]} holds conversations: give files of one kind"
            )
        yield from _read(path, kind)


def _read(path: Path, kind: str) -> Iterator[Conversation]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{path}: line {number}"
                    yield Conversation(_messages(_parsed(line, place), kind, place), place)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}; check its permissions") from error


def _parsed(line: bytes, place: str) -> Any:
    try:
        return parse_line(line.decode("utf-8"), place)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{place} is not UTF-8 (byte {error.start}): convert the file") from error


def _messages(record: Any, kind: str, place: str) -> list[Message]:
    found = _kind_of(record)
    if found != kind:
        what = f"is of kind {found}" if found else f"has none of the keys {', '.join(KINDS)}"
        raise ConfigurationError(f"{place} {what}, the first line is of kind {kind}: give lines of one kind")
    told = [name for name in _UNREAD if record.get(name)]
    if told:
        raise ConfigurationError(
            f"{place} has {told[0]!r}, which is not read: write it into the messages, or remove it"
        )
    if kind == "alpaca":
        return _of_alpaca(record, place)
    key = "messages" if kind == "messages" else "conversations"
    role_key, text_key = ("role", "content") if kind == "messages" else ("from", "value")
    listed = record[key]
    if not isinstance(listed, list) or not listed:
        raise ConfigurationError(f"{place}: {key!r} is no list of messages; write [{{{role_key!r}: ...}}, ...]")
    messages = [_message(item, role_key, text_key, f"{place}, message {index}") for index, item in enumerate(listed, 1)]
    system = record.get("system") if kind == "sharegpt" else None
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == ANSWER for message in messages):
        raise ConfigurationError(
            f"{place} has no message of the {ANSWER}: there is nothing to learn from it; remove it"
        )
    return messages


def _message(item: Any, role_key: str, text_key: str, place: str) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get(role_key), str):
        raise ConfigurationError(f"{place} has no {role_key!r}: say who speaks ({', '.join(_ROLES)})")
    role = _NAMES.get(item[role_key], item[role_key])
    if role not in _ROLES:
        raise ConfigurationError(
            f"{place} has the {role_key} {item[role_key]!r}, which is none of {', '.join((*_ROLES, *_NAMES))}{nearest(str(role), _ROLES)}"
        )
    # null is what writers of tables put where other lines have a weight.
    off = [name for name in _WEIGHTS if item.get(name) is not None and not item[name]]
    if off and role == ANSWER:
        raise ConfigurationError(
            f"{place} has {off[0]} {item[off[0]]!r}, and every answer is learnt here: leave it out"
        )
    if not isinstance(item.get(text_key), str):
        raise ConfigurationError(f"{place} has no text under {text_key!r}: images, tools and lists are not read")
    return {"role": role, "content": item[text_key]}


def _of_alpaca(record: dict[str, Any], place: str) -> list[Message]:
    for key in ("instruction", "output"):
        if not isinstance(record.get(key), str):
            raise ConfigurationError(
                f"{place} has no text under {key!r}: write instruction, input (may be '') and output"
            )
    more = record.get("input") or ""
    if not isinstance(more, str):
        raise ConfigurationError(f"{place}: 'input' is no text; write a string, '' for none")
    question = f"{record['instruction']}\n\n{more}" if more else record["instruction"]
    messages = [{"role": "user", "content": question}, {"role": ANSWER, "content": record["output"]}]
    system = record.get("system")
    return [{"role": "system", "content": system}, *messages] if isinstance(system, str) and system else messages
