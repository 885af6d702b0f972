"""Conversations out of jsonl files, and the text that a model reads of each, with the places of the answers in it.

There are four ways to write conversations down, recognised by their keys and made into one.

========  =====================================================================
=========================================== kind      a line
    becomes
========  =====================================================================
=========================================== messages  {"messages": [{"role": "user", "content": "..."}, ...]}
    itself sharegpt  {"conversations": [{"from": "human", "value": "..."}, ...]}            human: user; gpt: assistant
alpaca    {"instruction": "...", "input": "...", "output": "..."}                user: instruction, a blank line and
input;
                                                                                 assistant: output
text      {"text": "..."}                                                        no conversation: plain text
========  =====================================================================
===========================================

The first line decides, and every other must be of its kind. A line that cannot be used is an error with file and line:
a trainer that skips bad lines trains on something else than it was given.

The text is what the tokenizer folder's chat template makes of the messages, rendered by transformers' own code. Where a
folder has none, `DEFAULT` is used, said, and written next to the trained model.

Answers are found in one of two ways. A template with ``{% generation %}`` says what the model writes. For any other,
each answer is put between two characters that stand nowhere else, inside whatever white space it begins and ends with,
because templates trim; the text without the marks must be the text without marking. What the model must learn to write
is then the answer, and the special token after it that ends the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vblackwell.data.documents import LINES, TextFiles, json_lines
from vblackwell.data.tokenizer import end_of_text_id
from vblackwell.errors import ConfigurationError, nearest
from vblackwell.folders.chat_prompt import (
    CHAT_TEMPLATE,
    bounded,
    check_written,
    open_tokenizer,
    reason_of,
    special_after,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KINDS = {"messages": "messages", "conversations": "sharegpt", "instruction": "alpaca"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
ANSWER = "assistant"
_UNREAD = ("tools", "functions", "history")  # what other trainers put into the prompt
_WEIGHTS = ("weight", "train", "training")  # by which others leave answers out

Message = dict[str, str]


class Conversation(NamedTuple):
    """Messages with 'role' and 'content', at least one of them an answer; and where they stand, for errors."""

    messages: list[Message]
    place: str


def chat_kind(source: TextFiles) -> str | None:
    """'messages', 'sharegpt' or 'alpaca', by the first line of the first file; None where it is no conversation."""
    path = source.files[0]
    if path.suffix.lower() not in LINES:
        return None
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError, RecursionError):
        return None  # reading it all says what is wrong
    return _kind_of(first)


def _kind_of(record: Any) -> str | None:
    found = [kind for key, kind in KINDS.items() if isinstance(record, dict) and key in record]
    return found[0] if found else None


def conversations(source: TextFiles, kind: str) -> Iterator[Conversation]:
    """Every line of every file, in order.

    Raises:
        ConfigurationError: a line that is no JSON, of another kind, or without roles, text or an answer; a file of
            another type. With file and line.
    """
    for path in source.files:
        if path.suffix.lower() not in LINES:
            raise ConfigurationError(
                f"{path} is no .jsonl, and {source.files[0]} holds conversations: give files of one kind"
            )
        for place, record in json_lines(path):
            yield Conversation(_messages(record, kind, place), place)


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
            f"{place} has the {role_key} {item[role_key]!r}, which is none of "
            f"{', '.join((*_ROLES, *_NAMES))}{nearest(str(role), _ROLES)}"
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


# -- templates ---------------------------------------------------------------------------------------------------------

DEFAULT = """{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'assistant' %}### Assistant:
{{ message['content'] }}{{ eos_token }}
{% elif message['role'] == 'user' %}### User:
{{ message['content'] }}

{% else %}{{ message['content'] }}

{% endif %}{% endfor %}{% if add_generation_prompt %}### Assistant:
{% endif %}"""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKS = [chr(0xE000 + number) for number in range(64)]  # private use: no text of any language has them

Span = tuple[int, int]


@dataclass(frozen=True)
class ChatTemplate:
    """How conversations are written down.

    Attributes:
        source: jinja.
        origin: where it is from, for people.
        is_default: whether the folder had none.
        special: texts of the special tokens by name ('bos_token', 'eos_token', ...), which templates refer to.
    """

    source: str
    origin: str
    is_default: bool
    special: dict[str, str] = field(default_factory=dict)

    @property
    def marks_answers(self) -> bool:
        """Whether the template says what the model writes."""
        return _GENERATION.search(self.source) is not None

    def render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The text, and the spans (from, to) of characters in it that are answers.

        Raises:
            ConfigurationError: the template refuses the conversation, or shows none of its answers as they are; with
                file and line.
        """
        if self.marks_answers:
            return self._rendered(conversation.messages, conversation.place, spans=True)
        text, _ = self._rendered(conversation.messages, conversation.place)
        begin, end = [mark for mark in _MARKS if mark not in text][:2]
        marked, _ = self._rendered(
            [_marked(message, begin, end) for message in conversation.messages], conversation.place
        )
        spans, at, shift = [], 0, 0
        while (start := marked.find(begin, at)) >= 0:
            stop = marked.find(end, start)
            if stop < 0:
                break
            spans.append((start - shift, stop - shift - 1))
            at, shift = stop + 1, shift + 2
        torn = any(marked.count(mark) != len(spans) for mark in (begin, end))
        if not spans or torn or marked.replace(begin, "").replace(end, "") != text:
            raise ConfigurationError(
                f"{conversation.place}: {self.origin} changes the answers, so what is to be learnt cannot be told from "
                "the rest: write {% generation %} around it in the template, or change the line"
            )
        return text, spans

    def turn_end(self, tokenizer: Tokenizer) -> int | None:
        """The special token that ends an answer; None if the template writes none, or takes no plain question and
        answer.
        """
        mark = _MARKS[0]
        try:
            text, _ = self._rendered(
                [{"role": "user", "content": "?"}, {"role": ANSWER, "content": mark}], "a question"
            )
        except ConfigurationError:
            return None
        return special_after(tokenizer, text.rpartition(mark)[2])

    def _rendered(self, messages: list[Message], place: str, spans: bool = False) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        special: dict[str, Any] = dict(self.special)
        try:
            with bounded():
                (text,), found = render_jinja_template(
                    conversations=[messages], chat_template=self.source, return_assistant_tokens_mask=spans, **special
                )
            check_written(text)
        except Exception as error:  # a template raises what Python does: it may divide by zero, or call itself
            raise ConfigurationError(
                f"{place}: {self.origin} refuses it ({reason_of(error)}); change the line or the template"
            ) from error
        return text, [(int(start), int(end)) for start, end in found[0]] if spans else []


def _marked(message: Message, begin: str, end: str) -> Message:
    if message["role"] != ANSWER:
        return message
    content = message["content"]
    core = content.strip()
    at = content.find(core)
    return message | {"content": f"{content[:at]}{begin}{core}{end}{content[at + len(core) :]}"}


def find_template(tokenizer: Tokenizer, path: Path) -> ChatTemplate:
    """The chat template of the tokenizer in ``path``, a folder or a tokenizer.json; `DEFAULT` if it has none.

    Raises:
        ConfigurationError: transformers cannot open the folder, or it has several templates and none is the default.
    """
    if path.is_dir() and any((path / name).is_file() for name in ("tokenizer_config.json", CHAT_TEMPLATE)):
        opened = open_tokenizer(path)
        try:
            found = opened.get_chat_template() if opened.chat_template else None
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise ConfigurationError(
                f"the chat template of {path} cannot be read ({reason}); write it again"
            ) from error
        named: dict[str, Any] = opened.special_tokens_map
        special = {name: text for name, text in named.items() if isinstance(text, str)}
        if found is not None:
            return ChatTemplate(found, f"the chat template of {path}", False, special)
    end, begin = end_of_text_id(tokenizer, path), tokenizer.encode("").ids[:1]
    numbers = {"bos_token": begin[0] if begin and begin[0] != end else None, "eos_token": end}
    special = {
        name: ("" if number is None else tokenizer.id_to_token(number)) or "" for name, number in numbers.items()
    }
    return ChatTemplate(DEFAULT, f"the default chat template ({path} has none)", True, special)
